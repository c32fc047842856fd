"""One layer's side of an open step: what an attention block calls, and all that it can reach."""

import torch
from torch import Tensor

from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, LayerKindError, RingTooSmall, ShapeError
from kv_core.hybrid.open_step import OpenStep
from kv_core.hybrid.ops import HybridOps
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.spec import Compression, HybridSpec, Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from kv_core.hybrid.views import (
    ClassicalView,
    IndexerView,
    Lease,
    SWAView,
    classical_view,
    indexer_view,
    swa_view,
)


class LayerCacheHandle:
    """Reads and writes one layer of the cache for the requests of the open step.

    There is one for each layer, and it lives as long as the manager: between ``acquire`` and
    ``commit`` or ``abort`` it works, at other times it raises StaleHandleError. It allocates
    nothing and computes nothing itself; the manager's ops do.

    Inside a layer the order is: ``compress``, ``flush_compression``, the views, attention, then
    ``write_swa`` and ``append_tail``: the rings are read before this step overwrites them. A read
    after a write raises RingTooSmall unless the ring has room for both.

    Attributes:
        layer: Index of the layer.
        kind: How it compresses, None for a window-only layer.
        spec: Sizes and formats, and the codec of rows.
    """

    def __init__(
        self,
        layer: int,
        state: StateCachePool,
        paged: PagedKVPool | None,
        ops: HybridOps,
        step: OpenStep,
    ) -> None:
        """Tie the layer's storage to the manager's step."""
        self.layer = layer
        self.spec: HybridSpec = state.spec
        self.kind: Compression | None = state.kind
        self._state, self._paged, self._ops, self._open = state, paged, ops, step

    def __repr__(self) -> str:
        """Return the layer with its kind."""
        return f"LayerCacheHandle({self.spec.describe(self.layer)})"

    @property
    def ratio(self) -> int:
        """Tokens for each entry, 0 for a window-only layer."""
        return self.spec.ratios[self.layer]

    @property
    def step(self) -> HybridStep:
        """The index tensors of the open step, shared by all layers.

        Raises:
            StaleHandleError: No step is open.
        """
        return self._open.current()

    def compress(
        self,
        which: Which,
        value: Tensor,
        score: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Make the entry of every window that closes in this step; see ``reference.compress``.

        Args:
            which: "main" for entries, "index" for indexer keys.
            value: ``[T, c * D]`` floating; c is 2 with overlap, else 1, and D the width of
                ``which``.
            score: ``[T, c * D]`` floating, gate plus bias: the tensor that ``append_tail`` gets.
            weight: ``[D]`` of the RMSNorm.
            eps: Of the RMSNorm.
            cos: ``[positions, R / 2]`` floating, of interleaved pairs.
            sin: Like ``cos``.

        Returns:
            ``[T, D]`` FP32; rows of tokens that close nothing are finite, no more.

        Raises:
            LayerKindError: The layer has no such compressor.
            ShapeError: Other sizes.
            DtypeError: Not floating, or another device.
            RingTooSmall: ``append_tail`` came first and the tail cannot hold both.
            StaleHandleError: No step is open.
        """
        step, width = self.step, self.spec.width(self.layer, which)
        self._check_pair(step, which, value, score)
        assert self.kind is not None
        self._check_table("weight", weight, "D", {"D": width})
        half = {"R/2": self.spec.rope_dim // 2}
        self._check_table("cos", cos, "S R/2", half)
        self._check_table("sin", sin, "S R/2", half | {"S": cos.shape[0]})
        self._check_order(f"tail.{which}", self.kind.tail, self.kind.span, "compress")
        return self._ops.compress(self._state, which, step, value, score, weight, eps, cos, sin)

    def flush_compression(self, entries: Tensor, keys: Tensor | None = None) -> int:
        """Store the entries that closed in this step, and their indexer keys.

        Args:
            entries: ``[T, D]`` as ``compress`` returns them, or only those of closing tokens in
                order.
            keys: ``[T, I]`` or as many rows as ``entries``; for layers with an indexer.

        Returns:
            How many entries were stored, as the host knew when the step was made.

        Raises:
            LayerKindError: A window-only layer; keys missing, or given without an indexer.
            ShapeError: Neither T rows nor one for each closing token; other widths.
            DtypeError: Not floating, or another device. Nothing was stored, here as above.
            StaleHandleError: No step is open.
        """
        step, width = self.step, self.spec.width(self.layer, "main")
        assert self.kind is not None and self._paged is not None
        if (keys is not None) != self.kind.indexer:
            raise LayerKindError(
                f"{self.spec.describe(self.layer)} must be flushed "
                f"{'with' if self.kind.indexer else 'without'} indexer keys, got "
                f'{"none" if keys is None else "some"}; pass what compress("index", …) returned '
                "where the layer has an indexer"
            )
        kind = step.kinds[self.kind.ratio]
        rows = (
            entries.shape[0] if isinstance(entries, Tensor) and entries.dim() else step.num_tokens
        )
        if rows not in (step.num_tokens, kind.closings):
            raise ShapeError(
                f"entries must be [T, D] with T={step.num_tokens} rows, or {kind.closings} for the "
                f"tokens that close a window in {self.spec.describe(self.layer)}, got {rows}; pass "
                "what compress() returned"
            )
        self._check_rows("entries", entries, "T D", {"T": rows, "D": width})
        if keys is not None:
            self._check_rows("keys", keys, "T I", {"T": rows, "I": self.spec.index_dim})
        slots = kind.entry_slot
        if rows != step.num_tokens:
            slots = slots[kind.closing[: kind.closings].long()]
        if rows:
            self._ops.flush_compression(self._paged, slots, entries, keys)
        return kind.closings

    def write_swa(self, rows: Tensor) -> None:
        """Store this step's rows in the ring; of a run longer than the ring, the newest.

        Args:
            rows: ``[T, D]`` floating, rotated: K and V of this step.

        Raises:
            ShapeError: Other sizes.
            DtypeError: Not floating, or another device. Nothing was stored.
            StaleHandleError: No step is open.
        """
        step = self.step
        sizes = {"T": step.num_tokens, "D": self.spec.head_dim}
        self._check_rows("rows", rows, "T D", sizes)
        self._open.note_write(self.layer, "ring")
        self._ops.append_swa(self._state, step, rows)

    def append_tail(self, which: Which, value: Tensor, score: Tensor) -> None:
        """Store values and scores that entries of later steps are made from.

        Args:
            which: "main" for entries, "index" for indexer keys.
            value: ``[T, c * D]``, the tensor that ``compress`` got.
            score: ``[T, c * D]``, gate plus bias: the tensor that ``compress`` got.

        Raises:
            LayerKindError: The layer has no such compressor.
            ShapeError: Other sizes.
            DtypeError: Not floating, or another device. Nothing was stored, here as above.
            StaleHandleError: No step is open.
        """
        step = self.step
        self.spec.width(self.layer, which)
        self._check_pair(step, which, value, score)
        self._open.note_write(self.layer, f"tail.{which}")
        self._ops.append_tail(self._state, which, step, value, score)

    def read_swa_view(self) -> SWAView:
        """Lend the window rings until the step is over.

        Raises:
            RingTooSmall: ``write_swa`` came first and the ring cannot hold both.
            StaleHandleError: No step is open.
        """
        step = self.step
        self._check_order("ring", self.spec.ring, self.spec.window, "read_swa_view")
        return swa_view(Lease(self._open.lease()), self._state, step)

    def read_classical_view(self) -> ClassicalView:
        """Lend the compressed entries, those that this step closes included.

        Raises:
            LayerKindError: A window-only layer.
            StaleHandleError: No step is open.
        """
        step = self.step
        self.spec.width(self.layer, "main")
        assert self._paged is not None
        return classical_view(Lease(self._open.lease()), self._paged, step)

    def read_indexer_view(self) -> IndexerView:
        """Lend the indexer keys, those that this step closes included.

        Raises:
            LayerKindError: The layer has no indexer.
            StaleHandleError: No step is open.
        """
        step = self.step
        self.spec.width(self.layer, "index")
        assert self._paged is not None
        return indexer_view(Lease(self._open.lease()), self._paged, step)

    def _check_pair(self, step: HybridStep, which: Which, value: Tensor, score: Tensor) -> None:
        assert self.kind is not None
        width = self.kind.halves * self.spec.width(self.layer, which)
        for name, tensor in (("value", value), ("score", score)):
            self._check_rows(name, tensor, "T W", {"T": step.num_tokens, "W": width})

    def _check_rows(self, name: str, tensor: Tensor, axes: str, sizes: dict[str, int]) -> None:
        hint = f"one row for each token of the step, for {self.spec.describe(self.layer)}"
        check_tensor(name, tensor, axes, sizes, device=self._device, hint=hint)
        self._check_floating(name, tensor)

    def _check_table(self, name: str, tensor: Tensor, axes: str, sizes: dict[str, int]) -> None:
        check_tensor(name, tensor, axes, sizes, device=self._device)
        self._check_floating(name, tensor)

    def _check_floating(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise DtypeError(
                f"{name} must be floating, got {tensor.dtype}; pass activations, the layer encodes "
                "them itself"
            )

    def _check_order(self, part: str, size: int, keep: int, call: str) -> None:
        if not self._open.wrote(self.layer, part):
            return
        needed = keep + self._open.longest_run() - 1
        if size < needed:
            raise RingTooSmall(
                f"the {part} of {self.spec.describe(self.layer)} must hold {needed} rows to be "
                f"read by {call}() after it was written in the same step, got {size}; call "
                f"{call}() first"
            )

    @property
    def _device(self) -> torch.device:
        return self._state.positions.device
