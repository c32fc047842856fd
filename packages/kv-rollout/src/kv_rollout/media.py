"""Read videos, and write them and pictures; a file appears whole or not at all."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kv_core import DtypeError, ShapeError, SpecError, check_int

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[np.uint8]

SUFFIXES = (".mp4", ".gif")
_UNKNOWN_FPS = 25.0
_HIGHEST_FPS = 1000.0
_GIF_TICK = 10  # milliseconds; players show a frame for two ticks at least
_GAP = 4  # pixels between views
_BACKGROUND = (24, 24, 28)
_INK = (236, 236, 236)
_FAINT_INK = (150, 150, 156)


def read_video(
    path: str | Path,
    *,
    frames: int | None = None,
    start: int = 0,
    cover: tuple[int, int] | None = None,
) -> tuple[Pixels, float]:
    """Decode a range of a video, frame by frame, as it is meant to be seen.

    Turned pictures are turned upright and pixels that are not square are made square.

    Args:
        path: Any file with moving pictures that FFmpeg reads; an animated GIF too.
        frames: How many frames F; all that there are by default.
        start: First frame, counted from 0.
        cover: Rows and columns that a picture still has to cover; larger ones are scaled down
            while they are decoded, so that a long film fits into memory.

    Returns:
        ``[F, rows, columns, 3]`` uint8 RGB, and frames per second.

    Raises:
        SpecError: There is no such file, it holds no readable pictures, or it has fewer frames.
        DtypeError: A number is not an integer.
    """
    import av

    file = Path(path)
    check_int("start", start, minimum=0)
    if frames is not None:
        check_int("frames", frames, minimum=1)
    if not file.exists():
        raise SpecError(f"there is no file {file}; check the path of the video")
    if not file.is_file():
        raise SpecError(f"{file} is not a file; pass a video, such as an MP4 or a GIF")
    pictures: list[Pixels] = []
    seen = 0
    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise SpecError(f"{file} holds no pictures, only sound or text; pass a video")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            ratio = float(stream.sample_aspect_ratio or 0) or 1.0
            size: tuple[int, int] | None = None
            for frame in container.decode(stream):
                seen += 1
                if seen <= start:
                    continue
                size = size or _shown_size(frame, ratio, cover)
                pictures.append(_upright(frame, size))
                if len(pictures) == frames:
                    break
            fps = float(stream.average_rate or stream.guessed_rate or 0)
    except av.FFmpegError as error:
        why = error.strerror or error
        if seen:
            raise SpecError(f"{file} is damaged after frame {seen - 1}: {why}") from error
        raise SpecError(f"{file} is not a video that can be read: {why}") from error
    if not pictures or (frames is not None and len(pictures) < frames):
        has = f"{file} has {seen} frame{'s' * (seen != 1)}"
        if seen <= start:
            raise SpecError(f"{has}, so none from frame {start} on; begin earlier")
        begin = f" from frame {start} on" if start else ""
        raise SpecError(f"{has}, {frames} asked{begin}; ask for {seen - start} or fewer")
    return np.stack(pictures), fps if 0 < fps <= _HIGHEST_FPS else _UNKNOWN_FPS


def _shown_size(frame: Any, ratio: float, cover: tuple[int, int] | None) -> tuple[int, int]:
    """Return width and height to decode to, before the picture is turned."""
    width, height = frame.width * ratio, float(frame.height)
    if cover is not None:
        rows, columns = cover[::-1] if _quarter_turns(frame) % 2 else cover
        scale = min(1.0, max(rows / height, columns / width))
        width, height = width * scale, height * scale
    return max(1, round(width)), max(1, round(height))


def _upright(frame: Any, size: tuple[int, int]) -> Pixels:
    width, height = size
    plain = (width, height) == (frame.width, frame.height)
    interpolation = None if plain else "AREA"
    rgb: Pixels = frame.to_ndarray(
        format="rgb24", width=width, height=height, interpolation=interpolation
    )
    return np.rot90(rgb, _quarter_turns(frame))


def _quarter_turns(frame: Any) -> int:
    """Return how often to turn a picture to the left."""
    return round(getattr(frame, "rotation", 0) / 90) % 4  # PyAV tells since 14.1


def write_video(path: str | Path, frames: Pixels, fps: float) -> None:
    """Write an MP4 or a GIF, as the file's suffix says; see `write_mp4` and `write_gif`.

    Raises:
        SpecError: Another suffix.
    """
    writers = dict(zip(SUFFIXES, (write_mp4, write_gif), strict=True))
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise SpecError(f"{path} must end in {' or '.join(SUFFIXES)} for a video to be written")
    writers[suffix](path, frames, fps)


def write_mp4(path: str | Path, frames: Pixels, fps: float) -> None:
    """Write H.264 that every player shows; an odd side gets one more row or column.

    Args:
        path: The file to make or replace.
        frames: ``[F, rows, columns, 3]`` uint8 RGB.
        fps: Frames per second.

    Raises:
        ShapeError, DtypeError: The frames are not uint8 RGB.
        SpecError: The rate is not positive, or the file cannot be written.
    """
    import av

    _check_frames(frames, fps)
    odd = [(0, side % 2) for side in frames.shape[1:3]]
    even = np.pad(frames, ((0, 0), *odd, (0, 0)), mode="edge")
    with _whole(path) as partial:
        options = {"movflags": "faststart"}
        with av.open(str(partial), "w", format="mp4", options=options) as container:
            rate = Fraction(fps).limit_denominator(1001)
            # x264's macroblock tree reads memory that nobody wrote: the same frames, other bytes
            settings = {"crf": "15", "x264-params": "mbtree=0"}
            stream = container.add_stream("libx264", rate=rate, options=settings)
            stream.height, stream.width = even.shape[1:3]
            stream.pix_fmt = "yuv420p"
            # said, so that no player guesses another matrix from the size of the picture
            stream.codec_context.colorspace = 6  # SMPTE 170M, which is BT.601
            stream.codec_context.color_range = 1  # limited
            for picture in even:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                yuv = frame.reformat(format="yuv420p", dst_colorspace="ITU601")
                container.mux(stream.encode(yuv))
            container.mux(stream.encode(None))


def write_gif(path: str | Path, frames: Pixels, fps: float) -> None:
    """Write a GIF that repeats, with one palette of 256 colours for all of its frames.

    A GIF counts time in hundredths of a second: frames are shown a little longer or shorter so that
    the whole takes as long as it should, but above 50 frames per second it is slower.

    Args:
        path: The file to make or replace.
        frames: ``[F, rows, columns, 3]`` uint8 RGB.
        fps: Frames per second.

    Raises:
        ShapeError, DtypeError: The frames are not uint8 RGB.
        SpecError: The rate is not positive, or the file cannot be written.
    """
    from PIL import Image

    _check_frames(frames, fps)
    ends = [round(index * 1000 / fps / _GIF_TICK) for index in range(len(frames) + 1)]
    shown = [max(2, end - begin) * _GIF_TICK for begin, end in pairwise(ends)]
    palette = _palette(frames)
    pictures = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]
    # Dithering would flicker from frame to frame, and make the file five times as large.
    first, *rest = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in pictures]
    with _whole(path) as partial:
        first.save(
            partial, format="GIF", save_all=True, append_images=rest, optimize=True,
            duration=shown, loop=0,
        )  # fmt: skip


def _palette(frames: Pixels) -> "Image.Image":
    """Return a picture with the palette that suits all frames."""
    from PIL import Image

    chosen = frames[:: -(-len(frames) // 16)]
    step = max(1, frames.shape[1] * frames.shape[2] // 2**16)
    colours = np.ascontiguousarray(chosen.reshape(len(chosen), -1, 3)[:, ::step])
    return Image.fromarray(colours).quantize(256, method=Image.Quantize.MEDIANCUT)


def write_png(path: str | Path, picture: Pixels) -> None:
    """Write a picture ``[rows, columns, 3]`` uint8 RGB, without loss.

    Raises:
        ShapeError, DtypeError: The picture is not uint8 RGB.
        SpecError: The file cannot be written.
    """
    from PIL import Image

    _check_pixels("picture", picture, 3)
    with _whole(path) as partial:
        Image.fromarray(np.ascontiguousarray(picture)).save(partial, format="PNG")


def tile_views(
    views: Pixels, *, columns: int | None = None, width: int = 768, gap: int = _GAP
) -> Pixels:
    """Lay the views of every frame side by side, with thin gaps.

    Views are enlarged by a whole factor, so that every pixel stays a square.

    Args:
        views: ``[V, F, height, width, 3]`` uint8 RGB.
        columns: Views in a row; by default up to three stand in one row, more in two.
        width: Columns of pixels that the result should have at most, unless the views are larger.
        gap: Pixels between views.

    Returns:
        ``[F, rows, columns, 3]`` uint8.

    Raises:
        ShapeError, DtypeError: The views are not uint8 RGB.
    """
    _check_pixels("views", views, 5)
    V, F, height, wide, _ = views.shape
    columns = (V if V <= 3 else -(-V // 2)) if columns is None else columns
    check_int("columns", columns, minimum=1, maximum=V)
    rows = -(-V // columns)
    scale = max(1, (width - gap * (columns - 1)) // (columns * wide))
    views = views.repeat(scale, axis=2).repeat(scale, axis=3)
    height, wide = height * scale, wide * scale
    shape = (F, rows * (height + gap) - gap, columns * (wide + gap) - gap, 3)
    tiled = np.empty(shape, dtype=np.uint8)
    tiled[:] = _BACKGROUND
    for view, pictures in enumerate(views):
        top, left = view // columns * (height + gap), view % columns * (wide + gap)
        tiled[:, top : top + height, left : left + wide] = pictures
    return tiled


def contact_sheet(
    source: Pixels,
    control: Pixels,
    generated: Pixels,
    *,
    frames: Sequence[int] | None = None,
    columns: int | None = None,
    given: int = 0,
) -> Pixels:
    """Put source, control and generated views beside each other, a row per frame.

    Args:
        source: ``[V, F, height, width, 3]`` uint8 RGB, what was to be re-rendered.
        control: The same shape, what the model was told of it.
        generated: The same shape.
        frames: Which frames; four spread over the clip by default.
        columns: Views in a row, as `tile_views` takes it.
        given: Frames at the beginning that were given; they are labelled so.

    Returns:
        One picture ``[rows, columns, 3]`` uint8.

    Raises:
        ShapeError, DtypeError: The three are not uint8 RGB of one shape.
        SpecError: A frame is not of the clip.
    """
    from PIL import Image, ImageDraw, ImageFont

    named = {"source": source, "control": control, "generated": generated}
    for name, pictures in named.items():
        _check_pixels(name, pictures, 5)
        if pictures.shape != source.shape:
            raise ShapeError(
                f"{name} must have the shape of source, {source.shape}, got {pictures.shape}"
            )
    last = source.shape[1] - 1
    if frames is None:
        frames = sorted({round(last * third / 3) for third in range(4)})
    frames = [check_int("frame", frame, minimum=0, maximum=last) for frame in frames]
    cells = [
        tile_views(pictures[:, frames], columns=columns, width=420, gap=2)
        for pictures in named.values()
    ]
    rows, wide = cells[0].shape[1:3]
    space, head, side = 14, 44, 96
    sheet = Image.new(
        "RGB",
        (side + 3 * (wide + space), head + len(frames) * (rows + space)),
        _BACKGROUND,
    )
    draw = ImageDraw.Draw(sheet)
    title, small = ImageFont.load_default(20), ImageFont.load_default(13)
    for column, name in enumerate(named):
        left = side + column * (wide + space)
        draw.text((left, head / 2), name, _INK, title, anchor="lm")
        for row, picture in enumerate(cells[column]):
            sheet.paste(Image.fromarray(picture), (left, head + row * (rows + space)))
    for row, frame in enumerate(frames):
        middle = head + row * (rows + space) + rows / 2
        draw.text((side - space, middle), f"frame {frame}", _INK, small, anchor="rm")
        if frame < given:
            draw.text((side - space, middle + 18), "given", _FAINT_INK, small, anchor="rm")
    return np.asarray(sheet)


@contextmanager
def _whole(path: str | Path) -> Iterator[Path]:
    """Yield a place to write to, which becomes ``path`` only if the block succeeds."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        why = error.strerror or error
        raise SpecError(f"{target} could not be written: {why}; choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


def _check_frames(frames: Pixels, fps: float) -> None:
    _check_pixels("frames", frames, 4)
    if isinstance(fps, bool) or not isfinite(fps) or not 0 < fps <= _HIGHEST_FPS:
        raise SpecError(f"fps must be above 0 and at most {_HIGHEST_FPS:g}, got {fps}")


def _check_pixels(name: str, pixels: Pixels, rank: int) -> None:
    axes = {3: "rows, columns, 3", 4: "F, rows, columns, 3", 5: "V, F, rows, columns, 3"}[rank]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        got = pixels.dtype if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DtypeError(f"{name} must be a numpy array of uint8, got {got}")
    if pixels.ndim != rank or pixels.shape[-1] != 3 or 0 in pixels.shape:
        raise ShapeError(f"{name} must be [{axes}] and not empty, got {list(pixels.shape)}")
