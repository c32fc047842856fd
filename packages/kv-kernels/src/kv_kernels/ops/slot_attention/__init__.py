"""Attention from the tokens of one pass over text, the chunk itself and the cached memory."""

from typing import Any, Literal, overload

import torch
from kv_core.fixed_slot import LayerKV, QuantizedLayerKV
from kv_core.spec import KVFormat
from torch import Tensor

from kv_kernels.library import capability, register
from kv_kernels.masks import SegmentMask
from kv_kernels.ops.slot_attention.inputs import check_inputs
from kv_kernels.ops.slot_attention.parts import Mask, Part, empty_output
from kv_kernels.registry import Query, find


@overload
def slot_attention(
    q: Tensor,
    chunk: LayerKV,
    mask: SegmentMask,
    *,
    text: LayerKV | None = None,
    memory: LayerKV | QuantizedLayerKV | None = None,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def slot_attention(
    q: Tensor,
    chunk: LayerKV,
    mask: SegmentMask,
    *,
    text: LayerKV | None = None,
    memory: LayerKV | QuantizedLayerKV | None = None,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def slot_attention(
    q: Tensor,
    chunk: LayerKV,
    mask: SegmentMask,
    *,
    text: LayerKV | None = None,
    memory: LayerKV | QuantizedLayerKV | None = None,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend text, chunk and memory, in this order, where ``mask`` lets a query see a key.

    The parts are not copied where the kernel can read them as they are: the ``torch`` row always,
    the ``flex`` row when they are adjacent slices of one buffer. The ``flex`` row needs finite
    storage, also where no query looks; for the ``torch`` row such tokens may hold anything.

    Args:
        q: ``[B, Hq, N, D]`` queries in FP32, FP16 or BF16, any strides.
        chunk: Keys ``[B, H, *, D]`` and values ``[B, H, *, Dv]`` in the dtype of ``q``; Hq is a
            multiple of H. May hold more tokens than ``q``.
        mask: Who sees whom, for N queries and as many keys as the parts hold together, on the
            device of ``q``.
        text: Like ``chunk``, or None for no tokens.
        memory: Like ``chunk``, or INT8 codes with FP32 scales ``[B, H, *]``, or None.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        backend: Name of the row to use. It is used or refused, never replaced; by default the
            first row of the table that can run the call.
        return_lse: Return the log-sum-exp of the scores of each query too.

    Returns:
        ``[B, Hq, N, Dv]`` in the dtype of ``q``, laid out like ``q``; with ``return_lse`` also FP32
        ``[B, Hq, N]``. A query that sees nothing gets 0, and minus infinity.

    Raises:
        DtypeError: A tensor is of another type, dtype or device than the call needs.
        ShapeError: A tensor does not fit the others, or the mask does not fit the tensors.
        SpecError: ``scale`` is not a finite number.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad.
        CapacityError: The ``flex`` row may not compile yet another shape.
    """
    inputs = check_inputs(q, chunk, mask, text, memory, scale)
    # on the CPU only flex reads block lists, so nobody builds them for the torch row
    blocks = _block_lists(mask) if q.is_cuda or backend == "flex" else []
    out, lse = _op(
        q, *inputs.text[:2], *inputs.chunk[:2], *inputs.memory,
        mask.table, mask.q_segment, mask.kv_segment, blocks, list(mask.block_size),
        inputs.scale, inputs.format.name, inputs.format.name, backend, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _block_lists(mask: SegmentMask) -> list[Tensor]:
    blocks: Any = mask.block_mask()
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return [getattr(blocks, name) for name in names]


def _run(
    q: Tensor,
    text_k: Tensor | None,
    text_v: Tensor | None,
    chunk_k: Tensor,
    chunk_v: Tensor,
    memory_k: Tensor | None,
    memory_v: Tensor | None,
    memory_k_scale: Tensor | None,
    memory_v_scale: Tensor | None,
    table: Tensor,
    q_segment: Tensor,
    kv_segment: Tensor,
    blocks: list[Tensor],
    block_size: list[int],
    scale: float,
    k_format: str,
    v_format: str,
    backend: str | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    parts = [Part(chunk_k, chunk_v)]
    if text_k is not None and text_v is not None:
        parts.insert(0, Part(text_k, text_v))
    if memory_k is not None and memory_v is not None:
        parts.append(Part(memory_k, memory_v, memory_k_scale, memory_v_scale))
    block_q, block_kv = block_size
    query = Query(
        op="slot_attention",
        k_format=KVFormat[k_format],
        v_format=KVFormat[v_format],
        device=q.device.type,
        capability=capability(q.device),
        dtype=q.dtype,
        k_dim=q.shape[3],
        v_dim=chunk_v.shape[3],
        group=q.shape[1] // chunk_k.shape[1],
        block_size=(block_q, block_kv),
        lse=return_lse,
    )
    mask = Mask(table, q_segment, kv_segment, blocks, (block_q, block_kv))
    attend = find(query, backend)
    # autocast would have the FP32 products of a row done in half precision
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, lse = attend(q, parts, mask, scale, return_lse)
    return out, lse


def _fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    chunk_v, return_lse = args[3], args[-1]
    shape = q.shape[:3] if return_lse else (0,)
    return empty_output(q, chunk_v.shape[3]), q.new_empty(shape, dtype=torch.float32)


_op = register(
    "slot_attention(Tensor q, Tensor? text_k, Tensor? text_v, Tensor chunk_k, Tensor chunk_v, "
    "Tensor? memory_k, Tensor? memory_v, Tensor? memory_k_scale, Tensor? memory_v_scale, "
    "Tensor table, Tensor q_segment, Tensor kv_segment, Tensor[] blocks, int[] block_size, "
    "float scale, str k_format, str v_format, str? backend, bool return_lse) -> "
    "(Tensor out, Tensor lse)",
    _run,
    _fake,
)
