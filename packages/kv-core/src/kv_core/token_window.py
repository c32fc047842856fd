"""The newest frames of clips that are being generated."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kv_core.checks import check_float_dtype, check_int, check_tensor
from kv_core.errors import SnapshotError, SpecError
from kv_core.snapshot import check_state

_SIZES = ("batch", "num_views", "frames", "spatial", "width")


class TokenWindow:
    """A ring of the last frames of B clips, V views each; frames are numbered as in the clip.

    Frames are appended in order without gaps. When the ring is full, the oldest make room.

    Args:
        batch: Clips B.
        num_views: Views V.
        frames: Frames that the window keeps.
        spatial: Tokens X of one frame of one view.
        width: Numbers W in one token.
        device: Where the ring lives.
        dtype: Floating dtype of the tokens.

    Raises:
        SpecError: A size below 1.
        DtypeError: A size that is not an integer, or a dtype that is not floating.
    """

    def __init__(
        self,
        *,
        batch: int = 1,
        num_views: int,
        frames: int,
        spatial: int,
        width: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the ring ``[B, V, frames, X, W]``."""
        sizes = (batch, num_views, frames, spatial, width)
        shape = [check_int(n, size, minimum=1) for n, size in zip(_SIZES, sizes, strict=True)]
        check_float_dtype(dtype)
        with torch.inference_mode(False):
            self._ring = torch.zeros(shape, device=device, dtype=dtype)
        self._end = 0

    def __repr__(self) -> str:
        """Return the effective settings and the frames that are held."""
        sizes = ", ".join(
            f"{name}={size}" for name, size in zip(_SIZES, self._ring.shape, strict=True)
        )
        return f"TokenWindow({sizes}, dtype={self._ring.dtype}, holds [{self.start}, {self.end}))"

    @property
    def capacity(self) -> int:
        """Frames that fit."""
        return self._ring.shape[2]

    @property
    def start(self) -> int:
        """Oldest frame that is still held."""
        return max(0, self._end - self.capacity)

    @property
    def end(self) -> int:
        """One past the newest frame; the next append starts here."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.numel() * self._ring.element_size()

    def append(self, start: int, end: int, tokens: Tensor) -> None:
        """Add frames ``[start, end)``, in place of the oldest ones once the window is full.

        Args:
            start: The frame after the newest one.
            end: One past the last new frame; at most ``capacity`` frames at once.
            tokens: ``[B, V, end - start, X, W]`` in the window's dtype, on its device.

        Raises:
            SpecError: Frames out of order, none, or more than fit.
            ShapeError: Other sizes.
            DtypeError: Another dtype or device. The window is as before, as in the cases above.
        """
        start, end = check_int("start frame", start), check_int("end frame", end)
        if start != self._end:
            raise SpecError(
                f"frames must be appended in order from frame {self._end}, got frames "
                f"[{start}, {end}); append frame {self._end} next, or reset() for another clip"
            )
        if not 0 < end - start <= self.capacity:
            raise SpecError(
                f"between 1 and {self.capacity} frames can be appended at once, got {end - start} "
                f"(frames [{start}, {end})); split them, or build the window with more frames"
            )
        B, V, _, X, W = self._ring.shape
        check_tensor(
            "tokens",
            tokens,
            "B V F X W",
            {"B": B, "V": V, "F": end - start, "X": X, "W": W},
            dtype=self._ring.dtype,
            device=self._ring.device,
            hint=f"F is the number of frames in [{start}, {end})",
        )
        self._write(start, end, tokens)
        self._end = end

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of frames ``[start, end)``, ``[B, V, end - start, X, W]``.

        Raises:
            SpecError: No frames, frames not yet appended, or frames that have made room.
        """
        start, end = check_int("start frame", start), check_int("end frame", end)
        held = f"frames [{self.start}, {self._end})"
        if start >= end:
            raise SpecError(
                f"at least 1 frame must be read, got frames [{start}, {end}); the window holds "
                f"{held}"
            )
        if end > self._end:
            raise SpecError(
                f"frames must have been appended before they are read, got frames [{start}, {end}) "
                f"of a window that holds {held}; append up to frame {end} first"
            )
        if start < self.start:
            raise SpecError(
                f"frames must still be held to be read, got frames [{start}, {end}) of a window "
                f"that holds {held}; read from frame {self.start} on, or build the window with "
                f"frames={end - start} or more"
            )
        return torch.cat([self._ring[:, :, at:to] for at, to in self._runs(start, end)], dim=2)

    def reset(self) -> None:
        """Forget all frames and begin again at frame 0, in the same storage."""
        self._end = 0

    def state_dict(self) -> dict[str, Any]:
        """Return spec, ``end`` and a copy of the frames that are held, as ``tensors["frames"]``."""
        if self._end:
            frames = self.read(self.start, self._end)
        else:
            frames = self._ring[:, :, :0].clone()
        return {"meta": {"spec": self._spec(), "end": self._end}, "tensors": {"frames": frames}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that a window of the same spec returned, into the existing ring.

        Raises:
            SnapshotError: Not such a state, or a window of another spec; the message names what
                differs. Nothing has changed then.
        """
        meta, tensors = check_state("TokenWindow", state, self._spec())
        end, frames = meta.get("end"), tensors.get("frames")
        if not isinstance(end, int) or isinstance(end, bool) or end < 0:
            raise SnapshotError(
                f"end in the state must be a number of frames, got {end!r}; load a state that was "
                "not edited"
            )
        B, V, ring, X, W = self._ring.shape
        shape = (B, V, min(end, ring), X, W)
        got = "none" if frames is None else f"{list(frames.shape)} {frames.dtype}"
        if frames is None or frames.shape != shape or frames.dtype != self._ring.dtype:
            raise SnapshotError(
                f"tensor 'frames' of the state must be {list(shape)} {self._ring.dtype}, got "
                f"{got}; load a state that was not edited"
            )
        self._write(max(0, end - ring), end, frames)
        self._end = end

    @torch.no_grad()
    def _write(self, start: int, end: int, tokens: Tensor) -> None:
        done = 0
        for at, to in self._runs(start, end):
            self._ring[:, :, at:to].copy_(tokens[:, :, done : done + to - at])
            done += to - at

    def _runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return where frames ``[start, end)`` lie in the ring: one run, or two where it wraps."""
        if start == end:
            return []
        at, to = start % self.capacity, (end - 1) % self.capacity + 1
        return [(at, to)] if at < to else [(at, self.capacity), (0, to)]

    def _spec(self) -> dict[str, Any]:
        sizes = dict(zip(_SIZES, self._ring.shape, strict=True))
        dtype = str(self._ring.dtype).removeprefix("torch.")
        return {"kind": "TokenWindow", **sizes, "dtype": dtype}
