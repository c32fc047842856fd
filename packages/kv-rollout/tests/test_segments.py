"""Streams as runs of tokens that are alike."""

import numpy as np
import pytest
from kv_core.errors import DtypeError, ShapeError, SpecError
from kv_rollout.geometry import ClipGeometry
from kv_rollout.segments import (
    Segments,
    TokenRole,
    clip_segments,
    frame_segments,
    padding_segments,
    text_segments,
)
from rollout_oracles import chunk_number, tokens_of

GEOMETRY = ClipGeometry(
    num_views=2, frames_per_view=6, patch_h=1, patch_w=3, frames_per_chunk=2, condition_frames=2
)


def rows(segments: Segments) -> list[tuple[int, ...]]:
    """``(role, view, frame, step, length)`` of every segment."""
    names = ("role", "view", "frame", "step", "length")
    return [
        tuple(row) for row in np.stack([getattr(segments, name) for name in names], axis=1).tolist()
    ]


def test_roles_have_the_numbers_that_streams_carry():
    named = {role.name: int(role) for role in TokenRole}
    expected = {"PADDING": -1, "TEXT": 0, "CONTROL": 1, "GIVEN": 2, "CURRENT": 3, "CLEAN": 4}
    assert named == expected


def test_frames_are_view_major_with_one_segment_for_each_view_and_frame():
    segments = frame_segments(GEOMETRY, TokenRole.CLEAN, 2, 5)
    assert rows(segments) == [
        (4, 0, 2, 1, 3),
        (4, 0, 3, 2, 3),
        (4, 0, 4, 2, 3),
        (4, 1, 2, 1, 3),
        (4, 1, 3, 2, 3),
        (4, 1, 4, 2, 3),
    ]
    assert segments.tokens == 18 and len(segments) == 6
    assert segments.sample.tolist() == [0] * 6 and not segments.noisy.any()


def test_tokens_that_are_denoised_are_noisy_unless_told_otherwise():
    assert frame_segments(GEOMETRY, TokenRole.CURRENT, 2, 3).noisy.all()
    assert not frame_segments(GEOMETRY, TokenRole.CURRENT, 2, 3, noisy=False).noisy.any()
    assert frame_segments(GEOMETRY, TokenRole.CLEAN, 2, 3, noisy=True).noisy.all()


def test_steps_are_counted_as_walking_the_clip_does():
    segments = frame_segments(GEOMETRY, TokenRole.CONTROL, 0, 6)
    assert segments.step.tolist() == [chunk_number(frame, 2) for frame in segments.frame]


def test_a_prompt_is_one_run_or_one_for_each_view():
    assert rows(text_segments(5)) == [(0, -1, -1, -1, 5)]
    assert rows(text_segments(5, view_text_tokens=[2, 0, 3])) == [
        (0, 0, -1, -1, 2),
        (0, 2, -1, -1, 3),
    ]
    assert len(text_segments(0)) == 0


def test_padding_belongs_to_no_sample():
    padding = padding_segments(7)
    assert rows(padding) == [(-1, -1, -1, -1, 7)] and padding.sample.tolist() == [-1]
    assert len(padding_segments(0)) == 0


def test_concat_keeps_order_drops_what_is_empty_and_merges_what_is_alike():
    parts = [padding_segments(2), text_segments(0), padding_segments(3), text_segments(1)]
    joined = Segments.concat(parts)
    assert rows(joined) == [(-1, -1, -1, -1, 5), (0, -1, -1, -1, 1)]
    assert joined.tokens == 6
    assert len(Segments.concat([])) == 0 and Segments.concat([]).tokens == 0
    again = Segments.concat([joined, joined])
    assert rows(again) == rows(joined) * 2


def test_frames_of_equal_place_in_different_samples_are_not_merged():
    first = frame_segments(GEOMETRY, TokenRole.CLEAN, 2, 3)
    second = Segments(first.sample + 1, *(getattr(first, name) for name in FIELDS[1:]))
    assert len(Segments.concat([first, second])) == 4


def test_the_stream_of_a_whole_clip_has_every_role_and_nothing_noisy():
    stream = clip_segments(GEOMETRY, text_segments(4))
    frames = [
        (role, view, frame)
        for role, start, end in ((1, 0, 6), (2, 0, 2), (4, 2, 6), (3, 2, 6))
        for view in range(2)
        for frame in range(start, end)
    ]
    assert [row[:3] for row in rows(stream)] == [(0, -1, -1), *frames]
    assert stream.tokens == 4 + 3 * len(frames) == len(tokens_of(stream))
    assert not stream.noisy.any()


def test_the_stream_of_a_clip_without_given_frames_has_none():
    geometry = ClipGeometry(
        num_views=1, frames_per_view=2, patch_h=1, patch_w=1, frames_per_chunk=2
    )
    assert clip_segments(geometry, text_segments(0)).role.tolist() == [1, 1, 4, 4, 3, 3]


@pytest.mark.parametrize(
    ("counts", "error", "words"),
    [
        ([2, 2], SpecError, "2 views have 4 tokens together, but the prompt has 5"),
        ([6, -1], SpecError, "caption of view 1 must be at least 0"),
        ([2.0, 3.0], DtypeError, "caption of view 0 must be an integer"),
        ([], SpecError, "0 views have 0 tokens"),
    ],
)
def test_captions_that_do_not_make_up_the_prompt_are_refused(counts, error, words):
    with pytest.raises(error, match=words):
        text_segments(5, view_text_tokens=counts)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_frames_outside_the_clip_are_refused(start, end):
    with pytest.raises(SpecError, match=f"frames {start} to {end} .* clip of 6 frames"):
        frame_segments(GEOMETRY, TokenRole.CONTROL, start, end)


def test_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(SpecError, match="at least 0"):
        text_segments(-1)
    with pytest.raises(SpecError, match="at least 0"):
        padding_segments(-1)
    with pytest.raises(DtypeError, match="integer"):
        padding_segments(1.0)
    with pytest.raises(SpecError, match="TEXT"):
        frame_segments(GEOMETRY, TokenRole.TEXT, 0, 1)
    with pytest.raises(DtypeError, match="noisy"):
        frame_segments(GEOMETRY, TokenRole.CURRENT, 2, 3, noisy=1)


FIELDS = ("sample", "role", "view", "frame", "step", "length", "noisy")
ONE = {name: np.array([0]) for name in FIELDS} | {"noisy": np.array([False])}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"view": np.array([0, 1])}, ShapeError, "one axis and one length"),
        ({"view": np.array([0.0])}, DtypeError, "view must be integers, got float64"),
        ({"noisy": np.array([1])}, DtypeError, "noisy must be bool"),
        ({"length": np.array([-1])}, SpecError, "negative length, got -1"),
        ({"role": np.array([5])}, SpecError, r"role must be one of -1 \(PADDING\)"),
        ({"noisy": np.array([True])}, SpecError, "only CURRENT and CLEAN"),
    ],
)
def test_segments_of_ones_own_are_checked(change, error, words):
    with pytest.raises(error, match=words):
        Segments(**ONE | {"length": np.array([1])} | change)


def test_segments_of_ones_own_are_maximal_too():
    runs = {name: np.repeat(array, 3) for name, array in ONE.items()}
    segments = Segments(**runs | {"length": [2, 0, 5]})
    assert rows(segments) == [(0, 0, 0, 0, 7)]
    assert segments.length.dtype == np.int64
    mine = np.array([4])
    segments = Segments(**ONE | {"length": mine})
    mine[0] = 9
    assert segments.tokens == 4, "the arrays are copied"
