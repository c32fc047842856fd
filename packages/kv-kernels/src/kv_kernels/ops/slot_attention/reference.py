"""What slot_attention means, in plain torch: exact, on any device, for every format."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kv_kernels.ops.slot_attention.parts import Mask, Part, empty_output

_SCORES = 1 << 22  # scores of one block of queries, 16 MB: large products, few of them
_KEYS = 4096  # keys converted to FP32 at a time

Ranges = list[tuple[int, int]]


def attend(
    q: Tensor, parts: Sequence[Part], mask: Mask, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attend in FP32, one block of queries at a time.

    Queries of one segment see the same keys, so the keys that nobody may see are left out rather
    than masked: they are never read, and may hold anything. A NaN that a query sees reaches that
    query and no other.

    Beside its output a call needs at most twice 16 MB of scores (or one query's scores, if those
    are more) and FP32 copies of the queries of a block and of 4096 keys. The mask is read on the
    host, so on CUDA a call waits for the device and cannot be captured in a graph.

    Args:
        q: ``[B, Hq, N, D]``.
        parts: Keys ``[B, H, *, D]`` and values ``[B, H, *, Dv]``, in key order.
        mask: Which segment of queries sees which segment of keys.
        scale: Factor of the scores.
        return_lse: Whether to fill the second output.

    Returns:
        ``[B, Hq, N, Dv]`` in the dtype of ``q``, and FP32 ``[B, Hq, N]`` or an empty tensor. A
        query that sees no key gets 0 and minus infinity.
    """
    B, Hq, N, _ = q.shape
    out = empty_output(q, parts[0].v.shape[3])
    lse = q.new_empty((B, Hq, N) if return_lse else (0,), dtype=torch.float32)
    lengths = [part.k.shape[2] for part in parts]
    for queries, keys in _groups(mask, N, sum(lengths)):
        runs = [parts[i].narrow(*run) for i, run in _in_parts(keys, lengths)]
        visible = sum(stop - start for start, stop in keys)
        limit = max(1, _SCORES // max(1, B * Hq * visible))
        for block in _blocks(queries, limit):
            rows = [q[:, :, start:stop] for start, stop in block]
            # one long row is a slice already, and cat would copy it
            block_out, block_lse = _attend(
                rows[0] if len(rows) == 1 else torch.cat(rows, 2), runs, scale, out
            )
            done = 0
            for start, stop in block:
                piece = slice(done, done + stop - start)
                out[:, :, start:stop] = block_out[:, :, piece]
                if return_lse:
                    lse[:, :, start:stop] = block_lse[:, :, piece]
                done = piece.stop
    return out, lse


def _attend(q: Tensor, runs: list[Part], scale: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Attend every key of ``runs`` from every row of ``q``, ``[B, Hq, n, D]``, in FP32."""
    B, Hq, n, D = q.shape
    if not runs:
        empty = q.new_zeros(B, Hq, n, like.shape[3], dtype=torch.float32)
        return empty, q.new_full((B, Hq, n), -torch.inf, dtype=torch.float32)
    H = runs[0].k.shape[1]
    # the G query heads of a key head stand below each other: [B, H, G * n, D]
    rows = (q.float() * scale).reshape(B, H, Hq // H * n, D)
    scores = []
    for k, _, k_scale, _ in runs:
        score = rows @ k.float().mT
        scores.append(score if k_scale is None else score.mul_(k_scale[:, :, None]))
    weights = scores[0] if len(scores) == 1 else torch.cat(scores, -1)  # [B, H, G * n, visible]
    del scores
    peak = weights.amax(-1, keepdim=True)
    weights.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = None
    start = 0
    for _, v, _, v_scale in runs:
        weight = weights[..., start : start + v.shape[2]]
        if v_scale is not None:
            weight = weight * v_scale[:, :, None]
        out = weight @ v.float() if out is None else out.add_(weight @ v.float())
        start += v.shape[2]
    assert out is not None
    lse = peak.add(total.log())
    return out.div_(total).reshape(B, Hq, n, -1), lse.reshape(B, Hq, n)


def _groups(mask: Mask, q_len: int, kv_len: int) -> Iterator[tuple[Ranges, Ranges]]:
    """Yield queries that see the same keys, with those keys, as ranges of tokens."""
    table = mask.table.cpu()
    q_runs = _runs(mask.q_segment[:q_len].cpu())
    kv_runs = _runs(mask.kv_segment[:kv_len].cpu())
    groups: dict[tuple[bool, ...], Ranges] = {}
    for segment, run in q_runs:
        _extend(groups.setdefault(tuple(table[segment].tolist()), []), run)
    for sees, queries in groups.items():
        keys: Ranges = []
        for segment, run in kv_runs:
            if sees[segment]:
                _extend(keys, run)
        yield queries, keys


def _runs(segments: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """Turn one segment id for each token into (id, range of tokens) pairs."""
    ids, lengths = torch.unique_consecutive(segments, return_counts=True)
    stops = lengths.cumsum(0)
    ranges = zip((stops - lengths).tolist(), stops.tolist(), strict=True)
    return list(zip(ids.tolist(), ranges, strict=True))


def _extend(ranges: Ranges, run: tuple[int, int]) -> None:
    """Add ``run`` behind ``ranges``, as part of the last one where they touch."""
    if ranges and ranges[-1][1] == run[0]:
        ranges[-1] = (ranges[-1][0], run[1])
    else:
        ranges.append(run)


def _in_parts(keys: Ranges, lengths: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Cut ranges over all keys into (part, range in that part), at most ``_KEYS`` long."""
    offset = 0
    for i, length in enumerate(lengths):
        for start, stop in keys:
            start, stop = max(start - offset, 0), min(stop - offset, length)
            for cut in range(start, stop, _KEYS):
                yield i, (cut, min(cut + _KEYS, stop))
        offset += length


def _blocks(queries: Ranges, limit: int) -> Iterator[Ranges]:
    """Cut ranges of queries into blocks of at most ``limit`` queries."""
    block: Ranges = []
    room = limit
    for start, stop in queries:
        while start < stop:
            cut = min(stop, start + room)
            block.append((start, cut))
            room -= cut - start
            start = cut
            if not room:
                yield block
                block, room = [], limit
    if block:
        yield block
