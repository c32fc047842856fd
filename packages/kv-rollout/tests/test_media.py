"""Videos come in as they are meant to be seen, and go out whole or not at all."""

import subprocess
import sys
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from kv_core import DtypeError, KVError, ShapeError, SpecError
from kv_rollout import media
from kv_rollout.media import (
    contact_sheet,
    read_video,
    tile_views,
    write_gif,
    write_mp4,
    write_png,
    write_video,
)

COLOURS = np.array([[250, 20, 20], [20, 230, 30], [30, 40, 240], [240, 240, 240]], np.uint8)
# To YUV, in the encoder, and back: each may cost Y and a chroma one level, and these count 1.16 and
# 2.02 times in blue.
YUV_LEVELS = 3 * (1.16 + 2.02)


def flags(frames: int = 17, rows: int = 48, columns: int = 64) -> media.Pixels:
    """Four quarters of different colours, which move on by one in every frame."""
    pictures = np.empty((frames, rows, columns, 3), np.uint8)
    for frame, picture in enumerate(pictures):
        for quarter in range(4):
            top, left = quarter // 2 * rows // 2, quarter % 2 * columns // 2
            end = top + rows // 2, left + columns // 2
            picture[top : end[0], left : end[1]] = COLOURS[(quarter + frame) % 4]
    return pictures


def difference(a: media.Pixels, b: media.Pixels) -> int:
    return int(np.abs(a.astype(int) - b).max())


