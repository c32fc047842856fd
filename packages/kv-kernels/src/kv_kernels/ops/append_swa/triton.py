"""Encode rows and store them by slot: each element is read once, and padding not at all."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from kv_core.hybrid.rows import RowFormat, RowTensors
from torch import Tensor

from kv_kernels.device_code import store_stored_rows
from kv_kernels.launch import Launch, as_bytes, dense_ids, power_of_two, row_tile, strides


class RowSizes(NamedTuple):
    """How the channels of a stored row lie in a tile, and what a kernel takes as constants.

    Channels without a position come in groups, each padded to a power of two; then the last R.
    """

    W: int
    R: int
    GROUP: int
    SCALES: int
    BLOCK_G: int
    BLOCK_J: int
    BLOCK_R: int

    @property
    def width(self) -> int:
        """Channels of a padded tile without the last R, a power of two."""
        return self.BLOCK_G * self.BLOCK_J

    def constants(self) -> dict[str, Any]:
        """Return the constants by name."""
        return self._asdict()


def row_sizes(row_format: RowFormat, head_dim: int, rope_dim: int, group: int) -> RowSizes:
    """Return the sizes of a format; ``rope_dim`` may be 0 where rows are not quantised."""
    W = head_dim - rope_dim
    is_fp8 = row_format is RowFormat.FP8
    group, scales = (group, -(-W // group // 8) * 8) if is_fp8 else (max(W, 1), 0)
    return RowSizes(
        W=W, R=rope_dim, GROUP=group, SCALES=scales,
        BLOCK_G=power_of_two(max(scales, 1)), BLOCK_J=power_of_two(group),
        BLOCK_R=power_of_two(rope_dim),
    )  # fmt: skip


# only the number of tokens differs from step to step
@triton.jit(do_not_specialize=["T", "capacity", "N"])
def _store_kernel(
    rows, positions, slots, codes, rope, scale, held, T, capacity, N,
    rows_t, codes_p, codes_n, rope_p, rope_n, scale_p, scale_n, held_p, held_n,
    W: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = t < T
    slot = t
    if slots is not None:
        slot = tl.load(slots + t, mask=is_row, other=-1).to(tl.int64)
        is_row = is_row & (slot >= 0) & (slot < capacity)
        slot = tl.where(is_row, slot, 0)
    store_stored_rows(
        rows + t * rows_t, is_row, slot, codes, rope, scale, N,
        codes_p, codes_n, rope_p, rope_n, scale_p, scale_n,
        W, R, GROUP, SCALES, BLOCK_G, BLOCK_J, BLOCK_R,
    )  # fmt: skip
    if held is not None:
        block = slot // N
        at = held + block * held_p + (slot - block * N) * held_n
        position = tl.load(positions + t, mask=is_row, other=-1)
        tl.store(at, position.to(held.dtype.element_ty), mask=is_row)


def launch(
    rows: Tensor,
    positions: Tensor | None,
    slots: Tensor | None,
    stored: RowTensors,
    held: Tensor | None,
    row_format: RowFormat,
    group: int,
) -> Launch:
    """Prepare a write; ``slots`` None stores row t in slot t, ``held`` None no positions."""
    T, D = rows.shape
    outer, N = stored.codes.shape[:2]
    rope_dim = 0 if stored.rope is None else stored.rope.shape[-1]
    sizes = row_sizes(row_format, D, rope_dim, group)
    block_t, _, warps = row_tile(T, 1, sizes.width)
    arguments = (
        rows,
        None if positions is None else dense_ids(positions),
        None if slots is None else dense_ids(slots),
        as_bytes(stored.codes), stored.rope, stored.scale, held, T, outer * N, N,
        rows.stride(0), *strides(stored.codes, 2), *strides(stored.rope, 2),
        *strides(stored.scale, 2), *strides(held, 2),
    )  # fmt: skip
    options = {
        **sizes.constants(),
        "BLOCK_T": block_t,
        "num_warps": warps,
        "enable_fp_fusion": False,
    }
    return Launch(_store_kernel, (triton.cdiv(T, block_t),), arguments, options)


def run(
    rows: Tensor,
    positions: Tensor,
    ring_slot: Tensor,
    ring: RowTensors,
    held: Tensor,
    row_format: RowFormat,
    group: int,
) -> None:
    """Store rows and their positions in the rings; see ``reference.run``."""
    launch(rows, positions, ring_slot, ring, held, row_format, group).run()
