"""Faults that people met with paged caches, as far as the table and its blocks show them."""

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from kv_core import (
    CapacityError,
    KVError,
    KVFormat,
    KVLayer,
    KVSpec,
    OutOfBlocks,
    RollbackTooDeep,
    SequenceTable,
    SpecError,
    Step,
)

FORMATS = (KVFormat.FP16, KVFormat.INT8)


def make(blocks: int, N: int, *, formats: Any = FORMATS, **options: Any) -> SequenceTable:
    layers = [
        KVLayer.paged(
            KVSpec(kv_heads=1, head_dim=2, block_size=N, format=fmt),
            blocks=blocks,
        )
        for fmt in formats
    ]
    for layer in layers:  # what was never written is no number
        for tensor in layer.tensors().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
    return SequenceTable(layers, **{"sequences": 4, "max_blocks": 8, **options})


def put(table: SequenceTable, given: dict[Hashable, Any], **pads: Any) -> Step:
    """Append values, one token for each."""
    step = table.append({request: len(new) for request, new in given.items()}, **pads)
    rows = [float(x) for new in given.values() for x in new]
    rows += [777.0] * (step.num_tokens - len(rows))
    k = torch.tensor(rows)[:, None, None].expand(-1, 1, 2)
    for layer in table.layers:
        layer.write(k, -k, step.slots)
    return step


def held(table: SequenceTable, request: Hashable) -> list[float]:
    """The values that all layers hold for a request."""
    found = []
    for layer in table.layers:
        k, v = layer.read(table.slots_of(request), torch.float32)
        assert torch.equal(k, -v)
        found.append([round(float(x), 2) for x in k[:, 0, 0]])
    assert all(values == found[0] for values in found)
    return found[0]


def seen(table: SequenceTable, step: Step, request: Hashable, window: int) -> list[list[float]]:
    """The values that each new query of a request attends, by the definition."""
    b = step.requests.index(request)
    values, (start, end) = held(table, request), step.cu_seqlens[b : b + 2].tolist()
    last = [int(step.context_lens[b]) - (end - start) + i for i in range(end - start)]
    return [values[max(0, e - window + 1) : e + 1] for e in last]


@pytest.mark.parametrize("N", [1, 2, 3, 16])
def test_a10_one_step_larger_than_the_window(N: int) -> None:
    table = make(20, N, window=4, max_blocks=9)
    put(table, {"a": range(3)})
    step = put(table, {"a": range(3, 9)})
    attended = seen(table, step, "a", 4)
    assert attended[0] == [0, 1, 2, 3] and attended[5] == [5, 6, 7, 8]
    step = put(table, {"a": [9]})
    assert seen(table, step, "a", 4) == [[6, 7, 8, 9]]
    assert table.context("a") == 10 - 6 // N * N


def test_a10_a_step_that_cannot_be_held_is_refused_with_the_numbers() -> None:
    table = make(20, 1, window=4, max_blocks=4)
    put(table, {"a": range(3)})
    with pytest.raises(CapacityError, match=r"needs 9 blocks .* got room for 4"):
        table.append({"a": 6})
    assert held(table, "a") == [0, 1, 2]


@pytest.mark.parametrize("N", [1, 2, 4])
def test_a11_no_going_back_behind_what_was_evicted(N: int) -> None:
    table = make(20, N, window=4)
    for value in range(1, 9):
        put(table, {"a": [value]})
    kept = held(table, "a")
    assert kept[-4:] == [5, 6, 7, 8]
    # the query at position 6 would see the tokens 3, 4, 5, 6, and 3 is gone
    with pytest.raises(RollbackTooDeep, match=r"tokens \[3, 4\) again"):
        table.truncate("a", 6)
    assert held(table, "a") == kept
    table.truncate("a", 7)
    step = put(table, {"a": [70]})
    assert seen(table, step, "a", 4) == [[5, 6, 7, 70]] and step.positions.tolist() == [7]


