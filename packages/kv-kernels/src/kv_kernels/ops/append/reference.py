"""What append means: kv-core's write by slot, of keys and of values."""

from kv_core.paged import write_rows
from torch import Tensor

from kv_kernels.ops.cache import CacheTensors


def run(k: Tensor, v: Tensor, slots: Tensor, cache: CacheTensors) -> None:
    """Write ``[T, H, D]`` rows into ``cache`` at ``slots``; see ``kv_core.paged.write_rows``."""
    write_rows(cache.k, cache.k_scale, k, slots)
    write_rows(cache.v, cache.v_scale, v, slots)
