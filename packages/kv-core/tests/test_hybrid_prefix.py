"""Reusing prefixes: snapshots, published blocks with and without their state, replay, saving."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_oracle import Stack, digest, fill, history, tiny_fp8, tiny_spec
from kv_core import (
    Compression,
    HybridSpec,
    KVCacheManager,
    OutOfSlots,
    RollbackTooDeep,
    SharedBlockError,
    SnapshotError,
    SpecError,
    StaleHandleError,
    load,
    save,
)

IDS = list(range(100, 200))
SMALLEST_TAIL = (Compression(ratio=4, overlap=True, indexer=True),)


def manager(spec: HybridSpec, **options: Any) -> KVCacheManager:
    cache = KVCacheManager(spec, **{"slots": 3, "blocks": 16} | options)
    fill(cache, math.nan)
    return cache


def small(**options: Any) -> HybridSpec:
    return tiny_fp8(ratios=(0, 4, 16), **options)


def test_t9_a_snapshot_is_exact() -> None:
    """Ring, overlap and blocks are enough: not one bit differs from a cold run."""
    spec = small()
    stack, cache, alone = Stack(spec), manager(spec), manager(spec)
    stack.run(cache, ("z", 32))
    taken = cache.snapshot("z")
    assert taken.length == 32 and taken.nbytes == spec.snapshot_bytes
    stack.run(cache, ("z", 20))  # goes on; then is gone, its slot filled with others
    cache.free("z")
    stack.run(cache, ("x", 60))
    cache.restore("y", taken)
    assert cache.blocks("y") == taken.blocks and cache.length("y") == 32
    outs = [stack.run(cache, ("y", n), names={"y": "z"})["y"] for n in (1, 3, 20)]
    expected = stack.run(alone, ("z", 56))["z"]
    assert torch.equal(torch.cat(outs), expected[32:])
    assert history(cache, "y") == history(alone, "z")
    cache.check()
    for request in ("y", "x"):
        cache.free(request)
    assert cache.stats().used_blocks == 2
    cache.release(taken)
    assert cache.stats().used_blocks == 0 and not taken.is_held


def test_a_snapshot_is_taken_where_a_block_ends_and_the_rings_reach() -> None:
    cache = manager(small())
    cache.commit(cache.acquire(["a"] * 33, range(33)))
    assert cache.snapshot("a").length == 32  # rings reach one token back
    cache.commit(cache.acquire(["a"], [33]))
    before = digest(cache)
    with pytest.raises(RollbackTooDeep, match="end a step at 32 and take it then"):
        cache.snapshot("a")
    with pytest.raises(SpecError, match="multiple of block_tokens=16, got 33; use 32 or 48"):
        cache.snapshot("a", 33)
    with pytest.raises(SpecError, match="between 1 and 34, got 48"):
        cache.snapshot("a", 48)
    assert digest(cache) == before
    longer = manager(small().for_draft(12))
    longer.commit(longer.acquire(["a"] * 42, range(42)))
    assert longer.snapshot("a").length == 32


def test_a_snapshot_needs_the_overlap_in_the_tail_as_well() -> None:
    """A tail of 8 rows still holds the last window of 4 after 4 more tokens, not after 5."""
    spec = tiny_fp8(ratios=(4, 0), ring=40, kinds=SMALLEST_TAIL)
    stack = Stack(spec)
    cache, alone = manager(spec), manager(spec)
    stack.run(cache, ("a", 36))
    cache.restore("b", cache.snapshot("a"))
    out = stack.run(cache, ("b", 9), names={"b": "a"})["b"]
    assert torch.equal(out, stack.run(alone, ("a", 41))["a"][32:])
    stack.run(cache, ("a", 1))
    with pytest.raises(RollbackTooDeep):
        cache.snapshot("a")


def test_restored_requests_share_blocks_and_go_back_no_further() -> None:
    cache = manager(small().for_draft(9))
    cache.commit(cache.acquire(["a"] * 32, range(32)))
    taken = cache.snapshot("a")
    cache.restore("b", taken)
    with pytest.raises(RollbackTooDeep, match="can go back to 32 tokens, where it was started"):
        cache.rollback("b", 31)
    with pytest.raises(SharedBlockError):
        cache.rollback("a", 31)
    with pytest.raises(RollbackTooDeep, match="can be forked from 32 tokens on"):
        cache.fork("b", "c", 16)
    with pytest.raises(RollbackTooDeep):
        cache.snapshot("b", 16)
    cache.commit(cache.acquire(["b"] * 3, range(32, 35)))
    cache.rollback("b", 32)
    cache.fork("b", "c")
    before = digest(cache)
    for call, error in (
        (lambda: cache.restore("b", taken), SpecError),
        (lambda: cache.restore("d", taken), OutOfSlots),
    ):
        with pytest.raises(error):
            call()
    assert digest(cache) == before
    cache.release(taken)
    for stale in (lambda: cache.release(taken), lambda: cache.restore("d", taken)):
        with pytest.raises(StaleHandleError, match="the snapshot must be held by this manager"):
            stale()


def test_c07_a_reused_slot_shows_no_row_of_its_old_request() -> None:
    """Window 8: X leaves its slot full; Y takes it and reuses 16 tokens of Z."""
    spec = small()
    stack, cache, alone = Stack(spec), manager(spec, slots=2), manager(spec)
    stack.run(cache, ("z", 16))
    assert cache.publish("z", IDS[:16]) == 16
    stack.run(cache, ("x", 40))
    slot = cache._table.records["x"].slot
    cache.free("x")
    hit = cache.reuse("y", IDS[:20])
    assert (hit.tokens, hit.start, hit.replay) == (16, 16, 0)
    assert cache._table.records["y"].slot == slot
    for state in cache.states:
        held = sorted(p for p in state.positions[slot].tolist() if p >= 0)
        assert held == list(range(9, 16))  # window - 1 rows, all that the next token sees
    out = stack.run(cache, ("y", 9), names={"y": "z"})["y"]
    assert torch.equal(out, stack.run(alone, ("z", 25))["z"][16:])


def test_c07_taking_a_slot_empties_its_ring() -> None:
    spec = small()
    cache = manager(spec, slots=1)
    Stack(spec).run(cache, ("x", 40))
    cache.free("x")
    cache.acquire(["y"], [0])
    assert all((state.positions == -1).all() for state in cache.states)


def test_c08_the_first_entry_after_a_hit_has_its_overlap() -> None:
    """Entry 4 pools rows 12 … 19, of which 12 … 15 are from before the hit."""
    spec = small()
    stack, cache, alone = Stack(spec), manager(spec), manager(spec)
    stack.run(cache, ("z", 16))
    cache.publish("z", IDS[:16])
    cache.free("z")
    stack.run(cache, ("x", 30))
    cache.free("x")
    assert cache.reuse("y", IDS[:30]).start == 16
    stack.run(cache, ("y", 4), names={"y": "z"})
    stack.run(alone, ("z", 20))
    assert history(cache, "y") == history(alone, "z")


def test_t9_a_replay_is_exact_at_window_minus_1_tokens_a_layer_and_not_before() -> None:
    """W = 8 and L = 4: 28 tokens rebuild the state, 27 do not. Shared blocks are not written."""
    spec = tiny_spec(ratios=(0, 4, 16, 0))
    assert spec.replay_tokens == 7 * 4
    stack, alone = Stack(spec), manager(spec)
    expected = stack.run(alone, ("z", 60))["z"][48:]
    for fewer in (0, 1):
        cache = manager(spec)
        stack.run(cache, ("z", 48))
        stack.run(cache, ("z", 9))  # so the state at 48 is gone
        assert cache.publish("z", IDS[:57]) == 0
        assert cache.lookup(IDS[:60]).tokens == 0  # without a state it is a miss
        hit = cache.reuse("y", IDS[:60], replay=True)
        assert (hit.tokens, hit.start, hit.replay) == (48, 20, 28)
        assert hit.parts == {"entries": 48, "state": 0} and hit.limit == "state"
        record = cache._table.records["y"]
        record.length = record.written = record.first = hit.start + fewer
        pools = [raw_blocks(cache, "y") for _ in range(1)]
        for count in (10, 1, hit.replay - 11 - fewer):
            stack.run(cache, ("y", count), names={"y": "z"})
        assert cache.length("y") == 48 and raw_blocks(cache, "y") == pools[0]
        out = stack.run(cache, ("y", 12), names={"y": "z"})["y"]
        difference = (out - expected).abs().max().item()
        assert (difference == 0.0) == (fewer == 0)
        cache.check()


def raw_blocks(cache: KVCacheManager, request: str) -> list[bytes]:
    shared = list(cache.blocks(request)[:3])
    tensors = [t for pool in cache.pools if pool is not None for t in pool.tensors().values()]
    return [t[shared].view(torch.uint8).numpy().tobytes() for t in tensors]


def test_a_request_that_replays_is_not_a_source_for_others() -> None:
    spec = tiny_spec(ratios=(0, 4, 16, 0))
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("z", 57))
    cache.publish("z", IDS[:57])
    cache.reuse("y", IDS[:60], replay=True)
    before = digest(cache)
    calls: list[Callable[[], Any]] = [
        lambda: cache.fork("y", "c"),
        lambda: cache.snapshot("y"),
        lambda: cache.publish("y", IDS),
    ]
    for call in calls:
        with pytest.raises(SpecError, match="must have its state, got 20 of 48 tokens replayed"):
            call()
    with pytest.raises(RollbackTooDeep, match="can go back to 48 tokens"):
        cache.rollback("y", 19)
    assert digest(cache) == before


def test_c17_hits_name_the_part_that_limits_them() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("z", 32))
    assert cache.publish("z", IDS[:32]) == 32
    stack.run(cache, ("z", 20))
    assert cache.publish("z", IDS[:52]) == 0  # the blocks are found; the state at 48 is gone
    hit = cache.lookup(IDS[:60])
    assert hit.parts == {"entries": 48, "state": 32}
    assert (hit.tokens, hit.start, hit.limit) == (32, 32, "state")
    assert cache.lookup(IDS[:32]).parts == {"entries": 16, "state": 0}  # one token is left to run
    assert cache.lookup([1, 2, 3]).parts == {"entries": 0, "state": 0}
    assert cache.lookup(IDS[:60], replay=True).tokens == 32  # 21 replayed reach no further
    assert cache.reuse("y", [1, 2, 3]).tokens == 0 and cache.requests == ("z",)


def test_states_go_with_their_blocks_and_the_oldest_first() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec, blocks=6, prefix_states=2)
    for first in (0, 1000, 2000):
        stack.run(cache, ("z", 16))
        cache.publish("z", range(first, first + 16))
        cache.free("z")
    hits = [cache.lookup(range(first, first + 17)).parts for first in (0, 1000, 2000)]
    assert hits == [{"entries": 16, "state": 0}, *[{"entries": 16, "state": 16}] * 2]
    stats = cache.stats()
    assert stats.prefix_states == 2
    assert stats.prefix_bytes == 2 * spec.snapshot_bytes
    stack.run(cache, ("x", 80))  # takes every block
    assert cache.stats().prefix_states == 0
    assert cache.lookup(range(17)).parts == {"entries": 0, "state": 0}


def test_a_rollback_into_a_published_block_takes_it_back() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("z", 32))
    cache.publish("z", IDS[:32])
    cache.rollback("z", 31)
    assert cache.lookup(IDS[:40]).parts == {"entries": 16, "state": 0}
    assert cache.stats().prefix_states == 0


def test_prefixes_of_other_ratios_and_without_overlap() -> None:
    kinds = (Compression(ratio=2, indexer=True), Compression(ratio=3, overlap=True))
    spec = tiny_spec(ratios=(2, 3, 0), kinds=kinds, block_tokens=12, window=5)
    stack, cache, alone = Stack(spec), manager(spec), manager(spec)
    stack.run(cache, ("z", 24))
    taken = cache.snapshot("z")
    assert taken.nbytes == spec.snapshot_bytes
    cache.restore("y", taken)
    out = stack.run(cache, ("y", 17), names={"y": "z"})["y"]
    assert torch.equal(out, stack.run(alone, ("z", 41))["z"][24:])


@pytest.mark.parametrize("layout", ["separate", "flashmla_v4"])
def test_a_saved_cache_goes_on_bit_for_bit(tmp_path: Path, layout: Any) -> None:
    spec = small(layout=layout)
    stack, cache, twin = Stack(spec), manager(spec), manager(spec)
    stack.run(cache, ("z", 32), ("b", 5))
    cache.publish("z", IDS[:32])
    stack.run(cache, ("z", 3))
    save(tmp_path / "cache", cache.state_dict())
    stack.run(twin, ("other", 7))
    twin.load_state_dict(load(tmp_path / "cache"))
    twin.check()
    assert twin.requests == ("z", "b") and twin.stats() == cache.stats()
    for one in (cache, twin):
        assert one.reuse("y", IDS[:40]).start == 32
    steps = [("z", 4), ("b", 14), ("y", 2)]
    first, second = (stack.run(one, *steps) for one in (cache, twin))
    assert all(torch.equal(first[r], second[r]) for r in "zby")
    assert all(history(cache, r) == history(twin, r) for r in "zby")


def edit(state: dict[str, Any], change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Any:
    change(state["meta"], state["tensors"])
    return state


def test_c13_states_of_other_caches_and_edited_ones_are_refused() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("z", 32))
    cache.publish("z", IDS[:32])

    def state() -> dict[str, Any]:
        return cache.state_dict()

    before = digest(cache)
    packed = KVCacheManager(small(layout="flashmla_v4"), slots=3, blocks=16)
    for load_it, words in (
        (lambda: packed.load_state_dict(state()), "layout is 'flashmla_v4' here"),
        (
            lambda: manager(spec, slots=2).load_state_dict(state()),
            "slots is 2 here and 3 in the state",
        ),
        (
            lambda: manager(spec, max_len=32).load_state_dict(state()),
            "max_len is 32 here and 240 in the state",
        ),
        (
            lambda: cache.load_state_dict(
                edit(
                    state(),
                    lambda m, t: t.update({"prefix.0.1.ring.0": t["prefix.0.1.ring.0"][:1]}),
                )
            ),
            "prefix.0.1.ring.0 of",
        ),
        (
            lambda: cache.load_state_dict(edit(state(), lambda m, t: t.pop("1.keys.scale"))),
            "tensor '1.keys.scale' of the state must be",
        ),
        (
            lambda: cache.load_state_dict(edit(state(), lambda m, t: t.pop("prefix.0.1.ring.0"))),
            "fit each other, got KeyError",
        ),
        (
            lambda: cache.load_state_dict(edit(state(), lambda m, t: m["free_slots"].pop())),
            "slots .* used and",
        ),
        (
            lambda: cache.load_state_dict(edit(state(), lambda m, t: m["requests"].clear())),
            "2 blocks held, others in the requests",
        ),
        (
            lambda: cache.load_state_dict(
                edit(state(), lambda m, t: m["requests"][0].__setitem__(2, 40))
            ),
            "with 2 blocks",
        ),
        (
            lambda: cache.load_state_dict(
                edit(state(), lambda m, t: m["requests"][0].__setitem__(0, "q"))
            ),
            "that it does not hold",
        ),
        (
            lambda: cache.load_state_dict(
                edit(state(), lambda m, t: m["prefixes"].append("00" * 32))
            ),
            "which no block holds",
        ),
        (
            lambda: cache.load_state_dict(
                edit(
                    state(),
                    lambda m, t: t.update({"prefix.0.1.ring.0": t["prefix.0.1.ring.0"][:, 1:]}),
                )
            ),
            "prefix.0.1.ring.0 of",
        ),
    ):
        with pytest.raises(SnapshotError, match=words):
            load_it()
    taken = cache.snapshot("z")
    with pytest.raises(SnapshotError, match="no snapshot may be held while the cache is saved"):
        cache.state_dict()
    with pytest.raises(SnapshotError, match="no snapshot may be held while a state is loaded"):
        cache.load_state_dict({})
    cache.release(taken)
    assert digest(cache) == before
    cache.commit(cache.acquire([(1, 2)], [0]))
    with pytest.raises(SnapshotError, match="request must be a str or int to be saved"):
        cache.state_dict()


def test_without_room_for_states_nothing_can_be_gone_on_from_at_once() -> None:
    spec = small()
    cache = manager(spec, prefix_states=0)
    Stack(spec).run(cache, ("z", 32))
    assert cache.publish("z", IDS[:32]) == 0
    assert cache.lookup(IDS[:33]).tokens == 0


def test_a_saved_state_is_not_changed_by_what_comes_after() -> None:
    spec = small()
    cache = manager(spec)
    Stack(spec).run(cache, ("z", 32))
    cache.publish("z", IDS[:32])
    state = cache.state_dict()
    live = {t.data_ptr() for layers in cache._prefixes.items()[0][1] for t in layers.values()}
    saved = {t.data_ptr() for name, t in state["tensors"].items() if name.startswith("prefix")}
    assert not live & saved
