"""Time one chunk of a steady rollout: prepare, denoise, commit. python bench_chunk.py --help"""

import argparse
import json
import platform
import statistics
from datetime import date
from pathlib import Path

import torch
from kv_core import KVFormat
from kv_rollout import ChunkRollout, ClipGeometry
from kv_rollout.reference import ReferenceModel

PATCH_H, PATCH_W = 6, 8


def measure(
    device: torch.device, dtype: torch.dtype, memory: KVFormat | None, backend: str, views: int
) -> dict[str, object]:
    """Return the medians of the phases of a chunk once memory is full."""
    model = ReferenceModel.load(device=device, dtype=dtype)
    geometry = ClipGeometry(
        num_views=views,
        frames_per_view=65,
        patch_h=PATCH_H,
        patch_w=PATCH_W,
        frames_per_chunk=4,
        condition_frames=1,
    )
    draw = torch.Generator().manual_seed(0)
    X = geometry.spatial_tokens
    rollout = ChunkRollout(
        model,
        geometry=geometry,
        controls=torch.rand(1, views, 65, X, model.control_width, generator=draw),
        condition_tokens=torch.rand(1, views, 1, X, model.token_width, generator=draw),
        history_frames=20,
        memory_format=memory,
        backend=backend,
    )
    traces = [trace for trace, _ in rollout]
    steady = traces[rollout.warmup_chunks + 2 : -1]
    phases = zip(*(trace.phase_ms for trace in steady), strict=True)
    prepare, denoise, commit = (statistics.median(phase) for phase in phases)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "memory": (memory or KVFormat.of(dtype)).name,
        "backend": backend,
        "views": views,
        "queries": geometry.frames_per_chunk * geometry.tokens_per_frame,
        "memory_tokens": steady[-1].memory_tokens,
        "nbytes": steady[-1].nbytes,
        "passes": steady[-1].denoising_passes,
        "chunks": len(steady),
        "prepare_ms": round(prepare, 3),
        "denoise_ms": round(denoise, 3),
        "commit_ms": round(commit, 3),
        "compiles": sum(trace.compiles for trace in traces),
        "compiles_steady": sum(trace.compiles for trace in steady),
        "masks_built_steady": sum(trace.masks_built for trace in steady),
    }


def main() -> None:
    """Measure every combination that this machine can run, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--views", type=int, nargs="+", default=[4])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    rows = []
    for views in arguments.views:
        for dtype in (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,):
            for memory in (None, KVFormat.INT8):
                for backend in ("torch", "flex") if on_gpu else ("torch",):
                    rows.append(measure(device, dtype, memory, backend, views))
                    print(json.dumps(rows[-1]), flush=True)
    result = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
