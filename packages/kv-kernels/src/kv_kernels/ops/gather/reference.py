"""What gather means: kv-core's read by slot, of every slot that a sequence holds."""

import torch
from kv_core.paged import context_slots, read_rows
from torch import Tensor

from kv_kernels.ops.cache import CacheTensors


def run(
    cache: CacheTensors, block_table: Tensor, context_lens: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Read ``[B, length, H, D]`` keys and values; see ``kv_core.paged.read_rows``."""
    slots = context_slots(block_table, context_lens, cache.k.shape[1], length)
    k = read_rows(cache.k, cache.k_scale, slots, dtype)
    return k, read_rows(cache.v, cache.v_scale, slots, dtype)
