"""How the indexer's keys are stored: FP32, BF16, MXFP4 or NVFP4."""

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kv_core.codecs.fp4 import (
    MX_GROUP,
    NV_GROUP,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
)


class KeyFormat(Enum):
    """Storage format of an indexer key."""

    FP32 = "fp32"
    BF16 = "bf16"
    MXFP4 = "mxfp4"  # a UE8M0 scale for 32 channels
    NVFP4 = "nvfp4"  # an e4m3 scale for 16 channels, and one for the layer

    @property
    def group(self) -> int:
        """Channels that share a scale; 1 where nothing is quantised."""
        return {KeyFormat.MXFP4: MX_GROUP, KeyFormat.NVFP4: NV_GROUP}.get(self, 1)

    @property
    def is_quantized(self) -> bool:
        """Whether a key is stored as codes with scales."""
        return self.group > 1


class KeyTensors(NamedTuple):
    """The tensors that keys are stored in, or keys about to be stored.

    Attributes:
        codes: ``[..., I]`` whole keys, or ``[..., I / 2]`` UINT8 codes, the even channel low.
        scale: ``[..., I / 32]`` UINT8 (MXFP4), ``[..., I / 16]`` e4m3 (NVFP4), or None.
    """

    codes: Tensor
    scale: Tensor | None = None

    def present(self) -> list[Tensor]:
        """Return the tensors that exist, in order."""
        return [tensor for tensor in self if tensor is not None]


def key_widths(key_format: KeyFormat, index_dim: int) -> dict[str, tuple[int, torch.dtype]]:
    """Return the width and dtype of each field of ``KeyTensors`` that a format has."""
    if not key_format.is_quantized:
        dtype = torch.float32 if key_format is KeyFormat.FP32 else torch.bfloat16
        return {"codes": (index_dim, dtype)}
    scale = torch.uint8 if key_format is KeyFormat.MXFP4 else torch.float8_e4m3fn
    return {
        "codes": (index_dim // 2, torch.uint8),
        "scale": (index_dim // key_format.group, scale),
    }


@torch.no_grad()
def encode_keys(keys: Tensor, key_format: KeyFormat, global_scale: Tensor | None) -> KeyTensors:
    """Return ``keys`` as they are stored.

    Args:
        keys: ``[..., I]`` floating.
        key_format: How to store them.
        global_scale: ``[1]`` of NVFP4, else None.
    """
    if key_format is KeyFormat.FP32:
        return KeyTensors(keys.float())
    if key_format is KeyFormat.BF16:
        return KeyTensors(keys.to(torch.bfloat16))
    if key_format is KeyFormat.MXFP4:
        return KeyTensors(*quantize_mxfp4(keys))
    assert global_scale is not None
    return KeyTensors(*quantize_nvfp4(keys, global_scale))


@torch.no_grad()
def decode_keys(stored: KeyTensors, key_format: KeyFormat, global_scale: Tensor | None) -> Tensor:
    """Return stored keys ``[..., I]`` as FP32."""
    if not key_format.is_quantized:
        return stored.codes.float()
    assert stored.scale is not None
    codes, scale = stored.codes.contiguous(), stored.scale.contiguous()
    if key_format is KeyFormat.MXFP4:
        return dequantize_mxfp4(codes, scale)
    assert global_scale is not None
    return dequantize_nvfp4(codes, scale, global_scale)
