"""Tiles of hybrid attention, from sizes alone: so the bits of a result depend on nothing else."""

from typing import NamedTuple

_MOST_HEADS = 64
_MIN_ROWS = 16  # a side of a matrix product in Triton is at least this


class Tile(NamedTuple):
    """What one program holds at a time, and how it is compiled."""

    m: int  # query heads
    n: int  # rows
    warps: int
    stages: int


def choose_tile(is_bf16: bool, width: int, heads: int, compute: tuple[int, int] | None) -> Tile:
    """Choose the tile.

    Args:
        is_bf16: Whether products are of BF16; else they are of FP32.
        width: Channels of a padded row.
        heads: Query heads.
        compute: Compute capability, None for the interpreter.
    """
    if not is_bf16:
        return Tile(_MIN_ROWS, 16, 8 if width > 256 else 4, 1)
    # from 9.0 on, a group of warps multiplies 64 rows out of shared memory; otherwise registers
    # hold both sides, and more than 16 rows would not fit
    m = _MOST_HEADS if heads > 32 and (compute is None or compute >= (9, 0)) else _MIN_ROWS
    return Tile(m, 64 if width <= 256 else 32, 8 if width > 256 else 4, 3)
