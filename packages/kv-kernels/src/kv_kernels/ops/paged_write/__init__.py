"""The whole write of a step: split, norm, RoPE, and store, quantised where the layer is INT8."""

import torch
from kv_core.checks import check_tensor
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat
from kv_core.step import Step
from torch import Tensor

from kv_kernels.library import call_query, dense, register
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.ops.paged_inputs import check_step
from kv_kernels.ops.qkv_inputs import Rope, check_qkv
from kv_kernels.ops.step_values import check_finite, check_positions, check_slots
from kv_kernels.registry import find


def paged_write(
    layer: KVLayer,
    step: Step,
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    rope: Rope,
    eps: float = 1e-6,
    doubled_tables: bool = False,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor:
    """Store the keys and values of a packed projection and return its queries.

    What is stored and returned is, bit for bit, what ``split_qkv_norm_rope`` and then ``append``
    make in the same backend: norm and RoPE in FP32, one rounding to the dtype of ``qkv``, and what
    was rounded is stored or quantised.

    Args:
        layer: Written, where ``step.slots`` point and nowhere else.
        step: Of it ``slots`` and ``positions`` are used. They are two facts: positions only turn,
            slots only store.
        qkv: ``[T, (Hq + 2H) * D]`` in FP32, FP16 or BF16: all query heads, all key heads, all
            value heads. Hq follows from the width.
        q_norm: ``[D]`` weight of an RMS norm over each query head, or None for no norm.
        k_norm: The same for key heads.
        cos: ``[max_pos, R/2]``, or with ``doubled_tables`` ``[T, R]``; R <= D elements of a head
            are rotated, the others pass. None with ``rope="none"``.
        sin: Like ``cos``.
        rope: "half" rotates elements R/2 apart (GPT-NeoX, Hugging Face), "interleaved"
            neighbours (GPT-J, GGUF Llama), "none" nothing.
        eps: Of the norm.
        doubled_tables: The tables are as Hugging Face passes them to attention: two equal halves,
            taken at each token's position already.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        checked: Read slots, positions and what is to be quantised, and refuse what is wrong with
            them. This waits for the device.

    Returns:
        Queries ``[T, Hq, D]`` in the dtype of ``qkv``, also of tokens that store nothing.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: A tensor does not fit the layer or the step, or the tables do not fit D.
        SpecError: There is no such ``rope``, or tables are given or missing against it; or
            ``checked``, and a slot is negative and not -1, past the end, used twice or in the null
            block, a position is outside the tables, or a number that is to be quantised is not
            finite.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad. In
            every case nothing was written.
    """
    check_step(layer, step)
    spec = layer.spec
    rotation = check_qkv(
        "paged_write", qkv, q_norm, k_norm, cos, sin, step.positions, kv_heads=spec.kv_heads,
        head_dim=spec.head_dim, rope=rope, eps=eps, doubled_tables=doubled_tables,
    )  # fmt: skip
    check_tensor(
        "qkv", qkv, "T (Hq+2H)*D", {"T": step.num_tokens}, device=layer.device,
        hint="T is the tokens of the step with its padding",
    )  # fmt: skip
    if checked:
        check_slots(layer, step)
        if rotation.cos is not None and rotation.positions is not None:
            check_positions(rotation.positions, rotation.cos.shape[0], step.slots)
        if layer.k_scale is not None or layer.v_scale is not None:
            check_finite("qkv", qkv.unflatten(1, (-1, spec.head_dim)), step)
    q: Tensor = _op(
        qkv, q_norm, k_norm, *rotation[:3], step.slots,
        layer.k, layer.v, layer.k_scale, layer.v_scale,
        rope, rotation.eps, spec.k_format.name, spec.v_format.name, backend,
    )  # fmt: skip
    return q


def _run(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    rope: str,
    eps: float,
    k_format: str,
    v_format: str,
    backend: str | None,
) -> Tensor:
    H, D = k_cache.shape[2:]
    query = call_query(
        "paged_write", KVFormat[k_format], KVFormat[v_format], qkv.device, qkv.dtype, D,
        dense(qkv, q_norm, k_norm, cos, sin, k_cache, v_cache),
        group=qkv.shape[1] // D // H - 2,
    )  # fmt: skip
    run = find(query, backend)
    if not qkv.shape[0]:
        return qkv.new_empty(0, qkv.shape[1] // D - 2 * H, D)
    with torch.no_grad():
        cache = CacheTensors(k_cache, v_cache, k_scale, v_scale)
        q: Tensor = run(qkv, q_norm, k_norm, cos, sin, positions, slots, cache, rope, eps)
    return q


def _fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    slots: Tensor,
    k_cache: Tensor,
    *args: object,
) -> Tensor:
    H, D = k_cache.shape[2:]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // D - 2 * H, D)


_op = register(
    "paged_write(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, "
    "Tensor? positions, Tensor slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, str rope, float eps, str k_format, str v_format, "
    "str? backend) -> Tensor",
    _run,
    _fake,
)
