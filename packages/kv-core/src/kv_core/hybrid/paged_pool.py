"""The compressed entries of one layer, and the indexer keys beside them, in blocks."""

import torch
from torch import Tensor

from kv_core.errors import LayerKindError
from kv_core.hybrid.keys import KeyTensors, key_widths
from kv_core.hybrid.rows import RowTensors
from kv_core.hybrid.spec import HybridSpec
from kv_core.hybrid.state_pool import packed_rows
from kv_core.hybrid.storage import allocate, packed_field


class PagedKVPool:
    """Entries of one layer. Entry w of a request lies in block ``w // N`` of its table.

    Args:
        spec: Sizes and formats.
        layer: Index of a layer that compresses.
        blocks: P, blocks of the pool, the null block 0 included.
        device: Where the storage lives.

    Attributes:
        spec: Sizes and formats.
        layer: Index of the layer.
        kind: How it compresses.
        entries_per_block: N, block tokens divided by the ratio.
        entries: ``[P, N, ...]`` entries.
        keys: ``[P, N, ...]`` indexer keys, or None.
        key_global_scale: ``[1]`` FP32 of NVFP4 keys, or None.

    Raises:
        LayerKindError: A window-only layer.
    """

    def __init__(
        self, spec: HybridSpec, layer: int, blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate everything."""
        kind = spec.kind(layer)
        if kind is None:
            raise LayerKindError(
                f"{spec.describe(layer)} has no compressed entries, so it needs no pool; give one "
                "to layers with a ratio only"
            )
        self.spec, self.layer, self.kind = spec, layer, kind
        self.entries_per_block = spec.block_tokens // kind.ratio
        self._tensors = allocate(spec.pool_plan(layer, blocks), device)
        self.entries = self._rows()
        self.keys = self._keys() if kind.indexer else None
        self.key_global_scale: Tensor | None = None
        if kind.indexer and spec.key_format.name == "NVFP4":
            with torch.inference_mode(False):
                self.key_global_scale = torch.full((1,), spec.key_global_scale, device=device)

    def _rows(self) -> RowTensors:
        packed = self._tensors.get("entries.packed")
        if packed is not None:
            return packed_rows(self.spec, packed, self.entries_per_block)
        names = ("codes", "rope", "scale")
        return RowTensors(*(self._tensors.get(f"entries.{name}") for name in names))  # type: ignore[arg-type]

    def _keys(self) -> KeyTensors:
        packed = self._tensors.get("keys.packed")
        if packed is None:
            return KeyTensors(self._tensors["keys.codes"], self._tensors.get("keys.scale"))
        fields, start = [], 0
        for width, dtype in key_widths(self.spec.key_format, self.spec.index_dim).values():
            fields.append(packed_field(packed, self.entries_per_block, start, width, width, dtype))
            start += self.entries_per_block * width
        return KeyTensors(*fields)

    def tensors(self) -> dict[str, Tensor]:
        """Return every storage tensor by name, blocks on axis 0."""
        return dict(self._tensors)

    @property
    def packed(self) -> Tensor | None:
        """``[P, bytes]`` UINT8 blocks of entries in the packed layout, else None."""
        return self._tensors.get("entries.packed")

    @property
    def packed_keys(self) -> Tensor | None:
        """``[P, bytes]`` UINT8 blocks of keys in the packed layout, else None."""
        return self._tensors.get("keys.packed")

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @torch.no_grad()
    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block: codes, scales and keys."""
        for tensor in self._tensors.values():
            tensor[target].copy_(tensor[source])
