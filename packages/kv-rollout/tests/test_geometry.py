"""The sizes of a clip, the partition of its frames, and packing for cross-view attention."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import DtypeError, ShapeError, SpecError
from kv_rollout.geometry import (
    ChunkPlan,
    ClipGeometry,
    ar_chunk_plan,
    ar_chunk_range,
    ar_chunk_ranges,
    causal_step,
    causal_steps,
    control_chunk_ranges,
    control_window,
    pack_cross_view_attention,
    unpack_cross_view_attention,
)
from rollout_oracles import chunk_number

GOOD = {
    "num_views": 2,
    "frames_per_view": 17,
    "patch_h": 3,
    "patch_w": 5,
    "frames_per_chunk": 4,
    "condition_frames": 1,
}


def clip(frames: int, chunk: int, given: int = 0, **more) -> ClipGeometry:
    sizes = {"frames_per_view": frames, "frames_per_chunk": chunk, "condition_frames": given}
    return ClipGeometry(**GOOD | sizes | more)


clips = st.builds(
    lambda chunk, frames, cut: clip(frames, chunk, given=cut % (frames + 1)),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 1000),
)


# --- sizes


def test_derived_sizes_follow_from_the_given_ones():
    geometry = ClipGeometry(**GOOD)
    assert geometry.spatial_tokens == 15
    assert geometry.tokens_per_frame == 30
    assert geometry.stride == 17
    assert ClipGeometry(**GOOD, position_stride=40).stride == 40
    assert geometry.seconds_per_frame == 1.0


def test_numpy_sizes_become_plain_numbers():
    geometry = ClipGeometry(
        **GOOD | {"num_views": np.int64(2)}, seconds_per_frame=1, position_stride=np.int32(20)
    )
    assert geometry == ClipGeometry(**GOOD, position_stride=20)
    assert [type(geometry.num_views), type(geometry.position_stride)] == [int, int]
    assert type(geometry.seconds_per_frame) is float
    with pytest.raises(AttributeError):
        geometry.num_views = 3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_views": 0}, SpecError, "num_views must be at least 1, got 0"),
        ({"frames_per_view": 0}, SpecError, "frames_per_view"),
        ({"patch_h": 0}, SpecError, "patch_h"),
        ({"patch_w": -1}, SpecError, "patch_w"),
        ({"frames_per_chunk": 0}, SpecError, "frames_per_chunk"),
        ({"condition_frames": -1}, SpecError, "between 0 and the 17 frames of the clip, got -1"),
        ({"condition_frames": 18}, SpecError, "between 0 and the 17 frames of the clip, got 18"),
        ({"seconds_per_frame": 0}, SpecError, "seconds_per_frame must be above 0"),
        ({"seconds_per_frame": -0.1}, SpecError, "seconds_per_frame must be above 0"),
        ({"seconds_per_frame": float("nan")}, SpecError, "seconds_per_frame must be finite"),
        ({"seconds_per_frame": float("inf")}, SpecError, "seconds_per_frame must be finite"),
        ({"seconds_per_frame": True}, DtypeError, "seconds_per_frame must be a number"),
        ({"seconds_per_frame": "0.1"}, DtypeError, "seconds_per_frame must be a number"),
        ({"position_stride": 16}, SpecError, "at least the 17 frames of the clip, got 16"),
        ({"position_stride": 20.0}, DtypeError, "position_stride"),
        ({"num_views": 2.0}, DtypeError, "num_views must be an integer"),
        ({"frames_per_view": True}, DtypeError, "frames_per_view must be an integer"),
        ({"patch_h": "3"}, DtypeError, "patch_h must be an integer"),
        ({"frames_per_chunk": None}, DtypeError, "frames_per_chunk must be an integer"),
        ({"condition_frames": 1.0}, DtypeError, "condition_frames must be an integer"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, error, words):
    with pytest.raises(error, match=words):
        ClipGeometry(**GOOD | change)


# --- the partition


def test_e11_frame_0_is_a_step_alone_and_then_every_c_frames_are_one():
    assert [causal_step(frame, 3) for frame in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [causal_step(frame, 1) for frame in range(-2, 4)] == [-1, -1, 0, 1, 2, 3]
    assert causal_step(-1, 4) == causal_step(-40, 4) == -1


def test_steps_of_a_tensor_are_those_of_its_frames():
    frames = torch.arange(-6, 30).reshape(2, 18)
    for chunk in (1, 2, 3, 7):
        expected = [[causal_step(frame, chunk) for frame in row] for row in frames.tolist()]
        assert causal_steps(frames, chunk).tolist() == expected
    assert causal_steps(torch.arange(4, dtype=torch.int32), 2).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_step_without_frames_is_refused(chunk):
    with pytest.raises(SpecError, match="frames_per_chunk"):
        causal_step(1, chunk)
    with pytest.raises(SpecError, match="frames_per_chunk"):
        causal_steps(torch.arange(3), chunk)


@pytest.mark.parametrize("frames", [torch.ones(2), torch.ones(2, dtype=torch.bool), [1, 2]])
def test_steps_are_of_integer_tensors(frames):
    with pytest.raises(DtypeError, match="frame_id"):
        causal_steps(frames, 2)
    with pytest.raises(DtypeError, match="frame must be an integer"):
        causal_step(1.0, 2)


@pytest.mark.parametrize(
    ("frames", "chunk", "given", "ranges"),
    [
        (12, 3, 0, [(0, 1), (1, 4), (4, 7), (7, 10), (10, 12)]),
        (12, 3, 1, [(1, 4), (4, 7), (7, 10), (10, 12)]),
        (12, 3, 2, [(2, 4), (4, 7), (7, 10), (10, 12)]),
        (12, 3, 12, []),
        (1, 3, 0, [(0, 1)]),
        (1, 3, 1, []),
        (17, 4, 2, [(2, 5), (5, 9), (9, 13), (13, 17)]),
        (4, 1, 0, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (5, 2, 3, [(3, 5)]),
        (6, 2, 4, [(4, 5), (5, 6)]),
    ],
)
def test_e10_chunks_of_clips_that_do_not_divide(frames, chunk, given, ranges):
    geometry = clip(frames, chunk, given)
    assert ar_chunk_ranges(geometry) == ranges
    committed = sum(end - start for start, end in ranges[:-1])
    assert ar_chunk_plan(geometry) == ChunkPlan(len(ranges), committed)


@given(clips)
def test_the_partition_is_total_and_one(geometry):
    """Steps, chunks, the plan and the slots say the same of every clip."""
    T, C, K = geometry.frames_per_view, geometry.frames_per_chunk, geometry.condition_frames
    ranges = ar_chunk_ranges(geometry)
    assert [frame for start, end in ranges for frame in range(start, end)] == list(range(K, T))
    for start, end in ranges:
        assert 0 < end - start <= C
        assert len({chunk_number(frame, C) for frame in range(start, end)}) == 1
        assert ar_chunk_range(geometry, start) == (start, end)
        assert ar_chunk_range(geometry, end - 1) == (end - 1, end)
        assert causal_step(start, C) == chunk_number(start, C)
    plan = ar_chunk_plan(geometry)
    kept = ranges[:-1]
    assert plan.count == len(ranges)
    assert plan.committed_frames == sum(end - start for start, end in kept)
    assert len(kept) <= -(-plan.committed_frames // C)
    assert ar_chunk_range(geometry, T) is None and ar_chunk_range(geometry, T + 5) is None


def test_a_chunk_range_is_of_a_frame_of_the_clip():
    geometry = clip(9, 4)
    assert ar_chunk_range(geometry, 3) == (3, 5)
    with pytest.raises(SpecError, match="frame must be at least 0, got -1"):
        ar_chunk_range(geometry, -1)
    with pytest.raises(DtypeError, match="frame"):
        ar_chunk_range(geometry, 0.0)


def test_control_ranges_walk_from_any_frame_for_as_long_as_asked():
    geometry = clip(9, 4, given=1)
    assert control_chunk_ranges(geometry) == [(0, 1), (1, 5), (5, 9)]
    assert control_chunk_ranges(geometry, 3) == [(3, 5), (5, 9)]
    assert control_chunk_ranges(geometry, 1, count=1) == [(1, 5)]
    assert control_chunk_ranges(geometry, count=0) == []
    assert control_chunk_ranges(geometry, 9) == []
    with pytest.raises(SpecError, match="count"):
        control_chunk_ranges(geometry, count=-1)


@pytest.mark.parametrize(
    ("frames", "chunk", "given", "slots", "window"),
    [
        (17, 4, 1, 1, [(0, 1), (1, 5), (5, 9)]),
        (17, 4, 1, 2, [(0, 1), (1, 5), (5, 9), (9, 13)]),
        (17, 4, 1, 3, [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17)]),
        (17, 4, 2, 1, [(0, 1), (1, 5), (5, 9)]),
        (9, 4, 0, 1, [(0, 1), (1, 5)]),
        (41, 4, 5, 2, [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17)]),
        (3, 4, 0, 1, [(0, 1), (1, 3)]),
        (17, 4, 1, 0, [(0, 1), (1, 5)]),
        (9, 4, 9, 2, [(0, 1), (1, 5), (5, 9)]),
        (9, 4, 0, 50, [(0, 1), (1, 5), (5, 9)]),
    ],
)
def test_the_control_window_reaches_the_chunk_after_a_full_history(
    frames, chunk, given, slots, window
):
    assert control_window(clip(frames, chunk, given), slots) == window


@given(clips, st.integers(0, 6))
def test_e12_controls_and_history_move_on_together(geometry, slots):
    """Slots that are reused in turn always hold the history's controls and the chunk's own."""
    window = control_window(geometry, slots)
    control, oldest = list(window), 0
    history: list[tuple[int, int]] = []
    for start, end in ar_chunk_ranges(geometry):
        while max(held[1] for held in control) < end:
            control[oldest % len(window)] = ar_chunk_range(geometry, max(h[1] for h in control))
            oldest += 1
        frames = sorted(frame for held in control for frame in range(*held))
        assert frames == list(range(frames[0], frames[-1] + 1))
        needed = [frame for held in [*history, (start, end)] for frame in range(*held)]
        assert set(needed) <= set(frames)
        if slots:
            history = [*history, (start, end)][-slots:]


def test_e12_slots_follow_the_partition():
    """E12: generating frames 7 to 9 with history 1 to 6, controls 1 to 9 are visible."""
    geometry = clip(13, 3)
    control = control_window(geometry, 2)
    assert control == [(0, 1), (1, 4), (4, 7)]
    control[0] = ar_chunk_range(geometry, 7)
    assert sorted(control) == [(1, 4), (4, 7), (7, 10)]


def test_a_negative_number_of_history_slots_is_refused():
    with pytest.raises(SpecError, match="history_slots"):
        control_window(clip(9, 4), -1)


def test_planning_a_clip_of_a_billion_frames_is_arithmetic():
    geometry = clip(1_000_000_000, 4, given=1)
    assert ar_chunk_plan(geometry) == ChunkPlan(250_000_000, 999_999_996)
    assert control_window(geometry, 1) == [(0, 1), (1, 5), (5, 9)]


# --- across views


def test_packing_shares_the_rig_of_each_frame_and_unpacking_undoes_it():
    B, V, T, X, D = 2, 3, 4, 5, 6
    tokens = torch.arange(B * V * T * X * D, dtype=torch.float32).reshape(B, V, T, X, D)
    query, context = pack_cross_view_attention(tokens)
    assert query.shape == (B, T, V, X, D) and context.shape == (B, T, V, V * X, D)
    assert context.stride(2) == 0, "the context is one copy for all views"
    for v in range(V):
        for t in range(T):
            assert torch.equal(query[:, t, v], tokens[:, v, t])
            assert torch.equal(context[:, t, v], tokens[:, :, t].flatten(1, 2))
    assert torch.equal(unpack_cross_view_attention(query), tokens.flatten(2, 3))


def test_tokens_are_view_major():
    """Two views of two frames of one token: the clip is a0 a1 b0 b1, its frame 1 is a1 b1."""
    tokens = torch.tensor([[[0.0], [1.0]], [[10.0], [11.0]]])[None, ..., None]
    assert tokens.flatten().tolist() == [0, 1, 10, 11]
    assert pack_cross_view_attention(tokens)[1][0, 1, 0].flatten().tolist() == [1, 11]


@pytest.mark.parametrize("arrange", [pack_cross_view_attention, unpack_cross_view_attention])
def test_packing_takes_five_axes_none_of_them_empty(arrange):
    with pytest.raises(ShapeError, match="got 4 axes"):
        arrange(torch.zeros(1, 2, 3, 4))
    with pytest.raises(ShapeError, match="no empty axis"):
        arrange(torch.zeros(1, 2, 0, 3, 4))
    with pytest.raises(DtypeError, match=r"must be a torch\.Tensor"):
        arrange(np.zeros((1, 2, 3, 4, 5)))
