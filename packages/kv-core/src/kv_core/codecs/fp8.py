"""FP8 (e4m3fn) with one power-of-two scale for each group of a row."""

import torch
from torch import Tensor

from kv_core.checks import check_float_dtype
from kv_core.codecs.scales import check_coded, check_groups, decode_ue8m0, power_of_two

GROUP = 64
_LARGEST = 448.0  # of e4m3fn: 0.875 * 2^9
_FLOOR = 1e-4  # a group this small or smaller gets scale 2^-22


@torch.no_grad()
def quantize_fp8(x: Tensor, *, group: int = GROUP, checked: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to e4m3fn, with a scale 2^ceil(log2(amax / 448)) for each group of a row.

    The scale is rounded up, so nothing saturates. An element that is not finite becomes NaN in its
    own channel; its group is scaled by the others. The scheme is that of DeepSeek-V4's rows, as
    FlashMLA stores them.

    Args:
        x: ``[..., D]`` floating; rounded to BF16 first. D is a multiple of ``group``.
        group: Channels that share a scale.
        checked: Refuse elements that are not finite. This waits for the device.

    Returns:
        Codes ``[..., D]`` float8_e4m3fn, and scales ``[..., D / group]`` UINT8 in UE8M0: the
        exponent of two plus 127.

    Raises:
        DtypeError: ``x`` is not a floating tensor.
        ShapeError: D is not a multiple of ``group``, or there is no channel.
        SpecError: ``checked`` and an element is not finite.
    """
    rows = check_groups(x, group, checked=checked)
    finite = rows.isfinite()
    amax = rows.abs().masked_fill(~finite, 0.0).amax(-1).clamp(min=_FLOOR)
    scale, byte = power_of_two(amax, mantissa=0.875, exponent=9)
    # the product with a power of two is exact; the clamp does not rely on how the cast saturates
    codes = (rows / scale[..., None]).clamp(-_LARGEST, _LARGEST).masked_fill(~finite, torch.nan)
    return codes.to(torch.float8_e4m3fn).view(x.shape), byte


@torch.no_grad()
def dequantize_fp8(
    codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, group: int = GROUP
) -> Tensor:
    """Return ``codes`` times their group's scale, multiplied in FP32 and rounded once to ``dtype``.

    Args:
        codes: ``[..., D]`` float8_e4m3fn.
        scale: ``[..., D / group]`` UINT8 in UE8M0; 255 is NaN.
        dtype: A floating dtype for the result.
        group: Channels that share a scale.

    Raises:
        DtypeError: Another dtype or device, or ``dtype`` is not floating.
        ShapeError: Sizes that do not fit each other.
    """
    check_float_dtype(dtype)
    shape = check_coded(
        codes, scale, group, codes_dtype=torch.float8_e4m3fn, scale_dtype=torch.uint8
    )
    rows = codes.float().view(shape) * decode_ue8m0(scale)[..., None]
    return rows.view(codes.shape).to(dtype)
