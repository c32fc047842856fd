"""What split_qkv_norm_rope means, in plain torch: exact, on any device."""

import torch
from torch import Tensor


def run(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    kv_heads: int,
    head_dim: int,
    rope: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ``qkv`` into heads, normalise and rotate queries and keys in FP32, round once.

    Term by term the arithmetic of Hugging Face's Qwen3, so FP32 results are equal bit for bit.

    Args:
        qkv: ``[T, (Hq + 2H) * D]``, any strides.
        q_norm: ``[D]`` weight of the queries' RMS norm, or None for no norm.
        k_norm: The same for keys.
        cos: ``[*, R/2]``, None with ``rope="none"``.
        sin: Like ``cos``.
        positions: ``[T]`` row of the tables for each token; None where row t is token t's.
        kv_heads: H.
        head_dim: D.
        rope: "none", "half" or "interleaved".
        eps: Of the norm.

    Returns:
        Contiguous ``[T, Hq, D]``, ``[T, H, D]`` and ``[T, H, D]`` in the dtype of ``qkv``. A token
        whose position is outside the tables is NaN where it would be rotated.
    """
    T = qkv.shape[0]
    H, D = kv_heads, head_dim
    heads = qkv.reshape(T, -1, D)
    Hq = heads.shape[1] - 2 * H
    q, k, v = heads.split((Hq, H, H), 1)
    angles = None
    if cos is not None and sin is not None:
        angles = _rows(cos, positions), _rows(sin, positions)
    return (
        _prepare(q, q_norm, angles, rope, eps),
        _prepare(k, k_norm, angles, rope, eps),
        v.clone(memory_format=torch.contiguous_format),
    )


def _rows(table: Tensor, positions: Tensor | None) -> Tensor:
    """Return ``[T, 1, R/2]`` FP32, NaN for a position outside the table."""
    if positions is None:
        return table[:, None].float()
    at = positions.long()
    inside = (at >= 0) & (at < table.shape[0])
    rows = table[torch.where(inside, at, 0)].float()
    return rows.masked_fill(~inside[:, None], torch.nan)[:, None]


def _prepare(
    x: Tensor,
    weight: Tensor | None,
    angles: tuple[Tensor, Tensor] | None,
    rope: str,
    eps: float,
) -> Tensor:
    y = x.float()
    if weight is not None:
        variance = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(variance + eps) * weight.float()
    if angles is not None:
        y = _rotate(y, *angles, rope)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out.copy_(y)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    """Rotate the first R elements: pairs R/2 apart ("half"), or neighbours ("interleaved")."""
    R = 2 * cos.shape[-1]
    pairs = x[..., :R].unflatten(-1, (2, R // 2) if rope == "half" else (R // 2, 2))
    axis = -2 if rope == "half" else -1
    first, second = pairs.unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
    return torch.cat((turned.flatten(-2), x[..., R:]), -1)
