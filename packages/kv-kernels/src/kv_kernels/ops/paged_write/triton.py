"""Split, norm, RoPE, quantise and scatter in one pass: each element is read and written once."""

import math

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import inverse_rms, round_to, store_rows, widen
from kv_kernels.launch import Launch, dense_ids, power_of_two, row_tile, strides
from kv_kernels.ops.cache import CacheTensors

_STYLES = {"none": 0, "half": 1, "interleaved": 2}


@triton.jit
def _prepare(
    x, source, is_token, weight, cos, sin, at, in_table, cos_t, sin_t, eps,
    D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate ``x``, the rows at ``source``, in FP32."""
    BLOCK_R: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = R // 2
    d = tl.arange(0, BLOCK_D)
    if weight is not None:
        factor = inverse_rms(x, eps, D)[:, None]
        x = x * factor * widen(tl.load(weight + d, mask=d < D, other=0.0))[None, :]
    if STYLE != 0:
        turns = d < R
        if STYLE == 1:
            # the other element of each pair is read again, from the L1 cache
            column = tl.where(d < HALF, d, d - HALF)
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            in_pair = is_token[:, None] & turns[None, :]
            y = widen(tl.load(source + partner[None, :], mask=in_pair, other=0.0))
            if weight is not None:
                y = y * factor * widen(tl.load(weight + partner, mask=turns, other=0.0))[None, :]
            y = tl.where((d < HALF)[None, :], -y, y)
        else:
            column = d // 2
            first, second = tl.split(tl.reshape(x, [BLOCK_R, BLOCK_D // 2, 2]))
            y = tl.reshape(tl.join(-second, first), [BLOCK_R, BLOCK_D])
        in_turn = in_table[:, None] & turns[None, :]
        nan = float("nan")
        c = tl.load(cos + at[:, None] * cos_t + column[None, :], mask=in_turn, other=nan)
        s = tl.load(sin + at[:, None] * sin_t + column[None, :], mask=in_turn, other=nan)
        x = tl.where(turns[None, :], x * widen(c) + y * widen(s), x)
    return x


@triton.jit(do_not_specialize=["T", "positions_end", "capacity", "N"])
def _write_kernel(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale,
    eps, T, Hq, H, positions_end, capacity, N,
    qkv_t, cos_t, sin_t,
    k_p, k_n, k_h, ks_p, ks_n, ks_h, v_p, v_n, v_h, vs_p, vs_n, vs_h,
    D: tl.constexpr, R: tl.constexpr, STYLE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one program takes BLOCK_T tokens of BLOCK_H neighbouring heads, all queries, keys or values
    q_groups = Hq // BLOCK_H
    k_groups = H // BLOCK_H
    groups = q_groups + 2 * k_groups
    group = tl.program_id(0) % groups
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    t = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + row // BLOCK_H
    packed = group * BLOCK_H + row % BLOCK_H  # head, counted through the packed row
    d = tl.arange(0, BLOCK_D)
    is_token = t < T
    source = qkv + t[:, None] * qkv_t + packed[:, None].to(tl.int64) * D
    x = tl.load(source + d[None, :], mask=is_token[:, None] & (d < D)[None, :], other=0.0)
    x = widen(x)

    at = t
    in_table = is_token
    if positions is not None:
        at = tl.load(positions + t, mask=is_token, other=0).to(tl.int64)
    if STYLE != 0:
        in_table = is_token & (at >= 0) & (at < positions_end)
    slot = t
    if slots is not None:
        slot = tl.load(slots + t, mask=is_token, other=-1).to(tl.int64)

    dtype: tl.constexpr = qkv.dtype.element_ty
    if group < q_groups:
        x = _prepare(
            x, source, is_token, q_norm, cos, sin, at, in_table, cos_t, sin_t, eps, D, R, STYLE
        )
        target = q_out + (t * Hq + packed)[:, None] * D + d[None, :]
        tl.store(target, round_to(x, dtype), mask=is_token[:, None] & (d < D)[None, :])
    elif group < q_groups + k_groups:
        x = _prepare(
            x, source, is_token, k_norm, cos, sin, at, in_table, cos_t, sin_t, eps, D, R, STYLE
        )
        # rounded once to what the activations are, and that is what is stored or quantised
        store_rows(
            round_to(x, dtype), k_cache, k_scale, slot, (packed - Hq).to(tl.int64), is_token,
            capacity, N, k_p, k_n, k_h, ks_p, ks_n, ks_h, D,
        )  # fmt: skip
    else:
        store_rows(
            x, v_cache, v_scale, slot, (packed - Hq - H).to(tl.int64), is_token,
            capacity, N, v_p, v_n, v_h, vs_p, vs_n, vs_h, D,
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
    block_d = max(2, power_of_two(D))
    block_t, block_h, warps = row_tile(T * (Hq + 2 * H), math.gcd(Hq, H), block_d)
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
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    grid = (triton.cdiv(T, block_t) * ((Hq + 2 * H) // block_h),)
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
