"""Attention of a step's tokens over what their sequences have stored."""

from typing import Literal, overload

import torch
from kv_core.checks import check_int
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat
from kv_core.step import Step
from torch import Tensor

from kv_kernels.library import call_query, check_number, checked_scale, dense, refuse_grad, register
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_inputs import check_groups, check_rows, check_step
from kv_kernels.ops.step_values import check_queries, check_tables
from kv_kernels.registry import find

_INT32 = 2**31 - 1


@overload
def paged_decode_attention(
    layer: KVLayer,
    step: Step,
    q: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor: ...


@overload
def paged_decode_attention(
    layer: KVLayer,
    step: Step,
    q: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: Literal[True],
    backend: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]: ...


def paged_decode_attention(
    layer: KVLayer,
    step: Step,
    q: Tensor,
    *,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    num_splits: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend, from each new token, what its sequence has stored up to and with that token.

    Serves decoding, chunked prefill and any mix: query i of a sequence with nq new tokens is its
    token ``e = context_len - nq + i``, and sees the tokens ``0 .. e``, or with a window
    ``e - window_left .. e``. The new tokens have to be stored first; all are attended as they were
    stored, so any way of cutting a sequence into steps gives the same answer.

    The ``triton`` row over INT8 multiplies codes as they are where a key/value head has few query
    rows: elements of a query are then rounded within 2^-23 of its largest, and each token's weight
    times its value scale within 2^-15 of the largest among 32 tokens.

    Rows behind ``cu_seqlens[-1]``, and queries that see nothing, get 0. What lies in storage past
    the stored tokens reaches no result.

    Args:
        layer: Read.
        step: Of it ``block_table``, ``context_lens``, ``cu_seqlens`` and the two bounds are used.
        q: ``[T, Hq, D]`` queries in FP32, FP16 or BF16, any strides; Hq is a multiple of H.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window_left: How many tokens before its own a query sees; -1 for all. Hugging Face's
            ``sliding_window`` counts the query's own token too, so it is one more.
        softcap: If positive, scaled scores become ``softcap * tanh(score / softcap)``.
        num_splits: In how many parts a kernel may work on the keys of a query: 0 chooses, 1 makes
            the result the same bits whatever else is in the batch. The ``torch`` row never splits.
        return_lse: Return the log-sum-exp of the scores of each query too.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read tables and lengths, and refuse what is wrong with them. This waits for the
            device.

    Returns:
        ``[T, Hq, D]`` in the dtype of ``q``, contiguous; with ``return_lse`` also FP32 ``[T, Hq]``,
        minus infinity for a query that sees nothing.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: ``q`` does not fit the layer or the step.
        SpecError: A number is out of range; or ``checked``, and a length, a block id that is used,
            or ``cu_seqlens`` is.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
    """
    check_step(layer, step)
    check_rows("q", q, "Hq", layer, step)
    check_groups("q", q.shape[1], layer.kv_heads)
    scale = checked_scale(scale, layer.head_dim)
    window_left = min(check_int("window_left", window_left, minimum=-1), _INT32)
    softcap = check_number("softcap", softcap, "pass 0 for no cap", minimum=0.0)
    num_splits = check_int("num_splits", num_splits, minimum=0)
    refuse_grad("paged_decode_attention", (q,))
    if checked:
        check_tables(layer, step)
        check_queries(step)
    out, lse = _op(
        q, layer.k, layer.v, layer.k_scale, layer.v_scale,
        step.block_table, step.context_lens, step.cu_seqlens, step.max_query, step.max_context,
        scale, window_left, softcap, num_splits,
        layer.spec.k_format.name, layer.spec.v_format.name, backend, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window_left: int,
    softcap: float,
    num_splits: int,
    k_format: str,
    v_format: str,
    backend: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    query = call_query(
        "paged_decode_attention", KVFormat[k_format], KVFormat[v_format], q.device, q.dtype,
        q.shape[2],
        dense(q, k_cache, v_cache), group=q.shape[1] // k_cache.shape[2], lse=return_lse,
    )  # fmt: skip
    run = find(query, backend)
    if not q.shape[0]:
        return _nothing(q, return_lse)
    cache = CacheTensors(k_cache, v_cache, k_scale, v_scale)
    # autocast would have the FP32 products of a row done in half precision
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, lse = run(
            q, cache, block_table, context_lens, cu_seqlens, max_query, max_context, scale,
            window_left, softcap, num_splits, return_lse,
        )  # fmt: skip
    return out, lse


def _nothing(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake(q: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return _nothing(q, bool(args[-1]))


_op = register(
    "paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, "
    "Tensor? v_scale, Tensor block_table, Tensor context_lens, Tensor cu_seqlens, "
    "SymInt max_query, SymInt max_context, float scale, int window_left, float softcap, "
    "int num_splits, str k_format, str v_format, str? backend, bool return_lse) -> "
    "(Tensor out, Tensor lse)",
    _run,
    _fake,
)
