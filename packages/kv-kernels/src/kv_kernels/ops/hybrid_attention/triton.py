"""Attend window and entries in two launches: all scores, then the sums they weigh.

Which rows a token sees, and in which order, depends on its position and picks alone: those of this
step, encoded first, are read in place of the ring's. So an output does not depend on how a sequence
is cut into steps. The peak of a token's scores is known before anything is summed, so the sums of
its channels are independent programs, and nothing is rescaled.
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
from kv_kernels.ops.hybrid_attention.tiles import GROUP, MIN_SIDE, choose_slots, choose_tile

_PROGRAMS = 64  # that share the tiles of one token and block of heads, at most
_SCRATCH = 2**27  # bytes of scores that a call may hold at a time
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_TILES = tl.constexpr(32)  # whose peaks are read at a time


@triton.jit
def _locate(
    place, pool, ring, new, P, B, pool_p, pool_n, ring_p, ring_n, new_t,
    N: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Return pointers to rows; those of the pool are counted first, then the rings', then new ones.

    Args:
        place: ``[n]`` INT32, the number of each row.
        pool: The pool, or None; its rows count nevertheless.
        ring: The rings.
        new: The rows of this step.
    """
    row = place - P * N
    own = row - B * RING
    at = (row.to(tl.uint32) // RING).to(tl.int64) * ring_p
    at = ring + at + (row.to(tl.uint32) % RING).to(tl.int64) * ring_n
    at = tl.where(own >= 0, new + own.to(tl.int64) * new_t, at)
    if pool is not None:
        stored = (place.to(tl.uint32) // N).to(tl.int64) * pool_p
        stored = pool + stored + (place.to(tl.uint32) % N).to(tl.int64) * pool_n
        at = tl.where(row >= 0, at, stored)
    return at


@triton.jit
def _load_group(
    code_at, rope_at, scale, group, DTYPE: tl.constexpr, HAS_FP8: tl.constexpr,
    MAY_BE_ROPE: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Return one group of channels of each row ``[n, BLOCK_J]``, padding as 0.

    Args:
        code_at: ``[n]`` pointers to codes.
        rope_at: ``[n]`` pointers to the last channels, which are stored without a scale.
        scale: ``[n]`` FP32 scale of the group, or None.
        group: Which; behind the groups of codes come the last channels.
        MAY_BE_ROPE: Whether it may be those; no branch, so that all loads can be issued early.
    """
    j = tl.arange(0, BLOCK_J)
    coded = tl.minimum(group, GROUPS - 1)
    channel = coded * GROUP + j
    inside = (j < GROUP) & (channel < D - R)
    if MAY_BE_ROPE:
        inside = inside & (group < GROUPS)
        x = tl.load(code_at[:, None] + channel[None, :], mask=inside[None, :], other=0)
    elif GROUP < BLOCK_J or (D - R) % GROUP > 0:
        x = tl.load(code_at[:, None] + channel[None, :], mask=inside[None, :], other=0)
    else:
        x = tl.load(code_at[:, None] + channel[None, :])
    if scale is not None:
        x = decode_e4m3(x, HAS_FP8) * scale[:, None]
    x = operand(x, DTYPE)
    if MAY_BE_ROPE:
        is_rope = (j < R) & (group == GROUPS)
        last = tl.load(rope_at[:, None] + j[None, :], mask=is_rope[None, :], other=0)
        x = tl.where(group == GROUPS, operand(last, DTYPE), x)
    return x


# what differs from step to step must not compile a kernel again
@triton.jit(do_not_specialize=["first", "P", "B", "room", "k", "tiles", "programs"])
def _score_kernel(
    q, new_codes, new_rope, new_scale, ring_codes, ring_rope, ring_scale, held,
    codes, rope, scale, scores, peaks, totals, places, scales,
    request_slots, seq_start, request_ids, positions, block_table, vis, picked,
    factor, Hq, first, P, B, room, k, tiles, programs,
    q_t, q_h, new_codes_t, new_rope_t, new_scale_t,
    ring_codes_p, ring_codes_n, ring_rope_p, ring_rope_n, ring_scale_p, ring_scale_n,
    held_p, held_n, codes_p, codes_n, rope_p, rope_n, scale_p, scale_n, table_b, picked_t,
    WINDOW: tl.constexpr, RING: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """Score tiles of what a token may see, and say where their rows lie.

    The tiles of the window come first, the newest row first, then those of entries. Products are
    summed some groups of channels at a time: within one sum the tensor cores drop what is small
    beside it.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float32
    blocks = (Hq + BLOCK_M - 1) // BLOCK_M
    local = (tl.program_id(0) // (programs * blocks)).to(tl.int64)
    t = first + local
    block_m = tl.program_id(0) // programs % blocks
    head = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = head < Hq
    request = tl.load(request_ids + t).to(tl.int64)
    position = tl.load(positions + t).to(tl.int32)
    is_token = (request >= 0) & (position >= 0)
    recent = tl.where(is_token, tl.minimum(position + 1, WINDOW), 0)
    of_window = (recent + BLOCK_N - 1) // BLOCK_N
    listed = 0
    if codes is not None:
        room = tl.minimum(tl.load(vis + t, mask=is_token, other=0).to(tl.int32), room)
        listed = room if picked is None else k
        listed = tl.where(is_token, tl.maximum(listed, 0), 0)
    n = tl.arange(0, BLOCK_N)
    own = P * N + B * RING + t.to(tl.int32)
    for tile in range(
        tl.program_id(0) % programs, of_window + (listed + BLOCK_N - 1) // BLOCK_N, programs
    ):
        if tile < of_window:
            i = tile * BLOCK_N + n
            start = tl.load(seq_start + request).to(tl.int32)
            slot = tl.maximum(tl.load(request_slots + request).to(tl.int32), 0)
            at = position - i
            is_old = (i < recent) & (at < start)
            row = tl.where(is_old, at, 0) % RING
            there = tl.load(held + slot.to(tl.int64) * held_p + row * held_n, is_old, other=-1)
            is_old = is_old & (there == at)
            seen = is_old | ((i < recent) & (at >= start))
            place = tl.where(is_old, P * N + slot * RING + row, tl.where(seen, own - i, own))
        else:
            entry = (tile - of_window) * BLOCK_N + n
            seen = entry < listed
            place = own + n * 0
            if codes is not None:
                if picked is not None:
                    entry = tl.load(picked + t * picked_t + entry, seen, other=-1)
                    seen = (entry >= 0) & (entry < room)
                entry = tl.where(seen, entry, 0).to(tl.int32)
                block = tl.load(block_table + request * table_b + entry // N, seen, other=-1)
                seen = seen & (block >= 0) & (block < P)
                place = tl.where(seen, block.to(tl.int32) * N + entry % N, own)

        # what is not seen is read where the token's own row lies, which itself comes first; once
        # through memory, or every layout below would look all of it up again
        column = tile * BLOCK_N + n
        places_at = places + local * (tiles * BLOCK_N) + column
        tl.store(places_at, place)
        tl.debug_barrier()
        place = tl.load(places_at)
        seen = (place != own) | (column == 0)
        code_at = _locate(
            place, codes, ring_codes, new_codes, P, B,
            codes_p, codes_n, ring_codes_p, ring_codes_n, new_codes_t, N, RING,
        )  # fmt: skip
        rope_at = None
        if R > 0:
            rope_at = _locate(
                place, rope, ring_rope, new_rope, P, B,
                rope_p, rope_n, ring_rope_p, ring_rope_n, new_rope_t, N, RING,
            )  # fmt: skip
        if ring_scale is not None:
            scale_at = _locate(
                place, scale, ring_scale, new_scale, P, B,
                scale_p, scale_n, ring_scale_p, ring_scale_n, new_scale_t, N, RING,
            )  # fmt: skip
            g = tl.arange(0, BLOCK_G)
            is_group = (g < GROUPS)[None, :]
            every = decode_ue8m0(tl.load(scale_at[:, None] + g[None, :], is_group, other=0))
            target = scales + (local * GROUPS + g)[None, :] * (tiles * BLOCK_N) + column[:, None]
            tl.store(target, every, mask=is_group)
        q_at = q + t * q_t + head.to(tl.int64)[:, None] * q_h
        score = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, GROUPS + (R > 0), SLOTS):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for s in tl.static_range(SLOTS):
                j = tl.arange(0, BLOCK_J)
                group = begin + s
                channel = group * GROUP + j
                inside = (j < tl.where(group < GROUPS, GROUP, R)) & (channel < D)
                if R > GROUP:  # or a group behind the last would begin within D
                    inside = inside & (group <= GROUPS)
                x = tl.load(
                    q_at + channel[None, :], is_head[:, None] & inside[None, :], other=0.0
                )  # fmt: skip
                unit = None
                if ring_scale is not None:
                    coded = tl.minimum(group, GROUPS - 1)
                    unit = decode_ue8m0(tl.load(scale_at + coded))
                rows = _load_group(
                    code_at, rope_at, unit, group, DTYPE, HAS_FP8,
                    R > 0 and s == GROUPS % SLOTS, D, R, GROUP, GROUPS, BLOCK_J,
                )  # fmt: skip
                part = tl.dot(operand(x, DTYPE), tl.trans(rows), part, input_precision="ieee")
            score += part * factor

        score = tl.where(seen[None, :], score, -float("inf"))
        peak = tl.max(score, axis=1)
        base = tl.where(peak == -float("inf"), 0.0, peak)  # nothing seen: no inf - inf
        total = tl.sum(tl.exp2(score - base[:, None]), axis=1)
        of_tile = (local * tiles + tile) * Hq + head
        tl.store(peaks + of_tile, peak, mask=is_head)
        tl.store(totals + of_tile, total, mask=is_head)
        target = scores + (local * Hq + head)[:, None] * (tiles * BLOCK_N) + column[None, :]
        tl.store(target, score, mask=is_head[:, None])


@triton.jit(do_not_specialize=["first", "P", "B", "room", "k", "tiles", "table_end"])
def _sum_kernel(
    out, new_codes, new_rope, ring_codes, ring_rope, codes, rope,
    scores, peaks, totals, places, scales, sinks, cos, sin, lse,
    request_ids, positions, vis, Hq, first, P, B, room, k, tiles, table_end,
    new_codes_t, new_rope_t, ring_codes_p, ring_codes_n, ring_rope_p, ring_rope_n,
    codes_p, codes_n, rope_p, rope_n, cos_t, sin_t,
    WINDOW: tl.constexpr, RING: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_PICKS: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """Weigh the rows of all tiles with their scores, for ``SLOTS`` groups of the channels."""
    DTYPE: tl.constexpr = tl.bfloat16 if IS_BF16 else tl.float32
    blocks = (Hq + BLOCK_M - 1) // BLOCK_M
    local = (tl.program_id(0) // (PARTS * blocks)).to(tl.int64)
    t = first + local
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = head < Hq
    request = tl.load(request_ids + t)
    position = tl.load(positions + t).to(tl.int32)
    is_token = (request >= 0) & (position >= 0)
    count = (tl.where(is_token, tl.minimum(position + 1, WINDOW), 0) + BLOCK_N - 1) // BLOCK_N
    if codes is not None:
        listed = tl.minimum(tl.load(vis + t, mask=is_token, other=0).to(tl.int32), room)
        if HAS_PICKS:
            listed = k
        count += (tl.where(is_token, tl.maximum(listed, 0), 0) + BLOCK_N - 1) // BLOCK_N

    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    base = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = 0
    for begin in range(0, count, _TILES):
        tile = begin + tl.arange(0, _TILES)
        there = (tile < count)[:, None] & is_head[None, :]
        of_tile = (local * tiles + tile)[:, None] * Hq + head[None, :]
        some = tl.load(peaks + of_tile, there, other=-float("inf"))
        live = tl.where(some == -float("inf"), 0, tile[:, None] + 1)
        last = tl.maximum(last, tl.max(live))
        before = peak
        peak = tl.maximum(peak, tl.max(some, axis=0))
        base = tl.where(peak == -float("inf"), 0.0, peak)  # nothing seen: no inf - inf
        some = tl.load(totals + of_tile, there, other=0.0) * tl.exp2(some - base[None, :])
        total = total * tl.exp2(before - base) + tl.sum(some, axis=0)
    acc: tl.tuple = ()
    for _ in tl.static_range(SLOTS):
        acc += (tl.zeros([BLOCK_M, BLOCK_J], tl.float32),)
    n = tl.arange(0, BLOCK_N)
    for tile in range(0, last):
        column = tile * BLOCK_N + n
        place = tl.load(places + local * (tiles * BLOCK_N) + column)
        at = scores + (local * Hq + head)[:, None] * (tiles * BLOCK_N) + column[None, :]
        score = tl.load(at, mask=is_head[:, None], other=0.0)
        weight = operand(round_to(tl.exp2(score - base[:, None]), DTYPE), DTYPE)
        code_at = _locate(
            place, codes, ring_codes, new_codes, P, B,
            codes_p, codes_n, ring_codes_p, ring_codes_n, new_codes_t, N, RING,
        )  # fmt: skip
        rope_at = None
        if R > 0:
            rope_at = _locate(
                place, rope, ring_rope, new_rope, P, B,
                rope_p, rope_n, ring_rope_p, ring_rope_n, new_rope_t, N, RING,
            )  # fmt: skip
        sums: tl.tuple = ()
        for s in tl.static_range(SLOTS):
            group = part * SLOTS + s
            unit = None
            if scales is not None:
                coded = tl.minimum(group, GROUPS - 1)
                unit = tl.load(scales + (local * GROUPS + coded) * (tiles * BLOCK_N) + column)
            rows = _load_group(
                code_at, rope_at, unit, group, DTYPE, HAS_FP8,
                R > 0 and s == GROUPS % SLOTS, D, R, GROUP, GROUPS, BLOCK_J,
            )  # fmt: skip
            sums += (tl.dot(weight, rows, acc[s], input_precision="ieee"),)
        acc = sums

    is_empty = total == 0
    divisor = total
    if sinks is not None:
        sink = widen(tl.load(sinks + head, mask=is_head, other=0.0))
        divisor += tl.exp2(sink * _LOG2_E - base)
    inverse = 1.0 / tl.where(is_empty, 1.0, divisor)
    for s in tl.static_range(SLOTS):
        slot = part * SLOTS + s
        j = tl.arange(0, BLOCK_J)
        channel = slot * GROUP + j
        is_channel = (j < tl.where(slot < GROUPS, GROUP, R)) & (channel < D)
        if R > GROUP:
            is_channel = is_channel & (slot <= GROUPS)
        result = acc[s] * inverse[:, None]
        if cos is not None:
            # back by the token's position; a group holds whole pairs
            turned = channel - (D - TURNED)
            turns = is_channel & (turned >= 0)
            inside = turns & (position < table_end)
            at = tl.maximum(position, 0).to(tl.int64)
            x = widen(tl.load(cos + at * cos_t + turned // 2, mask=inside, other=float("nan")))
            y = widen(tl.load(sin + at * sin_t + turned // 2, mask=inside, other=float("nan")))
            even, odd = tl.split(tl.reshape(result, [BLOCK_M, BLOCK_J // 2, 2]))
            other = tl.reshape(tl.join(odd, -even), [BLOCK_M, BLOCK_J])
            other = result * x[None, :] + other * y[None, :]
            result = tl.where(turns[None, :] & is_token, other, result)
        target = out + (t * Hq + head)[:, None] * D + channel[None, :]
        inside = is_head[:, None] & is_channel[None, :]
        tl.store(target, round_to(result, out.dtype.element_ty), mask=inside)
    if lse is not None:
        found = peak * _LN_2 + tl.log(tl.where(is_empty, 1.0, total))
        found = tl.where(is_empty, -float("inf"), found)
        tl.store(lse + t * Hq + head, found, mask=is_head & (part == 0))


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
    R = 0 if ring.rope is None else ring.rope.shape[-1]
    own, work = _encoded(kv_new, ring, row_format, group)
    entries = RowTensors(None) if pool is None else pool  # type: ignore[arg-type]
    is_bf16 = q.dtype == torch.bfloat16 and row_format is not RowFormat.FP32
    if ring.scale is None:
        group = min(power_of_two(D), GROUP)
    groups = triton.cdiv(D - R, group)
    block_j = max(power_of_two(max(group, R)), MIN_SIDE)
    tile = choose_tile(is_bf16, Hq, block_j, compute)
    request_slots, seq_start, request_ids, positions = map(
        dense_ids, (request_slots, seq_start, request_ids, positions)
    )
    block_table, vis, picked = (
        x if x is None else dense_ids(x) for x in (block_table, vis, picked)
    )  # fmt: skip
    cos, sin, sinks = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (cos, sin, sinks)
    )
    B, RING = held.shape
    P, N = (0, 1) if pool is None else pool.codes.shape[:2]
    room = 0 if block_table is None else block_table.shape[1] * N
    k = 0 if picked is None else picked.shape[1]
    tiles = triton.cdiv(window, tile.n) + triton.cdiv(room if picked is None else k, tile.n)
    programs = min(tiles, _PROGRAMS)
    some = tiles * (tile.n * (Hq + groups + 1) + 2 * Hq) * 4
    some = min(T, max(1, _SCRATCH // some))
    scores = q.new_empty((some, Hq, tiles * tile.n), dtype=torch.float32)
    peaks = q.new_empty((some, tiles, Hq), dtype=torch.float32)
    totals = torch.empty_like(peaks)
    places = q.new_empty((some, tiles * tile.n), dtype=torch.int32)
    scales = None
    if ring.scale is not None:
        scales = q.new_empty((some, groups, tiles * tile.n), dtype=torch.float32)
    scratch = (scores, peaks, totals, places, scales)
    own_rows, ring_rows, entry_rows = (
        tuple(map(as_bytes, rows)) for rows in (own, ring, entries)
    )  # fmt: skip
    own_steps = tuple(0 if x is None else x.stride(1) for x in own)
    ring_steps, entry_steps = (
        tuple(step for x in rows for step in strides(x, 2)) for rows in (ring, entries)
    )  # fmt: skip
    options: dict[str, Any] = {
        "WINDOW": window,
        "RING": RING,
        "N": N,
        "D": D,
        "R": R,
        "GROUP": group,
        "GROUPS": groups,
        "BLOCK_J": block_j,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "IS_BF16": is_bf16,
        "HAS_FP8": has_fp8(compute),
    }
    score_options = {
        "SLOTS": max(1, tile.sum // block_j),
        "BLOCK_G": power_of_two(groups),
        "num_warps": tile.score_warps,
        "num_stages": tile.score_stages,
    }
    blocks, every = triton.cdiv(Hq, tile.m), groups + (R > 0)
    slots = choose_slots(some * blocks, every, block_j)
    parts = triton.cdiv(every, slots)
    sum_options = {
        "TURNED": 0 if cos is None else 2 * cos.shape[1],
        "SLOTS": slots,
        "PARTS": parts,
        "HAS_PICKS": picked is not None,
        "num_warps": tile.sum_warps,
        "num_stages": tile.sum_stages,
    }
    for first in range(0, T, max(some, 1)):
        now = min(some, T - first)
        score = (
            q, *own_rows, *ring_rows, held, *entry_rows, *scratch,
            request_slots, seq_start, request_ids, positions, block_table, vis, picked,
            scale * math.log2(math.e), Hq, first, P, B, room, k, tiles, programs,
            *q.stride()[:2], *own_steps, *ring_steps, *strides(held, 2), *entry_steps,
            *strides(block_table, 1), *strides(picked, 1),
        )  # fmt: skip
        total = (
            out, *own_rows[:2], *ring_rows[:2], *entry_rows[:2], *scratch,
            sinks, cos, sin, lse if return_lse else None, request_ids, positions, vis,
            Hq, first, P, B, room, k, tiles, 0 if cos is None else cos.shape[0],
            *own_steps[:2], *ring_steps[:4], *entry_steps[:4],
            *strides(cos, 1), *strides(sin, 1),
        )  # fmt: skip
        work += [
            Launch(_score_kernel, (now * blocks * programs,), score, options | score_options),
            Launch(_sum_kernel, (now * blocks * parts,), total, options | sum_options),
        ]
    return out, lse, work


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
