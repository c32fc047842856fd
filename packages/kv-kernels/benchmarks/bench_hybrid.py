"""A hybrid cache at DeepSeek-V4's sizes, next to reads and copies of the same size.

    python benchmarks/bench_hybrid.py [--out results/hybrid.json]

Decoding: one token for each of B requests over its window of 128 rows and 512 or 1024 picked
entries of FP8. Indexer: 64 heads over 32,768 MXFP4 keys, and the top 512 of them. Writing: one
layer's ring, tails and flush, and its compression, for one token and for a prompt of 8,192. "graph"
is the same call replayed from a CUDA graph; "read" and "copy" move as many bytes. Each timed
attention is compared with the torch row first. Needs a CUDA device.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_paged import Runs, captured, check, copier, points, reader, show
from harness import write
from kv_core import HybridSpec, KeyFormat, KVCacheManager, RowFormat
from kv_core.hybrid.keys import KeyTensors, encode_keys
from kv_core.hybrid.rows import RowTensors, encode_rows
from kv_kernels import hybrid_ops
from kv_kernels.library import capability
from kv_kernels.ops.indexer_topk.triton import launches
from torch import Tensor

D, ROPE, GROUP, WINDOW, N = 512, 64, 64, 128, 64
INDEX_HEADS, WIDTH = 64, 128
ROW, KEY = 584, 68  # bytes
DECODES = [(64, 512), (128, 1024)]  # query heads, picks
BATCHES = [1, 16, 64, 128]
CONTEXT = 32768  # tokens of each request that decodes: 8,192 entries
INDEXED = [(1, 32768), (64, 32768), (64, 8192)]  # tokens, keys
TOKENS = [1, 8192]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, dtype=dtype, device="cuda")


def ids(values: Tensor | range) -> Tensor:
    """Return INT32 on the device."""
    return torch.as_tensor(values, dtype=torch.int32).cuda()


def stored_rows(outer: int, inner: int) -> RowTensors:
    """Return random FP8 rows ``[outer, inner, ...]``."""
    parts = [
        encode_rows(draw(len(some), inner, D), RowFormat.FP8, ROPE, GROUP)
        for some in torch.arange(outer).split(4096)
    ]
    found = []
    for part in zip(*parts, strict=True):
        joined = torch.cat([x.view(torch.uint8) for x in part])  # type: ignore[union-attr]
        found.append(joined.view(part[0].dtype))  # type: ignore[union-attr]
    return RowTensors(*found)


def decode_points(heads: int, picks: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """Time the attention of one new token for each of ``batch`` requests."""
    entries = CONTEXT // 4
    ring, pool = stored_rows(batch, WINDOW), stored_rows(batch * entries // N + 1, N)
    last = CONTEXT - 1
    held = torch.arange(CONTEXT - WINDOW, CONTEXT).roll(CONTEXT % WINDOW)
    held[last % WINDOW] -= WINDOW  # what this step's row is about to replace
    table = (torch.randperm(batch * entries // N) + 1).view(batch, -1)
    picked = torch.rand(batch, entries, device="cuda").argsort(1)[:, :picks].sort(1).values.int()
    q, row = draw(batch, heads, D, dtype=torch.bfloat16), draw(batch, D, dtype=torch.bfloat16)
    angle = draw(CONTEXT, ROPE // 2)
    tokens, sinks, tables = ids(range(batch)), draw(heads), (angle.cos(), angle.sin())
    at, vis = torch.full_like(tokens, last), torch.full_like(tokens, entries)
    table, held = ids(table), ids(held.repeat(batch, 1))

    def run(backend: str = "triton", some: int = batch) -> Tensor:
        part = slice(some)
        out, _ = torch.ops.kv_kernels.hybrid_attention(
            q[part], row[part], sinks, *ring, held, tokens, at, tokens[part], at[part], *pool,
            table, vis[part], picked[part], *tables, D**-0.5, WINDOW, "FP8", GROUP, backend, False,
        )  # fmt: skip
        return out

    case = f"decode {heads} x {WINDOW + picks}, {batch}"
    some = min(batch, 4)
    check(case, run()[:some], run("torch", some))
    # rows and picks are read, queries are read and outputs written
    nbytes = batch * ((WINDOW + picks) * ROW + picks * 4 + 4 * heads * D)
    runs: Runs = {"FP8": run, "FP8, graph": captured(run), "read": reader(nbytes)}
    return points(case, runs, dict.fromkeys(runs, nbytes), repeats)


def index_points(tokens: int, keys: int, repeats: int) -> list[dict[str, Any]]:
    """Time scores of all keys and the 512 highest, apart and together, beside torch.topk."""
    k, blocks = 512, tokens * keys // N
    stored = KeyTensors(
        *(
            torch.cat(part)
            for part in zip(
                *(
                    encode_keys(draw(len(some), N, WIDTH), KeyFormat.MXFP4, None)
                    for some in torch.arange(blocks + 1).split(8192)
                ),
                strict=True,
            )
        )
    )
    table = ids((torch.randperm(blocks) + 1).view(tokens, -1))
    iq = draw(tokens, INDEX_HEADS, WIDTH, dtype=torch.bfloat16)
    weights = draw(tokens, INDEX_HEADS, dtype=torch.bfloat16)
    request_ids, vis = ids(range(tokens)), ids(torch.full((tokens,), keys))
    arguments = (table, vis, request_ids, k, True)

    def run(backend: str = "triton") -> Tensor:
        picked, _ = torch.ops.kv_kernels.indexer_topk(
            iq, weights, *stored, None, *arguments, "MXFP4", backend
        )
        return picked

    case = f"indexer {tokens} x {keys}"
    found, plain = (picked[0].tolist() for picked in (run(), run("torch")))
    if len(set(found) & set(plain)) < k - 2:
        raise SystemExit(f"{case} picks others than torch: {set(found) ^ set(plain)}")
    score, select = launches(
        iq, weights, stored, None, *arguments, KeyFormat.MXFP4, capability(iq.device)
    )[2]
    score.run()
    scores = draw(tokens, keys)
    runs: Runs = {
        "scores and top": run,
        "scores and top, graph": captured(run),
        "scores": score.run,
        "top": select.run,
        "torch.topk": lambda: scores.topk(k, dim=1),
        "read": reader(tokens * keys * KEY),
    }
    nbytes = dict.fromkeys(runs, tokens * keys * KEY)
    nbytes["top"] = nbytes["torch.topk"] = tokens * keys * 4
    return points(case, runs, nbytes, repeats)


def write_points(tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Time what one layer of ratio 4 writes for one request, and what it compresses."""
    spec = HybridSpec.deepseek_v4(layers=1, compress_ratios=[4])
    manager = KVCacheManager(spec, slots=1, blocks=80, device="cuda", ops=hybrid_ops)
    if tokens == 1:
        # a token that closes a window, so that everything is stored
        manager.commit(manager.acquire([0] * 1023, range(1023)))
    first = manager.length(0) if manager.requests else 0
    (handle,) = manager.acquire([0] * tokens, range(first, first + tokens))
    half = torch.bfloat16
    row, angle = draw(tokens, D, dtype=half), draw(first + tokens, ROPE // 2)
    pairs = {
        "main": [draw(tokens, 2 * D, dtype=half) for _ in range(2)],
        "index": [draw(tokens, 2 * WIDTH, dtype=half) for _ in range(2)],
    }
    weights, tables = {"main": draw(D), "index": draw(WIDTH)}, (angle.cos(), angle.sin())
    entries, keys = draw(tokens, D), draw(tokens, WIDTH)

    def store() -> None:
        handle.flush_compression(entries, keys)
        handle.write_swa(row)
        for which, pair in pairs.items():
            handle.append_tail(which, *pair)  # type: ignore[arg-type]

    def compress() -> list[Tensor]:
        return [
            handle.compress(which, *pair, weights[which], 1e-6, *tables)  # type: ignore[arg-type]
            for which, pair in pairs.items()
        ]

    kind = handle.step.kinds[4]
    closing = int((kind.entry_slot >= 0).sum())
    in_ring, in_tail = (int((x >= 0).sum()) for x in (handle.step.ring_slot, kind.tail_slot))
    width = 2 * (D + WIDTH)
    stored = closing * (4 * (D + WIDTH) + ROW + KEY) + in_ring * (2 * D + ROW)
    stored += in_tail * 2 * width * (2 + 4)
    # a token's halves are pooled once each; before the step they come from the tail, in FP32
    pooled = 2 * width * (2 * tokens if tokens > 1 else 7 * 4 + 2) + tokens * 4 * (D + WIDTH)
    case = f"write {tokens}"
    runs: Runs = {
        "ring, tail, flush": store,
        "ring, tail, flush, graph": captured(store),
        "copy": copier(stored),
    }
    nbytes = dict.fromkeys(runs, stored)
    taken = points(case, runs, nbytes, repeats)
    # another step, whose tails nothing has overwritten
    manager.abort([handle])
    (handle,) = manager.acquire([0] * tokens, range(first, first + tokens))
    case = f"compress {tokens}"
    runs = {"entries, keys": compress, "entries, keys, graph": captured(compress)}
    runs["copy"] = copier(pooled)
    return taken + points(case, runs, dict.fromkeys(runs, pooled), repeats)


def main() -> None:
    """Run every cell and print, and keep, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("decode", "index", "write"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    work = {
        "decode": [partial(decode_points, *sizes, batch) for sizes in DECODES for batch in BATCHES],
        "index": [partial(index_points, *sizes) for sizes in INDEXED],
        "write": [partial(write_points, tokens) for tokens in TOKENS],
    }
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for take in work.get(args.only, [take for part in work.values() for take in part]):
            cell = take(args.repeats)
            show(cell)
            found += cell
            torch.cuda.empty_cache()
            if args.out:
                write(args.out, "cuda", found)


if __name__ == "__main__":
    main()
