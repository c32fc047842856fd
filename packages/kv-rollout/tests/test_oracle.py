"""A rollout equals one masked forward over the whole clip, pass by pass."""

import itertools

import pytest
import torch
from kv_rollout import ChunkRollout, TokenRole
from rollout_toy import ToyModel, toy_geometry, toy_inputs
from rollout_whole_clip import whole_clip

TOLERANCE = {"rtol": 0, "atol": 1e-5}


CASES = {
    "given": {},
    "text2video": {"given": 0, "frames": 9},
    "three given": {"given": 3, "frames": 10},
    "many given": {"given": 6, "frames": 13},
    "one frame": {"given": 0, "frames": 1},
    "short last chunk": {"frames": 11},
    "same view": {"attention_scope": "same_view"},
    "decomposed": {"attention_scope": "decomposed"},
    "window": {"attention_scope": "decomposed", "decomposed_temporal_window_seconds": 2.0},
    "current control": {"attention_pattern": "current_control"},
    "captions": {"view_text_tokens": (2, 3), "text_ids": torch.arange(5)},
    "no offsets": {"view_offsets": False},
    "batch": {"batch_size": 2},
    "sde": {"sample_type": "sde"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_pass_equals_the_whole_clip(case: dict):
    case = dict(case)
    geometry = toy_geometry(case.pop("frames", 9), given=case.pop("given", 1))
    inputs = toy_inputs(geometry, batch=case.get("batch_size", 1))
    model = ToyModel()
    rollout = ChunkRollout(model, geometry=geometry, **inputs, **case)
    for _ in rollout:
        pass
    V, X = geometry.num_views, geometry.spatial_tokens
    K, T = geometry.condition_frames, geometry.frames_per_view
    passes = [call for call in model.calls if call["role"] is TokenRole.CURRENT]
    text_ids = case.get("text_ids", model.default_text_ids)
    for step in range(rollout._sampler.passes):
        velocity, kept = whole_clip(model.network, rollout, model.calls, inputs, step, text_ids)
        chunks = passes[step :: rollout._sampler.passes]
        mine = torch.cat([c["velocity"].unflatten(1, (V, -1, X)) for c in chunks], 2)
        torch.testing.assert_close(mine, velocity, **TOLERANCE)
    # what was committed is what the whole clip's clean stream holds (E15)
    starts = itertools.accumulate((V * T * X, V * K * X, V * (T - K) * X))
    clean_from, clean_to = list(starts)[1:]
    commits = [call for call in model.calls if call["role"] is TokenRole.CLEAN]
    for layer in range(2):
        for part in range(2):
            whole = kept[layer][part][:, :, clean_from:clean_to].unflatten(2, (V, T - K, X))
            done = 0
            for call in commits:
                fresh = call["kv"][layer][part].unflatten(2, (V, -1, X))
                held = whole[:, :, :, done : done + fresh.shape[3]]
                torch.testing.assert_close(fresh, held, **TOLERANCE)
                done += fresh.shape[3]
    assert len(commits) == rollout.chunk_count - 1


def test_history_for_every_frame_equals_unbounded_memory_bit_for_bit():
    geometry = toy_geometry(17)
    inputs = toy_inputs(geometry)
    results = []
    for history in (None, 16, 12):
        rollout = ChunkRollout(ToyModel(), geometry=geometry, history_frames=history, **inputs)
        list(rollout)
        results.append(rollout.result().tokens)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    short = ChunkRollout(ToyModel(), geometry=geometry, history_frames=4, **inputs)
    list(short)
    assert not torch.equal(results[0], short.result().tokens)
