"""Turn noise into a chunk: schedules, flow-matching steps, and noise that depends on nothing else.

A noisy token is ``x = (1 - sigma) * clean + sigma * noise`` and a network predicts the velocity
``noise - clean``, as in rectified flow (Liu et al., 2022) and flow matching (Lipman et al., 2022).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from kv_core import DtypeError, SpecError, check_int
from torch import Tensor

SampleType = Literal["ode", "sde"]
TIMESTEPS = 1000.0  # a network is told sigma * TIMESTEPS


class Sampler(Protocol):
    """How one chunk is drawn: called once per chunk, after the controls are in place."""

    @property
    def passes(self) -> int:
        """How often `sample` calls ``velocity``."""
        ...

    @property
    def spec(self) -> dict[str, object]:
        """What a snapshot keeps of the sampler, to refuse another one on resume; JSON values."""
        ...

    def sample(
        self, velocity: Callable[[Tensor, float], Tensor], noise: Callable[[int], Tensor]
    ) -> Tensor:
        """Return clean tokens in FP32.

        Args:
            velocity: From tokens (FP32, any shape ``noise`` returns) and sigma to their velocity.
            noise: From a step number to standard normal noise; step 0 is where the chunk starts,
                steps 1, 2, ... are drawn afresh. Equal numbers give equal noise.
        """
        ...


class NoiseSource(Protocol):
    """Noise of one frame of one view: a pure function of its arguments."""

    @property
    def spec(self) -> dict[str, object]:
        """What a snapshot keeps of the source, to refuse another one on resume; JSON values."""
        ...

    def draw(
        self, *, seed: int, sample: int, view: int, frame: int, step: int, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return standard normal FP32 noise of ``shape``."""
        ...


