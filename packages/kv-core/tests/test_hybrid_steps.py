"""Steps of the hybrid cache: index tensors, padding, both forms of a flush, lifetimes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_oracle import EPS, Stack, digest, fill, history, raw, storage, tiny_fp8, tiny_spec
from kv_core import (
    CapacityError,
    Compression,
    HybridSpec,
    HybridStep,
    KVCacheManager,
    LayerCacheHandle,
    LayerKindError,
    OutOfBlocks,
    OutOfSlots,
    RingTooSmall,
    SpecError,
    StaleHandleError,
)
from torch.utils._python_dispatch import TorchDispatchMode


def manager(spec: HybridSpec | None = None, **options: Any) -> KVCacheManager:
    cache = KVCacheManager(spec or tiny_spec(), **{"slots": 3, "blocks": 16} | options)
    fill(cache, math.nan)
    return cache


def ahead(cache: KVCacheManager, **tokens: int) -> None:
    """Commit steps without running them: positions and blocks move on, memory does not."""
    ids = [request for request, count in tokens.items() for _ in range(count)]
    positions = [p for count in tokens.values() for p in range(count)]
    cache.commit(cache.acquire(ids, positions))


def test_index_tensors_of_a_mixed_step() -> None:
    cache = manager()
    ahead(cache, a=14, b=3)
    h = cache.acquire(["c"] * 2 + ["a"] * 3 + ["b"], [0, 1, 14, 15, 16, 3])[1]
    step, four, sixteen = h.step, h.step.kinds[4], h.step.kinds[16]
    slots = [cache._table.records[r].slot for r in "cab"]
    assert step.request_slots.tolist() == slots
    assert step.cu_tokens.tolist() == [0, 2, 5, 6]
    assert step.seq_start.tolist() == [0, 14, 3]
    assert step.request_ids.tolist() == [0, 0, 1, 1, 1, 2]
    assert step.positions.tolist() == [0, 1, 14, 15, 16, 3]
    c, a, b = slots
    expected = [c * 8, c * 8 + 1, a * 8 + 6, a * 8 + 7, a * 8 + 0, b * 8 + 3]
    assert step.ring_slot.tolist() == expected
    assert four.tail_slot.tolist() == expected  # a tail of 8 rows as well
    assert sixteen.tail_slot.tolist()[2:5] == [a * 16 + 14, a * 16 + 15, a * 16 + 0]
    # a block of 16 tokens holds 4 entries of ratio 4, and 1 of ratio 16
    blocks = {r: cache.blocks(r) for r in "abc"}
    assert four.entry_slot.tolist() == [-1, -1, -1, blocks["a"][0] * 4 + 3, -1, blocks["b"][0] * 4]
    assert sixteen.entry_slot.tolist() == [-1, -1, -1, blocks["a"][0], -1, -1]
    assert four.vis.tolist() == [0, 0, 3, 4, 4, 1]
    assert four.entry_lens.tolist() == [0, 4, 1]
    assert four.closing.tolist() == [3, 5, -1, -1] and four.closings == 2
    assert step.block_lens.tolist() == [1, 2, 1]
    assert [row[: len(blocks[r])] for r, row in zip("cab", step.block_table.tolist(), strict=True)]
    assert step.block_table[0].tolist() == [*blocks["c"], *[0] * 14]  # padded with the null block
    assert 0 not in {block for held in blocks.values() for block in held}
    for tensor in (step.ring_slot, step.block_table, four.vis, four.closing, step.cu_tokens):
        assert tensor.dtype == torch.int32


def test_t4_of_a_run_longer_than_a_ring_only_the_newest_rows_are_written() -> None:
    cache = manager()
    step = cache.acquire(["a"] * 19, range(19))[0].step
    assert step.ring_slot.tolist() == [-1] * 11 + [p % 8 for p in range(11, 19)]
    assert step.kinds[16].tail_slot.tolist() == [-1] * 3 + [p % 16 for p in range(3, 19)]


def test_handles_and_addresses_are_the_same_in_every_step() -> None:
    cache = manager()
    addresses, seen = set(), set()
    for count in (5, 1, 2, 1):
        start = cache.length("a") if cache.requests else 0
        ids = ["a"] * count
        handles = cache.acquire(ids, range(start, start + count), pad_tokens=8, pad_requests=2)
        step = handles[0].step
        kinds = [t for k in step.kinds.values() for t in (k.tail_slot, k.entry_slot, k.closing)]
        tensors = [step.positions, step.ring_slot, step.block_table, step.cu_tokens, *kinds]
        addresses.add(tuple((t.data_ptr(), t.shape) for t in tensors))
        seen.add(tuple(map(id, handles)))
        assert all(handle.step is step for handle in handles)
        cache.commit(handles)
    assert len(addresses) == len(seen) == 1


def test_t12_padding_writes_nothing_and_changes_no_result() -> None:
    spec = tiny_fp8()
    stack, plain, padded = Stack(spec), manager(spec), manager(spec)
    for count in (13, 1, 4):
        one = stack.run(plain, ("a", count), ("b", count))
        two = stack.run(padded, ("a", count), ("b", count), pad_tokens=40, pad_requests=3)
        assert all(torch.equal(one[r], two[r]) for r in "ab")
    assert all(history(plain, r) == history(padded, r) for r in "ab")


def test_t12_a_step_of_padding_alone_is_legal() -> None:
    """No token, no request: indices -1, lengths 0, and no byte changes."""
    spec = tiny_fp8()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("a", 21))
    before = {name: raw(tensor) for name, tensor in storage(cache)}
    handles = cache.acquire([], [], pad_tokens=4, pad_requests=2)
    step = handles[0].step
    assert step.positions.tolist() == step.ring_slot.tolist() == [-1] * 4
    assert step.cu_tokens.tolist() == [0, 0, 0] and step.block_lens.tolist() == [0, 0]
    assert step.kinds[4].vis.tolist() == [0] * 4 and step.kinds[4].closing.tolist() == [-1] * 3
    assert not step.block_table.any()
    stack.step(handles, torch.zeros(0, stack.hidden), [])
    out = handles[1].compress("main", *pair(handles[1], "main"), torch.ones(16), EPS, *rope(stack))
    assert out.shape == (4, 16) and out.isfinite().all()
    cache.commit(handles)
    assert before == {name: raw(tensor) for name, tensor in storage(cache)}


def pair(handle: LayerCacheHandle, which: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert handle.kind is not None
    width = handle.kind.halves * handle.spec.width(handle.layer, which)
    rows = torch.full((2, handle.step.num_tokens, width), math.nan)
    return rows[0], rows[1]


def rope(stack: Stack) -> tuple[torch.Tensor, torch.Tensor]:
    return stack.cos, stack.sin


def entries_of(handle: LayerCacheHandle) -> tuple[torch.Tensor, torch.Tensor]:
    T = handle.step.num_tokens
    g = torch.Generator().manual_seed(7)
    spec = handle.spec
    return torch.randn(T, spec.head_dim, generator=g), torch.randn(T, spec.index_dim, generator=g)


@pytest.mark.parametrize("counts", [{"a": 21, "b": 6}, {"a": 1}, {"a": 4}])
def test_t16_both_forms_of_a_flush_store_the_same_bytes(counts: dict[str, int]) -> None:
    pools = []
    for is_graph in (True, False):
        cache = manager(tiny_fp8())
        ids = [r for r, n in counts.items() for _ in range(n)]
        positions = [p for n in counts.values() for p in range(n)]
        handle = cache.acquire(ids, positions)[1]
        kind = handle.step.kinds[4]
        entries, keys = entries_of(handle)
        rows = torch.arange(len(ids)) if is_graph else kind.closing[: kind.closings].long()
        entries[kind.entry_slot < 0] = math.nan  # undefined
        stored = handle.flush_compression(entries[rows], keys[rows])
        assert stored == sum(n // 4 for n in counts.values())
        pool = cache.pools[1]
        assert pool is not None
        pools.append([raw(tensor) for tensor in pool.tensors().values()])
    assert pools[0] == pools[1]


def test_c19_a_flush_of_nothing_returns_0_and_changes_nothing() -> None:
    cache = manager(tiny_fp8())
    handle = cache.acquire(["a"] * 3, range(3))[1]
    before = [raw(tensor) for _, tensor in storage(cache)]
    entries, keys = entries_of(handle)
    assert handle.flush_compression(entries[:0], keys[:0]) == 0
    assert handle.flush_compression(entries * math.nan, keys * math.nan) == 0
    assert before == [raw(tensor) for _, tensor in storage(cache)]


def test_c19_c10_parts_that_a_layer_does_not_have_are_typed_errors() -> None:
    cache = manager()
    handles = cache.acquire(["a"], [0])
    window, csa, hca = handles[:3]
    x = torch.zeros(1, 16)
    for call, words in (
        (window.read_classical_view, r"layer 0 \(window only\) has no compressed entries"),
        (window.read_indexer_view, r"layer 0 \(window only\) has no compressed entries"),
        (hca.read_indexer_view, r"layer 2 \(ratio 16, no indexer\) has no indexer keys"),
        (lambda: window.flush_compression(x), r"layer 0 \(window only\)"),
        (lambda: window.append_tail("main", x, x), r"layer 0 \(window only\)"),
        (lambda: hca.append_tail("index", x, x), r"layer 2 .* has no indexer keys"),
        (lambda: csa.flush_compression(x), "must be flushed with indexer keys, got none"),
        (lambda: hca.flush_compression(x, x), "must be flushed without indexer keys, got some"),
    ):
        with pytest.raises(LayerKindError, match=words):
            call()
    assert [handle.ratio for handle in handles] == [0, 4, 16, 4]
    assert csa.read_classical_view().entries_per_block == 4
    assert hca.read_classical_view().entries_per_block == 1


def test_views_alias_storage_and_end_with_the_step() -> None:
    cache = manager()
    handles = cache.acquire(["a"] * 5, range(5))
    views = (
        handles[1].read_swa_view(),
        handles[1].read_classical_view(),
        handles[1].read_indexer_view(),
    )
    assert views[0].codes.data_ptr() == cache.states[1].ring.codes.data_ptr()
    assert (views[0].window, views[1].ratio, views[2].entries_per_block) == (8, 4, 4)
    cache.commit(handles)
    for view in views:
        with pytest.raises(StaleHandleError, match="a view must be read in the step"):
            _ = view.spec
    cache.acquire(["a"], [5])  # the next step does not bring them back
    with pytest.raises(StaleHandleError, match="ask the handle for a new one"):
        _ = views[0].codes
    assert "codes" in repr(views[0])


@pytest.mark.parametrize("end", ["commit", "abort", "free"])
def test_handles_work_only_while_their_step_is_open(end: str) -> None:
    cache = manager()
    handles = cache.acquire(["a"] * 5 + ["b"], [*range(5), 0])
    view = handles[1].read_swa_view()
    {"commit": cache.commit, "abort": cache.abort}.get(end, lambda _: cache.free("a"))(handles)
    x = torch.zeros(6, 16)
    calls: list[Callable[[], Any]] = [
        lambda: handles[0].step,
        lambda: handles[0].write_swa(x),
        handles[0].read_swa_view,
        lambda: handles[1].append_tail("main", x, x),
        lambda: handles[1].flush_compression(x, x),
        lambda: handles[1].compress("main", x, x, x[0], EPS, x, x),
        handles[1].read_classical_view,
        handles[1].read_indexer_view,
        lambda: view.swa_pos,
    ]
    before = digest(cache)
    for call in calls:
        with pytest.raises(StaleHandleError):
            call()
    assert digest(cache) == before
    if end == "free":  # the other request goes on
        cache.commit(handles)
        assert cache.requests == ("b",) and cache.length("b") == 1
        cache.check()
    with pytest.raises(StaleHandleError, match="some although no step is open"):
        cache.commit(handles)
    with pytest.raises(StaleHandleError, match="close each step once"):
        cache.abort(handles[0])


def test_reads_after_writes_need_a_ring_with_room_for_both() -> None:
    def written(spec: HybridSpec, run: int) -> list[LayerCacheHandle]:
        cache = manager(spec)
        stack = Stack(spec)
        stack.run(cache, ("a", 20))
        handles = cache.acquire(["a"] * run, range(20, 20 + run))
        for handle in handles:
            handle.write_swa(torch.zeros(run, 16))
            for which in ("main", "index"):
                if handle.kind is not None and (which == "main" or handle.kind.indexer):
                    rows = torch.zeros_like(pair(handle, which)[0])
                    handle.append_tail(which, rows, rows)  # type: ignore[arg-type]
        return handles

    zeros = torch.zeros(600, 2)
    for spec, run in ((tiny_spec(), 1), (tiny_spec().for_draft(3), 2)):
        handles = written(spec, run)
        handles[0].read_swa_view()
        handles[1].compress("main", *pair(handles[1], "main"), torch.ones(16), EPS, zeros, zeros)
    handles = written(tiny_spec(), 2)
    with pytest.raises(RingTooSmall, match=r"ring of layer 0 .* must hold 9 rows .* got 8"):
        handles[0].read_swa_view()
    with pytest.raises(RingTooSmall, match=r"tail.main of layer 1 .* must hold 9 rows"):
        handles[1].compress("main", *pair(handles[1], "main"), torch.ones(16), EPS, zeros, zeros)


def test_writing_first_is_as_good_where_the_rings_have_room() -> None:
    """Plain decode with the smallest rings: writing before or after reading gives the same."""
    spec = tiny_fp8()
    stack, usual, early = Stack(spec), manager(spec), manager(spec)
    for cache in (usual, early):
        stack.run(cache, ("a", 30))
    for _ in range(9):
        expected = stack.run(usual, ("a", 1))["a"]
        position = early.length("a")
        handles = early.acquire(["a"], [position])
        x = stack.embed("a", [position])
        for handle in handles:
            made = stack.project(handle.layer, x, [position])
            handle.write_swa(made["kv"])
            for which in ("main", "index"):
                if f"{which}.value" in made:
                    handle.append_tail(which, made[f"{which}.value"], made[f"{which}.score"])  # type: ignore[arg-type]
            x = stack.layer(handle, x, [position])
        early.commit(handles)
        assert torch.equal(x, expected)


class Watch(TorchDispatchMode):
    """Notes operations that would wait for a device, or whose shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else []
        has_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "unique") or has_mask:
            self.found.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("layout", ["separate", "flashmla_v4"])
