"""Paged decode attention and fused writes, next to reads and copies of the same size.

    python benchmarks/bench_paged.py [--out results/paged.json]

Decoding: one new token for each of B sequences over a shuffled table, blocks of 64 tokens, beside
SDPA on contiguous keys and values and beside reading as many bytes. Writing: split, norm, RoPE and
scatter of T tokens, beside a copy that moves as many bytes. "graph" is the same call replayed from
a CUDA graph. Each timed call is compared with the torch row first. Needs a CUDA device.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from harness import measure, write
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import paged_decode_attention, paged_write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, D, N = (32, 8), 128, 64
CELLS = [(1, 1024), (32, 1024), (128, 1024), (1, 8192), (8, 8192), (32, 8192), (1, 32768)]
TOKENS = [1, 16, 128, 1024, 8192]
LAYERS = [
    ("BF16", "NHD", torch.bfloat16),
    ("BF16", "HND", torch.bfloat16),
    ("FP16", "NHD", torch.float16),
    ("INT8", "NHD", torch.bfloat16),
    ("INT8", "HND", torch.bfloat16),
]

Runs = dict[str, Callable[[], object]]


@triton.jit(do_not_specialize=["size"])
def _read_kernel(source, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < size, other=0)
    found = tl.max(values, axis=0)
    tl.store(target, found, mask=found == 0x7FFFFFFF)  # never: only so that the loads stay


def reader(nbytes: int) -> Callable[[], object]:
    """Return a function that reads as many bytes and writes none."""
    words = nbytes // 4
    source = torch.randint(0, 2**30, (words,), dtype=torch.int32, device="cuda")
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    grid = (triton.cdiv(words, 8192),)
    return lambda: _read_kernel[grid](source, target, words, BLOCK=8192, num_warps=8)


def copier(nbytes: int) -> Callable[[], object]:
    """Return a function that reads half of the bytes and writes the other half."""
    source, target = (
        torch.randint(0, 256, (nbytes // 2,), dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    return lambda: target.copy_(source)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays one call from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def make_layer(fmt: str, layout: Any, blocks: int) -> KVLayer:
    """Allocate a pool of random keys and values."""
    spec = KVSpec(kv_heads=HEADS[1], head_dim=D, block_size=N, format=KVFormat[fmt])
    layer = KVLayer.paged(spec, blocks=blocks, device="cuda", layout=layout)
    for cache, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        if scale is None:
            cache.normal_()
        else:
            cache.random_(-127, 128)
            scale.uniform_(0.01, 0.03)
    return layer


def make_step(sequences: int, context: int) -> Step:
    """Return one decode step of equal sequences over a shuffled table."""
    columns = triton.cdiv(context, N)
    table = torch.randperm(sequences * columns, device="cuda", dtype=torch.int32) + 1
    ids = torch.zeros(sequences, dtype=torch.int64, device="cuda")
    return Step(
        slots=ids,
        positions=ids,
        cu_seqlens=torch.arange(sequences + 1, dtype=torch.int32, device="cuda"),
        block_table=table.view(sequences, columns),
        context_lens=torch.full((sequences,), context, dtype=torch.int32, device="cuda"),
        max_query=1,
        max_context=context,
    )


def check(name: str, actual: Tensor, expected: Tensor) -> None:
    """Stop where a kernel differs from the torch row by more than two roundings."""
    eps = torch.finfo(actual.dtype).eps
    error = (actual.double() - expected.double()).abs().max().item()
    allowed = 2 * eps * expected.abs().max().item()
    if not error <= allowed:
        raise SystemExit(f"{name} errs by {error:.2e}, more than {allowed:.2e}")


def decode_points(sequences: int, context: int, repeats: int) -> list[dict[str, Any]]:
    """Time one cell of batch and context in every format and layout."""
    case = f"decode {sequences} x {context}"
    step = make_step(sequences, context)
    blocks = step.block_table.numel() + 1
    runs: Runs = {}
    nbytes: dict[str, int] = {}
    for fmt, layout, dtype in LAYERS:
        layer = make_layer(fmt, layout, blocks)
        q = torch.randn(sequences, HEADS[0], D, dtype=dtype, device="cuda")

        def attend(layer: KVLayer = layer, q: Tensor = q) -> Tensor:
            return paged_decode_attention(layer, step, q, backend="triton")

        name = f"{fmt} {layout}"
        runs[name] = attend
        nbytes[name] = layer.spec.nbytes(sequences * context)
        # a part of the batch, since the torch row takes one sequence after the other
        some = min(sequences, 4)
        part = Step(
            slots=step.slots[:some],
            positions=step.positions[:some],
            cu_seqlens=step.cu_seqlens[: some + 1],
            block_table=step.block_table[:some],
            context_lens=step.context_lens[:some],
            max_query=1,
            max_context=context,
        )
        plain = paged_decode_attention(layer, part, q[:some], backend="torch")
        check(f"{case} {name}", attend()[:some], plain)
        if fmt != "FP16":
            runs[f"{name}, graph"] = captured(attend)
            nbytes[f"{name}, graph"] = nbytes[name]
        if layout == "NHD" and fmt != "FP16":
            runs[f"read as {fmt}"] = reader(nbytes[name])
            nbytes[f"read as {fmt}"] = nbytes[name]
    q = torch.randn(sequences, HEADS[0], 1, D, dtype=torch.bfloat16, device="cuda")
    shape = (sequences, HEADS[1], context, D)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    runs["SDPA"] = lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            runs["SDPA"]()
    except RuntimeError as error:
        print(f"{case}: SDPA chooses for itself, since cuDNN does not take it ({error})")
    else:
        runs["SDPA cuDNN"] = lambda: _with_cudnn(q, k, v)
    for name in ("SDPA", "SDPA cuDNN"):
        nbytes[name] = nbytes["BF16 NHD"]
    return points(case, runs, nbytes, repeats)


def _with_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def write_points(tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Time one fused write of BF16 activations in every format and layout."""
    case = f"write {tokens}"
    Hq, H = HEADS
    qkv = torch.randn(tokens, (Hq + 2 * H) * D, dtype=torch.bfloat16, device="cuda")
    weights = [1 + 0.3 * torch.randn(D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    angles = torch.outer(
        torch.arange(16384.0), 10000.0 ** -(torch.arange(0, D, 2) / D)
    )  # fmt: skip
    cos, sin = angles.cos().cuda(), angles.sin().cuda()
    blocks = max(256, 2 * triton.cdiv(tokens, N))
    slots = (torch.randperm(blocks * N - N, device="cuda") + N)[:tokens]
    step = Step(
        slots=slots,
        positions=torch.randint(0, 16384, (tokens,), device="cuda"),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.zeros(1, dtype=torch.int32, device="cuda"),
        max_query=tokens,
        max_context=0,
    )
    runs: Runs = {}
    nbytes: dict[str, int] = {}
    for fmt, layout, _ in LAYERS:
        if fmt == "FP16":
            continue
        layer = make_layer(fmt, layout, blocks)

        def run(layer: KVLayer = layer, backend: str = "triton") -> Tensor:
            return paged_write(layer, step, qkv, *weights, cos, sin, rope="half", backend=backend)

        name = f"{fmt} {layout}"
        check(f"{case} {name}", run(), run(backend="torch"))
        runs[name] = run
        # qkv is read, queries and what is stored are written; tables are not counted
        nbytes[name] = qkv.nbytes + tokens * Hq * D * 2 + layer.spec.nbytes(tokens)
        runs[f"{name}, graph"] = captured(run)
        nbytes[f"{name}, graph"] = nbytes[name]
        if layout == "NHD":
            runs[f"copy as {fmt}"] = copier(nbytes[name])
            nbytes[f"copy as {fmt}"] = nbytes[name]
    return points(case, runs, nbytes, repeats)


def points(case: str, runs: Runs, nbytes: dict[str, int], repeats: int) -> list[dict[str, Any]]:
    """Time the runs of a case in turns."""
    taken = measure(runs, device="cuda", repeats=repeats)
    return [
        {
            "case": case,
            "run": run,
            "nbytes": nbytes[run],
            **times,
            "gigabytes_per_s": nbytes[run] / times["median_ms"] / 1e6,
        }
        for run, times in taken.items()
    ]


def show(cell: list[dict[str, Any]]) -> None:
    """Print one line a run: microseconds, and how fast bytes moved."""
    for point in cell:
        micros, rate = point["median_ms"] * 1e3, point["gigabytes_per_s"]
        print(
            f"{point['case']:<18}{point['run']:<18}{micros:10.1f} µs {rate:8.0f} GB/s", flush=True
        )


def main() -> None:
    """Run every cell and print, and keep, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("decode", "write"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found: list[dict[str, Any]] = []
    decodes = [partial(decode_points, *cell) for cell in CELLS]
    writes = [partial(write_points, tokens) for tokens in TOKENS]
    work = {"decode": decodes, "write": writes}
    with torch.inference_mode():
        for take in work.get(args.only, decodes + writes):
            cell = take(args.repeats)
            show(cell)
            found += cell
            torch.cuda.empty_cache()
            if args.out:
                write(args.out, "cuda", found)


if __name__ == "__main__":
    main()
