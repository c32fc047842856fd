"""Decode, chunked prefill and mixed batches in one launch, and a second one that merges splits.

Nothing is read on the host: the grid follows from sizes and bounds, and each program finds its
sequence, and its part of the keys, from the tensors.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import nan_max, operand, round_to, small_round, tanh, widen
from kv_kernels.launch import Launch, dense_ids, power_of_two, strides
from kv_kernels.library import capability
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_decode_attention.tiles import (
    MERGED_AT_ONCE,
    choose_splits,
    choose_tile,
    has_overlap,
)

_INT32_END = 2**31 - 1
_GRID_END = 2**16 - 1  # of a grid's last axis
_UNLIMITED = 2**30  # as a window: no context is longer
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_UNIT = tl.constexpr(1 / (127 * 257))  # of the largest number that two signed bytes hold
_SMALLEST = tl.constexpr(1e-33)  # so that a unit has an inverse


@triton.jit
def _find_sequence(cu_seqlens, tile, B, BLOCK_Q: tl.constexpr):
    """Return the sequence whose queries a tile holds; B stands for the rows behind the last.

    Sequence b owns the tiles from ``cu_seqlens[b] // BLOCK_Q + b`` on. These first tiles are as
    many apart as the queries between them need, or one more.
    """
    low = tile * 0
    high = low + B
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(cu_seqlens + middle).to(tl.int32) // BLOCK_Q + middle
        is_before = first <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    return low


@triton.jit
def _find_keys(
    table, tile, inside, P, N,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return block and offset of each key of a tile, or of its first key if it is aligned."""
    if IS_ALIGNED:  # the tile lies within one block
        position = tile * BLOCK_N
        block = tl.load(table + position // N)
    else:
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if IS_WHOLE:
            block = tl.load(table + position // N)
        else:
            block = tl.load(table + position // N, mask=inside, other=0)
    # an id that is not one of the pool's must not reach foreign memory
    block = tl.minimum(tl.maximum(block.to(tl.int64), 0), P - 1)
    return block, (position % N).to(tl.int64)


@triton.jit
def _load_tile(
    base, block, offset, inside, stride_p, stride_n, D: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Load ``[keys, BLOCK_D]``; what is outside is not read."""
    d = tl.arange(0, BLOCK_D)
    at = base + block * stride_p + offset * stride_n
    if IS_ALIGNED:  # what does not change from tile to tile is added last
        key = tl.arange(0, inside.shape[0]).to(tl.int64)
        at += key[:, None] * stride_n + d[None, :]
    else:
        at = at[:, None] + d[None, :]
    if IS_WHOLE and D == BLOCK_D:
        return tl.load(at)
    elif IS_WHOLE:
        return tl.load(at, mask=(d < D)[None, :], other=0)
    else:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0)


@triton.jit
def _load_scales(
    base, block, offset, inside, stride_p, stride_n,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Load ``[keys]``; what is outside is not read."""
    at = base + block * stride_p + offset * stride_n
    if IS_ALIGNED:
        at += tl.arange(0, inside.shape[0]).to(tl.int64) * stride_n
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _attend_tile(
    acc, peak, total, q, tile, begin, end, last, first, scale, softcap,
    k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
    D: tl.constexpr, SOFTCAP: tl.constexpr, IS_DECODE: tl.constexpr, IS_WINDOWED: tl.constexpr,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax.

    Keys outside ``[begin, end)`` are not read, and row i sees ``first[i]`` to ``last[i]`` of them.
    In a whole tile every row sees every key.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    dtype: tl.constexpr = q.dtype
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (position >= begin) & (position < end)
    block, offset = _find_keys(table, tile, inside, P, N, IS_ALIGNED, IS_WHOLE, BLOCK_N)
    keys = _load_tile(k, block, offset, inside, k_p, k_n, D, BLOCK_D, IS_ALIGNED, IS_WHOLE)
    score = tl.dot(operand(q, dtype), tl.trans(operand(keys, dtype)), input_precision="ieee")
    if k_scale is None:
        score = score * scale
    else:
        key_scale = _load_scales(
            k_scale, block, offset, inside, ks_p, ks_n, IS_ALIGNED, IS_WHOLE
        )  # fmt: skip
        score = score * (key_scale * scale)[None, :]
    if SOFTCAP:
        score = softcap * tanh(tl.div_rn(score, tl.full(score.shape, softcap, tl.float32)))
    if not IS_WHOLE:
        is_seen = (position[None, :] >= first[:, None]) & (position[None, :] <= last[:, None])
        is_seen = is_seen & inside[None, :]
        score = tl.where(is_seen, score, -float("inf"))

    higher = tl.maximum(peak, tl.max(score, axis=1))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: no inf - inf
    fade = tl.exp2((peak - base) * _LOG2_E)
    weight = tl.exp2((score - base[:, None]) * _LOG2_E)
    total = total * fade + tl.sum(weight, axis=1)
    acc = acc * fade[:, None]

    values = _load_tile(v, block, offset, inside, v_p, v_n, D, BLOCK_D, IS_ALIGNED, IS_WHOLE)
    if v_scale is None:
        if not (IS_WHOLE or IS_DECODE):
            # 0 times NaN is NaN, so what only later queries see is taken out of the product
            is_odd = (tl.abs(widen(values)) < float("inf")) == 0
            values = tl.where(is_odd, tl.zeros_like(values), values)
            if IS_WINDOWED:
                if tl.max(tl.max(is_odd.to(tl.int32), axis=1), axis=0) > 0:
                    sees = operand(is_seen.to(tl.float32), dtype)
                    odd = operand(is_odd.to(tl.float32), dtype)
                    odd = tl.dot(sees, odd, input_precision="ieee")
                    acc = tl.where(odd > 0, float("nan"), acc)
            else:
                odd = tl.min(tl.where(is_odd, position[:, None], end), axis=0)
                acc = tl.where(
                    odd[None, :] <= tl.minimum(last, end - 1)[:, None], float("nan"), acc
                )
        weight = operand(round_to(weight, dtype), dtype)
        acc = tl.dot(weight, operand(values, dtype), acc, input_precision="ieee")
    else:
        value_scale = _load_scales(
            v_scale, block, offset, inside, vs_p, vs_n, IS_ALIGNED, IS_WHOLE
        )  # fmt: skip
        if dtype == tl.float16:
            # against the tile's largest scale, so that FP16 neither overflows nor underflows
            top = tl.max(tl.where(value_scale == value_scale, value_scale, 0.0), axis=0)
            top = tl.where(top > 0, top, 1.0)
            weight = weight * (value_scale / top)[None, :]
        else:
            weight = weight * value_scale[None, :]
        if not IS_WHOLE:
            weight = tl.where(is_seen, weight, 0.0)  # a NaN scale stays with those who see it
        weight = operand(round_to(weight, dtype), dtype)
        values = operand(values, dtype)
        if dtype == tl.float16:
            acc += tl.dot(weight, values, input_precision="ieee") * top
        else:
            acc = tl.dot(weight, values, acc, input_precision="ieee")
    return acc, higher, total


@triton.jit
def _split_queries(q):
    """Return ``[rows, BLOCK_D]`` queries as signed bytes, and the FP32 unit of each row.

    Three bytes hold an integer of 23 bits, to which a power of two rounds the elements of a row:
    all are within 2^-23 of its largest, and FP16 or BF16 elements near that are kept whole. Rows
    of the result are axes (more copies, pair, copies, rows) that ``_attend_codes`` adds up: the
    pairs of the first copy weigh 2^24 and 2^16, those of the second 2^8 and 1.
    """
    R: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    X: tl.constexpr = 8 // R
    Y: tl.constexpr = 2 if X == 1 else 1
    q = widen(q)
    largest = tl.reduce(tl.abs(q), 1, nan_max)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 22)
    unit = ((exponent - 21) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(largest < float("inf"), unit, float("nan"))
    number = small_round(q * ((275 - exponent) << 23).to(tl.float32, bitcast=True)[:, None])
    middle = (number + 128) >> 8
    high = (middle + 128) >> 8
    # [Y, 2, X, R, D]
    number = number[None, None, None, :, :]
    middle = middle[None, None, None, :, :]
    high = high[None, None, None, :, :]
    copy = (
        tl.arange(0, Y)[:, None, None, None, None] + tl.arange(0, X)[None, None, :, None, None]
    )  # fmt: skip
    is_low = tl.arange(0, 2)[None, :, None, None, None] == 1
    byte = tl.where(copy == 0, tl.where(is_low, high, 0), tl.where(is_low, number, middle))
    byte = tl.where(copy < 2, byte, 0).to(tl.int8)
    return tl.reshape(tl.broadcast_to(byte, [Y, 2, X, R, BLOCK_D]), [Y * 16, BLOCK_D]), unit


@triton.jit
def _join_bytes(x):
    """Return ``256 * x[:, 0] + x[:, 1]`` of five axes of INT32 ``x``, in FP32."""
    weight = tl.where(tl.arange(0, 2) == 0, 256, 1)
    return tl.sum(x * weight[None, :, None, None, None], axis=1).to(tl.float32)


@triton.jit
def _attend_codes(
    acc, peak, total, q, unit, tile, begin, end, last, first, softcap,
    k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
    D: tl.constexpr, SOFTCAP: tl.constexpr,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Do what ``_attend_tile`` does for a few rows over INT8 codes, in products of integers.

    No code is ever converted, which would take longer than reading it: queries and weights are
    split into bytes, which fill the 16 rows that a product has at least. Values stay the words of
    four channels that they are stored as. So a product runs over keys and channels of a word, with
    weights that are zero but for one channel.

    Args:
        acc: ``[4 // X, X, R, BLOCK_D // 4]``, channel ``4 w + j`` at ``j = (4 // X, X)``, w last.
        peak: ``[X, R]`` in units of log 2; X = 8 // R copies of R rows.
        total: ``[X, R]``.
        q: ``[16 or 32, BLOCK_D]`` of ``_split_queries``.
        unit: ``[X, R]`` factor of its scores.
    """
    X: tl.constexpr = peak.shape[0]
    R: tl.constexpr = peak.shape[1]
    Y: tl.constexpr = q.shape[0] // 16
    BLOCK_D: tl.constexpr = q.shape[1]
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (position >= begin) & (position < end)
    block, offset = _find_keys(table, tile, inside, P, N, IS_ALIGNED, IS_WHOLE, BLOCK_N)

    codes = _load_tile(k, block, offset, inside, k_p, k_n, D, BLOCK_D, IS_ALIGNED, IS_WHOLE)
    score = tl.dot(q, tl.trans(codes), out_dtype=tl.int32)
    score = _join_bytes(tl.reshape(score, [Y, 2, X, R, BLOCK_N]))
    copy = tl.arange(0, Y)[:, None, None] + tl.arange(0, X)[None, :, None]
    weight = tl.where(copy == 0, 65536.0, 1.0) * unit[None, :, :]
    score = tl.sum(score * weight[:, :, :, None], axis=0)
    if X > 1:
        score = tl.broadcast_to(tl.sum(score, axis=0, keep_dims=True), [X, R, BLOCK_N])
    scale = _load_scales(k_scale, block, offset, inside, ks_p, ks_n, IS_ALIGNED, IS_WHOLE)
    score = score * scale[None, None, :]
    if SOFTCAP:
        score = tanh(tl.div_rn(score, tl.full(score.shape, softcap, tl.float32)))
        score = score * (softcap * _LOG2_E)
    if not IS_WHOLE:
        position = position[None, None, :]
        is_seen = (position >= first[:, :, None]) & (position <= last[:, :, None])
        is_seen = is_seen & inside[None, None, :]
        score = tl.where(is_seen, score, -float("inf"))

    higher = tl.maximum(peak, tl.max(score, axis=2))
    base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: no inf - inf
    fade = tl.exp2(peak - base)
    weight = tl.exp2(score - base[:, :, None])
    total = total * fade + tl.sum(weight, axis=2)

    scale = _load_scales(v_scale, block, offset, inside, vs_p, vs_n, IS_ALIGNED, IS_WHOLE)
    weight = weight * scale[None, None, :]
    if not IS_WHOLE:
        weight = tl.where(is_seen, weight, 0.0)  # a NaN scale stays with those who see it
    # two bytes of each, against the row's largest
    unit = nan_max(tl.reduce(weight, 2, nan_max), _SMALLEST) * _UNIT
    weight = small_round(weight * (1.0 / unit)[:, :, None])
    # the order of keys in which a thread has the scores is not that in which it needs the weights
    weight = tl.reshape(weight, [X, R, BLOCK_N // 8, 4, 2])
    weight = tl.reshape(tl.permute(weight, 0, 1, 2, 4, 3), [1, 1, X, R, BLOCK_N, 1])
    is_low = tl.arange(0, 2)[:, None, None, None, None, None] == 1
    weight = tl.where(is_low, weight, (weight + 128) >> 8).to(tl.int8)
    channel = tl.arange(0, 4 // X)[:, None] * X + tl.arange(0, X)[None, :]
    is_own = channel[None, :, :, None, None, None] == tl.arange(0, 4)
    weight = tl.broadcast_to(tl.where(is_own, weight, 0), [2, 4 // X, X, R, BLOCK_N, 4])
    weight = tl.reshape(weight, [8 * R, BLOCK_N * 4])

    codes = _load_tile(v, block, offset, inside, v_p, v_n, D, BLOCK_D, IS_ALIGNED, IS_WHOLE)
    codes = tl.reshape(codes, [BLOCK_N // 8, 4, 2, BLOCK_D // 4, 4])
    codes = tl.reshape(tl.permute(codes, 0, 2, 1, 4, 3), [BLOCK_N * 4, BLOCK_D // 4])
    part = tl.dot(weight, codes, out_dtype=tl.int32)
    part = tl.reshape(_join_bytes(tl.reshape(part, [1, 2, 4, R, BLOCK_D // 4])), acc.shape)
    part = part * unit[None, :, :, None]
    acc = tl.fma(acc, tl.broadcast_to(fade[None, :, :, None], acc.shape), part)
    return acc, higher, total


@triton.jit
def _store(out, lse, at, is_row, acc, peak, total, splits, D: tl.constexpr):
    """Finish the softmax and store row i at ``at[i]``; where nothing was seen, 0 and -inf.

    Of an empty split only the -inf is stored, which tells the merge to skip it.
    """
    BLOCK_D: tl.constexpr = acc.shape[1]
    d = tl.arange(0, BLOCK_D)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = tl.where(
        is_empty[:, None], 0.0, tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    )
    in_out = (is_row & ((splits == 1) | (is_empty == 0)))[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] * D + d[None, :], round_to(acc, out.dtype.element_ty), mask=in_out)
    if lse is not None:
        tl.store(lse + at, tl.where(is_empty, -float("inf"), peak + tl.log(total)), mask=is_row)


# lengths and bounds differ from step to step, and must not compile the kernel again
@triton.jit(do_not_specialize=["window", "T", "B", "P", "N", "table_end", "min_tiles"])
def _attend_kernel(
    q, k, v, k_scale, v_scale, out, lse, block_table, context_lens, cu_seqlens,
    scale, softcap, window, T, B, Hq, P, N, table_end, min_tiles,
    q_t, q_h, table_b, k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, IS_DECODE: tl.constexpr,
    IS_WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, IS_ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_Q queries of a sequence, HEADS query heads of one key/value head and
    # one split of the keys. A split writes row (token, head, split) of out and lse.
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    IS_CODED: tl.constexpr = BLOCK_M < 16
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    head = tl.program_id(1) // PARTS
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_group = tl.program_id(1) % PARTS * HEADS + row % HEADS
    q_head = head * G + in_group
    is_row = (row < BLOCK_Q * HEADS) & (in_group < G)

    if IS_DECODE:
        # program b takes sequence b, and a row behind the last sequence
        b = tl.minimum(pid, B)
        padding = tl.load(cu_seqlens + B).to(tl.int32) + pid
        if padding < T:
            at = (padding.to(tl.int64) * Hq + q_head) * splits + split
            _store(
                out, lse, at, is_row & (row < HEADS), tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32), splits, D,
            )  # fmt: skip
        begin_q = tl.load(cu_seqlens + b).to(tl.int32)
        first_q = begin_q
    else:
        b = _find_sequence(cu_seqlens, pid, B, BLOCK_Q)
        begin_q = tl.load(cu_seqlens + b).to(tl.int32)
        first_q = begin_q + (pid - begin_q // BLOCK_Q - b) * BLOCK_Q
    is_sequence = b < B
    end_q = tl.load(cu_seqlens + b + 1, mask=is_sequence, other=0).to(tl.int32)
    context = tl.load(context_lens + b, mask=is_sequence, other=0).to(tl.int32)
    to_token = context - end_q  # from a row of the step to the token of its sequence
    end_q = tl.where(is_sequence, tl.minimum(end_q, T), 0 if IS_DECODE else T)
    if first_q >= end_q:
        return

    t = first_q + row // HEADS
    is_row = is_row & (t < end_q)
    last = tl.where(is_row & is_sequence, to_token + t, -1)  # the newest key that a row sees
    first = last - window if IS_WINDOWED else tl.zeros([BLOCK_M], tl.int32)
    oldest = tl.where(is_sequence, to_token + first_q, -BLOCK_M)  # what the first query sees
    newest = oldest + tl.minimum(BLOCK_Q, end_q - first_q) - 1
    end = tl.minimum(newest + 1, table_end)
    begin = 0
    if IS_WINDOWED:
        begin = tl.maximum(oldest - window, 0)
    begin_tile = begin // BLOCK_N
    end_tile = tl.maximum(end + BLOCK_N - 1, 0) // BLOCK_N
    tiles = tl.maximum(end_tile - begin_tile, 0)
    share = tl.maximum((tiles + splits - 1) // splits, min_tiles)
    begin_tile += split * share
    end_tile = tl.minimum(begin_tile + share, end_tile)

    t = t.to(tl.int64)
    k += head.to(tl.int64) * k_h
    v += head.to(tl.int64) * v_h
    if k_scale is not None:
        k_scale += head.to(tl.int64) * ks_h
    if v_scale is not None:
        v_scale += head.to(tl.int64) * vs_h
    table = block_table + b.to(tl.int64) * table_b
    in_q = is_row[:, None] & (d < D)[None, :]
    queries = tl.load(
        q + t[:, None] * q_t + q_head[:, None].to(tl.int64) * q_h + d[None, :], mask=in_q, other=0.0
    )  # fmt: skip
    if IS_CODED:
        queries, unit = _split_queries(queries)
        unit = unit * (scale if SOFTCAP else scale * _LOG2_E)
        X: tl.constexpr = 8 // BLOCK_M
        unit = tl.broadcast_to(unit[None, :], [X, BLOCK_M])
        last = tl.broadcast_to(last[None, :], [X, BLOCK_M])
        first = tl.broadcast_to(first[None, :], [X, BLOCK_M])
        acc = tl.zeros([4 // X, X, BLOCK_M, BLOCK_D // 4], tl.float32)
        peak = tl.full([X, BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([X, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    whole_end = begin_tile
    if not IS_WINDOWED:
        # tiles that every row sees whole need no masks
        whole_end = tl.minimum(oldest + 1, table_end)
        whole_end = tl.minimum(tl.maximum(whole_end, 0) // BLOCK_N, end_tile)
        for tile in range(begin_tile, whole_end):
            if IS_CODED:
                acc, peak, total = _attend_codes(
                    acc, peak, total, queries, unit, tile, begin, end, last, first, softcap,
                    k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
                    D, SOFTCAP, IS_ALIGNED, True, BLOCK_N,
                )  # fmt: skip
            else:
                acc, peak, total = _attend_tile(
                    acc, peak, total, queries, tile, begin, end, last, first, scale, softcap,
                    k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
                    D, SOFTCAP, IS_DECODE, IS_WINDOWED, IS_ALIGNED, True, BLOCK_N,
                )  # fmt: skip
        whole_end = tl.maximum(whole_end, begin_tile)
    # without a window there are one or two such tiles, and nothing to load ahead
    for tile in tl.range(whole_end, end_tile, num_stages=None if IS_WINDOWED else 1):
        if IS_CODED:
            acc, peak, total = _attend_codes(
                acc, peak, total, queries, unit, tile, begin, end, last, first, softcap,
                k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
                D, SOFTCAP, IS_ALIGNED, False, BLOCK_N,
            )  # fmt: skip
        else:
            acc, peak, total = _attend_tile(
                acc, peak, total, queries, tile, begin, end, last, first, scale, softcap,
                k, v, k_scale, v_scale, table, P, N, k_p, k_n, ks_p, ks_n, v_p, v_n, vs_p, vs_n,
                D, SOFTCAP, IS_DECODE, IS_WINDOWED, IS_ALIGNED, False, BLOCK_N,
            )  # fmt: skip
    if IS_CODED:
        acc = tl.permute(tl.reshape(acc, [4, BLOCK_M, BLOCK_D // 4]), 1, 2, 0)
        acc = tl.reshape(acc, [BLOCK_M, BLOCK_D])
        peak = tl.max(peak, axis=0) * _LN_2
        total = tl.reduce(total, 0, nan_max)
    at = (t * Hq + q_head) * splits + split
    _store(out, lse, at, is_row, acc, peak, total, splits, D)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    parts, parts_lse, out, lse, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # one program merges the splits of one token and head; an empty split is the identity
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = -float("inf")
    total = 0.0
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    for begin in range(0, splits, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        inside = split < splits
        at = row * splits + split
        part = tl.load(parts_lse + at, mask=inside, other=-float("inf"))
        # what lies in an empty split is read too, for that need not wait for the other load
        values = tl.load(
            parts + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
        )  # fmt: skip
        values = tl.where((part != -float("inf"))[:, None], values, 0.0)
        higher = tl.maximum(peak, tl.max(part, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        fade = tl.exp2((peak - base) * _LOG2_E)
        weight = tl.exp2((part - base) * _LOG2_E)
        acc = acc * fade + tl.sum(weight[:, None] * values, axis=0)
        total = total * fade + tl.sum(weight, axis=0)
        peak = higher
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    acc = tl.where(is_empty, 0.0, tl.div_rn(acc, tl.full([BLOCK_D], 1.0, tl.float32) * total))
    tl.store(out + row * D + d, round_to(acc, out.dtype.element_ty), mask=d < D)
    if lse is not None:
        tl.store(lse + row, tl.where(is_empty, -float("inf"), peak + tl.log(total)))


def launches(
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
    compute: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Return output and log-sum-exp, still empty, and the launches that fill them.

    ``compute`` is the capability of the device which runs them, None for the interpreter.
    """
    T, Hq, D = q.shape
    P, N, H = cache.k.shape[:3]
    B, M = block_table.shape
    G = Hq // H
    block_table = dense_ids(block_table)
    block_d = max(32, power_of_two(D))
    is_int8 = cache.k_scale is not None and cache.v_scale is not None
    tile = choose_tile(q.dtype, block_d, G, max_query, num_splits == 1, is_int8)
    heads = tile.heads
    is_decode = max_query <= 1
    rows = max(B, T) if is_decode else T // (tile.m // heads) + B + 1
    columns = H * triton.cdiv(G, heads)
    if num_splits:
        # more splits than tiles would be empty ones
        most = min(triton.cdiv(max_context, tile.n), _GRID_END)
        splits, min_tiles = max(1, min(num_splits, most)), 1
    else:
        splits, min_tiles = choose_splits(rows * columns, max_context, tile, q.device)

    overlaps = splits > 1 and has_overlap(compute)
    out = q.new_empty(T, Hq, D)
    lse = q.new_empty((T, Hq) if return_lse else (0,), dtype=torch.float32)
    target, target_lse = out, lse if return_lse else None
    if splits > 1:
        target = q.new_empty(T, Hq, splits, D, dtype=torch.float32)
        target_lse = q.new_empty(T, Hq, splits, dtype=torch.float32)
    arguments = (
        q, *cache, target, target_lse, block_table, dense_ids(context_lens), dense_ids(cu_seqlens),
        scale, softcap, min(window_left, _UNLIMITED),
        T, B, Hq, P, N, min(M * N, _INT32_END), min_tiles,
        *q.stride()[:2], block_table.stride(0),
        *strides(cache.k, 3), *strides(cache.k_scale, 3),
        *strides(cache.v, 3), *strides(cache.v_scale, 3),
    )  # fmt: skip
    options = {
        "D": D,
        "G": G,
        "HEADS": heads,
        "IS_DECODE": is_decode,
        "IS_WINDOWED": window_left >= 0,
        "SOFTCAP": softcap > 0,
        "IS_ALIGNED": N % tile.n == 0,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": block_d,
        "OVERLAPS": overlaps,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,  # so that no variant rounds differently from another
    }
    work = [Launch(_attend_kernel, (rows, columns, splits), arguments, options)]
    if splits > 1:
        arguments = (target, target_lse, out, lse if return_lse else None, splits)
        options = {
            "D": D,
            "BLOCK_S": min(power_of_two(splits), MERGED_AT_ONCE),
            "BLOCK_D": block_d,
            "OVERLAPS": overlaps,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }
        if overlaps:
            options["launch_pdl"] = True
        work.append(Launch(_merge_kernel, (T * Hq,), arguments, options))
    return out, lse, work


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
    """Attend what each sequence has stored; see ``reference.run``."""
    out, lse, work = launches(
        q, cache, block_table, context_lens, cu_seqlens, max_query, max_context,
        scale, window_left, softcap, num_splits, return_lse, capability(q.device),
    )  # fmt: skip
    for part in work:
        part.run()
    return out, lse
