"""Train the reference model in minutes on one GPU.

    python packages/kv-rollout/training/train.py --data .data --out build/reference --minutes 8

Everything lives on the device: pictures, films, masks. Writes the rounded weights, a log and a
checkpoint in several small files. `--smoke` runs every part of it for seconds, `--tiny` on a CPU.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from generate import Check, check_films
from kv_kernels import SegmentMask
from kv_rollout.latents import patchify
from kv_rollout.positions import caption_mrope_ids
from kv_rollout.reference.network import NetworkConfig, Piece, ReferenceNetwork
from kv_rollout.reference.views import POSITION_STRIDE, ViewGrid, control_tokens
from kv_rollout.segments import TokenRole
from optimizer import Muon
from safetensors.torch import load_file, save_file
from streams import TEXT_SLOT, TEXT_TOKENS, ClipStream
from synthetic import FilmMaker
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

Attention = Callable[[Tensor, Tensor, Tensor, SegmentMask], Tensor]
SHARD_BYTES = 12 * 2**20
LONG_FROM = 0.3  # fraction of the run after which every second step sees long clips
OWN_HISTORY_FROM = 0.4  # ... and after which clean tokens may be the network's own estimates
DECAY_FROM = 0.6
COLOUR_WEIGHT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of one training run."""

    config: NetworkConfig
    short_frames: int
    short_clips: int
    long_frames: int
    long_clips: int
    matrix_rate: float
    other_rate: float
    bank_scale: float


