"""A rollout in a few dozen lines, batched and on the device, to watch a training run.

It keeps keys and values in plain lists under dense masks. The rollout that ships is
`kv_rollout.run_rollout`; the figures of the model card are measured with that one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from kv_rollout.geometry import ClipGeometry, ar_chunk_ranges, control_chunk_ranges
from kv_rollout.latents import patchify, unpatchify
from kv_rollout.positions import caption_mrope_ids, chunk_mrope_ids, vision_temporal_offset
from kv_rollout.reference import ReferenceModel
from kv_rollout.reference.network import ReferenceNetwork
from kv_rollout.reference.views import (
    PATCH,
    ViewGrid,
    control_tokens,
    cut_views,
    fit_canvas,
    luma,
)
from kv_rollout.segments import Segments, TokenRole, frame_segments, text_segments
from kv_rollout.visibility import Visibility, segment_mask
from measures import colour_error, enlarge_controls, luma_psnr
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from synthetic import FilmMaker

SCHEDULE = ReferenceModel.default_schedule
_VISIBILITY = Visibility(pattern="causal", scope="all_views", window_frames=None)


@torch.no_grad()
def generate(
    network: ReferenceNetwork,
    geometry: ClipGeometry,
    controls: Tensor,
    given: Tensor,
    *,
    fps: float = 30.0,
    schedule: Sequence[float] = SCHEDULE,
    remember: bool = True,
    seed: int = 0,
) -> Tensor:
    """Return ``[B, V, T, X, W]``; with ``remember`` off, given and finished frames stay unseen.

    Args:
        network: In any dtype; runs under autocast on a GPU.
        geometry: The clip.
        controls: ``[B, V, T, X, Wc]``.
        given: ``[B, V, K, X, W]``.
        fps: Frames per second.
        schedule: Noise levels, without the last 0.
        remember: Whether given and finished frames enter the memory.
        seed: Of the noise.
    """
    device, B = controls.device, controls.shape[0]
    dice = torch.Generator(device).manual_seed(seed)
    text_ids = torch.zeros(B, 1, dtype=torch.int64, device=device)
    text = network.encode_text(text_ids, caption_mrope_ids((1,), device=device)[0].float())
    memory: list[tuple[Segments, list[tuple[Tensor, Tensor]]]] = [(text_segments(1), list(text))]
    still = torch.zeros((), device=device)

    def run(
        role: TokenRole, start: int, end: int, tokens: Tensor, timestep: Tensor, keep: bool
    ) -> Tensor:
        mine = frame_segments(geometry, role, start, end)
        keys = Segments.concat([mine, *(segments for segments, _ in memory)])
        mask = segment_mask(mine, keys, _VISIBILITY, block_size=128, device=device).dense()
        places = chunk_mrope_ids(
            geometry, chunk_start=start, chunk_frames=end - start, fps=fps,
            temporal_offset=vision_temporal_offset(1), device=device,
        )  # fmt: skip
        fresh: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fresh.append((k, v))
            every = [(k, v), *(pairs[layer] for _, pairs in memory)]
            k, v = (torch.cat([pair[i].to(q.dtype) for pair in every], dim=2) for i in (0, 1))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        flow: Tensor = network(
            tokens, role=role, timestep=timestep, positions=places, attend=attend
        )
        if keep:
            memory.append((mine, fresh))
        return flow

    tokens = torch.zeros(*controls.shape[:-1], given.shape[-1], device=device)
    K = geometry.condition_frames
    tokens[:, :, :K] = given
    if remember:
        run(TokenRole.GIVEN, 0, K, given.flatten(1, 3), still, True)
    waiting = control_chunk_ranges(geometry)
    for start, end in ar_chunk_ranges(geometry):
        while waiting and waiting[0][0] < end:
            first, last = waiting[0]
            waiting = waiting[1:]
            run(
                TokenRole.CONTROL,
                first,
                last,
                controls[:, :, first:last].flatten(1, 3),
                still,
                True,
            )
        shape = tokens[:, :, start:end].flatten(1, 3).shape
        x = torch.randn(shape, generator=dice, device=device)
        for sigma, lower in zip(schedule, (*schedule[1:], 0.0), strict=True):
            timestep = torch.tensor(sigma * 1000, device=device)
            x = x + (lower - sigma) * run(TokenRole.CURRENT, start, end, x, timestep, False).float()
        tokens[:, :, start:end] = x.view_as(tokens[:, :, start:end])
        if remember:
            run(TokenRole.CLEAN, start, end, x, still, True)
    return tokens


class Check:
    """Roll out a few films that no weight has seen, and measure them.

    Args:
        films: Views ``[B, V, 3, T, height, width]`` in [-1, 1].
        grid: How they were cut.
    """

    def __init__(self, films: Tensor, grid: ViewGrid) -> None:
        self.films, self.grid = films, grid
        self.geometry = grid.geometry(films.shape[3])
        self.controls = control_tokens(films)
        self.given = patchify(films[:, :, :, :1], PATCH)
        self.made: Tensor | None = None

    def __call__(self, network: ReferenceNetwork) -> dict[str, float]:
        """Return luma PSNR (of the real film and of all), the control's own, and colour errors."""
        device = self.films.device
        made = []
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for remember in (True, False):
                tokens = generate(
                    network, self.geometry, self.controls, self.given, remember=remember
                )
                made.append(self._pictures(tokens))
        self.made = made[0]
        whole, empty = (colour_error(pictures, self.films) for pictures in made)
        bright = luma(self.films)[:, :, 1:]
        psnr = luma_psnr(luma(made[0])[:, :, 1:], bright)
        plain = luma_psnr(enlarge_controls(self.controls, self.geometry)[:, :, 1:], bright)
        return {
            "film_psnr": float(psnr[0]),
            "film_bilinear": float(plain[0]),
            "film_colour_ratio": float(whole[0] / empty[0]),
            "psnr": float(psnr.mean()),
            "bilinear": float(plain.mean()),
            "colour_ratio": float((whole / empty).mean()),
        }

    def picture(self, path: Path) -> None:
        """Write what was made below what was meant: some frames of the first view of each film."""
        assert self.made is not None
        rows = []
        for film, made in zip(self.films, self.made, strict=True):
            for pictures in (film, made):
                frames = [pictures[0, :, f] for f in range(0, pictures.shape[2], 4)]
                rows.append(torch.cat([*frames, pictures[-1, :, -1]], dim=-1))
        sheet = torch.cat(rows, dim=-2).clamp(-1, 1).add(1).mul(127.5).round()
        image = Image.fromarray(sheet.permute(1, 2, 0).cpu().numpy().astype(np.uint8))
        image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST).save(path)

    def _pictures(self, tokens: Tensor) -> Tensor:
        g = self.geometry
        return unpatchify(tokens, patch_h=g.patch_h, patch_w=g.patch_w, patch=PATCH).clamp(-1, 1)


def check_films(film: Tensor, maker: "FilmMaker", *, frames: int) -> Check:
    """Make a check of the real film ``[F, 3, rows, columns]`` uint8 and of three drawn ones."""
    grid = maker.grid
    canvas = fit_canvas(film[:frames].permute(0, 2, 3, 1), grid)
    real = cut_views(canvas, grid)[None].to(maker.device)
    with torch.no_grad():
        drawn = maker.batch(3, frames, film_fraction=0.0)
    return Check(torch.cat([real, drawn]), grid)
