"""What compress means: kv-core's pooling of closed windows."""

from kv_core.hybrid import reference
from torch import Tensor


def run(
    value: Tensor,
    score: Tensor,
    tail: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    closing: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    eps: float,
    ratio: int,
    overlap: bool,
) -> Tensor:
    """Return ``[T, D]`` FP32 entries; see ``kv_core.hybrid.reference.compress``.

    Args:
        value: ``[T, c * D]``; c is 2 with overlap, else 1.
        score: ``[T, c * D]``.
        tail: ``[B, tail, 2, c * D]`` FP32; read.
        weight: ``[D]``.
        cos: ``[positions, R / 2]``; a position past its end gives NaN.
        sin: Like ``cos``.
        closing: ``[C]`` tokens that close a window, then -1.
        request_ids: ``[T]`` request of each token.
        positions: ``[T]`` position of each token.
        request_slots: ``[B]`` slot of each request.
        seq_start: ``[B]`` position of each request's first token.
        eps: Of the norm.
        ratio: Tokens for each entry.
        overlap: Whether two windows are pooled.
    """
    return reference.compress(
        tail, value, score, weight, eps, cos, sin,
        closing=closing, request_ids=request_ids, positions=positions,
        request_slots=request_slots, seq_start=seq_start, ratio=ratio, overlap=overlap,
    )  # fmt: skip
