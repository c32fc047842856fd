"""Positions in time, row and column, and what happens at their limits."""

import numpy as np
import pytest
import torch
from kv_core.errors import DtypeError, SpecError
from kv_rollout.geometry import ClipGeometry
from kv_rollout.positions import (
    BASE_FPS,
    MODALITY_MARGIN,
    caption_mrope_ids,
    check_position_limit,
    chunk_mrope_ids,
    clip_mrope_ids,
    temporal_positions,
    vision_temporal_offset,
)


def clip(**sizes) -> ClipGeometry:
    default = {
        "num_views": 2,
        "frames_per_view": 5,
        "patch_h": 2,
        "patch_w": 3,
        "frames_per_chunk": 2,
    }
    return ClipGeometry(**default | sizes)


def test_constants_are_those_of_the_trained_models():
    assert (BASE_FPS, MODALITY_MARGIN) == (24.0, 15_000.0)


def test_pictures_begin_a_margin_behind_the_prompt():
    assert vision_temporal_offset(7) == 15_007.0
    assert vision_temporal_offset(0, modality_margin=10) == 10.0
    for tokens, margin in ((-1, 5.0), (1, -5.0), (1, float("nan"))):
        with pytest.raises(SpecError):
            vision_temporal_offset(tokens, modality_margin=margin)
    with pytest.raises(DtypeError):
        vision_temporal_offset(1.5)


def test_every_caption_begins_at_0_on_all_axes():
    ids, longest = caption_mrope_ids([2, 3])
    assert longest == 3
    assert ids.tolist() == [[0, 1, 0, 1, 2]] * 3
    assert ids.dtype == torch.float32 and ids.is_contiguous()
    assert caption_mrope_ids([0, 1])[0].tolist() == [[0.0]] * 3
    with pytest.raises(SpecError, match="at least one caption"):
        caption_mrope_ids([])
    with pytest.raises(SpecError, match="caption 1"):
        caption_mrope_ids([1, -1])


def test_each_view_has_a_band_of_places_in_time():
    geometry = clip(position_stride=100)
    assert temporal_positions(geometry, range(1, 3)).tolist() == [1, 2, 101, 102]
    assert temporal_positions(geometry, [4, 0], view_offsets=False).tolist() == [4, 0, 4, 0]
    assert temporal_positions(clip(), [4]).tolist() == [4, 9], "the default stride is the clip"
    with pytest.raises(SpecError, match="frame"):
        temporal_positions(geometry, [5])


def test_a_whole_clip_is_view_major_and_space_begins_again_in_every_frame():
    ids = clip_mrope_ids(clip(), fps=24, temporal_offset=10)
    assert ids.shape == (3, 2 * 5 * 6) and ids.dtype == torch.float32
    expected = [
        (10 + view * 5 + frame, row, column)
        for view in range(2)
        for frame in range(5)
        for row in range(2)
        for column in range(3)
    ]
    assert ids.T.tolist() == [list(map(float, place)) for place in expected]


@pytest.mark.parametrize("view_offsets", [True, False])
@pytest.mark.parametrize("fps", [24.0, 30, 7.5])
def test_a_chunk_is_the_clip_restricted_to_it(fps, view_offsets):
    geometry = clip(position_stride=77)
    more = {"fps": fps, "temporal_offset": 15_003.0, "view_offsets": view_offsets}
    whole = clip_mrope_ids(geometry, **more).unflatten(1, (2, 5, 6))
    for start, frames in ((0, 1), (1, 2), (3, 2), (0, 5)):
        chunk = chunk_mrope_ids(geometry, chunk_start=start, chunk_frames=frames, **more)
        assert torch.equal(chunk, whole[:, :, start : start + frames].flatten(1))


def test_fps_scales_time_and_the_offset_moves_only_time():
    geometry = clip()
    slow = clip_mrope_ids(geometry, fps=12, temporal_offset=0)
    plain = clip_mrope_ids(geometry, fps=24, temporal_offset=0)
    moved = clip_mrope_ids(geometry, fps=24, temporal_offset=500)
    other_base = clip_mrope_ids(geometry, fps=24, base_fps=48, temporal_offset=0)
    assert torch.equal(slow[0], plain[0] * 2) and torch.equal(slow[1:], plain[1:])
    assert torch.equal(moved[0], plain[0] + 500) and torch.equal(moved[1:], plain[1:])
    assert torch.equal(other_base, slow)


def test_without_view_offsets_all_views_share_their_times():
    time = clip_mrope_ids(clip(), fps=24, temporal_offset=3, view_offsets=False)[0]
    assert torch.equal(time[:30], time[30:])


