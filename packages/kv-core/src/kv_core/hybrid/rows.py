"""How rows of the window ring and of the compressed pool are stored: FP32, BF16 or FP8."""

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kv_core.codecs.fp8 import dequantize_fp8, quantize_fp8

_SCALE_UNIT = 8  # bytes to which the scales of a row are padded, so that one load brings them


class RowFormat(Enum):
    """Storage format of a cached row: its first channels, then the R that carry positions."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3 codes and UE8M0 scales; the last R channels BF16


class RowTensors(NamedTuple):
    """The tensors that rows are stored in, or rows about to be stored.

    Attributes:
        codes: ``[..., D]`` whole rows, or ``[..., D - R]`` e4m3 codes.
        rope: ``[..., R]`` BF16 last channels of FP8 rows, else None.
        scale: ``[..., ceil8(groups)]`` UINT8 of FP8 rows, else None: a UE8M0 scale for each group
            of channels, then zeros.
    """

    codes: Tensor
    rope: Tensor | None = None
    scale: Tensor | None = None

    def present(self) -> list[Tensor]:
        """Return the tensors that exist, in order."""
        return [tensor for tensor in self if tensor is not None]


def row_widths(
    row_format: RowFormat, head_dim: int, rope_dim: int, group: int
) -> dict[str, tuple[int, torch.dtype]]:
    """Return the width and dtype of each field of ``RowTensors`` that a format has."""
    if row_format is not RowFormat.FP8:
        dtype = torch.float32 if row_format is RowFormat.FP32 else torch.bfloat16
        return {"codes": (head_dim, dtype)}
    groups = (head_dim - rope_dim) // group
    return {
        "codes": (head_dim - rope_dim, torch.float8_e4m3fn),
        "rope": (rope_dim, torch.bfloat16),
        "scale": (-(-groups // _SCALE_UNIT) * _SCALE_UNIT, torch.uint8),
    }


@torch.no_grad()
def encode_rows(rows: Tensor, row_format: RowFormat, rope_dim: int, group: int) -> RowTensors:
    """Return ``rows`` as they are stored.

    Args:
        rows: ``[..., D]`` floating.
        row_format: How to store them.
        rope_dim: R, last channels that FP8 keeps in BF16.
        group: Channels of an FP8 row that share a scale.
    """
    if row_format is RowFormat.FP32:
        return RowTensors(rows.float())
    if row_format is RowFormat.BF16:
        return RowTensors(rows.to(torch.bfloat16))
    split = rows.shape[-1] - rope_dim
    codes, scale = quantize_fp8(rows[..., :split].contiguous(), group=group)
    padding = -scale.shape[-1] % _SCALE_UNIT
    return RowTensors(
        codes,
        rows[..., split:].to(torch.bfloat16),
        torch.nn.functional.pad(scale, (0, padding)),
    )


@torch.no_grad()
def decode_rows(stored: RowTensors, row_format: RowFormat, group: int) -> Tensor:
    """Return stored rows ``[..., D]`` as FP32, exactly what attention has to see."""
    if row_format is not RowFormat.FP8:
        return stored.codes.float()
    assert stored.rope is not None and stored.scale is not None
    groups = stored.codes.shape[-1] // group
    scale = stored.scale[..., :groups]
    plain = dequantize_fp8(stored.codes.contiguous(), scale.contiguous(), group=group)
    return torch.cat([plain, stored.rope.float()], -1)
