"""Whole rollouts on a GPU against the FP64 oracle, with the CPU's own error as the budget."""

import pytest
import torch
from kv_core import KVFormat
from kv_rollout import ChunkRollout, TokenRole
from rollout_toy import ToyModel, ToyNetwork, toy_geometry, toy_inputs
from rollout_whole_clip import whole_clip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FRAMES = 15


def on(device: str, dtype: torch.dtype, seed: int) -> ToyModel:
    model = ToyModel(seed, dtype)
    model.device = torch.device(device)
    network = model.network
    for name, value in vars(network).items():
        moved = value
        if isinstance(value, torch.Tensor):
            moved = value.to(device)
        elif isinstance(value, list):
            moved = [item.to(device) for item in value]
        elif isinstance(value, dict):
            moved = {key: item.to(device) for key, item in value.items()}
        setattr(network, name, moved)
    return model


def double(seed: int, dtype: torch.dtype) -> ToyNetwork:
    """The same weights, rounded to ``dtype``, in FP64."""
    network = ToyNetwork(seed, dtype)
    for name, value in vars(network).items():
        if isinstance(value, torch.Tensor):
            setattr(network, name, value.double())
        elif isinstance(value, list):
            setattr(network, name, [item.double() for item in value])
        elif isinstance(value, dict):
            setattr(network, name, {key: item.double() for key, item in value.items()})
    return network


def worst_error(device: str, dtype: torch.dtype, seed: int, **options) -> float:
    """Largest velocity error of any pass against the oracle fed with the same tokens."""
    geometry = toy_geometry(FRAMES, patch_h=4, patch_w=4)
    inputs = toy_inputs(geometry, seed=seed)
    model = on(device, dtype, seed)
    rollout = ChunkRollout(model, geometry=geometry, seed=seed, **inputs, **options)
    list(rollout)
    calls = [
        {"role": c["role"], "tokens": c["tokens"].cpu(), "timestep": c["timestep"],
         "velocity": c["velocity"].cpu()}
        for c in model.calls
    ]  # fmt: skip
    noisy = [call for call in calls if call["role"] is TokenRole.CURRENT]
    worst = 0.0
    for step in range(3):
        exact, _ = whole_clip(
            double(seed, dtype), rollout, calls, inputs, step, model.default_text_ids
        )
        mine = torch.cat(
            [c["velocity"].double().unflatten(1, (2, -1, 16)) for c in noisy[step::3]], 2
        )
        worst = max(worst, float((mine - exact).abs().max()))
    return worst


FP32, BF16, INT8 = torch.float32, torch.bfloat16, KVFormat.INT8
CASES = [
    *(("torch", dtype, memory, 128) for dtype in (FP32, BF16) for memory in (None, INT8)),
    *(("flex", dtype, memory, (64, 128)) for dtype in (FP32, BF16) for memory in (None, INT8)),
    *(("flex", FP32, None, block) for block in (128, (128, 64), 256)),
]


@pytest.mark.parametrize(("backend", "dtype", "memory", "block"), CASES)
def test_a_rollout_errs_no_more_than_twice_the_cpu(backend, dtype, memory, block):
    seed = int(torch.randint(1_000_000, ()).item())
    budget = 2 * worst_error("cpu", dtype, seed, memory_format=memory)
    error = worst_error(
        "cuda", dtype, seed, memory_format=memory, backend=backend, mask_block_size=block
    )
    assert 0 < error <= budget, f"seed {seed}"


def test_flex_compiles_once_per_query_length_and_never_after_warmup():
    geometry = toy_geometry(60, patch_h=4, patch_w=4)
    torch._dynamo.reset()
    model = on("cuda", torch.bfloat16, 0)
    rollout = ChunkRollout(
        model, geometry=geometry, history_frames=8, backend="flex", **toy_inputs(geometry)
    )
    traces = [trace for trace, _ in rollout]
    assert sum(trace.compiles for trace in traces) <= 6
    assert sum(trace.compiles for trace in traces[rollout.warmup_chunks : -1]) == 0
    assert sum(trace.masks_built for trace in traces[rollout.warmup_chunks + 2 : -1]) == 0


def test_noise_and_results_of_a_gpu_run_survive_save_and_resume(tmp_path):
    geometry = toy_geometry(FRAMES, patch_h=4, patch_w=4)
    inputs = toy_inputs(geometry)
    whole = ChunkRollout(on("cuda", torch.bfloat16, 0), geometry=geometry, **inputs)
    list(whole)
    half = ChunkRollout(on("cuda", torch.bfloat16, 0), geometry=geometry, **inputs)
    half.step()
    half.save(tmp_path / "half.safetensors")
    resumed = ChunkRollout.resume(
        tmp_path / "half.safetensors", on("cuda", torch.bfloat16, 0), controls=inputs["controls"]
    )
    list(resumed)
    assert torch.equal(resumed.result().tokens, whole.result().tokens)
