"""What the two operations that take a packed ``qkv`` check of it."""

from typing import Literal, NamedTuple

from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, ShapeError, SpecError
from kv_core.step import check_ids
from torch import Tensor

from kv_kernels.library import check_activations, check_number, refuse_grad
from kv_kernels.ops.paged_inputs import check_groups

Rope = Literal["none", "half", "interleaved"]

_STYLES = ("none", "half", "interleaved")


class Rotation(NamedTuple):
    """Checked tables and positions as the registered operations take them."""

    cos: Tensor | None  # [*, R/2]
    sin: Tensor | None
    positions: Tensor | None  # [T], None where row t of the tables is token t's
    eps: float


def check_qkv(
    op: str,
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    *,
    kv_heads: int,
    head_dim: int,
    rope: str,
    eps: float,
    doubled_tables: bool,
) -> Rotation:
    """Check what the first half of a write is given, and cut doubled tables.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: A tensor does not fit the heads, or the tables do not fit D.
        SpecError: There is no such ``rope``, or tables are given or missing against it.
        NoKernelError: An input requires grad.
    """
    D = head_dim
    check_tensor("qkv", qkv, "T (Hq+2H)*D", {})
    check_activations("qkv", qkv)
    heads = qkv.shape[1] // D
    if qkv.shape[1] % D or heads <= 2 * kv_heads:
        raise ShapeError(
            f"qkv must be [T, (Hq + 2H) * D] with H={kv_heads}, D={D} and Hq >= 1, got a width of "
            f"{qkv.shape[1]}; pack all query heads, then all key heads, then all value heads"
        )
    check_groups("qkv", heads - 2 * kv_heads, kv_heads)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(
                name, weight, "D", {"D": D}, device=qkv.device, hint="one weight serves every head"
            )
            _check_floating(name, weight)
    eps = check_number("eps", eps, "pass the rms_norm_eps of the model", minimum=0.0)
    if not isinstance(rope, str) or rope not in _STYLES:
        raise SpecError(
            f'rope must be "none", "half" or "interleaved", got {rope!r}; Hugging Face models '
            'rotate halves, GGUF Llama files are "interleaved"'
        )
    if rope == "none":
        if cos is not None or sin is not None:
            raise SpecError('rope="none" takes no tables, got cos or sin; pass None for both')
        refuse_grad(op, (qkv, q_norm, k_norm))
        return Rotation(None, None, None, eps)
    if cos is None or sin is None:
        raise SpecError(
            f'rope="{rope}" needs cos and sin, got None; pass both tables, or rope="none"'
        )
    cos, sin = _tables(qkv, cos, sin, D, doubled_tables)
    refuse_grad(op, (qkv, q_norm, k_norm, cos, sin))
    if doubled_tables:
        return Rotation(cos, sin, None, eps)
    if positions is None:
        raise SpecError(
            "positions must be given with tables [max_pos, R/2], got None; pass [T] positions, or "
            "doubled_tables=True with tables [T, R]"
        )
    check_tensor("positions", positions, "T", {"T": qkv.shape[0]}, device=qkv.device)
    check_ids("positions", positions)
    return Rotation(cos, sin, positions, eps)


def _tables(
    qkv: Tensor, cos: Tensor, sin: Tensor, D: int, doubled_tables: bool
) -> tuple[Tensor, Tensor]:
    axes, sizes, hint = "max_pos R/2", {}, "pass one row for each position"
    if doubled_tables:
        axes, sizes = "T R", {"T": qkv.shape[0]}
        hint = "doubled tables have a row for every token, in order"
    check_tensor("cos", cos, axes, sizes, device=qkv.device, hint=hint)
    _check_floating("cos", cos)
    rows, width = cos.shape
    check_tensor(
        "sin", sin, axes, dict(zip(axes.split(), cos.shape, strict=True)),
        dtype=cos.dtype, device=qkv.device, hint="both tables are alike",
    )  # fmt: skip
    R = width if doubled_tables else 2 * width
    if R % 2 or not 0 < R <= D:
        todo = "" if doubled_tables else "; tables have one column for two rotated elements"
        raise ShapeError(
            f"cos must rotate R elements, even and from 2 to D={D}, got R={R} of a table with "
            f"{width} columns{todo}; pad an odd head, or rotate a part of it"
        )
    if not rows and qkv.shape[0]:
        raise ShapeError("cos must have a row for every position, got none; pass a table")
    return cos[:, : R // 2], sin[:, : R // 2]


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} must be floating, got {tensor.dtype}; convert it with .float()")