def test_time_is_rounded_once_from_the_exact_place():
    """Eleven views far apart: FP32 has steps of 1/16 there, and each place is the nearest one."""
    geometry = clip(num_views=11, frames_per_view=40, position_stride=100_000)
    time = clip_mrope_ids(geometry, fps=30, temporal_offset=15_000.0)[0]
    time = time.unflatten(0, (11, 40, 6))[..., 0].double()
    view, frame = torch.arange(11)[:, None], torch.arange(40)[None]
    exact = (view * 100_000 + frame).double() * 0.8 + 15_000.0
    spacing = np.spacing(time.numpy().astype(np.float32)).astype(np.float64)
    assert ((time - exact).abs().numpy() <= spacing / 2 * (1 + 1e-9)).all()


def test_frames_far_into_the_clip_stay_in_their_views_band():
    geometry = clip(frames_per_view=1_000, position_stride=1_000)
    times = [
        chunk_mrope_ids(geometry, chunk_start=start, chunk_frames=2, fps=24, temporal_offset=0)[
            0
        ].unflatten(0, (2, -1))
        for start in (0, 997, 998)
    ]
    for time in times:
        assert (time[0] < 1_000).all() and (time[1] >= 1_000).all()


def test_positions_go_where_they_are_asked_to():
    where = {"fps": 24, "temporal_offset": 0, "device": "meta"}
    assert clip_mrope_ids(clip(), **where).is_meta
    assert chunk_mrope_ids(clip(), chunk_start=0, chunk_frames=1, **where).is_meta
    assert caption_mrope_ids([1], device="meta")[0].is_meta


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"fps": 0}, SpecError, "fps must be above 0"),
        ({"fps": -24.0}, SpecError, "fps must be above 0"),
        ({"fps": float("nan")}, SpecError, "fps must be finite"),
        ({"fps": float("inf")}, SpecError, "fps must be finite"),
        ({"fps": "24"}, DtypeError, "fps must be a number"),
        ({"fps": True}, DtypeError, "fps must be a number"),
        ({"base_fps": 0}, SpecError, "base_fps must be above 0"),
        ({"temporal_offset": float("inf")}, SpecError, "temporal_offset must be finite"),
        ({"chunk_frames": 0}, SpecError, "frames 1 to 1 .* clip of 5 frames"),
        ({"chunk_start": -1}, SpecError, "frames -1 to 1 .* clip of 5 frames"),
        ({"chunk_frames": 5}, SpecError, "frames 1 to 6 .* clip of 5 frames"),
        ({"chunk_start": 1.0}, DtypeError, "chunk_start must be an integer"),
    ],
)
def test_positions_of_nothing_or_at_no_rate_are_refused(change, error, words):
    good = {"chunk_start": 1, "chunk_frames": 2, "fps": 24.0, "temporal_offset": 0.0}
    with pytest.raises(error, match=words):
        chunk_mrope_ids(clip(), **good | change)


# --- E13: past the end of a position table


def test_e13_a_table_too_short_for_the_clip_is_refused_up_front():
    """E13: chunks of 3; chunk 341 would be the first to run over 1,024 positions."""
    plain = {"fps": 24, "temporal_offset": 0, "limit": 1_024}
    check_position_limit(clip(num_views=1, frames_per_view=1_024, frames_per_chunk=3), **plain)
    longer = clip(num_views=1, frames_per_view=1_026, frames_per_chunk=3)
    with pytest.raises(SpecError, match=r"1026 frames needs 1,026 .*, but the model has 1,024"):
        check_position_limit(longer, **plain)


def test_e13_every_views_band_counts():
    geometry = clip(num_views=3, frames_per_view=10, position_stride=100)
    shared = {"fps": 24, "temporal_offset": 50.0}
    check_position_limit(geometry, limit=260, **shared)
    with pytest.raises(SpecError, match="of 3 views needs 260 positions"):
        check_position_limit(geometry, limit=259, **shared)
    check_position_limit(geometry, limit=60, view_offsets=False, **shared)
    with pytest.raises(SpecError, match="10 frames needs 60 "):
        check_position_limit(geometry, limit=59, view_offsets=False, **shared)


def test_e13_slow_clips_and_the_last_position_itself_count():
    geometry = clip(num_views=1, frames_per_view=4)
    last = float(clip_mrope_ids(geometry, fps=16, temporal_offset=1)[0].max())
    assert last == 5.5
    check_position_limit(geometry, fps=16, temporal_offset=1, limit=5.6)
    with pytest.raises(SpecError, match=r"needs 6 .* has 5\.5;"):
        check_position_limit(geometry, fps=16, temporal_offset=1, limit=5.5)


def test_e13_a_model_without_a_limit_takes_any_clip():
    check_position_limit(clip(frames_per_view=10**9), fps=1, temporal_offset=0, limit=None)
    with pytest.raises(DtypeError, match="limit"):
        check_position_limit(clip(), fps=1, temporal_offset=0, limit="1024")


def test_e13_a_band_shorter_than_the_clip_is_refused_by_the_geometry():
    with pytest.raises(SpecError, match="share positions"):
        clip(frames_per_view=5, position_stride=4)
