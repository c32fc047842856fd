"""Write and read rows of paged storage by slot, in plain torch: what every kernel has to equal.

A slot is ``block * block_size + offset``. No function here waits for the device, and no shape
depends on values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_core.codecs.int8 import dequantize_int8, quantize_int8


@torch.no_grad()
def scatter_rows(storage: Sequence[Tensor], values: Sequence[Tensor], slots: Tensor) -> None:
    """Store ``values[...][t]`` at ``slots[t]``; a slot outside the storage stores nothing.

    Bytes are moved as they are, FP8 through a view of bytes, for not every indexing op takes it.

    Args:
        storage: ``[P, N, ...]`` each, any strides; written.
        values: ``[T, ...]`` of the same dtypes.
        slots: ``[T]`` INT32 or INT64. Where two tokens share a slot, either may stay.
    """
    if not slots.shape[0] or not storage[0].numel():
        return
    P, N = storage[0].shape[:2]
    slots = slots.long()
    stored = (slots >= 0) & (slots < P * N)
    # tokens that store nothing repeat what the first that does stores, or what slot 0 holds: so the
    # shapes are fixed and no live row is ever written with anything but its own value
    # (an index of one element: indexing with a scalar one would wait for the device)
    first = stored.long().argmax(0, keepdim=True)
    slots = torch.where(stored, slots, slots[first] * stored[first])
    block, offset = slots // N, slots % N
    for target, rows in zip(storage, values, strict=True):
        if target.dtype.itemsize == 1:
            target, rows = target.view(torch.uint8), rows.view(torch.uint8)
        keeps = stored.view(-1, *[1] * (rows.dim() - 1))
        fallback = torch.where(keeps[first], rows[first], target[0, 0])
        target[block, offset] = torch.where(keeps, rows, fallback)


@torch.no_grad()
def write_rows(cache: Tensor, scale: Tensor | None, rows: Tensor, slots: Tensor) -> None:
    """Store ``rows[t]`` at ``slots[t]``, quantised where there are scales; see ``scatter_rows``.

    Args:
        cache: ``[P, N, H, D]`` storage, any strides; written.
        scale: ``[P, N, H]`` FP32 where ``cache`` holds INT8 codes, else None; written.
        rows: ``[T, H, D]`` floating.
        slots: ``[T]`` INT32 or INT64.
    """
    if scale is None:
        scatter_rows([cache], [rows.to(cache.dtype)], slots)
    elif rows.numel():
        scatter_rows([cache, scale], quantize_int8(rows), slots)


@torch.no_grad()
def read_rows(
    cache: Tensor, scale: Tensor | None, slots: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the row of each slot, zeros for a slot outside the storage.

    Args:
        cache: ``[P, N, H, D]`` storage, any strides.
        scale: ``[P, N, H]`` where ``cache`` holds INT8 codes, else None.
        slots: ``[...]`` INT32 or INT64.
        dtype: Of the result; by default that of ``cache``, or FP32 for INT8.

    Returns:
        ``[..., H, D]``.
    """
    P, N = cache.shape[:2]
    slots = slots.long()
    stored = (slots >= 0) & (slots < P * N)
    slots = torch.where(stored, slots, 0)
    block, offset = slots // N, slots % N
    rows = cache[block, offset]
    if scale is not None:
        rows = dequantize_int8(rows, scale[block, offset], dtype or torch.float32)
    elif dtype is not None:
        rows = rows.to(dtype)
    return rows.masked_fill(~stored[..., None, None], 0)


def context_slots(
    block_table: Tensor, context_lens: Tensor, block_size: int, length: int
) -> Tensor:
    """Return ``[B, length]`` the slot of every stored token of each sequence in order, then -1.

    Args:
        block_table: ``[B, M]``; entries past a sequence's last block are not used.
        context_lens: ``[B]`` tokens of each sequence.
        block_size: N.
        length: Width of the result.
    """
    M = block_table.shape[1]
    index = torch.arange(length, device=block_table.device)
    block = block_table.long()[:, (index // block_size).clamp(max=M - 1)]
    inside = (index < context_lens.long()[:, None]) & (index < M * block_size)
    return torch.where(inside, block * block_size + index % block_size, -1)