def test_nothing_of_a_layer_waits_for_the_device(layout: Any) -> None:
    spec = tiny_fp8(layout=layout)
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("a", 21))
    handles = cache.acquire(["a"] * 5, range(21, 26), pad_tokens=8, pad_requests=2)
    table, rows = torch.ones(99, 2), torch.randn(8, 16)
    with Watch() as watch:
        for handle in handles[:3]:
            kind = handle.kind
            if kind is not None:
                value, index = rows.repeat(1, kind.halves), torch.randn(8, 32 * kind.halves)
                args = (torch.ones(16), EPS, table, table)
                entries, keys = handle.compress("main", value, value, *args), None
                handle.append_tail("main", value, value)
                if kind.indexer:
                    args = (torch.ones(32), EPS, table, table)
                    keys = handle.compress("index", index, index, *args)
                    handle.append_tail("index", index, index)
                    _ = handle.read_indexer_view().keys
                handle.flush_compression(entries, keys)
                _ = handle.read_classical_view().rows
            _ = handle.read_swa_view().rows
            handle.write_swa(rows)
    assert watch.found == []


def test_out_of_blocks_and_slots_change_nothing() -> None:
    cache = manager(slots=2, blocks=4)
    ahead(cache, a=20)
    before = digest(cache)
    with pytest.raises(OutOfBlocks, match=r"2 block\(s\) must be free for a step of 2 requests"):
        cache.acquire(["a"] * 12 + ["b"] * 17, [*range(20, 32), *range(17)])
    with pytest.raises(OutOfBlocks, match="got 1 free of 4"):
        cache.acquire(["b"] * 17, range(17))
    with pytest.raises(OutOfSlots, match=r"2 slot\(s\) must be free for 'b', 'c', got 1 free of 2"):
        cache.acquire(["b", "c"], [0, 0])
    assert digest(cache) == before
    cache.commit(cache.acquire(["a"] * 12 + ["b"] * 16, [*range(20, 32), *range(16)]))
    assert cache.stats().used_blocks == 3