class Trainer:
    """The network, its average, its optimizers, and the films it sees."""

    def __init__(
        self, plan: Plan, data: dict[str, Tensor], device: torch.device, args: argparse.Namespace
    ) -> None:
        self.plan, self.device = plan, device
        self.dice = torch.Generator(device).manual_seed(args.seed + 1)
        torch.manual_seed(args.seed)
        self.network = ReferenceNetwork(plan.config).to(device)
        self.average = ReferenceNetwork(plan.config).to(device).requires_grad_(False)
        self.average.load_state_dict(self.network.state_dict())
        matrices = []
        for layer in self.network.layers:
            matrices += [
                (layer.project.qkv.weight, 3),
                (layer.mix.out.weight, 1),
                (layer.mix.up.weight, 2),
                (layer.mix.down.weight, 1),
            ]
        chosen = {id(parameter) for parameter, _ in matrices}
        others = [p for p in self.network.parameters() if id(p) not in chosen]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.0,
            fused=device.type == "cuda",
        )  # fmt: skip
        self.others = others
        self.grid = ViewGrid()
        self.maker = FilmMaker(
            data, self.grid, device=device, seed=args.seed, scale=plan.bank_scale
        )
        self.streams = {
            frames: ClipStream(
                self.grid.geometry(frames), device=device, block_size=args.mask_block
            )
            for frames in (plan.short_frames, plan.long_frames)
        }
        self.attention = dense_attention if device.type == "cpu" else compiled_flex()
        if device.type == "cuda":
            for layer in self.network.layers:
                layer.project.compile(dynamic=False)
                layer.mix.compile(dynamic=False)
        self.steps = 0
        self.caution = 1.0  # multiplies all rates; halved after a step that broke the weights

    def step(self, progress: float) -> Tensor:
        """Take one step; return ``[4]``: loss, and squared errors of luma, colour, all."""
        frames = self.plan.short_frames
        if progress > LONG_FROM and self.steps % 2:
            frames = self.plan.long_frames
        clips = self.plan.short_clips if frames == self.plan.short_frames else self.plan.long_clips
        figures = self._loss(frames, clips, own_history=progress > OWN_HISTORY_FROM)
        figures[0].backward()
        rate = self.caution * rate_at(progress)
        self.muon.step(self.plan.matrix_rate * rate)
        for group in self.adam.param_groups:
            group["lr"] = self.plan.other_rate * rate
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.step()
        self.network.zero_grad(set_to_none=True)
        self.steps += 1
        keep = min(0.998, self.steps / (self.steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.network.parameters()), 1 - keep
            )
        return figures.detach()

    def _loss(self, frames: int, clips: int, *, own_history: bool) -> Tensor:
        stream, device = self.streams[frames], self.device
        with torch.no_grad():
            films = self.maker.batch(clips, frames)
            target = patchify(films, self.plan.config.patch)  # [B, V, T, X, W]
            controls = control_tokens(films)
            history = self._corrupt(target)
        mask = stream.draw_mask()
        positions = stream.positions(
            fps=(24.0, 25.0, 30.0, 30.0, 15.0)[int(torch.randint(5, ()))],
            stride=POSITION_STRIDE
            if float(torch.rand(())) < 0.6
            else int(torch.randint(frames, 100, ())),
            view_offsets=float(torch.rand(())) > 0.03,
            device=device,
        )
        text_ids = torch.randint(self.plan.config.prompts, (1, TEXT_TOKENS), device=device)
        if float(torch.rand(())) < 0.7:
            text_ids = torch.zeros_like(text_ids)
        attend = self._attend(mask, text_ids, clips)
        if own_history and float(torch.rand(())) < 0.6:
            levels = self._uniform(len(stream.chunks), clips) * 0.5 + 0.5
            pieces, _ = self._pieces(stream, target, history, controls, positions, levels)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                estimates = self.network.denoise(pieces, attend)
            history = history.clone()
            for (start, end), estimate in zip(stream.chunks, estimates, strict=True):
                use = (self._uniform(clips) < 0.75).view(-1, 1, 1, 1, 1)
                own = estimate.detach().float().view_as(history[:, :, start:end]).clamp(-1, 1)
                history[:, :, start:end] = torch.where(use, own, history[:, :, start:end])
        levels = self._uniform(len(stream.chunks), clips)
        levels = 2.5 * levels / (1 + 1.5 * levels)  # more noise than not
        levels = torch.where(self._uniform(*levels.shape) < 0.2, torch.ones_like(levels), levels)
        pieces, clean = self._pieces(stream, target, history, controls, positions, levels)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            estimates = self.network.denoise(pieces, attend)
        return self._figures(estimates, clean, levels)

    def _figures(self, estimates: list[Tensor], clean: list[Tensor], levels: Tensor) -> Tensor:
        """Weigh squared errors: the more, the less noise there was, and colours above luma."""
        total = torch.zeros(4, device=self.device)
        opponent = self.network.opponent
        for estimate, truth, sigma in zip(estimates, clean, levels, strict=True):
            error = (estimate.float() - truth).unflatten(-1, (-1, 3)) @ opponent.T
            luma, colour = (
                error[..., 0].square().mean((1, 2)),
                error[..., 1:].square().mean((1, 2, 3)),
            )
            weight = 1 / (sigma.square() + 0.1)
            loss = (weight * (luma + 2 * COLOUR_WEIGHT * colour)).mean()
            parts = torch.stack([luma.mean(), colour.mean(), (luma + 2 * colour).mean() / 3])
            total = total + torch.cat([loss[None], parts.detach()]) / len(estimates)
        return total

    def _pieces(
        self,
        stream: ClipStream,
        target: Tensor,
        history: Tensor,
        controls: Tensor,
        positions: list[Tensor],
        levels: Tensor,
    ) -> tuple[list[Piece], list[Tensor]]:
        """Return the stream's pieces, and the clean tokens of its noisy ones."""
        pieces, clean = [], []
        still = torch.zeros((), device=self.device)
        chunk = 0
        sources = {
            TokenRole.CONTROL: controls, TokenRole.GIVEN: target, TokenRole.CLEAN: history,
            TokenRole.CURRENT: target,
        }  # fmt: skip
        for (role, start, end), places in zip(stream.spans, positions, strict=True):
            tokens = sources[role][:, :, start:end].flatten(1, 3)
            timestep = still
            if role is TokenRole.CURRENT:
                clean.append(tokens)
                sigma = levels[chunk].view(-1, 1, 1)
                noise = torch.randn(tokens.shape, generator=self.dice, device=self.device)
                tokens = (1 - sigma) * tokens + sigma * noise
                timestep = levels[chunk] * 1000
                chunk += 1
            pieces.append(Piece(role, tokens, timestep, places))
        return pieces, clean

    def _corrupt(self, target: Tensor) -> Tensor:
        """Spoil finished tokens a little, as generated ones are: noise, softness, a colour cast."""
        B, V, T, X, W = target.shape
        amount = self._uniform(B, 1, 1, 1, 1)
        noise = torch.randn(target.shape, generator=self.dice, device=self.device)
        cast = torch.randn(B, V, T, X, 1, 3, generator=self.dice, device=self.device)
        cast = cast + torch.randn(B, 1, T, 1, 1, 3, generator=self.dice, device=self.device)
        cast = cast.expand(B, V, T, X, W // 3, 3).flatten(-2)
        soft = target.unflatten(-1, (self.plan.config.patch, self.plan.config.patch, 3))
        soft = soft.mean((-3, -2), keepdim=True).expand_as(soft).flatten(-3)
        blend = 0.25 * self._uniform(B, 1, T, 1, 1) * (self._uniform(B, 1, T, 1, 1) < 0.4)
        return torch.lerp(target, soft, blend) + amount * (0.06 * noise + 0.025 * cast)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.dice, device=self.device)

    def _attend(self, mask: SegmentMask, text_ids: Tensor, clips: int) -> Callable[..., Tensor]:
        """Return attention of the stream over itself and the prompt."""
        places = caption_mrope_ids((TEXT_TOKENS,), device=self.device)[0].float()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            text = self.network.encode_text(text_ids, places)
        text = [
            tuple(
                F.pad(part, (0, 0, 0, TEXT_SLOT - TEXT_TOKENS)).expand(clips, -1, -1, -1)
                for part in pair
            )
            for pair in text
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            text_k, text_v = text[layer]
            k, v = torch.cat([k, text_k], dim=2), torch.cat([v, text_v], dim=2)
            return self.attention(q, k, v, mask)

        return attend


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask) -> Tensor:
    """Attend under a dense mask; for CPUs, and to check the other one."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense())


def compiled_flex() -> Attention:
    """Return FlexAttention, compiled."""
    flex = torch.compile(flex_attention, dynamic=False)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask) -> Tensor:
        out: Tensor = flex(q, k, v, block_mask=mask.block_mask())
        return out

    return attention


def rate_at(progress: float) -> float:
    """Return the learning rate's factor: a short warm-up, a plateau, a straight way down."""
    if progress < 0.015:
        return max(progress, 1e-4) / 0.015
    if progress < DECAY_FROM:
        return 1.0
    return max(0.0, 1 - (progress - DECAY_FROM) / (1 - DECAY_FROM)) * 0.99 + 0.01


