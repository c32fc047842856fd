"""What a hybrid cache asks of whoever computes for it."""

from typing import Protocol

from torch import Tensor

from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.spec import Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep


class HybridOps(Protocol):
    """The four operations of a layer. Arguments were checked; shapes are fixed by the step.

    All work in FP32 and none waits for the device. Rows that a step does not write keep their
    bytes. ``kv_core.hybrid.reference.TorchOps`` says exactly what each result is.
    """

    def append_swa(self, state: StateCachePool, step: HybridStep, rows: Tensor) -> None:
        """Encode ``rows`` ``[T, D]`` and store them in ``state.ring`` by ``step.ring_slot``.

        Their positions go to ``state.positions``.
        """

    def append_tail(
        self, state: StateCachePool, which: Which, step: HybridStep, value: Tensor, score: Tensor
    ) -> None:
        """Store value and score ``[T, W]`` as FP32 in ``state.tails[which]`` by ``tail_slot``."""

    def compress(
        self,
        state: StateCachePool,
        which: Which,
        step: HybridStep,
        value: Tensor,
        score: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Return ``[T, D]`` the entry of each closing token; other rows are finite, no more."""

    def flush_compression(
        self, paged: PagedKVPool, slots: Tensor, entries: Tensor, keys: Tensor | None
    ) -> None:
        """Encode entries ``[n, D]`` and keys ``[n, I]`` and store them by ``slots`` ``[n]``.

        A slot of -1 stores nothing.
        """
