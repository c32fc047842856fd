"""Cut a video into overlapping camera views, and make tokens, controls and given frames of them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kv_core import DtypeError, ShapeError, SpecError, check_int
from torch import Tensor

from kv_rollout.geometry import ClipGeometry
from kv_rollout.latents import patchify

PATCH = 8  # pixels on a side of a patch, which is one token
CONTROL_SIDE = 2  # a control holds this many luma means on a side of a patch
POSITION_STRIDE = 32  # positions in time between two views, if the clip is not longer
_LUMA = (0.299, 0.587, 0.114)  # BT.601


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGrid:
    """Cameras side by side that overlap: pictures of one size, cut from a canvas at equal steps.

    Views are numbered row by row. The last row may be shorter; what it leaves free is seen by no
    camera.

    Args:
        num_views: Number of views V.
        height: Rows of pixels of a view.
        width: Columns of pixels of a view.
        step_y: Rows between one view and the one below it, at most ``height``.
        step_x: Columns between one view and the next, at most ``width``.

    Raises:
        SpecError: A size is below 1, a side is not a multiple of the patch, or a step leaves a gap.
    """

    num_views: int = 4
    height: int = 48
    width: int = 64
    step_y: int = 32
    step_x: int = 48

    def __post_init__(self) -> None:
        for name in ("num_views", "height", "width", "step_y", "step_x"):
            check_int(name, getattr(self, name), minimum=1)
        for name, side, step in (
            ("height", self.height, self.step_y),
            ("width", self.width, self.step_x),
        ):
            if side % PATCH:
                raise SpecError(f"{name} must be a multiple of {PATCH} pixels, got {side}")
            if step > side:
                raise SpecError(f"a step of {step} leaves a gap between views with {name}={side}")

    @property
    def columns(self) -> int:
        """Views in a row: up to three stand in one row, more in two."""
        return self.num_views if self.num_views <= 3 else -(-self.num_views // 2)

    @property
    def rows(self) -> int:
        """Rows of views."""
        return -(-self.num_views // self.columns)

    @property
    def canvas_height(self) -> int:
        """Rows of pixels that all views cover together."""
        return self.height + (self.rows - 1) * self.step_y

    @property
    def canvas_width(self) -> int:
        """Columns of pixels that all views cover together."""
        return self.width + (self.columns - 1) * self.step_x

    def corner(self, view: int) -> tuple[int, int]:
        """Return the top row and the left column of a view on the canvas."""
        return view // self.columns * self.step_y, view % self.columns * self.step_x

    def geometry(
        self,
        frames: int,
        *,
        frames_per_chunk: int = 4,
        condition_frames: int = 1,
        fps: float = 30.0,
    ) -> ClipGeometry:
        """Return the geometry of a clip of ``frames`` frames, as the shipped weights know it."""
        return ClipGeometry(
            num_views=self.num_views,
            frames_per_view=frames,
            patch_h=self.height // PATCH,
            patch_w=self.width // PATCH,
            frames_per_chunk=frames_per_chunk,
            condition_frames=condition_frames,
            seconds_per_frame=1 / fps,
            position_stride=max(frames, POSITION_STRIDE),
        )


def fit_canvas(video: Tensor, grid: ViewGrid) -> Tensor:
    """Scale a video until it just covers the canvas of all views, and cut off what sticks out.

    Args:
        video: ``[F, rows, columns, 3]`` uint8, RGB.
        grid: The views.

    Returns:
        FP32 ``[3, F, canvas_height, canvas_width]`` in [-1, 1].

    Raises:
        ShapeError: The video is not 4-D, is empty, or has not three colours.
        DtypeError: It is not uint8.
    """
    if video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        raise ShapeError(f"video must be [F, rows, columns, 3], got {list(video.shape)}")
    if video.dtype != torch.uint8:
        raise DtypeError(f"video must be uint8 RGB, got {video.dtype}")
    _, rows, columns, _ = video.shape
    scale = max(grid.canvas_height / rows, grid.canvas_width / columns)
    size = (
        max(grid.canvas_height, round(rows * scale)),
        max(grid.canvas_width, round(columns * scale)),
    )
    frames = [
        F.interpolate(
            frame.permute(2, 0, 1)[None].float(), size=size, mode="bilinear", antialias=True
        )[0]
        for frame in video
    ]
    canvas = torch.stack(frames, dim=1) / 127.5 - 1
    top, left = (size[0] - grid.canvas_height) // 2, (size[1] - grid.canvas_width) // 2
    return canvas[..., top : top + grid.canvas_height, left : left + grid.canvas_width].clamp(-1, 1)


def cut_views(canvas: Tensor, grid: ViewGrid) -> Tensor:
    """Return the views ``[V, 3, F, height, width]`` of a canvas ``[3, F, rows, columns]``."""
    if canvas.shape[-2:] != (grid.canvas_height, grid.canvas_width):
        raise ShapeError(
            f"a canvas of {grid.num_views} views must have {grid.canvas_height} x "
            f"{grid.canvas_width} pixels, got {canvas.shape[-2]} x {canvas.shape[-1]}; "
            "use fit_canvas"
        )
    corners = [grid.corner(view) for view in range(grid.num_views)]
    return torch.stack([canvas[..., y : y + grid.height, x : x + grid.width] for y, x in corners])


def stitch_views(views: Tensor, grid: ViewGrid) -> Tensor:
    """Lay views back on their canvas, averaging where they overlap; the inverse of `cut_views`.

    Args:
        views: ``[V, 3, F, height, width]``.
        grid: The views.

    Returns:
        ``[3, F, canvas_height, canvas_width]``; pixels that no view covers are 0, mid-grey.
    """
    V, Ch, frames, height, width = views.shape
    if (V, height, width) != (grid.num_views, grid.height, grid.width):
        raise ShapeError(
            f"views must be {grid.num_views} of {grid.height} x {grid.width} pixels, "
            f"got {V} of {height} x {width}"
        )
    total = views.new_zeros(Ch, frames, grid.canvas_height, grid.canvas_width)
    count = views.new_zeros(grid.canvas_height, grid.canvas_width)
    for view in range(V):
        y, x = grid.corner(view)
        total[..., y : y + height, x : x + width] += views[view]
        count[y : y + height, x : x + width] += 1
    return total / count.clamp(min=1)


def luma(pixels: Tensor) -> Tensor:
    """Return BT.601 luma ``[..., F, rows, columns]`` of RGB ``[..., 3, F, rows, columns]``."""
    red, green, blue = pixels.unbind(-4)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def control_tokens(views: Tensor) -> Tensor:
    """Return what a control says of every patch: 2 x 2 means of luma, and no colour.

    Args:
        views: RGB in [-1, 1], ``[B, V, 3, F, rows, columns]``.

    Returns:
        ``[B, V, F, X, 4]``, the means row by row.
    """
    cell = PATCH // CONTROL_SIDE
    bright = luma(views)
    means = F.avg_pool2d(bright.flatten(0, 2), cell).unflatten(0, bright.shape[:3])
    return patchify(means.unsqueeze(2), CONTROL_SIDE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ViewClip:
    """A real clip as a rollout takes it: pass the fields of the same name to `run_rollout`."""

    grid: ViewGrid
    geometry: ClipGeometry
    latent: Tensor  # [1, V, 3, F, height, width], what is to be re-rendered
    controls: Tensor  # [1, V, F, X, 4]
    condition_tokens: Tensor | None  # [1, V, K, X, W], None without given frames


def view_clip(
    video: Tensor,
    grid: ViewGrid | None = None,
    *,
    frames_per_chunk: int = 4,
    condition_frames: int = 1,
    fps: float = 30.0,
) -> ViewClip:
    """Cut a video into views, and make controls and given frames of them.

    Args:
        video: ``[F, rows, columns, 3]`` uint8, RGB.
        grid: The views; four by default.
        frames_per_chunk: Frames C that are generated together.
        condition_frames: Frames K that are given in full colour.
        fps: Frames per second.

    Raises:
        ShapeError, DtypeError: The video is not uint8 RGB.
        SpecError: The clip is shorter than its given frames, or a number is out of range.
    """
    grid = grid or ViewGrid()
    geometry = grid.geometry(
        video.shape[0],
        frames_per_chunk=frames_per_chunk,
        condition_frames=condition_frames,
        fps=fps,
    )
    latent = cut_views(fit_canvas(video, grid), grid)[None]
    given = patchify(latent[:, :, :, :condition_frames], PATCH) if condition_frames else None
    return ViewClip(
        grid=grid,
        geometry=geometry,
        latent=latent,
        controls=control_tokens(latent),
        condition_tokens=given,
    )