class PhiloxNoise:
    """Noise from numpy's Philox generator, drawn on the host, equal for every device.

    The seed is the 128-bit key, and (sample, view, step, frame) fill the counter words above the
    one that counts blocks, so two different argument lists can never share a stream. See Salmon
    et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """

    spec: dict[str, object] = {"noise": "philox4x64", "version": 1}  # noqa: RUF012

    def draw(
        self, *, seed: int, sample: int, view: int, frame: int, step: int, shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return standard normal FP32 noise of ``shape``."""
        counter = [0, frame, view << 32 | step, sample]
        key = [seed & (2**64 - 1), seed >> 64]
        stream = np.random.Philox(
            counter=np.array(counter, dtype=np.uint64), key=np.array(key, dtype=np.uint64)
        )
        return np.random.Generator(stream).standard_normal(shape, dtype=np.float32)


def noise_keys(seed: int | Sequence[int], batch_size: int) -> tuple[tuple[int, int], ...]:
    """Return ``(seed, sample)`` of every clip of a batch.

    Args:
        seed: A number: clip b is sample b of it. Or one number per clip: each clip then gets the
            noise that it would get alone, with that seed.
        batch_size: Number of clips B.

    Raises:
        SpecError: A seed is negative or needs more than 128 bits, or their number is not B.
        DtypeError: A seed is not an integer.
    """
    if isinstance(seed, Sequence):
        if len(seed) != batch_size:
            raise SpecError(
                f"seed must be a number, or {batch_size} numbers for {batch_size} clips, "
                f"got {len(seed)} numbers"
            )
        keys = [(one, 0) for one in seed]
    else:
        keys = [(seed, sample) for sample in range(batch_size)]
    return tuple(
        (check_int("seed", one, minimum=0, maximum=2**128 - 1), sample) for one, sample in keys
    )


def check_schedule(schedule: Sequence[float] | Tensor) -> tuple[float, ...]:
    """Return the noise levels to visit, without the final 0.

    Args:
        schedule: Sigmas, strictly decreasing, in (0, 1]; one trailing 0 is allowed and dropped.

    Raises:
        SpecError: The schedule is empty, leaves (0, 1], is not finite or does not decrease.
    """
    sigmas = [float(s) for s in schedule]
    if sigmas and sigmas[-1] == 0.0:
        sigmas.pop()
    if not sigmas:
        raise SpecError("schedule must hold at least one noise level above 0, got none")
    for sigma in sigmas:
        if not math.isfinite(sigma) or not 0 < sigma <= 1:
            raise SpecError(f"every noise level of the schedule must be in (0, 1], got {sigma}")
    for high, low in itertools.pairwise(sigmas):
        if low >= high:
            raise SpecError(
                f"the schedule must go down from noise to picture, but {low} follows {high}"
            )
    return tuple(sigmas)


@dataclass(frozen=True, slots=True)
class FlowSampler:
    """Euler steps along the flow (``ode``), or fresh noise after every step (``sde``).

    Args:
        schedule: Noise levels, see `check_schedule`. Each costs one pass of the network.
        sample_type: ``"ode"`` follows the velocity to the next level; ``"sde"`` jumps to the
            predicted clean tokens and adds new noise for the next level.
    """

    schedule: tuple[float, ...]
    sample_type: SampleType = "ode"

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", check_schedule(self.schedule))
        if self.sample_type not in get_args(SampleType):
            raise SpecError(
                f"sample_type must be one of {', '.join(get_args(SampleType))}, "
                f"got {self.sample_type!r}"
            )

    @property
    def passes(self) -> int:
        """How often `sample` calls ``velocity``: once per noise level."""
        return len(self.schedule)

    @property
    def spec(self) -> dict[str, object]:
        """What a snapshot keeps of the sampler."""
        return {"schedule": list(self.schedule), "sample_type": self.sample_type}

    def sample(
        self, velocity: Callable[[Tensor, float], Tensor], noise: Callable[[int], Tensor]
    ) -> Tensor:
        """Return clean tokens in FP32; see `Sampler.sample`."""
        x = noise(0)
        lower_levels = (*self.schedule[1:], 0.0)
        for step, (sigma, lower) in enumerate(zip(self.schedule, lower_levels, strict=True)):
            v = velocity(x, sigma).float()
            if lower == 0.0:
                x = x - sigma * v
            elif self.sample_type == "ode":
                x = x + (lower - sigma) * v
            else:
                x = (1 - lower) * (x - sigma * v) + lower * noise(step + 1)
        return x


def chunk_noise(
    source: NoiseSource,
    *,
    keys: Sequence[tuple[int, int]],
    views: int,
    start: int,
    end: int,
    step: int,
    shape: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Gather the noise of frames ``start`` to ``end`` of every view and clip.

    Args:
        source: Where noise comes from.
        keys: ``(seed, sample)`` of every clip, B of them; see `noise_keys`.
        views: Number of views V.
        start: First frame.
        end: One past the last frame.
        step: 0 for the noise a chunk starts from, then 1, 2, ...
        shape: ``(X, W)``, tokens of one frame of one view and their width.
        device: Where the result goes; it is drawn on the host, so its values do not depend on it.

    Returns:
        FP32 ``[B, V * (end - start) * X, W]`` in view-major token order.

    Raises:
        DtypeError: The source returned something else than FP32 noise of ``shape``.
    """
    X, W = shape
    noise = np.empty((len(keys), views, end - start, X, W), dtype=np.float32)
    for clip, (seed, sample) in enumerate(keys):
        for view in range(views):
            for frame in range(start, end):
                drawn = source.draw(
                    seed=seed, sample=sample, view=view, frame=frame, step=step, shape=shape
                )
                if drawn.shape != shape or drawn.dtype != np.float32:
                    raise DtypeError(
                        f"noise must be float32 of shape {shape}, "
                        f"got {drawn.dtype} of shape {drawn.shape}"
                    )
                noise[clip, view, frame - start] = drawn
    return torch.from_numpy(noise).reshape(len(keys), -1, W).to(device)
