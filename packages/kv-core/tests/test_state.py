"""States of a cache: what they hold, and what is refused on load."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_core import FixedSlotKVCache, KVFormat, SlotRegion, SnapshotError, load, save

CONTROL = SlotRegion("control", 0, 2, 2)


def build(layers: Callable, fmt: KVFormat | None = None, **options: Any) -> FixedSlotKVCache:
    settings = {"capacity": 10, "regions": regions(), "format": fmt, **options}
    return FixedSlotKVCache(layers(2, 4), **settings)


def regions(**history: Any) -> list[SlotRegion]:
    fields = {"name": "history", "start": 4, "slots": 3, "slot_tokens": 2, "extends_length": True}
    return [CONTROL, SlotRegion(**{**fields, **history})]


def filled(layers: Callable, fmt: KVFormat | None = None) -> FixedSlotKVCache:
    cache = build(layers, fmt)
    for chunk_id, tokens in enumerate([2, 1, 2, 1]):
        cache.write("history", layers(2, tokens, seed=chunk_id), chunk_id)
    cache.write("control", layers(2, 1, seed=8), 0)
    return cache


@pytest.mark.parametrize("fmt", [None, KVFormat.INT8])
def test_a_state_restores_bytes_and_counters_through_a_file(
    fmt: KVFormat | None, layers: Callable, digest: Callable, tmp_path: Path
) -> None:
    cache = filled(layers, fmt)
    state = cache.state_dict()
    assert json.loads(json.dumps(state["meta"])) == state["meta"]
    save(tmp_path / "cache.safetensors", state)
    twin = build(layers, fmt)
    for chunk_id in range(2):
        twin.write("history", layers(2, 2, seed=50 + chunk_id), chunk_id)
    addresses = digest(twin)[2]
    twin.load_state_dict(load(tmp_path / "cache.safetensors"))
    assert digest(twin)[:2] == digest(cache)[:2] and digest(twin)[2] == addresses
    for c in (cache, twin):
        assert c.write("history", layers(2, 2, seed=60), 4) == 1
    assert digest(twin)[:2] == digest(cache)[:2]


def test_a_state_is_a_copy(layers: Callable) -> None:
    cache = filled(layers)
    state = cache.state_dict()
    before = copy.deepcopy(state)
    cache.write("history", layers(2, 2, seed=70), 4)
    assert state["meta"] == before["meta"]
    assert all(torch.equal(state["tensors"][n], t) for n, t in before["tensors"].items())
    assert state["tensors"]["layer.1.v"].shape == (2, 2, 10, 6)


def test_a_state_in_the_middle_of_the_first_round_loads(layers: Callable, digest: Callable) -> None:
    cache = build(layers)
    cache.write("history", layers(2, 1, seed=1), 0)
    twin = filled(layers)
    twin.load_state_dict(cache.state_dict())
    assert digest(twin)[:2] == digest(cache)[:2]
    assert (twin.length, twin.valid_tokens, twin.valid("history")) == (6, 5, (1, 0, 0))


def test_tensors_inside_the_cache_s_own_buffers_load(layers: Callable, digest: Callable) -> None:
    cache = filled(layers)
    state, before = cache.state_dict(), digest(cache)
    shifted = {f"layer.{i}.{n}": getattr(cache.buffers()[1 - i], n) for i in (0, 1) for n in "kv"}
    plain = {name: tensor.clone() for name, tensor in shifted.items()}
    cache.load_state_dict({"meta": state["meta"], "tensors": shifted})
    aliased = digest(cache)
    cache.load_state_dict({"meta": state["meta"], "tensors": plain})
    assert digest(cache) == aliased != before


def test_rows_that_are_not_valid_are_cleared_on_load(layers: Callable, digest: Callable) -> None:
    cache = filled(layers)
    before, state = digest(cache), cache.state_dict()
    assert cache.valid("control") == (1, 2) and cache.valid("history") == (1, 1, 2)
    for tensor in state["tensors"].values():
        for row in (1, 5, 7):
            assert not tensor[:, :, row].any()
            tensor[:, :, row] = 9
    cache.load_state_dict(state)
    assert digest(cache) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity": 11}, "capacity is 11 here and 10 in the state"),
        ({"fmt": KVFormat.INT8}, "format is 'INT8' here and 'FP32' in the state"),
        ({"regions": regions(slots=2)}, "regions.history.slots is 2 here and 3 in the state"),
        ({"regions": regions(name="past")}, "regions.history is None here and {.* in the state"),
        ({"regions": regions()[1:]}, "regions.control is None here"),
    ],
)
def test_a_state_of_another_spec_is_refused_by_name(
    change: dict[str, Any], words: str, layers: Callable, digest: Callable
) -> None:
    cache = build(layers, **change)
    before = digest(cache)
    with pytest.raises(SnapshotError, match=f"made by another FixedSlotKVCache: .*{words}"):
        cache.load_state_dict(filled(layers).state_dict())
    assert digest(cache) == before


def test_layers_of_another_size_are_named(layers: Callable) -> None:
    other = FixedSlotKVCache(layers(2, 4, widths=(4, 8)), capacity=10, regions=regions())
    words = r"layers\[0\]\.v\[3\] is 8 here and 6 in the state"
    with pytest.raises(SnapshotError, match=words):
        other.load_state_dict(filled(layers).state_dict())
    fewer = FixedSlotKVCache(layers(1, 4), capacity=10, regions=regions())
    words = "layers is a list of 1 here and a list of 2 in the state"
    with pytest.raises(SnapshotError, match=words):
        fewer.load_state_dict(filled(layers).state_dict())


EDITS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no length": (lambda s: s["meta"].pop("length"), "KeyError.'length'"),
    "text": (lambda s: s["meta"].update(length="10"), "whole numbers under length, newest"),
    "fraction": (lambda s: s["meta"]["newest"].update(history=3.0), "whole numbers"),
    "length": (lambda s: s["meta"].update(length=8), "length in the state must be 10 by its"),
    "newest": (
        lambda s: s["meta"]["newest"].update(history=0),
        "'history' must agree, got newest 0",
    ),
    "too negative": (lambda s: s["meta"]["newest"].update(history=-2), "got newest -2"),
    "valid": (lambda s: s["meta"]["valid"].update(history=[1, 1, 3]), r"valid \(1, 1, 3\)"),
    "valid slots": (lambda s: s["meta"]["valid"].update(history=[1, 1]), r"valid \(1, 1\)"),
    "no tensor": (lambda s: s["tensors"].pop("layer.1.v"), "missing or unknown: layer.1.v"),
    "a tensor more": (lambda s: s["tensors"].update(x=torch.zeros(1)), "missing or unknown: x"),
    "shape": (
        lambda s: s["tensors"].update({"layer.0.k": torch.zeros(2, 2, 9, 4)}),
        r"'layer.0.k' of the state must be \[2, 2, 10, 4\] torch.float32, got \[2, 2, 9, 4\]",
    ),
    "dtype": (
        lambda s: s["tensors"].update({"layer.0.k": torch.zeros(2, 2, 10, 4).half()}),
        "got .*torch.float16",
    ),
    "not a tensor": (lambda s: s["tensors"].update({"layer.0.k": [1]}), "map strings to tensors"),
    "sparse": (
        lambda s: s["tensors"].update({"layer.0.k": torch.zeros(2, 2, 10, 4).to_sparse()}),
        "must be dense and hold data",
    ),
    "meta list": (lambda s: s.update(meta=[]), "meta of the state must be a dict, got list"),
    "no spec": (lambda s: s["meta"].pop("spec"), r"dict meta\['spec'\], got NoneType"),
    "spec with a set": (lambda s: s["meta"]["spec"].update(x={1}), r"JSON dict meta\['spec'\]"),
    "spec list": (lambda s: s["meta"].update(spec=[1]), r"JSON dict meta\['spec'\], got list"),
    "no tensors": (lambda s: s.pop("tensors"), r"keys 'meta' and 'tensors', got \['meta'\]"),
    "tensors list": (lambda s: s.update(tensors=[]), "tensors of the state must be a dict"),
}


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_an_edited_state_is_refused_and_changes_nothing(
    edit: Callable, words: str, layers: Callable, digest: Callable
) -> None:
    cache = filled(layers)
    before, state = digest(cache), cache.state_dict()
    edit(state)
    with pytest.raises(SnapshotError, match=words):
        cache.load_state_dict(state)
    assert digest(cache) == before


def test_what_is_no_state_at_all_is_refused(layers: Callable) -> None:
    with pytest.raises(SnapshotError, match="keys 'meta' and 'tensors', got list; pass what"):
        build(layers).load_state_dict([])  # type: ignore[arg-type]
