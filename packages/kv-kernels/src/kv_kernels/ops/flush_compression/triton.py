"""Encode entries and their indexer keys and store both by slot, in one launch."""

import triton
import triton.language as tl
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from kv_core.hybrid.rows import RowFormat, RowTensors
from torch import Tensor

from kv_kernels.device_code import (
    pack_nibbles,
    quantize_mxfp4,
    quantize_nvfp4,
    round_bf16,
    round_to,
    store_stored_rows,
    widen,
)
from kv_kernels.launch import Launch, as_bytes, dense_ids, power_of_two, row_tile, strides
from kv_kernels.ops.append_swa.triton import row_sizes


@triton.jit
def _store_keys(
    rows, is_row, slot, codes, scale, total, N, codes_p, codes_n, scale_p, scale_n,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Encode keys and store row i at ``slot[i]``; NVFP4 where there is a ``total``."""
    BLOCK_J: tl.constexpr = triton.next_power_of_2(GROUP)
    block = slot // N
    offset = slot - block * N
    target = codes + block * codes_p + offset * codes_n
    g = tl.arange(0, BLOCK_G)
    channel = (g * GROUP)[:, None] + tl.arange(0, BLOCK_J)[None, :]
    inside = is_row[:, None, None] & (channel < WIDTH)[None, :, :]
    x = widen(tl.load(rows[:, None, None] + channel[None, :, :], mask=inside, other=0.0))
    if scale is None:
        target = target[:, None, None] + channel[None, :, :]
        tl.store(target, round_to(x, codes.dtype.element_ty), mask=inside)
    else:
        if total is None:
            coded, scales = quantize_mxfp4(round_bf16(x))
        else:
            coded, scales = quantize_nvfp4(round_bf16(x), tl.load(total))
        byte = tl.arange(0, BLOCK_G * GROUP // 2)
        in_codes = is_row[:, None] & (byte < WIDTH // 2)[None, :]
        tl.store(target[:, None] + byte[None, :], pack_nibbles(coded), mask=in_codes)
        at = scale + block * scale_p + offset * scale_n
        in_scale = is_row[:, None] & (g * GROUP < WIDTH)[None, :]
        tl.store(at[:, None] + g[None, :], scales.to(tl.uint8), mask=in_scale)


@triton.jit(do_not_specialize=["T", "capacity", "N"])
def _flush_kernel(
    entries, keys, slots, codes, rope, scale, key_codes, key_scale, total, T, capacity, N,
    entries_t, keys_t, codes_p, codes_n, rope_p, rope_n, scale_p, scale_n,
    key_codes_p, key_codes_n, key_scale_p, key_scale_n,
    W: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDTH: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    # one program stores the entries of BLOCK_T rows, or their keys
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + t, mask=t < T, other=-1).to(tl.int64)
    is_row = (slot >= 0) & (slot < capacity)
    if tl.max(is_row.to(tl.int32), axis=0) == 0:
        return
    slot = tl.where(is_row, slot, 0)
    if tl.program_id(1) == 0:
        store_stored_rows(
            entries + t * entries_t, is_row, slot, codes, rope, scale, N,
            codes_p, codes_n, rope_p, rope_n, scale_p, scale_n,
            W, R, GROUP, SCALES, BLOCK_G, BLOCK_J, BLOCK_R,
        )  # fmt: skip
    elif keys is not None:
        _store_keys(
            keys + t * keys_t, is_row, slot, key_codes, key_scale, total, N,
            key_codes_p, key_codes_n, key_scale_p, key_scale_n, WIDTH, KEY_GROUP, KEY_BLOCK_G,
        )  # fmt: skip


def launch(
    entries: Tensor,
    keys: Tensor | None,
    slots: Tensor,
    pool: RowTensors,
    stored: KeyTensors | None,
    global_scale: Tensor | None,
    row_format: RowFormat,
    key_format: KeyFormat | None,
    group: int,
) -> Launch:
    """Prepare a write of entries, and of keys where there are some."""
    T, D = entries.shape
    P, N = pool.codes.shape[:2]
    sizes = row_sizes(row_format, D, 0 if pool.rope is None else pool.rope.shape[-1], group)
    key_codes, key_scale = (None, None) if stored is None else stored
    width = 0 if keys is None else keys.shape[1]
    key_group = width if key_format is None or not key_format.is_quantized else key_format.group
    block_t, _, warps = row_tile(T, 1, sizes.width)
    arguments = (
        entries, keys, dense_ids(slots), as_bytes(pool.codes), pool.rope, pool.scale,
        as_bytes(key_codes), as_bytes(key_scale),
        global_scale if key_format is KeyFormat.NVFP4 else None, T, P * N, N,
        *strides(entries, 1), *strides(keys, 1), *strides(pool.codes, 2), *strides(pool.rope, 2),
        *strides(pool.scale, 2), *strides(key_codes, 2), *strides(key_scale, 2),
    )  # fmt: skip
    options = {
        **sizes.constants(),
        "WIDTH": width,
        "KEY_GROUP": max(key_group, 1),
        "KEY_BLOCK_G": power_of_two(max(width, 1) // max(key_group, 1)),
        "BLOCK_T": block_t,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    grid = (triton.cdiv(T, block_t), 1 if keys is None else 2)
    return Launch(_flush_kernel, grid, arguments, options)


def run(
    entries: Tensor,
    keys: Tensor | None,
    slots: Tensor,
    pool: RowTensors,
    stored: KeyTensors | None,
    global_scale: Tensor | None,
    row_format: RowFormat,
    key_format: KeyFormat | None,
    group: int,
) -> None:
    """Store entries and keys by slot; see ``reference.run``."""
    launch(
        entries, keys, slots, pool, stored, global_scale, row_format, key_format, group
    ).run()  # fmt: skip
