"""The operations of a hybrid cache as ``KVCacheManager`` takes them."""

from dataclasses import dataclass

from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.spec import Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from torch import Tensor

from kv_kernels.ops.append_swa import append_swa
from kv_kernels.ops.append_tail import append_tail
from kv_kernels.ops.compress import compress
from kv_kernels.ops.flush_compression import flush_compression


@dataclass(frozen=True, slots=True)
class HybridKernels:
    """What computes for a ``KVCacheManager``: the rows of the table; see ``kv_core.HybridOps``.

    Attributes:
        backend: Name of the row to use for each operation. It is used or refused, never replaced;
            by default the first row of the table that can run the call.

    Example:
        ``KVCacheManager(spec, slots=64, blocks=8192, device="cuda", ops=kv_kernels.hybrid_ops)``
    """

    backend: str | None = None

    def append_swa(self, state: StateCachePool, step: HybridStep, rows: Tensor) -> None:
        """Store the newest rows of each run in the rings, with their positions."""
        append_swa(state, step, rows, backend=self.backend)

    def append_tail(
        self, state: StateCachePool, which: Which, step: HybridStep, value: Tensor, score: Tensor
    ) -> None:
        """Store the newest values and scores of each run in a tail."""
        append_tail(state, which, step, value, score, backend=self.backend)

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
        return compress(
            state, which, step, value, score, weight, eps, cos, sin, backend=self.backend
        )

    def flush_compression(
        self, paged: PagedKVPool, slots: Tensor, entries: Tensor, keys: Tensor | None
    ) -> None:
        """Store entries and keys in the pool, by slot."""
        flush_compression(paged, slots, entries, keys, backend=self.backend)


hybrid_ops = HybridKernels()
