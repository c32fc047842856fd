"""Hour-long rollouts: nothing grows once memory is full."""

import gc
import tracemalloc

import torch
from kv_rollout import ChunkRollout, SlotState
from rollout_toy import CONTROL_WIDTH, ToyModel, toy_geometry
from torch import Tensor


class Live:
    """Controls that are made when asked for, as a camera would."""

    def __init__(self, views: int, tokens: int):
        self.views, self.tokens_per_frame = views, tokens

    def tokens(self, start: int, end: int) -> Tensor:
        draw = torch.Generator().manual_seed(start)
        shape = (1, self.views, end - start, self.tokens_per_frame, CONTROL_WIDTH)
        return torch.randn(shape, generator=draw)


class Forgetful(ToyModel):
    """The toy model without its record of calls, which is meant to grow."""

    def prepare_rollout(self, setup, controls):
        return SlotState(self.network, setup, controls, device=self.device, dtype=self.dtype)


def live_rollout(chunks: int) -> ChunkRollout:
    geometry = toy_geometry(1 + 3 * chunks, given=0, frames_per_chunk=3, views=1, patch_w=2)
    return ChunkRollout(
        Forgetful(),
        geometry=geometry,
        controls=Live(1, 2),
        schedule=[1.0],
        history_frames=9,
        token_frames=6,
    )


def test_e17_two_thousand_chunks_hold_no_more_than_twenty():
    """E17: layouts, masks, traces and lists stop growing, while frame numbers stay absolute."""
    rollout = live_rollout(2_001)
    steady = rollout.warmup_chunks + 4
    for _ in range(steady):
        trace, _ = rollout.step()
    held = rollout.nbytes
    pointers = [part.data_ptr() for layer in rollout.states[0].cache.buffers() for part in layer]
    masks = None
    tracemalloc.start()
    try:
        for chunk in range(steady, 2_000):
            trace, _ = rollout.step()
            assert trace.start == 1 + 3 * (chunk - 1)
            assert trace.masks_built == 0 and trace.compiles == 0
            if chunk in (300, 1_999):
                gc.collect()
                now = tracemalloc.get_traced_memory()[0]
                if masks is None:
                    masks = now
                else:
                    assert now < masks + 20_000, "host memory grew"
    finally:
        tracemalloc.stop()
    assert rollout.nbytes == held
    assert len(rollout.trace) <= 4
    now = [part.data_ptr() for layer in rollout.states[0].cache.buffers() for part in layer]
    assert now == pointers
    layout = rollout.states[0].memory_layout
    assert max(frames[1] for frames in layout.history) == 1 + 3 * 1_999
    assert rollout.retained[1] - rollout.retained[0] == 6


def test_planning_a_clip_of_a_million_frames_costs_nothing():
    tracemalloc.start()
    rollout = live_rollout(1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rollout.chunk_count == 1_000_001
    assert peak < 2_000_000
