"""Segments: maximal runs of tokens that are alike in everything visibility asks about."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from kv_core.checks import check_int
from kv_core.errors import DtypeError, ShapeError, SpecError

from kv_rollout.geometry import ClipGeometry, step_of

IntArray = npt.NDArray[np.int64]


class TokenRole(IntEnum):
    """What a token is to attention."""

    PADDING = -1
    TEXT = 0
    CONTROL = 1
    GIVEN = 2
    CURRENT = 3
    CLEAN = 4


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A stream of tokens as runs of tokens that are alike; one entry of each array is one run.

    The arrays are copied, empty runs dropped, and neighbours that are alike merged.

    Attributes:
        sample: int64 ``[n]``, the sequence a run belongs to; -1 for padding.
        role: int64 ``[n]``, a `TokenRole`.
        view: int64 ``[n]``; -1 for padding and for a prompt that all views share.
        frame: int64 ``[n]``, counted in the whole clip; -1 for text and padding.
        step: int64 ``[n]``, the causal step of the frame; -1 for text and padding.
        length: int64 ``[n]``, tokens of the run.
        noisy: bool ``[n]``, whether given frames may see a target token; see `segment_table`.

    Raises:
        DtypeError: An array is not of integers, or ``noisy`` is not bool.
        ShapeError: The arrays are not of one axis and one length.
        SpecError: A length is negative, a role is none, or a token that is no target is noisy.
    """

    sample: IntArray
    role: IntArray
    view: IntArray
    frame: IntArray
    step: IntArray
    length: IntArray
    noisy: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        """Check the arrays, drop empty runs and merge neighbours that are alike."""
        arrays = {name: np.array(getattr(self, name)) for name in _NAMES}
        for name, array in arrays.items():
            if array.shape != arrays["length"].shape or array.ndim != 1:
                shapes = {name: array.shape for name, array in arrays.items()}
                raise ShapeError(f"segments need arrays of one axis and one length, got {shapes}")
            if name == "noisy" and array.dtype != np.bool_ and array.size:
                raise DtypeError(f"noisy must be bool, got {array.dtype}")
            if name != "noisy" and array.dtype.kind not in "iu" and array.size:
                raise DtypeError(f"{name} must be integers, got {array.dtype}")
            arrays[name] = array.astype(np.bool_ if name == "noisy" else np.int64, copy=False)
        role, length = arrays["role"], arrays["length"]
        if (length < 0).any():
            raise SpecError(f"a segment must not have a negative length, got {length.min()}")
        if ((role < TokenRole.PADDING) | (role > TokenRole.CLEAN)).any():
            legal = ", ".join(f"{int(known)} ({known.name})" for known in TokenRole)
            raise SpecError(f"role must be one of {legal}, got {np.unique(role).tolist()}")
        if (arrays["noisy"] & (role != TokenRole.CURRENT) & (role != TokenRole.CLEAN)).any():
            raise SpecError("only CURRENT and CLEAN segments can be noisy")
        self._set(_merged(arrays))

    def _set(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self.length)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.length.sum())

    @classmethod
    def concat(cls, parts: Sequence["Segments"]) -> "Segments":
        """Return one stream of several, in order."""
        if not parts:
            return padding_segments(0)
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES}
        return cls._trusted(_merged(joined))

    @classmethod
    def _trusted(cls, arrays: dict[str, npt.NDArray[Any]]) -> "Segments":
        """Make segments of arrays that are known to be right; checks are most of the cost."""
        segments = object.__new__(cls)
        segments._set(arrays)
        return segments


_NAMES = tuple(field.name for field in fields(Segments))