def test_a11_without_a_window_only_what_was_evicted_is_out_of_reach() -> None:
    table = make(8, 2)
    put(table, {"a": range(8)})
    table.evict("a", 5)
    with pytest.raises(RollbackTooDeep, match=r"tokens \[3, 4\) again"):
        table.truncate("a", 3)
    table.truncate("a", 4)
    assert table.context("a") == 0 and table.length("a") == 4 and table.num_used_blocks == 0
    step = put(table, {"a": [40]})
    assert step.positions.tolist() == [4] and held(table, "a") == [40]


def test_a11_staying_where_it_is_needs_nothing_that_is_gone() -> None:
    table = make(8, 2, window=6)
    put(table, {"a": range(8)})
    table.evict("a", 8)
    table.truncate("a", 8)
    with pytest.raises(RollbackTooDeep, match="keep its length at 8 or more"):
        table.truncate("a", 7)


def test_a12_zero_and_oversize_truncation() -> None:
    table = make(8, 2)
    put(table, {"a": [1, 2, 3]})
    for length in (-5, 4, 3 - 5):
        with pytest.raises(SpecError, match="must be between 0 and 3"):
            table.truncate("a", length)
    assert held(table, "a") == [1, 2, 3]
    table.truncate("a", 3)
    assert table.length("a") == 3
    table.truncate("a", 0)
    assert (table.length("a"), table.num_used_blocks, table.requests) == (0, 0, ("a",))
    put(table, {"a": [9]})
    assert held(table, "a") == [9]


