"""The first half of a write by the kernel of the whole: token t is stored in slot t."""

from torch import Tensor

from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_write.triton import launch


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
    """Return contiguous queries, keys and values; see ``reference.run``."""
    T = qkv.shape[0]
    k, v = (qkv.new_empty(T, kv_heads, head_dim) for _ in range(2))
    cache = CacheTensors(k[:, None], v[:, None])
    q, write = launch(qkv, q_norm, k_norm, cos, sin, positions, None, cache, rope, eps)
    write.run()
    return q, k, v
