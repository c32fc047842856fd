"""Store values and scores as FP32 by slot, both in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from kv_kernels.device_code import widen
from kv_kernels.launch import Launch, dense_ids, power_of_two, row_tile


@triton.jit(do_not_specialize=["T", "capacity", "N"])
def _store_kernel(
    value, score, slots, tail, T, capacity, N,
    value_t, score_t, tail_p, tail_n, tail_s,
    W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # one program stores the values of BLOCK_T tokens, or their scores
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + t, mask=t < T, other=-1).to(tl.int64)
    is_row = (slot >= 0) & (slot < capacity)
    slot = tl.where(is_row, slot, 0)
    block = slot // N
    target = tail + block * tail_p + (slot - block * N) * tail_n
    w = tl.arange(0, BLOCK_W)
    inside = is_row[:, None] & (w < W)[None, :]
    if tl.program_id(1) == 0:
        x = tl.load(value + t[:, None] * value_t + w[None, :], mask=inside, other=0.0)
        tl.store(target[:, None] + w[None, :], widen(x), mask=inside)
    else:
        x = tl.load(score + t[:, None] * score_t + w[None, :], mask=inside, other=0.0)
        tl.store(target[:, None] + tail_s + w[None, :], widen(x), mask=inside)


def launch(value: Tensor, score: Tensor, tail_slot: Tensor, tail: Tensor) -> Launch:
    """Prepare a write of values and scores."""
    T, W = value.shape
    block_w = power_of_two(W)
    block_t, _, warps = row_tile(2 * T, 1, block_w)
    arguments = (
        value, score, dense_ids(tail_slot), tail, T, tail.shape[0] * tail.shape[1], tail.shape[1],
        value.stride(0), score.stride(0), *tail.stride()[:3],
    )  # fmt: skip
    options = {"W": W, "BLOCK_T": block_t, "BLOCK_W": block_w, "num_warps": warps}
    return Launch(_store_kernel, (triton.cdiv(T, block_t), 2), arguments, options)


def run(value: Tensor, score: Tensor, tail_slot: Tensor, tail: Tensor) -> None:
    """Store values and scores by slot; see ``reference.run``."""
    launch(value, score, tail_slot, tail).run()
