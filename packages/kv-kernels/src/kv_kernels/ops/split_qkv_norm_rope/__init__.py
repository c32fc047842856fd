"""Cut a packed projection into heads, normalise and rotate queries and keys."""

import torch
from kv_core.checks import check_int
from kv_core.spec import KVFormat
from torch import Tensor

from kv_kernels.library import call_query, dense, register
from kv_kernels.ops.qkv_inputs import Rope, check_qkv
from kv_kernels.ops.step_values import check_positions
from kv_kernels.registry import find


def split_qkv_norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    *,
    kv_heads: int,
    head_dim: int,
    rope: Rope,
    eps: float = 1e-6,
    doubled_tables: bool = False,
    backend: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of each token, as ``paged_write`` makes them.

    Norm and RoPE are computed in FP32, norm first, and rounded once. A token whose position is
    outside the tables becomes NaN where it would be rotated; nothing past them is read.

    Args:
        qkv: ``[T, (Hq + 2H) * D]`` in FP32, FP16 or BF16: all query heads, all key heads, all
            value heads. Hq follows from the width.
        q_norm: ``[D]`` weight of an RMS norm over each query head, or None for no norm.
        k_norm: The same for key heads.
        cos: ``[max_pos, R/2]``, or with ``doubled_tables`` ``[T, R]``; R <= D elements of a head
            are rotated, the others pass. None with ``rope="none"``.
        sin: Like ``cos``.
        positions: ``[T]`` INT32 or INT64 rows of the tables; not used with ``doubled_tables``.
        kv_heads: H.
        head_dim: D.
        rope: "half" rotates elements R/2 apart (GPT-NeoX, Hugging Face), "interleaved"
            neighbours (GPT-J, GGUF Llama), "none" nothing.
        eps: Of the norm.
        doubled_tables: The tables are as Hugging Face passes them to attention: two equal halves,
            taken at each token's position already.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read the positions and refuse one outside the tables. This waits for the device.

    Returns:
        ``[T, Hq, D]``, ``[T, H, D]`` and ``[T, H, D]``, contiguous, in the dtype of ``qkv``.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: A tensor does not fit the heads, or the tables do not fit D.
        SpecError: There is no such ``rope``, tables or positions are given or missing against it,
            or ``checked`` and a position is outside the tables.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
    """
    kv_heads = check_int("kv_heads", kv_heads, minimum=1)
    head_dim = check_int("head_dim", head_dim, minimum=1)
    rotation = check_qkv(
        "split_qkv_norm_rope", qkv, q_norm, k_norm, cos, sin, positions, kv_heads=kv_heads,
        head_dim=head_dim, rope=rope, eps=eps, doubled_tables=doubled_tables,
    )  # fmt: skip
    if checked and rotation.cos is not None and rotation.positions is not None:
        check_positions(rotation.positions, rotation.cos.shape[0])
    q, k, v = _op(
        qkv, q_norm, k_norm, *rotation[:3], kv_heads, head_dim, rope, rotation.eps, backend
    )
    return q, k, v


def _run(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    kv_heads: int,
    head_dim: int,
    rope: str,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    fmt = KVFormat.of(qkv.dtype)
    query = call_query(
        "split_qkv_norm_rope", fmt, fmt, qkv.device, qkv.dtype, head_dim,
        dense(qkv, q_norm, k_norm, cos, sin),
        group=qkv.shape[1] // head_dim // kv_heads - 2,
    )  # fmt: skip
    run = find(query, backend)
    if not qkv.shape[0]:
        return _fake(qkv, q_norm, k_norm, cos, sin, positions, kv_heads, head_dim)
    with torch.no_grad():
        q, k, v = run(
            qkv, q_norm, k_norm, cos, sin, positions, kv_heads, head_dim, rope, eps
        )  # fmt: skip
    return q, k, v


def _fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    kv_heads: int,
    head_dim: int,
    *args: object,
) -> tuple[Tensor, Tensor, Tensor]:
    T, width = qkv.shape
    q = qkv.new_empty(T, width // head_dim - 2 * kv_heads, head_dim)
    k, v = (qkv.new_empty(T, kv_heads, head_dim) for _ in range(2))
    return q, k, v


_op = register(
    "split_qkv_norm_rope(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, "
    "Tensor? positions, int kv_heads, int head_dim, str rope, float eps, str? backend) -> "
    "(Tensor q, Tensor k, Tensor v)",
    _run,
    _fake,
)
