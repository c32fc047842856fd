"""Attend window and entries in one pass: one program for a token and up to 64 of its heads.

Which rows a token sees, and in which order, depends on its position and picks alone: those of this
step, encoded first, are read in place of the ring's. So an output does not depend on how a sequence
is cut into steps.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from kv_core.hybrid.rows import RowFormat, RowTensors
from torch import Tensor

from kv_kernels.device_code import decode_e4m3, decode_ue8m0, operand, round_to, widen
from kv_kernels.launch import Launch, as_bytes, dense_ids, has_fp8, power_of_two, strides
from kv_kernels.library import capability
from kv_kernels.ops.append_swa.triton import launch as store_launch
from kv_kernels.ops.hybrid_attention.tiles import choose_tile

_LISTED = 4096  # picks among which the last is looked for
_LOG2_E = tl.constexpr(math.log2(math.e))
_PIECE = tl.constexpr(64)  # channels


@triton.jit
def _load_rows(
    codes, rope, scale, seen, DTYPE: tl.constexpr, HAS_FP8: tl.constexpr,
    R: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Return rows ``[n, BLOCK_G * BLOCK_J]``, the last channels of FP8 rows as one more group.

    Pointers are ``[n]`` each; what is not seen is not read and comes as 0.
    """
    n: tl.constexpr = codes.shape[0]
    g = tl.arange(0, BLOCK_G)
    j = tl.arange(0, BLOCK_J)
    channel = (g * GROUP)[:, None] + j[None, :]
    inside = (g < GROUPS)[:, None] & (j < GROUP)[None, :]
    inside = seen[:, None, None] & inside[None, :, :]
    x = tl.load(codes[:, None, None] + channel[None, :, :], mask=inside, other=0)
    if scale is not None:
        in_scale = seen[:, None] & (g < GROUPS)[None, :]
        byte = tl.load(scale[:, None] + g[None, :], mask=in_scale, other=0)
        x = decode_e4m3(x, HAS_FP8) * decode_ue8m0(byte)[:, :, None]
    x = operand(x, DTYPE)
    if rope is not None:
        in_rope = seen[:, None] & (j < R)[None, :]
        last = tl.load(rope[:, None] + j[None, :], mask=in_rope, other=0)
        x = tl.where((g == GROUPS)[None, :, None], operand(last, DTYPE)[:, None, :], x)
    return tl.reshape(x, [n, BLOCK_G * BLOCK_J])


@triton.jit
def _scores(queries, rows, IS_BF16: tl.constexpr):
    """Return the products ``[m, n]`` of all queries and rows.

    FP32 adds up 64 channels at a time: in one go, each channel added would round a sum of all.
    """
    m: tl.constexpr = queries.shape[0]
    n: tl.constexpr = rows.shape[0]
    pieces: tl.constexpr = queries.shape[1] // _PIECE
    if IS_BF16 or pieces < 2:
        return tl.dot(queries, tl.trans(rows), input_precision="ieee")
    else:
        left = tl.permute(tl.reshape(queries, [m, pieces, _PIECE]), (1, 0, 2))
        right = tl.permute(tl.reshape(rows, [n, pieces, _PIECE]), (1, 2, 0))
        return tl.sum(tl.dot(left, right, input_precision="ieee"), axis=0)


