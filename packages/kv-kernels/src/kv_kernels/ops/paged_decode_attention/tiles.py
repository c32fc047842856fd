"""Tiles and splits of paged attention, from sizes and bounds alone: nothing is tried out."""

import functools
from typing import NamedTuple

import torch

from kv_kernels.launch import power_of_two

MAX_HEADS = 64  # query heads of one key/value head in a tile; more are cut into several
MERGED_AT_ONCE = 64  # splits that a merging program holds

_MIN_ROWS = 16  # a side of a matrix product in Triton is at least this
_MIN_SPLIT = 128  # keys; fewer are not worth a split of their own
_MAX_SPLITS = 64
_PROGRAMS = 3  # that fit on one multiprocessor
_CPU_PROCESSORS = 2


class Tile(NamedTuple):
    """What one program holds at a time, and how it is compiled."""

    m: int  # rows: query heads of one or more queries
    n: int  # keys
    warps: int
    stages: int


@functools.cache
def choose_tile(
    dtype: torch.dtype, block_d: int, heads: int, max_query: int, is_invariant: bool
) -> Tile:
    """Choose the tile for queries of ``dtype`` and ``heads`` heads of D padded to ``block_d``.

    With ``is_invariant`` it does not depend on ``max_query``, so neither do the bits of a result.
    """
    rows = max(_MIN_ROWS, power_of_two(heads))
    if dtype == torch.float32:
        n, stages, most = 32 if block_d <= 128 else 16, 2, 32
    else:
        # the look-up of a block takes every second stage, so 5 keep two tiles of keys in flight
        n, stages, most = 64 if block_d <= 128 else 32, 5, 128 if block_d <= 128 else 64
    if is_invariant or max_query * heads <= 2 * rows or rows >= most:
        return Tile(rows, n, 4, stages)
    return Tile(most, n, 8 if most == 128 else 4, min(stages, 3))


def choose_splits(
    programs: int, max_context: int, keys: int, device: torch.device
) -> tuple[int, int]:
    """Choose into how many parts the keys are cut, and how many tiles a part has at least.

    Args:
        programs: How many there are without splits.
        max_context: Upper bound of a sequence's tokens.
        keys: Of one tile.
        device: Where the programs run.
    """
    wanted = _PROGRAMS * _processors(device) // programs
    splits = max(1, min(wanted, max_context // _MIN_SPLIT, _MAX_SPLITS))
    return splits, max(1, _MIN_SPLIT // keys)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
