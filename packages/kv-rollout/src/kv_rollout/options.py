"""Check what the user of a rollout passed, before the model is touched, in their units."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
from kv_core import (
    DtypeError,
    KVFormat,
    RolloutStateError,
    ShapeError,
    SpecError,
    check_int,
    check_tensor,
)
from kv_kernels import ROWS, check_block_size
from torch import Tensor

from kv_rollout.geometry import ClipGeometry
from kv_rollout.model import ControlSource, RolloutModel, TensorControls, check_finite
from kv_rollout.positions import check_position_limit
from kv_rollout.sampling import NoiseSource, Sampler, SampleType
from kv_rollout.setup import RolloutSetup, check_captions, plan_memory
from kv_rollout.visibility import AttentionPattern, AttentionScope, Visibility


class RolloutOptions(TypedDict, total=False):
    """What `run_rollout` hands on to `ChunkRollout`, which explains each."""

    text_ids: Tensor | None
    view_text_tokens: Sequence[int] | None
    negative_text_ids: Tensor | None
    guidance_scale: float | Callable[[int], float] | None
    condition_tokens: Tensor | None
    fps: float
    seed: int | Sequence[int]
    schedule: Sequence[float] | Tensor | None
    sample_type: SampleType | None
    history_frames: int | None
    token_frames: int | None
    attention_pattern: AttentionPattern
    attention_scope: AttentionScope
    decomposed_temporal_window_seconds: float | None
    view_offsets: bool
    mask_block_size: int | tuple[int, int]
    backend: str | None
    memory_format: KVFormat | None
    batch_size: int
    sampler: Sampler | None
    noise: NoiseSource | None


def check_setups(
    model: RolloutModel,
    *,
    geometry: ClipGeometry,
    text_ids: Tensor | None,
    view_text_tokens: Sequence[int] | None,
    negative_text_ids: Tensor | None,
    fps: float,
    history_frames: int | None,
    attention_pattern: AttentionPattern,
    attention_scope: AttentionScope,
    decomposed_temporal_window_seconds: float | None,
    view_offsets: bool,
    mask_block_size: int | tuple[int, int],
    backend: str | None,
    memory_format: KVFormat | None,
    batch_size: int,
) -> list[RolloutSetup]:
    """Return the setup of the prompt and, if there is one, of the negative prompt."""
    if not isinstance(geometry, ClipGeometry):
        raise DtypeError(f"geometry must be a ClipGeometry, got {type(geometry).__name__}")
    if geometry.condition_frames == geometry.frames_per_view:
        raise SpecError(
            f"all {geometry.frames_per_view} frames of the clip are given: nothing is left to "
            "generate; raise frames_per_view or lower condition_frames"
        )
    check_int("batch_size", batch_size, minimum=1)
    if isinstance(fps, bool) or not math.isfinite(fps) or fps <= 0:
        raise SpecError(f"fps must be a positive number of frames per second, got {fps}")
    known = [row.backend for row in ROWS if row.op == "slot_attention"]
    if backend is not None and backend not in known:
        raise SpecError(
            f"backend must be one of {', '.join(dict.fromkeys(known))}, got {backend!r}"
        )
    if memory_format is not None and not isinstance(memory_format, KVFormat):
        raise DtypeError(f"memory_format must be a KVFormat, got {memory_format!r}")
    own = KVFormat.of(model.dtype)
    if memory_format not in (None, own, KVFormat.INT8):
        raise SpecError(
            f"memory_format {memory_format.name} does not fit a model in {own.name}: "
            f"use {own.name} or INT8"
        )
    visibility = Visibility.from_seconds(
        pattern=attention_pattern,
        scope=attention_scope,
        window_seconds=decomposed_temporal_window_seconds,
        seconds_per_frame=geometry.seconds_per_frame,
    )
    captions = None if view_text_tokens is None else tuple(view_text_tokens)
    if text_ids is None:
        text_ids = model.default_text_ids
    prompts = {"text_ids": text_ids}
    if negative_text_ids is not None:
        prompts["negative_text_ids"] = negative_text_ids
    setups = []
    for name, ids in prompts.items():
        checked = _check_text(name, ids, batch_size)
        check_captions(captions, geometry.num_views, checked.shape[1])
        setups.append(
            RolloutSetup(
                geometry=geometry,
                batch_size=batch_size,
                text_ids=checked.to(model.device),
                view_text_tokens=captions,
                control_width=model.control_width,
                visibility=visibility,
                history_frames=history_frames,
                memory=plan_memory(geometry, history_frames),
                memory_format=memory_format or own,
                fps=float(fps),
                view_offsets=bool(view_offsets),
                mask_block_size=check_block_size(mask_block_size),
                backend=backend,
            )
        )
        check_position_limit(
            geometry,
            fps=float(fps),
            temporal_offset=setups[-1].temporal_offset,
            limit=model.position_limit,
            view_offsets=bool(view_offsets),
        )
    return setups


def check_condition(
    model: RolloutModel, setup: RolloutSetup, tokens: Tensor | None
) -> Tensor | None:
    """Return the given frames ``[B, V, K, X, W]`` in the model's dtype, on its device."""
    K = setup.geometry.condition_frames
    if tokens is None:
        if K > 0:
            raise SpecError(
                f"the clip begins with {K} given frames: pass them as condition_tokens, "
                "or set condition_frames=0"
            )
        return None
    if K == 0:
        raise SpecError("condition_tokens were passed, but the clip has condition_frames=0")
    _check_frames("condition_tokens", tokens, setup, frames=K, width=model.token_width)
    check_finite("condition_tokens", tokens)
    return tokens.detach().to(model.device, model.dtype)


