"""Pieces that the Triton kernels share. They mirror ``kv_core.codecs`` bit for bit.

In Triton's interpreter BF16 arithmetic is wrong, casts to BF16 truncate, and casts from it lose
subnormal numbers, so there everything is computed in FP32 and both casts are done by hand.
"""

import triton
import triton.language as tl
from kv_core.codecs.int8 import TINY

INTERPRETED = tl.constexpr(type(tl.cdiv).__name__ == "InterpretedFunction")

_TINY = tl.constexpr(TINY)
_ROUND = tl.constexpr(1.5 * 2**23)  # adding it leaves no place for a fraction
_LOG2_E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))


@triton.jit
def widen(x):
    """Convert ``x`` to FP32, which is exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round FP32 ``x`` to a floating dtype, halves to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """Make INT8 codes, or elements of ``dtype``, a side of a matrix product in ``dtype``."""
    if INTERPRETED:
        return widen(x)
    else:
        return x.to(dtype)


@triton.jit
def quantize_rows(x):
    """Return codes and scale of each row of FP32 ``x``; padding has to be zero.

    The launch has to turn FP fusion off, or the product would melt into the rounding.
    """
    size = tl.abs(x)
    # a maximum drops NaN on the device, so it is looked for by itself
    bad = tl.max(((size != size) | (size == _INF)).to(tl.int32), axis=1)
    largest = tl.max(size, axis=1)
    live = (bad == 0) & (largest >= _TINY)
    largest = tl.where(live, largest, 1.0)
    inverse = tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), largest)
    scaled = tl.where(live[:, None], x * inverse[:, None], 0.0)
    codes = (scaled + _ROUND) - _ROUND
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    scale = tl.where(live, scale, 0.0)
    return codes, tl.where(bad == 0, scale, _NAN)


@triton.jit
def row_sum(x):
    """Add up each row pair by pair.

    The order of additions depends on the row's length alone. That of ``tl.sum`` depends on how the
    tile lies in registers, so on its height, on the warps and on what the kernel does afterwards.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    if columns > 1:
        pairs = tl.reshape(x, [rows, columns // 2, 2])
        return row_sum(tl.sum(pairs, axis=2))
    else:
        return tl.reshape(x, [rows])


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr):
    """Return ``1 / sqrt(mean(x^2) + eps)`` of each row; padding has to be zero."""
    total = row_sum(x * x)
    mean = tl.div_rn(total, tl.full(total.shape, D, tl.float32))
    return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent to FP32 accuracy, small arguments included."""
    square = x * x
    # least squares on Chebyshev nodes below 0.625, relative error 5e-9
    near = -0.05374308 + square * (0.02064935 + square * -0.00571579)
    near = -0.33333284 + square * (0.13331485 + square * near)
    near = x + x * square * near
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2 * _LOG2_E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def store_rows(
    rows, cache, scale, slot, head, is_token, capacity, N,
    cache_p, cache_n, cache_h, scale_p, scale_n, scale_h,
    D: tl.constexpr,
):  # fmt: skip
    """Store row i of ``rows`` for head ``head[i]`` at ``slot[i]``, if that is in the storage."""
    BLOCK_D: tl.constexpr = rows.shape[1]
    d = tl.arange(0, BLOCK_D)
    is_stored = is_token & (slot >= 0) & (slot < capacity)
    slot = tl.where(is_stored, slot, 0)
    block = slot // N
    offset = slot - block * N
    in_row = is_stored[:, None] & (d < D)[None, :]
    cache += block[:, None] * cache_p + offset[:, None] * cache_n + head[:, None] * cache_h
    rows = widen(rows)
    if scale is None:
        tl.store(cache + d[None, :], round_to(rows, cache.dtype.element_ty), mask=in_row)
    else:
        codes, scales = quantize_rows(rows)
        tl.store(cache + d[None, :], codes, mask=in_row)
        scale += block * scale_p + offset * scale_n + head * scale_h
        tl.store(scale, scales, mask=is_stored)
