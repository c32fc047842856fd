"""Power-of-two scales (UE8M0) and the cutting of rows into groups."""

import torch
from torch import Tensor

from kv_core.checks import check_int, check_tensor
from kv_core.errors import DtypeError, ShapeError, SpecError

_NAN = 255


def check_groups(x: object, group: int, *, checked: bool) -> Tensor:
    """Return ``x`` rounded to BF16 as FP32 ``[..., D / group, group]``.

    Raises:
        DtypeError: Not a floating tensor.
        ShapeError: D is not a positive multiple of ``group``.
        SpecError: ``checked`` and an element is not finite.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(f"x must be a floating tensor [..., D], got {got}; pass the activations")
    group = check_int("group", group, minimum=1)
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % group:
        raise ShapeError(
            f"x must be [..., D] with D a multiple of {group}, got {list(x.shape)}; channels share "
            f"a scale {group} at a time"
        )
    rounded = x.to(torch.bfloat16).float()
    if checked and not bool(rounded.isfinite().all()):
        at = tuple(torch.nonzero(~rounded.isfinite())[0].tolist())
        raise SpecError(
            f"x must be finite, got NaN or infinity at {at}; find where the model made it, or pass "
            "checked=False to store NaN"
        )
    return rounded.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def power_of_two(amax: Tensor, *, mantissa: float, exponent: int) -> tuple[Tensor, Tensor]:
    """Return the smallest power of two ``s`` with ``mantissa * 2^exponent * s >= amax``.

    Exact: by comparing mantissas, without a division or a logarithm. (torch's own cast to
    float8_e8m0fnu rounds to the nearest power instead, which would let the largest code overflow.)

    Args:
        amax: Positive finite FP32.
        mantissa: Of the largest code, in [0.5, 1).
        exponent: Of the largest code.

    Returns:
        The scale as FP32, and its UE8M0 byte.
    """
    fraction, power = torch.frexp(amax)
    e = power - exponent + (fraction > mantissa).int()
    return torch.ldexp(torch.ones_like(amax), e), (e + 127).to(torch.uint8)


def decode_ue8m0(byte: Tensor) -> Tensor:
    """Return ``2^(byte - 127)`` as FP32; 255 is NaN."""
    power = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte.int() - 127)
    return power.masked_fill(byte == _NAN, torch.nan)


def check_coded(
    codes: Tensor,
    scale: Tensor,
    group: int,
    *,
    codes_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    packed: int = 1,
) -> tuple[int, ...]:
    """Return the shape ``[..., D / group, group]`` of what ``codes`` and ``scale`` decode to.

    Args:
        codes: ``[..., D / packed]``.
        scale: ``[..., D / group]``.
        group: Channels that share a scale.
        codes_dtype: Wanted of ``codes``.
        scale_dtype: Wanted of ``scale``.
        packed: Codes in one element.

    Raises:
        DtypeError: Another dtype or device.
        ShapeError: D is not a positive multiple of ``group``, or sizes do not fit each other.
    """
    rank = codes.dim() if isinstance(codes, Tensor) else 1
    outer = [f"N{axis}" for axis in range(rank - 1)]
    last = "D" if packed == 1 else f"D/{packed}"
    check_tensor("codes", codes, " ".join([*outer, last]), {}, dtype=codes_dtype)
    D = codes.shape[-1] * packed
    if D == 0 or D % group:
        raise ShapeError(
            f"codes must hold a multiple of {group} channels, got {D}; pass whole groups"
        )
    check_tensor(
        "scale",
        scale,
        " ".join([*outer, f"D/{group}"]),
        dict(zip(outer, codes.shape, strict=False)) | {f"D/{group}": D // group},
        dtype=scale_dtype,
        device=codes.device,
        hint="pass the scales that were made with these codes",
    )
    return (*codes.shape[:-1], D // group, group)
