"""FP4 (E2M1) in two flavours: MXFP4 with power-of-two scales, NVFP4 with e4m3 and a global scale.

Two codes share a byte; the even channel is the low nibble.
"""

import itertools
import math

import torch
from torch import Tensor

from kv_core.checks import check_float_dtype
from kv_core.codecs.scales import check_coded, check_groups, decode_ue8m0, power_of_two
from kv_core.errors import SpecError

MX_GROUP = 32
NV_GROUP = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = 6.0  # 0.75 * 2^3
_MX_FLOOR = _LARGEST * 2.0**-126
_NV_SMALLEST, _NV_LARGEST = 2.0**-9, 448.0


@torch.no_grad()
def quantize_mxfp4(x: Tensor, *, checked: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to E2M1, with a scale 2^ceil(log2(amax / 6)) for each 32 channels of a row.

    Halves round to even. A group with an element that is not finite becomes NaN as a whole, for
    E2M1 has no code for it. The format is that of the OCP Microscaling specification.

    Args:
        x: ``[..., D]`` floating; rounded to BF16 first. D is a multiple of 32.
        checked: Refuse elements that are not finite. This waits for the device.

    Returns:
        Codes ``[..., D / 2]`` UINT8, and scales ``[..., D / 32]`` UINT8 in UE8M0.

    Raises:
        DtypeError: ``x`` is not a floating tensor.
        ShapeError: D is not a multiple of 32.
        SpecError: ``checked`` and an element is not finite.
    """
    rows = check_groups(x, MX_GROUP, checked=checked)
    amax = rows.abs().amax(-1)
    finite = amax.isfinite()
    amax = amax.masked_fill(~finite, 1.0).clamp(min=_MX_FLOOR)
    scale, byte = power_of_two(amax, mantissa=0.75, exponent=3)
    codes = encode_e2m1((rows / scale[..., None]).masked_fill(~finite[..., None], 0.0))
    return _pack(codes.flatten(-2)), byte.masked_fill(~finite, 255)


@torch.no_grad()
def dequantize_mxfp4(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return codes times their group's scale ``[..., D]``, rounded once to ``dtype``.

    Args:
        codes: ``[..., D / 2]`` UINT8.
        scale: ``[..., D / 32]`` UINT8 in UE8M0; 255 is NaN.
        dtype: A floating dtype for the result.

    Raises:
        DtypeError: Another dtype or device, or ``dtype`` is not floating.
        ShapeError: Sizes that do not fit each other.
    """
    check_float_dtype(dtype)
    values = _unpack(codes, scale, MX_GROUP, torch.uint8)
    return (values * decode_ue8m0(scale)[..., None]).flatten(-2).to(dtype)


@torch.no_grad()
def quantize_nvfp4(
    x: Tensor, global_scale: float | Tensor = 1.0, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to E2M1, with an e4m3 scale for each 16 channels and one for everything.

    Halves round to even, and what is larger than 6 scales saturates, for an e4m3 scale may round
    down. A group with an element that is not finite becomes NaN as a whole.

    Args:
        x: ``[..., D]`` floating; rounded to BF16 first. D is a multiple of 16.
        global_scale: G, positive, the same for every call on one store: ``amax / (6 * 448)`` of
            what is expected covers most.
        checked: Refuse elements that are not finite. This waits for the device.

    Returns:
        Codes ``[..., D / 2]`` UINT8, and scales ``[..., D / 16]`` float8_e4m3fn.

    Raises:
        DtypeError: ``x`` is not a floating tensor.
        ShapeError: D is not a multiple of 16.
        SpecError: ``global_scale`` is a number that is not positive and finite; or ``checked``, and
            an element is not finite.
    """
    rows = check_groups(x, NV_GROUP, checked=checked)
    if not isinstance(global_scale, Tensor) and not 0 < global_scale < math.inf:
        raise SpecError(
            f"global_scale must be positive and finite, got {global_scale}; use the largest "
            "magnitude that is expected, divided by 6 * 448"
        )
    amax = rows.abs().amax(-1)
    finite = amax.isfinite()
    total = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device)
    wanted = torch.div(amax.masked_fill(~finite, 0.0), total * _LARGEST)
    stored = wanted.clamp(_NV_SMALLEST, _NV_LARGEST).to(torch.float8_e4m3fn)
    unit = torch.div(rows, (stored.float() * total)[..., None])
    codes = encode_e2m1(unit.masked_fill(~finite[..., None], 0.0))
    bits = stored.view(torch.uint8).masked_fill(~finite, 0x7F)  # NaN
    return _pack(codes.flatten(-2)), bits.view(torch.float8_e4m3fn)


@torch.no_grad()
def dequantize_nvfp4(
    codes: Tensor,
    scale: Tensor,
    global_scale: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return codes times their group's scale and the global one, rounded once to ``dtype``.

    Args:
        codes: ``[..., D / 2]`` UINT8.
        scale: ``[..., D / 16]`` float8_e4m3fn.
        global_scale: G that the codes were made with.
        dtype: A floating dtype for the result.

    Raises:
        DtypeError: Another dtype or device, or ``dtype`` is not floating.
        ShapeError: Sizes that do not fit each other.
    """
    check_float_dtype(dtype)
    values = _unpack(codes, scale, NV_GROUP, torch.float8_e4m3fn)
    total = torch.as_tensor(global_scale, dtype=torch.float32, device=codes.device)
    return (values * (scale.float() * total)[..., None]).flatten(-2).to(dtype)


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the 4-bit code of each element, halves to even, saturating; zero is never negative."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # a half rounds to the neighbour whose code is even, so every other border is inclusive
    for step, (low, high) in enumerate(itertools.pairwise(_MAGNITUDES)):
        border = (low + high) / 2
        code += size >= border if step % 2 else size > border
    return torch.where((x < 0) & (code > 0), code + 8, code)


def _pack(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _unpack(codes: Tensor, scale: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    """Return the values of packed codes as FP32 ``[..., D / group, group]``."""
    shape = check_coded(
        codes, scale, group, codes_dtype=torch.uint8, scale_dtype=scale_dtype, packed=2
    )
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], -1)
    return table[nibbles.int()].view(shape)
