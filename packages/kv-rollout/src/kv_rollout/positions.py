"""Positions of tokens on three axes, time, row and column, as multimodal rotary embeddings take."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from kv_core.checks import check_int
from kv_core.errors import SpecError
from torch import Tensor

from kv_rollout.geometry import ClipGeometry, check_number, check_positive

BASE_FPS = 24.0
"""Frames per second at which neighbouring frames are one position apart."""

MODALITY_MARGIN = 15_000.0
"""Positions in time between the end of the prompt and the first frame."""


def vision_temporal_offset(n_text: int, *, modality_margin: float = MODALITY_MARGIN) -> float:
    """Return the position in time of frame 0 behind a prompt of ``n_text`` tokens.

    Raises:
        DtypeError: ``n_text`` is not an integer, or the margin not a number.
        SpecError: One of them is negative or not finite.
    """
    tokens = check_int("text tokens", n_text, minimum=0)
    margin = check_number("modality_margin", modality_margin)
    if margin < 0:
        raise SpecError(f"modality_margin must be at least 0, got {margin:g}")
    return tokens + margin


def caption_mrope_ids(
    counts: Sequence[int], device: torch.device | str | None = None
) -> tuple[Tensor, int]:
    """Return the positions of captions, each of which starts at 0 again.

    Args:
        counts: Tokens of each caption; one number for a shared prompt.
        device: Where the positions go.

    Returns:
        FP32 ``[3, sum(counts)]``, the same number on all three axes, and the longest caption's
        tokens.

    Raises:
        DtypeError: A count is not an integer.
        SpecError: There is no caption, or a count is negative.
    """
    lengths = [check_int(f"caption {i}", count, minimum=0) for i, count in enumerate(counts)]
    if not lengths:
        raise SpecError("there must be at least one caption, got none")
    ids = np.concatenate([np.arange(length, dtype=np.float32) for length in lengths])
    row = torch.from_numpy(ids).to(device or "cpu")
    return row.expand(3, -1).contiguous(), max(lengths)


def temporal_positions(
    geometry: ClipGeometry, frames: Sequence[int], *, view_offsets: bool = True
) -> Tensor:
    """Return the place in time of frames in every view, before it is scaled and shifted.

    Args:
        geometry: The clip.
        frames: Frames of the clip.
        view_offsets: Give each view a band of positions of its own, ``geometry.stride`` apart.

    Returns:
        int64 ``[V * len(frames)]``, view by view.

    Raises:
        DtypeError: A frame is not an integer.
        SpecError: A frame is not of the clip.
    """
    last = geometry.frames_per_view - 1
    checked = [check_int("frame", frame, minimum=0, maximum=last) for frame in frames]
    return torch.from_numpy(_places(geometry, np.array(checked, np.int64), view_offsets))


def clip_mrope_ids(
    geometry: ClipGeometry,
    *,
    fps: float,
    temporal_offset: float,
    base_fps: float = BASE_FPS,
    view_offsets: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of a whole clip; see `chunk_mrope_ids`."""
    return chunk_mrope_ids(
        geometry,
        chunk_start=0,
        chunk_frames=geometry.frames_per_view,
        fps=fps,
        temporal_offset=temporal_offset,
        base_fps=base_fps,
        view_offsets=view_offsets,
        device=device,
    )


def chunk_mrope_ids(
    geometry: ClipGeometry,
    *,
    chunk_start: int,
    chunk_frames: int,
    fps: float,
    temporal_offset: float,
    base_fps: float = BASE_FPS,
    view_offsets: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of a range of frames, in the order of their tokens.

    A frame's place in time is ``(view * stride + frame) * base_fps / fps + temporal_offset``, in
    FP64 and rounded once. Rows and columns count from 0 in every frame. Controls have the positions
    of the frames they describe.

    Args:
        geometry: The clip.
        chunk_start: First frame, counted in the whole clip.
        chunk_frames: Number of frames F.
        fps: Frames per second of the clip.
        temporal_offset: Place in time of frame 0 of view 0.
        base_fps: Frames per second at which frames are one position apart.
        view_offsets: Give each view a band of positions of its own. Without it, nothing in the
            positions tells views apart.
        device: Where the positions go.

    Returns:
        FP32 ``[3, V * F * X]``: time, row and column.

    Raises:
        DtypeError: A number is of the wrong type.
        SpecError: The frames are not of the clip, or a rate is not finite and above 0.
    """
    T = geometry.frames_per_view
    start = check_int("chunk_start", chunk_start)
    frames = check_int("chunk_frames", chunk_frames)
    if frames < 1 or start < 0 or start + frames > T:
        raise SpecError(
            f"frames {start} to {start + frames} are not a range of a clip of {T} frames"
        )
    scale, offset = _time_scale(fps, base_fps), check_number("temporal_offset", temporal_offset)
    places = _places(geometry, np.arange(start, start + frames), view_offsets)
    time = torch.from_numpy((places * scale + offset).astype(np.float32)).to(device or "cpu")
    ids = time.new_empty(3, len(places), geometry.patch_h, geometry.patch_w)
    ids[0] = time[:, None, None]
    ids[1] = torch.arange(geometry.patch_h, device=ids.device)[:, None]
    ids[2] = torch.arange(geometry.patch_w, device=ids.device)
    return ids.flatten(1)


def check_position_limit(
    geometry: ClipGeometry,
    *,
    fps: float,
    temporal_offset: float,
    limit: float | None,
    base_fps: float = BASE_FPS,
    view_offsets: bool = True,
) -> None:
    """Refuse a clip whose positions in time do not stay below a model's limit.

    Args:
        geometry: The clip; all of its frames count.
        fps: Frames per second of the clip.
        temporal_offset: Place in time of frame 0 of view 0.
        limit: First position that the model cannot take, such as the length of its table; None for
            a model that takes any.
        base_fps: Frames per second at which frames are one position apart.
        view_offsets: Whether each view has a band of positions of its own.

    Raises:
        DtypeError: A number is of the wrong type.
        SpecError: The last frame's position is at or past the limit, or a number is out of range.
    """
    if limit is None:
        return
    bound = check_positive("the position limit", limit)
    bands = geometry.num_views - 1 if view_offsets else 0
    place = bands * geometry.stride + geometry.frames_per_view - 1
    offset = check_number("temporal_offset", temporal_offset)
    last = place * _time_scale(fps, base_fps) + offset
    if last >= bound:
        views = f" of {geometry.num_views} views" if bands else ""
        raise SpecError(
            f"a clip of {geometry.frames_per_view} frames{views} needs {math.floor(last) + 1:,} "
            f"positions in time, but the model has {bound:,.12g}; make the clip shorter, or "
            "position_stride smaller"
        )


def _time_scale(fps: float, base_fps: float) -> float:
    return check_positive("base_fps", base_fps) / check_positive("fps", fps)


def _places(
    geometry: ClipGeometry, frames: npt.NDArray[np.int64], view_offsets: bool
) -> npt.NDArray[np.int64]:
    bands = np.arange(geometry.num_views) * (geometry.stride if view_offsets else 0)
    return (bands[:, None] + frames[None, :]).reshape(-1)
