"""Stored rows and keys of a hybrid cache looked up by index, for the torch rows of the table."""

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 512  # entries of one product: a fixed size, so that a sum never depends on the step
ELEMENTS = 1 << 23  # decoded at a time, 32 MB


def take(stored: Iterable[Tensor | None], outer: Tensor, inner: Tensor) -> list[Tensor | None]:
    """Return ``tensor[outer, inner]`` of each; FP8 moves as bytes, for not every torch indexes it.

    Args:
        stored: ``[P, N, ...]`` each, any strides.
        outer: INT64 block or slot ids, in range.
        inner: INT64 rows, in range.
    """
    found: list[Tensor | None] = []
    for tensor in stored:
        if tensor is None:
            found.append(None)
        elif tensor.dtype.itemsize == 1:
            found.append(tensor.view(torch.uint8)[outer, inner].view(tensor.dtype))
        else:
            found.append(tensor[outer, inner])
    return found


def locate(
    entries: Tensor, block_table: Tensor, request_ids: Tensor, blocks: int, per_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block and the row of entries, in range, and whether the table leads to them.

    Args:
        entries: ``[n, c]`` INT64; negative ones lead nowhere.
        block_table: ``[B, M]``.
        request_ids: ``[n]`` request of each token, -1 for padding.
        blocks: P.
        per_block: N.
    """
    request = request_ids.long()[:, None]
    column = entries // per_block
    found = (entries >= 0) & (column < block_table.shape[1]) & (request >= 0)
    column = torch.where(found, column, 0)
    block = block_table[request.clamp(min=0), column].long()
    found &= (block >= 0) & (block < blocks)
    return torch.where(found, block, 0), entries % per_block, found


def bound(vis: Tensor, most: int) -> int:
    """Return how many entries have to be looked at: all that a table may have, on a device.

    The CPU is never waited for, so there the entries that are seen are counted.
    """
    return min(most, max(int(vis.max()), 0)) if vis.device.type == "cpu" else most