def test_a_step_has_room_for_so_many_tokens_and_requests() -> None:
    cache = manager(max_tokens=8, max_requests=2)
    for ids, positions, pads, words in (
        (["a"] * 9, range(9), {}, "9 tokens, got room for max_tokens=8"),
        (["a", "b", "c"], [0] * 3, {}, "3 requests, got room for max_requests=2"),
        (["a"], [0], {"pad_tokens": 9}, "9 tokens"),
        (["a"], [0], {"pad_requests": 3}, "3 requests"),
    ):
        with pytest.raises(CapacityError, match=words):
            cache.acquire(ids, positions, **pads)
    with pytest.raises(SpecError, match="pad_tokens must be at least 3, got 2"):
        cache.acquire(["a"] * 3, range(3), pad_tokens=2)
    assert cache.requests == ()


def test_device_memory_is_rewritten_and_never_replaced() -> None:
    cache = manager(tiny_fp8())
    stack = Stack(cache.spec)
    addresses = [tensor.data_ptr() for _, tensor in storage(cache)]
    stack.run(cache, ("a", 20), ("b", 3))
    cache.rollback("a", 19)
    cache.fork("a", "c")
    cache.free("a")
    stack.run(cache, ("c", 2))
    cache.load_state_dict(cache.state_dict())
    assert addresses == [tensor.data_ptr() for _, tensor in storage(cache)]


