"""What one layer remembers of each request: its window ring and the tails of its compressors."""

import torch
from torch import Tensor

from kv_core.hybrid.rows import RowTensors
from kv_core.hybrid.spec import HybridSpec, Which
from kv_core.hybrid.storage import allocate, packed_field


class StateCachePool:
    """State of one layer for a fixed number of slots, one slot for each request.

    The row of position p lies at ``p % ring`` of its slot; the value and gate of p at
    ``p % tail``. A reader takes a ring row only where ``positions`` says that it holds the position
    it looks for, so whatever else the memory holds is harmless.

    Args:
        spec: Sizes and formats.
        layer: Index of the layer.
        slots: B, requests that are served at once.
        device: Where the storage lives.

    Attributes:
        spec: Sizes and formats.
        layer: Index of the layer.
        kind: How it compresses, None for a window-only layer.
        ring: ``[B, ring, ...]`` rows of the window.
        positions: ``[B, ring]`` INT32 position that each row holds, -1 for none.
        tails: ``[B, tail, 2, halves * width]`` FP32 value and gate, under "main" and "index".
    """

    def __init__(
        self, spec: HybridSpec, layer: int, slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate everything; no slot holds a row."""
        self.spec, self.layer, self.kind = spec, layer, spec.kind(layer)
        self._tensors = allocate(spec.state_plan(layer, slots), device)
        packed = self._tensors.get("ring.packed")
        if packed is None:
            fields = ("codes", "rope", "scale")
            self.ring = RowTensors(*(self._tensors.get(f"ring.{name}") for name in fields))  # type: ignore[arg-type]
        else:
            self.ring = packed_rows(spec, packed, spec.ring)
        self.positions = self._tensors["positions"].fill_(-1)
        names = ("main", "index")
        self.tails = {
            name: self._tensors[f"tail.{name}"] for name in names if f"tail.{name}" in self._tensors
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return every storage tensor by name, slots on axis 0."""
        return dict(self._tensors)

    @property
    def packed(self) -> Tensor | None:
        """``[B, bytes]`` UINT8 ring of each slot in the packed layout, else None."""
        return self._tensors.get("ring.packed")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @torch.no_grad()
    def forget(self, slots: Tensor, lengths: Tensor) -> None:
        """Mark the ring rows of positions at or past ``lengths[i]`` of ``slots[i]`` as empty.

        Args:
            slots: ``[B]`` INT64, each once.
            lengths: ``[B]`` INT32; 0 empties a slot.
        """
        held = self.positions[slots]
        self.positions[slots] = held.masked_fill(held >= lengths[:, None], -1)

    @torch.no_grad()
    def copy_slot(self, source: int, target: int) -> None:
        """Copy everything of a slot, codes and scales, ring and tails."""
        for tensor in self._tensors.values():
            tensor[target].copy_(tensor[source])

    @torch.no_grad()
    def capture(self, slot: int, length: int) -> dict[str, Tensor]:
        """Return a copy of what a request needs to go on at ``length``, which closes all windows.

        That is the last ``window - 1`` rows and, where windows overlap, the first half of values
        and gates of the last one.
        """
        at = self._ring_rows(length)
        found = {
            f"ring.{index}": _bytes(tensor[slot])[at].clone()
            for index, tensor in enumerate(self.ring.present())
        }
        for name, tail in self.tails.items():
            if self.kind is not None and self.kind.overlap:
                rows = self._tail_rows(length)
                found[f"tail.{name}"] = tail[slot, rows, :, : tail.shape[-1] // 2].clone()
        return found

    @torch.no_grad()
    def restore(self, slot: int, length: int, captured: dict[str, Tensor]) -> None:
        """Write what ``capture`` returned into a slot, and nothing else stays valid there."""
        at = self._ring_rows(length)
        for index, tensor in enumerate(self.ring.present()):
            _bytes(tensor[slot])[at] = captured[f"ring.{index}"]
        self.positions[slot] = -1
        first = max(0, length - self.spec.window + 1)
        held = torch.arange(first, length, dtype=torch.int32, device=self.positions.device)
        self.positions[slot, at] = held
        for name, tail in self.tails.items():
            if f"tail.{name}" in captured:
                rows = self._tail_rows(length)
                tail[slot, rows, :, : tail.shape[-1] // 2] = captured[f"tail.{name}"]

    def _ring_rows(self, length: int) -> Tensor:
        first = max(0, length - self.spec.window + 1)
        return torch.arange(first, length, device=self.positions.device) % self.spec.ring

    def _tail_rows(self, length: int) -> Tensor:
        assert self.kind is not None
        first = length - self.kind.ratio
        return torch.arange(first, length, device=self.positions.device) % self.kind.tail

    def tail(self, which: Which) -> Tensor:
        """Return the tail of the compressor of entries ("main") or of indexer keys ("index").

        Raises:
            LayerKindError: The layer has none.
        """
        self.spec.width(self.layer, which)
        return self.tails[which]


def packed_rows(spec: HybridSpec, packed: Tensor, rows: int) -> RowTensors:
    """Return the fields of blocks in the layout "flashmla_v4" as views.

    Codes and BF16 channels of all rows come first, then the scales of all rows.

    Args:
        spec: Sizes.
        packed: ``[P, bytes]`` UINT8.
        rows: Rows of a block.
    """
    plain, stride = spec.head_dim - spec.rope_dim, spec.row_alignment
    scale = spec.row_bytes - stride
    return RowTensors(
        packed_field(packed, rows, 0, stride, plain, torch.float8_e4m3fn),
        packed_field(packed, rows, plain, stride, spec.rope_dim, torch.bfloat16),
        packed_field(packed, rows, rows * stride, scale, scale, torch.uint8),
    )


def _bytes(tensor: Tensor) -> Tensor:
    """Return FP8 as bytes, so that every indexing op takes it."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
