"""The command: what it writes, what it says, how it stops and goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_core import snapshot
from kv_rollout import cli, media, runs
from kv_rollout.cli import main
from kv_rollout.reference import NetworkConfig, ReferenceNetwork
from kv_rollout.rollout import ChunkRollout
from safetensors.torch import load_file, save_file

TINY = {
    "width": 16, "layers": 2, "heads": 1, "head_dim": 8,
    "hidden": 16, "time_features": 8, "time_hidden": 8,
}  # fmt: skip
FILES = {"views.mp4", "contact-sheet.png", "trace.json", "latents.safetensors", "run.json"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a video of 17 frames and the weights of a tiny network."""
    folder = tmp_path_factory.mktemp("shelf")
    ramp = np.arange(17 * 80 * 112 * 3, dtype=np.uint32).reshape(17, 80, 112, 3)
    media.write_mp4(folder / "my.mp4", (ramp // 977 % 256).astype(np.uint8), 25)
    config = NetworkConfig(**TINY)
    torch.manual_seed(0)
    network = ReferenceNetwork(config)
    torch.nn.init.normal_(network.head.weight, std=0.1)
    about = {"config": json.dumps(asdict(config))}
    save_file(network.state_dict(), folder / "tiny.safetensors", about)
    return folder


@pytest.fixture(autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """A background job begins with SIGINT ignored, and so would every run in here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def place(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, with the video and the weights one level up."""
    for name in ("my.mp4", "tiny.safetensors"):
        os.link(shelf / name, tmp_path / name)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def command(*extra: str, frames: int = 10) -> list[str]:
    """Three chunks of two views, unless said otherwise."""
    given = ["run", "../my.mp4", "--weights", "../tiny.safetensors", "--views", "2"]
    return [*given, "--frames", str(frames), "--history", "4", "--steps", "2", *extra]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_run_writes_its_files_and_says_where(place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(command("--mask-block", "64,128", "--seed", "3")) == 0
    out, err = capsys.readouterr()
    assert names(place / "out") == FILES
    for name in FILES - {"run.json"}:
        assert f"out/{name}  " in out
    assert out.startswith("9 frames of 2 views of my.mp4 generated in ")
    assert "attention  torch, because flex (CUDA) needs a CUDA device, got cpu; 0 kernels" in out
    assert "masks      " in out and "memory     FP32, " in out
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "chunk 1/3: frames 1 to 4", "chunk 2/3: frames 5 to 8", "chunk 3/3: frames 9 to 9",
    ]  # fmt: skip
    assert all("frames/s" in line and line.endswith(" left") for line in err.splitlines())

    views, fps = media.read_video(place / "out" / "views.mp4")
    assert (views.shape, fps) == ((10, 240, 644, 3), 25.0)
    tensors = load_file(place / "out" / "latents.safetensors")
    assert tensors["latent"].shape == (1, 2, 3, 10, 48, 64)
    assert tensors["tokens"].shape == (1, 2, 10, 48, 192)
    trace = json.loads((place / "out" / "trace.json").read_text())
    assert [(chunk["start"], chunk["end"]) for chunk in trace["chunks"]] == [
        (1, 5),
        (5, 9),
        (9, 10),
    ]
    assert trace["settings"]["mask_block"] == [64, 128]
    assert trace["settings"]["seed"] == 3
    assert trace["attention"]["backend"] == "torch"
    assert trace["video"]["fps"] == trace["model"]["fps"] == 25.0
    assert len(trace["model"]["model_id"]) == 64
    assert {"kv-core", "kv-kernels", "kv-rollout", "torch"} < set(trace["versions"])


def test_the_given_frame_is_the_source_and_the_sheet_has_all_three(place: Path):
    assert main(command()) == 0
    source, _ = media.read_video(place.parent / "my.mp4", frames=1)
    latent = load_file("out/latents.safetensors")["latent"][0, 0, :, 0]
    pixels = ((latent + 1) * 127.5).round().permute(1, 2, 0).numpy().astype(np.uint8)
    clip = runs.load_source(runs.read_run(Path("out"))["settings"]).clip
    assert torch.equal(latent, clip.latent[0, 0, :, 0])
    assert pixels.shape == (48, 64, 3) and source.shape == (1, 80, 112, 3)
    from PIL import Image

    with Image.open("out/contact-sheet.png") as sheet:
        assert sheet.size == (96 + 3 * (386 + 14), 44 + 4 * (144 + 14))


def test_the_bundled_clip_is_the_default(place: Path):
    arguments = command(frames=2)
    arguments.remove("../my.mp4")
    assert main(arguments) == 0
    trace = json.loads(Path("out/trace.json").read_text())
    assert trace["video"]["file"] == str(runs.shipped(runs.CLIP))
    assert trace["settings"]["video"] is None


def test_the_weights_that_ship_see_more_than_the_control_says(place: Path):
    assert main(["run", "--views", "1", "--frames", "3"]) == 0
    made = load_file("out/latents.safetensors")["latent"]
    clip = runs.load_source(runs.read_run(Path("out"))["settings"]).clip
    grey = torch.from_numpy(runs._control_pixels(clip)).permute(0, 4, 1, 2, 3) / 127.5 - 1
    errors = [(each - clip.latent)[:, :, :, 1:].abs().mean() for each in (made, grey[None])]
    assert errors[0] < errors[1] / 2


def test_a_gif_replaces_the_mp4_of_an_earlier_run(place: Path):
    assert main(command(frames=2)) == 0
    Path("out/mine.txt").write_text("mine")
    assert main(command("--format", "gif", frames=2)) == 0
    assert names(place / "out") == (FILES - {"views.mp4"}) | {"views.gif", "mine.txt"}
    assert media.read_video("out/views.gif")[0].shape == (2, 240, 644, 3)


def test_all_frames_and_all_history_can_be_asked_for(place: Path):
    arguments = command(
        "--frames", "all", "--history", "all", "--start", "3", "--sample-type", "sde"
    )
    assert main(arguments) == 0
    assert load_file("out/latents.safetensors")["tokens"].shape[2] == 14


@pytest.mark.parametrize(
    ("options", "memory", "dtype"),
    [
        (["--memory", "int8"], "INT8", "float32"),
        (["--memory", "bf16"], "BF16", "bfloat16"),
        (["--dtype", "bf16"], "BF16", "bfloat16"),
        (["--dtype", "bf16", "--memory", "int8"], "INT8", "bfloat16"),
    ],
)
def test_memory_and_dtype_name_each_other(
    place: Path, capsys: pytest.CaptureFixture[str], options: list[str], memory: str, dtype: str
):
    assert main(command(*options, frames=6)) == 0
    assert f"memory     {memory}, " in capsys.readouterr().out
    tokens = load_file("out/latents.safetensors")["tokens"]
    assert str(tokens.dtype) == f"torch.{dtype}"


def test_steps_lie_on_the_curve_of_the_models_own_schedule():
    own = (1.0, 0.9, 0.75, 0.5)
    assert runs.resample(own, 4) == own
    assert runs.resample(own, 2) == (1.0, 0.75)
    assert runs.resample(own, 1) == (1.0,)
    assert runs.resample(own, 8) == pytest.approx((1.0, 0.95, 0.9, 0.825, 0.75, 0.625, 0.5, 0.25))


WRONG = {
    "no file": (["run", "none.mp4"], "there is no file {here}/none.mp4; check the path of the"),
    "a folder": (["run", "."], "{here} is not a file; pass a video, such as an MP4 or a GIF"),
    "no video": (
        ["run", "../tiny.safetensors"],
        "tiny.safetensors is not a video that can be read",
    ),
    "too short": (["run", "../my.mp4"], "my.mp4 has 17 frames, 24 asked; ask for 17 or fewer"),
    "too late": (
        command("--start", "12"),
        "has 17 frames, 10 asked from frame 12 on; ask for 5 or fewer",
    ),
    "past the end": (command("--start", "17"), "has 17 frames, so none from frame 17 on"),
    "only the given": (
        command("--frames", "all", "--start", "16"),
        "1 frame there, which is given",
    ),
    "views": (command("--views", "0"), "--views must be a number between 1 and 64, got 0"),
    "no number": (command("--views", "x"), "Invalid value for '--views': "),
    "negative start": (command("--start=-2"), "--start must be a number at least 0, got -2"),
    "many views": (command("--views", "65"), "--views must be a number between 1 and 64, got 65"),
    "one frame": (
        command("--frames", "1"),
        "--frames must be at least 2 frames, or 'all', got '1'",
    ),
    "frames": (
        command("--frames", "ten"),
        "--frames must be at least 2 frames, or 'all', got 'ten'",
    ),
    "history": (
        command("--history", "0"),
        "--history must be at least 1 frame, or 'all', got '0'",
    ),
    "negative": (
        command("--history=-4"),
        "--history must be at least 1 frame, or 'all', got '-4'",
    ),
    "block": (
        command("--mask-block", "64,"),
        "--mask-block must be a number of tokens, or two with",
    ),
    "three": (command("--mask-block", "1,2,3"), "such as 64,128, got '1,2,3'"),
    "zero block": (command("--mask-block", "0,64"), "--mask-block must be a number of tokens"),
    "huge block": (command("--mask-block", "1000000"), "--mask-block must be a number of tokens"),
    "backend": (
        command("--backend", "cuda"),
        "--backend must be one of auto, torch, flex, got 'cuda'",
    ),
    "memory": (
        command("--memory", "int4"),
        "--memory must be one of auto, fp32, bf16, fp16, int8, got 'int4'",
    ),
    "both": (
        command("--memory", "fp32", "--dtype", "bf16"),
        "--memory fp32 does not fit --dtype bf16",
    ),
    "device": (command("--device", "tpu"), "--device must be auto, cpu, cuda or cuda:1, got 'tpu'"),
    "no such GPU": (
        command("--device", "cuda:99"),
        "so nothing can run on cuda:99; begin a run with",
    ),
    "seed": (command("--seed=-1"), "--seed must be a number between 0 and"),
    "long seed": (command("--seed", str(2**128)), "--seed must be a number between 0 and"),
    "steps": (command("--steps", "0"), "--steps must be a number between 1 and 1000, got 0"),
    "sampler": (
        command("--sample-type", "pde"),
        "--sample-type must be one of auto, ode, sde, got 'pde'",
    ),
    "format": (command("--format", "avi"), "--format must be one of mp4, gif, got 'avi'"),
    "no weights": (
        command("--weights", "gone"),
        "{here}/gone does not hold weights of the reference",
    ),
    "bad weights": (
        command("--weights", "../my.mp4"),
        "does not hold weights of the reference model",
    ),
    "option": (command("--viewz", "3"), "No such option"),
    "second video": (command("more.mp4"), "unexpected extra argument"),
    "command": (["rum"], "No such command 'rum'"),
    "file as folder": (
        command("--out", "../my.mp4"),
        "../my.mp4 is a file; name a folder with --out",
    ),
    "below a file": (command("--out", "../my.mp4/a"), "../my.mp4/a cannot be written to: "),
    "resume nowhere": (
        ["resume", "out"],
        "there is no folder out; name the one that was --out of the run",
    ),
    "resume nothing": (["resume", "."], ". holds no run of this command: its run.json is missing"),
    "resume the default": (
        ["resume"],
        "there is no folder out; name the one that was --out of the run",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_sentence_and_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    if arguments[0] == "run" and "--out" not in arguments:
        arguments = [*arguments, "--out", "new/out"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kv-rollout: ") and err.count("\n") == 1 and err.endswith("\n")
    assert said.format(here=place) in err
    assert names(place) == set()
    assert names(place.parent) == {"my.mp4", "tiny.safetensors", "here"}


def test_a_backend_that_cannot_run_is_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from kv_kernels.ops.slot_attention import flex

    monkeypatch.setattr(flex, "rejects_cpu", lambda query: "(CPU) needs a C++ compiler")
    from kv_kernels.registry import find

    find.cache_clear()
    assert main(command("--backend", "flex")) == 2
    err = capsys.readouterr().err
    assert "with backend 'flex'" in err and "needs a C++ compiler" in err and err.count("\n") == 1
    assert names(place) == set()
    find.cache_clear()


def test_a_folder_of_somebody_else_is_left_alone(place: Path, capsys: pytest.CaptureFixture[str]):
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("precious")
    assert main(command()) == 2
    assert "out holds files that no earlier run wrote; name another" in capsys.readouterr().err
    assert names(place / "out") == {"thesis.txt"}
    assert main(command("--force", frames=2)) == 0
    assert names(place / "out") == FILES | {"thesis.txt"}
    assert Path("out/thesis.txt").read_text() == "precious"


def test_a_failed_run_leaves_the_results_of_an_earlier_one(place: Path):
    assert main(command(frames=2)) == 0
    before = {name: Path("out", name).read_bytes() for name in names(place / "out")}
    assert main(command("--start", "16")) == 2
    assert {name: Path("out", name).read_bytes() for name in names(place / "out")} == before


@pytest.fixture(scope="module")
def whole(shelf: Path) -> dict[str, Path]:
    """The results of runs that nothing stopped, for each kind of memory."""
    results = {}
    for memory in ("auto", "int8"):
        folder = results[memory] = shelf / memory
        inputs = [str(shelf / "my.mp4"), "--weights", str(shelf / "tiny.safetensors")]
        arguments = ["run", *inputs, *command("--memory", memory, "--out", str(folder))[4:]]
        assert main(arguments) == 0
    return results


def same_results(a: Path | str, b: Path | str) -> bool:
    one, other = (load_file(Path(folder, "latents.safetensors")) for folder in (a, b))
    pictures = ("views.mp4", "contact-sheet.png")
    return all(torch.equal(one[name], other[name]) for name in ("tokens", "latent")) and all(
        Path(a, name).read_bytes() == Path(b, name).read_bytes() for name in pictures
    )


class Interrupting:
    """`ChunkRollout.step` that gets signals in the middle of one chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, chunk: int, signals: list[int]) -> None:
        self.step = ChunkRollout.step
        self.denoise = ChunkRollout._denoise
        self.chunk, self.signals = chunk, signals
        monkeypatch.setattr(ChunkRollout, "_denoise", lambda *a: self(*a))

    def __call__(self, rollout: ChunkRollout, *arguments):
        tokens = self.denoise(rollout, *arguments)
        if rollout.chunks_done == self.chunk:
            while self.signals:
                signal.raise_signal(self.signals.pop(0))
        return tokens


@pytest.mark.parametrize(
    ("signals", "memory", "status", "done"),
    [
        ([signal.SIGINT], "auto", 130, 2),
        ([signal.SIGINT, signal.SIGINT], "int8", 130, 1),
        ([signal.SIGTERM], "auto", 143, 2),
    ],
    ids=["Ctrl-C", "Ctrl-C twice", "terminated"],
)
def test_a_stopped_run_resumes_to_the_same_bits(
    place: Path,
    whole: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signals: list[int],
    memory: str,
    status: int,
    done: int,
):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Interrupting(monkeypatch, chunk=1, signals=list(signals))
    monkeypatch.setattr(sys, "argv", ["kv-rollout"])
    assert main(command("--memory", memory)) == status
    assert names(place / "out") == {"rollout.safetensors", "run.json"}
    said = capsys.readouterr().err
    assert f"Stopped; {done} of 3 chunks are saved. Continue with:\n" in said
    assert said.endswith("kv-rollout resume out\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    assert main(command("--memory", memory)) == 2
    assert (
        "interrupted; continue it with kv-rollout resume out, or start" in capsys.readouterr().err
    )
    assert main(["resume", "out"]) == 0
    assert f"chunk {done + 1}/3" in capsys.readouterr().err
    assert names(place / "out") == FILES
    assert same_results("out", whole[memory])
    assert main(["resume", "out"]) == 2
    assert "the run in out is finished: there is nothing to resume" in capsys.readouterr().err


def test_a_run_stopped_in_its_first_chunk_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Interrupting(monkeypatch, chunk=0, signals=[signal.SIGINT, signal.SIGINT])
    assert main(command()) == 130
    assert (
        capsys.readouterr().err == "Stopped before the first chunk was done; nothing was written.\n"
    )
    assert names(place) == set()


def test_ctrl_c_while_the_video_is_read_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(media, "read_video", interrupted)
    assert main(command()) == 130
    assert capsys.readouterr().err == "Stopped before the first chunk; nothing was written.\n"
    assert names(place) == set()


def test_ctrl_c_in_the_last_chunk_finishes_the_run(place: Path, monkeypatch: pytest.MonkeyPatch):
    Interrupting(monkeypatch, chunk=2, signals=[signal.SIGINT])
    assert main(command()) == 0
    assert names(place / "out") == FILES


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug"), OSError(28, "full")])
def test_a_failure_while_results_are_written_loses_nothing(
    place: Path,
    whole: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
):
    def broken(*a):
        raise error

    monkeypatch.setattr(media, "write_png", broken)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="a bug"):
            main(command())
    else:
        assert main(command()) == (2 if isinstance(error, OSError) else 130)
    assert names(place / "out") == {"rollout.safetensors", "run.json"}
    assert "3 of 3 chunks are saved" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(["resume", "out/rollout.safetensors"]) == 0
    assert names(place / "out") == FILES
    assert same_results("out", whole["auto"])


@pytest.fixture
def stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        Interrupting(patch, chunk=0, signals=[signal.SIGINT])
        assert main(command()) == 130
    return place


def test_a_resume_that_cannot_go_on_says_why_and_changes_nothing(
    stopped: Path, capsys: pytest.CaptureFixture[str]
):
    def refused(said: str) -> None:
        before = {name: Path("out", name).read_bytes() for name in names(Path("out"))}
        capsys.readouterr()
        assert main(["resume", "out"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert said in err
        assert {name: Path("out", name).read_bytes() for name in names(Path("out"))} == before

    video, weights, kept = stopped.parent / "my.mp4", stopped.parent / "tiny.safetensors", {}
    for file in (video, weights, stopped / "out/run.json", stopped / "out/rollout.safetensors"):
        kept[file] = file.read_bytes()
        file.unlink()

    def put_back(*files: Path) -> None:
        for file in files:
            file.write_bytes(kept[file])

    run, rollout = stopped / "out/run.json", stopped / "out/rollout.safetensors"
    refused("out holds no run of this command: its run.json is missing or damaged")
    run.write_text("{}")
    refused("out holds no run of this command: its run.json is missing or damaged")
    put_back(run)
    refused("there is no file")
    video.write_bytes(kept[video] + b"\0")
    refused("my.mp4 has changed since the run began; put the old file back, or start a new run")
    put_back(video)
    refused("tiny.safetensors does not hold weights of the reference model")
    put_back(weights)
    refused("rollout.safetensors is not a file")
    rollout.write_bytes(kept[rollout][:-1])
    refused("rollout.safetensors is not a whole saved state")
    put_back(rollout)
    run.write_text(run.read_text().replace('"dtype": "fp32"', '"dtype": "bf16"'))
    refused("the snapshot was made with dtype torch.float32, but this rollout has torch.bfloat16")
    put_back(run)
    assert main(["resume", "out"]) == 0


def test_a_video_that_was_moved_can_be_named_again(stopped: Path):
    (stopped.parent / "my.mp4").rename(stopped.parent / "moved.mp4")
    assert main(["resume", "out"]) == 2
    assert main(["resume", "out", "--video", "../moved.mp4"]) == 0


def test_ctrl_c_in_a_process_of_its_own(place: Path):
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
        "from kv_rollout.cli import main\n"
        "sys.exit(main())\n"
    )
    arguments = [sys.executable, "-c", script, *command("--steps", "16", frames=17)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("chunk 1/4: frames 1 to 4, ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "of 4 chunks are saved. Continue with:\n" in err and "Traceback" not in err
    assert names(place / "out") == {"rollout.safetensors", "run.json"}
    done = snapshot.load("out/rollout.safetensors")["meta"]["chunks_done"]
    assert 1 <= done < 4

    assert main(["resume", "out"]) == 0
    assert main(command("--steps", "16", "--out", "whole", frames=17)) == 0
    assert same_results("out", "whole")


def test_the_command_is_said_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("bin", ".venv/bin"):
        Path(folder).mkdir(parents=True)
        Path(folder, "kv-rollout").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for called, said in (
        (tmp_path / "bin/kv-rollout", "kv-rollout"),
        (tmp_path / ".venv/bin/kv-rollout", ".venv/bin/kv-rollout"),
        ("/site/kv_rollout/__main__.py", f"{sys.executable} -m kv_rollout"),
    ):
        monkeypatch.setattr(sys, "argv", [str(called), "run"])
        assert cli._resume_command(Path("a b")) == f"{said} resume 'a b'"


def test_help_and_version_need_no_model(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "run" in capsys.readouterr().out
    for arguments in (["--help"], ["run", "--help"], ["resume", "--help"], ["info", "--help"]):
        assert main(arguments) == 0
    out = capsys.readouterr().out
    for option in ("--views", "--history", "--mask-block", "--memory", "--out", "--video"):
        assert option in out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kv-rollout ")


def test_info_lists_versions_kernels_and_the_clip(capsys: pytest.CaptureFixture[str]):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for said in ("torch ", "device  cpu", "slot_attention", "model  ", "clip  "):
        assert said in out
