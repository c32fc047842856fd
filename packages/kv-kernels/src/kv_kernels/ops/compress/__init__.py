"""Make the entries of the windows that close in a step of a hybrid cache."""

import torch
from kv_core.hybrid.spec import Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from kv_core.spec import KVFormat
from torch import Tensor

from kv_kernels.library import call_query, check_activations, dense, refuse_grad, register
from kv_kernels.registry import find


def compress(
    state: StateCachePool,
    which: Which,
    step: HybridStep,
    value: Tensor,
    score: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Pool the window that each closing token ends, normalise and rotate it.

    ``LayerCacheHandle.compress`` checks the arguments and calls this. The formula is that of
    ``kv_core.hybrid.reference.compress``.

    Args:
        state: Tails of a layer; read.
        which: "main" for entries, "index" for indexer keys.
        step: Which tokens close a window, and where the tokens of a window are.
        value: ``[T, c * D]`` in FP32, FP16 or BF16.
        score: ``[T, c * D]``, gate plus bias.
        weight: ``[D]`` of the RMSNorm, floating.
        eps: Of the RMSNorm.
        cos: ``[positions, R / 2]``, floating.
        sin: Like ``cos``.
        backend: Name of the row to use, as in all operations.

    Returns:
        ``[T, D]`` FP32; rows of tokens that close nothing are finite, no more.

    Raises:
        DtypeError: A tensor is of another dtype.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
    """
    check_activations("value", value)
    check_activations("score", score)
    refuse_grad("compress", (value, score, weight, cos, sin))
    kind = state.kind
    assert kind is not None
    entries: Tensor = _op(
        value, score, state.tails[which], weight, cos, sin,
        step.kinds[kind.ratio].closing, step.request_ids, step.positions,
        step.request_slots, step.seq_start, eps, kind.ratio, kind.overlap, backend,
    )  # fmt: skip
    return entries


def _run(
    value: Tensor,
    score: Tensor,
    tail: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    closing: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    eps: float,
    ratio: int,
    overlap: bool,
    backend: str | None,
) -> Tensor:
    query = call_query(
        "compress", KVFormat.FP32, KVFormat.FP32, value.device, value.dtype, weight.shape[0],
        dense(value, score, tail, weight, cos, sin),
    )  # fmt: skip
    run = find(query, backend)
    if not value.shape[0]:
        return _nothing(value, weight)
    with torch.no_grad():
        entries: Tensor = run(
            value, score, tail, weight, cos, sin, closing, request_ids, positions, request_slots,
            seq_start, eps, ratio, overlap,
        )  # fmt: skip
    return entries


def _nothing(value: Tensor, weight: Tensor) -> Tensor:
    return value.new_empty((value.shape[0], weight.shape[0]), dtype=torch.float32)


def _fake(value: Tensor, score: Tensor, tail: Tensor, weight: Tensor, *args: object) -> Tensor:
    return _nothing(value, weight)


_op = register(
    "compress(Tensor value, Tensor score, Tensor tail, Tensor weight, Tensor cos, Tensor sin, "
    "Tensor closing, Tensor request_ids, Tensor positions, Tensor request_slots, "
    "Tensor seq_start, float eps, int ratio, bool overlap, str? backend) -> Tensor",
    _run,
    _fake,
)
