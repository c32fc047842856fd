"""Score every visible key, then find the k-th score bit by bit and list what is above it.

The first launch leaves each score as an integer of the same order, so the second can descend over
its 32 bits: it counts how many scores reach a threshold, and never sorts. Nothing depends on how
tokens are batched, and ties go to the lower index because entries are listed in order.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from torch import Tensor

from kv_kernels.device_code import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    operand,
    quantize_mxfp4,
    quantize_nvfp4,
    round_bf16,
    widen,
)
from kv_kernels.launch import Launch, as_bytes, dense_ids, has_fp8, power_of_two, strides
from kv_kernels.library import capability

_SCORES = 1 << 26  # of one slice of tokens, 256 MB
_PART = 512  # keys that one program scores
_HELD = 1 << 15  # scores that a program keeps in registers; of more it reads some at a time
_LISTED = 8192  # scores that are listed at a time, at most 2^15
_ALIGNED = tl.constexpr(16)  # scores up to a multiple of this are there, so that loads are wide
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _scaled(coded, scales, MX: tl.constexpr, HAS_FP8: tl.constexpr):
    """Return E2M1 codes ``[rows, groups, channels]`` times the scale of each group."""
    if MX:
        factor = decode_ue8m0(scales)
    else:
        factor = decode_e4m3(scales, HAS_FP8)
    return decode_e2m1(coded) * factor[:, :, None]


@triton.jit(do_not_specialize=["P", "N", "room", "k"])
def _score_kernel(
    iq, iweights, codes, scale, total, block_table, vis, request_ids, scores,
    P, N, room, bound, k,
    iq_t, iq_h, iweights_t, codes_p, codes_n, scale_p, scale_n, table_b,
    Hi: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MX: tl.constexpr,
    ROUNDS: tl.constexpr, IS_BF16: tl.constexpr, HAS_FP8: tl.constexpr, PART: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # one program scores PART keys of one token
    BLOCK_J: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_I: tl.constexpr = BLOCK_G * BLOCK_J
    dtype: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float32
    t = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PART
    request = tl.load(request_ids + t).to(tl.int64)
    seen = tl.minimum(tl.load(vis + t).to(tl.int32), room)
    if (request < 0) | (seen <= k) | (begin >= seen):
        return
    table = block_table + request * table_b
    h = tl.arange(0, BLOCK_H)
    g = tl.arange(0, BLOCK_G)
    channel = (g * GROUP)[:, None] + tl.arange(0, BLOCK_J)[None, :]
    in_q = (h < Hi)[:, None, None] & (channel < WIDTH)[None, :, :]
    q = tl.load(
        iq + t * iq_t + h.to(tl.int64)[:, None, None] * iq_h + channel[None, :, :],
        mask=in_q, other=0.0,
    )  # fmt: skip
    factor = 1.0  # what every score is multiplied by
    if total is not None:
        factor = tl.load(total)
    if ROUNDS:
        if MX:
            coded, scales = quantize_mxfp4(round_bf16(q))
        else:
            coded, scales = quantize_nvfp4(round_bf16(q), factor)
            factor = factor * factor
        q = _scaled(coded, scales, MX, HAS_FP8)
    q = operand(tl.reshape(q, [BLOCK_H, BLOCK_I]), dtype)
    u = widen(tl.load(iweights + t * iweights_t + h, mask=h < Hi, other=0.0)) * factor

    end = tl.minimum(begin + PART, seen)
    for first in range(begin, end, BLOCK_N):
        entry = first + tl.arange(0, BLOCK_N)
        is_seen = entry < end
        block = tl.load(table + entry // N, mask=is_seen, other=-1).to(tl.int64)
        is_found = is_seen & (block >= 0) & (block < P)
        block = tl.where(is_found, block, 0)
        offset = (entry % N).to(tl.int64)
        at = codes + block * codes_p + offset * codes_n
        if scale is None:
            inside = is_found[:, None, None] & (channel < WIDTH)[None, :, :]
            keys = tl.load(at[:, None, None] + channel[None, :, :], mask=inside, other=0.0)
        else:
            byte = tl.arange(0, BLOCK_I // 2)
            inside = is_found[:, None] & (byte < WIDTH // 2)[None, :]
            packed = tl.load(at[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
            codes_of_keys = tl.join(packed & 15, packed >> 4)
            codes_of_keys = tl.reshape(codes_of_keys, [BLOCK_N, BLOCK_G, BLOCK_J])
            inside = is_found[:, None] & (g * GROUP < WIDTH)[None, :]
            at = scale + block * scale_p + offset * scale_n
            scales_of_keys = tl.load(at[:, None] + g[None, :], mask=inside, other=0)
            keys = _scaled(codes_of_keys, scales_of_keys, MX, HAS_FP8)
        keys = operand(tl.reshape(keys, [BLOCK_N, BLOCK_I]), dtype)
        dots = tl.dot(q, tl.trans(keys), input_precision="ieee")
        dots = tl.where(dots < 0, 0.0, dots)  # a maximum would drop NaN
        if Hi != BLOCK_H:
            dots = tl.where((h < Hi)[:, None], dots, 0.0)  # 0 times infinity
        score = tl.sum(dots * u[:, None], axis=0)
        # one zero and one NaN, which is the highest, as where scores are sorted
        score = tl.where(score == 0, 0.0, score)
        bits = tl.where(score == score, score.to(tl.int32, bitcast=True), 0x7FC00000)
        bits = tl.where(is_seen, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)
        tl.store(scores + t * bound + entry, bits, mask=entry < bound)


@triton.jit(do_not_specialize=["room", "k"])
def _select_kernel(
    scores, vis, request_ids, picked, counts, room, bound, k,
    IS_HELD: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    # one program lists the picks of one token
    t = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids + t)
    seen = tl.minimum(tl.load(vis + t).to(tl.int32), room)
    seen = tl.where(request < 0, 0, tl.maximum(seen, 0))
    tl.store(counts + t, tl.minimum(seen, k))
    picked += t * k
    if seen <= k:
        for begin in range(0, k, LISTED):
            i = begin + tl.arange(0, LISTED)
            tl.store(picked + i, tl.where(i < seen, i, -1), mask=i < k)
        return

    # the highest threshold that at least k scores reach: the k-th score
    scores += t * bound
    end = (seen + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    at = tl.arange(0, BLOCK)
    threshold = seen * 0 + _LOWEST
    bit = threshold
    above = seen * 0  # scores over the threshold
    if IS_HELD:
        held = tl.load(scores + at, mask=at < end, other=_LOWEST)
        for _ in range(32):
            candidate = threshold ^ bit
            bit = (bit >> 1) & 0x7FFFFFFF
            reach = tl.sum((held >= candidate).to(tl.int32), axis=0)
            threshold = tl.where(reach >= k, candidate, threshold)
        above = tl.sum((held > threshold).to(tl.int32), axis=0)
    else:
        for _ in range(32):
            candidate = threshold ^ bit
            bit = (bit >> 1) & 0x7FFFFFFF
            reaching = tl.zeros([BLOCK], tl.int32)
            for begin in range(0, end, BLOCK):
                some = tl.load(scores + begin + at, mask=begin + at < end, other=_LOWEST)
                reaching += (some >= candidate).to(tl.int32)
            threshold = tl.where(tl.sum(reaching, axis=0) >= k, candidate, threshold)
        reaching = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, end, BLOCK):
            some = tl.load(scores + begin + at, mask=begin + at < end, other=_LOWEST)
            reaching += (some > threshold).to(tl.int32)
        above = tl.sum(reaching, axis=0)

    ties = k - above  # of them, the first are picked
    listed = above * 0
    tied = above * 0
    for begin in range(0, end, LISTED):
        i = begin + tl.arange(0, LISTED)
        some = tl.load(scores + i, mask=i < end, other=_LOWEST)
        is_above = some > threshold
        is_tie = (some == threshold) & (i < seen)
        # both counts in one scan, for a tile has less than 2^16
        both = is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16)
        count = tl.cumsum(both, axis=0)
        rank = tied + (count >> 16)
        place = listed + (count & 0xFFFF) + tl.minimum(rank, ties) - 1
        tl.store(picked + place, i, mask=is_above | (is_tie & (rank <= ties)))
        both = tl.sum(both, axis=0)
        tied += both >> 16
        listed += both & 0xFFFF


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
    bound = triton.cdiv(room, _ALIGNED.value) * _ALIGNED.value
    picked = iq.new_empty((T, k), dtype=torch.int32)
    counts = iq.new_empty((T,), dtype=torch.int32)
    rows = max(1, min(T, _SCORES // bound))
    scores = iq.new_empty((rows, bound), dtype=torch.int32)
    iq, iweights = (x if x.stride(-1) == 1 else x.contiguous() for x in (iq, iweights))
    block_table, vis, request_ids = map(dense_ids, (block_table, vis, request_ids))
    is_quantized = key_format.is_quantized
    rounds = quantize_query and is_quantized
    if quantize_query and not is_quantized:
        iq = iq.to(stored.codes.dtype)
    # products of what BF16 holds are exact, whatever a wider type would do
    is_bf16 = (rounds or iq.dtype == torch.bfloat16) and stored.codes.dtype != torch.float32
    group = key_format.group if is_quantized else width
    sizes: dict[str, Any] = {
        "Hi": Hi,
        "WIDTH": width,
        "GROUP": group,
        "MX": key_format is KeyFormat.MXFP4,
        "ROUNDS": rounds,
        "IS_BF16": is_bf16,
        "HAS_FP8": has_fp8(compute),
        "PART": _PART,
        "BLOCK_H": max(16, power_of_two(Hi)),
        "BLOCK_N": 64 if is_bf16 else 16,
        "BLOCK_G": power_of_two(width // group),
        "num_warps": 4,
        "num_stages": 3 if is_bf16 else 1,
        "enable_fp_fusion": False,
    }
    is_held = bound <= _HELD
    block = max(16, power_of_two(bound)) if is_held else _LISTED
    choice = {
        "IS_HELD": is_held,
        "BLOCK": block,
        "LISTED": min(block, _LISTED),
        "num_warps": max(1, min(32, block // 1024)) if is_held else 16,
    }

    def work() -> Iterator[Launch]:
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            count = min(rows, T - start)
            arguments = (
                iq[part], iweights[part], as_bytes(stored.codes), as_bytes(stored.scale),
                global_scale if key_format is KeyFormat.NVFP4 else None,
                block_table, vis[part], request_ids[part], scores,
                P, N, room, bound, k,
                *iq.stride()[:2], iweights.stride(0), *strides(stored.codes, 2),
                *strides(stored.scale, 2), block_table.stride(0),
            )  # fmt: skip
            yield Launch(_score_kernel, (count, triton.cdiv(bound, _PART)), arguments, sizes)
            arguments = (
                scores, vis[part], request_ids[part], picked[part], counts[part], room, bound, k,
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
