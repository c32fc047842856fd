"""What a call of slot_attention is given, checked once and taken apart."""

from typing import NamedTuple

import torch
from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, ShapeError
from kv_core.fixed_slot import LayerKV, QuantizedLayerKV
from kv_core.spec import KVFormat
from torch import Tensor

from kv_kernels.library import FLOATS, checked_scale, refuse_grad
from kv_kernels.masks import SegmentMask


class Sides(NamedTuple):
    """The tensors of one part as the registered op takes them, all None for a part left out."""

    k: Tensor | None = None
    v: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Inputs(NamedTuple):
    """The checked parts of a call."""

    text: Sides
    chunk: Sides
    memory: Sides
    format: KVFormat  # of the memory, or of the chunk where there is no memory
    scale: float


def check_inputs(
    q: Tensor,
    chunk: LayerKV,
    mask: SegmentMask,
    text: LayerKV | None,
    memory: LayerKV | QuantizedLayerKV | None,
    scale: float | None,
) -> Inputs:
    """Check what ``slot_attention`` is given and take it apart.

    Raises:
        DtypeError: Something is of another type, dtype or device than the call needs.
        ShapeError: A tensor does not fit the others, or the mask does not fit the tensors.
        SpecError: ``scale`` is not a finite number.
        NoKernelError: An input requires grad.
    """
    check_tensor("q", q, "B Hq N D", {})
    if q.dtype not in FLOATS:
        raise DtypeError(f"q must be float32, float16 or bfloat16, got {q.dtype}; convert it")
    B, Hq, _, D = q.shape
    k, v = _floating("chunk", chunk)
    check_tensor("chunk.k", k, "B H T D", {"B": B, "D": D}, dtype=q.dtype, device=q.device)
    H, T = k.shape[1:3]
    if H == 0 or Hq % H:
        raise ShapeError(
            f"q must have a multiple of the H={H} heads of chunk.k, got Hq={Hq}; every key head "
            "serves as many query heads"
        )
    known = {"B": B, "H": H, "T": T}
    check_tensor("chunk.v", v, "B H T Dv", known, dtype=q.dtype, device=q.device)
    sizes = {"B": B, "H": H, "D": D, "Dv": v.shape[3]}
    if 0 in sizes.values():
        raise ShapeError(f"q, k and v need at least one sequence and D, Dv >= 1, got {sizes}")
    text_sides, memory_sides = Sides(), Sides()
    if text is not None:
        text_sides = Sides(*_floating("text", text))
        _check_part("text", text_sides, q, sizes)
    if memory is not None:
        memory_sides = _memory(memory)
        _check_part("memory", memory_sides, q, sizes)
    lengths = [0 if x is None else x.shape[2] for x in (text_sides.k, k, memory_sides.k)]
    _check_mask(mask, q, lengths)
    refuse_grad("slot_attention", [q, k, v, *text_sides, *memory_sides])
    kv_format = KVFormat.of(k.dtype if memory_sides.k is None else memory_sides.k.dtype)
    return Inputs(text_sides, Sides(k, v), memory_sides, kv_format, checked_scale(scale, D))


def _floating(name: str, pair: LayerKV) -> tuple[Tensor, Tensor]:
    if isinstance(pair, QuantizedLayerKV):
        raise DtypeError(
            f"{name} must be a LayerKV(k, v) of floating tensors, got a QuantizedLayerKV; only "
            "memory may be INT8"
        )
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise DtypeError(f"{name} must be a LayerKV(k, v), got {type(pair).__name__}")
    return pair[0], pair[1]


def _memory(memory: LayerKV | QuantizedLayerKV) -> Sides:
    if not isinstance(memory, tuple) or len(memory) not in (2, 4):
        raise DtypeError(
            "memory must be a LayerKV(k, v) or a QuantizedLayerKV(k, v, k_scale, v_scale), got "
            f"{type(memory).__name__}"
        )
    return Sides(*memory)


def _check_part(name: str, part: Sides, q: Tensor, sizes: dict[str, int]) -> None:
    is_quantized = part.k_scale is not None
    dtype = torch.int8 if is_quantized else q.dtype
    check_tensor(f"{name}.k", part.k, "B H S D", sizes, dtype=dtype, device=q.device)
    assert part.k is not None
    sizes = {**sizes, "S": part.k.shape[2]}
    check_tensor(f"{name}.v", part.v, "B H S Dv", sizes, dtype=dtype, device=q.device)
    if is_quantized:
        for side in ("k_scale", "v_scale"):
            scale = getattr(part, side)
            check_tensor(
                f"{name}.{side}", scale, "B H S", sizes, dtype=torch.float32, device=q.device
            )


def _check_mask(mask: SegmentMask, q: Tensor, lengths: list[int]) -> None:
    if not isinstance(mask, SegmentMask):
        raise DtypeError(
            f"mask must be a SegmentMask, got {type(mask).__name__}; make one with "
            "SegmentMask.build(table, q_lengths, kv_lengths)"
        )
    N = q.shape[2]
    if mask.q_len != N or mask.kv_len != sum(lengths):
        text, chunk, memory = lengths
        raise ShapeError(
            f"mask is for {mask.q_len} queries and {mask.kv_len} keys, got {N} queries and "
            f"{sum(lengths)} keys (text {text} + chunk {chunk} + memory {memory}); build a mask "
            "for exactly these lengths"
        )
    if mask.table.device != q.device:
        raise DtypeError(
            f"mask must be on {q.device}, got {mask.table.device}; build it with "
            f"device='{q.device}'"
        )
