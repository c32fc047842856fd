"""What memory holds, slot by slot, and the tokens that one pass attends from and to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from kv_core.checks import check_int
from kv_core.errors import DtypeError, SpecError

from kv_rollout.geometry import ClipGeometry, ar_chunk_range
from kv_rollout.geometry import FrameRange as FrameRange
from kv_rollout.segments import Segments, TokenRole, frame_segments, padding_segments

PassKind = Literal["noisy", "clean", "control", "given"]
Slots = tuple[FrameRange | None, ...]

_PASS_ROLES: dict[str, TokenRole] = {
    "noisy": TokenRole.CURRENT,
    "clean": TokenRole.CLEAN,
    "control": TokenRole.CONTROL,
    "given": TokenRole.GIVEN,
}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """What memory holds now: ``[control slots | given frames | history slots]``.

    A slot has room for C frames, ``C * V * X`` tokens, and the given frames for K. Room that holds
    nothing is padding, which nobody sees. Slots are listed where they lie, so that their frames may
    be rotated; sorted, the frames of the control slots, and of the history slots, follow each other
    without gap or overlap.

    Attributes:
        geometry: The clip.
        control: The frames whose controls each control slot holds; None for an empty slot.
        given: Whether the given frames are there.
        history: The finished frames that each history slot holds; None for an empty slot.
        version: Which state of a memory this is; every change makes a new one.

    Raises:
        DtypeError: A frame or version is not an integer, or ``given`` is not a bool.
        SpecError: A range is empty, leaves the clip (history: the generated part of it), does not
            fit a slot, or leaves a gap to another or overlaps it; or there are no given frames.
    """

    geometry: ClipGeometry
    control: Slots = ()
    given: bool = False
    history: Slots = ()
    version: int = 0

    def __post_init__(self) -> None:
        """Check every range."""
        if not isinstance(self.geometry, ClipGeometry):
            raise DtypeError(f"geometry must be a ClipGeometry, got {type(self.geometry).__name__}")
        if not isinstance(self.given, bool):
            raise DtypeError(f"given must be True or False, got {self.given!r}")
        K = self.geometry.condition_frames
        if self.given and K == 0:
            raise SpecError("memory cannot hold given frames: the clip has condition_frames=0")
        check_int("version", self.version)
        for name, slots, first in (("control", self.control, 0), ("history", self.history, K)):
            object.__setattr__(self, name, _check_slots(name, slots, self.geometry, first))

    @property
    def tokens(self) -> int:
        """Tokens that memory has room for."""
        per_frame = self.geometry.tokens_per_frame
        slots = len(self.control) + len(self.history)
        frames = slots * self.geometry.frames_per_chunk + self.geometry.condition_frames
        return frames * per_frame

    @property
    def valid_tokens(self) -> int:
        """Tokens that memory holds."""
        ranges = [frames for frames in (*self.control, *self.history) if frames is not None]
        held = sum(end - start for start, end in ranges)
        given = self.geometry.condition_frames if self.given else 0
        return (held + given) * self.geometry.tokens_per_frame

    @property
    def padding_tokens(self) -> int:
        """Room that holds nothing: in empty slots, in slots of a short chunk, for given frames."""
        return self.tokens - self.valid_tokens

    def segments(self) -> Segments:
        """Return all of memory as segments, padding included, in the order in which it lies."""
        geometry = self.geometry
        K, C = geometry.condition_frames, geometry.frames_per_chunk
        given = (0, K) if self.given else None
        parts: list[Segments] = []
        for role, slots, room in (
            (TokenRole.CONTROL, self.control, C),
            (TokenRole.GIVEN, (given,), K),
            (TokenRole.CLEAN, self.history, C),
        ):
            for frames in slots:
                start, end = frames or (0, 0)
                if start < end:
                    parts.append(frame_segments(geometry, role, start, end))
                if end - start < room:
                    empty = (room - (end - start)) * geometry.tokens_per_frame
                    parts.append(padding_segments(empty))
        return Segments.concat(parts)

    def with_control(self, slot: int, frames: FrameRange) -> "MemoryLayout":
        """Return the layout after the controls of ``frames`` were written to a control slot."""
        control = _replaced("control", self.control, slot, frames)
        return replace(self, control=control, version=self.version + 1)

    def with_history(self, slot: int, frames: FrameRange) -> "MemoryLayout":
        """Return the layout after finished ``frames`` were written to a history slot."""
        history = _replaced("history", self.history, slot, frames)
        return replace(self, history=history, version=self.version + 1)

    def with_given(self) -> "MemoryLayout":
        """Return the layout after the given frames were written."""
        return replace(self, given=True, version=self.version + 1)


def build_memory_layout(
    geometry: ClipGeometry,
    *,
    control: Sequence[FrameRange | None] = (),
    history: Sequence[FrameRange | None] = (),
    given: bool = False,
) -> MemoryLayout:
    """Describe a memory with these frames in its slots, in the order of the slots.

    Args:
        geometry: The clip.
        control: What each control slot holds; None for an empty one. May be rotated.
        history: The same of the history slots.
        given: Whether the given frames are there.

    Raises:
        SpecError, DtypeError: As `MemoryLayout`.
    """
    return MemoryLayout(geometry, tuple(control), given, tuple(history))


def pass_segments(
    geometry: ClipGeometry,
    text: Segments,
    layout: MemoryLayout,
    *,
    kind: PassKind,
    start: int,
    end: int,
) -> tuple[Segments, Segments]:
    """Return the queries and the keys of one pass over frames ``[start, end)``.

    Args:
        geometry: The clip.
        text: The prompt.
        layout: What memory holds.
        kind: ``"noisy"`` while a chunk is denoised, ``"clean"`` when it is committed, ``"control"``
            for its controls, ``"given"`` for the given frames.
        start: First frame of the pass.
        end: One past the last.

    Returns:
        The queries, exactly the tokens of the frames, and the keys: ``[text | the same tokens, and
        padding up to C frames | memory]``, or ``[text | the same tokens]`` for given frames.

    Raises:
        DtypeError: A frame is not an integer.
        SpecError: The frames are not those of such a pass: they leave the clip, span two steps, are
            given and not generated or the reverse, or are in memory already.
    """
    if kind not in _PASS_ROLES:
        raise SpecError(f"kind of pass must be one of {', '.join(_PASS_ROLES)}, got {kind!r}")
    if layout.geometry != geometry:
        raise SpecError("the memory layout is of another clip: its geometry differs")
    start, end = check_int("start", start), check_int("end", end)
    _check_pass(geometry, layout, kind, start, end)
    query = frame_segments(geometry, _PASS_ROLES[kind], start, end)
    if kind == "given":
        return query, Segments.concat([text, query])
    room = (geometry.frames_per_chunk - (end - start)) * geometry.tokens_per_frame
    return query, Segments.concat([text, query, padding_segments(room), layout.segments()])


def _check_pass(
    geometry: ClipGeometry, layout: MemoryLayout, kind: str, start: int, end: int
) -> None:
    T, K = geometry.frames_per_view, geometry.condition_frames
    if kind == "given":
        if (start, end) != (0, K) or K == 0:
            raise SpecError(
                f"a pass over given frames is over all {K} of them, got frames {start} to {end}"
            )
        return
    first = 0 if kind == "control" else K
    if not first <= start < end <= T:
        raise SpecError(
            f"a {kind} pass is over frames from {first} to {T} of this clip, "
            f"got frames {start} to {end}"
        )
    whole = ar_chunk_range(geometry, start)
    assert whole is not None
    if end > whole[1]:
        raise SpecError(
            f"frames {start} to {end} span two steps, for a step ends at frame {whole[1]}; "
            "take the ranges from ar_chunk_range"
        )
    slots = layout.control if kind == "control" else layout.history
    for held in slots:
        if held is not None and held[0] < end and start < held[1]:
            name = "control" if kind == "control" else "history"
            raise SpecError(
                f"frames {start} to {end} are in {name} memory already, in a slot that holds "
                f"frames {held[0]} to {held[1]}: the pass would see them twice"
            )


def _replaced(name: str, slots: Slots, slot: int, frames: FrameRange) -> Slots:
    index = check_int("slot", slot)
    if not 0 <= index < len(slots):
        raise SpecError(f"memory has {len(slots)} {name} slots, so there is no slot {index}")
    return (*slots[:index], frames, *slots[index + 1 :])


def _check_slots(name: str, slots: Slots, geometry: ClipGeometry, first: int) -> Slots:
    """Return the ranges of all slots as plain ints, or say what is wrong with them."""
    T, C = geometry.frames_per_view, geometry.frames_per_chunk
    checked = tuple(
        None if frames is None else _check_range(f"{name} slot {slot}", frames)
        for slot, frames in enumerate(slots)
    )
    for slot, frames in enumerate(checked):
        if frames is None:
            continue
        start, end = frames
        said = f"{name} slot {slot} holds frames {start} to {end}"
        if start >= end:
            raise SpecError(f"{said}, which is an empty range; use None for an empty slot")
        if start < first or end > T:
            raise SpecError(f"{said}, but such a slot holds frames from {first} to {T} of the clip")
        if end - start > C:
            raise SpecError(f"{said}, which are {end - start}, but a slot has room for {C} frames")
    held = sorted(frames for frames in checked if frames is not None)
    for before, after in pairwise(held):
        if before[1] != after[0]:
            what = "a gap" if before[1] < after[0] else "an overlap"
            raise SpecError(
                f"{name} slots have {what} between frames {before[0]} to {before[1]} and frames "
                f"{after[0]} to {after[1]}; sorted, their ranges must follow each other"
            )
    return checked


def _check_range(name: str, frames: object) -> FrameRange:
    if not isinstance(frames, (tuple, list)) or len(frames) != 2:
        raise DtypeError(f"{name} must be a pair (first frame, one past the last), got {frames!r}")
    start, end = frames
    return check_int(f"start of {name}", start), check_int(f"end of {name}", end)
