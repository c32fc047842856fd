"""The storage of one layer as a kernel takes it."""

from typing import NamedTuple

from torch import Tensor


class CacheTensors(NamedTuple):
    """Keys and values of a layer, with their scales where they are INT8 codes; any strides."""

    k: Tensor  # [P, N, H, D]
    v: Tensor  # [P, N, H, D]
    k_scale: Tensor | None = None  # [P, N, H] FP32
    v_scale: Tensor | None = None