def test_stats_tell_state_from_blocks_and_report_the_three_numbers() -> None:
    cache = manager(tiny_fp8())
    ahead(cache, a=20, b=3)
    stats = cache.stats()
    assert (stats.slots, stats.used_slots) == (3, 2)
    assert (stats.blocks, stats.used_blocks, stats.capacity) == (16, 3, 15 * 16)
    assert (stats.length, stats.valid) == (23, 8 + 3)
    assert stats.state_bytes + stats.paged_bytes == sum(stats.parts.values())
    assert repr(cache) == "KVCacheManager(layers=4, slots=2/3, blocks=3/16, device=cpu)"
    assert repr(cache.acquire(["a"], [20])[1]) == "LayerCacheHandle(layer 1 (ratio 4, indexer))"


def test_ops_of_ones_own_are_what_a_handle_calls() -> None:
    called: list[str] = []

    class Ops:
        def append_swa(self, state: Any, step: HybridStep, rows: torch.Tensor) -> None:
            called.append(f"swa {state.layer} {step.num_tokens} {list(rows.shape)}")

        def append_tail(self, state: Any, which: str, *_: Any) -> None:
            called.append(f"tail {which} {state.layer}")

        def compress(self, state: Any, which: str, step: Any, value: Any, *_: Any) -> torch.Tensor:
            called.append(f"compress {which}")
            return value[:, :16]

        def flush_compression(self, paged: Any, slots: Any, entries: Any, keys: Any) -> None:
            called.append(f"flush {paged.layer} {slots.tolist()}")

    spec = tiny_spec(ratios=(4,), kinds=(Compression(ratio=4),))
    cache = KVCacheManager(spec, slots=1, blocks=3, ops=Ops())
    handle = cache.acquire(["a"] * 4, range(4))[0]
    x, table = torch.zeros(4, 16), torch.zeros(9, 2)
    entries = handle.compress("main", x, x, x[0], EPS, table, table)
    handle.flush_compression(entries)
    handle.write_swa(x)
    handle.append_tail("main", x, x)
    assert called == [
        "compress main",
        "flush 0 [-1, -1, -1, 4]",
        "swa 0 4 [4, 16]",
        "tail main 0",
    ]


