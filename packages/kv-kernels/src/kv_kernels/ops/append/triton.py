"""Store keys and values by slot in one launch, cast or quantised on the way."""

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import store_rows
from kv_kernels.launch import Launch, dense_ids, power_of_two, row_tile, strides
from kv_kernels.ops.cache import CacheTensors


@triton.jit(do_not_specialize=["T", "capacity", "N"])
def _append_kernel(
    k, v, slots, k_cache, v_cache, k_scale, v_scale,
    T, H, capacity, N,
    in_k_t, in_k_h, in_v_t, in_v_h,
    k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_T tokens of BLOCK_H neighbouring heads, keys or values
    groups = H // BLOCK_H
    group = tl.program_id(0) % groups
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    t = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + row // BLOCK_H
    head = (group * BLOCK_H + row % BLOCK_H).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_token = t < T
    in_row = is_token[:, None] & (d < D)[None, :]
    slot = tl.load(slots + t, mask=is_token, other=-1).to(tl.int64)
    if tl.program_id(1) == 0:
        source = k + t[:, None] * in_k_t + head[:, None] * in_k_h + d[None, :]
        rows = tl.load(source, mask=in_row, other=0.0)
        store_rows(
            rows, k_cache, k_scale, slot, head, is_token, capacity, N,
            k_p, k_n, k_h, ks_p, ks_n, ks_h, D,
        )  # fmt: skip
    else:
        source = v + t[:, None] * in_v_t + head[:, None] * in_v_h + d[None, :]
        rows = tl.load(source, mask=in_row, other=0.0)
        store_rows(
            rows, v_cache, v_scale, slot, head, is_token, capacity, N,
            v_p, v_n, v_h, vs_p, vs_n, vs_h, D,
        )  # fmt: skip


def launch(k: Tensor, v: Tensor, slots: Tensor, cache: CacheTensors) -> Launch:
    """Prepare the launch that stores ``k`` and ``v``."""
    T, H, D = k.shape
    P, N = cache.k.shape[:2]
    block_d = power_of_two(D)
    block_t, block_h, warps = row_tile(2 * T * H, H, block_d)
    arguments = (
        k, v, dense_ids(slots), *cache,
        T, H, P * N, N,
        *k.stride()[:2], *v.stride()[:2],
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
    grid = (triton.cdiv(T, block_t) * (H // block_h), 2)
    return Launch(_append_kernel, grid, arguments, options)


def run(k: Tensor, v: Tensor, slots: Tensor, cache: CacheTensors) -> None:
    """Store ``[T, H, D]`` rows at ``slots``; see ``reference.run``."""
    launch(k, v, slots, cache).run()
