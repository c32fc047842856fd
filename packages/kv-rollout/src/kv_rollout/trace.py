"""What a rollout says of itself: one record per chunk, and the finished clip."""

import itertools
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kv_rollout.geometry import FrameRange


class PhaseClock:
    """Times the phases of one chunk on the device's own clock, without waiting for it.

    Marks are CUDA events on a GPU and host times elsewhere; they are compared when first read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the end of a phase, the first call its beginning."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> tuple[float, ...]:
        """Length of each phase; on a GPU this waits until the last one is over."""
        pairs = list(itertools.pairwise(self._marks))
        if self._on_gpu:
            self._marks[-1].synchronize()
            return tuple(a.elapsed_time(b) for a, b in pairs)
        return tuple((b - a) * 1000 for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTrace:
    """How one chunk was made.

    ``memory_tokens`` were valid while it was denoised, ``padding_tokens`` were slot space that held
    nothing; ``evicted`` is the range of frames that its commit pushed out; ``masks_built`` and
    ``masks_reused`` count the noisy and clean masks; ``compiles`` counts attention kernels.
    ``position_policy`` says how positions go on after an eviction: absolute ones never change, and
    keys are rotated once, when they are written.
    """

    index: int
    start: int
    end: int
    denoising_passes: int
    clean_pass: bool
    memory_tokens: int
    padding_tokens: int
    nbytes: int
    evicted: FrameRange | None
    masks_built: int
    masks_reused: int
    compiles: int
    clock: PhaseClock | tuple[float, float, float]
    position_policy: str = "absolute"

    @property
    def phase_ms(self) -> tuple[float, float, float]:
        """Milliseconds of prepare (controls, masks, positions), denoise, and commit."""
        clock = self.clock.milliseconds() if isinstance(self.clock, PhaseClock) else self.clock
        return clock[0], clock[1], clock[2]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; the clock becomes ``prepare_ms``, ``denoise_ms``, ``commit_ms``."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "clock"}
        names = ("prepare_ms", "denoise_ms", "commit_ms")
        return named | dict(zip(names, self.phase_ms, strict=True))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ChunkTrace":
        """Return the record that `as_dict` described."""
        named = dict(values)
        clock = named.pop("prepare_ms"), named.pop("denoise_ms"), named.pop("commit_ms")
        evicted = named.pop("evicted")
        return cls(**named, evicted=tuple(evicted) if evicted else None, clock=clock)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Generated frames of a clip, all of them unless a bounded or partial result was asked for.

    Attributes:
        latent: ``[B, V, Ch, F, rows, columns]``.
        tokens: ``[B, V, F, X, W]``, the same values.
        start: First frame that is held.
        trace: One record per chunk that is still held.
    """

    latent: Tensor
    tokens: Tensor
    start: int
    trace: tuple[ChunkTrace, ...]
