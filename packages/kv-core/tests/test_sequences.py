"""Sequence table: what a step says, who shares which block, and what is given back."""

import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_core import (
    BlockAllocator,
    BlockLeak,
    CapacityError,
    DtypeError,
    KVFormat,
    KVLayer,
    KVSpec,
    OutOfBlocks,
    SequenceTable,
    SnapshotError,
    load,
    save,
)
from torch import Tensor


def spec(N: int = 4, fmt: KVFormat = KVFormat.INT8) -> KVSpec:
    return KVSpec(kv_heads=2, head_dim=4, block_size=N, format=fmt)


def paged(blocks: int = 8, N: int = 4, **options: Any) -> SequenceTable:
    layers = [KVLayer.paged(spec(N, fmt), blocks=blocks) for fmt in (KVFormat.INT8, KVFormat.FP32)]
    return SequenceTable(layers, **{"sequences": 4, "max_blocks": 5, **options})


def contiguous(capacity: int = 4, sequences: int = 3, **options: Any) -> SequenceTable:
    layers = [
        KVLayer.contiguous(spec(fmt=fmt), sequences=sequences, capacity=capacity)
        for fmt in (KVFormat.FP32, KVFormat.INT8)
    ]
    return SequenceTable(layers, **{"sequences": 4, **options})


def values(step: Any, first: float) -> Tensor:
    """Rows ``[T, H, D]`` that hold first, first + 1, … everywhere."""
    return (first + torch.arange(step.num_tokens).float())[:, None, None].expand(-1, 2, 4)


def write(table: SequenceTable, step: Any, first: float) -> None:
    rows = values(step, first)
    for layer in table.layers:
        layer.write(rows, -rows, step.slots)


def read(table: SequenceTable, request: Hashable) -> list[float]:
    """What every layer holds for a request; INT8 gives these values back exactly enough."""
    kept = []
    for layer in table.layers:
        k, v = layer.read(table.slots_of(request))
        assert torch.equal(k, -v)
        kept.append([round(float(x), 3) for x in k[:, 0, 0]])
    assert kept[0] == kept[1]
    return kept[0]


def test_a_step_says_where_each_token_goes() -> None:
    table = paged()
    step = table.append({"a": 6, "b": [7, 8, 9]})
    assert step.requests == ("a", "b") and step.reused == {"a": 0, "b": 0} and step.null_block
    assert step.slots.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert step.cu_seqlens.tolist() == [0, 6, 9] and step.context_lens.tolist() == [6, 3]
    assert step.block_table.tolist() == [[1, 2, 0, 0, 0], [3, 0, 0, 0, 0]]
    assert (step.max_query, step.max_context) == (8, 20)
    dtypes = [step.slots, step.positions, step.cu_seqlens, step.block_table, step.context_lens]
    assert [t.dtype for t in dtypes] == [torch.int64] * 2 + [torch.int32] * 3

    step = table.append({"b": 2, "a": 1})
    assert step.slots.tolist() == [15, 16, 10] and step.positions.tolist() == [3, 4, 6]
    assert step.context_lens.tolist() == [5, 7] and step.reused == {}
    assert (table.length("b"), table.context("a"), table.requests) == (5, 7, ("a", "b"))
    assert (table.num_used_blocks, table.num_free_blocks) == (4, 3)
    table.check()


def test_the_step_is_one_object_whose_addresses_never_change() -> None:
    table = paged()

    def addresses(step: Any) -> list[int]:
        names = ("slots", "positions", "cu_seqlens", "block_table", "context_lens")
        assert all(getattr(step, name).is_contiguous() for name in names)
        return [getattr(step, name).data_ptr() for name in names]

    first = table.append({"a": 5})
    before = addresses(first)
    for given in ({"b": 1}, {"a": 1, "b": 1, "c": 7}, {"c": 1}):
        step = table.append(given, pad_sequences=4, pad_tokens=28)
        assert step is first and addresses(step) == before
    assert all(address % 64 == before[0] % 64 for address in before)


