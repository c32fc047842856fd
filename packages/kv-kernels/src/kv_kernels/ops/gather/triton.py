"""Copy pages into contiguous tensors in one launch, dequantised on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import round_to, widen
from kv_kernels.launch import Launch, dense_ids, power_of_two, row_tile, strides
from kv_kernels.ops.cache import CacheTensors

_INT32_END = 2**31 - 1


@triton.jit
def _load_rows(
    cache, scale, block, offset, head, is_stored,
    cache_p, cache_n, cache_h, scale_p, scale_n, scale_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load rows in FP32, zeros where nothing is stored."""
    d = tl.arange(0, BLOCK_D)
    cache += block[:, None] * cache_p + offset[:, None] * cache_n + head[:, None] * cache_h
    rows = tl.load(cache + d[None, :], mask=is_stored[:, None] & (d < D)[None, :], other=0)
    rows = widen(rows)
    if scale is not None:
        scale += block * scale_p + offset * scale_n + head * scale_h
        rows = rows * tl.load(scale, mask=is_stored, other=0.0)[:, None]
    return rows


@triton.jit(do_not_specialize=["tiles", "length", "P", "N", "table_end"])
def _gather_kernel(
    k_cache, v_cache, k_scale, v_scale, block_table, context_lens, k_out, v_out,
    tiles, length, H, P, N, table_end, table_b,
    k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_T tokens of BLOCK_H neighbouring heads of a sequence, keys or values
    groups = H // BLOCK_H
    group = tl.program_id(0) % groups
    tile = (tl.program_id(0) // groups) % tiles
    b = (tl.program_id(0) // groups // tiles).to(tl.int64)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    position = tile * BLOCK_T + row // BLOCK_H
    head = (group * BLOCK_H + row % BLOCK_H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    context = tl.load(context_lens + b)
    is_stored = (position < length) & (position < context) & (position < table_end)
    block = tl.load(block_table + b * table_b + position // N, mask=is_stored, other=0)
    block = block.to(tl.int64)
    is_stored &= (block >= 0) & (block < P)
    offset = (position % N).to(tl.int64)
    target = ((b * length + position)[:, None] * H + head[:, None]) * D + d[None, :]
    in_row = (position < length)[:, None] & (d < D)[None, :]
    if tl.program_id(1) == 0:
        rows = _load_rows(
            k_cache, k_scale, block, offset, head, is_stored,
            k_p, k_n, k_h, ks_p, ks_n, ks_h, D, BLOCK_D,
        )  # fmt: skip
        tl.store(k_out + target, round_to(rows, k_out.dtype.element_ty), mask=in_row)
    else:
        rows = _load_rows(
            v_cache, v_scale, block, offset, head, is_stored,
            v_p, v_n, v_h, vs_p, vs_n, vs_h, D, BLOCK_D,
        )  # fmt: skip
        tl.store(v_out + target, round_to(rows, v_out.dtype.element_ty), mask=in_row)


def launch(
    cache: CacheTensors, block_table: Tensor, context_lens: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Launch]:
    """Return the results, still empty, and the launch that fills them."""
    B, M = block_table.shape
    P, N, H, D = cache.k.shape
    k, v = (side.new_empty(B, length, H, D, dtype=dtype) for side in cache[:2])
    block_table = dense_ids(block_table)
    block_d = power_of_two(D)
    block_t, block_h, warps = row_tile(2 * B * length * H, H, block_d)
    tiles = triton.cdiv(length, block_t)
    arguments = (
        *cache, block_table, dense_ids(context_lens), k, v,
        tiles, length, H, P, N, min(M * N, _INT32_END), block_table.stride(0),
        *strides(cache.k, 3), *strides(cache.k_scale, 3),
        *strides(cache.v, 3), *strides(cache.v_scale, 3),
    )  # fmt: skip
    options = {
        "D": D,
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    grid = (B * tiles * (H // block_h), 2)
    return k, v, Launch(_gather_kernel, grid, arguments, options)


def run(
    cache: CacheTensors, block_table: Tensor, context_lens: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Read ``[B, length, H, D]`` keys and values; see ``reference.run``."""
    k, v, copy = launch(cache, block_table, context_lens, length, dtype)
    copy.run()
    return k, v
