"""Pick, for each query, the compressed entries whose indexer keys score highest."""

import torch
from kv_core.checks import check_int, check_tensor
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from kv_core.hybrid.views import IndexerView
from torch import Tensor

from kv_kernels.library import call_query, check_activations, dense, refuse_grad, register
from kv_kernels.ops.hybrid_inputs import check_view
from kv_kernels.ops.hybrid_values import check_table
from kv_kernels.registry import find


def indexer_topk(
    view: IndexerView,
    iq: Tensor,
    iweights: Tensor,
    *,
    k: int,
    quantize_query: bool = False,
    backend: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` visible entries with the highest score for each token.

    Key w has the score ``sum_h iweights[t, h] * relu(iq[t, h] . key_w)``, in FP32. Token t sees the
    keys below ``vis[t]``; where these are no more than ``k``, all are picked. Of equal scores the
    lower index is picked, so the choice does not depend on how tokens are batched. The method is
    the indexer of DeepSeek-V4 (arXiv 2606.19348, section 2.3).

    Args:
        view: Keys of a layer; read.
        iq: ``[T, Hi, I]`` queries in FP32, FP16 or BF16, rotated as the keys were.
        iweights: ``[T, Hi]`` factor of each head, any sign, in FP32, FP16 or BF16. A positive
            constant in all of them changes no choice and may be left out.
        k: Most entries of a token, and the width of the result.
        quantize_query: Round the queries as the keys are stored before they are scored.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read the table, and refuse what is wrong with it. This waits for the device.

    Returns:
        ``[T, k]`` INT32 entries in ascending order, then -1; and ``[T]`` INT32 how many there are.

    Raises:
        DtypeError: A tensor or the view is of another type, dtype or device.
        ShapeError: Other sizes than the view has.
        SpecError: ``k`` is below 1; or ``checked``, and a block id that is used is out of range.
        StaleHandleError: The step of the view is over.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
    """
    check_view("view", view, IndexerView, "read_indexer_view")
    vis = view.vis
    sizes = {"T": vis.shape[0], "I": view.spec.index_dim}
    hint = "T is the tokens of the step with its padding, I the width of a key"
    check_tensor("iq", iq, "T Hi I", sizes, device=vis.device, hint=hint)
    check_activations("iq", iq)
    sizes["Hi"] = iq.shape[1]
    hint = "one factor for each head of iq"
    check_tensor("iweights", iweights, "T Hi", sizes, device=vis.device, hint=hint)
    check_activations("iweights", iweights)
    k = check_int("k", k, minimum=1)
    refuse_grad("indexer_topk", (iq, iweights))
    if checked:
        check_table(view, view.keys.shape[0])
    picked, counts = _op(
        iq, iweights, view.keys, view.scale, view.global_scale,
        view.block_table, vis, view.request_ids, k, quantize_query, view.format.name, backend,
    )  # fmt: skip
    return picked, counts


def _run(
    iq: Tensor,
    iweights: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    block_table: Tensor,
    vis: Tensor,
    request_ids: Tensor,
    k: int,
    quantize_query: bool,
    key_format: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    fmt, stored = KeyFormat[key_format], KeyTensors(codes, scale)
    query = call_query(
        "indexer_topk", fmt, fmt, iq.device, iq.dtype, iq.shape[2],
        dense(iq, iweights, *stored), group=iq.shape[1],
    )  # fmt: skip
    run = find(query, backend)
    if not iq.shape[0]:
        return _nothing(iq, k)
    # autocast would have the FP32 products of a row done in half precision
    with torch.no_grad(), torch.autocast(iq.device.type, enabled=False):
        picked, counts = run(
            iq, iweights, stored, global_scale, block_table, vis, request_ids, k, quantize_query,
            fmt,
        )  # fmt: skip
    return picked, counts


def _nothing(iq: Tensor, k: int) -> tuple[Tensor, Tensor]:
    T = iq.shape[0]
    return iq.new_empty((T, k), dtype=torch.int32), iq.new_empty((T,), dtype=torch.int32)


def _fake(iq: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    k = args[7]
    assert isinstance(k, int)
    return _nothing(iq, k)


_op = register(
    "indexer_topk(Tensor iq, Tensor iweights, Tensor codes, Tensor? scale, Tensor? global_scale, "
    "Tensor block_table, Tensor vis, Tensor request_ids, int k, bool quantize_query, "
    "str key_format, str? backend) -> (Tensor picked, Tensor counts)",
    _run,
    _fake,
)
