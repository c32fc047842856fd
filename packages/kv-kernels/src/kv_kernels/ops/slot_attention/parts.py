"""What one call attends, part by part, and how the parts become one buffer."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Keys and values of one run of tokens: text, chunk or memory."""

    k: Tensor  # [B, H, S, D]
    v: Tensor  # [B, H, S, Dv]
    k_scale: Tensor | None = None  # [B, H, S] fp32 where k holds INT8 codes
    v_scale: Tensor | None = None

    def narrow(self, start: int, stop: int) -> "Part":
        """Borrow the tokens ``[start, stop)``."""
        cut = slice(start, stop)
        k_scale = None if self.k_scale is None else self.k_scale[:, :, cut]
        v_scale = None if self.v_scale is None else self.v_scale[:, :, cut]
        return Part(self.k[:, :, cut], self.v[:, :, cut], k_scale, v_scale)


class Mask(NamedTuple):
    """The tensors of a ``SegmentMask``, as they cross into the registered op."""

    table: Tensor  # bool [nq + 1, nk + 1]
    q_segment: Tensor  # int32, N rounded up to whole blocks
    kv_segment: Tensor  # int32, S rounded up to whole blocks
    blocks: Sequence[Tensor]  # kv counts, kv indices, full counts, full indices; or nothing
    block_size: tuple[int, int]


def empty_output(q: Tensor, v_dim: int) -> Tensor:
    """Allocate ``[B, Hq, N, Dv]`` in the order of axes that ``q`` has.

    Queries that are a view of ``[B, N, Hq, D]``, as a projection leaves them, get an output that
    goes back to ``[B, N, Hq * Dv]`` without a copy.
    """
    return q.new_empty_strided((*q.shape[:3], v_dim), output_stride(q, v_dim))


def output_stride(q: Tensor, v_dim: int) -> tuple[int, int, int, int]:
    """Return the strides of an output for ``q``."""
    _, Hq, N, _ = q.shape
    if q.stride(1) < q.stride(2):
        return Hq * N * v_dim, v_dim, Hq * v_dim, 1
    return Hq * N * v_dim, N * v_dim, v_dim, 1


def join(parts: Sequence[Part], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all keys and all values as one tensor each.

    Slices that lie one behind the other in one buffer are joined as a view. Anything else is copied
    (INT8: dequantised) into a scratch buffer that the next call on this thread and stream reuses.
    """
    k = _join([part.k for part in parts], [part.k_scale for part in parts], "k", dtype)
    v = _join([part.v for part in parts], [part.v_scale for part in parts], "v", dtype)
    return k, v


def scratch_nbytes() -> int:
    """Return the bytes that this thread keeps for joining parts; 0 while views were enough."""
    return sum(buffer.nbytes for buffer in _scratch.buffers.values())


def release_scratch() -> None:
    """Give the scratch buffers of this thread back; the next call that copies makes new ones."""
    _scratch.buffers.clear()


def _join(
    tensors: list[Tensor], scales: list[Tensor | None], role: str, dtype: torch.dtype
) -> Tensor:
    if all(scale is None for scale in scales) and (view := _adjacent(tensors)) is not None:
        return view
    B, H, _, D = tensors[0].shape
    S = sum(tensor.shape[2] for tensor in tensors)
    out = _scratch.take(role, (B, H, S, D), dtype, tensors[0].device)
    start = 0
    for tensor, scale in zip(tensors, scales, strict=True):
        target = out[:, :, start : start + tensor.shape[2]]
        if scale is None:
            target.copy_(tensor)
        else:
            torch.mul(tensor, scale[..., None], out=target)
        start += tensor.shape[2]
    return out


def _adjacent(tensors: list[Tensor]) -> Tensor | None:
    """Return one view over slices that follow each other on axis 2, or None if they do not."""
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        is_next = (
            tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.storage_offset() == end
            and tensor.stride() == first.stride()
        )
        if not is_next:
            return None
        end += tensor.shape[2] * tensor.stride(2)
    B, H, _, D = first.shape
    S = sum(tensor.shape[2] for tensor in tensors)
    return first.as_strided((B, H, S, D), first.stride(), first.storage_offset())


class _Scratch(threading.local):
    """Flat buffers, one for each role, dtype, device and stream; a thread sees only its own."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[object, ...], Tensor] = {}

    def take(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        stream = None
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                # a graph must own what it writes: a later growth would free it under the graph
                return torch.empty(shape, dtype=dtype, device=device)
            stream = torch.cuda.current_stream(device).cuda_stream
        key = (role, dtype, device, stream)
        size = torch.Size(shape).numel()
        held = self.buffers.get(key)
        if held is None or held.numel() < size:
            # the smaller buffer goes first, so that both never exist at once
            self.buffers.pop(key, None)
            # what inference mode makes could not be written by a later call outside it
            with torch.inference_mode(False):
                held = self.buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)


_scratch = _Scratch()