def _merged(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    length = arrays["length"]
    if not length.all():
        kept = length > 0
        arrays = {name: array[kept] for name, array in arrays.items()}
        length = arrays["length"]
    if len(length) < 2:
        return arrays
    differs = np.zeros(len(length), np.bool_)
    differs[0] = True
    for name, array in arrays.items():
        if name != "length":
            differs[1:] |= array[1:] != array[:-1]
    if differs.all():
        return arrays
    first = np.flatnonzero(differs)
    merged = {name: array[first] for name, array in arrays.items()}
    merged["length"] = np.add.reduceat(length, first)
    return merged


def text_segments(tokens: int, *, view_text_tokens: Sequence[int] | None = None) -> Segments:
    """Return the segments of a prompt.

    Args:
        tokens: Tokens of the whole prompt.
        view_text_tokens: Tokens of each view's own caption, one after the other; None for a prompt
            that all views share.

    Raises:
        DtypeError: A count is not an integer.
        SpecError: A count is negative, or the captions do not add up to ``tokens``.
    """
    total = check_int("text tokens", tokens, minimum=0)
    if view_text_tokens is None:
        return _runs(TokenRole.TEXT, view=np.array([-1]), length=np.array([total]))
    counts = [
        check_int(f"the caption of view {view}", count, minimum=0)
        for view, count in enumerate(view_text_tokens)
    ]
    if sum(counts) != total:
        raise SpecError(
            f"the captions of {len(counts)} views have {sum(counts)} tokens together, "
            f"but the prompt has {total}"
        )
    length = np.array(counts, np.int64)
    return _runs(TokenRole.TEXT, view=np.arange(len(counts)), length=length)


def padding_segments(tokens: int) -> Segments:
    """Return the segment of ``tokens`` tokens that stand for nothing; none if it is 0.

    Raises:
        DtypeError: The count is not an integer.
        SpecError: It is negative.
    """
    total = check_int("padding tokens", tokens, minimum=0)
    return _runs(TokenRole.PADDING, view=np.array([-1]), length=np.array([total]), sample=-1)


def frame_segments(
    geometry: ClipGeometry, role: TokenRole, start: int, end: int, *, noisy: bool | None = None
) -> Segments:
    """Return the segments of frames ``[start, end)``, view by view; one for each view and frame.

    Args:
        geometry: The clip.
        role: ``CONTROL``, ``GIVEN``, ``CURRENT`` or ``CLEAN``.
        start: First frame, counted in the whole clip.
        end: One past the last frame; equal to ``start`` for no segments.
        noisy: Whether given frames may see these tokens; by default where ``role`` is ``CURRENT``.

    Raises:
        DtypeError: A frame is not an integer, or ``noisy`` not a bool.
        SpecError: The frames are not of the clip, or ``role`` is not one of frames.
    """
    if role in (TokenRole.TEXT, TokenRole.PADDING):
        raise SpecError(f"tokens of frames are CONTROL, GIVEN, CURRENT or CLEAN, got {role!r}")
    if noisy is not None and not isinstance(noisy, (bool, np.bool_)):
        raise DtypeError(f"noisy must be True, False or None, got {noisy!r}")
    V, T = geometry.num_views, geometry.frames_per_view
    start, end = check_int("start", start), check_int("end", end)
    if not 0 <= start <= end <= T:
        raise SpecError(f"frames {start} to {end} are not a range of a clip of {T} frames")
    frame = np.tile(np.arange(start, end), V)
    return _runs(
        role,
        view=np.arange(V).repeat(end - start),
        length=np.full(len(frame), geometry.spatial_tokens),
        frame=frame,
        step=step_of(frame, geometry.frames_per_chunk),
        noisy=role == TokenRole.CURRENT if noisy is None else bool(noisy),
    )


def clip_segments(geometry: ClipGeometry, text: Segments) -> Segments:
    """Return the stream of a whole clip, for training and for testing a rollout against.

    Its order is ``[text | controls 0 to T | given 0 to K | clean K to T | current K to T]``. No
    target is noisy, so that given frames see none of them, as in a rollout.
    """
    T, K = geometry.frames_per_view, geometry.condition_frames
    return Segments.concat(
        [
            text,
            frame_segments(geometry, TokenRole.CONTROL, 0, T),
            frame_segments(geometry, TokenRole.GIVEN, 0, K),
            frame_segments(geometry, TokenRole.CLEAN, K, T),
            frame_segments(geometry, TokenRole.CURRENT, K, T, noisy=False),
        ]
    )


def _runs(
    role: TokenRole,
    *,
    view: IntArray,
    length: IntArray,
    frame: IntArray | None = None,
    step: IntArray | None = None,
    sample: int = 0,
    noisy: bool = False,
) -> Segments:
    n = len(length)
    nowhere = np.full(n, -1)
    arrays: dict[str, npt.NDArray[Any]] = {
        "sample": np.full(n, sample),
        "role": np.full(n, int(role)),
        "view": view,
        "frame": nowhere if frame is None else frame,
        "step": nowhere if step is None else step,
        "length": length,
        "noisy": np.full(n, noisy),
    }
    return Segments._trusted(arrays if length.all() else _merged(arrays))
