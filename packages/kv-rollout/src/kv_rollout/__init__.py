"""Chunk-by-chunk multi-view generation over a fixed-slot key/value cache."""

from kv_rollout.geometry import (
    ChunkPlan,
    ClipGeometry,
    FrameRange,
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
from kv_rollout.latents import patchify, unpatchify
from kv_rollout.memory import MemoryLayout, build_memory_layout, pass_segments
from kv_rollout.model import (
    Attend,
    ControlSource,
    RolloutModel,
    RolloutState,
    SlotNetwork,
    TensorControls,
)
from kv_rollout.positions import (
    caption_mrope_ids,
    chunk_mrope_ids,
    clip_mrope_ids,
    temporal_positions,
    vision_temporal_offset,
)
from kv_rollout.rollout import ChunkRollout, run_rollout
from kv_rollout.sampling import (
    FlowSampler,
    NoiseSource,
    PhiloxNoise,
    Sampler,
    check_schedule,
)
from kv_rollout.segments import (
    Segments,
    TokenRole,
    clip_segments,
    frame_segments,
    padding_segments,
    text_segments,
)
from kv_rollout.setup import MemoryPlan, RolloutSetup, plan_memory
from kv_rollout.slot_state import SlotState
from kv_rollout.trace import ChunkTrace, Rollout
from kv_rollout.visibility import MaskCache, Visibility, segment_mask, segment_table

__all__ = [
    "Attend",
    "ChunkPlan",
    "ChunkRollout",
    "ChunkTrace",
    "ClipGeometry",
    "ControlSource",
    "FlowSampler",
    "FrameRange",
    "MaskCache",
    "MemoryLayout",
    "MemoryPlan",
    "NoiseSource",
    "PhiloxNoise",
    "Rollout",
    "RolloutModel",
    "RolloutSetup",
    "RolloutState",
    "Sampler",
    "Segments",
    "SlotNetwork",
    "SlotState",
    "TensorControls",
    "TokenRole",
    "Visibility",
    "ar_chunk_plan",
    "ar_chunk_range",
    "ar_chunk_ranges",
    "build_memory_layout",
    "caption_mrope_ids",
    "causal_step",
    "causal_steps",
    "check_schedule",
    "chunk_mrope_ids",
    "clip_mrope_ids",
    "clip_segments",
    "control_chunk_ranges",
    "control_window",
    "frame_segments",
    "pack_cross_view_attention",
    "padding_segments",
    "pass_segments",
    "patchify",
    "plan_memory",
    "run_rollout",
    "segment_mask",
    "segment_table",
    "temporal_positions",
    "text_segments",
    "unpack_cross_view_attention",
    "unpatchify",
    "vision_temporal_offset",
]
