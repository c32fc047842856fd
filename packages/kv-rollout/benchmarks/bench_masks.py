"""Time the masks of one chunk against torch's own builder, and measure their peak memory.

python bench_masks.py --out results/masks-cpu.json

Each way of making a mask runs in a process of its own, so that its peak is its own. All make the
block mask of the last chunk of a clip: 4 views, chunks of 4 frames, 20 frames of history, 25 of
controls, 1 given, 256 prompt tokens, blocks of 128. "fresh" is everything from a new memory layout.
``rss_growth_mib`` is how far the timed runs raise the peak of the process. It says nothing of the
compiled ways, because compiling, before them, peaks higher.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
from kv_kernels import SegmentMask
from kv_rollout import (
    ClipGeometry,
    MaskCache,
    Segments,
    Visibility,
    build_memory_layout,
    control_chunk_ranges,
    pass_segments,
    segment_mask,
    text_segments,
)
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

PATCHES = {64: (8, 8), 220: (10, 22), 390: (15, 26)}
BLOCK = 128
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chunk(patch_tokens: int, views: int = 4) -> tuple[Segments, Segments]:
    """Return queries and keys of the noisy pass of the last chunk, from a new layout."""
    patch_h, patch_w = PATCHES[patch_tokens]
    geometry = ClipGeometry(
        num_views=views,
        frames_per_view=25,
        patch_h=patch_h,
        patch_w=patch_w,
        frames_per_chunk=4,
        condition_frames=1,
    )
    layout = build_memory_layout(
        geometry,
        control=control_chunk_ranges(geometry),
        given=True,
        history=[(start, start + 4) for start in range(1, 21, 4)],
    )
    return pass_segments(geometry, text_segments(256), layout, kind="noisy", start=21, end=25)


def fresh(patch_tokens: int, views: int = 4) -> SegmentMask:
    """Make layout, segments, table, mask and block lists."""
    q, kv = chunk(patch_tokens, views)
    mask = segment_mask(q, kv, Visibility(), block_size=BLOCK)
    mask.block_mask()
    return mask


def two_lookups(q: Segments, kv: Segments) -> Rule:
    """The rule of our masks, over tables of exact length."""
    mask = segment_mask(q, kv, Visibility(), block_size=BLOCK)
    table, q_segment, kv_segment = mask.table, mask.q_segment, mask.kv_segment

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[q_segment[q_idx], kv_segment[kv_idx]]

    return sees


def every_token(q: Segments, kv: Segments) -> Rule:
    """The same rule without segments: each token has a role, a view, a frame, a step, a flag."""

    def of(segments: Segments, name: str) -> Tensor:
        return torch.from_numpy(np.repeat(getattr(segments, name), segments.length))

    names = ("sample", "role", "view", "step", "noisy")
    q_of, k_of = ({name: of(segments, name) for name in names} for segments in (q, kv))

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_role, k_role = q_of["role"][q_idx], k_of["role"][kv_idx]
        q_view, k_view = q_of["view"][q_idx], k_of["view"][kv_idx]
        q_step, k_step = q_of["step"][q_idx], k_of["step"][kv_idx]
        own = q_view == k_view
        so_far = k_step <= q_step
        is_target = q_role >= 3
        links = (k_role == 0) & ((k_view < 0) | own) & (q_role > 0)
        links = links | ((k_role == 1) & own & so_far & (is_target | (q_role == 1)))
        links = links | ((k_role == 2) & own & so_far & is_target)
        links = links | ((k_role == 3) & (q_role == 3) & (k_step == q_step))
        links = links | ((k_role == 4) & (q_role == 3) & (k_step < q_step))
        links = links | ((k_role == 4) & (q_role == 4) & so_far)
        links = links | ((q_role == 2) & k_of["noisy"][kv_idx] & (k_role != 1))
        links = links & (q_of["sample"][q_idx] == k_of["sample"][kv_idx])
        return links | ((q_role == -1) & (k_role == -1))

    return sees


def torchs(rule: Rule, q: Segments, kv: Segments, build: Callable[..., BlockMask]) -> BlockMask:
    """Let torch evaluate a rule on every pair of tokens."""
    return build(rule, None, None, q.tokens, kv.tokens, device="cpu", BLOCK_SIZE=BLOCK)


def fingerprint(blocks: BlockMask) -> str:
    """Return a hash of all block lists."""
    digest = hashlib.sha256()
    for full in ("", "full_"):
        for side in ("kv", "q"):
            for what in ("num_blocks", "indices"):
                digest.update(getattr(blocks, f"{full}{side}_{what}").numpy().tobytes())
    return digest.hexdigest()[:16]


def measure(way: str, patch_tokens: int, repeats: int) -> dict[str, object]:
    """Time one way of making the mask; the first run is a warm-up where it is cheap."""
    q, kv = chunk(patch_tokens)
    row: dict[str, object] = {"way": way, "X": patch_tokens, "Q": q.tokens, "KV": kv.tokens}
    build: Callable[..., BlockMask] = create_block_mask
    if way.endswith("compiled"):
        build = torch.compile(create_block_mask)
    if way == "segments, fresh":

        def run() -> BlockMask:
            return fresh(patch_tokens).block_mask()

    elif way == "segments, reused":
        cache = MaskCache(Visibility(), block_size=BLOCK)

        def run() -> BlockMask:
            return cache.get(*chunk(patch_tokens), 0).block_mask()

    else:
        rule = every_token(q, kv) if way.startswith("every token") else two_lookups(q, kv)

        def run() -> BlockMask:
            return torchs(rule, q, kv, build)

    # torch imports its compiler on first use; nobody's time or memory should hold that
    create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")
    if way.startswith("segments") or way.endswith("compiled"):
        run()
    before = peak_rss()
    wall, cpu = [], []
    for _ in range(repeats):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        blocks = run()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    row |= {
        "repeats": repeats,
        "wall_ms": round(statistics.median(wall) * 1e3, 3),
        "cpu_ms": round(statistics.median(cpu) * 1e3, 3),
        "rss_growth_mib": round((peak_rss() - before) / 2**20, 1),
        "lists": fingerprint(blocks),
        "blocks": [int(blocks.full_kv_num_blocks.sum()), int(blocks.kv_num_blocks.sum())],
    }
    if way.startswith("segments"):
        tracemalloc.start()
        run()
        row["allocated_peak_mib"] = round(tracemalloc.get_traced_memory()[1] / 2**20, 2)
        tracemalloc.stop()
    return row


def measure_large() -> list[dict[str, object]]:
    """Time and weigh masks whose dense form nobody could hold."""
    tokens, segments = 96_000, 960
    lengths = np.full(segments, tokens // segments)
    triangle = np.tri(segments, dtype=bool)

    def causal() -> SegmentMask:
        mask = SegmentMask.build(triangle, lengths, lengths, block_size=BLOCK)
        mask.block_mask()
        return mask

    cases = (("11 views, 15 x 26", lambda: fresh(390, views=11)), ("96,000 x 96,000", causal))
    rows = []
    for name, make in cases:
        mask = make()
        start = time.perf_counter()
        make()
        wall = time.perf_counter() - start
        tracemalloc.start()
        make()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(
            {
                "case": name,
                "Q": mask.q_len,
                "KV": mask.kv_len,
                "wall_ms": round(wall * 1e3, 3),
                "allocated_peak_mib": round(peak / 2**20, 2),
                "mask_mib": round(mask.nbytes / 2**20, 2),
                "dense_gib": round(mask.q_len * mask.kv_len / 2**30, 2),
            }
        )
    return rows


def peak_rss() -> int:
    """Return the largest resident size so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    """Measure every way in a process of its own, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--patch-tokens", type=int, nargs="+", default=[64, 220])
    parser.add_argument("--compiled", action="store_true", help="also torch.compile the builder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, patch_tokens, repeats = arguments.measure
        print(json.dumps(measure(way, int(patch_tokens), int(repeats))))
        return
    ways = [("segments, fresh", 5), ("segments, reused", 5), ("two look-ups, eager", 3)]
    ways += [("every token, eager", 3)]
    if arguments.compiled:
        ways += [("two look-ups, compiled", 3), ("every token, compiled", 3)]
    rows = []
    print(f"{'way':24} {'X':>4} {'wall ms':>10} {'CPU ms':>10} {'peak MiB':>9} {'times ours':>11}")
    for patch_tokens in arguments.patch_tokens:
        ours = 0.0
        for way, repeats in ways:
            command = [sys.executable, __file__, "--measure", way, str(patch_tokens), str(repeats)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            ours = ours or row["wall_ms"]
            row["times_ours"] = round(row["wall_ms"] / ours, 2)
            rows.append(row)
            peak = f"{row.get('allocated_peak_mib', row['rss_growth_mib']):.1f}"
            peak = "-" if way.endswith("compiled") else peak
            print(
                f"{way:24} {patch_tokens:4} {row['wall_ms']:10.2f} {row['cpu_ms']:10.2f} "
                f"{peak:>9} {row['times_ours']:11.2f}",
                flush=True,
            )
        lists = {row["lists"] for row in rows if row["X"] == patch_tokens}
        assert len(lists) == 1, "the ways disagree about the mask"
    large = measure_large()
    for row in large:
        print(
            f"{row['case']}: {row['Q']} x {row['KV']} tokens in {row['wall_ms']:.1f} ms, peak "
            f"{row['allocated_peak_mib']} MiB, dense would be {row['dense_gib']} GiB"
        )
    result = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "block": BLOCK,
        "rows": rows,
        "large": large,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def processor() -> str:
    """Return the name of the CPU as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
