"""Cutting a video into overlapping views, and what is made of them."""

import pytest
import torch
from kv_core import DtypeError, ShapeError, SpecError
from kv_rollout import patchify
from kv_rollout.reference import ViewGrid, stitch_views, view_clip
from kv_rollout.reference.views import control_tokens, cut_views, fit_canvas, luma

SMALL = ViewGrid(num_views=4, height=16, width=24, step_y=8, step_x=16)


def random_video(frames: int, rows: int, columns: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(frames * rows + columns)
    return torch.randint(256, (frames, rows, columns, 3), generator=dice).byte()


def test_four_views_cover_a_canvas_of_112_by_80_pixels():
    grid = ViewGrid()
    assert (grid.canvas_width, grid.canvas_height) == (112, 80)
    assert [grid.corner(view) for view in range(4)] == [(0, 0), (0, 48), (32, 0), (32, 48)]


@pytest.mark.parametrize(
    ("views", "rows", "columns"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 3), (6, 2, 3), (7, 2, 4), (8, 2, 4)],
)
def test_any_number_of_views_stands_in_one_or_two_rows(views: int, rows: int, columns: int):
    grid = ViewGrid(num_views=views)
    assert (grid.rows, grid.columns) == (rows, columns)
    y, x = grid.corner(views - 1)
    assert y + grid.height == grid.canvas_height
    assert x + grid.width <= grid.canvas_width
    clip = view_clip(random_video(2, grid.canvas_height, grid.canvas_width), grid)
    assert clip.latent.shape == (1, views, 3, 2, 48, 64)


def test_a_video_of_the_canvas_size_is_neither_scaled_nor_cropped():
    video = random_video(3, 24, 40)
    canvas = fit_canvas(video, SMALL)
    assert torch.equal(canvas, (video.permute(3, 0, 1, 2).float() / 127.5 - 1))


@pytest.mark.parametrize("size", [(24, 80), (96, 40), (12, 20), (100, 44), (25, 41)])
def test_any_video_is_scaled_until_it_covers_the_canvas(size: tuple[int, int]):
    canvas = fit_canvas(random_video(2, *size), SMALL)
    assert canvas.shape == (3, 2, 24, 40)
    assert canvas.abs().max() <= 1


def test_what_sticks_out_is_cut_off_on_both_sides_alike():
    video = random_video(1, 24, 60)
    expected = video[:, :, 10:50].permute(3, 0, 1, 2).float() / 127.5 - 1
    assert torch.equal(fit_canvas(video, SMALL), expected)


def test_neighbours_show_the_same_pixels_where_they_overlap():
    views = cut_views(fit_canvas(random_video(2, 24, 40), SMALL), SMALL)
    assert torch.equal(views[0][..., 16:], views[1][..., :8])
    assert torch.equal(views[0][..., 8:, :], views[2][..., :8, :])
    assert torch.equal(views[0][..., 8:, 16:], views[3][..., :8, :8])


@pytest.mark.parametrize("views", range(1, 9))
def test_stitching_undoes_cutting(views: int):
    grid = ViewGrid(num_views=views, height=16, width=24, step_y=8, step_x=16)
    canvas = fit_canvas(random_video(2, grid.canvas_height, grid.canvas_width), grid)
    stitched = stitch_views(cut_views(canvas, grid), grid)
    seen = stitch_views(torch.ones(views, 3, 2, 16, 24), grid) > 0
    # up to four equal values are added and divided: two roundings
    torch.testing.assert_close(
        stitched, torch.where(seen, canvas, 0.0), rtol=2 * torch.finfo(torch.float32).eps, atol=0
    )
    assert seen.all() or views in (5, 7)


def test_luma_is_bt_601():
    colours = torch.eye(3).view(3, 3, 1, 1)  # [channel, frame]
    assert luma(colours).flatten().tolist() == pytest.approx([0.299, 0.587, 0.114], abs=1e-7)


def test_a_control_is_two_by_two_means_of_luma_row_by_row():
    views = torch.zeros(1, 1, 3, 1, 16, 16)
    # patch 1 is the upper right one; raise one quarter of it after the other
    for quarter, (y, x) in enumerate([(0, 8), (0, 12), (4, 8), (4, 12)]):
        views[..., y : y + 4, x : x + 4] = (quarter + 1) / 8
    controls = control_tokens(views)
    assert controls.shape == (1, 1, 1, 4, 4)
    expected = torch.zeros(4, 4)
    expected[1] = torch.tensor([1, 2, 3, 4]) / 8
    torch.testing.assert_close(
        controls[0, 0, 0], expected, rtol=0, atol=torch.finfo(torch.float32).eps
    )


def test_controls_carry_no_colour():
    dice = torch.Generator().manual_seed(1)
    views = torch.rand(1, 2, 3, 2, 16, 24, generator=dice) - 0.5
    turned = views.clone()
    turned[:, :, 0] += 0.587 * 0.3
    turned[:, :, 1] -= 0.299 * 0.3
    assert not torch.equal(views, turned)
    torch.testing.assert_close(
        control_tokens(turned),
        control_tokens(views),
        rtol=0,
        atol=4 * torch.finfo(torch.float32).eps,
    )


def test_a_clip_has_what_a_rollout_asks_for():
    clip = view_clip(random_video(6, 30, 50), SMALL, frames_per_chunk=2, condition_frames=2, fps=25)
    geometry = clip.geometry
    assert (geometry.num_views, geometry.frames_per_view, geometry.frames_per_chunk) == (4, 6, 2)
    assert (geometry.patch_h, geometry.patch_w, geometry.condition_frames) == (2, 3, 2)
    assert geometry.seconds_per_frame == 1 / 25
    assert clip.controls.shape == (1, 4, 6, 6, 4)
    assert torch.equal(clip.condition_tokens, patchify(clip.latent[:, :, :, :2], 8))
    assert torch.equal(clip.controls, control_tokens(clip.latent))


def test_without_given_frames_there_are_no_tokens_of_them():
    assert view_clip(random_video(3, 24, 40), SMALL, condition_frames=0).condition_tokens is None


def test_views_keep_their_distance_in_position_also_in_long_clips():
    assert ViewGrid().geometry(24).stride == 32
    assert ViewGrid().geometry(400).stride == 400


def test_gaps_and_odd_sizes_are_refused():
    with pytest.raises(SpecError, match="leaves a gap between views with width=64"):
        ViewGrid(step_x=65)
    with pytest.raises(SpecError, match="height must be a multiple of 8"):
        ViewGrid(height=50)
    with pytest.raises(SpecError, match="num_views"):
        ViewGrid(num_views=0)


def test_pictures_of_another_kind_are_refused():
    with pytest.raises(ShapeError, match=r"video must be \[F, rows, columns, 3\]"):
        fit_canvas(torch.zeros(2, 3, 24, 40, dtype=torch.uint8), SMALL)
    with pytest.raises(DtypeError, match="uint8"):
        fit_canvas(torch.zeros(2, 24, 40, 3), SMALL)
    with pytest.raises(ShapeError, match="24 x 40 pixels, got 24 x 41"):
        cut_views(torch.zeros(3, 1, 24, 41), SMALL)
    with pytest.raises(ShapeError, match="views must be 4 of 16 x 24 pixels"):
        stitch_views(torch.zeros(3, 3, 1, 16, 24), SMALL)