def test_b06_a_step_of_the_table_never_disagrees_with_itself() -> None:
    table = make(12, 4, max_blocks=4, window=9)
    lengths = {"a": 1, "b": 7, "c": 4}
    put(table, {request: range(n) for request, n in lengths.items()})
    for turn in range(12):
        step = put(table, {"a": [1], "b": [1]} if turn % 2 else {"b": [1], "c": [1], "a": [1]})
        assert step.cu_seqlens[0] == 0 and (step.cu_seqlens.diff() >= 0).all()
        assert step.cu_seqlens[-1] <= step.num_tokens
        for row, context in zip(step.block_table.tolist(), step.context_lens.tolist(), strict=True):
            used = row[: -(-context // 4)]
            assert 0 < context <= 4 * len(row) and len(set(used)) == len(used)
            assert all(0 < block < 12 for block in used)


@pytest.mark.parametrize(
    "change",
    [
        {"context_lens": torch.zeros(2, dtype=torch.int32)},
        {"cu_seqlens": torch.zeros(1, dtype=torch.int32)},
        {"block_table": torch.zeros(2, dtype=torch.int32)},
        {"slots": torch.zeros(1)},
        {"positions": torch.zeros(2, dtype=torch.int64)},
        {"max_context": -1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_b06_a_step_of_ones_own_is_checked_without_reading_it(change: dict[str, Any]) -> None:
    parts = {
        "slots": torch.zeros(1, dtype=torch.int64),
        "positions": torch.zeros(1, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "context_lens": torch.ones(1, dtype=torch.int32),
        "max_query": 1,
        "max_context": 8,
    }
    Step(**parts)
    with pytest.raises(KVError):
        Step(**{**parts, **change})


def test_b07_blocks_go_when_the_next_query_does_not_see_them() -> None:
    gone = {}
    for tokens in range(1, 16):
        table = make(20, 4, window=6, max_blocks=9)
        put(table, {"a": range(tokens)})
        blocks = table.blocks_of("a")
        put(table, {"a": [99]})
        gone[tokens] = [i for i, b in enumerate(blocks) if b not in table.blocks_of("a")]
        assert table.num_used_blocks == len(table.blocks_of("a"))
    assert gone[6] == gone[8] == [] and gone[9] == gone[12] == [0] and gone[13] == [0, 1]


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
def test_b07_every_residue_sees_its_window_and_no_block_more(N: int, window: int) -> None:
    table = make(5 + (window + 3) // N, N, window=window, max_blocks=11)
    length = 0
    for count in (3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 3, 1, 1):
        step = put(table, {"a": [(length + i) % 100 for i in range(count)]})
        for i, values in enumerate(seen(table, step, "a", window)):
            first = max(0, length + i - window + 1)
            assert values == [x % 100 for x in range(first, length + i + 1)]
        dropped = table.length("a") - table.context("a")
        assert dropped == max(0, length - window + 1) // N * N
        length += count


def test_b09_a_prefix_is_not_found_in_a_block_that_was_filled_again() -> None:
    table = make(3, 2, max_blocks=2)
    prefixes = {"p": [1, 2, 3, 4], "q": [5, 6, 7, 8]}
    for value, (request, ids) in enumerate(prefixes.items()):
        step = table.append({request: ids})
        assert step.reused == {request: 0}
        for layer in table.layers:
            rows = torch.full((4, 1, 2), float(value + 1))
            layer.write(rows, -rows, step.slots)
        table.publish(request)
        table.free(request)
    assert table.lookup([1, 2, 3, 4, 9]) == 0
    assert table.lookup([5, 6, 7, 8, 9]) == 4
    table.append({"r": [5, 6, 7]})
    assert held(table, "r")[:2] == [2, 2]


def test_b11_appending_into_a_shared_half_full_block() -> None:
    table = make(8, 4)
    put(table, {"a": range(6)})
    assert table.blocks_of("a") == [1, 2]
    table.fork("a", "b")
    put(table, {"b": [60]})
    assert table.blocks_of("b") == [1, 3]
    put(table, {"a": [61]})
    count = table.allocator.count
    assert (count(1), count(2), count(3)) == (2, 1, 1)
    assert held(table, "a")[6] == 61 and held(table, "b")[6] == 60
    table.truncate("b", 5)
    put(table, {"b": [50, 51]})
    assert held(table, "b") == [0, 1, 2, 3, 4, 50, 51]
    assert held(table, "a") == [0, 1, 2, 3, 4, 5, 61]
    # back into the block that both hold
    table.truncate("b", 2)
    put(table, {"b": [20]})
    assert held(table, "b") == [0, 1, 20] and held(table, "a") == [0, 1, 2, 3, 4, 5, 61]
    assert count(1) == 1
    table.check()


def test_b12_the_row_has_room_for_extra_tokens() -> None:
    table = make(8, 4, max_blocks=4)
    assert table.blocks_for(16) == 4 and table.blocks_for(16, extra=3) == 5
    put(table, {"a": range(16)})
    with pytest.raises(CapacityError, match=r"needs 5 blocks .* got room for 4"):
        table.append({"a": 3})
    table = make(8, 4, max_blocks=table.blocks_for(16, extra=3))
    put(table, {"a": range(16)})
    put(table, {"a": [16, 17, 18]})
    table.truncate("a", 16)
    with pytest.raises(SpecError):
        table.blocks_for(16, extra=-3)


def test_b14_growth_clears_before_it_returns() -> None:
    spec = KVSpec(kv_heads=1, head_dim=2, format=KVFormat.INT8)
    table = SequenceTable([KVLayer.contiguous(spec, sequences=2, capacity=2)], sequences=2)
    put(table, {"a": [1, 2], "b": [3]})
    table.ensure_capacity(3)
    put(table, {"a": range(10, 20), "b": [4]})
    assert held(table, "a") == [1, 2, *range(10, 20)] and held(table, "b") == [3, 4]
    layer = table.layers[0]
    assert not layer.k[:, 12:].any() and not layer.k_scale[:, 12:].any()


def test_b15_state_follows_the_request_and_not_its_row() -> None:
    table, alone = make(12, 2), make(12, 2)
    table.append({"c": 3})  # moves all blocks, so that equal ids cannot hide a fault
    parked = table.slots_of("c")
    steps: list[dict[Hashable, Any]] = [
        {"a": [1, 2, 3], "b": [50]},
        {"b": [51, 52], "a": [4]},
        {"b": [53]},
        {"a": [5], "b": [54]},
    ]
    for number, given in enumerate(steps):
        pads = {"pad_sequences": 2, "pad_tokens": 4} if number == 2 else {}
        step = put(table, given, **pads)
        for b, (request, new) in enumerate(given.items()):
            put(alone, {request: new})
            assert held(table, request) == held(alone, request)
            start, end = step.cu_seqlens[b : b + 2].tolist()
            length = table.length(request)
            assert step.positions[start:end].tolist() == list(range(length - len(new), length))
    for layer in table.layers:
        assert not (layer.read(torch.arange(24))[0] == 777).any()
    assert table.slots_of("c").tolist() == parked.tolist()


def test_c05_reordering_beams_moves_whole_histories() -> None:
    table = make(12, 4)
    put(table, {"beam 0": range(1, 7), "beam 1": range(100, 106)})
    for beam, source in enumerate([1, 0]):
        table.fork(f"beam {source}", f"next {beam}")
    for beam in (0, 1):
        table.free(f"beam {beam}")
        table.fork(f"next {beam}", f"beam {beam}")
        table.free(f"next {beam}")
    assert held(table, "beam 0") == [100, 101, 102, 103, 104, 105]
    assert held(table, "beam 1") == [1, 2, 3, 4, 5, 6]
    assert table.num_used_blocks == 4
    put(table, {"beam 0": [7], "beam 1": [8]})
    assert held(table, "beam 0")[-2:] == [105, 7] and held(table, "beam 1")[-2:] == [6, 8]
    table.check()


def test_c05_a_copied_block_reads_as_the_first() -> None:
    table = make(8, 4)
    put(table, {"a": range(12)})
    for layer in table.layers:
        for tensor in layer.tensors().values():
            tensor[5] = 9
        layer.copy_blocks([3], [5])
        for old, new in zip(
            layer.read(torch.arange(12, 16)), layer.read(torch.arange(20, 24)), strict=True
        ):
            assert torch.equal(old, new)


def test_c05_trimming_reaches_every_layer() -> None:
    table = make(20, 16, max_blocks=16)
    put(table, {"a": [i % 100 for i in range(253)]})
    assert table.num_used_blocks == 16
    table.truncate("a", 17)
    assert table.length("a") == table.slots_of("a").numel() == 17
    assert table.num_used_blocks == 2 and held(table, "a") == list(range(17))


def test_e18_frames_that_are_no_whole_number_of_blocks() -> None:
    frame, N = 30 * 52, 16
    spec = KVSpec(kv_heads=1, head_dim=2, block_size=N, format=KVFormat.INT8)
    layer = KVLayer.paged(spec, blocks=300)
    table = SequenceTable([layer], sequences=1, max_blocks=299)
    assert frame % N == 8 and table.blocks_for(3 * frame) == 293
    for value in (1, 2, 3):
        put(table, {"clip": [value] * frame})
    assert table.num_used_blocks == 293 and table.context("clip") == 4680
    straddling = table.blocks_of("clip")[frame // N]

    table.evict("clip", frame)
    assert table.num_used_blocks == 293 - 97 and table.blocks_of("clip")[0] == straddling
    assert held(table, "clip") == [1] * 8 + [2] * frame + [3] * frame
    step = put(table, {"clip": [4] * frame})
    assert step.positions[0] == 3 * frame and step.context_lens[0] == 8 + 3 * frame
    table.evict("clip", 2 * frame)
    assert held(table, "clip") == [3] * frame + [4] * frame
    assert straddling not in table.blocks_of("clip")
    table.evict("clip", 2 * frame)  # the same again evicts nothing
    assert table.context("clip") == 2 * frame and table.num_used_blocks == 195
    table.evict("clip", 4 * frame)
    assert table.num_used_blocks == 0 and table.length("clip") == 4 * frame


def test_a_full_pool_serves_again_when_something_is_given_back() -> None:
    table = make(4, 2)
    put(table, {"a": range(6)})
    with pytest.raises(OutOfBlocks, match=r"needs 1 blocks .* got 0 free of 4"):
        table.append({"a": 1})
    table.evict("a", 2)
    put(table, {"a": [6]})
    assert held(table, "a") == [2, 3, 4, 5, 6]
