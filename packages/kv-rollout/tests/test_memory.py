"""What memory holds, how it is validated, and the streams of each pass."""

import numpy as np
import pytest
from kv_core.errors import DtypeError, SpecError
from kv_rollout.geometry import ClipGeometry
from kv_rollout.memory import MemoryLayout, build_memory_layout, pass_segments
from kv_rollout.segments import Segments, TokenRole, frame_segments, padding_segments, text_segments

GEOMETRY = ClipGeometry(
    num_views=2, frames_per_view=17, patch_h=1, patch_w=3, frames_per_chunk=4, condition_frames=2
)
FRAME = 6  # tokens of one frame of both views
R = TokenRole


FIELDS = ("sample", "role", "view", "frame", "step", "length", "noisy")


def rows(segments: Segments) -> list[tuple]:
    return list(zip(*(getattr(segments, name).tolist() for name in FIELDS), strict=True))


def stream(*parts: Segments | tuple[TokenRole, int, int] | int) -> list[tuple]:
    """The rows of parts in order: segments, frames of a role, or a number of padding tokens."""
    made = [
        part
        if isinstance(part, Segments)
        else padding_segments(part)
        if isinstance(part, int)
        else frame_segments(GEOMETRY, *part)
        for part in parts
    ]
    return rows(Segments.concat(made))


def test_memory_lies_as_controls_given_frames_history_each_slot_padded():
    layout = build_memory_layout(
        GEOMETRY, control=[(9, 13), (1, 5), (5, 9)], given=True, history=[(5, 9), (2, 5)]
    )
    assert rows(layout.segments()) == stream(
        (R.CONTROL, 9, 13),
        (R.CONTROL, 1, 5),
        (R.CONTROL, 5, 9),
        (R.GIVEN, 0, 2),
        (R.CLEAN, 5, 9),
        (R.CLEAN, 2, 5),
        FRAME,
    )
    assert layout.tokens == layout.segments().tokens == (3 * 4 + 2 + 2 * 4) * FRAME
    assert layout.valid_tokens == (12 + 2 + 7) * FRAME
    assert layout.padding_tokens == FRAME


def test_room_that_holds_nothing_is_padding():
    empty = build_memory_layout(GEOMETRY, control=[None, None], history=[None])
    assert rows(empty.segments()) == stream((3 * 4 + 2) * FRAME)
    assert (empty.tokens, empty.valid_tokens, empty.padding_tokens) == (84, 0, 84)
    first = build_memory_layout(GEOMETRY, control=[(0, 1), None], history=[None])
    padding = (3 + 4 + 2 + 4) * FRAME
    assert rows(first.segments()) == stream((R.CONTROL, 0, 1), padding)
    assert first.tokens == empty.tokens, "shapes stand still while memory fills"


def test_a_memory_without_slots_and_given_frames_is_empty():
    geometry = ClipGeometry(
        num_views=1, frames_per_view=1, patch_h=1, patch_w=1, frames_per_chunk=4
    )
    layout = build_memory_layout(geometry)
    assert len(layout.segments()) == layout.tokens == layout.valid_tokens == 0


def test_changes_make_a_new_layout_with_the_next_version():
    layout = build_memory_layout(GEOMETRY, control=[None, None], history=[None])
    later = layout.with_control(0, (0, 1)).with_given().with_control(1, (1, 5))
    later = later.with_history(0, (2, 5)).with_control(0, (5, 9))
    assert later == MemoryLayout(GEOMETRY, ((5, 9), (1, 5)), True, ((2, 5),), 5)
    assert layout == MemoryLayout(GEOMETRY, (None, None), False, (None,), 0)
    with pytest.raises(AttributeError):
        layout.version = 2