# what differs from step to step must not compile the kernel again
@triton.jit(do_not_specialize=["window", "P", "N", "room", "k", "table_end", "RING"])
def _attend_kernel(
    q, new_codes, new_rope, new_scale, ring_codes, ring_rope, ring_scale, held,
    codes, rope, scale, sinks, cos, sin, out, lse,
    request_slots, seq_start, request_ids, positions, block_table, vis, picked,
    factor, window, Hq, RING, P, N, room, k, table_end,
    q_t, q_h, new_codes_t, new_rope_t, new_scale_t,
    ring_codes_p, ring_codes_n, ring_rope_p, ring_rope_n, ring_scale_p, ring_scale_n,
    held_p, held_n, codes_p, codes_n, rope_p, rope_n, scale_p, scale_n, table_b, picked_t,
    cos_t, sin_t,
    D: tl.constexpr, R: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    BLOCK_W: tl.constexpr = BLOCK_G * BLOCK_J
    DTYPE: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float32
    groups = (Hq + BLOCK_M - 1) // BLOCK_M
    t = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = head < Hq
    request = tl.load(request_ids + t).to(tl.int64)
    position = tl.load(positions + t).to(tl.int32)  # half the registers of INT64
    is_token = (request >= 0) & (position >= 0)
    start = tl.load(seq_start + request, mask=is_token, other=0).to(tl.int32)
    slot = tl.load(request_slots + request, mask=is_token, other=0).to(tl.int32)
    slot = tl.maximum(slot, 0)
    held += slot * held_p
    ring_codes += slot * ring_codes_p
    if ring_scale is not None:
        ring_rope += slot * ring_rope_p
        ring_scale += slot * ring_scale_p

    # channels lie in padded groups, in queries as in rows
    c = tl.arange(0, BLOCK_W)
    j = c % BLOCK_J
    channel = c // BLOCK_J * GROUP + j
    is_channel = (j < tl.where(c // BLOCK_J < GROUPS, GROUP, R)) & (channel < D)
    in_out = is_head[:, None] & is_channel[None, :]
    q += t * q_t + head.to(tl.int64)[:, None] * q_h
    queries = operand(tl.load(q + channel[None, :], mask=in_out, other=0.0), DTYPE)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # first the window, the newest row first, then entries
    recent = tl.where(is_token, tl.minimum(position + 1, window), 0)
    end = recent
    seen_entries = end * 0
    if codes is not None:
        seen_entries = tl.load(vis + t, mask=is_token, other=0).to(tl.int32)
        seen_entries = tl.minimum(seen_entries, room)
        table = block_table + request * table_b
        if picked is None:
            end += tl.maximum(seen_entries, 0)
        else:
            picked += t * picked_t
            listed = k
            if BLOCK_K > 0:
                at_pick = tl.arange(0, BLOCK_K)
                names = tl.load(picked + at_pick, mask=(at_pick < k) & is_token, other=-1)
                listed = tl.max(tl.where(names >= 0, at_pick + 1, 0), axis=0)
            end += tl.where(is_token, listed, 0)
    for begin in range(0, end, BLOCK_N):
        i = begin + tl.arange(0, BLOCK_N)
        at = position - i
        in_window = i < recent
        is_seen = in_window & (at >= start)
        own = tl.where(is_seen, t - i, 0)
        code_at = new_codes + own * new_codes_t
        is_old = in_window & (at < start)
        row = (tl.where(is_old, at, 0) % RING).to(tl.int64)
        is_old = is_old & (tl.load(held + row * held_n, mask=is_old, other=-1) == at)
        code_at = tl.where(is_old, ring_codes + row * ring_codes_n, code_at)
        is_seen = is_seen | is_old
        is_entry = i >= recent
        if codes is not None:
            entry = i - recent
            is_entry = is_entry & (i < end)
            if picked is not None:
                entry = tl.load(picked + entry, mask=is_entry, other=-1).to(tl.int32)
            is_entry = is_entry & (entry >= 0) & (entry < seen_entries)
            entry = tl.where(is_entry, entry, 0)
            block = tl.load(table + entry // N, mask=is_entry, other=-1).to(tl.int64)
            is_entry = is_entry & (block >= 0) & (block < P)
            offset = (entry % N).to(tl.int64)
            code_at = tl.where(is_entry, codes + block * codes_p + offset * codes_n, code_at)
            is_seen = is_seen | is_entry
        rope_at = None
        scale_at = None
        if ring_scale is not None:
            rope_at = new_rope + own * new_rope_t
            scale_at = new_scale + own * new_scale_t
            rope_at = tl.where(is_old, ring_rope + row * ring_rope_n, rope_at)
            scale_at = tl.where(is_old, ring_scale + row * ring_scale_n, scale_at)
            if codes is not None:
                at_rope = rope + block * rope_p + offset * rope_n
                at_scale = scale + block * scale_p + offset * scale_n
                rope_at = tl.where(is_entry, at_rope, rope_at)
                scale_at = tl.where(is_entry, at_scale, scale_at)
        rows = _load_rows(
            code_at, rope_at, scale_at, is_seen, DTYPE, HAS_FP8, R, GROUP, GROUPS, BLOCK_G, BLOCK_J
        )

        score = _scores(queries, rows, IS_BF16)
        score = tl.where(is_seen[None, :], score * factor, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet: no inf - inf
        fade = tl.exp2((peak - base) * _LOG2_E)
        weight = tl.exp2((score - base[:, None]) * _LOG2_E)
        total = total * fade + tl.sum(weight, axis=1)
        weight = operand(round_to(weight, DTYPE), DTYPE)
        acc = tl.dot(weight, rows, acc * fade[:, None], input_precision="ieee")
        peak = higher

    is_empty = total == 0
    base = tl.where(peak == -float("inf"), 0.0, peak)
    divisor = total
    if sinks is not None:
        sink = widen(tl.load(sinks + head, mask=is_head, other=0.0))
        divisor += tl.exp2((sink - base) * _LOG2_E)
    divisor = tl.where(is_empty, 1.0, divisor)[:, None]
    result = tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape))
    if cos is not None:
        # back by the token's position; each group holds whole pairs
        first = channel - (D - TURNED)
        turns = is_channel & (first >= 0)
        inside = turns & (position < table_end)
        at = tl.maximum(position, 0).to(tl.int64)
        x = widen(tl.load(cos + at * cos_t + first // 2, mask=inside, other=float("nan")))
        y = widen(tl.load(sin + at * sin_t + first // 2, mask=inside, other=float("nan")))
        even, odd = tl.split(tl.reshape(result, [BLOCK_M, BLOCK_W // 2, 2]))
        other = tl.reshape(tl.join(odd, -even), [BLOCK_M, BLOCK_W])
        turned = result * x[None, :] + other * y[None, :]
        result = tl.where(turns[None, :] & is_token, turned, result)
    target = out + (t * Hq + head)[:, None] * D + channel[None, :]
    tl.store(target, round_to(result, out.dtype.element_ty), mask=in_out)
    if lse is not None:
        found = tl.where(is_empty, -float("inf"), peak + tl.log(tl.where(is_empty, 1.0, total)))
        tl.store(lse + t * Hq + head, found, mask=is_head)


def _encoded(
    kv_new: Tensor, ring: RowTensors, row_format: RowFormat, group: int
) -> tuple[RowTensors, list[Launch]]:
    """Return the step's own rows ``[1, T, ...]`` as a ring holds them, and what fills them."""
    if row_format is not RowFormat.FP8 and kv_new.dtype == ring.codes.dtype:
        return RowTensors(kv_new[None]), []
    T = kv_new.shape[0]
    codes, rope, scale = (
        None if x is None else x.new_empty((1, T, x.shape[-1])) for x in ring
    )  # fmt: skip
    assert codes is not None
    new = RowTensors(codes, rope, scale)
    return new, [store_launch(kv_new, None, None, new, None, row_format, group)]


def launches(
    q: Tensor,
    kv_new: Tensor,
    sinks: Tensor | None,
    ring: RowTensors,
    held: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    pool: RowTensors | None,
    block_table: Tensor | None,
    vis: Tensor | None,
    picked: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    window: int,
    row_format: RowFormat,
    group: int,
    return_lse: bool,
    compute: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, list[Launch]]:
    """Return output and log-sum-exp, still empty, and the launches that fill them.

    ``compute`` is the capability of the device which runs them, None for the interpreter.
    """
    T, Hq, D = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((T, Hq) if return_lse else (0,), dtype=torch.float32)
    # FP8 rows are groups of codes, and their last channels one more; others are one group
    R = 0 if ring.rope is None else ring.rope.shape[-1]
    group = group if ring.scale is not None else D
    groups = (D - R) // group
    block_j = power_of_two(max(group, R))
    block_g = power_of_two(groups + (R > 0))
    block_j = max(block_j, 16 // block_g)  # a side of a matrix product
    own, work = _encoded(kv_new, ring, row_format, group)
    entries = RowTensors(None) if pool is None else pool  # type: ignore[arg-type]
    is_bf16 = q.dtype == torch.bfloat16 and row_format is not RowFormat.FP32
    tile = choose_tile(is_bf16, block_g * block_j, Hq, compute)
    request_slots, seq_start, request_ids, positions = map(
        dense_ids, (request_slots, seq_start, request_ids, positions)
    )
    block_table, vis, picked = (
        x if x is None else dense_ids(x) for x in (block_table, vis, picked)
    )  # fmt: skip
    cos, sin, sinks = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (cos, sin, sinks)
    )
    P, N = (1, 1) if pool is None else pool.codes.shape[:2]
    room = 0 if block_table is None else block_table.shape[1] * N
    k = 0 if picked is None else picked.shape[1]
    arguments = (
        q, *map(as_bytes, own), *map(as_bytes, ring), held, *map(as_bytes, entries),
        sinks, cos, sin, out, lse if return_lse else None,
        request_slots, seq_start, request_ids, positions, block_table, vis, picked,
        scale, window, Hq, held.shape[1], P, N, room, k, 0 if cos is None else cos.shape[0],
        *q.stride()[:2], *(0 if x is None else x.stride(1) for x in own),
        *(s for x in ring for s in strides(x, 2)), *strides(held, 2),
        *(s for x in entries for s in strides(x, 2)),
        *strides(block_table, 1), *strides(picked, 1), *strides(cos, 1), *strides(sin, 1),
    )  # fmt: skip
    options: dict[str, Any] = {
        "D": D,
        "R": R,
        "TURNED": 0 if cos is None else 2 * cos.shape[1],
        "GROUP": group,
        "GROUPS": groups,
        "BLOCK_G": block_g,
        "BLOCK_J": block_j,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": power_of_two(k) if 0 < k <= _LISTED else 0,
        "IS_BF16": is_bf16,
        "HAS_FP8": has_fp8(compute),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
    grid = (T * triton.cdiv(Hq, tile.m),)
    return out, lse, [*work, Launch(_attend_kernel, grid, arguments, options)]


def run(
    q: Tensor,
    kv_new: Tensor,
    sinks: Tensor | None,
    ring: RowTensors,
    held: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    pool: RowTensors | None,
    block_table: Tensor | None,
    vis: Tensor | None,
    picked: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    window: int,
    row_format: RowFormat,
    group: int,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend what each token sees; see ``reference.run``."""
    out, lse, work = launches(
        q, kv_new, sinks, ring, held, request_slots, seq_start, request_ids, positions,
        pool, block_table, vis, picked, cos, sin, scale, window, row_format, group, return_lse,
        capability(q.device),
    )  # fmt: skip
    for part in work:
        part.run()
    return out, lse
