"""Score every visible key, find a threshold that few scores reach, and list the highest of those.

Keys are decoded into the registers from which a matrix product reads them, with the heads as its
other side. The first launch leaves each score as an integer of the same order, so the second can
narrow the range in which the k-th lies: first among the peaks of sets of scores, for what k peaks
reach not many more scores do, then among those. Nothing depends on how tokens are batched, and
ties go to the lower index because entries are listed in order.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from torch import Tensor

from kv_kernels.device_code import (
    INTERPRETED,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    nan_max,
    operand,
    round_bf16,
    round_mxfp4,
    round_nvfp4,
    widen,
)
from kv_kernels.launch import Launch, as_bytes, dense_ids, has_fp8, power_of_two, strides
from kv_kernels.library import capability

_SCORES = 1 << 26  # of one slice of tokens, those kept included: 256 MB
_PROGRAMS = 528  # that fill a device
_PART = 128  # keys that one program scores at least; eight times as many are worth its start
_SHARES = 32  # programs of a token where tokens alone fill a device
_HELD = 1 << 15  # scores that are read at a time
_LISTED = 4096  # scores that are listed at a time, at most 2^15
_ALIGNED = tl.constexpr(16)  # scores up to a multiple of this are there, so that loads are wide
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _halves(pairs):
    """Return the BF16 in the low and in the high half of each INT32."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))