def test_lists_and_numpy_frames_become_tuples_of_plain_numbers():
    layout = build_memory_layout(GEOMETRY, control=[[np.int64(0), np.int64(1)], None])
    assert layout.control == ((0, 1), None)
    assert type(layout.control[0][0]) is int


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ({"control": [(0, 1), (5, 9)]}, "control slots have a gap .* 0 to 1 .* 5 to 9"),
        ({"control": [(4, 8), (1, 5)]}, "control slots have an overlap .* 1 to 5 .* 4 to 8"),
        ({"control": [(1, 5), None, (1, 5)]}, "an overlap"),
        ({"control": [(3, 3)]}, "control slot 0 holds frames 3 to 3, which is an empty range"),
        ({"control": [None, (5, 4)]}, "control slot 1 .* empty range"),
        ({"control": [(-1, 2)]}, "frames from 0 to 17 of the clip"),
        ({"control": [(14, 18)]}, "frames from 0 to 17 of the clip"),
        ({"history": [(1, 5)]}, "history slot 0 .* frames from 2 to 17 of the clip"),
        ({"history": [(2, 7)]}, "which are 5, but a slot has room for 4 frames"),
        ({"history": [(2, 5), (9, 13)]}, "history slots have a gap"),
    ],
)
def test_frames_that_cannot_be_in_memory_are_refused_in_frames(slots, words):
    with pytest.raises(SpecError, match=words):
        build_memory_layout(GEOMETRY, **slots)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"control": [(0.0, 1)]}, "start of control slot 0 must be an integer"),
        ({"history": [(2, True)]}, "end of history slot 0 must be an integer"),
        ({"control": [3]}, "control slot 0 must be a pair"),
        ({"control": [(1, 2, 3)]}, "control slot 0 must be a pair"),
        ({"given": 1}, "given must be True or False"),
    ],
)
def test_what_is_no_range_is_refused(arguments, words):
    with pytest.raises(DtypeError, match=words):
        build_memory_layout(GEOMETRY, **arguments)


def test_rotated_slots_and_a_history_that_starts_late_are_fine():
    build_memory_layout(GEOMETRY, control=[(9, 13), (13, 17), (5, 9)], history=[(13, 17), (9, 13)])


def test_given_frames_need_a_clip_that_has_some():
    geometry = ClipGeometry(
        num_views=1, frames_per_view=5, patch_h=1, patch_w=1, frames_per_chunk=4
    )
    with pytest.raises(SpecError, match="condition_frames=0"):
        build_memory_layout(geometry, given=True)
    with pytest.raises(SpecError, match="condition_frames=0"):
        build_memory_layout(geometry).with_given()


def test_writing_to_a_slot_that_is_not_there_or_does_not_fit_is_refused():
    layout = build_memory_layout(GEOMETRY, control=[(0, 1), (1, 5)], history=[None])
    with pytest.raises(SpecError, match="2 control slots, so there is no slot 2"):
        layout.with_control(2, (5, 9))
    with pytest.raises(SpecError, match="1 history slots, so there is no slot -1"):
        layout.with_history(-1, (2, 5))
    with pytest.raises(SpecError, match="a gap"):
        layout.with_control(0, (9, 13))
    with pytest.raises(DtypeError, match="slot must be an integer"):
        layout.with_control(1.0, (5, 9))


# --- the streams of a pass


LAYOUT = build_memory_layout(
    GEOMETRY, control=[(0, 1), (1, 5), (5, 9)], given=True, history=[(2, 5), None]
)


PROMPT = text_segments(3)


@pytest.mark.parametrize(("kind", "role"), [("noisy", R.CURRENT), ("clean", R.CLEAN)])
def test_keys_are_the_prompt_the_pass_and_memory(kind, role):
    q, kv = pass_segments(GEOMETRY, PROMPT, LAYOUT, kind=kind, start=5, end=9)
    assert rows(q) == stream((role, 5, 9))
    assert rows(kv) == stream(
        PROMPT,
        (role, 5, 9),
        (R.CONTROL, 0, 1),
        3 * FRAME,
        (R.CONTROL, 1, 5),
        (R.CONTROL, 5, 9),
        (R.GIVEN, 0, 2),
        (R.CLEAN, 2, 5),
        (1 + 4) * FRAME,
    )
    assert kv.tokens == 3 + 4 * FRAME + LAYOUT.tokens


