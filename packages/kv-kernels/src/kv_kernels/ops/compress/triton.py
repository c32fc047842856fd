"""Pool each window that closes, normalise and rotate it: one program for an entry, in FP32."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import inverse_rms, widen
from kv_kernels.launch import Launch, dense_ids, power_of_two

_LOG2_E = tl.constexpr(math.log2(math.e))
_TILE = 4096  # values, and as many scores, that a program has at a time


@triton.jit(do_not_specialize=["T", "positions_end"])
def _compress_kernel(
    value, score, tail, weight, cos, sin, closing, request_ids, positions, request_slots,
    seq_start, out, eps, T, positions_end, TAIL,
    value_t, score_t, tail_p, tail_n, tail_s, cos_t, sin_t,
    D: tl.constexpr, R: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.load(closing + tl.program_id(0)).to(tl.int64)
    if (token < 0) | (token >= T):
        return
    request = tl.maximum(tl.load(request_ids + token), 0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    first = tl.load(seq_start + request).to(tl.int64)
    slot = tl.maximum(tl.load(request_slots + request), 0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    tail += slot * tail_p

    # which token a row of the window is depends on its position alone, so the sums do too
    peak = tl.full([BLOCK_D], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    pooled = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, SPAN, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        at = position - (SPAN - 1 - s)
        exists = (s < SPAN) & (at >= 0)
        # with overlap the window before has the first half of the channels, this one the second
        channel = tl.where(s < SPAN - RATIO, 0, (SPAN // RATIO - 1) * D)
        is_new = (exists & (at >= first))[:, None] & (d < D)[None, :]
        is_old = (exists & (at < first))[:, None] & (d < D)[None, :]
        at = tl.where(exists, at, 0)
        new = tl.where(at >= first, token - position + at, 0)
        old = tail + at % TAIL * tail_n + channel
        values = tl.load(
            value + (new * value_t + channel)[:, None] + d[None, :], mask=is_new, other=0.0
        )  # fmt: skip
        scores = tl.load(
            score + (new * score_t + channel)[:, None] + d[None, :], mask=is_new, other=0.0
        )  # fmt: skip
        old_values = tl.load(old[:, None] + d[None, :], mask=is_old, other=0.0)
        old_scores = tl.load(old[:, None] + tail_s + d[None, :], mask=is_old, other=-float("inf"))
        values = tl.where(is_new, widen(values), old_values)
        scores = tl.where(is_new, widen(scores), old_scores)
        higher = tl.maximum(peak, tl.max(scores, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing so far: no inf - inf
        fade = tl.exp2((peak - base) * _LOG2_E)
        weights = tl.exp2((scores - base[None, :]) * _LOG2_E)
        total = total * fade + tl.sum(weights, axis=0)
        pooled = pooled * fade + tl.sum(weights * values, axis=0)
        peak = higher
    pooled = tl.where(d < D, tl.div_rn(pooled, tl.where(d < D, total, 1.0)), 0.0)

    x = tl.reshape(pooled, [1, BLOCK_D])
    factor = widen(tl.load(weight + d, mask=d < D, other=0.0))
    x = x * inverse_rms(x, eps, D)[:, None] * factor[None, :]
    if R > 0:
        at = position // RATIO * RATIO
        pair = (d - (D - R)) // 2
        turns = (d >= D - R) & (d < D)
        inside = turns & (at < positions_end)
        c = widen(tl.load(cos + at * cos_t + pair, mask=inside, other=float("nan")))
        s = widen(tl.load(sin + at * sin_t + pair, mask=inside, other=float("nan")))
        even, odd = tl.split(tl.reshape(x, [1, BLOCK_D // 2, 2]))
        y = tl.reshape(tl.join(-odd, even), [1, BLOCK_D])
        x = tl.where(turns[None, :], x * c[None, :] + y * s[None, :], x)
    tl.store(out + token * D + d[None, :], x, mask=(d < D)[None, :])


def launch(
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
) -> tuple[Tensor, Launch]:
    """Return zeros, and the launch that puts the entries among them."""
    T, D = value.shape[0], weight.shape[0]
    out = value.new_zeros((T, D), dtype=torch.float32)
    span = 2 * ratio if overlap else ratio
    block_d = max(2, power_of_two(D))
    block_s = max(1, min(power_of_two(span), _TILE // block_d))
    arguments = (
        value, score, tail, weight, cos, sin, dense_ids(closing), dense_ids(request_ids),
        dense_ids(positions), dense_ids(request_slots), dense_ids(seq_start), out,
        eps, T, cos.shape[0], tail.shape[1],
        value.stride(0), score.stride(0), *tail.stride()[:3], cos.stride(0), sin.stride(0),
    )  # fmt: skip
    options = {
        "D": D,
        "R": 2 * cos.shape[1],
        "RATIO": ratio,
        "SPAN": span,
        "BLOCK_S": block_s,
        "BLOCK_D": block_d,
        "num_warps": max(1, min(8, block_s * block_d // 512)),
        "enable_fp_fusion": False,
    }
    return out, Launch(_compress_kernel, (closing.shape[0],), arguments, options)


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
    """Return the entry of each closing token; see ``reference.run``."""
    out, work = launch(
        value, score, tail, weight, cos, sin, closing, request_ids, positions, request_slots,
        seq_start, eps, ratio, overlap,
    )  # fmt: skip
    work.run()
    return out
