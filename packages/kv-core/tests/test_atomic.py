"""A call that is refused, or a transaction that fails, leaves every byte and counter as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_core import (
    DtypeError,
    FixedSlotKVCache,
    FrozenError,
    KVError,
    KVFormat,
    QuantizedLayerKV,
    ShapeError,
    SlotRegion,
)

CONTROL = SlotRegion("control", 0, 1, 2)
HISTORY = SlotRegion("history", 2, 2, 2, extends_length=True)
NONE = SlotRegion("none", 6, 0, 0)
Call = Callable[[FixedSlotKVCache, Callable], Any]


def with_layer_3(pairs: list, side: int, change: Callable) -> list:
    """Return the layers with one tensor of the last layer changed."""
    pair = list(pairs[3])
    pair[side] = change(pair[side])
    return [*pairs[:3], tuple(pair)]


def sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()


# how one tensor of the last of four layers can be wrong
DEFECTS: dict[str, Callable] = {
    "narrower": lambda x: x[..., :-1],
    "fewer heads": lambda x: x[:, :1],
    "fewer tokens": lambda x: x[:, :, :1],
    "another batch": lambda x: x[:1],
    "another rank": lambda x: x[0],
    "another dtype": lambda x: x.double(),
    "half precision": lambda x: x.half(),
    "another device": lambda x: x.to("meta"),
    "sparse": sparse,
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
}

REFUSED: dict[str, Call] = {
    "unknown region": lambda c, d: c.write("histroy", d(4, 2), 0),
    "region of another type": lambda c, d: c.write(0, d(4, 2), 0),
    "region without slots": lambda c, d: c.write("none", d(4, 2), 0),
    "skipped id": lambda c, d: c.write("history", d(4, 2), 3),
    "older id": lambda c, d: c.write("history", d(4, 2), 0),
    "negative id": lambda c, d: c.write("control", d(4, 2), -1),
    "float id": lambda c, d: c.write("history", d(4, 2), 2.0),
    "bool id": lambda c, d: c.write("control", d(4, 2), False),
    "tensor id": lambda c, d: c.write("history", d(4, 2), torch.tensor(2)),
    "too many tokens": lambda c, d: c.write("history", d(4, 3), 2),
    "no tokens": lambda c, d: c.write("history", d(4, 0), 2),
    "too few layers": lambda c, d: c.write("history", d(3, 2), 2),
    "too many layers": lambda c, d: c.write("history", d(5, 2), 2),
    "no layers": lambda c, d: c.write("history", [], 2),
    "not layers": lambda c, d: c.write("history", None, 2),
    "one tensor": lambda c, d: c.write("history", d(1, 2)[0][0], 2),
    "single tensors": lambda c, d: c.write("history", [k for k, _ in d(4, 2)], 2),
    "triples": lambda c, d: c.write("history", [(k, v, v) for k, v in d(4, 2)], 2),
    "reset with more tokens": lambda c, d: c.reset(d(4, 3)),
    "reset with fewer layers": lambda c, d: c.reset(d(3, 2)),
    "load of nothing": lambda c, d: c.load_state_dict({}),
    "load of another cache": lambda c, d: c.load_state_dict(
        FixedSlotKVCache(d(4, 2), capacity=8, regions=[]).state_dict()
    ),
}
for _name, _change in DEFECTS.items():
    for _side in (0, 1):
        _word = ("key", "value")[_side]
        REFUSED[f"write, {_word}: {_name}"] = lambda c, d, change=_change, side=_side: c.write(
            "history", with_layer_3(d(4, 2), side, change), 2
        )
        REFUSED[f"reset, {_word}: {_name}"] = lambda c, d, change=_change, side=_side: c.reset(
            with_layer_3(d(4, 2), side, change)
        )


@pytest.fixture(params=[None, KVFormat.INT8], ids=["fp32", "int8"])
def cache(request: pytest.FixtureRequest, layers: Callable) -> FixedSlotKVCache:
    cache = FixedSlotKVCache(
        layers(4, 2), capacity=7, regions=[CONTROL, HISTORY, NONE], format=request.param
    )
    cache.write("history", layers(4, 2, seed=1), 0)
    cache.write("history", layers(4, 1, seed=2), 1)
    return cache


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_a05_a_refused_call_changes_nothing(
    call: Call, cache: FixedSlotKVCache, layers: Callable, digest: Callable
) -> None:
    before = digest(cache)
    with pytest.raises(KVError):
        call(cache, lambda count, tokens: layers(count, tokens, seed=7))
    assert digest(cache) == before
    cache.write("history", layers(4, 2, seed=3), 2)


@pytest.mark.parametrize("call", ["write", "reset", "construct"])
def test_a05_the_message_names_layer_side_axis_and_both_sizes(
    call: str, cache: FixedSlotKVCache, layers: Callable
) -> None:
    good = layers(4, 2, widths=(64, 64))
    wrong = with_layer_3(good, 1, lambda x: x[..., :63])
    cache = FixedSlotKVCache(good, capacity=6, regions=[HISTORY])
    storage = [tuple(t.repeat(1, 1, 3, 1).fill_(9) for t in pair) for pair in wrong]
    words = r"layer 3 value of the (chunk|prefill|storage) must be .* with D=64, got D=63"
    with pytest.raises(ShapeError, match=words):
        if call == "construct":
            FixedSlotKVCache(good, capacity=6, regions=[HISTORY], storage=storage)
        elif call == "write":
            cache.write("history", wrong, 0)
        else:
            cache.reset(wrong)
    assert all((t == 9).all() for pair in storage for t in pair)


@pytest.mark.parametrize("change", DEFECTS.values(), ids=DEFECTS)
@pytest.mark.parametrize("fmt", [None, KVFormat.INT8])
def test_a05_bad_storage_of_a_later_layer_leaves_the_earlier_ones_alone(
    change: Callable, fmt: KVFormat | None, layers: Callable
) -> None:
    def buffers() -> list:
        dense = [[t.repeat(1, 1, 3, 1).fill_(9) for t in pair] for pair in layers(4, 2)]
        if fmt is None:
            return [tuple(pair) for pair in dense]
        return [
            QuantizedLayerKV(*(t.to(torch.int8) for t in pair), *(t[..., 0].clone() for t in pair))
            for pair in dense
        ]

    for part in range(2 if fmt is None else 4):
        storage = buffers()
        storage[3] = tuple(change(t) if i == part else t for i, t in enumerate(storage[3]))
        with pytest.raises(KVError, match=r"layer 3 (key|value)( scale)? of the storage"):
            FixedSlotKVCache(
                layers(4, 2), capacity=6, regions=[HISTORY], storage=storage, format=fmt
            )
        assert all((t == 9).all() for layer in storage[:3] for t in layer)


def test_a_failed_transaction_restores_every_bit(
    cache: FixedSlotKVCache, layers: Callable, digest: Callable
) -> None:
    before = digest(cache)

    def step(error: BaseException | None) -> None:
        with cache.transaction():
            cache.write("control", layers(4, 1, seed=4), 0)
            cache.write("history", layers(4, 2, seed=5), 1)
            cache.write("history", layers(4, 1, seed=6), 1)
            cache.write("history", layers(4, 2, seed=7), 2)
            cache.write("history", layers(4, 2, seed=8), 3)
            if error:
                raise error

    for error in (ValueError("model"), KeyboardInterrupt(), GeneratorExit()):
        with pytest.raises(type(error)):
            step(error)
        assert digest(cache) == before
    with pytest.raises(KVError), cache.transaction():
        cache.write("history", layers(4, 2, seed=9), 2)
        cache.write("history", layers(4, 2, seed=9), 4)
    assert digest(cache) == before
    step(None)
    after = digest(cache)
    assert after != before and cache.valid("history") == (2, 2) and cache.valid("control") == (1,)


def test_a_failed_first_write_takes_the_length_back(layers: Callable, digest: Callable) -> None:
    cache = FixedSlotKVCache(layers(1, 2), capacity=6, regions=[HISTORY])
    before = digest(cache)
    with pytest.raises(ZeroDivisionError), cache.transaction():
        cache.write("history", layers(1, 2), 0)
        assert cache.length == 4
        _ = 1 / 0
    assert digest(cache) == before and cache.length == 2
    assert cache.write("history", layers(1, 2), 0) == 0


def test_a_transaction_clones_each_written_slot_once(
    layers: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FixedSlotKVCache(layers(2, 2), capacity=100, regions=[SlotRegion("h", 2, 9, 2, True)])
    chunks = [layers(2, 2, seed=i) for i in range(5)]
    cloned, clone = [], torch.Tensor.clone

    def counted(self: torch.Tensor, **options: object) -> torch.Tensor:
        cloned.append(self.shape[2])
        return clone(self, **options)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    cache.write("h", chunks[0], 0)
    assert cloned == []
    with cache.transaction():
        for chunk in chunks:
            cache.write("h", chunk, 1)
    assert cloned == [2] * 4  # a key and a value of two layers
    with cache.transaction():
        cache.write("h", chunks[0], 2)
    assert cloned == [2] * 8


def test_what_replaces_everything_is_refused_inside_a_transaction(
    cache: FixedSlotKVCache, layers: Callable, digest: Callable
) -> None:
    state, before = cache.state_dict(), digest(cache)
    with cache.transaction():
        for name, call in {
            "reset": lambda: cache.reset(layers(4, 2)),
            "load_state_dict": lambda: cache.load_state_dict(state),
            "transaction": lambda: cache.transaction().__enter__(),
        }.items():
            words = rf"{name}\(\) must be called outside of transaction\(\).*let the block end"
            with pytest.raises(FrozenError, match=words):
                call()
        assert digest(cache) == before
        cache.write("history", layers(4, 1, seed=3), 2)
    cache.load_state_dict(state)
    assert digest(cache) == before


def test_a_chunk_is_never_converted(cache: FixedSlotKVCache, layers: Callable) -> None:
    with pytest.raises(DtypeError, match=r"layer 0 key of the chunk must be torch\.float32, got "):
        cache.write("history", layers(4, 2, dtype=torch.float16), 2)
    meta = [(k.to("meta"), v.to("meta")) for k, v in layers(4, 2)]
    words = r"layer 0 key of the chunk must be on cpu, got meta; move it with \.to\('cpu'\)"
    with pytest.raises(DtypeError, match=words):
        cache.write("history", meta, 2)