def save_run(trainer: Trainer, out: Path, log: dict[str, object]) -> None:
    """Write weights that ship, the log, and what `--resume` needs, in files below `SHARD_BYTES`."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.dumps(asdict(trainer.plan.config))
    average = {k: v.bfloat16().contiguous().cpu() for k, v in trainer.average.state_dict().items()}
    save_file(average, out / "weights.safetensors", {"config": config})
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in trainer.network.state_dict().items():
        tensor = tensor.detach().float().contiguous().cpu()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, out / f"checkpoint-{index}.safetensors", {"config": config})
    (out / "log.json").write_text(json.dumps(log))


def resume(trainer: Trainer, folder: Path) -> None:
    """Load the network of a checkpoint; its average starts from there, momentum from nothing."""
    state: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("checkpoint-*.safetensors")):
        state.update(load_file(shard, device=str(trainer.device)))
    trainer.network.load_state_dict(state)
    trainer.average.load_state_dict(state)
    print(f"resumed from {folder}", flush=True)


def compare_attention(trainer: Trainer) -> None:
    """Check FlexAttention against dense attention, forwards and backwards, on every mask."""
    stream = trainer.streams[trainer.plan.short_frames]
    config = trainer.plan.config
    shape = (2, config.heads, stream.tokens, config.head_dim)
    dice = torch.Generator(trainer.device).manual_seed(3)
    q, k, v, pull = (
        torch.randn(shape, generator=dice, device=trainer.device).bfloat16() for _ in range(4)
    )
    k, v = (F.pad(part, (0, 0, 0, TEXT_SLOT)) for part in (k, v))
    worst = {}
    for training_mask in stream.masks:
        found = []
        for attention, dtype in (
            (trainer.attention, torch.bfloat16),
            (dense_attention, torch.float32),
        ):
            inputs = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
            out = attention(*inputs, training_mask.mask)
            gradients = torch.autograd.grad(out, inputs, pull.to(dtype))
            found.append([out.detach().float(), *(g.float() for g in gradients)])
        worst[training_mask.name] = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)
        )
    print("flex against dense, worst relative error:", {k: round(v, 4) for k, v in worst.items()})
    assert max(worst.values()) < 0.1, worst


def train(trainer: Trainer, check: Check, args: argparse.Namespace) -> None:
    """Train until the time is up, checking and saving now and then."""
    begin = time.monotonic()
    schedule = (args.schedule_minutes or args.minutes) * 60
    deadline = begin + args.minutes * 60 - args.reserve
    log: dict[str, list[dict[str, float]]] = {"losses": [], "checks": []}
    backup = [p.detach().clone() for p in trainer.network.parameters()]
    sums, count, shown = torch.zeros(4, device=trainer.device), 0, 20
    next_check = begin + args.check_seconds
    progress = args.from_progress

    def show_check() -> None:
        started = time.monotonic()
        figures = check(trainer.average)
        figures = {"minutes": (started - begin) / 60, "step": trainer.steps, **figures}
        log["checks"].append(figures)
        print("check", {k: round(v, 3) for k, v in figures.items()},
              f"({time.monotonic() - started:.1f} s)", flush=True)  # fmt: skip

    while time.monotonic() < deadline and (not args.steps or trainer.steps < args.steps):
        elapsed = time.monotonic() - begin
        span = min(schedule, args.minutes * 60) - args.reserve
        if args.schedule_minutes:
            span = schedule
        progress = min(1.0, args.from_progress + (1 - args.from_progress) * elapsed / span)
        sums += trainer.step(progress)
        count += 1
        if trainer.steps % shown == 0 or trainer.steps in (1, 2, 5, 10):
            values = (sums / count).tolist()  # waits for the device, so that it is never far behind
            if not all(math.isfinite(value) for value in values):
                print(f"step {trainer.steps}: loss is {values[0]}; back to the last good weights")
                with torch.no_grad():
                    for parameter, good in zip(trainer.network.parameters(), backup, strict=True):
                        parameter.copy_(good)
                        trainer.adam.state.clear()
                trainer.average.load_state_dict(trainer.network.state_dict())
                trainer.muon.forget()
                trainer.caution *= 0.5
            elif trainer.steps % 100 == 0:
                for parameter, good in zip(trainer.network.parameters(), backup, strict=True):
                    good.copy_(parameter.detach())
            entry = dict(zip(("loss", "luma", "colour", "all"), values, strict=True))
            entry |= {
                "step": trainer.steps,
                "minutes": (time.monotonic() - begin) / 60,
                "progress": progress,
            }
            log["losses"].append(entry)
            if trainer.steps % (5 * shown) == 0 or trainer.steps <= shown:
                print({k: round(v, 5) for k, v in entry.items()}, flush=True)
            sums, count = torch.zeros_like(sums), 0
        if time.monotonic() > next_check:
            next_check = time.monotonic() + args.check_seconds
            show_check()
            save_run(trainer, args.out, log)
    save_run(trainer, args.out, log)
    show_check()
    save_run(trainer, args.out, log)
    check.picture(args.out / "check.png")
    print(f"{trainer.steps} steps in {(time.monotonic() - begin) / 60:.2f} min", flush=True)


def smoke(trainer: Trainer, check: Check, args: argparse.Namespace) -> None:
    """Run every part once at its real size, and say how fast it is."""
    began = time.monotonic()
    compare_attention(trainer)
    print(f"attention compared after {time.monotonic() - began:.1f} s", flush=True)
    on_gpu = trainer.device.type == "cuda"
    for progress, label in ((0.1, "short"), (0.99, "long")):
        times = []
        for index in range(args.steps or 12):
            trainer.steps = 1  # an odd step is a long one, late in the run
            started = time.monotonic()
            figures = trainer.step(progress)
            if index in (0, 1) or index >= 3:
                values = figures.tolist()
            times.append(time.monotonic() - started)
        held = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        print(
            f"{label}: first step {times[0]:.1f} s, then {min(times[1:]):.3f} s a step; "
            f"loss {values[0]:.4f}; memory {held:.1f} GiB",
            flush=True,
        )
    print("check", check(trainer.average), flush=True)
    save_run(trainer, args.out, {"smoke": True})
    resume(trainer, args.out)
    check.picture(args.out / "check.png")
    print(f"smoke done after {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path(".data"), help="folder that prepare.py wrote"
    )
    parser.add_argument("--out", type=Path, default=Path("build/reference"))
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of this call, start-up excluded"
    )
    parser.add_argument(
        "--reserve", type=float, default=20.0, help="seconds kept for the last check"
    )
    parser.add_argument(
        "--schedule-minutes", type=float, help="of the whole schedule, if this call is a part"
    )
    parser.add_argument(
        "--from-progress", type=float, default=0.0, help="where in the schedule to begin"
    )
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--check-seconds", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument("--clips", type=int, default=48, help="clips of nine frames in a step")
    parser.add_argument("--mask-block", type=int, default=128)
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--other-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="run every part for seconds")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy network and few clips, for a CPU"
    )
    args = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    plan = Plan(
        config=NetworkConfig(),
        short_frames=9,
        short_clips=args.clips,
        long_frames=25,
        long_clips=max(1, args.clips * 5 // 16),
        matrix_rate=args.matrix_rate,
        other_rate=args.other_rate,
        bank_scale=1.0,
    )
    if args.tiny:
        plan = Plan(
            config=NetworkConfig(width=64, layers=2, heads=4, head_dim=16, hidden=64),
            short_frames=5,
            short_clips=2,
            long_frames=9,
            long_clips=2,
            matrix_rate=args.matrix_rate,
            other_rate=args.other_rate,
            bank_scale=0.03,
        )
    data = load_file(args.data / "training.safetensors")
    trainer = Trainer(plan, data, device, args)
    check = check_films(data["film.check"], trainer.maker, frames=9 if args.tiny else 24)
    if args.resume:
        resume(trainer, args.resume)
    parameters = sum(p.numel() for p in trainer.network.parameters())
    print(f"{parameters / 1e6:.2f} million parameters on {device}; "
          f"ready after {time.monotonic() - began:.1f} s", flush=True)  # fmt: skip
    (smoke if args.smoke else train)(trainer, check, args)


if __name__ == "__main__":
    main()
