"""The command ``kv-rollout``: run generates views of a video, resume goes on, info looks around."""

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from kv_core import KVError, SnapshotError, SpecError
from typer.main import get_command

if TYPE_CHECKING:
    from kv_rollout import runs
    from kv_rollout.reference import ReferenceModel
    from kv_rollout.rollout import ChunkRollout
    from kv_rollout.sampling import SampleType

BACKENDS = ("auto", "torch", "flex")
MEMORIES = ("auto", "fp32", "bf16", "fp16", "int8")
DTYPES = ("auto", "fp32", "bf16", "fp16")
SAMPLERS = ("auto", "ode", "sde")
FORMATS = ("mp4", "gif")

# Typer carries click under a name of its own, or uses an installed one; both have this class.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Generate several camera views of a video, chunk after chunk.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0 is success, 2 is wrong input, which is explained in one sentence, 130 is Ctrl-C.
    """
    command = get_command(app)
    arguments = None if args is None else list(args)
    try:
        status = command.main(arguments, prog_name="kv-rollout", standalone_mode=False)
    except (KVError, _UsageError) as error:
        message = getattr(error, "format_message", error.__str__)()
        _say(f"kv-rollout: {' '.join(message.split())}")
        return 2
    return status if isinstance(status, int) else 0


@app.callback(invoke_without_command=True)
def _kv_rollout(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    from kv_rollout.runs import versions

    if version:
        print(f"kv-rollout {versions()['kv-rollout']}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    video: Annotated[
        Path | None,
        typer.Argument(metavar="VIDEO", help="A video or GIF; a bundled clip by default."),
    ] = None,
    views: Annotated[int, typer.Option(metavar="N", help="Camera views to cut it into.")] = 4,
    frames: Annotated[
        str,
        typer.Option(metavar="N|all", help="Frames to take from the video; the first is given."),
    ] = "24",
    start: Annotated[
        int, typer.Option(metavar="N", help="First frame to take, counted from 0.")
    ] = 0,
    history: Annotated[
        str, typer.Option(metavar="N|all", help="Finished frames that the model remembers.")
    ] = "8",
    mask_block: Annotated[
        str, typer.Option(metavar="N|Q,KV", help="Block of the attention mask, in tokens.")
    ] = "128",
    backend: Annotated[
        str, typer.Option(help="What attends.", metavar="|".join(BACKENDS))
    ] = "auto",
    memory: Annotated[
        str, typer.Option(help="How memory is stored.", metavar="|".join(MEMORIES))
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="What the model computes in.", metavar="|".join(DTYPES))
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Where to run.", metavar="auto|cpu|cuda|cuda:1")
    ] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the noise.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Denoising passes per chunk; the model's own by default."),
    ] = None,
    sample_type: Annotated[
        str, typer.Option(help="How to step from noise to picture.", metavar="|".join(SAMPLERS))
    ] = "auto",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the results.")] = Path(
        "out"
    ),
    format: Annotated[
        str, typer.Option(help="Of the video that is written.", metavar="|".join(FORMATS))
    ] = "mp4",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weights that you trained; those that ship by default."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that is not empty.")
    ] = False,
) -> None:
    """Generate the views of a video and write them, with a contact sheet, to a folder."""
    from kv_rollout import runs

    chosen_backend = _choice("--backend", backend, BACKENDS)
    chosen_sampler = _choice("--sample-type", sample_type, SAMPLERS)
    settings = runs.RunSettings(
        video=None if video is None else str(video.absolute()),
        start=_number("--start", start, 0),
        frames=_count("--frames", frames, minimum=runs.GIVEN_FRAMES + 1),
        views=_number("--views", views, 1, 64),
        history=_count("--history", history, minimum=1),
        mask_block=_mask_block(mask_block),
        backend=None if chosen_backend == "auto" else chosen_backend,
        device=_device(device),
        seed=_number("--seed", seed, 0, 2**128 - 1),
        steps=None if steps is None else _number("--steps", steps, 1, 1000),
        sample_type=None if chosen_sampler == "auto" else cast("SampleType", chosen_sampler),
        format=_choice("--format", format, FORMATS),
        weights=None if weights is None else str(weights.absolute()),
        **_formats(_choice("--memory", memory, MEMORIES), _choice("--dtype", dtype, DTYPES)),
    )
    with runs.claimed(out, force=force, resume=_resume_command(out)):
        _generate(out, settings)


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of the run, or its snapshot.")
    ] = Path("out"),
    video: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the video is now, if it was moved.")
    ] = None,
) -> None:
    """Continue a run that was interrupted; the result is the same, bit for bit."""
    from kv_rollout import runs

    out = folder.parent if folder.is_file() else folder
    if not out.is_dir():
        raise SnapshotError(f"there is no folder {out}; name the one that was --out of the run")
    kept = runs.read_run(out)
    if kept["state"] == "finished":
        raise SnapshotError(f"the run in {out} is finished: there is nothing to resume")
    settings: runs.RunSettings = kept["settings"]
    if video is not None:
        settings = replace(settings, video=str(video.absolute()))
    snapshot = folder if folder.is_file() else out / runs.SNAPSHOT
    _generate(out, settings, snapshot=snapshot, sha256=kept["sha256"])


@app.command()
def info() -> None:
    """Show versions, devices, attention kernels, and the model and the clip that ship."""
    import torch
    from kv_kernels.__main__ import main as print_kernels

    from kv_rollout import media, runs
    from kv_rollout.reference import ReferenceModel, ViewGrid
    from kv_rollout.reference.model import WEIGHTS

    print(", ".join(f"{name} {number}" for name, number in runs.versions().items()))
    print(f"device  cpu, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        print(f"device  cuda:{index}, {found.name}, {_size(found.total_memory)}")
    print("\nKernels of kv-kernels for a call of the usual size:\n")
    print_kernels()
    print()
    try:
        model = ReferenceModel.load()
        count = sum(weight.numel() for weight in model.network.parameters())
        grid = ViewGrid()
        print(f"model   {count / 1e6:.1f} million weights, id {model.model_id[:16]}")
        print(
            f"        views of {grid.width} x {grid.height} pixels; {runs.GIVEN_FRAMES} frame is "
            f"given, then {runs.FRAMES_PER_CHUNK} at a time in {len(model.default_schedule)} passes"
        )
        for name in (WEIGHTS, runs.CARD):
            print(f"        {_described(runs.shipped(name))}")
    except KVError as error:
        print(f"model   cannot be used: {error}")
    clip = runs.shipped(runs.CLIP)
    frames, fps = media.read_video(clip)
    rows, columns = frames.shape[1:3]
    print(f"clip    {len(frames)} frames of {columns} x {rows} pixels at {fps:g} fps")
    print(f"        {_described(clip)}")


def _generate(
    out: Path,
    settings: "runs.RunSettings",
    *,
    snapshot: Path | None = None,
    sha256: str | None = None,
) -> None:
    """Run what is left of a rollout and write its results, or a snapshot if it is interrupted."""
    from kv_rollout import runs
    from kv_rollout.progress import Interrupts, Progress

    try:
        source = runs.load_source(settings, sha256=sha256)
        model = runs.load_model(settings)
        if snapshot is None:
            rollout = runs.begin(settings, source, model)
        else:
            rollout = runs.resumed(snapshot, source, model)
    except KeyboardInterrupt:
        _say("Stopped before the first chunk; nothing was written.")
        raise typer.Exit(130) from None
    before = rollout.chunks_done
    interrupts = Interrupts()
    try:
        with interrupts, Progress(rollout, interrupts) as progress:
            while rollout.next_range is not None and interrupts.signal is None:
                progress.advance(rollout.step()[0])
        if not rollout.is_finished:
            raise KeyboardInterrupt
        written = runs.write_results(out, settings, source, model, rollout)
    except BaseException as error:
        if rollout.chunks_done > before:
            rollout.save(out / runs.SNAPSHOT)
            runs.write_run(out, settings, source, state="interrupted")
        if rollout.chunks_done:
            done = f"{rollout.chunks_done} of {rollout.chunk_count} chunks are saved"
            _say(f"Stopped; {done}. Continue with:\n  {_resume_command(out)}")
        if not isinstance(error, KeyboardInterrupt):
            raise
        if not rollout.chunks_done:
            _say("Stopped before the first chunk was done; nothing was written.")
        raise typer.Exit(128 + (interrupts.signal or signal.SIGINT)) from None
    _report(settings, source, model, rollout, written)


def _report(
    settings: "runs.RunSettings",
    source: "runs.Source",
    model: "ReferenceModel",
    rollout: "ChunkRollout",
    written: Sequence[Path],
) -> None:
    """Say what was made, where it is, and how."""
    from kv_rollout import runs

    chunks = rollout.trace
    frames = sum(chunk.end - chunk.start for chunk in chunks)
    seconds = runs.seconds(rollout)
    views = rollout.geometry.num_views
    print(
        f"{frames} frames of {views} view{'s' * (views > 1)} of {source.file.name} generated in "
        f"{seconds:.1f} s, {frames / seconds:.1f} frames/s on {model.device}"
    )
    for file in written:
        print(f"  {_described(file)}")
    backend, why = runs.attention_backend(settings, model)
    built = sum(chunk.masks_built for chunk in chunks)
    reused = sum(chunk.masks_reused for chunk in chunks)
    last = chunks[-1]
    compiled = sum(chunk.compiles for chunk in chunks)
    print(f"attention  {backend}, because {why}; {compiled} kernels compiled")
    print(f"masks      {built} built, {reused} reused")
    print(
        f"memory     {settings.memory}, {_size(rollout.nbytes)} with masks and frames; "
        f"{last.memory_tokens:,} tokens valid, {last.padding_tokens:,} padding"
    )


def _choice(option: str, text: str, choices: Sequence[str]) -> str:
    """Return one of some words."""
    if text not in choices:
        raise SpecError(f"{option} must be one of {', '.join(choices)}, got {text!r}")
    return text


def _number(option: str, value: int, least: int, most: int | None = None) -> int:
    """Return a number that is within its limits."""
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise SpecError(f"{option} must be a number {limits}, got {value}")
    return value


def _count(option: str, text: str, *, minimum: int) -> int | None:
    """Return a number of frames, None for all."""
    if text == "all":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        frames = f"{minimum} frame{'s' * (minimum > 1)}"
        raise SpecError(f"{option} must be at least {frames}, or 'all', got {text!r}")
    return int(text)


def _mask_block(text: str) -> tuple[int, int]:
    """Return (query, key) tokens of a block."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})?", text):
        raise SpecError(
            f"--mask-block must be a number of tokens, or two with a comma such as 64,128, "
            f"got {text!r}"
        )
    first, *second = map(int, text.split(","))
    return first, second[0] if second else first


