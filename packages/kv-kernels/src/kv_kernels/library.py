"""The torch library of this package: how operations are registered, and what they all refuse."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from kv_core.errors import DtypeError, NoKernelError, SpecError
from torch import Tensor

from kv_kernels.registry import Format, Query

_LARGEST = torch.finfo(torch.float32).max
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_library = torch.library.Library("kv_kernels", "FRAGMENT")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operation of the library ``kv_kernels`` and return its overload.

    Args:
        schema: ``name(arguments) -> results``; what is written is declared as ``Tensor(a!)``.
        run: Runs the operation on any device.
        fake: Returns empty results of the right shapes, for ``torch.compile``.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kv_kernels::{name}", fake, lib=_library)
    return getattr(torch.ops.kv_kernels, name).default


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a device, None for any other kind."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def dense(*tensors: Tensor | None) -> bool:
    """Whether the elements of the last axis of every tensor lie next to each other."""
    return all(t is None or t.shape[-1] < 2 or t.stride(-1) == 1 for t in tensors)


@functools.lru_cache(maxsize=1024)
def call_query(
    op: str,
    k_format: Format,
    v_format: Format,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    unit_stride: bool,
    **facts: Any,
) -> Query:
    """Return what a call asks of a row; the same arguments give the same object."""
    return Query(
        op=op,
        k_format=k_format,
        v_format=v_format,
        device=device.type,
        capability=capability(device),
        dtype=dtype,
        k_dim=dim,
        v_dim=dim,
        unit_stride=unit_stride,
        **facts,
    )


def check_activations(name: str, tensor: Tensor) -> None:
    """Check that activations have a dtype that kernels take.

    Raises:
        DtypeError: Not FP32, FP16 or BF16.
    """
    if tensor.dtype not in FLOATS:
        raise DtypeError(
            f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}; convert it, "
            "the cache itself encodes what it stores"
        )


def refuse_grad(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Refuse inputs that a backward pass would have to reach.

    Raises:
        NoKernelError: Gradients are on and a tensor requires one.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NoKernelError(
            f"no kernel of {op} has a backward pass, and an input requires grad; call it "
            "under torch.no_grad() or pass detached tensors"
        )


def check_number(name: str, value: object, hint: str, *, minimum: float = -math.inf) -> float:
    """Return ``value`` as a float if it is a finite number of at least ``minimum``.

    Raises:
        DtypeError: Not a number.
        SpecError: Not finite, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(f"{name} must be a number, got {type(value).__name__}; pass a float")
    if not abs(value) <= _LARGEST:
        raise SpecError(f"{name} must be finite, got {value}; {hint}")
    if value < minimum:
        raise SpecError(f"{name} must be at least {minimum:g}, got {value}; {hint}")
    return float(value)


def checked_scale(scale: float | None, head_size: int) -> float:
    """Return the factor of the scores, ``D ** -0.5`` by default.

    Raises:
        DtypeError: Not a number.
        SpecError: Not finite.
    """
    if scale is None:
        return float(head_size**-0.5)
    return check_number("scale", scale, "leave it out for D ** -0.5")