def test_padding_stores_nothing_and_reads_nothing() -> None:
    table = paged()
    table.append({"a": 6, "b": 3})
    step = table.append({"b": 1}, pad_sequences=3, pad_tokens=4)
    assert step.slots.tolist() == [15, -1, -1, -1] and step.positions.tolist() == [3, 0, 0, 0]
    assert step.cu_seqlens.tolist() == [0, 1, 1, 1] and step.context_lens.tolist() == [4, 0, 0]
    assert step.block_table.tolist() == [[3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert (step.max_query, step.max_context, step.requests) == (1, 20, ("b",))
    step = table.append({}, pad_sequences=2, pad_tokens=2)
    assert step.slots.tolist() == [-1, -1] and step.cu_seqlens.tolist() == [0, 0, 0]
    assert table.append({}).num_tokens == 0


def test_bounds_hold_and_rarely_change() -> None:
    table = paged(blocks=600, N=1, max_blocks=500, sequences=2)
    assert [table.append({"a": n}).max_query for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
    seen = []
    for _ in range(485):
        step = table.append({"a": 1})
        assert step.context_lens[0] <= step.max_context
        seen.append(step.max_context)
    assert sorted(set(seen)) == [256, 500]
    assert table.append({"b": 1}, pad_tokens=1).max_context == 500


def test_a_published_prefix_is_shared_and_one_token_is_left() -> None:
    table = paged()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    write(table, table.append({"a": prompt}), 10)
    assert table.lookup(prompt) == 0
    assert table.publish("a") == 8 and table.publish("a") == 8
    assert [table.lookup(ids) for ids in (prompt, [*prompt, 9], prompt[:5], prompt[:4])] == [
        4, 8, 4, 0,
    ]  # fmt: skip
    assert table.lookup([9, 2, 3, 4, 5]) == 0
    step = table.append({"b": [*prompt, 9, 10], "c": prompt, "d": len(prompt)})
    assert step.reused == {"b": 8, "c": 4, "d": 0}
    assert step.cu_seqlens.tolist() == [0, 2, 6, 14]
    assert step.positions.tolist() == [8, 9, 4, 5, 6, 7, *range(8)]
    assert step.context_lens.tolist() == [10, 8, 8]
    assert table.blocks_of("b")[:2] == table.blocks_of("a")
    assert table.blocks_of("c")[0] == table.blocks_of("a")[0]
    write(table, step, 50)
    assert read(table, "b") == [10, 11, 12, 13, 14, 15, 16, 17, 50, 51]
    assert read(table, "c") == [10, 11, 12, 13, 52, 53, 54, 55]
    table.check()


def test_a_prefix_outlives_its_sequence_until_its_blocks_are_needed() -> None:
    table = paged()
    write(table, table.append({"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]}), 0)
    table.publish("a")
    table.free("a")
    assert (table.num_free_blocks, table.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])) == (7, 8)
    table.append({"x": 20, "y": 4})  # leaves one free block: the head of the prefix
    assert table.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    with pytest.raises(OutOfBlocks):
        table.append({"b": [1, 2, 3, 4, 5]})  # the head is found, but its rest has no block
    table.truncate("x", 16)
    step = table.append({"b": [1, 2, 3, 4, 5]})
    assert step.reused == {"b": 4}
    write(table, step, 70)
    assert read(table, "b") == [0, 1, 2, 3, 70]


def test_ids_after_tokens_without_ids_are_not_known() -> None:
    table = paged()
    table.append({"a": [1, 2, 3]})
    table.append({"a": 1})
    table.append({"a": [5, 6, 7, 8]})
    assert table.publish("a") == 0
    table.truncate("a", 3)
    table.append({"a": [4, 5, 6, 7, 8]})
    assert table.publish("a") == 8 and table.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_equal_prefixes_that_are_computed_at_once_are_found_once() -> None:
    table = paged()
    prompt = [1, 2, 3, 4, 5]
    table.append({"a": prompt, "b": prompt})
    assert table.publish("a") == table.publish("b") == 4
    table.append({"c": prompt})
    assert table.blocks_of("c")[0] == table.blocks_of("a")[0] != table.blocks_of("b")[0]
    for request in "ac":
        table.free(request)
    table.append({"d": 18})  # takes every free block, the one that is found too
    assert table.lookup(prompt) == 0
    assert table.publish("b") == 4 and table.lookup(prompt) == 4
    table.check()


def test_a_published_block_that_is_written_again_cannot_be_found_any_more() -> None:
    table = paged()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    table.append({"a": prompt})
    table.publish("a")
    table.truncate("a", 6)
    assert table.lookup([*prompt, 9]) == 8
    step = table.append({"a": [70], "b": [*prompt, 9]})
    assert step.reused == {"b": 4} and table.lookup([*prompt, 9]) == 4
    assert step.slots[0] // 4 == 2  # in place, for nobody else holds it


def test_a_request_that_finds_a_block_first_makes_its_owner_copy_it() -> None:
    table = paged()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    write(table, table.append({"a": prompt}), 0)
    table.publish("a")
    table.truncate("a", 6)
    step = table.append({"b": [*prompt, 9], "a": [70]})
    assert step.reused == {"b": 8} and table.blocks_of("b")[:2] == [1, 2]
    assert table.blocks_of("a") == [1, 4]
    write(table, step, 50)
    assert read(table, "a") == [0, 1, 2, 3, 4, 5, 51]
    assert read(table, "b") == [0, 1, 2, 3, 4, 5, 6, 7, 50]


def test_all_forks_but_the_last_copy_the_block_they_share() -> None:
    table = paged(blocks=6)
    write(table, table.append({"a": 6}), 0)
    table.fork("a", "b")
    table.fork("a", "c")
    assert table.num_used_blocks == 2
    step = table.append({"a": 1, "b": 1, "c": 1})
    assert table.num_used_blocks == 4
    write(table, step, 90)
    for at, request in enumerate("abc"):
        assert read(table, request) == [0, 1, 2, 3, 4, 5, 90 + at]
    table.check()


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    table = paged(blocks=3)
    write(table, table.append({"a": 6}), 0)
    table.fork("a", "b")
    before = table.state_dict()["meta"], [layer.state_dict() for layer in table.layers]
    with pytest.raises(OutOfBlocks, match=r"needs 1 blocks \(1 of them to copy"):
        table.append({"a": 1, "b": 1})
    assert table.state_dict()["meta"] == before[0]
    for layer, state in zip(table.layers, before[1], strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, state["tensors"][name])
    table.free("b")
    table.append({"a": 1})


def test_evicting_for_one_request_makes_room_for_another_in_the_same_step() -> None:
    table = paged(blocks=4, window=4)
    table.append({"a": 12})
    assert table.num_free_blocks == 0
    step = table.append({"b": 4, "a": 1})
    assert table.blocks_of("a")[0] == 3 and table.context("a") == 5
    assert step.positions.tolist() == [0, 1, 2, 3, 12] and step.context_lens.tolist() == [4, 5]
    table.check()


def test_a_window_takes_only_the_blocks_of_a_prefix_that_it_sees() -> None:
    table = paged(window=3)
    prompt = list(range(1, 10))
    write(table, table.append({"a": prompt}), 0)
    table.publish("a")
    step = table.append({"b": prompt})
    assert step.reused == {"b": 8} and step.positions.tolist() == [8]
    assert table.blocks_of("b")[0] == table.blocks_of("a")[1] and table.context("b") == 5
    write(table, step, 60)
    assert read(table, "b") == [4, 5, 6, 7, 60]
    table.check()


def test_a_chain_longer_than_a_row_refuses_the_prompt() -> None:
    table = paged(N=1, max_blocks=2)
    table.append({"a": [1, 2]})
    table.publish("a")
    table.evict("a", 1)
    table.append({"a": [3]})
    table.publish("a")
    table.evict("a", 2)
    table.append({"a": [4]})
    table.publish("a")
    assert table.lookup([1, 2, 3, 4, 5]) == 4
    with pytest.raises(CapacityError, match="request 'b' needs 5 blocks"):
        table.append({"b": [1, 2, 3, 4, 5]})
    table.check()


def test_evicted_blocks_can_still_be_found() -> None:
    table = paged()
    write(table, table.append({"a": list(range(9))}), 0)
    table.publish("a")
    table.evict("a", 4)
    assert table.publish("a") == 4 and table.lookup(list(range(9))) == 8
    assert table.append({"b": list(range(9))}).reused == {"b": 8}


def test_freeing_one_of_two_keeps_what_they_share() -> None:
    table = paged()
    write(table, table.append({"a": 6}), 0)
    table.fork("a", "b")
    table.free("a")
    assert read(table, "b") == [0, 1, 2, 3, 4, 5] and table.requests == ("b",)
    table.free("b")
    assert table.num_free_blocks == 7 and table.requests == ()
    table.check()


def test_contiguous_layers_have_one_block_for_each_sequence() -> None:
    table = contiguous()
    step = table.append({"a": 3, "b": [1, 2, 3, 4]})
    assert not step.null_block and step.block_table.tolist() == [[0], [1]]
    assert step.slots.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert table.max_blocks == 1 and table.num_free_blocks == 1
    assert table.publish("b") == 0 and table.lookup([1, 2, 3, 4, 5]) == 0
    write(table, step, 0)
    table.fork("a", "c")
    step = table.append({"c": 1, "a": 1})
    write(table, step, 30)
    assert read(table, "a") == [0, 1, 2, 31] and read(table, "c") == [0, 1, 2, 30]
    with pytest.raises(OutOfBlocks):
        table.append({"d": 1})
    table.check()


def test_growing_contiguous_layers_keeps_every_token() -> None:
    table = contiguous()
    write(table, table.append({"a": 3, "b": 4}), 0)
    with pytest.raises(CapacityError, match=r"ensure_capacity\(\)"):
        table.append({"b": 1})
    assert not table.ensure_capacity(4) and table.ensure_capacity(5)
    assert table.block_size == 64 == table.layers[1].capacity
    step = table.append({"b": 60, "a": 1})
    write(table, step, 40)
    assert read(table, "a") == [0, 1, 2, 100] and read(table, "b")[:6] == [3, 4, 5, 6, 40, 41]
    assert step.max_context == 64
    assert table.step_tokens == 3 * 64


def test_a_frozen_layer_stops_the_growth_of_all() -> None:
    table = contiguous()
    table.layers[1].frozen = True
    addresses = [t.data_ptr() for layer in table.layers for t in layer.tensors().values()]
    with pytest.raises(Exception, match=r"layers\[1\] must not be frozen"):
        table.ensure_capacity(5)
    assert table.block_size == 4
    assert addresses == [t.data_ptr() for layer in table.layers for t in layer.tensors().values()]
    assert not table.ensure_capacity(3)


def test_request_ids_may_be_anything_hashable() -> None:
    table = paged()
    ids: list[Hashable] = ["a", 1, ("x", 2), None, frozenset({3})]
    table.append({request: 1 for request in ids[:3]})
    table.append({request: 1 for request in ids[3:]})
    assert table.requests == tuple(ids) and table.length(("x", 2)) == 1
    table.check()
    with pytest.raises(SnapshotError, match="a request must be a str or int to be saved"):
        table.state_dict()


def test_check_finds_a_block_that_the_table_does_not_know() -> None:
    table = paged()
    table.append({"a": 6})
    table.allocator.allocate(1, "nobody")
    with pytest.raises(BlockLeak, match="block 3 is held by 'nobody', who is gone"):
        table.check()
    table.allocator.free([3], "nobody")
    table.allocator.allocate(1, "a")
    with pytest.raises(BlockLeak, match="request 'a' must hold 2 blocks for 6 tokens"):
        table.check()


def test_a_saved_table_goes_on_as_the_first_would(tmp_path: Path) -> None:
    table = paged(window=6)
    write(table, table.append({"a": list(range(9)), 7: 3}), 0)
    table.publish("a")
    table.fork("a", "b")
    table.append({"b": 4})
    table.free(7)
    save(tmp_path / "table", table.state_dict())
    for index, layer in enumerate(table.layers):
        save(tmp_path / f"layer{index}", layer.state_dict())
    twin = paged(window=6)
    twin.append({"x": 20})
    pool = twin.allocator
    for index, layer in enumerate(twin.layers):
        layer.load_state_dict(load(tmp_path / f"layer{index}"))
    twin.load_state_dict(load(tmp_path / "table"))
    assert twin.allocator is pool and repr(twin) == repr(table)
    for given in ({"a": [9, 10]}, {"c": list(range(9)), "b": 1}, {"d": 4}):
        steps = [one.append(given) for one in (table, twin)]
        for one, step in zip((table, twin), steps, strict=True):
            write(one, step, 20)
        assert steps[0].slots.tolist() == steps[1].slots.tolist()
        assert steps[0].reused == steps[1].reused
    assert [read(table, r) for r in "abcd"] == [read(twin, r) for r in "abcd"]
    twin.check()


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta, tensors: meta.pop("sequences"),
        lambda meta, tensors: meta.pop("allocator"),
        lambda meta, tensors: tensors.pop("ids"),
        lambda meta, tensors: tensors.update(ids=torch.arange(4)),
        lambda meta, tensors: tensors.update(ids=torch.arange(10)),
        lambda meta, tensors: meta["spec"].update(window=3),
        lambda meta, tensors: meta["spec"].update(block_size=8),
        lambda meta, tensors: meta["sequences"].pop(),
        lambda meta, tensors: meta["sequences"].append(meta["sequences"][0]),
        lambda meta, tensors: meta["sequences"][0].pop(),
        lambda meta, tensors: meta["sequences"][0].__setitem__(0, ["a"]),
        lambda meta, tensors: meta["sequences"][0].__setitem__(1, 99),
        lambda meta, tensors: meta["sequences"][0].__setitem__(1, -1),
        lambda meta, tensors: meta["sequences"][0].__setitem__(2, 4),
        lambda meta, tensors: meta["sequences"][0].__setitem__(3, [1, 2]),
        lambda meta, tensors: meta["sequences"][0].__setitem__(3, [1, 2, 2**40]),
        lambda meta, tensors: meta["sequences"][0].__setitem__(3, [1, 2, 3, 4, 5, 6]),
        lambda meta, tensors: meta["sequences"][0].__setitem__(4, 2.5),
        lambda meta, tensors: meta["allocator"]["free"].pop(),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(edit: Any) -> None:
    table = paged()
    table.append({"a": list(range(9)), "b": 3})
    state = table.state_dict()
    edit(state["meta"], state["tensors"])
    twin = paged()
    twin.append({"x": [1, 2, 3, 4, 5]})
    before = twin.state_dict()
    with pytest.raises(SnapshotError):
        twin.load_state_dict(state)
    assert twin.state_dict()["meta"] == before["meta"]
    assert torch.equal(twin.state_dict()["tensors"]["ids"], before["tensors"]["ids"])


def test_a_table_made_in_inference_mode_works_outside() -> None:
    with torch.inference_mode():
        table = paged()
        table.append({"a": 3})
    assert table.append({"a": 1}).slots.tolist() == [7]
    with torch.inference_mode():
        assert table.append({"a": 1}).slots.tolist() == [8]


def test_the_representation_says_settings_and_counters() -> None:
    table = paged(window=6)
    table.append({"a": 6})
    assert repr(table) == (
        "SequenceTable(paged, layers=2, P=8, N=4, sequences=4, max_blocks=5, step_tokens=28, "
        "window=6, requests=1, tokens=6, blocks=2 used + 5 free + 1 reserved)"
    )
    assert "BlockAllocator(blocks=8, reserved=1, used=2, free=5, published=0)" == repr(
        table.allocator
    )
    assert "contiguous" in repr(contiguous())


def test_sizes_are_what_was_asked_for() -> None:
    table = paged(step_tokens=7)
    assert table.step_tokens == 7 and table.is_paged and table.window is None
    assert paged(sequences=50).step_tokens == 50  # a token of padding for every row
    assert paged(sequences=1).step_tokens == 20 and paged(sequences=2).step_tokens == 28
    assert contiguous().step_tokens == 12 and contiguous(sequences=1).step_tokens == 4
    with pytest.raises(CapacityError, match="8 new tokens, got room for step_tokens=7"):
        table.append({"a": 8})
    assert table.append({"a": 7}).num_tokens == 7
    assert paged().blocks_for(0) == 0 and paged().blocks_for(4) == 1 and paged().blocks_for(5) == 2


def test_layers_that_grew_without_the_table_end_up_alike() -> None:
    spec = KVSpec(kv_heads=1, head_dim=4, format=KVFormat.FP32)
    for tokens in (65, 151, 193, 400):
        layers = [KVLayer.contiguous(spec, sequences=2, capacity=64) for _ in range(3)]
        table = SequenceTable(layers, sequences=2)
        table.append({"x": 3})
        layers[1].ensure_capacity(150)
        assert table.ensure_capacity(tokens)
        assert len({layer.capacity for layer in layers}) == 1 and layers[0].capacity >= tokens
        table.append({"x": 1})


def test_sharing_many_blocks_takes_a_time_that_grows_with_their_number() -> None:
    def taken(blocks: int) -> float:
        allocator = BlockAllocator(blocks + 1)
        held = allocator.allocate(blocks, "a")
        start = time.perf_counter()
        allocator.share(held, "b")
        return time.perf_counter() - start

    # 16 times the blocks: about 20 times as long, where looking each one up in the rest takes 200
    assert min(taken(16_000) for _ in range(3)) < 60 * min(taken(1_000) for _ in range(3))


@pytest.mark.parametrize("ids", [np.array(2.5), "ab"], ids=repr)
def test_what_is_neither_a_count_nor_ids_is_refused(ids: Any) -> None:
    spec = KVSpec(kv_heads=1, head_dim=4, format=KVFormat.FP32)
    table = SequenceTable([KVLayer.paged(spec, blocks=4)], sequences=2, max_blocks=2)
    with pytest.raises(DtypeError, match="tokens of 'a' must be"):
        table.append({"a": ids})
