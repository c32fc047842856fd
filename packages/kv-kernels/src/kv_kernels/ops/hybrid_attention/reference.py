"""What hybrid_attention means, in plain torch: fixed shapes, on any device, for every format."""

from collections.abc import Iterator

import torch
from kv_core.hybrid.reference import rotate
from kv_core.hybrid.rows import RowFormat, RowTensors, decode_rows, encode_rows
from torch import Tensor

from kv_kernels.ops.hybrid_gather import ELEMENTS, PIECE, bound, locate, take


def run(
    q: Tensor,
    kv_new: Tensor,
    sinks: Tensor | None,
    ring: RowTensors,
    held: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    pool: RowTensors | None,
    block_table: Tensor | None,
    vis: Tensor | None,
    picked: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    window: int,
    row_format: RowFormat,
    group: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in FP32, one block of queries and 512 rows at a time.

    Every token has its own copy of the rows it sees, in an order that its position alone decides,
    and pieces of a fixed size are added up one after the other: so a token's result does not depend
    on the step. On a device all entries that the table has room for are looked at, so that nothing
    waits for it. Beside its output a call needs some copies of 32 MB.

    Args:
        q: ``[T, Hq, D]``.
        kv_new: ``[T, D]``.
        sinks: ``[Hq]`` or None.
        ring: ``[B, ring, ...]`` stored rows.
        held: ``[B, ring]`` position that each row holds.
        request_slots: ``[B]``.
        seq_start: ``[B]`` position of each request's first token in this step.
        request_ids: ``[T]``, -1 for padding.
        positions: ``[T]``, -1 for padding.
        pool: ``[P, N, ...]`` entries, or None.
        block_table: ``[B, M]``; a block id outside the pool is not seen.
        vis: ``[T]`` entries that each token sees.
        picked: ``[T, k]`` or None for all.
        cos: ``[positions, R / 2]`` or None.
        sin: Like ``cos``.
        scale: Factor of the scores.
        window: Rows that a query sees, its own included.
        row_format: How rows are stored.
        group: Channels of an FP8 row that share a scale.
        return_lse: Whether to fill the second output.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``, and FP32 ``[T, Hq]`` or an empty tensor.
    """
    T, Hq, D = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((T, Hq) if return_lse else (0,), dtype=torch.float32)
    rope_dim = 0 if ring.rope is None else ring.rope.shape[-1]
    new = decode_rows(encode_rows(kv_new, row_format, rope_dim, group), row_format, group)
    limit = max(1, ELEMENTS // (PIECE * D))
    for start in range(0, T, limit):
        rows = slice(start, min(start + limit, T))
        total = _Softmax(q[rows].float(), scale)
        owners, own = request_ids[rows], positions[rows]
        tokens = torch.arange(rows.start, rows.stop, device=q.device)
        for piece in _window(
            new,
            ring,
            held,
            request_slots,
            seq_start,
            owners,
            own,
            tokens,
            window,
            row_format,
            group,
        ):
            total.add(*piece)
        if pool is not None and block_table is not None and vis is not None:
            names = None if picked is None else picked[rows]
            for piece in _entries(pool, block_table, vis[rows], names, owners, row_format, group):
                total.add(*piece)
        result = total.result(sinks)
        if cos is not None and sin is not None:
            at = own.long().repeat_interleave(Hq)
            result = rotate(result.flatten(0, 1), cos, -sin, at).view(result.shape)
            result.masked_fill_((own < 0)[:, None, None], 0.0)
        out[rows] = result.to(q.dtype)
        if return_lse:
            lse[rows] = total.lse()
    return out, lse


class _Softmax:
    """Sums of one block of queries, over pieces of what they see."""

    def __init__(self, q: Tensor, scale: float) -> None:
        """Start with nothing seen."""
        self._q, self._scale = q, scale
        self._peak = q.new_full(q.shape[:2], -torch.inf)
        self._weight = q.new_zeros(q.shape[:2])
        self._sum = torch.zeros_like(q)

    def add(self, rows: Tensor, visible: Tensor) -> None:
        """Add rows ``[n, s, D]``, zero where they are not visible ``[n, s]``."""
        scores = torch.bmm(self._q, rows.mT).mul_(self._scale)
        scores.masked_fill_(~visible[:, None], -torch.inf)
        peak = torch.maximum(self._peak, scores.amax(-1))
        # a query that has seen nothing so far has no peak to subtract
        base = peak.masked_fill(peak == -torch.inf, 0.0)
        weights = scores.sub_(base[..., None]).exp_()
        keep = (self._peak - base).exp_()
        self._weight = self._weight * keep + weights.sum(-1)
        self._sum.mul_(keep[..., None]).baddbmm_(weights, rows)
        self._peak = peak

    def result(self, sinks: Tensor | None) -> Tensor:
        """Return ``[n, Hq, D]`` FP32, 0 where nothing was seen."""
        total = self._weight
        if sinks is not None:
            base = self._peak.masked_fill(self._peak == -torch.inf, 0.0)
            total = total + (sinks.float() - base).exp()
        return (self._sum / total[..., None]).masked_fill_((self._weight == 0)[..., None], 0.0)

    def lse(self) -> Tensor:
        """Return ``[n, Hq]``, minus infinity where nothing was seen."""
        return self._peak + self._weight.log()


def _window(
    new: Tensor,
    ring: RowTensors,
    held: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    owners: Tensor,
    positions: Tensor,
    tokens: Tensor,
    window: int,
    row_format: RowFormat,
    group: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows ``[n, s, D]`` of each token's window, newest first, and which are visible."""
    request = owners.clamp(min=0).long()
    slot = request_slots[request].clamp(min=0).long()[:, None]
    first = seq_start[request].long()[:, None]
    for start in range(0, window, PIECE):
        behind = torch.arange(start, min(start + PIECE, window), device=new.device)
        at = positions.long()[:, None] - behind
        exists = (at >= 0) & (owners >= 0)[:, None]
        is_new = exists & (at >= first)
        row = at % held.shape[1]
        is_held = exists & ~is_new & (held[slot, row] == at)
        old = decode_rows(RowTensors(*take(ring, slot, row)), row_format, group)  # type: ignore[arg-type]
        mine = new[(tokens[:, None] - behind).clamp(min=0)]
        visible = is_new | is_held
        rows = torch.where(is_new[..., None], mine, old).masked_fill_(~visible[..., None], 0.0)
        yield rows, visible


def _entries(
    pool: RowTensors,
    block_table: Tensor,
    vis: Tensor,
    picked: Tensor | None,
    owners: Tensor,
    row_format: RowFormat,
    group: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield entries ``[n, s, D]`` that tokens may see, and which are visible."""
    P, N = pool.codes.shape[:2]
    seen = vis.long()[:, None]
    room = block_table.shape[1] * N
    count = bound(seen, room) if picked is None else picked.shape[1]
    piece = min(PIECE, room if picked is None else max(count, 1))
    for start in range(0, count, piece):
        if picked is None:
            entries = torch.arange(start, start + piece, device=vis.device)[None]
            entries = entries.expand(len(vis), -1)
        else:
            entries = picked[:, start : start + piece].long()
        block, row, found = locate(entries, block_table, owners, P, N)
        visible = found & (entries < seen)
        rows = decode_rows(RowTensors(*take(pool, block, row)), row_format, group)  # type: ignore[arg-type]
        yield rows.masked_fill_(~visible[..., None], 0.0), visible
