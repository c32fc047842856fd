"""Work out what one step needs of a pool, exactly, before anything changes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from kv_core.blocks import BlockAllocator
from kv_core.errors import CapacityError, OutOfBlocks
from kv_core.prefixes import Ids, chain
from kv_core.sequence_state import SequenceState


@dataclass(slots=True)
class RowPlan:
    """What one request of a step needs.

    Attributes:
        request: Its id.
        state: The sequence; one that starts is not yet in the table, its shared blocks not yet
            shared.
        tokens: New tokens that get a slot.
        ids: Their token ids, if they were given; of a new sequence all, the reused ones included.
        starts: Whether the sequence is new.
        reused: Tokens of a new sequence that are stored already.
        evicts: Whole blocks at its front that its next query does not see.
        copies: Whether its last block is copied before it is written.
        unpublishes: Whether its last block loses its identity because it is written in place.
        allocates: Blocks it takes, the copy included.
    """

    request: Hashable
    state: SequenceState
    tokens: int
    ids: Ids | None
    starts: bool
    reused: int = 0
    evicts: int = 0
    copies: bool = False
    unpublishes: bool = False
    allocates: int = 0

    @property
    def context(self) -> int:
        """Tokens that the blocks hold after the step, unless more are evicted."""
        return self.state.context + self.tokens


@dataclass(slots=True)
class _Forecast:
    """Reference counts and identities as they will be, on top of an allocator that is only read."""

    allocator: BlockAllocator
    counts: dict[int, int] = field(default_factory=dict)
    unpublished: set[int] = field(default_factory=set)
    free: int = 0

    def __post_init__(self) -> None:
        self.free = self.allocator.num_free

    def count(self, block: int) -> int:
        return self.counts.get(block, self.allocator.count(block))

    def release(self, block: int) -> None:
        self.counts[block] = self.count(block) - 1
        self.free += not self.counts[block]

    def share(self, block: int) -> None:
        self.free -= not self.count(block)
        self.counts[block] = self.count(block) + 1

    def lookup(self, digest: bytes) -> int | None:
        block = self.allocator.lookup(digest)
        return None if block in self.unpublished else block


def find_prefix(
    allocator: "BlockAllocator | _Forecast", ids: Ids, block_size: int
) -> tuple[list[int], list[bytes]]:
    """Return the longest published chain of full blocks at the start of ``ids``.

    At least one token is left over: without a query there is nothing to go on from.

    Returns:
        Block ids and their digests.
    """
    blocks: list[int] = []
    digests: list[bytes] = []
    for digest in chain(ids[: max(len(ids) - 1, 0)], block_size):
        block = allocator.lookup(digest)
        if block is None:
            break
        blocks.append(block)
        digests.append(digest)
    return blocks, digests


def unseen(length: int, window: int | None) -> int:
    """Return how many tokens at the front the query at position ``length`` does not see."""
    return 0 if window is None else max(0, length - window + 1)


def plan_append(
    allocator: BlockAllocator,
    sequences: Mapping[Hashable, SequenceState],
    given: Mapping[Hashable, tuple[int, Ids | None]],
    *,
    block_size: int,
    max_blocks: int,
    window: int | None,
    full_row: str,
) -> list[RowPlan]:
    """Plan one step: evict everywhere, then request by request find, copy and allocate.

    Nothing is changed, neither the allocator nor a sequence of the table.

    Args:
        allocator: The pool.
        sequences: All sequences by request.
        given: Number of new tokens of each request of the step and their ids, if known.
        block_size: N.
        max_blocks: M, blocks that a sequence may hold.
        window: Tokens that a query sees, itself included; None for all.
        full_row: What to do about a sequence of more than M blocks, for the message.

    Raises:
        CapacityError: A sequence would hold more than M blocks.
        OutOfBlocks: Together they need more blocks than are free.
    """
    pool = _Forecast(allocator)
    plans = []
    for request, (count, ids) in given.items():
        known = sequences.get(request)
        state = known or SequenceState.empty(max_blocks)
        plan = RowPlan(request, state, count, ids, known is None)
        if known:
            plan.evicts = max(0, unseen(state.length, window) - state.dropped) // block_size
            for block in state.blocks[: plan.evicts]:
                pool.release(block)
        plans.append(plan)
    for plan in plans:
        if plan.starts and plan.ids is not None:
            _reuse(plan, pool, block_size, max_blocks, window)
        held = plan.state.held - plan.evicts
        context = plan.context - plan.evicts * block_size
        needs = -(-context // block_size)
        if needs > max_blocks:
            raise CapacityError(
                f"request {plan.request!r} needs {needs} blocks of {block_size} tokens for its "
                f"{context} tokens, got room for {max_blocks}; {full_row}"
            )
        plan.allocates = needs - held
        if (context - plan.tokens) % block_size:  # its last block has room and is written
            last = int(plan.state.row[plan.state.held - 1])
            if pool.count(last) > 1:
                plan.copies, plan.allocates = True, plan.allocates + 1
                pool.release(last)
            elif allocator.is_published(last):
                plan.unpublishes = True
                pool.unpublished.add(last)
    needed = sum(plan.allocates for plan in plans)
    if needed > pool.free:
        copies = sum(plan.copies for plan in plans)
        raise OutOfBlocks(
            f"the step needs {needed} blocks ({copies} of them to copy shared ones), got "
            f"{max(pool.free, 0)} free of {allocator.blocks} ({allocator.num_used} used, "
            f"{allocator.num_reserved} reserved); free(), truncate() or evict() a sequence and "
            "append again, or allocate the layers with more blocks"
        )
    return plans


def _reuse(
    plan: RowPlan, pool: _Forecast, block_size: int, max_blocks: int, window: int | None
) -> None:
    """Let a new sequence begin with the published blocks that hold the start of its prompt."""
    assert plan.ids is not None
    blocks, digests = find_prefix(pool, plan.ids, block_size)
    reused = len(blocks) * block_size
    skipped = min(unseen(reused, window) // block_size, len(blocks))
    if len(blocks) - skipped > max_blocks:  # the prompt is refused for its length anyway
        return
    state, plan.reused = plan.state, reused
    for block in blocks[skipped:]:
        pool.share(block)
    state.hold(blocks[skipped:])
    state.length, state.dropped = reused, skipped * block_size
    state.digests = digests
    state.ids.frombytes(plan.ids[:reused].tobytes())
    plan.ids = plan.ids[reused:]
    plan.tokens -= reused
