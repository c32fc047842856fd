"""What append_swa means: kv-core's codec, and its scatter by slot."""

from kv_core.hybrid import reference
from kv_core.hybrid.rows import RowFormat, RowTensors, encode_rows
from torch import Tensor


def run(
    rows: Tensor,
    positions: Tensor,
    ring_slot: Tensor,
    ring: RowTensors,
    held: Tensor,
    row_format: RowFormat,
    group: int,
) -> None:
    """Store rows and their positions in the rings.

    Args:
        rows: ``[T, D]``.
        positions: ``[T]``.
        ring_slot: ``[T]`` row of the rings, ``slot * ring + position % ring``; -1 for none.
        ring: ``[B, ring, ...]``; written.
        held: ``[B, ring]`` INT32 positions; written.
        row_format: How rows are stored.
        group: Channels of an FP8 row that share a scale.
    """
    encoded = encode_rows(rows, row_format, 0 if ring.rope is None else ring.rope.shape[-1], group)
    reference.append_swa(ring, held, encoded, positions.to(held.dtype), ring_slot)
