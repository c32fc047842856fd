"""Comparison of what a caller passes with what a place needs: the only one in the package."""

import operator
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kv_core.disjoint import check_disjoint, overlaps
from kv_core.errors import DtypeError, KVError, ShapeError, SpecError

__all__ = ["check_disjoint", "check_int", "check_owned", "check_tensor", "overlaps"]


def check_tensor(
    name: str,
    tensor: object,
    axes: str,
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    hint: str = "",
) -> None:
    """Compare a tensor with the shape, dtype and device of the place it is meant for.

    Reads metadata only, so it never waits for a device.

    Args:
        name: What the tensor is called in messages.
        tensor: Anything; what is not a dense tensor is refused.
        axes: One letter for each axis, separated by spaces. A repeated letter is one size.
        sizes: Sizes of the letters that are fixed; a letter that is left out may have any size.
        dtype: The dtype wanted, if only one will do.
        device: The device wanted, if only one will do; without an index, any of that type.
        hint: What to do next, added to messages about the shape.

    Raises:
        DtypeError: Not a dense tensor, or one of another dtype or on another device.
        ShapeError: Another rank, or another size on a fixed axis.
    """
    letters = axes.split()
    if not isinstance(tensor, Tensor):
        raise DtypeError(
            f"{name} must be a torch.Tensor [{', '.join(letters)}], got "
            f"{type(tensor).__name__}; convert it with torch.as_tensor"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise DtypeError(
            f"{name} must be a dense tensor, got layout {tensor.layout}; convert it with to_dense()"
        )
    todo = f"; {hint}" if hint else ""
    if tensor.dim() != len(letters):
        todo = todo or f"; reshape it to these {len(letters)} axes"
        raise ShapeError(
            f"{name} must be [{', '.join(letters)}], got {tensor.dim()} axes "
            f"{list(tensor.shape)}{todo}"
        )
    bound = dict(sizes)
    wrong = [
        (letter, size)
        for letter, size in zip(letters, tensor.shape, strict=True)
        if bound.setdefault(letter, size) != size
    ]
    if wrong:
        wanted = ", ".join(f"{letter}={bound[letter]}" for letter, _ in wrong)
        got = ", ".join(f"{letter}={size}" for letter, size in wrong)
        raise ShapeError(f"{name} must be [{', '.join(letters)}] with {wanted}, got {got}{todo}")
    if dtype is not None and tensor.dtype != dtype:
        raise DtypeError(
            f"{name} must be {dtype}, got {tensor.dtype}; convert it with .to({dtype})"
        )
    if device is not None and not _same_device(tensor.device, device):
        raise DtypeError(
            f"{name} must be on {device}, got {tensor.device}; move it with .to('{device}')"
        )


def _same_device(got: torch.device, wanted: torch.device) -> bool:
    return got.type == wanted.type and wanted.index in (None, got.index)


def check_owned(name: str, tensor: Tensor) -> None:
    """Check that storage the caller hands over can be written from anywhere.

    Raises:
        SpecError: It was made in inference mode, or requires grad.
    """
    if tensor.is_inference():
        raise SpecError(
            f"{name} must not be an inference tensor, got one made under torch.inference_mode(), "
            "which nothing outside of it may write; allocate it under torch.no_grad() instead"
        )
    if tensor.requires_grad:
        raise SpecError(f"{name} must not require grad, got requires_grad=True; pass its .detach()")


def check_int(
    name: str,
    value: object,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    error: type[KVError] = SpecError,
) -> int:
    """Return ``value`` as an ``int`` if it is a whole number inside the bounds.

    Args:
        name: What the number is called in messages.
        value: A Python or numpy integer. A bool, a float and a tensor are refused: the first two
            hide mistakes, and reading the third would wait for its device.
        minimum: Smallest value allowed.
        maximum: Largest value allowed.
        error: The kind of error for a number outside the bounds.

    Raises:
        DtypeError: Not an integer.
        KVError: Outside the bounds; of the kind ``error``.
    """
    if isinstance(value, (bool, np.bool_, float, Tensor)) or not hasattr(value, "__index__"):
        shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
        raise DtypeError(
            f"{name} must be an integer, got {shown} of type {type(value).__name__}; "
            "pass a whole number as int"
        )
    try:
        number = operator.index(value)
    except TypeError as reason:  # an array that holds something else
        raise DtypeError(
            f"{name} must be an integer, got {value!r}; pass a whole number as int"
        ) from reason
    if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
        return int(number)
    if minimum is not None and maximum is not None:
        raise error(f"{name} must be between {minimum} and {maximum}, got {number}")
    bound = f"at least {minimum}" if minimum is not None else f"at most {maximum}"
    raise error(f"{name} must be {bound}, got {number}")


def check_float_dtype(dtype: object) -> None:
    """Check that ``dtype`` is one that a result can be rounded to.

    Raises:
        DtypeError: Not a floating dtype.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise DtypeError(f"dtype must be a floating dtype, got {dtype}; for example torch.float32")
