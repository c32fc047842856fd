"""Killed and resumed, failed and retried, extended: always the same bits."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from kv_core import KVFormat, RolloutStateError, SnapshotError, SpecError
from kv_rollout import ChunkRollout, FlowSampler, run_rollout
from rollout_toy import ToyModel, toy_geometry, toy_inputs
from torch import Tensor

SETTINGS = {
    "bounded": {"history_frames": 4},
    "unbounded": {},
    "int8": {"history_frames": 4, "memory_format": KVFormat.INT8},
    "sde": {"history_frames": 4, "sample_type": "sde"},
    "text2video": {"given": 0, "history_frames": 8},
    "guided": {"negative_text_ids": torch.arange(3), "guidance_scale": 2.0, "history_frames": 4},
    "batch": {"batch_size": 2, "seed": [4, 2**70], "history_frames": 4},
    "output": {"token_frames": 5, "history_frames": 4},
    "captions": {"text_ids": torch.arange(5), "view_text_tokens": (2, 3)},
}


def start(settings: dict, model: ToyModel | None = None, frames: int = 15) -> ChunkRollout:
    settings = dict(settings)
    geometry = toy_geometry(frames, given=settings.pop("given", 1))
    inputs = toy_inputs(geometry, batch=settings.get("batch_size", 1))
    return ChunkRollout(model or ToyModel(), geometry=geometry, **inputs, **settings)


def controls_of(rollout: ChunkRollout) -> Tensor:
    batch = rollout.states[0].cache.buffers()[0][0].shape[0]
    return toy_inputs(rollout.geometry, batch=batch)["controls"]


def same(a: dict, b: dict) -> bool:
    """Whether two states agree in every bit and counter; the time a chunk took does not count."""

    def plain(meta: dict) -> dict:
        times = ("prepare_ms", "denoise_ms", "commit_ms", "compiles", "nbytes")
        counts = ("masks_built", "masks_reused")
        trace = [{k: v for k, v in t.items() if k not in times + counts} for t in meta["trace"]]
        return meta | {"trace": trace}

    return (
        plain(a["meta"]) == plain(b["meta"])
        and a["tensors"].keys() == b["tensors"].keys()
        and all(torch.equal(t, b["tensors"][name]) for name, t in a["tensors"].items())
    )


def everything(rollout: ChunkRollout) -> list[Tensor]:
    list(rollout)
    state = rollout.state_dict()["tensors"]
    return [rollout.result(partial=True).tokens, *(state[name] for name in sorted(state))]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_resumed_rollout_gives_the_same_bits(settings: dict, tmp_path):
    expected = everything(start(settings))
    for chunk in range(4):
        rollout = start(settings)
        for _ in range(chunk):
            rollout.step()
        path = tmp_path / f"{chunk}.safetensors"
        rollout.save(path)
        resumed = ChunkRollout.resume(path, ToyModel(), controls=controls_of(rollout))
        assert same(rollout.state_dict(), resumed.state_dict())
        for mine, theirs in zip(everything(resumed), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_exception_in_any_pass_of_any_chunk_leaves_the_rollout_as_before(settings: dict):
    model = ToyModel()
    rollout = start(settings, model)
    expected = everything(start(settings))
    while not rollout.is_finished:
        before = rollout.state_dict()
        probe = start(settings, ToyModel())
        probe.load_state_dict(before)
        probe._model.calls.clear()
        probe.step()
        for failing in range(1, len(probe._model.calls) + 1):
            model.calls.clear()
            model.fail_at = failing
            with pytest.raises(RuntimeError, match="the network broke"):
                rollout.step()
            assert same(before, rollout.state_dict()), f"pass {failing}"
        model.fail_at = None
        rollout.step()
    for mine, theirs in zip(everything(rollout), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_an_exception_in_the_controls_or_the_noise_is_undone_too():
    rollout = start({"history_frames": 4})
    rollout.step()
    before = rollout.state_dict()
    source, noise = rollout._controls, rollout._noise

    class Broken:
        def tokens(self, start: int, end: int) -> Tensor:
            raise OSError("the camera is gone")

        def draw(self, **where):
            raise KeyboardInterrupt

    rollout.states[0]._controls = Broken()
    with pytest.raises(OSError, match="camera"):
        rollout.step()
    rollout.states[0]._controls = source
    rollout._noise = Broken()
    with pytest.raises(KeyboardInterrupt):
        rollout.step()
    rollout._noise = noise
    assert same(before, rollout.state_dict())
    for mine, theirs in zip(
        everything(rollout), everything(start({"history_frames": 4})), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_killed_process_resumes_from_its_last_snapshot(tmp_path):
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_resume import start\n"
        "rollout = start({'history_frames': 4})\n"
        "for trace, _ in rollout:\n"
        "    rollout.save(sys.argv[2])\n"
        "    if trace.index == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "killed.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", script, os.path.dirname(__file__), str(path)], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole = start({"history_frames": 4})
    resumed = ChunkRollout.resume(path, ToyModel(), controls=controls_of(whole))
    assert resumed.chunks_done == 2
    for mine, theirs in zip(everything(resumed), everything(whole), strict=True):
        assert torch.equal(mine, theirs)


def test_load_state_dict_rewinds():
    rollout = start({"history_frames": 4})
    rollout.step()
    state = rollout.state_dict()
    expected = everything(rollout)
    rollout.load_state_dict(state)
    assert rollout.chunks_done == 1
    for mine, theirs in zip(everything(rollout), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frames": 19}, "geometry.frames_per_view 15, but this rollout has 19"),
        ({"history_frames": 8}, "history_frames 4, but this rollout has 8"),
        ({"seed": 1}, "noise_keys"),
        ({"fps": 24.0}, "fps 30.0, but this rollout has 24.0"),
        ({"schedule": [1.0]}, "schedule"),
        ({"mask_block_size": 64}, "mask_block_size"),
        ({"text_ids": torch.tensor([3, 2])}, "prompts"),
        ({"memory_format": KVFormat.INT8}, "memory_format FP32, but this rollout has INT8"),
    ],
)
def test_a_snapshot_of_other_arguments_is_refused_by_name(change: dict, words: str):
    state = start({"history_frames": 4}).state_dict()
    frames = change.pop("frames", 15)
    other = start({"history_frames": 4} | change, frames=frames)
    before = other.state_dict()
    with pytest.raises(SnapshotError, match=words):
        other.load_state_dict(state)
    assert same(before, other.state_dict())


def test_resume_refuses_another_model_or_other_controls(tmp_path):
    rollout = start({})
    rollout.step()
    path = tmp_path / "saved.safetensors"
    rollout.save(path)
    other = ToyModel()
    other.model_id = "another"
    controls = controls_of(rollout)
    with pytest.raises(SnapshotError, match="model_id toy, but this rollout has another"):
        ChunkRollout.resume(path, other, controls=controls)
    with pytest.raises(SnapshotError, match="controls"):
        ChunkRollout.resume(path, ToyModel(), controls=controls + 1)
    with pytest.raises(SnapshotError, match="dtype"):
        ChunkRollout.resume(path, ToyModel(dtype=torch.bfloat16), controls=controls)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SnapshotError):
        ChunkRollout.resume(path, ToyModel(), controls=controls)


def test_what_cannot_be_saved_is_handed_in_again(tmp_path):
    class Mine(FlowSampler):
        spec = {"sampler": "mine"}  # noqa: RUF012

    away = {"negative_text_ids": torch.arange(2), "guidance_scale": lambda chunk: 1.0 + chunk}
    rollout = start(away | {"sampler": Mine((1.0, 0.5))})
    rollout.step()
    path = tmp_path / "saved.safetensors"
    rollout.save(path)
    handed = {"controls": controls_of(rollout)}
    with pytest.raises(SnapshotError, match="guidance_scale was a function"):
        ChunkRollout.resume(path, ToyModel(), sampler=Mine((1.0, 0.5)), **handed)
    handed["guidance_scale"] = away["guidance_scale"]
    with pytest.raises(SnapshotError, match="sampler"):
        ChunkRollout.resume(path, ToyModel(), **handed)
    resumed = ChunkRollout.resume(path, ToyModel(), sampler=Mine((1.0, 0.5)), **handed)
    for mine, theirs in zip(everything(resumed), everything(rollout), strict=True):
        assert torch.equal(mine, theirs)


def long_clip(frames: int, controls: int, **settings) -> tuple[ChunkRollout, Tensor]:
    geometry = toy_geometry(frames, position_stride=40)
    whole = toy_inputs(toy_geometry(controls, position_stride=40))
    rollout = ChunkRollout(
        ToyModel(),
        geometry=geometry,
        controls=whole["controls"][:, :, :frames],
        condition_tokens=whole["condition_tokens"],
        **settings,
    )
    return rollout, whole["controls"]


@pytest.mark.parametrize("memory", [None, KVFormat.INT8])
def test_an_extended_clip_equals_one_that_was_longer_from_the_start(memory):
    rollout, controls = long_clip(21, 33, history_frames=4, memory_format=memory)
    list(rollout)
    rollout.extend(33, controls=controls)
    assert rollout.chunk_count == 8 and rollout.next_range == (21, 25)
    list(rollout)
    longer, _ = long_clip(33, 33, history_frames=4, memory_format=memory)
    list(longer)
    assert torch.equal(rollout.result().tokens, longer.result().tokens)


def test_extending_says_what_it_needs():
    rollout, controls = long_clip(21, 40, history_frames=4)
    with pytest.raises(RolloutStateError, match="0 of 5 chunks"):
        rollout.extend(33, controls=controls)
    list(rollout)
    with pytest.raises(SpecError, match="position_stride of at least 45"):
        rollout.extend(45)
    with pytest.raises(SpecError, match="frames_per_view"):
        rollout.extend(21, controls=controls)
    cut, controls = long_clip(20, 33, history_frames=4)
    list(cut)
    with pytest.raises(RolloutStateError, match="from 21 frames"):
        cut.extend(33, controls=controls)
    unbounded, controls = long_clip(21, 33)
    list(unbounded)
    with pytest.raises(RolloutStateError, match="begin with history_frames"):
        unbounded.extend(33, controls=controls)


def test_run_rollout_may_save_from_its_callback(tmp_path):
    geometry = toy_geometry(15)
    inputs = toy_inputs(geometry)
    path = tmp_path / "latest.safetensors"
    whole = run_rollout(
        ToyModel(),
        geometry=geometry,
        on_chunk=lambda rollout, trace, tokens: trace.index == 1 and rollout.save(path),
        **inputs,
    )
    resumed = ChunkRollout.resume(path, ToyModel(), controls=inputs["controls"])
    list(resumed)
    assert torch.equal(resumed.result().tokens, whole.tokens)
