"""Store the newest rows of each run in the window rings of a hybrid cache."""

import torch
from kv_core.hybrid.rows import RowFormat, RowTensors
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from torch import Tensor

from kv_kernels.library import call_query, check_activations, dense, refuse_grad, register
from kv_kernels.registry import find


def append_swa(
    state: StateCachePool, step: HybridStep, rows: Tensor, *, backend: str | None = None
) -> None:
    """Encode each token's row and store it, with its position, where the step says.

    ``LayerCacheHandle.write_swa`` checks the arguments and calls this.

    Args:
        state: Rings of a layer; written by ``step.ring_slot`` and nowhere else.
        step: Of it ``positions`` and ``ring_slot`` are used; -1 stores nothing.
        rows: ``[T, D]`` in FP32, FP16 or BF16, rotated.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.

    Raises:
        DtypeError: ``rows`` is of another dtype.
        NoKernelError: No row can run the call, ``backend`` cannot, or ``rows`` requires grad. In
            every case nothing was written.
    """
    check_activations("rows", rows)
    refuse_grad("append_swa", (rows,))
    spec = state.spec
    _op(
        rows, step.positions, step.ring_slot, *state.ring, state.positions,
        spec.row_format.name, spec.row_group, backend,
    )  # fmt: skip


def _run(
    rows: Tensor,
    positions: Tensor,
    ring_slot: Tensor,
    codes: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    held: Tensor,
    row_format: str,
    group: int,
    backend: str | None,
) -> None:
    fmt, ring = RowFormat[row_format], RowTensors(codes, rope, scale)
    query = call_query(
        "append_swa", fmt, fmt, rows.device, rows.dtype, rows.shape[1], dense(rows, *ring)
    )
    run = find(query, backend)
    if rows.shape[0]:
        with torch.no_grad():
            run(rows, positions, ring_slot, ring, held, fmt, group)


def _fake(*args: object) -> None:
    """Return nothing, as the operation does."""


_op = register(
    "append_swa(Tensor rows, Tensor positions, Tensor ring_slot, Tensor(a!) codes, "
    "Tensor(b!)? rope, Tensor(c!)? scale, Tensor(d!) held, str row_format, int group, "
    "str? backend) -> ()",
    _run,
    _fake,
)