def _formats(memory: str, dtype: str) -> dict[str, str]:
    """Return what memory and computation use: either names the other, if it is left open."""
    floating = memory not in ("auto", "int8")
    if dtype == "auto":
        dtype = memory if floating else "fp32"
    if floating and memory != dtype:
        raise SpecError(
            f"--memory {memory} does not fit --dtype {dtype}: memory is stored in what the model "
            "computes in, or in int8"
        )
    return {"dtype": dtype, "memory": (dtype if memory == "auto" else memory).upper()}


def _device(text: str) -> str:
    """Return the device to run on."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text):
        raise SpecError(f"--device must be auto, cpu, cuda or cuda:1, got {text!r}")
    if text == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return text


def _described(file: Path) -> str:
    return f"{file}  {_size(file.stat().st_size)}"


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def _resume_command(out: Path) -> str:
    return f"{_command()} resume {shlex.quote(str(out))}"


def _command() -> str:
    """Return how this program was called, so that it can be called again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(_short(Path(sys.executable)))} -m kv_rollout"
    found = shutil.which(called.name)
    if found is not None and (not called.exists() or os.path.samefile(found, called)):
        return called.name
    return shlex.quote(_short(called))


def _short(path: Path) -> str:
    """Return a path from here, if it lies below."""
    here = Path.cwd()
    absolute = path.absolute()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
