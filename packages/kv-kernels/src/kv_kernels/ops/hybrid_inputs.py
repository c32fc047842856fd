"""What the operations of a hybrid cache check of their arguments, and ask the table."""

import functools
from typing import Any

import torch
from kv_core.errors import DtypeError
from torch import Tensor

from kv_kernels.library import FLOATS, capability
from kv_kernels.registry import Format, Query

IDS = (torch.int32, torch.int64)


def check_activations(name: str, tensor: Tensor) -> None:
    """Check that activations have a dtype that kernels take.

    Raises:
        DtypeError: Not FP32, FP16 or BF16.
    """
    if tensor.dtype not in FLOATS:
        raise DtypeError(
            f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}; convert it, what is "
            "stored is encoded by the cache itself"
        )


def check_view(name: str, view: object, wanted: type, call: str) -> None:
    """Check that a view is of the right kind.

    Raises:
        DtypeError: It is not.
    """
    if not isinstance(view, wanted):
        raise DtypeError(
            f"{name} must be {'an' if wanted.__name__[0] in 'AI' else 'a'} {wanted.__name__}, got "
            f"{type(view).__name__}; take it from handle.{call}()"
        )


@functools.lru_cache(maxsize=1024)
def hybrid_query(
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
