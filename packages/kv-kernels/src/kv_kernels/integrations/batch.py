"""The rows of one batch of a model, each a sequence of its own."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, SpecError
from numpy.typing import NDArray
from torch import Tensor

from kv_kernels.integrations.pool import Forward, Pool, Row


class Batch:
    """The rows of one batch: each a sequence of its own, whose padding is stored nowhere.

    Attributes:
        pool: Where the sequences live.
        rows: Request id of each row. The list stays the same object.
        lengths: Tokens stored of each row.
        padding: Columns of each row that hold padding, ascending.
        columns: Columns that the model has seen, padding included.
        packed: The pass that ``pack`` opened for this batch alone, which has no rows then.
    """

    def __init__(self, pool: Pool) -> None:
        """Start without rows: the first pass says how many there are."""
        self.pool = pool
        self.rows: list[Row] = []
        self.lengths: list[int] = []
        self.padding: list[list[int]] = []
        self.columns = 0
        self.packed: Forward | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float | None,
        window_left: int,
        softcap: float,
    ) -> Tensor:
        """Store one layer's new keys and values, and attend all that are stored.

        The first layer of a pass opens it, which reads the mask once; the last one closes it. An
        error takes the whole pass back.

        Args:
            layer: Index of the layer.
            query: ``[B, Hq, Q, D]``.
            keys: ``[B, H, Q, D]``.
            values: Like ``keys``.
            mask: ``[B, S]`` bool over all columns, or None for no padding.
            cu_seqlens: Starts of the sequences that one row packs, or None.
            scale: Factor of the scores.
            window_left: Keys before itself that a query sees, -1 for all.
            softcap: Bound of the scores, 0 for none.

        Returns:
            ``[B, Q, Hq, D]``, zeros for padding.
        """
        pool, how = self.pool, {"scale": scale, "window_left": window_left, "softcap": softcap}
        shape = (query.shape[0], query.shape[2])
        if self.packed is not None and pool.forward is not self.packed:
            raise SpecError(
                "what pack() returned is for one pass, the next on this pool, got another before "
                "it, or a second; call model(**cache.pack(...)) again"
            )
        try:
            forward = pool.forward
            if self.packed is not None:
                _check_packed(self.packed, shape, mask)
            elif forward is None or layer in forward.attended or forward.batch is not self:
                forward = self._start(shape, mask, cu_seqlens)
            assert forward is not None
            out = pool.attend(layer, forward, query, keys, values, how)
        except BaseException:
            pool.settle()
            raise
        forward.attended.add(layer)
        if len(forward.attended) == len(pool.layers):
            pool.forward = None
            self._finish(forward)
        return out

    def _start(
        self, shape: tuple[int, int], mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Forward:
        """Open a pass over this batch."""
        self.pool.settle()
        B, Q = shape
        if cu_seqlens is not None:
            counts = _packed_counts(shape, cu_seqlens)
            self._fit(len(counts))
            return self.pool.start(self._new(counts), shape=shape, batch=self, counts=counts)
        self._fit(B)
        index: Tensor | None = None
        counts = [Q] * B
        padding: list[list[int]] = [[] for _ in range(B)]
        if mask is not None:
            real = self._read(mask, shape)
            if not real.all():
                index = torch.from_numpy(np.flatnonzero(real)).to(mask.device)
                counts = real.sum(1).tolist()
                padding = [(self.columns + np.flatnonzero(~row)).tolist() for row in real]
        return self.pool.start(
            self._new(counts),
            shape=shape, index=index, batch=self, counts=counts, padding=padding,
        )  # fmt: skip

    def _new(self, counts: list[int]) -> dict[Hashable, int]:
        """Return how many tokens each row gets that gets any."""
        return {row: count for row, count in zip(self.rows, counts, strict=True) if count}

    def _fit(self, rows: int) -> None:
        """Make rows where none hold anything, else check that there are as many."""
        if not self.columns:
            self.rows[:] = [Row(next(self.pool.numbers)) for _ in range(rows)]
            self.lengths, self.padding = [0] * rows, [[] for _ in range(rows)]
        elif len(self.rows) != rows:
            raise SpecError(
                f"the batch must have the {len(self.rows)} rows that the cache holds, got {rows}; "
                "call reset() for another batch, or batch_repeat_interleave() to give every row "
                "several continuations"
            )

    def _read(self, mask: Tensor, shape: tuple[int, int]) -> NDArray[np.bool_]:
        """Return ``[B, Q]`` which new columns are tokens. Waits for the device, once a pass."""
        B, Q = shape
        wanted = {"B": B, "S": self.columns + Q}
        hint = (
            f"it covers the {self.columns} columns in the cache and the {Q} new ones; reset() the "
            "cache before another batch"
        )
        check_tensor("attention_mask", mask, "B S", wanted, hint=hint)
        stored = mask[:, : self.columns].sum(1, keepdim=True)
        found = torch.cat([stored, mask[:, self.columns :].long()], 1).cpu().numpy()
        for row, (got, length) in enumerate(zip(found[:, 0].tolist(), self.lengths, strict=True)):
            if got != length:
                raise SpecError(
                    f"attention_mask must keep the {length} tokens that row {row} has stored, got "
                    f"{got} in its first {self.columns} columns; a token that was stored cannot "
                    "be masked later, crop() or reset() the cache instead"
                )
        return found[:, 1:].astype(np.bool_)

    def _finish(self, forward: Forward) -> None:
        """Count the tokens of a pass that has reached the last layer."""
        if forward.batch is None:
            self.pool.publish(forward)
            return
        self.lengths = [n + new for n, new in zip(self.lengths, forward.counts, strict=True)]
        if forward.padding is None:  # packed rows: as if each were padded on the left
            self.columns = max(self.lengths)
            self.padding = [list(range(self.columns - length)) for length in self.lengths]
            return
        self.columns += forward.shape[1]
        for old, new in zip(self.padding, forward.padding, strict=True):
            old.extend(new)

    def take(self, source: Sequence[int]) -> None:
        """Let row i go on from what row ``source[i]`` holds; blocks are shared until written.

        Raises:
            SpecError: There is no such row. Nothing has changed.
        """
        self.pool.settle()
        last = len(self.rows) - 1
        for at in source:
            if not 0 <= at <= last:
                raise SpecError(f"row must be between 0 and {last}, got {at}; name a row it has")
        self.pool.free([row for at, row in enumerate(self.rows) if at not in source])
        self._go_on(self, source, kept=set(self.rows))

    def go_on_from(self, other: "Batch", source: Sequence[int]) -> None:
        """Let row i of this empty batch go on from row ``source[i]`` of another."""
        self.pool.settle()
        self._go_on(other, source, kept=set())
        self.columns = other.columns

    def _go_on(self, other: "Batch", source: Sequence[int], kept: set[Row]) -> None:
        """Take over rows: those ``kept`` as they are when first named, all others forked."""
        rows = []
        for at in source:
            row = other.rows[at]
            if row in kept:
                kept.remove(row)
            else:
                row = Row(next(self.pool.numbers))
                if other.lengths[at]:
                    self.pool.table.fork(other.rows[at], row)
            rows.append(row)
        lengths = [other.lengths[at] for at in source]
        self.padding = [list(other.padding[at]) for at in source]
        self.rows[:], self.lengths = rows, lengths

    def crop(self, columns: int) -> None:
        """Remove the last columns of every row, padding or not."""
        self.pool.settle()
        kept = max(self.columns - columns, 0)
        for at, row in enumerate(self.rows):
            padded = bisect_left(self.padding[at], kept)
            length = kept - padded
            if length < self.lengths[at]:
                self.pool.cut(row, length)
            self.lengths[at], self.padding[at] = length, self.padding[at][:padded]
        self.columns = kept

    def reset(self) -> None:
        """Give every row back."""
        self.pool.settle()
        self.pool.free(self.rows)
        self.rows[:] = []
        self.lengths, self.padding, self.columns = [], [], 0


def _packed_counts(shape: tuple[int, int], cu_seqlens: Tensor) -> list[int]:
    """Return how many tokens each packed sequence has. Waits for the device, once a pass."""
    bounds = cu_seqlens.tolist()
    counts = np.diff(bounds).tolist()
    B, Q = shape
    if B != 1 or bounds[0] != 0 or bounds[-1] != Q or min(counts, default=0) < 0:
        raise SpecError(
            f"cu_seq_lens_q must rise from 0 to the tokens of one row, got {bounds} for [{B}, {Q}] "
            "tokens; pack all sequences into one row"
        )
    return counts


def _check_packed(forward: Forward, shape: tuple[int, int], mask: Tensor | None) -> None:
    """Check that the model runs on what ``pack`` returned."""
    if forward.shape != shape or mask is not None:
        extra = " with an attention_mask" if mask is not None else ""
        raise SpecError(
            f"the model must run on the {list(forward.shape)} tokens that pack() returned, got "
            f"{list(shape)}{extra}; call model(**cache.pack(...)) as it is"
        )


def row_indices(indices: Tensor | Sequence[int], rows: int) -> list[int]:
    """Return row numbers as a list; a mask of rows is one too. Waits for the device."""
    if not isinstance(indices, Tensor):
        return [int(at) for at in indices]
    if indices.dtype == torch.bool:
        indices = indices.nonzero()[:, 0]
    if indices.dim() != 1 or indices.is_floating_point():
        raise DtypeError(
            f"indices must be a list of rows, got {list(indices.shape)} {indices.dtype}; pass "
            "integers on one axis"
        )
    return [at + rows if at < 0 else at for at in indices.tolist()]
