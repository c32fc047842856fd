"""What indexer_topk means, in plain torch: fixed shapes, and ties to the lower index."""

import torch
from kv_core.hybrid.keys import KeyFormat, KeyTensors, decode_keys, encode_keys
from torch import Tensor

from kv_kernels.ops.hybrid_gather import ELEMENTS, PIECE, bound, locate, take

_SCORES = 1 << 22  # of one block of queries, 16 MB


def run(
    iq: Tensor,
    iweights: Tensor,
    stored: KeyTensors,
    global_scale: Tensor | None,
    block_table: Tensor,
    vis: Tensor,
    request_ids: Tensor,
    k: int,
    quantize_query: bool,
    key_format: KeyFormat,
) -> tuple[Tensor, Tensor]:
    """Score in FP32, one block of queries and 512 keys at a time, and sort.

    On a device all keys that the table has room for are scored, so that nothing waits for it. The
    sort is stable: of equal scores the lower index comes first.

    Args:
        iq: ``[T, Hi, I]``.
        iweights: ``[T, Hi]``.
        stored: ``[P, N, ...]`` keys.
        global_scale: ``[1]`` of NVFP4 keys.
        block_table: ``[B, M]``; a block id outside the pool reads as zeros.
        vis: ``[T]`` keys that each token sees.
        request_ids: ``[T]``.
        k: Width of the result.
        quantize_query: Whether to round the queries as keys are.
        key_format: How keys are stored.

    Returns:
        ``[T, k]`` INT32 ascending, then -1; and ``[T]`` INT32 counts.
    """
    T, Hi, width = iq.shape
    N = stored.codes.shape[1]
    queries, weights = iq.float(), iweights.float()
    if quantize_query:
        queries = decode_keys(
            encode_keys(queries, key_format, global_scale), key_format, global_scale
        )
    seen = torch.where(request_ids >= 0, vis, 0).long()
    keys = bound(seen, block_table.shape[1] * N)
    picked = torch.full((T, k), -1, dtype=torch.int32, device=iq.device)
    limit = max(1, min(_SCORES // max(keys, 1), ELEMENTS // (PIECE * max(width, Hi))))
    for start in range(0, T if keys else 0, limit):
        rows = slice(start, start + limit)
        scores = []
        for first in range(0, keys, PIECE):
            entries = torch.arange(first, min(first + PIECE, keys), device=iq.device)[None]
            block, row, found = locate(
                entries, block_table, request_ids[rows], stored.codes.shape[0], N
            )
            visible = entries < seen[rows, None]
            key = decode_keys(KeyTensors(*take(stored, block, row)), key_format, global_scale)  # type: ignore[arg-type]
            key.masked_fill_(~(visible & found)[..., None], 0.0)
            product = torch.bmm(queries[rows], key.mT).relu_()
            score = torch.bmm(weights[rows, None], product)[:, 0]
            scores.append(score.masked_fill_(~visible, -torch.inf))
        order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices[:, :k]
        order = torch.where(order < seen[rows, None], order, keys).sort(1).values
        picked[rows, : order.shape[1]] = torch.where(order < keys, order, -1).int()
    return picked, seen.clamp(max=k).int()
