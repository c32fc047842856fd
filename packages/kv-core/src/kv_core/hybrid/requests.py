"""Which request has which slot and blocks, and whether the rings still hold what it needs."""

from collections.abc import Collection, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from kv_core.blocks import BlockAllocator
from kv_core.errors import (
    OutOfBlocks,
    OutOfSlots,
    RollbackTooDeep,
    SpecError,
    UnknownRequest,
)
from kv_core.hybrid.records import RequestRecord, check_hashable
from kv_core.hybrid.spec import HybridSpec
from kv_core.hybrid.state_pool import StateCachePool

_SHOWN = 8  # names that one message lists


class RequestTable:
    """Records of requests, free slots and the allocator of blocks.

    Args:
        spec: Sizes.
        states: State pool of each layer.
        slots: Slots of those pools.
        blocks: Blocks of the pools, the null block included.

    Attributes:
        records: By request, the oldest first.
        free_slots: The next one to be taken is last.
        allocator: Who holds which block.
    """

    def __init__(
        self, spec: HybridSpec, states: Sequence[StateCachePool], slots: int, blocks: int
    ) -> None:
        """Start with everything free."""
        self._spec, self._states, self.slots = spec, states, slots
        self.records: dict[Hashable, RequestRecord] = {}
        self.free_slots = list(reversed(range(slots)))
        self.allocator = BlockAllocator(blocks)

    def find(self, request: Hashable) -> RequestRecord:
        """Return the record of a request.

        Raises:
            UnknownRequest: There is none.
        """
        check_hashable(request)
        record = self.records.get(request)
        if record is None:
            raise UnknownRequest(
                f"request {request!r} must be one of the {len(self.records)} that are known, got "
                "another; acquire() starts one, free() ends it"
            )
        return record

    def check_new(self, request: Hashable) -> None:
        """Check that a request is not there yet.

        Raises:
            SpecError: It is.
        """
        check_hashable(request)
        if request in self.records:
            raise SpecError(
                f"request {request!r} must be new, got one of {self.records[request].length} "
                "tokens; free() it first or choose another id"
            )

    def check_slots(self, requests: Sequence[Hashable]) -> None:
        """Check that each of the new requests finds a slot.

        Raises:
            OutOfSlots: Fewer are free.
        """
        free = len(self.free_slots)
        if len(requests) > free:
            raise OutOfSlots(
                f"{len(requests)} slot(s) must be free for {listed(requests)}, got {free} free of "
                f"{self.slots}; free() requests, or build the manager with more slots"
            )

    def check_blocks(self, count: int, what: str) -> None:
        """Check that there are enough free blocks.

        Raises:
            OutOfBlocks: Fewer are free.
        """
        free = self.allocator.num_free
        if count > free:
            raise OutOfBlocks(
                f"{count} block(s) must be free for {what}, got {free} free of "
                f"{self.allocator.blocks}; free() requests or release() snapshots, or build the "
                "manager with more blocks"
            )

    def check_depth(self, request: Hashable, written: int, length: int) -> None:
        """Check that rings written up to ``written`` hold what a request needs from ``length`` on.

        Raises:
            RollbackTooDeep: They have lost some of it.
        """
        rings = [(self._spec.ring, self._spec.window)]
        rings += [(kind.tail, kind.span) for kind in self._spec.kinds]
        if not exact_after(written, length, rings):
            raise RollbackTooDeep(
                f"request {request!r} cannot go back to {length} tokens: rings of "
                f"{self._spec.ring} rows and tails of {[kind.tail for kind in self._spec.kinds]} "
                f"were written up to {written} and have lost rows that the next token needs; keep "
                f"more tokens, or build the spec with for_draft({written - length + 1})"
            )

    def has_state(self, record: RequestRecord, length: int) -> bool:
        """Whether the rings hold the state at ``length``, which ends all windows."""
        rings = [(self._spec.ring, self._spec.window)]
        rings += [(kind.tail, kind.ratio + 1) for kind in self._spec.kinds if kind.overlap]
        return length >= record.floor and exact_after(record.written, length, rings)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a request of ``tokens``; none where no layer compresses."""
        return self._spec.blocks_for(tokens) if self._spec.kinds else 0

    def missing(self, request: Hashable, tokens: int) -> int:
        """Return how many blocks a request lacks to hold ``tokens``."""
        record = self.records.get(request)
        return max(0, self.blocks_for(tokens) - (len(record.blocks) if record else 0))

    def release(self, request: Hashable) -> None:
        """Give back a request's blocks and slot, and forget it."""
        record = self.records.pop(request)
        self.allocator.free(record.blocks, request)
        self.free_slots.append(record.slot)

    def trim(self, request: Hashable, kept: int) -> None:
        """Give back all but the first ``kept`` blocks of a request."""
        record = self.records[request]
        self.allocator.free(record.blocks[kept:], request)
        del record.blocks[kept:]

    def trim_to_length(self, request: Hashable) -> None:
        """Give back blocks past a request's length, and past what its prefix brought."""
        record = self.records[request]
        self.trim(request, self.blocks_for(max(record.length, record.stored)))

    def valid(self, record: RequestRecord) -> int:
        """Return how many ring rows of a layer hold a committed token of a request."""
        return max(0, record.length - max(0, record.written - self._spec.ring, record.first))

    def forget(self, requests: Collection[Hashable]) -> None:
        """Mark ring rows past each request's length as empty, in every layer."""
        if not requests:
            return
        records = [self.records[request] for request in requests]
        slots = self._upload([record.slot for record in records], torch.int64)
        lengths = self._upload([record.length for record in records], torch.int32)
        for state in self._states:
            state.forget(slots, lengths)

    def empty(self, requests: Collection[Hashable]) -> None:
        """Mark every ring row of new requests as empty, in every layer."""
        if not requests:
            return
        slots = self._upload([self.records[request].slot for request in requests], torch.int64)
        for state in self._states:
            state.forget(slots, torch.zeros_like(slots, dtype=torch.int32))

    def _upload(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        device = self._states[0].positions.device
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def exact_after(old: int, new: int, rings: Iterable[tuple[int, int]]) -> bool:
    """Whether rings that were written up to ``old`` hold all that is needed from ``new`` on.

    Args:
        old: Length that was written.
        new: Length to go back to.
        rings: Size of each ring, and how many rows a reader needs with the one it adds.
    """
    return all(max(0, new - keep + 1) >= max(0, old - size) for size, keep in rings)


def listed(names: Collection[Hashable]) -> str:
    """Return the first few names for a message."""
    names = list(names)
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
