"""The cache half of hybrid layers on a GPU: the bytes of the CPU, and graphs equal to eager."""

from typing import Any

import pytest
import torch
from hybrid_oracle import EPS, Stack, storage, tiny_fp8
from kv_core import HybridSpec, KeyFormat, KVCacheManager, LayerCacheHandle, RowFormat
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES: dict[str, Any] = {"slots": 3, "blocks": 12, "max_tokens": 64}
STEPS = [("a", 21), ("a", 1), ("b", 40), ("a", 7), ("b", 2)]


def spec(**options: Any) -> HybridSpec:
    return tiny_fp8(ratios=(0, 4, 16), **options)


def inputs(stack: Stack, layer: int, request: str, positions: range) -> dict[str, Tensor]:
    """Return what a layer stores of some tokens, made on the CPU."""
    return stack.project(layer, stack.embed(request, positions), positions)


def cache_half(
    handle: LayerCacheHandle, made: dict[str, Tensor], w: dict[str, Tensor], *table: Tensor
) -> dict[str, Tensor]:
    """Compress, flush and append; return the new entries and keys."""
    new = {
        which: handle.compress(
            which,  # type: ignore[arg-type]
            made[f"{which}.value"],
            made[f"{which}.score"],
            w[f"{which}.norm"],
            EPS,
            *table,
        )
        for which in ("main", "index")
        if f"{which}.value" in made
    }
    if new:
        handle.flush_compression(new["main"], new.get("index"))
    handle.write_swa(made["kv"])
    for which in new:
        handle.append_tail(which, made[f"{which}.value"], made[f"{which}.score"])  # type: ignore[arg-type]
    return new


def to(device: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in values.items()}


@pytest.mark.parametrize(
    "made",
    [
        spec(row_format=RowFormat.FP32, key_format=KeyFormat.FP32),
        spec(),
        spec(key_format=KeyFormat.NVFP4, key_global_scale=0.01),
        spec(layout="flashmla_v4"),
    ],
    ids=["fp32", "mxfp4", "nvfp4", "packed"],
)
def test_rings_and_tails_hold_the_bytes_of_the_cpu(made: HybridSpec) -> None:
    """Codes are equal bit for bit; entries are made by exponentials and are only near."""
    stack = Stack(made)
    caches = {device: KVCacheManager(made, device=device, **SIZES) for device in ("cpu", "cuda")}
    lengths = {"a": 0, "b": 0}
    for request, count in STEPS:
        positions = range(lengths[request], lengths[request] + count)
        lengths[request] += count
        new: dict[str, list[dict[str, Tensor]]] = {}
        for device, cache in caches.items():
            handles = cache.acquire([request] * count, positions)
            new[device] = [
                cache_half(
                    handle,
                    to(device, inputs(stack, handle.layer, request, positions)),
                    to(device, stack.weights[handle.layer]),
                    stack.cos.to(device),
                    stack.sin.to(device),
                )
                for handle in handles
            ]
            cache.commit(handles)
        for mine, theirs in zip(new["cuda"], new["cpu"], strict=True):
            for which in theirs:
                torch.testing.assert_close(mine[which].cpu(), theirs[which], rtol=1e-5, atol=1e-5)
    for (name, cpu), (_, cuda) in zip(storage(caches["cpu"]), storage(caches["cuda"]), strict=True):
        if "entries" not in name and "keys" not in name:
            assert torch.equal(cpu.view(torch.uint8), cuda.cpu().view(torch.uint8)), name


def test_flushed_rows_have_the_codes_of_the_cpu() -> None:
    made, caches = spec(), {}
    g = torch.Generator().manual_seed(0)
    entries, keys = torch.randn(40, 16, generator=g), torch.randn(40, 32, generator=g)
    for device in ("cpu", "cuda"):
        caches[device] = cache = KVCacheManager(made, device=device, **SIZES)
        handle = cache.acquire(["a"] * 40, range(40))[1]
        handle.flush_compression(entries.to(device), keys.to(device))
    for (name, cpu), (_, cuda) in zip(storage(caches["cpu"]), storage(caches["cuda"]), strict=True):
        assert torch.equal(cpu.view(torch.uint8), cuda.cpu().view(torch.uint8)), name


def test_a_captured_layer_replays_as_eager_ones_do() -> None:
    """300 positions of two requests from 0 on, across windows and blocks."""
    made = spec()
    stack = Stack(made)
    sizes = SIZES | {"blocks": 48}
    eager, graphed = (KVCacheManager(made, device="cuda", **sizes) for _ in range(2))
    pads = {"pad_tokens": 4, "pad_requests": 3}
    weights = [to("cuda", w) for w in stack.weights]
    table = (stack.cos.cuda(), stack.sin.cuda())
    handles = graphed.acquire([], [], **pads)  # nothing is written while warming up
    static = [
        {
            name: torch.zeros(4, *tensor.shape[1:], device="cuda")
            for name, tensor in inputs(stack, layer, "a", range(1)).items()
        }
        for layer in range(made.layers)
    ]

    def run_all(of: list[LayerCacheHandle]) -> None:
        for handle in of:
            cache_half(handle, static[handle.layer], weights[handle.layer], *table)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run_all(handles)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(handles)
    graphed.commit(handles)
    for position in range(300):
        ids, positions = ["a", "b"], [position, position]
        for layer in range(made.layers):
            for request, row in zip(ids, (0, 1), strict=True):
                found = inputs(stack, layer, request, range(position, position + 1))
                for name, tensor in found.items():
                    static[layer][name][row].copy_(tensor[0])
        for cache in (eager, graphed):
            handles = cache.acquire(ids, positions, **pads)
            if cache is graphed:
                graph.replay()
            else:
                run_all(handles)
            cache.commit(handles)
    for (name, one), (_, two) in zip(storage(eager), storage(graphed), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), name
