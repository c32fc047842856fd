"""The shape of a clip, and the one partition of its frames into steps and chunks."""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from kv_core.checks import check_int, check_tensor
from kv_core.errors import DtypeError, ShapeError, SpecError
from torch import Tensor

FrameRange = tuple[int, int]
"""Frames from the first number up to, and without, the second."""

_Frames = TypeVar("_Frames", int, npt.NDArray[np.int64], Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGeometry:
    """The sizes of a clip, counted in latent frames and in patches.

    Tokens run view by view, in a view frame by frame, in a frame row by row: view-major.

    Attributes:
        num_views: Views V, side by side.
        frames_per_view: Frames T of the whole clip.
        patch_h: Patches in a column of a frame.
        patch_w: Patches in a row of a frame.
        frames_per_chunk: Frames C of a step after frame 0, and of a memory slot.
        condition_frames: Frames K at the beginning that are given, from 0 to T.
        seconds_per_frame: Time between latent frames.
        position_stride: Positions in time from one view's band to the next, at least T; None is T.

    Raises:
        DtypeError: A count is not an integer, or the seconds are not a number.
        SpecError: A value is out of range.
    """

    num_views: int
    frames_per_view: int
    patch_h: int
    patch_w: int
    frames_per_chunk: int
    condition_frames: int = 0
    seconds_per_frame: float = 1.0
    position_stride: int | None = None

    def __post_init__(self) -> None:
        """Check every size, and keep it as a plain int or float."""
        set_field = object.__setattr__
        for name in ("num_views", "frames_per_view", "patch_h", "patch_w", "frames_per_chunk"):
            set_field(self, name, check_int(name, getattr(self, name), minimum=1))
        T = self.frames_per_view
        given = check_int("condition_frames", self.condition_frames)
        if not 0 <= given <= T:
            raise SpecError(
                f"condition_frames must be between 0 and the {T} frames of the clip, got {given}"
            )
        set_field(self, "condition_frames", given)
        seconds = check_positive("seconds_per_frame", self.seconds_per_frame)
        set_field(self, "seconds_per_frame", seconds)
        if self.position_stride is not None:
            stride = check_int("position_stride", self.position_stride)
            if stride < T:
                raise SpecError(
                    f"position_stride must be at least the {T} frames of the clip, got {stride}: "
                    "two views would share positions in time"
                )
            set_field(self, "position_stride", stride)

    @property
    def spatial_tokens(self) -> int:
        """Tokens X of one frame of one view."""
        return self.patch_h * self.patch_w

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one frame of all views, ``V * X``."""
        return self.num_views * self.spatial_tokens

    @property
    def stride(self) -> int:
        """Positions in time from one view's band to the next."""
        return self.frames_per_view if self.position_stride is None else self.position_stride


def check_positive(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number above 0.

    Raises:
        DtypeError: Not a number; a bool and a tensor are not.
        SpecError: Not finite, or not above 0.
    """
    number = check_number(name, value)
    if number <= 0:
        raise SpecError(f"{name} must be above 0, got {number:g}")
    return number


def check_number(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number.

    Raises:
        DtypeError: Not a number; a bool and a tensor are not.
        SpecError: NaN or infinite.
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool):
        raise DtypeError(f"{name} must be a number, got {type(value).__name__}; pass a float")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise SpecError(f"{name} must be finite, got {number}")
    return number


# --- the partition [1, C, C, ...]: steps, chunks, slots, windows and masks all come from here


def step_of(frame: _Frames, frames_per_chunk: int) -> _Frames:
    """Return the step that holds each frame, unchecked: -1 before frame 0, 0 for it, then 1, ..."""
    return ((frame + frames_per_chunk - 1) // frames_per_chunk + 1) * (frame >= 0) - 1


def _step_start(step: int, frames_per_chunk: int) -> int:
    return 0 if step == 0 else 1 + (step - 1) * frames_per_chunk


def causal_step(frame: int, frames_per_chunk: int) -> int:
    """Return the step of a frame: -1 before the clip, 0 for frame 0 alone, then C frames each.

    Raises:
        DtypeError: An argument is not an integer.
        SpecError: ``frames_per_chunk`` is below 1.
    """
    C = check_int("frames_per_chunk", frames_per_chunk, minimum=1)
    return step_of(check_int("frame", frame), C)


def causal_steps(frame_id: Tensor, frames_per_chunk: int) -> Tensor:
    """Return the step of every frame of an integer tensor of any shape, as `causal_step` does.

    Raises:
        DtypeError: ``frame_id`` is not an integer tensor.
        SpecError: ``frames_per_chunk`` is below 1.
    """
    C = check_int("frames_per_chunk", frames_per_chunk, minimum=1)
    if not isinstance(frame_id, Tensor) or frame_id.is_floating_point() or frame_id.is_complex():
        got = frame_id.dtype if isinstance(frame_id, Tensor) else type(frame_id).__name__
        raise DtypeError(f"frame_id must be an integer tensor, got {got}")
    if frame_id.dtype == torch.bool:
        raise DtypeError("frame_id must be an integer tensor, got torch.bool")
    return step_of(frame_id, C)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How many chunks a clip has, and how many frames of them end up in memory."""

    count: int
    committed_frames: int


def ar_chunk_plan(geometry: ClipGeometry) -> ChunkPlan:
    """Count the chunks of a clip and the frames that are committed: all but the last chunk's."""
    T, C, K = geometry.frames_per_view, geometry.frames_per_chunk, geometry.condition_frames
    if K == T:
        return ChunkPlan(count=0, committed_frames=0)
    first, last = step_of(K, C), step_of(T - 1, C)
    committed = max(_step_start(last, C) - K, 0)
    return ChunkPlan(count=last - first + 1, committed_frames=committed)


def ar_chunk_range(geometry: ClipGeometry, frame: int) -> FrameRange | None:
    """Return the frames from ``frame`` to the end of its step or of the clip.

    Returns:
        The range, or None if the clip ends before ``frame``.

    Raises:
        DtypeError: ``frame`` is not an integer.
        SpecError: It is negative.
    """
    frame = check_int("frame", frame, minimum=0)
    T, C = geometry.frames_per_view, geometry.frames_per_chunk
    if frame >= T:
        return None
    return frame, min(_step_start(step_of(frame, C) + 1, C), T)


def ar_chunk_ranges(geometry: ClipGeometry) -> list[FrameRange]:
    """Return the chunks that are generated, in order; none if every frame is given."""
    return control_chunk_ranges(geometry, geometry.condition_frames)


def control_chunk_ranges(
    geometry: ClipGeometry, first_frame: int = 0, count: int | None = None
) -> list[FrameRange]:
    """Return the chunks from ``first_frame`` to the end of the clip, at most ``count`` of them.

    Raises:
        DtypeError: A number is not an integer.
        SpecError: A number is negative.
    """
    if count is not None:
        count = check_int("count", count, minimum=0)
    ranges: list[FrameRange] = []
    frames = ar_chunk_range(geometry, first_frame)
    while frames is not None and (count is None or len(ranges) < count):
        ranges.append(frames)
        frames = ar_chunk_range(geometry, frames[1])
    return ranges


def control_window(geometry: ClipGeometry, history_slots: int) -> list[FrameRange]:
    """Return the control chunks that memory holds at first when history has so many slots.

    They reach from frame 0 to the end of the chunk in flight when history is full for the first
    time. Their number is the number of control slots; history and controls then move on together.

    Raises:
        DtypeError: ``history_slots`` is not an integer.
        SpecError: It is negative.
    """
    slots = check_int("history_slots", history_slots, minimum=0)
    generated = control_chunk_ranges(geometry, geometry.condition_frames, slots + 1)
    reach = generated[-1][1] if generated else geometry.frames_per_view
    ranges: list[FrameRange] = []
    while not ranges or ranges[-1][1] < reach:
        frames = ar_chunk_range(geometry, ranges[-1][1] if ranges else 0)
        assert frames is not None
        ranges.append(frames)
    return ranges


# --- attention across the views of one instant


def pack_cross_view_attention(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Arrange tokens so that every view of a frame can attend all views of that frame.

    Args:
        tokens: ``[B, V, T, X, D]``.

    Returns:
        Queries ``[B, T, V, X, D]``, a view of ``tokens``, and context ``[B, T, V, V * X, D]``: one
        copy of each frame, expanded over the views with stride 0, so it must not be written.

    Raises:
        DtypeError: ``tokens`` is not a tensor.
        ShapeError: It is not 5-D, or an axis is empty.
    """
    B, V, T, X, D = _check_packed(tokens, "B V T X D")
    query = tokens.transpose(1, 2)
    context = query.reshape(B, T, 1, V * X, D).expand(B, T, V, V * X, D)
    return query, context


def unpack_cross_view_attention(tokens: Tensor) -> Tensor:
    """Return packed tokens ``[B, T, V, X, D]`` as ``[B, V, T * X, D]``.

    Raises:
        DtypeError: ``tokens`` is not a tensor.
        ShapeError: It is not 5-D, or an axis is empty.
    """
    _check_packed(tokens, "B T V X D")
    return tokens.transpose(1, 2).flatten(2, 3)


def _check_packed(tokens: Tensor, axes: str) -> torch.Size:
    check_tensor("tokens", tokens, axes, {})
    if 0 in tokens.shape:
        names = ", ".join(axes.split())
        raise ShapeError(f"tokens [{names}] must have no empty axis, got {list(tokens.shape)}")
    return tokens.shape
