"""What the network is trained on: the whole-clip stream of a rollout, and who sees whom in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kv_kernels import SegmentMask
from kv_rollout.geometry import ClipGeometry, ar_chunk_ranges, control_chunk_ranges
from kv_rollout.positions import chunk_mrope_ids, vision_temporal_offset
from kv_rollout.segments import (
    Segments,
    TokenRole,
    frame_segments,
    padding_segments,
    text_segments,
)
from kv_rollout.visibility import Visibility, segment_table
from torch import Tensor

TEXT_TOKENS = 1
TEXT_SLOT = 128  # the prompt is padded to a whole block of keys
Span = tuple[TokenRole, int, int]  # role, first frame, one past the last


@dataclass(frozen=True, slots=True, eq=False)
class TrainingMask:
    """One way for the tokens of a stream to see each other, and how often to train with it."""

    name: str
    weight: float
    mask: SegmentMask


class ClipStream:
    """The stream of a clip: ``[current chunks | clean chunks | controls | given]``, and the prompt.

    It is the stream of `kv_rollout.clip_segments` in an order in which blocks of 128 tokens are
    mostly of one kind, less the clean tokens of the last chunk, which nobody may see. Order means
    nothing to the network, for every token carries its position.

    Args:
        geometry: The clip.
        device: Where masks live.
        block_size: Of the block masks.
    """

    def __init__(self, geometry: ClipGeometry, *, device: torch.device, block_size: int) -> None:
        self.geometry = geometry
        self.chunks = ar_chunk_ranges(geometry)
        spans: list[Span] = [(TokenRole.CURRENT, *chunk) for chunk in self.chunks]
        spans += [(TokenRole.CLEAN, *chunk) for chunk in self.chunks[:-1]]
        controls = control_chunk_ranges(geometry)
        spans += [(TokenRole.CONTROL, *chunk) for chunk in (*controls[1:], controls[0])]
        if geometry.condition_frames:
            spans.append((TokenRole.GIVEN, 0, geometry.condition_frames))
        self.spans = tuple(spans)
        # Given frames see nothing of what is generated, as in a rollout.
        queries = Segments.concat([frame_segments(geometry, *span, noisy=False) for span in spans])
        keys = Segments.concat(
            [queries, text_segments(TEXT_TOKENS), padding_segments(TEXT_SLOT - TEXT_TOKENS)]
        )
        self.tokens = queries.tokens
        self.masks = [
            TrainingMask(
                name,
                weight,
                SegmentMask.build(
                    table, queries.length, keys.length, block_size=block_size, device=device
                ),
            )
            for name, weight, table in _tables(queries, keys)
        ]
        self._weights = torch.tensor([mask.weight for mask in self.masks])

    def draw_mask(self) -> SegmentMask:
        """Pick a mask, each as often as its weight says."""
        return self.masks[int(torch.multinomial(self._weights, 1))].mask

    def positions(
        self, *, fps: float, stride: int, view_offsets: bool, device: torch.device
    ) -> list[Tensor]:
        """Return the positions ``[3, n]`` of every span."""
        geometry = replace(self.geometry, position_stride=stride)
        return [
            chunk_mrope_ids(
                geometry,
                chunk_start=start,
                chunk_frames=end - start,
                fps=fps,
                temporal_offset=vision_temporal_offset(TEXT_TOKENS),
                view_offsets=view_offsets,
                device=device,
            )
            for _, start, end in self.spans
        ]


def _tables(queries: Segments, keys: Segments) -> Sequence[tuple[str, float, np.ndarray]]:
    """Return ``(name, weight, table)`` of every visibility that a rollout may ask for."""

    def table(**options: object) -> np.ndarray:
        chosen = {"pattern": "causal", "scope": "all_views", "window_frames": None, **options}
        return np.asarray(segment_table(queries, keys, Visibility(**chosen)))

    def is_role(segments: Segments, *roles: TokenRole) -> np.ndarray:
        return np.isin(segments.role, [int(role) for role in roles])

    everything = table()
    targets = (TokenRole.CURRENT, TokenRole.CLEAN)
    both_targets = is_role(queries, *targets)[:, None] & is_role(keys, *targets)[None]
    q_current = is_role(queries, TokenRole.CURRENT)[:, None]
    q_target = is_role(queries, *targets)[:, None]
    k_given = is_role(keys, TokenRole.GIVEN)[None]
    k_clean = is_role(keys, TokenRole.CLEAN)[None]
    k_control = is_role(keys, TokenRole.CONTROL)[None]
    age = queries.step[:, None] - keys.step[None]

    def rigs(*groups: int) -> np.ndarray:
        """Split the views into rigs that know nothing of each other."""
        rig = np.array(groups)
        same = rig[queries.view.clip(0)][:, None] == rig[keys.view.clip(0)][None]
        return everything & (same | ~both_targets)

    def recent(slots: int) -> np.ndarray:
        """Keep a memory of so many chunks, as a streaming rollout does."""
        lost = (k_clean & (age > slots)) | (k_control & (age > slots + 1))
        return everything & ~lost

    views = int(queries.view.max()) + 1
    found = [
        ("all views", 0.60, everything),
        ("one view", 0.07, table(scope="same_view")),
        ("decomposed", 0.02, table(scope="decomposed")),
        ("current control", 0.03, table(pattern="current_control")),
        ("one chunk of history", 0.04, recent(1)),
        ("two chunks of history", 0.05, recent(2)),
        ("no given frames", 0.04, everything & ~(q_target & k_given)),
        ("no history", 0.03, everything & ~(q_current & k_clean)),
        ("neither", 0.04, everything & ~(q_current & (k_clean | k_given))),
    ]
    if views == 4:
        found += [("two by two", 0.05, rigs(0, 0, 1, 1)), ("three", 0.03, rigs(0, 0, 0, 1))]
    return found
