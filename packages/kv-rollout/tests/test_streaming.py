"""Hour-long rollouts: nothing grows once memory is full."""

import gc
import itertools
import tracemalloc
from resource import RUSAGE_SELF, getrusage

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
    traced: list[int] = []
    pointers = [part.data_ptr() for layer in rollout.states[0].cache.buffers() for part in layer]
    for chunk in range(steady, 2_000):
        if chunk == steady + 50:
            tracemalloc.start()
        if chunk in range(steady + 60, steady + 361, 100):
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
        if chunk == steady + 360:
            tracemalloc.stop()
            resident = getrusage(RUSAGE_SELF).ru_maxrss
        trace, _ = rollout.step()
        assert trace.start == 1 + 3 * (chunk - 1)
        assert trace.masks_built == 0 and trace.compiles == 0
    # what grows with every chunk grows in each hundred; pools of small objects do not
    growth = [after - before for before, after in itertools.pairwise(traced)]
    assert len(growth) == 3 and min(growth) < 2_000, "host memory grows by 20 bytes per chunk"
    assert getrusage(RUSAGE_SELF).ru_maxrss < 1.02 * resident, "the process grew"
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
