"""Store keys and values by slot in one launch, cast or quantised on the way."""

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.launch import Launch, dense_ids, strides
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_rows import WARPS, choose_tile, store_heads


@triton.jit(do_not_specialize=["T", "capacity", "N"])
def _append_kernel(
    k, v, slots, k_cache, v_cache, k_scale, v_scale,
    T, H, capacity, N,
    in_k_t, in_k_h, in_v_t, in_v_h,
    k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, BLOCK_T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_T tokens of HEADS neighbouring heads, keys or values
    groups = H // HEADS
    head = (tl.program_id(0) % groups).to(tl.int64) * HEADS
    t = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = t < T
    t = tl.minimum(t, T - 1)  # the last tile is filled up with its last token
    if tl.program_id(1) == 0:
        store_heads(
            k + t * in_k_t + head * in_k_h, in_k_h, slots, t, is_token, k_cache, k_scale, head,
            capacity, N, k_p, k_n, k_h, ks_p, ks_n, ks_h, None, None, None, 0.0, D, 0, 0, HEADS,
        )  # fmt: skip
    else:
        store_heads(
            v + t * in_v_t + head * in_v_h, in_v_h, slots, t, is_token, v_cache, v_scale, head,
            capacity, N, v_p, v_n, v_h, vs_p, vs_n, vs_h, None, None, None, 0.0, D, 0, 0, HEADS,
        )  # fmt: skip


def launch(k: Tensor, v: Tensor, slots: Tensor, cache: CacheTensors) -> Launch:
    """Prepare the launch that stores ``k`` and ``v``."""
    T, H, D = k.shape
    P, N = cache.k.shape[:2]
    block_t, heads = choose_tile(2 * T * H, D, H)
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
        "HEADS": heads,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    grid = (triton.cdiv(T, block_t) * (H // heads), 2)
    return Launch(_append_kernel, grid, arguments, options)


def run(k: Tensor, v: Tensor, slots: Tensor, cache: CacheTensors) -> None:
    """Store ``[T, H, D]`` rows at ``slots``; see ``reference.run``."""
    launch(k, v, slots, cache).run()
