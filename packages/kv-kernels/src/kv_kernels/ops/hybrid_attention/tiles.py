"""Tiles of hybrid attention, from sizes alone.

The bits of a result depend on the rows of a tile, on the groups whose products are one sum and on
the tile's heads; all of these are the same for any number of tokens.
"""

from typing import NamedTuple

MIN_SIDE = 16  # a side of a matrix product in Triton is at least this
GROUP = 64  # channels of a group of which several fit; rows without scales are cut into such
_BUSY = 264  # programs, two for each multiprocessor of an H200


class Tile(NamedTuple):
    """What the programs hold at a time, and how they are compiled."""

    m: int  # query heads
    n: int  # rows
    sum: int  # channels whose products are one sum
    score_warps: int
    score_stages: int
    sum_warps: int
    sum_stages: int


def choose_tile(is_bf16: bool, heads: int, group: int, compute: tuple[int, int] | None) -> Tile:
    """Choose the tile.

    Args:
        is_bf16: Whether products are of BF16; else they are of FP32.
        heads: Query heads.
        group: Channels of a padded group.
        compute: Compute capability, None for the interpreter.
    """
    if not is_bf16:
        return Tile(MIN_SIDE, 16, 64, 4, 1, 4, 1)
    # from 9.0 on, a group of warps multiplies 64 rows out of shared memory
    m = 64 if heads > 32 and (compute is None or compute >= (9, 0)) else MIN_SIDE
    if group > GROUP:  # nothing is loaded ahead, for there is no room
        return Tile(m, 32, group, 8, 1, 8, 1)
    return Tile(m, 64, 128, 4, 3, 4, 5)


def choose_slots(programs: int, groups: int, group: int) -> int:
    """Choose how many groups of channels one program sums: fewer where there is little to do.

    Args:
        programs: How many there are for each such choice of groups.
        groups: How many a row has.
        group: Channels of a padded group.
    """
    most = 4 if group <= GROUP else 1
    slots = 1
    while slots < min(groups, most) and programs * groups > _BUSY * slots:
        slots *= 2
    return slots
