"""What a network, a model and a source of controls have to be so that a rollout can run them."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
from kv_core import DtypeError, LayerKV, ShapeError, SpecError
from kv_kernels import SegmentMask
from torch import Tensor

from kv_rollout.geometry import FrameRange
from kv_rollout.memory import MemoryLayout
from kv_rollout.sampling import SampleType
from kv_rollout.segments import TokenRole
from kv_rollout.setup import RolloutSetup

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: attention of ``q`` ``[B, Hq, N, D]`` over this pass's ``k``
``[B, H, N, D]`` and ``v`` ``[B, H, N, Dv]`` and over everything remembered. Queries and keys are
rotated already. Returns ``[B, Hq, N, Dv]``."""


class ControlSource(Protocol):
    """Where control tokens come from; asked for each range of frames once, in order."""

    def tokens(self, start: int, end: int) -> Tensor:
        """Return the controls of frames ``[start, end)`` as ``[B, V, end - start, X, Wc]``."""
        ...


class SlotNetwork(Protocol):
    """A transformer that `SlotState` can run: it computes, and keeps nothing between calls."""

    num_layers: int
    kv_heads: int
    k_dim: int
    v_dim: int

    def encode_text(self, text_ids: Tensor, positions: Tensor) -> list[LayerKV]:
        """Return every layer's keys and values of the prompt.

        Args:
            text_ids: ``[B, n]`` int64.
            positions: ``[3, n]`` FP32 positions in time, row and column.

        Returns:
            One pair ``[B, H, n, D]``, ``[B, H, n, Dv]`` per layer, keys rotated.
        """
        ...

    def __call__(
        self,
        tokens: Tensor,
        *,
        role: TokenRole,
        timestep: Tensor,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Run every layer over the tokens of one pass, calling ``attend`` once per layer, in order.

        Args:
            tokens: ``[B, N, W]``, or ``[B, N, Wc]`` for controls, in the model's dtype.
            role: What all of them are: ``CONTROL``, ``GIVEN``, ``CURRENT`` (noisy) or ``CLEAN``.
            timestep: 0-dim FP32, ``sigma * 1000``; 0 unless the role is ``CURRENT``.
            positions: ``[3, N]`` FP32 positions in time, row and column.
            attend: Attention over these tokens and the memory.

        Returns:
            Velocity ``[B, N, W]``; only the one of a ``CURRENT`` pass is read.
        """
        ...


class RolloutState(Protocol):
    """Everything one running clip remembers. `kv_rollout.SlotState` is the one that ships."""

    @property
    def memory_layout(self) -> MemoryLayout:
        """What memory holds now, slot by slot."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        ...

    def prefill(self, tokens: Tensor, positions: Tensor, *, mask: SegmentMask) -> None:
        """Remember the given frames: ``tokens`` ``[B, V * K * X, W]``. Called once, if K > 0."""
        ...

    def top_up_control(self, needed_end: int) -> None:
        """Remember controls until those of frame ``needed_end - 1`` are there."""
        ...

    def predict_velocity(
        self, latent: Tensor, timestep: Tensor, positions: Tensor, *, mask: SegmentMask
    ) -> Tensor:
        """Return the velocity ``[B, N, W]`` of noisy tokens ``latent`` ``[B, N, W]`` in FP32."""
        ...

    def commit(
        self, denoised: Tensor, positions: Tensor, *, mask: SegmentMask, frames: FrameRange
    ) -> None:
        """Remember finished tokens ``[B, N, W]`` as the newest history."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Undo, on any exception inside the block, whatever the block changed."""
        ...

    def rebind(self, setup: RolloutSetup, controls: ControlSource) -> None:
        """Go on with a longer clip of the same memory, and with these controls."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"meta": JSON values, "tensors": name to tensor}``, all copies."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or refuse it and change nothing."""
        ...


class RolloutModel(Protocol):
    """A network with all that a rollout has to know of it."""

    device: torch.device
    dtype: torch.dtype
    token_width: int  # W
    control_width: int  # Wc
    latent_channels: int
    latent_patch_size: int
    default_schedule: tuple[float, ...]
    default_sample_type: SampleType
    default_text_ids: Tensor  # [n] int64, the prompt of a rollout that names none
    position_limit: float | None  # positions in time must stay below it
    model_id: str  # a snapshot is resumed only by a model with the same one

    def prepare_rollout(self, setup: RolloutSetup, controls: ControlSource) -> RolloutState:
        """Allocate the memory of one clip and encode its prompt."""
        ...


class TensorControls:
    """Controls of a whole clip, held in one tensor.

    Args:
        controls: ``[B, V, F, X, Wc]``, floating and finite. Kept by reference.

    Raises:
        ShapeError: The tensor is not 5-D.
        DtypeError: It is not floating.
        SpecError: It holds NaN or infinity.
    """

    def __init__(self, controls: Tensor) -> None:
        if controls.ndim != 5:
            raise ShapeError(f"controls must be [B, V, F, X, Wc], got {list(controls.shape)}")
        if not controls.is_floating_point():
            raise DtypeError(f"controls must be floating, got {controls.dtype}; convert them first")
        check_finite("controls", controls)
        self._controls = controls

    @property
    def shape(self) -> torch.Size:
        """``[B, V, F, X, Wc]``."""
        return self._controls.shape

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the controls, by which a resumed rollout knows them again."""
        return fingerprint(self._controls)

    def tokens(self, start: int, end: int) -> Tensor:
        """Return the controls of frames ``[start, end)``, a view ``[B, V, end - start, X, Wc]``."""
        return self._controls[:, :, start:end]


def check_finite(name: str, tokens: Tensor) -> None:
    """Refuse NaN and infinity in ``tokens`` ``[B, V, F, X, W]``, naming clip, view and frame.

    Raises:
        SpecError: Some element is not finite.
    """
    if not bool(tokens.isfinite().all()):
        clip, view, frame = (~tokens.isfinite()).nonzero()[0, :3].tolist()
        raise SpecError(
            f"{name} must be finite, but frame {frame} of view {view} of clip {clip} holds "
            "NaN or infinity; check how it was decoded"
        )


def fingerprint(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, dtype and bytes; it is read on the host."""
    data = tensor.detach().cpu().contiguous()
    named = f"{tuple(data.shape)} {data.dtype} ".encode()
    return hashlib.sha256(named + data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
