"""Tensors made from their plans, separate or as fields of packed blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kv_core.hybrid.spec import TensorPlan


def allocate(plans: Mapping[str, TensorPlan], device: torch.device | str) -> dict[str, Tensor]:
    """Return zeros for every plan."""
    # also where the caller is in inference mode: its tensors could never be written outside
    with torch.inference_mode(False):
        return {
            name: torch.zeros(plan.shape, dtype=plan.dtype, device=device)
            for name, plan in plans.items()
        }


def packed_field(
    packed: Tensor, rows: int, start: int, stride: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Return one field of the rows of packed blocks as a view.

    Args:
        packed: ``[P, bytes]`` UINT8 blocks.
        rows: Rows of a block.
        start: Byte of a block at which the field of its first row begins.
        stride: Bytes from one row to the next.
        width: Elements of the field.
        dtype: Of the elements; start, stride and block are multiples of its size.

    Returns:
        ``[P, rows, width]``.
    """
    elements, size = packed.view(dtype), dtype.itemsize
    strides = (elements.stride(0), stride // size, 1)
    return elements.as_strided(
        (packed.shape[0], rows, width), strides, elements.storage_offset() + start // size
    )
