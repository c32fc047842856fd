"""What paged_write means: split, norm and RoPE, then a write by slot of what was rounded."""

from kv_core.paged import write_rows
from torch import Tensor

from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.split_qkv_norm_rope import reference


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
    """Write the keys and values of ``qkv`` into ``cache`` at ``slots`` and return the queries.

    See ``split_qkv_norm_rope`` for the first half, ``kv_core.paged.write_rows`` for the second.
    """
    H, D = cache.k.shape[2:]
    q, k, v = reference.run(qkv, q_norm, k_norm, cos, sin, positions, H, D, rope, eps)
    write_rows(cache.k, cache.k_scale, k, slots)
    write_rows(cache.v, cache.v_scale, v, slots)
    return q