def check_controls(
    model: RolloutModel, setup: RolloutSetup, controls: ControlSource | Tensor
) -> ControlSource:
    """Return a source of controls; one made of a tensor has been checked whole."""
    if isinstance(controls, Tensor):
        controls = TensorControls(controls)
    if not isinstance(controls, TensorControls):
        if not callable(getattr(controls, "tokens", None)):
            raise DtypeError(
                "controls must be a tensor [B, V, T, X, Wc] or have tokens(start, end), "
                f"got {type(controls).__name__}"
            )
        return controls
    T, frames = setup.geometry.frames_per_view, controls.shape[2]
    if frames < T:
        raise ShapeError(f"controls cover {frames} frames, but the clip has {T}")
    _check_frames("controls", controls.tokens(0, frames), setup, frames, model.control_width)
    return controls


def check_guidance(
    scale: float | Callable[[int], float] | None, *, branches: int
) -> float | Callable[[int], float]:
    """Return the guidance scale, 1 when there is no negative prompt."""
    if branches == 1:
        if scale is not None:
            raise SpecError("guidance_scale needs negative_text_ids to steer away from")
        return 1.0
    if scale is None:
        raise SpecError(
            "negative_text_ids need a guidance_scale: a number, or a function of the chunk"
        )
    if not callable(scale) and (isinstance(scale, bool) or not math.isfinite(scale)):
        raise SpecError(f"guidance_scale must be finite, got {scale}")
    return scale if callable(scale) else float(scale)


def check_extension(
    setups: Sequence[RolloutSetup], frames_per_view: int
) -> tuple[ClipGeometry, list[RolloutSetup]]:
    """Return the longer geometry and the setups for it, or say why there cannot be one."""
    old = setups[0].geometry
    T, C = old.frames_per_view, old.frames_per_chunk
    check_int("frames_per_view", frames_per_view, minimum=T + 1)
    if frames_per_view > old.stride:
        raise SpecError(
            f"a clip of {frames_per_view} frames needs position_stride of at least "
            f"{frames_per_view}, but this one was begun with {old.stride}"
        )
    if (T - 1) % C:
        raise RolloutStateError(
            f"the last chunk of the clip is cut: it can be extended from {T + C - (T - 1) % C} "
            f"frames, a first frame and whole chunks of {C}, but it has {T}"
        )
    longer = replace(old, frames_per_view=frames_per_view, position_stride=old.stride)
    memory = plan_memory(longer, setups[0].history_frames)
    if memory != setups[0].memory:
        raise RolloutStateError(
            f"memory was sized for a clip of {T} frames: begin with history_frames, and with a "
            "clip longer than them, to extend it"
        )
    return longer, [replace(setup, geometry=longer) for setup in setups]


def _check_text(name: str, ids: Tensor, batch_size: int) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError(f"{name} must be an integer tensor, got {got}")
    if ids.ndim == 1:
        ids = ids.expand(batch_size, -1)
    check_tensor(name, ids, "B n", {"B": batch_size})
    return ids.to(torch.int64)


def _check_frames(name: str, tokens: Tensor, setup: RolloutSetup, frames: int, width: int) -> None:
    geometry = setup.geometry
    sizes = {
        "B": setup.batch_size,
        "V": geometry.num_views,
        "F": frames,
        "X": geometry.spatial_tokens,
        "W": width,
    }
    check_tensor(name, tokens, "B V F X W", sizes)
    if not tokens.is_floating_point():
        raise DtypeError(f"{name} must be floating, got {tokens.dtype}; convert them first")
