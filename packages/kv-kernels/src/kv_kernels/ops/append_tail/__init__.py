"""Store the newest values and gates of each run in a tail of a hybrid cache."""

import torch
from kv_core.hybrid.spec import Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from kv_core.spec import KVFormat
from torch import Tensor

from kv_kernels.library import call_query, check_activations, dense, refuse_grad, register
from kv_kernels.registry import find


def append_tail(
    state: StateCachePool,
    which: Which,
    step: HybridStep,
    value: Tensor,
    score: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Store each token's value and score as FP32 where the step says.

    ``LayerCacheHandle.append_tail`` checks the arguments and calls this.

    Args:
        state: Tails of a layer; written by ``tail_slot`` of the layer's ratio.
        which: "main" for entries, "index" for indexer keys.
        step: Of it only ``tail_slot`` is used; -1 stores nothing.
        value: ``[T, c * D]`` in FP32, FP16 or BF16.
        score: ``[T, c * D]``, gate plus bias.
        backend: Name of the row to use, as in all operations.

    Raises:
        DtypeError: A tensor is of another dtype.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad. In
            every case nothing was written.
    """
    check_activations("value", value)
    check_activations("score", score)
    refuse_grad("append_tail", (value, score))
    assert state.kind is not None
    _op(value, score, step.kinds[state.kind.ratio].tail_slot, state.tails[which], backend)


def _run(
    value: Tensor, score: Tensor, tail_slot: Tensor, tail: Tensor, backend: str | None
) -> None:
    query = call_query(
        "append_tail", KVFormat.FP32, KVFormat.FP32, value.device, value.dtype, value.shape[1],
        dense(value, score, tail),
    )  # fmt: skip
    run = find(query, backend)
    if value.shape[0]:
        with torch.no_grad():
            run(value, score, tail_slot, tail)


def _fake(*args: object) -> None:
    """Return nothing, as the operation does."""


_op = register(
    "append_tail(Tensor value, Tensor score, Tensor tail_slot, Tensor(a!) tail, str? backend) "
    "-> ()",
    _run,
    _fake,
)
