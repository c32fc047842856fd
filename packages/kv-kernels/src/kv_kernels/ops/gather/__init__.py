"""Copy what sequences have stored into contiguous tensors."""

import torch
from kv_core.checks import check_int
from kv_core.errors import DtypeError
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat
from kv_core.step import Step
from torch import Tensor

from kv_kernels.library import FLOATS, call_query, dense, register
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_inputs import check_step
from kv_kernels.ops.step_values import check_tables
from kv_kernels.registry import find


def gather(
    layer: KVLayer,
    step: Step,
    *,
    length: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the stored keys and values of each sequence in order, dequantised.

    Args:
        layer: Read, at the tokens that ``step`` says are stored and nowhere else.
        step: Of it ``block_table`` and ``context_lens`` are used.
        length: Tokens of the result, ``step.max_context`` by default. Longer sequences are cut.
        dtype: Of the result, FP32, FP16 or BF16. By default as stored; INT8 takes the other side's
            dtype, and FP32 where both are INT8.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read tables and lengths, and refuse what is wrong with them. This waits for the
            device.

    Returns:
        Keys and values ``[B, length, H, D]``, zeros from each sequence's ``context_lens`` on.

    Raises:
        DtypeError: Not a layer and a step on one device, or ``dtype`` is no floating dtype.
        SpecError: ``length`` is negative; or ``checked``, and a length or a block id that is used
            is out of range.
        NoKernelError: No row can run the call, or ``backend`` cannot.
    """
    check_step(layer, step)
    length = step.max_context if length is None else check_int("length", length, minimum=0)
    if dtype is None:
        stored = [fmt for fmt in (layer.spec.k_format, layer.spec.v_format) if not fmt.is_quantized]
        dtype = stored[0].dtype if stored else torch.float32
        if len(stored) == 2:
            dtype = torch.promote_types(stored[0].dtype, stored[1].dtype)
    elif dtype not in FLOATS:
        raise DtypeError(
            f"dtype must be torch.float32, torch.float16 or torch.bfloat16, got {dtype}; leave it "
            "out for the stored one"
        )
    if checked:
        check_tables(layer, step)
    k, v = _op(
        layer.k, layer.v, layer.k_scale, layer.v_scale, step.block_table, step.context_lens,
        length, dtype, layer.spec.k_format.name, layer.spec.v_format.name, backend,
    )  # fmt: skip
    return k, v


def _run(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    length: int,
    dtype: torch.dtype,
    k_format: str,
    v_format: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    query = call_query(
        "gather", KVFormat[k_format], KVFormat[v_format], k_cache.device, dtype, k_cache.shape[3],
        dense(k_cache, v_cache),
    )  # fmt: skip
    run = find(query, backend)
    if not block_table.shape[0] or not length:
        k, v = _fake(k_cache, v_cache, k_scale, v_scale, block_table, context_lens, length, dtype)
    else:
        with torch.no_grad():
            cache = CacheTensors(k_cache, v_cache, k_scale, v_scale)
            k, v = run(cache, block_table, context_lens, length, dtype)
    return k, v


def _fake(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    context_lens: Tensor,
    length: int,
    dtype: torch.dtype,
    *args: object,
) -> tuple[Tensor, Tensor]:
    shape = (block_table.shape[0], length, *k_cache.shape[2:])
    return k_cache.new_empty(shape, dtype=dtype), v_cache.new_empty(shape, dtype=dtype)


_op = register(
    "gather(Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, Tensor block_table, "
    "Tensor context_lens, SymInt length, ScalarType dtype, str k_format, str v_format, "
    "str? backend) -> (Tensor k, Tensor v)",
    _run,
    _fake,
)
