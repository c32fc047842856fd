"""Rows of a paged cache on their way in: what the kernels that write it share.

A tile holds one head of some tokens, in pieces that turn together. INT8 codes and scales mirror
``kv_core.codecs.int8`` bit for bit.
"""

import triton
import triton.language as tl
from kv_core.codecs.int8 import TINY

from kv_kernels.device_code import round_to, row_sum, small_round, widen
from kv_kernels.launch import power_of_two

WARPS = 4

_HEADS = 8  # that a program moves at most
_PROGRAMS = 512  # that keep a large device busy
_TINY = tl.constexpr(TINY)
_INF = tl.constexpr(float("inf"))


@triton.constexpr_function
def _starts(D, R, STYLE):
    halves = (R // 2,) if STYLE == 1 else ()
    rest = (R,) if 0 < R < D else ()
    return (0, *halves, *rest, D)


@triton.constexpr_function
def _pieces(D, R, STYLE):
    """Count the pieces of a row: what is rotated, or its two halves, and the rest."""
    return len(_starts(D, R, STYLE)) - 1


@triton.constexpr_function
def _start(D, R, STYLE, i):
    return _starts(D, R, STYLE)[i]


@triton.jit
def _load_piece(rows, START: tl.constexpr, STOP: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(STOP - START)
    d = START + tl.arange(0, BLOCK)
    if STOP - START == BLOCK:
        return tl.load(rows[:, None] + d[None, :])
    else:
        return tl.load(rows[:, None] + d[None, :], mask=(d < STOP)[None, :], other=0.0)


@triton.jit
def _store_piece(rows, x, is_stored, START: tl.constexpr, STOP: tl.constexpr):
    d = START + tl.arange(0, x.shape[1])
    inside = is_stored[:, None]
    if STOP - START < x.shape[1]:
        inside = inside & (d < STOP)[None, :]
    tl.store(rows[:, None] + d[None, :], x, mask=inside)


@triton.jit
def _load_row(rows, D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr):
    row: tl.tuple = ()
    for i in tl.static_range(_pieces(D, R, STYLE)):
        row += (_load_piece(rows, _start(D, R, STYLE, i), _start(D, R, STYLE, i + 1)),)
    return row


@triton.jit
def _widen_row(row):
    wide: tl.tuple = ()
    for i in tl.static_range(len(row)):
        wide += (widen(row[i]),)
    return wide


@triton.jit
def _normalise(row, weights, eps, D: tl.constexpr, STYLE: tl.constexpr):
    """Divide each row by its root mean square; padding has to be zero."""
    FIRST: tl.constexpr = 2 if STYLE == 1 else 1
    if STYLE == 1:
        total = row_sum(tl.fma(row[1], row[1], row[0] * row[0]))
    else:
        total = row_sum(row[0] * row[0])
    for i in tl.static_range(FIRST, len(row)):
        total += row_sum(row[i] * row[i])
    mean = total * (1.0 / D) + eps
    # the device's root takes subnormal numbers for zero
    unit = tl.where(mean < 2.0**-100, 2.0**24, 1.0)
    factor = (tl.rsqrt(mean * unit * unit) * unit)[:, None]
    scaled: tl.tuple = ()
    for i in tl.static_range(len(row)):
        scaled += (row[i] * factor * weights[i],)
    return scaled


@triton.jit
def _rotate(row, cos, sin, STYLE: tl.constexpr):
    # a factor of -1 costs nothing, a negation is a subtraction from zero
    turned: tl.tuple = ()
    if STYLE == 1:
        turned = (
            tl.fma(row[1] * -1.0, sin, row[0] * cos),
            tl.fma(row[0], sin, row[1] * cos),
        )
    elif STYLE == 2:
        tokens: tl.constexpr = row[0].shape[0]
        columns: tl.constexpr = row[0].shape[1]
        a, b = tl.split(tl.reshape(row[0], [tokens, columns // 2, 2]))
        pairs = tl.join(tl.fma(b * -1.0, sin, a * cos), tl.fma(a, sin, b * cos))
        turned = (tl.reshape(pairs, [tokens, columns]),)
    for i in tl.static_range(len(turned), len(row)):
        turned += (row[i],)
    return turned


@triton.jit
def _size(x):
    """Return the bits of ``|x|``, which are ordered as numbers are, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(row, STYLE: tl.constexpr):
    """Return the largest magnitude of each row, NaN where it has one; padding has to be zero."""
    FIRST: tl.constexpr = 2 if STYLE == 1 else 1
    if STYLE == 1:
        size = tl.max(tl.maximum(_size(row[0]), _size(row[1])), axis=1)
    else:
        size = tl.max(_size(row[0]), axis=1)
    for i in tl.static_range(FIRST, len(row)):
        size = tl.maximum(size, tl.max(_size(row[i]), axis=1))
    return size.to(tl.float32, bitcast=True)


@triton.jit
def _move_head(
    row, target, scale, is_stored, weights, cos, sin, eps,
    dtype: tl.constexpr, D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr,
):  # fmt: skip
    row = _widen_row(row)
    if weights is not None:
        row = _normalise(row, weights, eps, D, STYLE)
    row = _rotate(row, cos, sin, STYLE)
    if scale is not None:
        # rounding keeps the order, so it can follow
        largest = widen(round_to(_largest(row, STYLE), dtype))
        is_finite = largest < _INF
        live = is_finite & (largest >= _TINY)
        largest = tl.where(live, largest, 1.0)
        steps = tl.full(largest.shape, 127.0, tl.float32)
        inverse = tl.div_rn(steps, largest)[:, None]
    for i in tl.static_range(len(row)):
        # rounded once to what the activations are, and that is what is stored or quantised
        x = widen(round_to(row[i], dtype))
        if scale is None:
            x = round_to(x, target.dtype.element_ty)
        else:
            x = small_round(tl.where(live[:, None], x * inverse, 0.0)).to(tl.int8)
        _store_piece(target, x, is_stored, _start(D, R, STYLE, i), _start(D, R, STYLE, i + 1))
    if scale is not None:
        unit = tl.where(live, tl.div_rn(largest, steps), 0.0)
        tl.store(scale, tl.where(is_finite, unit, float("nan")), mask=is_stored)


@triton.jit
def move_heads(
    source, source_h, target, target_h, scale, scale_h, is_stored, weight, cos, sin, eps,
    D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Move neighbouring heads of some tokens: normalise, rotate, round, and cast or quantise.

    The launch has to turn FP fusion off, or a product would melt into the rounding to codes. The
    order of additions depends on D, R and STYLE alone.

    Args:
        source: ``[tokens]`` pointers to the first head; every one is read.
        source_h: Stride of heads there.
        target: ``[tokens]`` pointers.
        target_h: The same there.
        scale: ``[tokens]`` pointers where codes are stored, or None.
        scale_h: The same there.
        is_stored: ``[tokens]`` where something is written.
        weight: ``[D]`` of the norm, or None for no norm.
        cos: ``[tokens, R/2]`` FP32 as ``load_angles`` returns it, or None with style 0.
        sin: The same.
        eps: Of the norm.
        STYLE: 0 for no rotation, 1 for pairs R/2 apart, 2 for neighbours.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    # codes take long, so the next head is on its way meanwhile
    AHEAD: tl.constexpr = HEADS > 1 and scale is not None
    weights = None
    if weight is not None:
        weights = _widen_row(_load_row(weight + tl.zeros([1], tl.int32), D, R, STYLE))
    if AHEAD:
        ahead = _load_row(source, D, R, STYLE)
    for h in range(HEADS):
        if AHEAD:
            row = ahead
            source += tl.where(h + 1 < HEADS, source_h, 0)
            ahead = _load_row(source, D, R, STYLE)
        else:
            row = _load_row(source, D, R, STYLE)
            source += source_h
        _move_head(row, target, scale, is_stored, weights, cos, sin, eps, dtype, D, R, STYLE)
        target += target_h
        if scale is not None:
            scale += scale_h


@triton.jit
def load_angles(table, at, table_t, is_inside, R: tl.constexpr):
    """Return ``[tokens, R/2]`` FP32, NaN for a token whose row ``at`` is not inside."""
    rows = table + tl.where(is_inside, at, 0) * table_t
    return tl.where(is_inside[:, None], widen(_load_piece(rows, 0, R // 2)), float("nan"))


@triton.jit
def store_heads(
    source, source_h, slots, t, is_token, cache, scale, head, capacity, N,
    cache_p, cache_n, cache_h, scale_p, scale_n, scale_h, weight, cos, sin, eps,
    D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Move neighbouring heads of some tokens to their slots of a cache; see ``move_heads``.

    Args:
        slots: ``[T]`` slots, or None where token t has slot t; one outside the storage is skipped.
        t: ``[tokens]`` INT64, all of them within T.
        is_token: ``[tokens]`` which are not there only to fill the tile.
        cache: ``[P, N, H, D]``.
        scale: ``[P, N, H]``, or None where no codes are stored.
        head: The first head.
        capacity: Slots of the storage.
        N: Slots of a block.
    """
    slot = t
    if slots is not None:
        slot = tl.load(slots + t).to(tl.int64)
    is_stored = is_token & (slot >= 0) & (slot < capacity)
    # where 32 bits hold the capacity, the division is many times cheaper
    slot = tl.where(is_stored, slot, 0).to(capacity.dtype)
    block = (slot // N).to(tl.int64)
    offset = slot.to(tl.int64) - block * N
    cache += block * cache_p + offset * cache_n + head * cache_h
    if scale is not None:
        scale += block * scale_p + offset * scale_n + head * scale_h
    move_heads(
        source, source_h, cache, cache_h, scale, scale_h, is_stored, weight, cos, sin, eps,
        D, R, STYLE, HEADS,
    )  # fmt: skip


def choose_tile(rows: int, D: int, *heads: int) -> tuple[int, ...]:
    """Choose how many tokens a program moves at a time, and how many heads of each kind it moves.

    A thread has 16 elements at a time. Heads share what is loaded for a token, so a program moves
    several where that leaves programs enough.

    Args:
        rows: How many rows of D elements there are in all.
        D: Elements of a row.
        heads: Numbers of heads, each of which has to come out in whole groups.
    """
    block_t = 32 * WARPS * 16 // max(16, power_of_two(D))
    most = max(1, min(_HEADS, rows // (block_t * _PROGRAMS)))
    return block_t, *(max(h for h in range(1, most + 1) if n % h == 0) for n in heads)
