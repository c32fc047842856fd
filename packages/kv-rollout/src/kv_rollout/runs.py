"""A run of the command: what decides it, the folder that it writes, and the files in it."""

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import torch
from kv_core import KVFormat, SnapshotError, SpecError
from kv_kernels.registry import Query, explain
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kv_rollout import media
from kv_rollout.latents import unpatchify
from kv_rollout.reference import ReferenceModel, ViewClip, ViewGrid, view_clip
from kv_rollout.reference.views import CONTROL_SIDE, PATCH
from kv_rollout.rollout import ChunkRollout
from kv_rollout.sampling import SampleType

CLIP, CARD = "big_buck_bunny.mp4", "MODEL_CARD.md"
RUN, SNAPSHOT = "run.json", "rollout.safetensors"
SHEET, TRACE, LATENTS = "contact-sheet.png", "trace.json", "latents.safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FRAMES_PER_CHUNK, GIVEN_FRAMES = 4, 1  # what the weights were trained with
_KIND = "kv-rollout run"
_TRAINED_FPS = (15.0, 30.0)
_DETAIL = 4  # a decoded picture keeps this many times the canvas on a side, if it has them


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that decides what a run writes; kept in run.json, so that it can be resumed."""

    video: str | None  # absolute path, None for the bundled clip
    start: int
    frames: int | None  # None for all that the video has
    views: int
    history: int | None  # frames, None for all
    mask_block: tuple[int, int]
    backend: str | None
    memory: str  # name of a KVFormat
    device: str
    dtype: str  # one of DTYPES
    seed: int
    steps: int | None
    sample_type: SampleType | None
    format: str
    weights: str | None  # absolute path, None for those that ship


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """The part of a video that a run re-renders."""

    file: Path
    sha256: str
    fps: float
    clip: ViewClip

    @property
    def model_fps(self) -> float:
        """The rate that the model is told: it has not learnt to see faster or slower ones."""
        low, high = _TRAINED_FPS
        return min(max(self.fps, low), high)


def shipped(name: str) -> Path:
    """Return a file that ships beside the reference model.

    Raises:
        SpecError: This installation lacks it.
    """
    file = Path(str(files("kv_rollout.reference") / name))
    if not file.is_file():
        raise SpecError(f"this installation of kv-rollout lacks {name}; install it again")
    return file


def load_source(settings: RunSettings, *, sha256: str | None = None) -> Source:
    """Read the video of a run and cut it into views.

    Args:
        settings: The run.
        sha256: What the file must still be.

    Raises:
        SpecError: The video cannot be used.
        SnapshotError: It is another one than before.
    """
    file = shipped(CLIP) if settings.video is None else Path(settings.video)
    grid = ViewGrid(num_views=settings.views)
    if sha256 is not None and file.is_file() and _digest(file) != sha256:
        raise SnapshotError(
            f"{file} has changed since the run began; put the old file back, or start a new run"
        )
    cover = grid.canvas_height * _DETAIL, grid.canvas_width * _DETAIL
    video, fps = media.read_video(file, frames=settings.frames, start=settings.start, cover=cover)
    if len(video) <= GIVEN_FRAMES:
        raise SpecError(f"{file} has 1 frame there, which is given; at least 2 are needed")
    clip = view_clip(
        torch.from_numpy(video),
        grid,
        frames_per_chunk=FRAMES_PER_CHUNK,
        condition_frames=GIVEN_FRAMES,
        fps=fps,
    )
    return Source(file=file, sha256=sha256 or _digest(file), fps=fps, clip=clip)


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def load_model(settings: RunSettings) -> ReferenceModel:
    """Load the weights of a run.

    Raises:
        SpecError: There is no such device.
        SnapshotError: The weights are not there or not whole.
    """
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(
            f"PyTorch sees {torch.cuda.device_count() or 'no'} GPU on this machine, so nothing "
            f"can run on {device}; begin a run with --device cpu"
        )
    return ReferenceModel.load(settings.weights, device=device, dtype=DTYPES[settings.dtype])


def begin(settings: RunSettings, source: Source, model: ReferenceModel) -> ChunkRollout:
    """Start a rollout; its first frame is given."""
    clip = source.clip
    schedule = model.default_schedule
    return ChunkRollout(
        model,
        geometry=clip.geometry,
        controls=clip.controls,
        condition_tokens=clip.condition_tokens,
        fps=source.model_fps,
        seed=settings.seed,
        schedule=schedule if settings.steps is None else resample(schedule, settings.steps),
        sample_type=settings.sample_type,
        history_frames=settings.history,
        mask_block_size=settings.mask_block,
        backend=settings.backend,
        memory_format=KVFormat[settings.memory],
    )


def resumed(snapshot: Path, source: Source, model: ReferenceModel) -> ChunkRollout:
    """Continue a rollout from its snapshot."""
    return ChunkRollout.resume(snapshot, model, controls=source.clip.controls)


def resample(schedule: tuple[float, ...], steps: int) -> tuple[float, ...]:
    """Return ``steps`` noise levels along the curve on which those of ``schedule`` lie."""
    curve = (*schedule, 0.0)
    places = np.linspace(0, len(schedule), steps, endpoint=False)
    return tuple(float(level) for level in np.interp(places, range(len(curve)), curve))


def attention_backend(settings: RunSettings, model: ReferenceModel) -> tuple[str, str]:
    """Return the name of the row that attends, and why it does."""
    device, kv_format = model.device, KVFormat[settings.memory]
    query = Query(
        op="slot_attention",
        k_format=kv_format,
        v_format=kv_format,
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=model.dtype,
        k_dim=model.network.k_dim,
        v_dim=model.network.v_dim,
        block_size=settings.mask_block,
    )
    if settings.backend is not None:
        return settings.backend, "it was asked for"
    passed: list[str] = []
    for row, reason in explain(query):
        if reason is None:
            return row.backend, "; ".join(passed) or "it is the first that fits"
        passed.append(f"{row.backend} {reason}")
    raise AssertionError("the torch row runs anywhere")


@contextmanager
def claimed(folder: Path, *, force: bool, resume: str) -> Iterator[None]:
    """Make a folder to write into; if nothing was written in the end, it is removed again.

    Args:
        folder: The folder.
        force: Take it whatever it holds.
        resume: The command that continues an interrupted run in it.

    Raises:
        SpecError: It cannot be made, or holds what must not be mixed with a run or lost.
    """
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is a file; name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        try:
            earlier = read_run(folder)
        except SnapshotError as error:
            raise SpecError(
                f"{folder} holds files that no earlier run wrote; name another folder with --out, "
                "or write beside them with --force"
            ) from error
        if earlier["state"] == "interrupted":
            raise SpecError(
                f"{folder} holds a run that was interrupted; continue it with {resume}, "
                "or start over with --force"
            )
    made = []
    try:
        with _writing(folder):
            for parent in (*reversed(folder.parents), folder):
                if not parent.exists():
                    parent.mkdir()
                    made.append(parent)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield
    finally:
        for parent in reversed(made):
            with suppress(OSError):  # one that holds something stays
                parent.rmdir()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in a sentence why something could not be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{folder} cannot be written to: {why}; choose another place") from error


def read_run(folder: Path) -> dict[str, Any]:
    """Return what `write_run` kept.

    Raises:
        SnapshotError: The folder holds no run.
    """
    try:
        kept = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if kept["kind"] != _KIND:
            raise ValueError(f"it is of kind {kept['kind']}")
        names = {field.name for field in fields(RunSettings)}
        settings = {name: value for name, value in kept["settings"].items() if name in names}
        settings["mask_block"] = tuple(settings["mask_block"])
        state, sha256 = str(kept["state"]), str(kept["sha256"])
        return {"settings": RunSettings(**settings), "state": state, "sha256": sha256}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"{folder} holds no run of this command: its {RUN} is missing or damaged"
        ) from error


def write_run(folder: Path, settings: RunSettings, source: Source, *, state: str) -> None:
    """Keep what decides a run, and whether it is ``finished`` or ``interrupted``."""
    kept = {"kind": _KIND, "state": state, "settings": asdict(settings), "sha256": source.sha256}
    partial = folder / f".{RUN}.{secrets.token_hex(4)}.tmp"
    with _writing(folder):
        try:
            partial.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(partial, folder / RUN)
        finally:
            partial.unlink(missing_ok=True)


def write_results(
    folder: Path,
    settings: RunSettings,
    source: Source,
    model: ReferenceModel,
    rollout: ChunkRollout,
) -> list[Path]:
    """Write views, contact sheet, trace and latents of a finished rollout, all of them or none.

    Returns:
        The files. Those of an earlier run in the same folder are gone.
    """
    result = rollout.result()
    columns = source.clip.grid.columns
    made = _pixels(result.latent)
    shown = media.contact_sheet(
        _pixels(source.clip.latent), _control_pixels(source.clip), made,
        columns=columns, given=GIVEN_FRAMES,
    )  # fmt: skip
    views = f"views.{settings.format}"
    written = [views, SHEET, TRACE, LATENTS]
    staged = folder / f".kv-rollout-{secrets.token_hex(4)}.tmp"
    with _writing(folder):
        staged.mkdir()
        try:
            media.write_video(staged / views, media.tile_views(made, columns=columns), source.fps)
            media.write_png(staged / SHEET, shown)
            trace = describe(settings, source, model, rollout)
            (staged / TRACE).write_text(json.dumps(trace, indent=1), encoding="utf-8")
            tensors = {"tokens": result.tokens, "latent": result.latent}
            tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            about = {"model_id": model.model_id, "fps": str(source.fps)}
            save_file(tensors, staged / LATENTS, about)
            for name in written:
                os.replace(staged / name, folder / name)
            stale = {f"views{suffix}" for suffix in media.SUFFIXES} - {views} | {SNAPSHOT}
            for name in stale:
                (folder / name).unlink(missing_ok=True)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    write_run(folder, settings, source, state="finished")
    return [folder / name for name in written]


def describe(
    settings: RunSettings, source: Source, model: ReferenceModel, rollout: ChunkRollout
) -> dict[str, Any]:
    """Return, as JSON values, what was run, on what, and how each chunk went."""
    backend, why = attention_backend(settings, model)
    chunks = [trace.as_dict() for trace in rollout.trace]
    return {
        "settings": asdict(settings),
        "video": {"file": str(source.file), "sha256": source.sha256, "fps": source.fps},
        "geometry": asdict(rollout.geometry),
        "model": {
            "model_id": model.model_id,
            "device": str(model.device),
            "dtype": str(model.dtype),
            "fps": source.model_fps,
        },
        "attention": {"backend": backend, "why": why},
        "nbytes": rollout.nbytes,
        "seconds": seconds(rollout),
        "versions": versions(),
        "chunks": chunks,
    }


def seconds(rollout: ChunkRollout) -> float:
    """Return how long the chunks took, those before an interruption too."""
    return sum(sum(trace.phase_ms) for trace in rollout.trace) / 1000


def versions() -> dict[str, str]:
    """Return the versions of everything that a result depends on."""
    found = {"python": python_version()}
    for name in ("kv-core", "kv-kernels", "kv-rollout", "torch", "numpy", "av"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _pixels(latent: Tensor) -> media.Pixels:
    """Return ``[V, F, rows, columns, 3]`` uint8 of a latent ``[1, V, 3, F, rows, columns]``."""
    levels = (latent[0].float().clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy()


def _control_pixels(clip: ViewClip) -> media.Pixels:
    """Return what the controls say, as large as the views and grey."""
    geometry = clip.geometry
    means = unpatchify(
        clip.controls, patch_h=geometry.patch_h, patch_w=geometry.patch_w, patch=CONTROL_SIDE
    )
    cell = PATCH // CONTROL_SIDE
    return _pixels(means).repeat(cell, axis=2).repeat(cell, axis=3).repeat(3, axis=4)
