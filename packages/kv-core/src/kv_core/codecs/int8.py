"""Symmetric INT8 with one FP32 scale for each row."""

import torch
from torch import Tensor

from kv_core.checks import check_float_dtype, check_tensor
from kv_core.errors import DtypeError, ShapeError, SpecError

# Below this a row is taken for zero: 127 divided by it is still a finite FP32 number.
TINY = 2.0**-120


def quantize_int8(x: Tensor, *, checked: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise each row of ``x``, rounding halves to even.

    A row whose largest magnitude is below 2^-120 gets scale 0 and codes 0. A row with an element
    that is not finite gets scale NaN and codes 0, so that it decodes to NaN and stays visible.

    Args:
        x: ``[..., D]`` FP32, FP16, BF16 or FP64 (which is rounded to FP32 first), with D >= 1.
        checked: Refuse rows that are not finite. This waits for the device.

    Returns:
        Codes ``[..., D]`` INT8 within -127..127, and scales ``[...]`` FP32. ``codes * scale`` is
        within half a scale of ``x``, up to FP32 rounding.

    Raises:
        DtypeError: ``x`` is not a floating tensor.
        ShapeError: ``x`` has no last axis, or an empty one.
        SpecError: ``checked`` and a row is not finite; the message has the row's index.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(
            f"x must be a floating tensor [..., D], got {got}; quantise the activations themselves"
        )
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(
            f"x must be [..., D] with D >= 1, got {list(x.shape)}; a row needs an element to scale"
        )
    x = x.float()
    amax = x.abs().amax(-1)  # NaN where a row holds NaN
    finite = torch.isfinite(amax)
    if checked and not bool(finite.all()):
        row = tuple(torch.nonzero(~finite)[0].tolist())
        raise SpecError(
            f"x must be finite, got NaN or infinity in row {row}; find where the model made it, or "
            "pass checked=False to store a NaN scale"
        )
    live = finite & (amax >= TINY)
    amax = amax.masked_fill(~live, 1.0)
    # a tensor on both sides: with a number torch multiplies by a rounded reciprocal instead
    steps = torch.full_like(amax, 127.0)
    inverse = torch.div(steps, amax)
    codes = (x * inverse[..., None]).masked_fill(~live[..., None], 0.0)
    scale = torch.div(amax, steps).masked_fill(~live, 0.0).masked_fill(~finite, torch.nan)
    return torch.round(codes).clamp(-127, 127).to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``codes * scale``, multiplied in FP32 and rounded once to ``dtype``.

    Args:
        codes: ``[..., D]`` INT8.
        scale: ``[...]`` FP32 on the same device.
        dtype: A floating dtype for the result.

    Raises:
        DtypeError: ``codes`` is not INT8, ``scale`` is not FP32 or lies on another device, or
            ``dtype`` is not floating.
        ShapeError: ``scale`` does not have one number for each row.
    """
    check_float_dtype(dtype)
    rank = codes.dim() if isinstance(codes, Tensor) else 1
    rows = [f"N{axis}" for axis in range(rank - 1)]
    check_tensor("codes", codes, " ".join([*rows, "D"]), {}, dtype=torch.int8)
    check_tensor(
        "scale",
        scale,
        " ".join(rows),
        dict(zip(rows, codes.shape, strict=False)),
        dtype=torch.float32,
        device=codes.device,
        hint="pass the scales that were made with these codes",
    )
    return (codes.float() * scale[..., None]).to(dtype)
