"""Attention of a step's tokens over their window and the compressed entries before it."""

from typing import Literal, overload

import torch
from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, ShapeError, SpecError
from kv_core.hybrid.rows import RowFormat, RowTensors
from kv_core.hybrid.views import ClassicalView, SWAView
from torch import Tensor

from kv_kernels.library import (
    call_query,
    check_activations,
    checked_scale,
    dense,
    refuse_grad,
    register,
)
from kv_kernels.ops.hybrid_inputs import IDS, check_view
from kv_kernels.ops.hybrid_values import check_picks, check_table
from kv_kernels.registry import find


@overload
def hybrid_attention(
    q: Tensor,
    kv_new: Tensor,
    swa_view: SWAView,
    classical_view: ClassicalView | None,
    picked: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor: ...


@overload
def hybrid_attention(
    q: Tensor,
    kv_new: Tensor,
    swa_view: SWAView,
    classical_view: ClassicalView | None,
    picked: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]: ...


def hybrid_attention(
    q: Tensor,
    kv_new: Tensor,
    swa_view: SWAView,
    classical_view: ClassicalView | None,
    picked: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend, from each token, the rows of its window and compressed entries; K and V are one row.

    A token at position p sees the rows of the positions in ``(p - window, p]``: those of this step
    from ``kv_new``, rounded as they will be stored, and earlier ones from the ring. It sees the
    entries that ``picked`` names, or all below ``vis`` without it. So any way of cutting a sequence
    into steps gives the same answer. Padding, and a token that sees nothing, get 0; what else lies
    in storage reaches no result. All is computed in FP32 and rounded once. Beside its output a call
    needs up to about 130 MB, or what the scores of one token take. The method is DeepSeek-V4's
    (arXiv 2606.19348, section 2.3).

    Args:
        q: ``[T, Hq, D]`` queries in FP32, FP16 or BF16, rotated.
        kv_new: ``[T, D]`` rows of this step in FP32, FP16 or BF16, rotated; what ``write_swa`` gets
            afterwards.
        swa_view: Rings of the layer; read.
        classical_view: Entries of the layer; read. None for the window alone.
        picked: ``[T, k]`` INT32 or INT64, the entries of each token, each once, and -1 in other
            places; one that a token does not see is left out. None for all that it sees.
        sinks: ``[Hq]`` floating: what ``exp(sinks)`` adds to a head's denominator, or None.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        cos: ``[positions, R / 2]`` floating: rotate the last R channels of the output, in
            interleaved pairs, back by the token's position. A position past its end gives NaN.
        sin: Like ``cos``.
        return_lse: Return the log-sum-exp of the scores too, without the sink.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read the table and ``picked``, and refuse what is wrong with them. This waits for
            the device.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``, contiguous; with ``return_lse`` also FP32 ``[T, Hq]``,
        minus infinity for a token that sees nothing.

    Raises:
        DtypeError: A tensor or view is of another type, dtype or device.
        ShapeError: Other sizes than the views have.
        SpecError: ``picked`` without entries, one of the tables without the other, or a scale that
            is not finite; or ``checked``, and a block id that is used is out of range, or a pick is
            out of range or there twice.
        StaleHandleError: The step of a view is over.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
    """
    check_view("swa_view", swa_view, SWAView, "read_swa_view")
    spec, held, positions = swa_view.spec, swa_view.swa_pos, swa_view.positions
    sizes = {"T": positions.shape[0], "D": spec.head_dim}
    hint = "T is the tokens of the step with its padding, D the width of a row"
    check_tensor("q", q, "T Hq D", sizes, device=held.device, hint=hint)
    check_activations("q", q)
    check_tensor("kv_new", kv_new, "T D", sizes, device=held.device, hint=hint)
    check_activations("kv_new", kv_new)
    if sinks is not None:
        hint = "one for each query head"
        check_tensor("sinks", sinks, "Hq", {"Hq": q.shape[1]}, device=held.device, hint=hint)
        _check_floating("sinks", sinks)
    _check_tables(cos, sin, spec.rope_dim, held.device)
    scale = checked_scale(scale, spec.head_dim)
    refuse_grad("hybrid_attention", (q, kv_new, sinks, cos, sin))
    pool, block_table, vis = RowTensors(None), None, None  # type: ignore[arg-type]
    if classical_view is not None:
        check_view("classical_view", classical_view, ClassicalView, "read_classical_view")
        pool, block_table, vis = (
            classical_view.rows, classical_view.block_table, classical_view.vis
        )  # fmt: skip
        if vis.shape != positions.shape or pool.codes.shape[2] != swa_view.codes.shape[2]:
            raise ShapeError(
                f"classical_view must belong to the step and layer of swa_view, got {len(vis)} "
                f"tokens and {len(positions)}; take both from one handle"
            )
    _check_picked(picked, vis)
    if checked and classical_view is not None:
        check_table(classical_view, pool.codes.shape[0])
        if picked is not None:
            check_picks(picked, classical_view.vis)
    out, lse = _op(
        q, kv_new, sinks, *swa_view.rows, held, swa_view.slots, swa_view.seq_start,
        swa_view.request_ids, positions, *pool, block_table, vis, picked, cos, sin,
        scale, swa_view.window, spec.row_format.name, spec.row_group, backend, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} must be floating, got {tensor.dtype}; convert it with .float()")


def _check_tables(
    cos: Tensor | None, sin: Tensor | None, rope_dim: int, device: torch.device
) -> None:
    if (cos is None) != (sin is None):
        missing = "cos" if cos is None else "sin"
        raise SpecError(
            f"cos and sin must be given together, got no {missing}; pass both to rotate the output "
            "back, or neither"
        )
    if cos is None or sin is None:
        return
    if not rope_dim:
        raise SpecError(
            "cos and sin need a spec with rope_dim of at least 2, got 0; leave them out, the rows "
            "carry no position"
        )
    half = {"R/2": rope_dim // 2}
    hint = "a column for each pair of the last R channels"
    check_tensor("cos", cos, "S R/2", half, device=device, hint=hint)
    check_tensor("sin", sin, "S R/2", half | {"S": cos.shape[0]}, device=device)
    if not cos.shape[0]:
        raise ShapeError(
            "cos and sin must be [S, R/2] with S >= 1, got S=0; give them a row for every position"
        )
    _check_floating("cos", cos)
    _check_floating("sin", sin)


def _check_picked(picked: Tensor | None, vis: Tensor | None) -> None:
    if picked is None:
        return
    if vis is None:
        raise SpecError(
            "picked must be None without entries, got a tensor; pass "
            "handle.read_classical_view() as classical_view"
        )
    hint = "what indexer_topk returned for this step"
    check_tensor("picked", picked, "T k", {"T": vis.shape[0]}, device=vis.device, hint=hint)
    if picked.dtype not in IDS:
        raise DtypeError(
            f"picked must be torch.int32 or torch.int64, got {picked.dtype}; pass {hint}"
        )


def _run(
    q: Tensor,
    kv_new: Tensor,
    sinks: Tensor | None,
    ring_codes: Tensor,
    ring_rope: Tensor | None,
    ring_scale: Tensor | None,
    held: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    codes: Tensor | None,
    rope: Tensor | None,
    scales: Tensor | None,
    block_table: Tensor | None,
    vis: Tensor | None,
    picked: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    window: int,
    row_format: str,
    group: int,
    backend: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    fmt, ring = RowFormat[row_format], RowTensors(ring_codes, ring_rope, ring_scale)
    pool = None if codes is None else RowTensors(codes, rope, scales)
    query = call_query(
        "hybrid_attention", fmt, fmt, q.device, q.dtype, q.shape[2],
        dense(q, kv_new, *ring, *(pool or ()), picked, cos, sin), group=q.shape[1], lse=return_lse,
    )  # fmt: skip
    run = find(query, backend)
    if not q.shape[0]:
        return _nothing(q, return_lse)
    # autocast would have the FP32 products of a row done in half precision
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, lse = run(
            q, kv_new, sinks, ring, held, request_slots, seq_start, request_ids, positions,
            pool, block_table, vis, picked, cos, sin, scale, window, fmt, group, return_lse,
        )  # fmt: skip
    return out, lse


def _nothing(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return _nothing(q, bool(args[-1]))


_op = register(
    "hybrid_attention(Tensor q, Tensor kv_new, Tensor? sinks, Tensor ring_codes, "
    "Tensor? ring_rope, Tensor? ring_scale, Tensor held, Tensor request_slots, Tensor seq_start, "
    "Tensor request_ids, Tensor positions, Tensor? codes, Tensor? rope, Tensor? scales, "
    "Tensor? block_table, Tensor? vis, Tensor? picked, Tensor? cos, Tensor? sin, float scale, "
    "int window, str row_format, int group, str? backend, bool return_lse) -> "
    "(Tensor out, Tensor lse)",
    _run,
    _fake,
)
