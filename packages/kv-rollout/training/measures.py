"""How far a generated clip is from the real one, and what a control alone would give."""

import torch
import torch.nn.functional as F
from kv_rollout.geometry import ClipGeometry
from kv_rollout.latents import unpatchify
from kv_rollout.reference.views import CONTROL_SIDE, PATCH, luma
from torch import Tensor


def luma_psnr(made: Tensor, truth: Tensor) -> Tensor:
    """Return the PSNR in dB of every clip of luma ``[B, V, F, rows, columns]`` in [-1, 1]."""
    return -10 * ((made - truth) / 2).square().mean((1, 2, 3, 4)).clamp(min=1e-10).log10()


def colour_error(made: Tensor, truth: Tensor) -> Tensor:
    """Return the root mean square error of Cb and Cr at the last frame of every clip."""
    parts = []
    for pictures in (made, truth):
        last = pictures[:, :, :, -1:]
        bright = luma(last)
        red, blue = last[:, :, 0], last[:, :, 2]
        parts.append(torch.stack([(blue - bright) / 1.772, (red - bright) / 1.402]))
    return (parts[0] - parts[1]).square().mean((0, 2, 3, 4, 5)).sqrt()


def enlarge_controls(controls: Tensor, geometry: ClipGeometry) -> Tensor:
    """Return luma ``[B, V, F, rows, columns]``, bilinear from controls ``[B, V, F, X, 4]``."""
    small = unpatchify(
        controls, patch_h=geometry.patch_h, patch_w=geometry.patch_w, patch=CONTROL_SIDE
    )
    flat = small.squeeze(2).flatten(0, 1)
    size = (geometry.patch_h * PATCH, geometry.patch_w * PATCH)
    large = F.interpolate(flat, size=size, mode="bilinear", align_corners=False)
    return large.unflatten(0, controls.shape[:2])
