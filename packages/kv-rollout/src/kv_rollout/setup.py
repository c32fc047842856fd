"""What a rollout has decided before it touches the model, shared by everything that runs it."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from kv_core import KVFormat, SpecError, check_int
from torch import Tensor

from kv_rollout.geometry import ClipGeometry, ar_chunk_plan, control_chunk_ranges, control_window
from kv_rollout.positions import caption_mrope_ids, chunk_mrope_ids, vision_temporal_offset
from kv_rollout.segments import Segments, text_segments
from kv_rollout.visibility import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How many slots of C frames the memory of a clip has.

    ``streaming`` says that the clip is longer than the memory, so that slots are reused.
    """

    history_slots: int
    control_slots: int
    streaming: bool


def plan_memory(geometry: ClipGeometry, history_frames: int | None) -> MemoryPlan:
    """Size the memory of a clip.

    Args:
        geometry: The clip.
        history_frames: How many finished frames stay visible, rounded up to whole chunks; None
            keeps all of them.

    Raises:
        SpecError: ``history_frames`` is below 1.
    """
    kept = ar_chunk_plan(geometry).committed_frames
    if history_frames is not None:
        kept = min(check_int("history_frames", history_frames, minimum=1), kept)
    history_slots = -(-kept // geometry.frames_per_chunk)
    window = control_window(geometry, history_slots)
    if history_frames is not None and window[-1][1] < geometry.frames_per_view:
        return MemoryPlan(history_slots=history_slots, control_slots=len(window), streaming=True)
    every = len(control_chunk_ranges(geometry))
    return MemoryPlan(history_slots=history_slots, control_slots=every, streaming=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutSetup:
    """One clip's fixed facts: geometry, prompt, memory size, who sees whom, and how to attend.

    Valid once built by `ChunkRollout`, which checks what its user passed.
    """

    geometry: ClipGeometry
    batch_size: int
    text_ids: Tensor  # [B, n] int64 on the model's device
    view_text_tokens: tuple[int, ...] | None
    control_width: int
    visibility: Visibility
    history_frames: int | None
    memory: MemoryPlan
    memory_format: KVFormat
    fps: float
    view_offsets: bool
    mask_block_size: tuple[int, int]
    backend: str | None

    @property
    def temporal_offset(self) -> float:
        """First position in time of a picture, behind those of the prompt."""
        longest = max(self.view_text_tokens) if self.view_text_tokens else self.text_ids.shape[1]
        return vision_temporal_offset(longest)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk, and of a slot: ``C * V * X``."""
        return self.geometry.frames_per_chunk * self.geometry.tokens_per_frame

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values of everything but the prompt's ids."""
        return {
            "geometry": asdict(self.geometry),
            "batch_size": self.batch_size,
            "view_text_tokens": list(self.view_text_tokens) if self.view_text_tokens else None,
            "control_width": self.control_width,
            "visibility": asdict(self.visibility),
            "history_frames": self.history_frames,
            "memory": asdict(self.memory),
            "memory_format": self.memory_format.name,
            "fps": self.fps,
            "view_offsets": self.view_offsets,
            "mask_block_size": list(self.mask_block_size),
            "backend": self.backend,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], text_ids: Tensor) -> "RolloutSetup":
        """Return the setup that `as_dict` described."""
        captions = values["view_text_tokens"]
        return cls(
            geometry=ClipGeometry(**values["geometry"]),
            batch_size=values["batch_size"],
            text_ids=text_ids,
            view_text_tokens=tuple(captions) if captions else None,
            control_width=values["control_width"],
            visibility=Visibility(**values["visibility"]),
            history_frames=values["history_frames"],
            memory=MemoryPlan(**values["memory"]),
            memory_format=KVFormat[values["memory_format"]],
            fps=values["fps"],
            view_offsets=values["view_offsets"],
            mask_block_size=tuple(values["mask_block_size"]),
            backend=values["backend"],
        )

    def text_segments(self) -> Segments:
        """The prompt as segments."""
        return text_segments(self.text_ids.shape[1], view_text_tokens=self.view_text_tokens)

    def text_positions(self, device: torch.device) -> Tensor:
        """Positions ``[3, n]`` of the prompt."""
        n = self.text_ids.shape[1]
        if n == 0:
            return torch.zeros(3, 0, device=device)
        return caption_mrope_ids(self.view_text_tokens or (n,), device=device)[0].float()

    def positions(self, start: int, end: int, device: torch.device) -> Tensor:
        """Positions ``[3, V * (end - start) * X]`` of a range of frames."""
        return chunk_mrope_ids(
            self.geometry,
            chunk_start=start,
            chunk_frames=end - start,
            fps=self.fps,
            temporal_offset=self.temporal_offset,
            view_offsets=self.view_offsets,
            device=device,
        )


def check_captions(view_text_tokens: tuple[int, ...] | None, num_views: int, tokens: int) -> None:
    """Refuse caption lengths that are not one per view, or do not add up to the prompt.

    Raises:
        SpecError: Their number, one of them, or their sum is wrong.
    """
    if view_text_tokens is None:
        return
    if len(view_text_tokens) != num_views:
        raise SpecError(
            f"view_text_tokens must have one caption length per view, "
            f"{num_views} of them, got {len(view_text_tokens)}"
        )
    for count in view_text_tokens:
        check_int("view_text_tokens", count, minimum=1)
    if sum(view_text_tokens) != tokens:
        raise SpecError(
            f"view_text_tokens add up to {sum(view_text_tokens)} tokens, "
            f"but text_ids holds {tokens}; one of the two is out of date"
        )
