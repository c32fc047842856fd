"""Store the keys and values of a step's tokens in a layer."""

import torch
from kv_core.checks import check_tensor
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat
from kv_core.step import Step
from torch import Tensor

from kv_kernels.library import call_query, dense, refuse_grad, register
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_inputs import check_rows, check_step
from kv_kernels.ops.step_values import check_finite, check_slots
from kv_kernels.registry import find


def append(
    layer: KVLayer,
    step: Step,
    k: Tensor,
    v: Tensor,
    *,
    backend: str | None = None,
    checked: bool = False,
) -> None:
    """Store each token's key and value at its slot, quantised where the layer is INT8.

    Args:
        layer: Written, where ``step.slots`` point and nowhere else.
        step: Of it only ``slots`` are used; one outside ``[0, P * N)`` stores nothing.
        k: ``[T, H, D]`` keys in FP32, FP16 or BF16, any strides, rotated already.
        v: ``[T, H, D]`` values in the dtype of ``k``.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read the slots, and what is to be quantised, and refuse what is wrong with them.
            This waits for the device.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: ``k`` or ``v`` does not fit the layer, or has not the tokens of the step.
        SpecError: ``checked``, and a slot is negative and not -1, past the end, used twice or in
            the null block, or a number that is to be quantised is not finite.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad. In
            every case nothing was written.
    """
    check_step(layer, step)
    check_rows("k", k, "H", layer, step)
    check_rows("v", v, "H", layer, step)
    check_tensor("v", v, "T H D", {}, dtype=k.dtype)
    refuse_grad("append", (k, v))
    if checked:
        check_slots(layer, step)
        if layer.k_scale is not None:
            check_finite("k", k, step)
        if layer.v_scale is not None:
            check_finite("v", v, step)
    _op(
        k, v, step.slots, layer.k, layer.v, layer.k_scale, layer.v_scale,
        layer.spec.k_format.name, layer.spec.v_format.name, backend,
    )  # fmt: skip


def _run(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_format: str,
    v_format: str,
    backend: str | None,
) -> None:
    query = call_query(
        "append", KVFormat[k_format], KVFormat[v_format], k.device, k.dtype, k.shape[2],
        dense(k, v, k_cache, v_cache),
    )  # fmt: skip
    run = find(query, backend)
    if k.shape[0]:
        with torch.no_grad():
            run(k, v, slots, CacheTensors(k_cache, v_cache, k_scale, v_scale))


def _fake(*args: object) -> None:
    """Return nothing, as the operation does."""


_op = register(
    "append(Tensor k, Tensor v, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, str k_format, str v_format, str? backend) -> ()",
    _run,
    _fake,
)