def test_a_short_chunk_is_padded_among_the_keys_and_nowhere_else():
    """E08: queries have their exact length, so that no padding row is ever attended from."""
    layout = build_memory_layout(GEOMETRY, control=[None] * 3, given=True, history=[None, None])
    q, kv = pass_segments(GEOMETRY, PROMPT, layout, kind="noisy", start=2, end=5)
    assert rows(q) == stream((R.CURRENT, 2, 5))
    memory = (3 * 4 * FRAME, (R.GIVEN, 0, 2), 2 * 4 * FRAME)
    assert rows(kv) == stream(PROMPT, (R.CURRENT, 2, 5), FRAME, *memory)
    full = pass_segments(GEOMETRY, PROMPT, layout, kind="noisy", start=5, end=9)[1]
    assert kv.tokens == full.tokens, "the keys keep their length"


def test_a_control_pass_is_like_any_other_and_given_frames_see_no_memory():
    layout = build_memory_layout(GEOMETRY, control=[(0, 1), (1, 5), None], given=True)
    q, kv = pass_segments(GEOMETRY, PROMPT, layout, kind="control", start=5, end=9)
    assert rows(q) == stream((R.CONTROL, 5, 9))
    assert rows(kv) == stream(PROMPT, q, layout.segments())
    q, kv = pass_segments(GEOMETRY, PROMPT, layout, kind="given", start=0, end=2)
    assert rows(q) == stream((R.GIVEN, 0, 2))
    assert rows(kv) == stream(PROMPT, (R.GIVEN, 0, 2))


def test_captions_stay_with_the_keys():
    captions = text_segments(5, view_text_tokens=[2, 3])
    _, kv = pass_segments(GEOMETRY, captions, LAYOUT, kind="noisy", start=5, end=9)
    assert kv.length[:2].tolist() == [2, 3] and kv.view[:2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "start", "end", "words"),
    [
        ("dirty", 5, 9, "kind of pass must be one of noisy, clean, control, given, got 'dirty'"),
        ("noisy", 5, 5, "frames from 2 to 17 of this clip, got frames 5 to 5"),
        ("noisy", 1, 5, "frames from 2 to 17 of this clip, got frames 1 to 5"),
        ("clean", 13, 18, "frames from 2 to 17 of this clip, got frames 13 to 18"),
        ("control", -1, 1, "frames from 0 to 17"),
        ("control", 9, 14, "span two steps, for a step ends at frame 13"),
        ("noisy", 8, 10, "span two steps, for a step ends at frame 9"),
        ("noisy", 2, 5, "frames 2 to 5 are in history memory already"),
        ("clean", 4, 5, "in history memory already, in a slot that holds frames 2 to 5"),
        ("control", 5, 9, "in control memory already"),
        ("given", 0, 1, "over all 2 of them, got frames 0 to 1"),
        ("given", 5, 9, "over all 2 of them"),
    ],
)
def test_frames_that_such_a_pass_is_never_over_are_refused(kind, start, end, words):
    with pytest.raises(SpecError, match=words):
        pass_segments(GEOMETRY, PROMPT, LAYOUT, kind=kind, start=start, end=end)


def test_a_layout_of_another_clip_is_refused():
    other = ClipGeometry(num_views=3, frames_per_view=17, patch_h=1, patch_w=3, frames_per_chunk=4)
    with pytest.raises(SpecError, match="another clip"):
        pass_segments(other, PROMPT, LAYOUT, kind="noisy", start=5, end=9)
    with pytest.raises(DtypeError, match="start"):
        pass_segments(GEOMETRY, PROMPT, LAYOUT, kind="noisy", start=5.0, end=9)
    with pytest.raises(DtypeError, match="ClipGeometry"):
        MemoryLayout("clip")
