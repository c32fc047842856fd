"""Block allocator: who holds what, in which order it is handed out, and what is refused."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pytest
import torch
from kv_core import (
    BlockAllocator,
    BlockLeak,
    DoubleFree,
    DtypeError,
    OutOfBlocks,
    ShapeError,
    SnapshotError,
    SpecError,
    StaleHandleError,
    load,
    save,
)
from kv_core.prefixes import ROOT, chain, token_ids

A, B, C = (bytes([n]) * 32 for n in range(3))


def counts(pool: BlockAllocator) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_used + pool.num_reserved == pool.blocks
    return pool.num_free, pool.num_used, pool.num_reserved


def refused(pool: BlockAllocator, error: type[Exception], call: Callable[[], object]) -> str:
    """Return the message of a call that has to raise and to change nothing."""
    before = pool.state_dict()
    with pytest.raises(error) as caught:
        call()
    assert pool.state_dict() == before
    pool.check()
    return str(caught.value)


def test_block_0_is_reserved_unless_it_is_not_wanted() -> None:
    pool = BlockAllocator(4)
    assert counts(pool) == (3, 0, 1) and pool.allocate(3, "a") == [1, 2, 3]
    pool = BlockAllocator(3, reserve_null=False)
    assert counts(pool) == (3, 0, 0) and pool.allocate(3, "a") == [0, 1, 2]


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockAllocator(4)
    pool.allocate(1, "a")
    message = refused(pool, OutOfBlocks, lambda: pool.allocate(3, "b"))
    assert "3 blocks must be free for 'b', got 2 free of 4 (1 used, 1 reserved)" in message
    assert pool.allocate(2, "b") == [2, 3] and pool.allocate(0, "c") == []


def test_the_least_recently_freed_comes_first_and_tails_before_heads() -> None:
    pool = BlockAllocator(8)
    a, b = pool.allocate(3, "a"), pool.allocate(2, "b")
    assert pool.free(b, "b") == [5, 4] and pool.free(a, "a") == [3, 2, 1]
    assert pool.allocate(7, "c") == [6, 7, 5, 4, 3, 2, 1]


def test_published_blocks_are_handed_out_last() -> None:
    pool = BlockAllocator(5)
    pool.allocate(3, "a")
    assert pool.publish(1, A) and pool.publish(2, B)
    pool.free([1, 2, 3], "a")
    assert pool.allocate(2, "b") == [4, 3]
    assert pool.lookup(A) == 1 and pool.lookup(B) == 2
    assert pool.allocate(1, "b") == [2]  # the tail goes before the head
    assert pool.lookup(A) == 1 and pool.lookup(B) is None


def test_b09_handing_out_a_block_removes_its_identity() -> None:
    pool = BlockAllocator(3)
    for owner, digests in (("p", (A, B)), ("q", (C, B))):
        for block, digest in zip(pool.allocate(2, owner), digests, strict=True):
            assert not pool.is_published(block)
            pool.publish(block, digest)
        pool.free([1, 2], owner)
    assert pool.lookup(A) is None and pool.lookup(C) is not None


def test_a_free_published_block_can_be_shared_again() -> None:
    pool = BlockAllocator(4)
    pool.allocate(2, "a")
    pool.publish(1, A)
    pool.free([1, 2], "a")
    pool.share([1], "b")
    assert counts(pool) == (2, 1, 1) and pool.owners(1) == ("b",)
    assert pool.allocate(2, "c") == [3, 2] and pool.lookup(A) == 1


def test_a_shared_block_is_free_when_its_last_owner_has_gone() -> None:
    pool = BlockAllocator(4)
    pool.allocate(2, "a")
    pool.share([1, 2], "b")
    assert pool.count(1) == 2 and pool.owners(1) == ("a", "b")
    assert pool.free([1, 2], "a") == [] and counts(pool) == (1, 2, 1)
    assert pool.free([2, 1], "b") == [1, 2] and pool.count(1) == 0


def test_b05_double_free_and_drift() -> None:
    pool = BlockAllocator(8)
    ids = pool.allocate(3, "a")
    pool.free(ids, "a")
    for block, state in ((3, "free"), (7, "free"), (0, "reserved")):
        message = refused(pool, DoubleFree, lambda block=block: pool.free([block], "a"))
        assert f"block {block} must be held by 'a'" in message and f"that is {state}" in message
    assert counts(pool) == (7, 0, 1)
    refused(pool, SpecError, lambda: pool.free([8], "a"))
    refused(pool, SpecError, lambda: pool.free([-1], "a"))


def test_free_refuses_all_if_one_is_bad() -> None:
    pool = BlockAllocator(8)
    pool.allocate(3, "a")
    pool.allocate(1, "b")
    message = refused(pool, DoubleFree, lambda: pool.free([1, 2, 4], "a"))
    assert "block 4 must be held by 'a'" in message and "held by 'b'" in message
    assert "named twice" in refused(pool, DoubleFree, lambda: pool.free([1, 2, 1], "a"))
    assert pool.owners(1) == ("a",)


def test_share_refuses_what_holds_nothing_that_is_known() -> None:
    pool = BlockAllocator(6)
    pool.allocate(2, "a")
    refused(pool, StaleHandleError, lambda: pool.share([1, 4], "b"))
    refused(pool, SpecError, lambda: pool.share([1, 0], "b"))
    refused(pool, SpecError, lambda: pool.share([1, 2], "a"))
    refused(pool, SpecError, lambda: pool.share([1, 1], "b"))


def test_a_digest_has_one_block_and_a_block_one_digest() -> None:
    pool = BlockAllocator(6)
    pool.allocate(3, "a")
    assert pool.publish(1, A) and pool.publish(1, A)
    assert not pool.publish(2, A) and pool.lookup(A) == 1 and not pool.is_published(2)
    refused(pool, SpecError, lambda: pool.publish(1, B))
    refused(pool, StaleHandleError, lambda: pool.publish(5, B))
    refused(pool, StaleHandleError, lambda: pool.publish(0, B))
    pool.unpublish(1)
    assert pool.lookup(A) is None and pool.publish(2, A)


def test_unpublishing_a_free_block_puts_it_among_the_others() -> None:
    pool = BlockAllocator(3)
    pool.allocate(2, "a")
    pool.publish(1, A)
    pool.publish(2, B)
    pool.free([1, 2], "a")
    pool.unpublish(1)
    pool.check()
    assert pool.allocate(1, "b") == [1] and pool.lookup(B) == 2


def test_b05_check_names_blocks_and_owners_of_leaks() -> None:
    pool = BlockAllocator(8)
    pool.allocate(2, "a")
    pool.allocate(1, ("b", 7))
    pool.check()
    pool.check(["a", ("b", 7), "unused"])
    with pytest.raises(BlockLeak, match=r"block 3 is held by \('b', 7\), who is gone"):
        pool.check(["a"])


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda pool: pool._free.popitem(), "block 7 is recorded 0 times"),
        (lambda pool: pool._free.update({1: None}), "block 1 is recorded 2 times"),
        (lambda pool: pool._holders[1].clear(), "block 1 is used by nobody"),
        (lambda pool: pool._digests.update({7: B}), "block 7 is published but free"),
        (lambda pool: pool._found.clear(), "digests and blocks disagree"),
        (lambda pool: pool._free_published.update({7: pool._free.pop(7)}), "free as published"),
    ],
)
def test_check_finds_records_that_contradict_each_other(
    break_it: Callable[[BlockAllocator], object], words: str
) -> None:
    pool = BlockAllocator(8)
    pool.allocate(2, "a")
    pool.publish(2, A)
    break_it(pool)
    with pytest.raises(BlockLeak) as caught:
        pool.check()
    assert words in str(caught.value)


def test_b05_a_count_that_drifts_is_found_at_the_next_call() -> None:
    pool = BlockAllocator(8)
    pool._free.popitem()
    with pytest.raises(BlockLeak, match=r"must add up to 8, got 5 \+ 1 \+ 1"):
        pool.allocate(1, "a")


def test_a_state_brings_back_owners_identities_and_order(tmp_path) -> None:
    pool = BlockAllocator(8)
    pool.allocate(4, "a")
    pool.allocate(1, 3)
    pool.publish(1, A)
    pool.publish(2, B)
    pool.share([2], 3)
    pool.free([1, 2, 3], "a")
    save(tmp_path / "pool", pool.state_dict())
    twin = BlockAllocator(8)
    twin.load_state_dict(load(tmp_path / "pool"))
    assert twin.state_dict() == pool.state_dict() and twin.owners(2) == (3,)
    assert twin.allocate(4, "x") == pool.allocate(4, "x") == [6, 7, 3, 1]
    assert twin.lookup(B) == 2 and twin.lookup(A) is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda meta: meta.pop("free"),
        lambda meta: meta["free"].pop(),
        lambda meta: meta["free"].append(1),
        lambda meta: meta["free"].append("1"),
        lambda meta: meta["free"].append(99),
        lambda meta: meta["holders"].append([7, [None]]),
        lambda meta: meta["holders"][0].__setitem__(1, []),
        lambda meta: meta["digests"].append([2, "no hex"]),
        lambda meta: meta["digests"].append([7, A.hex()]),
        lambda meta: meta["digests"].append([2, meta["digests"][0][1]]),
        lambda meta: meta["spec"].update(blocks=9),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(edit: Callable[[dict], object]) -> None:
    pool = BlockAllocator(8)
    pool.allocate(3, "a")
    pool.publish(1, A)
    state = pool.state_dict()
    edit(state["meta"])
    twin = BlockAllocator(8)
    twin.allocate(5, "b")
    refused(twin, SnapshotError, lambda: twin.load_state_dict(state))


def test_only_strings_and_integers_can_be_saved_as_owners() -> None:
    pool = BlockAllocator(8)
    pool.allocate(1, ("a", 1))
    with pytest.raises(SnapshotError, match="the owner of block 1 must be a str or int"):
        pool.state_dict()


def test_an_owner_must_be_hashable_and_a_count_whole() -> None:
    pool = BlockAllocator(8)
    for call in (pool.allocate, lambda _, owner: pool.share([1], owner)):
        refused(pool, DtypeError, lambda call=call: call(1, ["a"]))
    refused(pool, DtypeError, lambda: pool.free([1], {}))
    refused(pool, DtypeError, lambda: pool.allocate(1.0, "a"))
    refused(pool, SpecError, lambda: pool.allocate(-1, "a"))
    with pytest.raises(SpecError):
        BlockAllocator(1)


def test_a_digest_covers_everything_before_it() -> None:
    ids = np.arange(10)
    first, second = chain(ids, 4)
    assert first == sha256(ROOT + ids[:4].tobytes()).digest()
    assert second == sha256(first + ids[4:8].tobytes()).digest()
    assert list(chain(ids, 4, [first])) == [second] and list(chain(ids[:3], 4)) == []
    moved = np.concatenate([ids[4:8], ids[4:8]])
    assert list(chain(moved, 4))[1] != second


@pytest.mark.parametrize(
    "given",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int32), torch.tensor([1, 2])],
    ids=lambda given: type(given).__name__,
)
def test_token_ids_come_in_any_integers(given: object) -> None:
    ids = token_ids("ids", given)
    assert ids.dtype == np.int64 and ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "given",
    [[1.0], [True], ["a"], "ab", {1: 2}, [2**70], np.array([2**63], np.uint64), torch.ones(2)],
    ids=str,
)
def test_other_things_are_no_token_ids(given: object) -> None:
    with pytest.raises(DtypeError):
        token_ids("ids", given)


@pytest.mark.parametrize("given", [[[1, 2]], [[1], [1, 2]], torch.zeros(2, 2, dtype=torch.int64)])
def test_token_ids_have_one_axis(given: object) -> None:
    with pytest.raises(ShapeError):
        token_ids("ids", given)
