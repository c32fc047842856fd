"""Attention of one rollout chunk: row against row, and against dense-masked SDPA.

    python benchmarks/bench_slot_attention.py [--device cuda] [--out results/slot_attention.json]

A chunk is V views of C frames of X tokens; the memory holds the same for some earlier chunks, slot
by slot. Scope "all" lets a query see every view, "same" its own view only; the newest slot of the
memory is empty, as it is before the window is full.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import measure, show, write
from kv_core.fixed_slot import LayerKV
from kv_kernels import SegmentMask, slot_attention
from kv_kernels.ops.slot_attention import parts
from kv_kernels.ops.slot_attention.flex import compiles
from kv_kernels.testing import quantized, random_layer, random_tensor
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Sizes of one chunk and of what it attends."""

    views: int
    frames: int
    tokens: int  # of one frame of one view
    slots: int  # chunks in the memory, the newest of them empty
    text: int
    heads: tuple[int, int]  # query heads, key heads
    dim: int
    block_size: int | tuple[int, int] = 128

    def mask(self, scope: str, device: str) -> SegmentMask:
        """Make the mask: one segment for each view of the chunk and of each slot."""
        length = self.frames * self.tokens
        view = np.tile(np.arange(self.views), 1 + self.slots)
        sees = np.ones((self.views, len(view)), np.bool_)
        if scope == "same":
            sees = np.arange(self.views)[:, None] == view
        sees[:, -self.views :] = False
        table = np.concatenate([np.ones((self.views, 1), np.bool_), sees], 1)
        lengths = [self.text, *[length] * len(view)]
        return SegmentMask.build(
            table, [length] * self.views, lengths, block_size=self.block_size, device=device
        )


CHUNKS = {
    "cuda": {
        "4x2x768 D128": Chunk(
            views=4, frames=2, tokens=768, slots=6, text=512, heads=(16, 16), dim=128
        ),
        "4x2x768 D128 GQA": Chunk(
            views=4, frames=2, tokens=768, slots=6, text=512, heads=(16, 4), dim=128
        ),
        "4x4x256 D64 64x128": Chunk(
            views=4, frames=4, tokens=256, slots=8, text=77, heads=(16, 16), dim=64,
            block_size=(64, 128),
        ),
    },
    "cpu": {
        "2x2x64 D64": Chunk(views=2, frames=2, tokens=64, slots=4, text=32, heads=(4, 4), dim=64),
    },
}  # fmt: skip


def points_of(name: str, chunk: Chunk, scope: str, dtype: torch.dtype, args: Any) -> list[Any]:
    """Time one chunk with every row and storage."""
    device = args.device
    mask = chunk.mask(scope, device)
    generator = torch.Generator().manual_seed(0)
    place: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    pass_tokens = chunk.views * chunk.frames * chunk.tokens
    lengths = (chunk.text, pass_tokens, chunk.slots * pass_tokens)
    q = random_tensor((1, chunk.heads[0], pass_tokens, chunk.dim), **place)
    shape = (1, chunk.heads[1], sum(lengths), chunk.dim)
    whole = random_layer(shape, chunk.dim, layout="contiguous", **place)
    text, current, memory = (
        LayerKV(*pair) for pair in zip(*(side.split(lengths, 2) for side in whole), strict=True)
    )
    apart = LayerKV(memory.k.clone(), memory.v.clone())
    codes = quantized(apart)
    dense = mask.dense()
    # SDPA has no fast path for grouped heads with a mask, so it gets one key head a query head
    k, v = (side.repeat_interleave(chunk.heads[0] // chunk.heads[1], 1) for side in whole)

    def attend(backend: str, kept: Any) -> Callable[[], Tensor]:
        return lambda: slot_attention(q, current, mask, text=text, memory=kept, backend=backend)

    runs: dict[str, Callable[[], object]] = {
        "flex": attend("flex", memory),
        "flex, copied": attend("flex", apart),
        "flex, INT8": attend("flex", codes),
        "torch": attend("torch", memory),
        "torch, INT8": attend("torch", codes),
        "SDPA, dense mask": lambda: scaled_dot_product_attention(q, k, v, attn_mask=dense),
    }
    flops = 4 * int(dense.sum()) * chunk.heads[0] * chunk.dim
    case = f"{name} {scope} {str(dtype).removeprefix('torch.')}"
    facts = {"case": case, "queries": pass_tokens, "keys": sum(lengths), "flops": flops}
    return [
        {**facts, "run": run, **taken, "gflops": flops / taken["median_ms"] / 1e6}
        for run, taken in measure(runs, device=device, repeats=args.repeats).items()
    ]


def main() -> None:
    """Run every case of a device and print, and keep, the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=sorted(CHUNKS), default=default)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    points: list[dict[str, Any]] = []
    with torch.inference_mode():
        for at, (name, chunk) in enumerate(CHUNKS[args.device].items()):
            dtypes = [torch.bfloat16] if args.device == "cuda" else []
            if at == 0:
                dtypes.append(torch.float32)
            for scope, dtype in itertools.product(("all", "same"), dtypes):
                found = points_of(name, chunk, scope, dtype, args)
                show(found)
                points += found
    print(f"compilations {compiles()}, scratch {parts.scratch_nbytes() / 1e6:.1f} MB")
    if args.out:
        write(args.out, args.device, points)


if __name__ == "__main__":
    main()
