"""The device memory of one persistent step, and how a step is brought there."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_core.sequence_state import SequenceState
from kv_core.step import Step

_ALIGNMENT = 32  # elements between which parts start: kernels prefer aligned addresses


class StepBuffers:
    """Preallocated tensors of a step, rewritten in place; no address ever changes.

    Args:
        sequences: Rows of a step.
        max_blocks: M, entries of a table row.
        tokens: Tokens of a step.
        device: Where the tensors live.
        null_block: Whether block 0 is reserved.
    """

    def __init__(
        self,
        *,
        sequences: int,
        max_blocks: int,
        tokens: int,
        device: torch.device,
        null_block: bool,
    ) -> None:
        """Allocate everything."""
        self._max_blocks = max_blocks
        # [cu_seqlens | context_lens | block_table], so that one copy brings all three
        self._context_at = aligned(sequences + 1)
        self._table_at = self._context_at + aligned(sequences)
        self._image = np.zeros(self._table_at + sequences * max_blocks, np.int32)
        with torch.inference_mode(False):  # else nothing outside of it could rewrite them
            self._ints = torch.zeros(self._image.size, dtype=torch.int32, device=device)
            self._slots, self._positions = (
                torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2)
            )
        self.step = Step(
            slots=self._slots[:0],
            positions=self._positions[:0],
            cu_seqlens=self._ints[:1],
            block_table=self._ints[:0].view(0, max_blocks),
            context_lens=self._ints[:0],
            max_query=1,
            max_context=0,
            null_block=null_block,
        )

    def fill(
        self,
        rows: Mapping[Hashable, SequenceState],
        counts: Sequence[int],
        *,
        block_size: int,
        num_sequences: int,
        num_tokens: int,
        max_query: int,
        max_context: int,
        reused: Mapping[Hashable, int],
    ) -> Step:
        """Write the step and return it, the same object every time.

        Args:
            rows: Sequences by request, as they are with the new tokens.
            counts: New tokens of each.
            block_size: N.
            num_sequences: B, rows with padding.
            num_tokens: T, tokens with padding.
            max_query: Bound of ``counts``.
            max_context: Bound of the context lengths.
            reused: For the step.
        """
        B, T, M = len(rows), sum(counts), self._max_blocks
        table_end = self._table_at + num_sequences * M
        ends = self._image[: num_sequences + 1]
        contexts = self._image[self._context_at : self._context_at + num_sequences]
        table = self._image[self._table_at : table_end].reshape(num_sequences, M)
        ends[0], ends[B + 1 :] = 0, T
        np.cumsum(counts, out=ends[1 : B + 1])
        contexts[B:], table[B:] = 0, 0
        dropped = np.zeros(B, np.int64)
        for b, state in enumerate(rows.values()):
            contexts[b], table[b], dropped[b] = state.context, state.row, state.dropped
        slots = np.full(num_tokens, -1, np.int64)
        positions = np.zeros(num_tokens, np.int64)
        row = np.repeat(np.arange(B), counts)
        index = np.arange(T) + np.repeat(contexts[:B].astype(np.int64) - ends[1 : B + 1], counts)
        positions[:T] = index + dropped[row]
        slots[:T] = table[row, index // block_size].astype(np.int64) * block_size
        slots[:T] += index % block_size

        step = self.step
        step.slots = bring(slots, self._slots)
        step.positions = bring(positions, self._positions)
        ints = bring(self._image[:table_end], self._ints)
        step.cu_seqlens = ints[: num_sequences + 1]
        step.context_lens = ints[self._context_at : self._context_at + num_sequences]
        step.block_table = ints[self._table_at :].view(num_sequences, M)
        step.max_query, step.max_context = max_query, max_context
        step.requests, step.reused = tuple(rows), dict(reused)
        return step


def bring(source: NDArray[np.integer], target: Tensor) -> Tensor:
    """Copy to the front of ``target``, without waiting for its device, and return that part."""
    part = target[: source.size]
    # from pageable memory the driver stages the bytes before it returns: without a wait for the
    # device, and yet the host array may be rewritten at once
    return part.copy_(torch.from_numpy(source), non_blocking=True)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to where the next part of a buffer may start."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
