"""Time alternatives side by side; keep medians, the machine and the versions in one JSON file."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # several times the largest L2


def measure(
    runs: Mapping[str, Callable[[], object]],
    *,
    device: str,
    repeats: int,
    warmup: int = 3,
    seconds: float = 2.0,
) -> dict[str, dict[str, float]]:
    """Time each function ``repeats`` times, in turns, so that drift meets all of them alike.

    On CUDA a call is timed by events on the device, after the L2 cache was overwritten.

    Args:
        runs: Functions by name.
        device: "cuda" or "cpu".
        repeats: Timed calls of each.
        warmup: Calls of each before that, which also compile; one where a call takes long.
        seconds: A function that takes longer in all is timed fewer times, but once at least.

    Returns:
        For each name the median and the 20th and 80th percentile, in milliseconds, and the number
        of timed calls.
    """
    flush = torch.empty(_FLUSH_BYTES if device == "cuda" else 0, dtype=torch.int8, device=device)

    def time_once(run: Callable[[], object]) -> float:
        return _time_cuda(run, flush) if device == "cuda" else _time_cpu(run)

    times: dict[str, list[float]] = {name: [] for name in runs}
    calls = {}
    for name, run in runs.items():
        run()
        once = time_once(run)
        calls[name] = max(1, min(repeats, int(seconds * 1e3 / once)))
        for _ in range(warmup - 2 if calls[name] == repeats else 0):
            run()
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < calls[name]:
                times[name].append(time_once(run))
    return {name: _summary(taken) for name, taken in times.items()}


def _time_cuda(run: Callable[[], object], flush: torch.Tensor) -> float:
    flush.zero_()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _time_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _summary(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[len(ordered) // 5],
        "p80_ms": ordered[len(ordered) * 4 // 5],
        "calls": len(ordered),
    }


def machine(device: str) -> dict[str, Any]:
    """Describe where the numbers come from."""
    names = ("kv-core", "kv-kernels", "torch", "triton", "numpy")
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: found for name in names if (found := _version(name))},
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["capability"] = list(torch.cuda.get_device_capability())
    return facts


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def write(path: Path, device: str, points: list[dict[str, Any]]) -> None:
    """Write machine and points as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(device), "points": points}, indent=1) + "\n")


def show(points: list[dict[str, Any]]) -> None:
    """Print one line a point, aligned."""
    wide = max(len(point["case"]) for point in points)
    for point in points:
        rate = f"{point['gflops']:10.0f} GFLOP/s" if "gflops" in point else ""
        print(f"{point['case']:<{wide}}  {point['run']:<18}{point['median_ms']:10.2f} ms {rate}")
