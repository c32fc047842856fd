"""Split, norm, RoPE, quantise and scatter in one pass: each element is read and written once."""

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.launch import Launch, dense_ids, strides
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_rows import WARPS, choose_tile, load_angles, move_heads, store_heads

_STYLES = {"none": 0, "half": 1, "interleaved": 2}


@triton.jit(do_not_specialize=["T", "positions_end", "capacity", "N"])
def _write_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale,
    eps, T, Hq, H, positions_end, capacity, N,
    qkv_t, cos_t, sin_t,
    k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr,
    BLOCK_T: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_T tokens of some neighbouring heads, all queries, keys or values
    q_groups = Hq // Q_HEADS
    kv_groups = H // KV_HEADS
    groups = q_groups + 2 * kv_groups
    group = tl.program_id(0) % groups
    t = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = t < T
    t = tl.minimum(t, T - 1)  # the last tile is filled up with its last token
    source = qkv + t * qkv_t
    if group < q_groups + kv_groups:
        if STYLE == 0:
            c = None
            s = None
        else:
            at = t
            if positions is not None:
                at = tl.load(positions + t).to(tl.int64)
            is_inside = (at >= 0) & (at < positions_end)
            c = load_angles(cos, at, cos_t, is_inside, R)
            s = load_angles(sin, at, sin_t, is_inside, R)
        if group < q_groups:
            q_head = group * Q_HEADS
            move_heads(
                source + q_head * D, D, q_out + (t * Hq + q_head) * D, D, None, 0, is_token,
                q_norm, c, s, eps, D, R, STYLE, Q_HEADS,
            )  # fmt: skip
        else:
            head = (group - q_groups).to(tl.int64) * KV_HEADS
            store_heads(
                source + (Hq + head) * D, D, slots, t, is_token, k_cache, k_scale, head,
                capacity, N, k_p, k_n, k_h, ks_p, ks_n, ks_h, k_norm, c, s, eps,
                D, R, STYLE, KV_HEADS,
            )  # fmt: skip
    else:
        head = (group - q_groups - kv_groups).to(tl.int64) * KV_HEADS
        store_heads(
            source + (Hq + H + head) * D, D, slots, t, is_token, v_cache, v_scale, head,
            capacity, N, v_p, v_n, v_h, vs_p, vs_n, vs_h, None, None, None, eps,
            D, 0, 0, KV_HEADS,
        )  # fmt: skip


def launch(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    slots: Tensor | None,
    cache: CacheTensors,
    rope: str,
    eps: float,
) -> tuple[Tensor, Launch]:
    """Prepare a write; ``slots`` None stores token t in slot t.

    Returns:
        The queries, still empty, and the launch that fills them and the cache.
    """
    T = qkv.shape[0]
    P, N, H, D = cache.k.shape
    Hq = qkv.shape[1] // D - 2 * H
    q = qkv.new_empty(T, Hq, D)
    block_t, q_heads, kv_heads = choose_tile(T * (Hq + 2 * H), D, Hq, H)
    q_norm, k_norm, cos, sin = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_norm, k_norm, cos, sin)
    )
    arguments = (
        qkv, q_norm, k_norm, cos, sin,
        None if positions is None else dense_ids(positions),
        None if slots is None else dense_ids(slots),
        q, *cache[:2], *cache[2:],
        eps, T, Hq, H, 0 if cos is None else cos.shape[0], P * N, N,
        qkv.stride(0), *strides(cos, 1), *strides(sin, 1),
        *strides(cache.k, 3), *strides(cache.k_scale, 3),
        *strides(cache.v, 3), *strides(cache.v_scale, 3),
    )  # fmt: skip
    options = {
        "D": D,
        "R": 0 if cos is None else 2 * cos.shape[1],
        "STYLE": _STYLES[rope],
        "BLOCK_T": block_t,
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }
    grid = (triton.cdiv(T, block_t) * (Hq // q_heads + 2 * (H // kv_heads)),)
    return q, Launch(_write_kernel, grid, arguments, options)


def run(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    slots: Tensor,
    cache: CacheTensors,
    rope: str,
    eps: float,
) -> Tensor:
    """Write keys and values by slot and return the queries; see ``reference.run``."""
    q, write = launch(qkv, q_norm, k_norm, cos, sin, positions, slots, cache, rope, eps)
    write.run()
    return q
