"""The sequences of one pool of blocks, and the forward pass that is adding to them."""

import itertools
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from kv_core.layer import KVLayer
from kv_core.sequences import SequenceTable
from kv_core.step import Step
from torch import Tensor

from kv_kernels.ops.append import append
from kv_kernels.ops.paged_decode_attention import paged_decode_attention

if TYPE_CHECKING:
    from kv_kernels.integrations.batch import Batch

_log = logging.getLogger("kv_kernels")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Request id of a row of a batch; equal to nothing else, so no id of a user's can be meant."""

    number: int


@dataclass(slots=True, eq=False)
class Forward:
    """One pass of the model, open from the first layer that attends to the last.

    Attributes:
        step: Its tokens, or None where all of them are padding.
        shape: ``(B, Q)`` of its queries.
        index: ``[T]`` where the step's tokens are among the B * Q; None if they are all of them.
        lengths: Tokens of each request of the step before it.
        batch: Whose rows it adds to; None for requests that a user named.
        counts: New tokens of each row of the batch.
        padding: New columns of each row that hold padding; None where rows are packed.
        attended: Layers that are through.
    """

    step: Step | None
    lengths: dict[Hashable, int]
    shape: tuple[int, int] = (0, 0)
    index: Tensor | None = None
    batch: "Batch | None" = None
    counts: list[int] = field(default_factory=list)
    padding: list[list[int]] | None = None
    attended: set[int] = field(default_factory=set)


class Pool:
    """Layers and the table of their sequences, shared by every cache that was forked from one.

    Attributes:
        layers: One for each layer of the model.
        table: Their sequences.
        backend: Row of the kernel table to use, or None for the first that fits.
        checked: Whether kernels read what they are given and refuse what is wrong with it.
        forward: The pass that is open, if one is.
        orphans: Rows of caches that are gone, whose blocks are given back before the next pass.
        numbers: Numbers of new rows.
    """

    def __init__(
        self, layers: list[KVLayer], table: SequenceTable, backend: str | None, checked: bool
    ) -> None:
        """Take layers and a table that knows them."""
        self.layers, self.table = layers, table
        self.backend, self.checked = backend, checked
        self.forward: Forward | None = None
        self.orphans: list[list[Row]] = []
        self.numbers = itertools.count()

    def settle(self) -> None:
        """Take back a pass that never reached the last layer, and give back lost rows."""
        forward, self.forward = self.forward, None
        if forward is not None:
            if forward.attended:
                _log.warning(
                    "a forward pass ended after %d of %d layers; its tokens are taken back",
                    len(forward.attended),
                    len(self.layers),
                )
            known = set(self.table.requests)  # without those that were freed meanwhile
            for request, length in forward.lengths.items():
                if request in known and self.table.length(request) > length:
                    self.cut(request, length)
        while self.orphans:
            self.free(self.orphans.pop())

    def cut(self, request: Hashable, length: int) -> None:
        """Keep the first tokens of a request; without any it is no longer in the table."""
        if length:
            self.table.truncate(request, length)
        else:
            self.table.free(request)

    def free(self, rows: Sequence[Row]) -> None:
        """Give back the blocks of rows that have any."""
        known = set(self.table.requests)
        for row in rows:
            if row in known:
                self.table.free(row)

    def publish(self, forward: Forward) -> None:
        """Let other requests find the blocks that a pass has filled."""
        N = self.table.block_size
        for request, length in forward.lengths.items():
            if self.table.length(request) // N > length // N:
                self.table.publish(request)

    def start(self, tokens: Mapping[Hashable, Any], **facts: Any) -> Forward:
        """Open a pass: give every new token a slot, or raise and leave all as it was.

        Args:
            tokens: Number of new tokens of each request, or their ids.
            facts: Further fields of the ``Forward``.
        """
        known = set(self.table.requests)
        lengths = {each: self.table.length(each) if each in known else 0 for each in tokens}
        step = self.table.append(tokens) if tokens else None
        self.forward = Forward(step=step, lengths=lengths, **facts)
        return self.forward

    def attend(
        self,
        layer: int,
        forward: Forward,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        how: dict[str, Any],
    ) -> Tensor:
        """Store one layer's tokens of a pass and attend; see ``Batch.attend``."""
        B, Hq, Q, D = query.shape
        step, index = forward.step, forward.index
        if step is None:
            return query.new_zeros(B, Q, Hq, D)
        # under autocast, rotated queries and keys may be wider than values
        dtype = torch.promote_types(torch.promote_types(query.dtype, keys.dtype), values.dtype)
        q, k, v = (_tokens(x, index).to(dtype) for x in (query, keys, values))
        where = self.layers[layer]
        options: dict[str, Any] = {"backend": self.backend, "checked": self.checked}
        append(where, step, k, v, **options)
        out: Tensor = paged_decode_attention(where, step, q, **how, **options)
        if index is not None:
            out = out.new_zeros(B * Q, Hq, D).index_copy_(0, index, out)
        return out.view(B, Q, Hq, D)


def _tokens(rows: Tensor, index: Tensor | None) -> Tensor:
    """Return ``[T, H, D]`` of ``[B, H, Q, D]``, without padding."""
    flat = rows.transpose(1, 2).flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)