def test_compression_past_the_rope_table_is_nan_and_reads_nothing_outside() -> None:
    spec = tiny_spec(ratios=(4,), kinds=(Compression(ratio=4),))
    cache = manager(spec)
    handle = cache.acquire(["a"] * 12, range(12))[0]
    x, table = torch.randn(12, 16), torch.ones(5, 2)
    out = handle.compress("main", x, x, torch.ones(16), EPS, table, table)
    assert out[:8].isfinite().all()
    assert out[11, :12].isfinite().all() and out[11, 12:].isnan().all()


def test_value_and_score_of_any_floating_dtype_are_taken_as_fp32() -> None:
    spec = tiny_spec(ratios=(4,), kinds=(Compression(ratio=4, overlap=True),))
    x = torch.randn(2, 12, 32).bfloat16()
    table, found = torch.ones(16, 2), []
    for rows in (x, x.float(), x.double()):
        cache = manager(spec)
        for part in (slice(0, 6), slice(6, 12)):
            handle = cache.acquire(["a"] * 6, range(part.start, part.stop))[0]
            value, score = rows[:, part]
            out = handle.compress("main", value, score, torch.ones(16), EPS, table, table)
            handle.append_tail("main", value, score)
            cache.commit([handle])
        found.append((out, cache.states[0].tails["main"].clone()))
    for out, tail in found[1:]:
        assert torch.equal(out, found[0][0]) and raw(tail) == raw(found[0][1])