def inside(pictures: media.Pixels) -> media.Pixels:
    """The middle of every quarter; chroma of half the size blurs their edges."""
    _, rows, columns, _ = pictures.shape
    ys = [rows // 8 * n for n in (1, 2, 3, 5, 6, 7)]
    xs = [columns // 8 * n for n in (1, 2, 3, 5, 6, 7)]
    return pictures[:, ys][:, :, xs]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("media") / "my.mp4"
    write_mp4(file, flags(), 25)
    return file


def test_an_mp4_comes_back_with_its_rate_size_and_colours(clip: Path):
    pictures, fps = read_video(clip)
    assert (pictures.shape, pictures.dtype, fps) == ((17, 48, 64, 3), np.uint8, 25.0)
    assert difference(inside(pictures), inside(flags())) <= YUV_LEVELS


def test_an_mp4_says_how_its_colours_are_coded(clip: Path):
    import av

    with av.open(str(clip)) as container:
        context = container.streams.video[0].codec_context
        assert (context.pix_fmt, context.colorspace, context.color_range) == ("yuv420p", 6, 1)


@pytest.mark.parametrize("fps", [24000 / 1001, 30, 12.5])
def test_a_rate_that_is_no_whole_number_survives(tmp_path: Path, fps: float):
    write_mp4(tmp_path / "a.mp4", flags(4), fps)
    assert read_video(tmp_path / "a.mp4")[1] == pytest.approx(fps, rel=2**-52)


def test_odd_sides_get_one_more_row_and_column(tmp_path: Path):
    odd = flags(2, 50, 66)[:, :49, :65]
    write_mp4(tmp_path / "a.mp4", odd, 25)
    pictures, _ = read_video(tmp_path / "a.mp4")
    assert pictures.shape == (2, 50, 66, 3)
    assert difference(inside(pictures), inside(flags(2, 50, 66))) <= YUV_LEVELS


def test_a_gif_of_few_colours_comes_back_exactly(tmp_path: Path):
    write_video(tmp_path / "a.GIF", flags(5), 20)
    pictures, fps = read_video(tmp_path / "a.GIF")
    assert fps == 20.0
    assert np.array_equal(pictures, flags(5))


@pytest.mark.parametrize(("fps", "seconds"), [(30, 0.8), (24, 1.0), (60, 0.48)])
def test_a_gif_takes_as_long_as_it_should_where_its_clock_allows(
    tmp_path: Path, fps: float, seconds: float
):
    from PIL import Image

    write_gif(tmp_path / "a.gif", flags(24), fps)
    with Image.open(tmp_path / "a.gif") as image:
        shown = []
        for frame in range(image.n_frames):
            image.seek(frame)
            shown.append(image.info["duration"])
        assert (sum(shown), image.info["loop"]) == (seconds * 1000, 0)
        assert min(shown) >= 20


def test_only_the_frames_that_are_asked_for_are_read(clip: Path, monkeypatch: pytest.MonkeyPatch):
    decoded = []
    upright = media._upright
    monkeypatch.setattr(media, "_upright", lambda *a: decoded.append(0) or upright(*a))
    pictures, _ = read_video(clip, frames=3, start=5)
    assert len(decoded) == 3
    assert difference(inside(pictures), inside(flags()[5:8])) <= YUV_LEVELS


def test_large_pictures_are_scaled_down_to_what_they_must_cover(tmp_path: Path):
    write_mp4(tmp_path / "a.mp4", flags(2, 240, 640), 25)
    assert read_video(tmp_path / "a.mp4", cover=(60, 90))[0].shape == (2, 60, 160, 3)
    assert read_video(tmp_path / "a.mp4", cover=(60, 320))[0].shape == (2, 120, 320, 3)
    assert read_video(tmp_path / "a.mp4", cover=(480, 640))[0].shape == (2, 240, 640, 3)


def turned(clip: Path, target: Path) -> Path:
    """A copy that asks to be shown turned by 90 degrees to the right, as a phone's video does."""
    data = bytearray(clip.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    one, minus_one = (1 << 16).to_bytes(4, "big"), (2**32 - (1 << 16)).to_bytes(4, "big")
    zero, unit = bytes(4), (1 << 30).to_bytes(4, "big")
    data[matrix : matrix + 36] = b"".join(
        [zero, one, zero, minus_one, zero, zero, zero, zero, unit]
    )
    target.write_bytes(data)
    return target


def test_a_turned_video_is_turned_upright(clip: Path, tmp_path: Path):
    pictures, _ = read_video(turned(clip, tmp_path / "phone.mp4"), frames=2)
    assert pictures.shape == (2, 64, 48, 3)
    expected = np.rot90(flags(2), -1, axes=(1, 2))
    assert difference(inside(pictures), inside(expected)) <= YUV_LEVELS
    small = read_video(tmp_path / "phone.mp4", frames=2, cover=(32, 10))[0]
    assert small.shape == (2, 32, 24, 3)


def test_pixels_that_are_not_square_are_made_square(tmp_path: Path):
    import av

    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)
        for picture in flags(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    assert read_video(tmp_path / "a.mp4")[0].shape == (2, 48, 96, 3)


def silence(path: Path) -> Path:
    with wave.open(str(path), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    return path


def test_what_cannot_be_read_is_said_in_one_sentence(clip: Path, tmp_path: Path):
    prose = tmp_path / "notes.mp4"
    prose.write_text("no video at all")
    empty = tmp_path / "empty.mp4"
    empty.touch()
    unreadable = "is not a video that can be read: Invalid data found when processing input"
    for path, asked, said in (
        (tmp_path / "none.mp4", {}, "there is no file {}; check the path of the video"),
        (tmp_path, {}, "{} is not a file; pass a video, such as an MP4 or a GIF"),
        (prose, {}, "{} " + unreadable),
        (empty, {}, "{} " + unreadable),
        (
            silence(tmp_path / "song.wav"),
            {},
            "{} holds no pictures, only sound or text; pass a video",
        ),
        (clip, {"frames": 24}, "{} has 17 frames, 24 asked; ask for 17 or fewer"),
        (
            clip,
            {"frames": 24, "start": 5},
            "{} has 17 frames, 24 asked from frame 5 on; ask for 12 or fewer",
        ),
        (clip, {"start": 17}, "{} has 17 frames, so none from frame 17 on; begin earlier"),
        (clip, {"start": -1}, "start must be at least 0, got -1"),
        (clip, {"frames": 0}, "frames must be at least 1, got 0"),
    ):
        with pytest.raises(SpecError) as caught:
            read_video(path, **asked)
        assert str(caught.value) == said.format(path)


def test_a_video_that_is_cut_short_gives_its_first_frames_and_no_more(clip: Path, tmp_path: Path):
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(clip.read_bytes()[: int(clip.stat().st_size * 0.8)])
    assert read_video(cut, frames=2)[0].shape == (2, 48, 64, 3)
    with pytest.raises(SpecError, match=r"cut.mp4 (is damaged after frame|has) [0-9]+"):
        read_video(cut, frames=17)


@pytest.mark.parametrize("write", [write_mp4, write_gif])
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path, write):
    good = flags(2)
    for frames, fps, kind, said in (
        (good[0], 25, ShapeError, r"frames must be \[F, rows, columns, 3\] and not empty, got"),
        (good[:0], 25, ShapeError, "not empty"),
        (good[..., :2], 25, ShapeError, "not empty"),
        (good.astype(np.float32), 25, DtypeError, "must be a numpy array of uint8, got float32"),
        (good.tolist(), 25, DtypeError, "must be a numpy array of uint8, got list"),
        (good, 0, SpecError, "fps must be above 0 and at most 1000, got 0"),
        (good, float("nan"), SpecError, "got nan"),
    ):
        with pytest.raises(kind, match=said):
            write(tmp_path / "a", frames, fps)
    with pytest.raises(SpecError, match=r"gone.* could not be written: .*; choose another place"):
        write(tmp_path / "gone" / "a", good, 25)
    assert list(tmp_path.iterdir()) == []


def test_another_suffix_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match=r"a.avi must end in .mp4 or .gif"):
        write_video(tmp_path / "a.avi", flags(2), 25)


def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import av

    for name in ("a.mp4", "a.gif"):
        write_video(tmp_path / name, flags(2), 25)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Full:
        def from_ndarray(self, *a, **k):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(av, "VideoFrame", Full())
    with pytest.raises(SpecError, match=r"a.mp4 could not be written: No space left on device"):
        write_mp4(tmp_path / "a.mp4", flags(4), 25)
    with pytest.raises(KVError):
        write_gif(tmp_path / "a.gif", flags(4)[:, :0], 25)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_views_are_tiled_in_whole_pixels_with_a_gap():
    views = np.stack([flags(2, 4, 6), flags(2, 4, 6)[::-1], flags(2, 4, 6)])
    tiled = tile_views(views, columns=2, width=27, gap=2)
    assert tiled.shape == (2, 18, 26, 3)  # twice as large: 2 x (4 * 2) + 2 rows
    assert np.array_equal(tiled[:, 0:8:2, 0:12:2], views[0])
    assert np.array_equal(tiled[:, 1:8:2, 15:26:2], views[1])
    assert np.array_equal(tiled[:, 10::2, 1:12:2], views[2])
    assert (tiled[:, 8:10] == media._BACKGROUND).all()
    assert (tiled[:, :, 12:14] == media._BACKGROUND).all()
    assert (tiled[:, 8:, 12:] == media._BACKGROUND).all()


@pytest.mark.parametrize(
    ("views", "shape"), [(1, (1, 576, 768)), (3, (1, 144, 584)), (4, (1, 484, 644))]
)
def test_views_of_usual_size_can_be_seen_on_a_screen(views: int, shape: tuple[int, ...]):
    tiled = tile_views(flags(views)[:, None])
    assert tiled.shape == (*shape[:1], *shape[1:], 3)
    if views != 3:  # three in a row are enlarged by 3, whose sides may be odd
        assert (tiled.shape[1] % 2, tiled.shape[2] % 2) == (0, 0)


def test_a_contact_sheet_shows_chosen_frames_of_all_three_exactly(tmp_path: Path):
    F = 9
    source = np.stack([flags(F, 48, 64)] * 4)
    control, generated = source // 2, 255 - source
    sheet = contact_sheet(source, control, generated, given=1)
    write_png(tmp_path / "sheet.png", sheet)
    from PIL import Image

    with Image.open(tmp_path / "sheet.png") as image:
        assert np.array_equal(np.asarray(image), sheet)
    cells = [tile_views(each, width=420, gap=2) for each in (source, control, generated)]
    rows, columns = cells[0].shape[1:3]
    for row, frame in enumerate((0, 3, 5, 8)):
        top = 44 + row * (rows + 14)
        for column, cell in enumerate(cells):
            left = 96 + column * (columns + 14)
            assert np.array_equal(sheet[top : top + rows, left : left + columns], cell[frame])
    assert sheet.shape == (44 + 4 * (rows + 14), 96 + 3 * (columns + 14), 3)
    assert (sheet[:44] != media._BACKGROUND).any(), "the columns have no titles"
    for row in range(4):
        label = sheet[44 + row * (rows + 14) :][:rows, :96]
        assert (label != media._BACKGROUND).any(), "a row has no label"


def test_a_contact_sheet_refuses_what_does_not_fit():
    one = flags(3)[None]
    with pytest.raises(ShapeError, match="control must have the shape of source"):
        contact_sheet(one, one[:, :2], one)
    with pytest.raises(SpecError, match="frame must be between 0 and 2, got 3"):
        contact_sheet(one, one, one, frames=[0, 3])
    with pytest.raises(ShapeError, match=r"source must be \[V, F, rows, columns, 3\]"):
        contact_sheet(one[0], one[0], one[0])
    with pytest.raises(SpecError, match="columns"):
        tile_views(one, columns=2)


def test_importing_it_loads_no_codec():
    script = (
        "import sys, kv_rollout.media, kv_rollout.cli, kv_rollout.runs, kv_rollout.progress\n"
        "print({'av', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_same_frames_make_the_same_file_whatever_memory_held_before(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 324, dtype=np.float32)[None, None, :, None]
    frames = np.stack([np.broadcast_to(ramp, (1, 120, 324, 3))[0] + 9 * i for i in range(8)])
    frames = (frames % 256).astype(np.uint8)
    files = set()
    for run in range(8):
        used = [np.full(324 * 180 + 999 * run * i, run, np.uint8) for i in range(20)]
        del used
        media.write_mp4(tmp_path / "clip.mp4", frames, 8)
        files.add((tmp_path / "clip.mp4").read_bytes())
    assert len(files) == 1
