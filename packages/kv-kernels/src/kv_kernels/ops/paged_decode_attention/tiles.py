"""Tiles and splits of paged attention, from sizes and bounds alone: nothing is tried out."""

import functools
from typing import NamedTuple

import torch

from kv_kernels.launch import power_of_two

MERGED_AT_ONCE = 64  # splits that a merging program holds

_MAX_HEADS = 64  # query heads of one key/value head in a tile; more are cut into several
_MAX_CODED = 8  # rows of a tile that are split into bytes
_MIN_ROWS = 16  # a side of a matrix product in Triton is at least this
_MAX_SPLITS = 64
_CPU_PROCESSORS = 2


class Tile(NamedTuple):
    """What one program holds at a time, and how it is compiled."""

    heads: int  # query heads
    m: int  # rows: query heads of one or more queries; below 16 they are split into bytes
    n: int  # keys
    warps: int
    stages: int
    enough: int = 3  # programs that keep a multiprocessor busy
    most: int = 3  # programs that it holds
    split: int = 128  # keys; fewer are not worth a split of their own


@functools.cache
def choose_tile(
    dtype: torch.dtype, block_d: int, group: int, max_query: int, is_invariant: bool, is_int8: bool
) -> Tile:
    """Choose the tile for queries of ``dtype`` and groups of heads of D padded to ``block_d``.

    With ``is_invariant`` it does not depend on ``max_query``, so neither do the bits of a result.
    """
    rows = group if is_invariant else group * max(max_query, 1)
    if is_int8 and dtype != torch.float32 and rows <= 2 * _MAX_CODED:
        heads = min(group, _MAX_CODED)
        rows = min(max(2, power_of_two(rows)), _MAX_CODED)
        return Tile(heads, rows, 32, 1, 6, enough=4, most=8, split=32)
    heads = min(group, _MAX_HEADS)
    rows = max(_MIN_ROWS, power_of_two(heads))
    if dtype == torch.float32:
        n, stages, most = 32 if block_d <= 128 else 16, 2, 32
    else:
        # the look-up of a block takes every second stage, so 5 keep two tiles of keys in flight
        n, stages, most = 64 if block_d <= 128 else 32, 5, 128 if block_d <= 128 else 64
    if is_invariant or max_query * heads <= 2 * rows or rows >= most:
        return Tile(heads, rows, n, 4, stages)
    return Tile(heads, most, n, 8 if most == 128 else 4, min(stages, 3))


def choose_splits(
    programs: int, max_context: int, tile: Tile, device: torch.device
) -> tuple[int, int]:
    """Choose into how many parts the keys are cut, and how many tiles a part has at least.

    Args:
        programs: How many there are without splits.
        max_context: Upper bound of a sequence's tokens.
        tile: Of one program.
        device: Where the programs run.
    """
    processors = _processors(device)
    # a few more programs than can run at once would take twice as long
    wanted = min(-(-tile.enough * processors // programs), tile.most * processors // programs)
    splits = max(1, min(wanted, max_context // tile.split, _MAX_SPLITS))
    return splits, max(1, tile.split // tile.n)


def has_overlap(compute: tuple[int, int] | None) -> bool:
    """Whether a kernel can start while the one that it waits for still runs."""
    return compute is not None and compute >= (9, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
