"""Taking tokens back: speculative runs, rollback, abort, fork; exact, or refused."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hybrid_oracle import Stack, digest, fill, history, tiny_fp8, tiny_spec
from kv_core import (
    Compression,
    FrozenError,
    HybridSpec,
    KVCacheManager,
    RingTooSmall,
    RollbackTooDeep,
    SharedBlockError,
)


def manager(spec: HybridSpec, **options: Any) -> KVCacheManager:
    cache = KVCacheManager(spec, **{"slots": 3, "blocks": 16} | options)
    fill(cache, math.nan)
    return cache


def small(**options: Any) -> HybridSpec:
    """One layer of each kind, so that many schedules run in little time."""
    return tiny_fp8(ratios=(0, 4, 16), **options)


@pytest.mark.parametrize("draft", [2, 3, 4, 5, 6, 8])
def test_t5_c09_verified_drafts_are_exact_with_the_smallest_rings(draft: int) -> None:
    """Runs of ``draft`` tokens, of which a random number from 1 on is kept."""
    spec = small().for_draft(draft)
    assert (spec.ring, spec.kinds[0].tail) == (8 + draft - 2, 8 + draft - 2)
    stack, cache, rng = Stack(spec), manager(spec), random.Random(draft)
    outs = [stack.run(cache, ("a", 9))["a"]]
    while cache.length("a") < 45:
        kept = rng.randint(1, draft)
        # drafts past the accepted ones are wrong tokens; what they leave behind must not matter
        start = cache.length("a")
        handles = cache.acquire(
            ["a"] * draft, range(start, start + draft), speculative=rng.choice([True, {"a"}])
        )
        x = torch.cat(
            [stack.embed("a" if i < kept else "wrong", [start + i]) for i in range(draft)]
        )
        out = stack.step(handles, x, range(start, start + draft))
        cache.commit(handles, accepted={"a": kept} if kept < draft or rng.random() < 0.5 else None)
        outs.append(out[:kept])
    length = cache.length("a")
    alone = manager(spec)
    assert torch.equal(torch.cat(outs), stack.run(alone, ("a", length))["a"])
    assert history(cache, "a") == history(alone, "a")


@pytest.mark.parametrize("part", ["ring", "tail of 4", "tail of 16"])
def test_t5_one_row_below_the_bound_is_refused(part: str) -> None:
    draft = 5
    sizes = {"ring": 11, "tail of 4": 11, "tail of 16": 19}
    sizes[part] -= 1
    kinds = (
        Compression(ratio=4, overlap=True, indexer=True, tail=sizes["tail of 4"]),
        Compression(ratio=16, tail=sizes["tail of 16"]),
    )
    cache = manager(tiny_spec(ring=sizes["ring"], kinds=kinds))
    cache.commit(cache.acquire(["a"] * 30, range(30)))
    before = digest(cache)
    with pytest.raises(RingTooSmall, match=r"run of 5 tokens, got rings for 4; .*for_draft\(5\)"):
        cache.acquire(["a"] * draft, range(30, 35), speculative=True)
    assert digest(cache) == before
    handles = cache.acquire(["a"] * draft, range(30, 35))  # not to be taken back
    with pytest.raises(RollbackTooDeep, match="cannot go back to 31 tokens"):
        cache.commit(handles, accepted={"a": 1})
    cache.commit(handles, accepted={"a": 2})
    assert cache.length("a") == 32


def test_a_prefill_beside_drafts_is_not_held_to_their_bound() -> None:
    cache = manager(small())
    cache.commit(cache.acquire(["a"] * 9, range(9)))
    handles = cache.acquire(["a"] * 2 + ["b"] * 40, [9, 10, *range(40)], speculative={"a"})
    cache.commit(handles, accepted={"a": 1})
    assert (cache.length("a"), cache.length("b")) == (10, 40)


@pytest.mark.parametrize("layout", ["separate", "flashmla_v4"])
def test_t6_rollback_across_window_and_block_edges_is_exact(layout: Any) -> None:
    """From 35 back to 34 … 29: over the edge of a block at 32, and of windows of 4 and 16."""
    spec = small(layout=layout).for_draft(8)
    stack = Stack(spec)
    alone = manager(spec)
    expected = stack.run(alone, ("a", 50))["a"]
    for length in range(29, 35):
        cache = manager(spec)
        stack.run(cache, ("a", 28))
        stack.run(cache, ("a", 7), names={"a": "other"})
        with pytest.raises(RollbackTooDeep):
            cache.rollback("a", 27)
        cache.rollback("a", length)
        assert len(cache.blocks("a")) == -(-length // 16)
        held = cache.states[0].positions[0]
        assert held.max() == length - 1
    cache = manager(spec)
    outs = [stack.run(cache, ("a", 28))["a"]]
    for wrong in (6, 1, 5, 3):
        stack.run(cache, ("a", wrong), names={"a": "other"})
        cache.rollback("a", cache.length("a") - wrong)
        outs.append(stack.run(cache, ("a", 4))["a"])
    outs.append(stack.run(cache, ("a", 6))["a"])
    assert torch.equal(torch.cat(outs), expected)
    assert history(cache, "a") == history(alone, "a")


def test_two_rollbacks_reach_no_deeper_than_one() -> None:
    """Going back does not restore what was overwritten on the way there."""
    spec = small().for_draft(4)
    cache = manager(spec)
    cache.commit(cache.acquire(["a"] * 40, range(40)))
    cache.rollback("a", 38)
    before = digest(cache)
    with pytest.raises(RollbackTooDeep, match="written up to 40"):
        cache.rollback("a", 36)
    assert digest(cache) == before
    cache.rollback("a", 37)
    cache.commit(cache.acquire(["a"] * 3, range(37, 40)))
    cache.rollback("a", 37)


def test_rows_lost_to_drafts_aborts_and_before_a_fork_stay_lost() -> None:
    """However tokens were taken back, their rows have overwritten older ones."""
    spec = small().for_draft(4)  # rings reach 3 tokens back
    cache = manager(spec)
    cache.commit(cache.acquire(["a"] * 38, range(38)))
    cache.commit(cache.acquire(["a"] * 3, range(38, 41)), accepted={"a": 1})
    assert cache.length("a") == 39
    with pytest.raises(RollbackTooDeep, match="written up to 41"):
        cache.rollback("a", 37)

    handles = cache.acquire(["b"] * 38, range(38))
    cache.commit(handles)
    handles = cache.acquire(["b"] * 3, range(38, 41))
    handles[0].write_swa(torch.zeros(3, 16))
    cache.abort(handles)
    with pytest.raises(RollbackTooDeep, match="written up to 41"):
        cache.rollback("b", 37)

    cache.fork("a", "c", 38)
    with pytest.raises(RollbackTooDeep, match="written up to 41"):
        cache.rollback("c", 37)


def test_blocks_of_tokens_that_were_not_kept_are_free_again() -> None:
    cache = manager(small())
    cache.commit(cache.acquire(["a"] * 31, range(31)))
    handles = cache.acquire(["a"] * 2, [31, 32], speculative=True)
    assert len(cache.blocks("a")) == 3
    cache.commit(handles, accepted={"a": 1})
    assert len(cache.blocks("a")) == 2 and cache.stats().used_blocks == 2
    cache.check()


def test_every_rollback_is_exact_or_refused() -> None:
    """For each ring and depth the rule says what a comparison with a cold run finds."""
    for ring, tail in itertools.product((8, 9, 11), (8, 10)):
        kind = Compression(ratio=4, overlap=True, indexer=True, tail=tail)
        made = tiny_spec(ratios=(0, 4), kinds=(kind,), ring=ring)
        stack = Stack(made)
        for length in range(20, 27):
            cache = manager(made)
            stack.run(cache, ("a", 27))
            if 27 - length > min(ring - 8, tail - 8) + 1:
                with pytest.raises(RollbackTooDeep):
                    cache.rollback("a", length)
                continue
            cache.rollback("a", length)
            alone = manager(made)
            expected = stack.run(alone, ("a", 33))["a"][length:]
            assert torch.equal(stack.run(cache, ("a", 33 - length))["a"], expected)
            assert history(cache, "a") == history(alone, "a")


def test_short_requests_can_go_back_to_nothing() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("a", 8), names={"a": "other"})
    cache.rollback("a", 0)
    assert cache.blocks("a") == () and cache.requests == ("a",)
    alone = manager(spec)
    assert torch.equal(stack.run(cache, ("a", 20))["a"], stack.run(alone, ("a", 20))["a"])


@pytest.mark.parametrize("is_written", [False, True])
def test_abort_leaves_requests_as_before(is_written: bool) -> None:
    spec = small()
    stack, cache, alone = Stack(spec), manager(spec), manager(spec)
    stack.run(cache, ("a", 31))
    held = (cache.blocks("a"), cache.stats().used_blocks, cache.stats().used_slots)
    run = 1 if is_written else 9
    ids, positions = ["a"] * run + ["b"] * 20, [*range(31, 31 + run), *range(20)]
    handles = cache.acquire(ids, positions)
    if is_written:
        x = torch.cat([stack.embed("wrong", [p]) for p in positions])
        stack.step(handles, x, positions)
    cache.abort(handles)
    assert held == (cache.blocks("a"), cache.stats().used_blocks, cache.stats().used_slots)
    assert cache.requests == ("a",) and cache.length("a") == 31
    cache.check()
    outs = torch.cat([stack.run(cache, ("a", n))["a"] for n in (1, 8)])
    assert torch.equal(outs, stack.run(alone, ("a", 40))["a"][31:])
    assert history(cache, "a") == history(alone, "a")


def test_abort_of_a_written_run_that_the_ring_cannot_take_back_is_refused() -> None:
    spec = small()
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("a", 31))
    handles = cache.acquire(["a"] * 9, range(31, 40))
    stack.step(handles, stack.embed("a", range(31, 40)), range(31, 40))
    before = digest(cache)
    with pytest.raises(RollbackTooDeep, match="cannot go back to 31 tokens"):
        cache.abort(handles)
    assert digest(cache) == before
    cache.free("a")
    cache.abort(handles)
    assert cache.requests == () and cache.stats().used_blocks == 0


def test_after_a_captured_write_an_abort_counts_rings_as_written() -> None:
    """A graph may have been replayed without the host seeing it."""
    cache = manager(small())
    cache.commit(cache.acquire(["a"] * 31, range(31)))
    cache._open._was_captured = True
    handles = cache.acquire(["a"] * 9, range(31, 40))
    with pytest.raises(RollbackTooDeep):
        cache.abort(handles)
    cache.commit(handles)


@pytest.mark.parametrize("length", [29, 32, 33, 37])
def test_t8_forks_diverge_and_outlive_their_parent(length: int) -> None:
    """At block ends and inside blocks: nothing that one writes reaches the other."""
    spec = small().for_draft(12)
    stack, cache = Stack(spec), manager(spec)
    stack.run(cache, ("a", 37))
    cache.fork("a", "b", length)
    shared = length // 16
    assert cache.blocks("a")[:shared] == cache.blocks("b")[:shared]
    assert not set(cache.blocks("a")[shared:]) & set(cache.blocks("b")[shared:])
    b = [stack.run(cache, ("b", 5), ("a", 2), names={"b": "beta"})["b"]]
    cache.free("a")
    stack.run(cache, ("c", 60))  # takes the parent's slot and blocks
    b.append(stack.run(cache, ("b", 20), names={"b": "beta"})["b"])
    cache.check()

    alone = manager(spec)
    stack.run(alone, ("a", length))
    expected = stack.run(alone, ("a", 25), names={"a": "beta"})["a"]
    assert torch.equal(torch.cat(b), expected)
    assert history(cache, "b") == history(alone, "a")


def test_t8_the_parent_goes_on_as_if_it_had_not_been_forked() -> None:
    spec = small()
    stack, cache, alone = Stack(spec), manager(spec), manager(spec)
    outs = [stack.run(cache, ("a", 37))["a"]]
    cache.fork("a", "b")
    stack.run(cache, ("b", 30))
    cache.free("b")
    outs.append(stack.run(cache, ("a", 13))["a"])
    assert torch.equal(torch.cat(outs), stack.run(alone, ("a", 50))["a"])


def test_a_shared_block_is_never_gone_on_inside() -> None:
    spec = small().for_draft(20)
    cache = manager(spec)
    cache.commit(cache.acquire(["a"] * 37, range(37)))
    cache.fork("a", "b")
    before = digest(cache)
    with pytest.raises(SharedBlockError, match=r"length 31 inside block \d+, which 'b' also"):
        cache.rollback("a", 31)
    assert digest(cache) == before
    cache.rollback("a", 32)
    assert len(cache.blocks("a")) == 2
    cache.free("b")
    cache.rollback("a", 31)


def test_requests_of_the_open_step_are_left_alone() -> None:
    cache = manager(small())
    cache.commit(cache.acquire(["a"] * 16 + ["b"] * 16, [*range(16), *range(16)]))
    handles = cache.acquire(["a"], [16])
    before = digest(cache)
    for call in (
        lambda: cache.rollback("a", 15),
        lambda: cache.fork("a", "c"),
        lambda: cache.snapshot("a"),
        lambda: cache.publish("a", range(16)),
        cache.state_dict,
        lambda: cache.load_state_dict({}),
    ):
        with pytest.raises(FrozenError, match=r"commit\(\) or abort\(\)"):
            call()
    assert digest(cache) == before
    cache.rollback("b", 15)  # it is not in the step
    cache.commit(handles)