@triton.jit
def _decode_words(words, scales, dtype: tl.constexpr):
    """Return ``[rows, words, 2, 2, 2]`` of the E2M1 codes in INT32 words, times a scale for each.

    Of a code's index in its word, the axes are bit 1, bit 0 and bit 2.
    """
    if dtype == tl.bfloat16 and not INTERPRETED:
        # a code's sign and size go where BF16 has sign, exponent and first place; what that is too
        # small by, the first product makes up for, and both products are exact
        even, even_high, odd, odd_high = tl.inline_asm_elementwise(
            """{
            .reg .b32 scale, power, zero, high, x;
            mov.b32 scale, {$5, $5};
            mov.b32 power, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            shr.u32 high, $4, 8;
            and.b32 x, $4, 0x000F000F;
            mul.lo.u32 x, x, 0x1040;
            and.b32 x, x, 0x81C081C0;
            fma.rn.bf16x2 x, x, power, zero;
            fma.rn.bf16x2 $0, x, scale, zero;
            and.b32 x, high, 0x000F000F;
            mul.lo.u32 x, x, 0x1040;
            and.b32 x, x, 0x81C081C0;
            fma.rn.bf16x2 x, x, power, zero;
            fma.rn.bf16x2 $1, x, scale, zero;
            and.b32 x, $4, 0x00F000F0;
            mul.lo.u32 x, x, 0x104;
            and.b32 x, x, 0x81C081C0;
            fma.rn.bf16x2 x, x, power, zero;
            fma.rn.bf16x2 $2, x, scale, zero;
            and.b32 x, high, 0x00F000F0;
            mul.lo.u32 x, x, 0x104;
            and.b32 x, x, 0x81C081C0;
            fma.rn.bf16x2 x, x, power, zero;
            fma.rn.bf16x2 $3, x, scale, zero;
            }""",
            "=&r,=&r,=&r,=&r,r,h",
            [words, scales.to(tl.bfloat16)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _halves(tl.join(tl.join(even, even_high), tl.join(odd, odd_high)))
    else:
        codes = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 15
        keys = operand(decode_e2m1(codes) * scales[:, :, None], dtype)
        keys = tl.reshape(keys, [words.shape[0], words.shape[1], 2, 2, 2])
        return tl.permute(keys, (0, 1, 3, 4, 2))


@triton.jit
def _decode_keys(
    words, scales, GROUP: tl.constexpr, MX: tl.constexpr, HAS_FP8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return keys ``[rows, channels]`` with both axes in the order of ``_by_lane``."""
    rows: tl.constexpr = words.shape[0]
    size: tl.constexpr = words.shape[1]
    factor = decode_ue8m0(scales) if MX else decode_e4m3(scales, HAS_FP8)
    factor = tl.broadcast_to(factor[:, :, None], [rows, size * 8 // GROUP, GROUP // 8])
    keys = _decode_words(words, tl.reshape(factor, [rows, size]), dtype)
    keys = tl.reshape(keys, [rows, 4, size // 4, 2, 2, 2])
    keys = tl.reshape(tl.permute(keys, (0, 4, 2, 3, 1, 5)), [rows, size * 8])
    return _rows_by_warp(keys)


@triton.jit
def _by_lane(x):
    """Reorder channels: in a product a lane has what it has loaded, a quarter in one piece."""
    rows: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [rows, 4, size // 32, 2, 2, 2])
    return tl.reshape(tl.permute(x, (0, 5, 2, 4, 1, 3)), [rows, size])


@triton.jit
def _rows_by_warp(x):
    """Reorder rows: in a product a warp has those that it has loaded, eight at a time."""
    rows: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    if rows % 64 == 0:
        x = tl.permute(tl.reshape(x, [rows // 64, 2, 4, 8, size]), (0, 2, 1, 3, 4))
    return tl.reshape(x, [rows, size])


@triton.jit
def _find(table, first, end, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block ids of a tile, one where the tile lies within a block."""
    step: tl.constexpr = BLOCK_N if N % BLOCK_N == 0 else 1
    entry = first + tl.arange(0, BLOCK_N // step)
    return tl.load(table + entry // N, mask=entry < end, other=-1)


@triton.jit
def _fetch(
    block, first, end, codes, scale, P, codes_p, codes_n, scale_p, scale_n,
    N: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Load the keys of a tile as they are stored, and their scales; what is not there is 0."""
    r = tl.arange(0, BLOCK_N)
    offset = (first % N + r if N % BLOCK_N == 0 else (first + r) % N).to(tl.int64)
    is_found = (block >= 0) & (block < P) & (first + r < end)
    block = tl.where((block >= 0) & (block < P), block, 0).to(tl.int64)
    at = (codes + block * codes_p + offset * codes_n)[:, None]
    if scale is None:
        i = tl.arange(0, BLOCK_I)
        inside = is_found[:, None] & (i < WIDTH)[None, :]
        keys = tl.load(at + i[None, :], mask=inside, other=0.0)
        scales = block  # not used
    else:
        i = tl.arange(0, BLOCK_I // 8)
        inside = is_found[:, None] & (i < WIDTH // 8)[None, :]
        if codes.dtype.element_ty == tl.int32:
            keys = tl.load(at + i[None, :], mask=inside, other=0)
        else:
            keys = tl.zeros([BLOCK_N, BLOCK_I // 8], tl.int32)
            for byte in tl.static_range(4):
                part = tl.load(at + (4 * i + byte)[None, :], mask=inside, other=0)
                keys |= part.to(tl.int32) << (8 * byte)
        g = tl.arange(0, BLOCK_I // GROUP)
        at = (scale + block * scale_p + offset * scale_n)[:, None]
        inside = is_found[:, None] & (g * GROUP < WIDTH)[None, :]
        scales = tl.load(at + g[None, :], mask=inside, other=0)
    return keys, scales


@triton.jit(do_not_specialize=["P", "room", "k"])
def _score_kernel(
    iq, iweights, codes, scale, total, block_table, vis, request_ids, scores,
    P, room, bound, k,
    iq_t, iq_h, iweights_t, codes_p, codes_n, scale_p, scale_n, table_b,
    N: tl.constexpr, Hi: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MX: tl.constexpr,
    ROUNDS: tl.constexpr, IS_BF16: tl.constexpr, HAS_FP8: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    # the programs of a token take turns at its tiles
    dtype: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float32
    t = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK_N
    step = tl.num_programs(1) * BLOCK_N
    request = tl.load(request_ids + t).to(tl.int64)
    end = tl.minimum(tl.load(vis + t).to(tl.int32), room)
    if (request < 0) | (end <= k) | (begin >= end):
        return
    # keys are loaded one tile ahead and block ids two
    table = block_table + request * table_b
    keys, scales = _fetch(
        _find(table, begin, end, N, BLOCK_N), begin, end, codes, scale,
        P, codes_p, codes_n, scale_p, scale_n, N, WIDTH, GROUP, BLOCK_N, BLOCK_I,
    )  # fmt: skip
    block = _find(table, begin + step, end, N, BLOCK_N)

    h = tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_I)
    q = tl.load(
        iq + t * iq_t + h.to(tl.int64)[:, None] * iq_h + i[None, :],
        mask=(h < Hi)[:, None] & (i < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    factor = 1.0  # what every score is multiplied by
    if total is not None:
        factor = tl.load(total)
    if ROUNDS:
        q = tl.reshape(round_bf16(q), [BLOCK_H, BLOCK_I // GROUP, GROUP])
        if MX:
            q = round_mxfp4(q)
        else:
            q = round_nvfp4(q, factor)
            factor = factor * factor
        q = tl.reshape(q, [BLOCK_H, BLOCK_I])
    q = operand(q, dtype)
    r = tl.arange(0, BLOCK_N)
    if scale is not None:
        q = _by_lane(q)
        r = tl.reshape(_rows_by_warp(r[:, None]), [BLOCK_N])
    q = tl.trans(q)
    u = widen(tl.load(iweights + t * iweights_t + h, mask=h < Hi, other=0.0)) * factor

    for first in range(begin, end, step):
        if scale is None:
            tile = operand(keys, dtype)
        else:
            tile = _decode_keys(keys, scales, GROUP, MX, HAS_FP8, dtype)
        keys, scales = _fetch(
            block, first + step, end, codes, scale,
            P, codes_p, codes_n, scale_p, scale_n, N, WIDTH, GROUP, BLOCK_N, BLOCK_I,
        )  # fmt: skip
        block = _find(table, first + 2 * step, end, N, BLOCK_N)
        dots = tl.dot(tile, q, input_precision="ieee")
        dots = nan_max(dots, 0.0)
        if Hi != BLOCK_H:
            dots = tl.where((h < Hi)[None, :], dots, 0.0)  # 0 times infinity
        score = tl.sum(dots * u[None, :], axis=1)
        # one zero and one NaN, which is the highest, as where scores are sorted
        score = tl.where(score == 0, 0.0, score)
        bits = tl.where(score == score, score.to(tl.int32, bitcast=True), 0x7FC00000)
        entry = first + r
        bits = tl.where(entry < end, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)
        tl.store(scores + t * bound + entry, bits, mask=entry < bound)


@triton.jit
def _thirds(low, high):
    """Return two thresholds below ``high`` and over ``low``, equal where there is but one."""
    first = low + ((high - low).to(tl.uint32, bitcast=True) // 3).to(tl.int32) + 1
    rest = (high - first).to(tl.uint32, bitcast=True)
    return first, first + (rest // 2).to(tl.int32)


@triton.jit
def _reaching(scores, first, second):
    """Count which of up to 2^15 scores reach two thresholds, both in one sum."""
    both = (scores >= first).to(tl.int32) + ((scores >= second).to(tl.int32) << 16)
    both = tl.sum(both, axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit(do_not_specialize=["room", "k"])
def _select_kernel(
    scores, kept, vis, request_ids, picked, counts, room, bound, k,
    HELD: tl.constexpr, PEAKS: tl.constexpr, LISTED: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # one program lists the picks of one token
    t = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids + t)
    seen = tl.minimum(tl.load(vis + t).to(tl.int32), room)
    seen = tl.where(request < 0, 0, tl.maximum(seen, 0))
    tl.store(counts + t, tl.minimum(seen, k))
    picked += t * k
    if seen <= k:
        for begin in range(0, k, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            tl.store(picked + i, tl.where(i < seen, i, -1), mask=i < k)
        return

    scores += t * bound
    kept += t * bound
    end = (seen + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    peaks = tl.full([PEAKS], _LOWEST, tl.int32)
    i = (tl.arange(0, HELD // PEAKS) * PEAKS)[:, None] + tl.arange(0, PEAKS)[None, :]
    for begin in range(0, end, HELD):
        some = tl.load(scores + begin + i, mask=begin + i < end, other=_LOWEST)
        peaks = tl.maximum(peaks, tl.max(some, axis=0))
    low = tl.min(peaks, axis=0)  # k scores reach it
    high = tl.max(peaks, axis=0) + 1  # none reaches it
    reach, over = low * 0 + PEAKS, high
    if k > PEAKS:  # any score may be among them
        low, over = low * 0 + _LOWEST, low * 0 + _LOWEST + 1
    while (reach > k + k // 4) & (low + 1 != over):
        first, second = _thirds(low, over)
        some, fewer = _reaching(peaks, first, second)
        reach = tl.where(fewer >= k, fewer, tl.where(some >= k, some, reach))
        low = tl.where(fewer >= k, second, tl.where(some >= k, first, low))
        over = tl.where(fewer >= k, over, tl.where(some >= k, second, first))

    # keep the entries that reach it, in order
    i = (tl.arange(0, LISTED // ROW) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    reach = low * 0
    for begin in range(0, end, LISTED):
        entry = begin + i
        some = tl.load(scores + entry, mask=entry < end, other=_LOWEST)
        is_kept = ((some >= low) & (entry < seen)).to(tl.int32)
        of_row = tl.sum(is_kept, axis=1)
        before = reach + tl.cumsum(of_row, axis=0) - of_row
        place = tl.where(is_kept > 0, before[:, None] + tl.cumsum(is_kept, axis=1), 0)
        tl.store(kept + place - 1, entry, mask=place > 0)
        reach += tl.sum(of_row, axis=0)
    tl.debug_barrier()

    # narrow down to k of them, or to equal scores
    listed = reach
    at = tl.arange(0, BLOCK)
    entry = tl.load(kept + at, mask=at < listed, other=0)
    held = tl.load(scores + entry, mask=at < listed, other=_LOWEST)
    above = low * 0  # scores that reach the upper end
    while (reach > k) & (low + 1 != high):
        first, second = _thirds(low, high)
        some, fewer = _reaching(held, first, second)
        for begin in range(BLOCK, listed, BLOCK):
            entry = tl.load(kept + begin + at, mask=begin + at < listed, other=0)
            more = tl.load(scores + entry, mask=begin + at < listed, other=_LOWEST)
            more, most = _reaching(more, first, second)
            some, fewer = some + more, fewer + most
        above = tl.where(fewer >= k, above, tl.where(some >= k, fewer, some))
        reach = tl.where(fewer >= k, fewer, tl.where(some >= k, some, reach))
        low = tl.where(fewer >= k, second, tl.where(some >= k, first, low))
        high = tl.where(fewer >= k, high, tl.where(some >= k, second, first))

    ties = k - above  # of those between, the first are picked
    above, tied = low * 0, low * 0
    for begin in range(0, listed, BLOCK):
        entry = tl.load(kept + begin + at, mask=begin + at < listed, other=0)
        some = tl.load(scores + entry, mask=begin + at < listed, other=_LOWEST)
        is_above = some >= high
        is_tie = (some >= low) & (some < high) & (begin + at < listed)
        # both counts in one scan, for a tile has less than 2^16
        both = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
        count = tl.cumsum(both, axis=0)
        rank = tied + (count >> 16)
        place = above + (count & 0xFFFF) + tl.minimum(rank, ties) - 1
        tl.store(picked + place, entry, mask=is_above | (is_tie & (rank <= ties)))
        both = tl.sum(both, axis=0)
        tied += both >> 16
        above += both & 0xFFFF


def _words(codes: Tensor) -> Tensor:
    """Return the codes as INT32 words, or as they are where words would not be aligned."""
    places = (codes.data_ptr(), codes.storage_offset(), *codes.stride()[:-1], codes.shape[-1])
    return codes.view(torch.int32) if all(place % 4 == 0 for place in places) else codes


def launches(
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
    compute: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Iterator[Launch]]:
    """Return picks and counts, still empty, and the launches that fill them.

    Tokens are taken a slice at a time, so that the scores of one stay within 256 MB. ``compute`` is
    the capability of the device that runs them, None for the interpreter.
    """
    T, Hi, width = iq.shape
    P, N = stored.codes.shape[:2]
    room = block_table.shape[1] * N
    bound = max(triton.cdiv(room, _ALIGNED.value), 1) * _ALIGNED.value
    picked = iq.new_empty((T, k), dtype=torch.int32)
    counts = iq.new_empty((T,), dtype=torch.int32)
    rows = max(1, min(T, _SCORES // (2 * bound)))
    if 16 < rows < T:
        rows -= rows % 16  # so that slices of tokens are aligned as the whole is
    scores, kept = iq.new_empty((2, rows, bound), dtype=torch.int32)
    iq, iweights = (x if x.stride(-1) == 1 else x.contiguous() for x in (iq, iweights))
    block_table, vis, request_ids = map(dense_ids, (block_table, vis, request_ids))
    is_quantized = key_format.is_quantized
    rounds = quantize_query and is_quantized
    if quantize_query and not is_quantized:
        iq = iq.to(stored.codes.dtype)
    # products of what BF16 holds are exact, whatever a wider type would do
    is_bf16 = (rounds or iq.dtype == torch.bfloat16) and stored.codes.dtype != torch.float32
    codes = _words(stored.codes) if is_quantized else stored.codes
    group = key_format.group if is_quantized else width
    sizes: dict[str, Any] = {
        "N": N,
        "Hi": Hi,
        "WIDTH": width,
        "GROUP": group,
        "MX": key_format is KeyFormat.MXFP4,
        "ROUNDS": rounds,
        "IS_BF16": is_bf16,
        "HAS_FP8": has_fp8(compute),
        "BLOCK_H": max(16, power_of_two(Hi)),
        "BLOCK_N": 64 if is_bf16 else 16,
        "BLOCK_I": max(32, power_of_two(width)),
        "num_warps": 4,
        "num_stages": 1,
    }
    most = power_of_two(k)
    held, listed = (max(16, min(power_of_two(bound), size)) for size in (_HELD, _LISTED))
    choice = {
        "HELD": held,
        "PEAKS": min(max(2 * most, 512), held),
        "LISTED": listed,
        "ROW": min(128, listed),
        "BLOCK": min(max(2 * most, 256), listed),
        "num_warps": max(1, min(16, held // 512)),
    }

    def work() -> Iterator[Launch]:
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            count = min(rows, T - start)
            shares = min(triton.cdiv(bound, _PART), triton.cdiv(_PROGRAMS, count))
            shares = max(shares, min(bound // (8 * _PART), _SHARES))
            arguments = (
                iq[part], iweights[part], as_bytes(codes), as_bytes(stored.scale),
                global_scale if key_format is KeyFormat.NVFP4 else None,
                block_table, vis[part], request_ids[part], scores,
                P, room, bound, k,
                *iq.stride()[:2], iweights.stride(0), *strides(codes, 2),
                *strides(stored.scale, 2), block_table.stride(0),
            )  # fmt: skip
            yield Launch(_score_kernel, (count, shares), arguments, sizes)
            arguments = (
                scores, kept, vis[part], request_ids[part], picked[part], counts[part],
                room, bound, k,
            )  # fmt: skip
            yield Launch(_select_kernel, (count,), arguments, choice)

    return picked, counts, work()


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
    """Score and pick; see ``reference.run``."""
    picked, counts, work = launches(
        iq, iweights, stored, global_scale, block_table, vis, request_ids, k, quantize_query,
        key_format, capability(iq.device),
    )  # fmt: skip
    for part in work:
        part.run()
    return picked, counts
