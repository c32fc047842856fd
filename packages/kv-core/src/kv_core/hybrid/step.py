"""The index tensors of one forward pass: one set, shared by the handles of all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_core.checks import check_int
from kv_core.errors import SpecError
from kv_core.hybrid.spec import HybridSpec
from kv_core.step_buffers import aligned, bring

_INT32 = 2**31


@dataclass(slots=True, eq=False)
class KindStep:
    """What a step means for the layers of one ratio. All INT32.

    Attributes:
        tail_slot: ``[T]`` row of the tail, ``slot * tail + position % tail``, that a token's value
            and gate go to; -1 for none. Each row has one token at most.
        entry_slot: ``[T]`` row of the pool, ``block * N + entry % N``, for the entry that a token
            closes; -1 for none.
        vis: ``[T]`` entries that a token sees, the one it closes included; 0 for padding.
        closing: ``[C]`` tokens whose ``entry_slot`` is not -1, in order, then -1. C is
            ``min(T, T // ratio + B)``, which no step exceeds.
        entry_lens: ``[B]`` entries of each request after this step; 0 for padding.
        closings: How many tokens close an entry, as the host knew when the step was made.
    """

    tail_slot: Tensor
    entry_slot: Tensor
    vis: Tensor
    closing: Tensor
    entry_lens: Tensor
    closings: int


@dataclass(slots=True, eq=False)
class HybridStep:
    """The new tokens of one forward pass, request after request. All tensors INT32.

    Attributes:
        request_slots: ``[B]`` slot of each request; -1 for padding.
        cu_tokens: ``[B + 1]`` the tokens of request b are ``cu_tokens[b]`` up to
            ``cu_tokens[b + 1]``; tokens behind the last are padding.
        seq_start: ``[B]`` position of a request's first token in this step; -1 for padding.
        request_ids: ``[T]`` b of each token; -1 for padding.
        positions: ``[T]`` position of each token in its request; -1 for padding.
        ring_slot: ``[T]`` row of the ring, ``slot * ring + position % ring``, that a token's row
            goes to; -1 for none. Each row has one token at most, the newest.
        block_table: ``[B, M]`` block ids of each request; what is not used is the null block 0.
        block_lens: ``[B]`` blocks of each request; 0 for padding.
        kinds: A ``KindStep`` for each ratio.
    """

    request_slots: Tensor
    cu_tokens: Tensor
    seq_start: Tensor
    request_ids: Tensor
    positions: Tensor
    ring_slot: Tensor
    block_table: Tensor
    block_lens: Tensor
    kinds: dict[int, KindStep]

    @property
    def num_tokens(self) -> int:
        """T, tokens of the step with padding."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """B, requests of the step with padding."""
        return self.request_slots.shape[0]


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of one request in a step.

    Attributes:
        slot: Slot of the request.
        start: Position of the first.
        count: How many.
        blocks: Block ids of the request, those for this step included.
        stored: Tokens at the front whose entries are in place already and must not be written.
    """

    slot: int
    start: int
    count: int
    blocks: Sequence[int]
    stored: int


class HybridStepBuffers:
    """Preallocated memory of a step, rewritten in place; no address ever changes.

    Args:
        spec: Sizes.
        slots: Slots of the state pools.
        blocks: Blocks of the pools.
        max_requests: Most requests of a step.
        max_tokens: Most tokens of a step.
        max_blocks: M, entries of a table row.
        device: Where the tensors live.

    Raises:
        SpecError: Rows that INT32 cannot number.
    """

    def __init__(
        self,
        spec: HybridSpec,
        *,
        slots: int,
        blocks: int,
        max_requests: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device | str,
    ) -> None:
        """Allocate everything."""
        rows = max(
            slots * max([spec.ring, *(kind.tail for kind in spec.kinds)]),
            blocks * max([1, *(spec.block_tokens // kind.ratio for kind in spec.kinds)]),
        )
        if rows >= _INT32:
            raise SpecError(
                f"slots and blocks must give less than 2^31 rows, got {rows} (slots={slots}, "
                f"blocks={blocks}); build several caches"
            )
        self._spec, self._max_blocks = spec, max_blocks
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._at: dict[str, int] = {}
        end = 0
        for name in ("request_slots", "seq_start", "block_lens", *self._per_kind("entry_lens")):
            self._at[name], end = end, end + aligned(max_requests)
        self._at["cu_tokens"], end = end, end + aligned(max_requests + 1)
        tokens = self._per_kind("tail_slot", "entry_slot", "vis", "closing")
        for name in ("request_ids", "positions", "ring_slot", *tokens):
            self._at[name], end = end, end + aligned(max_tokens)
        self._table_at = end
        self._image = np.full(end + max_requests * max_blocks, -1, np.int32)
        with torch.inference_mode(False):  # else nothing outside of it could rewrite them
            self._ints = torch.full((self._image.size,), -1, dtype=torch.int32, device=device)

    def _per_kind(self, *names: str) -> list[str]:
        return [f"{name}.{kind.ratio}" for kind in self._spec.kinds for name in names]

    def fill(self, runs: Sequence[Run], *, num_requests: int, num_tokens: int) -> HybridStep:
        """Write the step and return its tensors, views of the same memory every time.

        Args:
            runs: One for each request, in order.
            num_requests: B with padding.
            num_tokens: T with padding.
        """
        spec, B, T = self._spec, num_requests, num_tokens
        counts = np.array([run.count for run in runs], np.int64)
        starts = np.array([run.start for run in runs], np.int64)
        slots = np.array([run.slot for run in runs], np.int64)
        lengths = starts + counts
        total = int(counts.sum())
        row = np.repeat(np.arange(len(runs)), counts)
        ends = np.cumsum(counts)
        position = np.arange(total) + np.repeat(lengths - ends, counts)
        slot, behind = slots[row], lengths[row] - position  # tokens from here to the run's end

        self._put("request_slots", slots, B, -1)
        self._put("seq_start", starts, B, -1)
        self._put("block_lens", np.array([len(run.blocks) for run in runs]), B, 0)
        self._put("cu_tokens", np.concatenate([[0], ends]), B + 1, total)
        self._put("request_ids", row, T, -1)
        self._put("positions", position, T, -1)
        self._put("ring_slot", _newest(slot, position, behind, spec.ring), T, -1)
        table = self._image[self._table_at : self._table_at + B * self._max_blocks]
        table = table.reshape(B, self._max_blocks)
        table[:] = 0
        for b, run in enumerate(runs):
            table[b, : len(run.blocks)] = run.blocks
        stored = np.array([run.stored for run in runs], np.int64)[row]
        closings = {}
        for kind in spec.kinds:
            ratio, per_block = kind.ratio, spec.block_tokens // kind.ratio
            entry = position // ratio
            closes = ((position + 1) % ratio == 0) & (position >= stored)
            block = table[row, entry // per_block].astype(np.int64)
            place = block * per_block + entry % per_block
            found = np.flatnonzero(closes)
            closings[ratio] = len(found)
            self._put(f"tail_slot.{ratio}", _newest(slot, position, behind, kind.tail), T, -1)
            self._put(f"entry_slot.{ratio}", np.where(closes, place, -1), T, -1)
            self._put(f"vis.{ratio}", (position + 1) // ratio, T, 0)
            self._put(f"closing.{ratio}", found, _most_closings(T, B, ratio), -1)
            self._put(f"entry_lens.{ratio}", lengths // ratio, B, 0)
        bring(self._image[: self._table_at + B * self._max_blocks], self._ints)
        return self._views(B, T, closings)

    def _put(self, name: str, values: NDArray[np.integer], size: int, padding: int) -> None:
        target = self._image[self._at[name] : self._at[name] + size]
        target[: len(values)], target[len(values) :] = values, padding

    def _views(self, B: int, T: int, closings: dict[int, int]) -> HybridStep:
        def view(name: str, size: int) -> Tensor:
            return self._ints[self._at[name] : self._at[name] + size]

        table = self._ints[self._table_at : self._table_at + B * self._max_blocks]
        kinds = {
            ratio: KindStep(
                tail_slot=view(f"tail_slot.{ratio}", T),
                entry_slot=view(f"entry_slot.{ratio}", T),
                vis=view(f"vis.{ratio}", T),
                closing=view(f"closing.{ratio}", _most_closings(T, B, ratio)),
                entry_lens=view(f"entry_lens.{ratio}", B),
                closings=count,
            )
            for ratio, count in closings.items()
        }
        return HybridStep(
            request_slots=view("request_slots", B),
            cu_tokens=view("cu_tokens", B + 1),
            seq_start=view("seq_start", B),
            request_ids=view("request_ids", T),
            positions=view("positions", T),
            ring_slot=view("ring_slot", T),
            block_table=table.view(B, self._max_blocks),
            block_lens=view("block_lens", B),
            kinds=kinds,
        )


def table_width(spec: HybridSpec, max_len: int) -> int:
    """Return M, entries of a table row, for requests of up to ``max_len`` tokens."""
    return max(1, spec.blocks_for(check_int("max_len", max_len, minimum=1)))


def _newest(
    slot: NDArray[np.int64], position: NDArray[np.int64], behind: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return the ring row of each token, -1 where a later token of the run takes the same."""
    return np.where(behind <= size, slot * size + position % size, -1)


def _most_closings(T: int, B: int, ratio: int) -> int:
    # a run of n tokens closes at most n // ratio + 1 windows
    return min(T, T // ratio + B)
