"""What paged_decode_attention means, in plain torch: exact, on any device, for every format."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kv_kernels.ops.cache import CacheTensors

_SCORES = 1 << 22  # scores of one block of queries, 16 MB: large products, few of them
_KEYS = 4096  # keys gathered and converted to FP32 at a time


def run(
    q: Tensor,
    cache: CacheTensors,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window_left: int,
    softcap: float,
    num_splits: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in FP32, sequence after sequence, one block of queries at a time.

    Reads the stored tokens that a block of queries sees and no others: a view of the pool where the
    blocks follow one another, a copy of 4096 keys at a time where they do not, or are not FP32. A
    NaN that was stored reaches the queries that see it and no other.

    Beside its output a call needs at most twice 16 MB of scores (or one query's scores, if those
    are more) and those copies. Tables and lengths are read on the host, so on CUDA a call waits for
    the device and cannot be captured in a graph. Keys are never split, so ``num_splits``,
    ``max_query`` and ``max_context`` are not used.

    Args:
        q: ``[T, Hq, D]``.
        cache: Keys and values of the layer.
        block_table: ``[B, M]``; a block id outside the pool reads as another block.
        context_lens: ``[B]``.
        cu_seqlens: ``[B + 1]``.
        max_query: Not used.
        max_context: Not used.
        scale: Factor of the scores.
        window_left: Tokens before its own that a query sees, -1 for all.
        softcap: Bound of the scores, 0 for none.
        num_splits: Not used.
        return_lse: Whether to fill the second output.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``, and FP32 ``[T, Hq]`` or an empty tensor. A query that
        sees nothing gets 0 and minus infinity.
    """
    T, Hq, D = q.shape
    N = cache.k.shape[1]
    out = q.new_zeros(T, Hq, D)
    lse = q.new_full((T, Hq) if return_lse else (0,), -torch.inf, dtype=torch.float32)
    edges, lengths = cu_seqlens.tolist(), context_lens.tolist()
    for b, length in enumerate(lengths):
        start, stop = edges[b], min(edges[b + 1], T)
        end = length - (edges[b + 1] - start)  # the token of query 0
        stored = min(length, block_table.shape[1] * N)
        first = start + max(0, -end)  # queries before it have no token
        if first >= stop or stored <= 0:
            continue
        blocks = block_table[b, : -(-stored // N)].tolist()
        limit = max(1, _SCORES // (Hq * stored))
        for row in range(first, stop, limit):
            rows = slice(row, min(row + limit, stop))
            span = _Span(end + rows.start - start, end + rows.stop - start, stored, window_left)
            if not span.keys:
                continue
            piece, piece_lse = _attend(q[rows], cache, blocks, span, scale, softcap)
            out[rows] = piece
            if return_lse:
                lse[rows] = piece_lse
    return out, lse


class _Span(NamedTuple):
    """A block of queries, by their tokens, and what they may see."""

    start: int  # token of the first query
    stop: int
    stored: int  # tokens in storage
    window_left: int

    @property
    def keys(self) -> range:
        """Tokens that one of the queries sees."""
        first = 0 if self.window_left < 0 else max(0, self.start - self.window_left)
        return range(first, min(self.stop, self.stored))

    def hidden(self, device: torch.device) -> Tensor | None:
        """Return ``[queries, keys]``, True where a query does not see; None if all see all."""
        keys = self.keys
        if self.stop - self.start == 1:
            return None
        query = torch.arange(self.start, self.stop, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        hidden = key > query
        if self.window_left >= 0:
            hidden |= key < query - self.window_left
        return hidden


def _attend(
    q: Tensor, cache: CacheTensors, blocks: list[int], span: _Span, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend from ``[n, Hq, D]`` consecutive tokens of one sequence; FP32 out and log-sum-exp."""
    n, Hq, D = q.shape
    H = cache.k.shape[2]
    # the G query heads of a key head stand below each other: [H, G * n, D]
    rows = q.float().unflatten(1, (H, -1)).permute(1, 2, 0, 3).reshape(H, -1, D)
    scores = []
    for k, k_scale in _stored(cache.k, cache.k_scale, blocks, span.keys):
        score = rows @ k.permute(1, 2, 0)
        scores.append(score.mul_(scale if k_scale is None else k_scale.T[:, None] * scale))
    weights = scores[0] if len(scores) == 1 else torch.cat(scores, -1)  # [H, G * n, keys]
    del scores
    if softcap > 0:
        weights.div_(softcap).tanh_().mul_(softcap)
    hidden = span.hidden(q.device)
    if hidden is not None:
        weights.unflatten(1, (-1, n)).masked_fill_(hidden, -torch.inf)
    peak = weights.amax(-1, keepdim=True)
    # a window of nothing stored, or scores of minus infinity, leave a row without a weight
    peak.masked_fill_(peak == -torch.inf, 0.0)
    weights.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.zeros_like(rows)
    start = 0
    for v, v_scale in _stored(cache.v, cache.v_scale, blocks, span.keys):
        if hidden is not None and not (v if v_scale is None else v_scale).isfinite().all():
            return _one_by_one(q, cache, blocks, span, scale, softcap)
        weight = weights[..., start : start + v.shape[0]]
        if v_scale is not None:
            weight = weight * v_scale.T[:, None]
        out.baddbmm_(weight, v.transpose(0, 1))
        start += v.shape[0]
    out.div_(total).masked_fill_(total == 0, 0.0)
    lse = peak.add_(total.log()).reshape(Hq, n).T
    return out.reshape(Hq, n, D).transpose(0, 1), lse


def _one_by_one(
    q: Tensor, cache: CacheTensors, blocks: list[int], span: _Span, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend query by query: 0 times NaN is NaN, so what is hidden may not be multiplied."""
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    for i in range(q.shape[0]):
        one = span._replace(start=span.start + i, stop=span.start + i + 1)
        if one.keys:
            out[i], lse[i] = (
                x[0] for x in _attend(q[i : i + 1], cache, blocks, one, scale, softcap)
            )
    return out, lse


def _stored(
    cache: Tensor, scale: Tensor | None, blocks: list[int], keys: range
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the stored rows of the tokens ``keys``: FP32 ``[s, H, D]`` and scales ``[s, H]``."""
    N = cache.shape[1]
    # whole blocks at a time, or a part of one that is longer
    step = max(1, _KEYS // N) * N if N <= _KEYS else _KEYS
    start = keys.start
    while start < keys.stop:
        stop = min(start - start % step + step, keys.stop)
        if N > _KEYS:  # a piece ends with its block
            stop = min(stop, start - start % N + N)
        ids = blocks[start // N : -(-stop // N)]
        inner = slice(start % N, start % N + stop - start)
        yield (
            _rows(cache, ids, inner).float(),
            None if scale is None else _rows(scale, ids, inner),
        )
        start = stop


def _rows(cache: Tensor, ids: list[int], inner: slice) -> Tensor:
    """Return rows ``inner`` of the blocks ``ids``, joined; a view where they follow each other."""
    P = cache.shape[0]
    first, count = ids[0], len(ids)
    if 0 <= first <= P - count and ids == list(range(first, first + count)):
        return cache[first : first + count].flatten(0, 1)[inner]
    at = torch.tensor(ids, device=cache.device)
    if min(ids) >= 0 and max(ids) < P:
        return cache.index_select(0, at).flatten(0, 1)[inner]
    inside = (at >= 0) & (at < P)
    picked = cache.index_select(0, torch.where(inside, at, 0))
    picked.masked_fill_(~inside.view(-1, *[1] * (cache.dim() - 1)), 0)
    return picked.flatten(0, 1)[inner]
