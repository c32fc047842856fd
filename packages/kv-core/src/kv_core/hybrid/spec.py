"""What a hybrid cache is made of: which layer compresses how, and the bytes of every part."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kv_core.checks import check_int
from kv_core.errors import DtypeError, LayerKindError, SpecError
from kv_core.hybrid.keys import KeyFormat, key_widths
from kv_core.hybrid.rows import RowFormat, RowTensors, decode_rows, encode_rows, row_widths

Layout = Literal["separate", "flashmla_v4"]
Which = Literal["main", "index"]

_LAYOUTS = ("separate", "flashmla_v4")
_SMALLEST_SCALE = 1e-18  # its square is still a normal FP32 number
_VERSION = 1  # of the stored records; a state of another version is refused
_LEAST_DRAFT = 2  # tokens of a speculative run that the smallest rings allow


class TensorPlan(NamedTuple):
    """One tensor of a layer before it is allocated.

    Attributes:
        part: What it is counted under: "ring", "ring positions", "tail", "entries" or "keys".
        shape: Sizes, slots or blocks first.
        dtype: Of its elements.
    """

    part: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How layers of one ratio turn tokens into entries.

    Attributes:
        ratio: Tokens for each entry, at least 1.
        overlap: Whether an entry pools the window before its own as well; values and gates are
            then twice as wide, the first half for the next entry and the second for this one.
        indexer: Whether queries pick entries through indexer keys.
        tail: Rows of the ring that holds values and gates; by default the smallest, ``span``.

    Raises:
        SpecError: A size is out of range; a tail shorter than the span.
        DtypeError: A size is not an integer.
    """

    ratio: int
    overlap: bool = False
    indexer: bool = False
    tail: int = 0

    def __post_init__(self) -> None:
        """Check everything and fill in the tail."""
        check_int("ratio", self.ratio, minimum=1)
        if self.tail != 0:
            check_int(f"tail of ratio {self.ratio}", self.tail, minimum=self.span)
        object.__setattr__(self, "tail", self.tail or self.span)

    @property
    def span(self) -> int:
        """Tokens that one entry pools."""
        return self.ratio * self.halves

    @property
    def halves(self) -> int:
        """Widths of an entry that a token's value has: 2 with overlap, else 1."""
        return 2 if self.overlap else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec:
    """Sizes and formats of a cache whose layers have a window ring and maybe compressed entries.

    Every layer keeps the last rows of each request in a ring. A layer with a ratio also has a pool
    of entries, one for each ``ratio`` tokens, and the tail of values and gates that the next
    entries are made from; where its kind has an indexer, the pool holds a key for each entry too.

    Attributes:
        ratios: One for each layer; 0 has a window only.
        kinds: A ``Compression`` for each ratio in use, and no others.
        head_dim: D, channels of a row; there is one key/value head, and K = V.
        rope_dim: R, last channels of a row (and of an indexer key) that carry the position.
        window: Rows that a query sees, its own included.
        ring: Rows of the ring of a slot; by default ``window``, the smallest.
        block_tokens: Tokens of a block of the pool, a multiple of every ratio.
        row_format: How rows of the ring and entries are stored.
        row_group: Channels of an FP8 row that share a scale.
        key_format: How indexer keys are stored.
        index_dim: I, channels of an indexer key.
        key_global_scale: The second scale of NVFP4, the same for every layer; at least 1e-18.
        layout: "separate" tensors, or "flashmla_v4": each block one run of bytes, rows first and
            scales behind them, padded to whole rows (FP8 rows with MXFP4 keys only).

    Raises:
        SpecError: Sizes that do not fit each other.
        DtypeError: A value of another type.
    """

    ratios: tuple[int, ...]
    kinds: tuple[Compression, ...] = ()
    head_dim: int
    rope_dim: int
    window: int
    ring: int = 0
    block_tokens: int = 256
    row_format: RowFormat = RowFormat.FP8
    row_group: int = 64
    key_format: KeyFormat = KeyFormat.MXFP4
    index_dim: int = 128
    key_global_scale: float = 1.0
    layout: Layout = "separate"

    @classmethod
    def deepseek_v4(cls, *, layers: int, compress_ratios: Sequence[int], **options: Any) -> Self:
        """Return the spec of a DeepSeek-V4 model: ratio 4 with overlap and indexer, ratio 128.

        Sizes are those of the published checkpoints (arXiv 2606.19348), Flash and Pro alike.

        Args:
            layers: Layers of the model.
            compress_ratios: One for each layer, as in the checkpoint's configuration without the
                entry of its MTP layer.
            options: Any field of ``HybridSpec``, instead of the published value.

        Raises:
            SpecError: Not one ratio for each layer, a ratio without a kind, or sizes that do not
                fit.
        """
        layers = check_int("layers", layers, minimum=1)
        if len(compress_ratios) != layers:
            raise SpecError(
                f"compress_ratios must have one ratio for each of the {layers} layers, got "
                f"{len(compress_ratios)}; leave out the MTP layer's, for it has its own cache"
            )
        used = set(compress_ratios)
        published = (
            Compression(ratio=4, overlap=True, indexer=True),
            Compression(ratio=128),
        )
        settings: dict[str, Any] = {
            "kinds": tuple(kind for kind in published if kind.ratio in used),
            "head_dim": 512,
            "rope_dim": 64,
            "window": 128,
        }
        return cls(ratios=tuple(compress_ratios), **settings | options)

    def __post_init__(self) -> None:
        """Check everything and fill in the ring."""
        for name in ("head_dim", "window", "block_tokens", "row_group", "index_dim"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("rope_dim", self.rope_dim, minimum=0, maximum=self.head_dim)
        if self.rope_dim % 2:
            raise SpecError(
                f"rope_dim must be even, got {self.rope_dim}; channels are rotated in pairs"
            )
        for name, wanted in (("row_format", RowFormat), ("key_format", KeyFormat)):
            if not isinstance(getattr(self, name), wanted):
                raise DtypeError(
                    f"{name} must be a {wanted.__name__}, got {getattr(self, name)!r}; for "
                    f"example {wanted.__name__}.BF16"
                )
        object.__setattr__(self, "ratios", tuple(self.ratios))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        if not self.ratios:
            raise SpecError("ratios must name at least 1 layer, got none; 0 is a window-only layer")
        self._check_kinds()
        if self.ring != 0:
            check_int("ring", self.ring, minimum=self.window)
        object.__setattr__(self, "ring", self.ring or self.window)
        self._check_formats()

    def _check_kinds(self) -> None:
        for index, ratio in enumerate(self.ratios):
            check_int(f"ratios[{index}]", ratio, minimum=0)
        known = [kind.ratio for kind in self.kinds]
        used = sorted({ratio for ratio in self.ratios if ratio})
        if sorted(known) != used:
            raise SpecError(
                f"kinds must have one Compression for each ratio in use, {used}, got "
                f"{known}; add what is missing and leave out the rest"
            )
        unit = math.lcm(*known) if known else 1
        if self.block_tokens % unit:
            raise SpecError(
                f"block_tokens must be a multiple of {unit}, the least common one of the ratios "
                f"{used}, got {self.block_tokens}; use {-(-self.block_tokens // unit) * unit}"
            )

    def _check_formats(self) -> None:
        plain = self.head_dim - self.rope_dim
        if self.row_format is RowFormat.FP8 and (plain % self.row_group or not plain):
            raise SpecError(
                f"head_dim - rope_dim must be a positive multiple of row_group={self.row_group} "
                f"for FP8 rows, got {plain}; choose a row_group that divides it"
            )
        if self.has_indexer:
            if self.index_dim % self.key_format.group:
                raise SpecError(
                    f"index_dim must be a multiple of {self.key_format.group} for "
                    f"{self.key_format.name} keys, got {self.index_dim}; pad the projection, or "
                    "use KeyFormat.BF16"
                )
            if self.index_dim < self.rope_dim:
                raise SpecError(
                    f"index_dim must be at least rope_dim, {self.rope_dim}, got {self.index_dim}; "
                    "keys are rotated like rows"
                )
        if not _SMALLEST_SCALE <= self.key_global_scale < math.inf:
            raise SpecError(
                f"key_global_scale must be at least {_SMALLEST_SCALE}, got "
                f"{self.key_global_scale}; use the largest expected magnitude divided by 2688"
            )
        if self.layout not in _LAYOUTS:
            raise SpecError(f"layout must be one of {_LAYOUTS}, got {self.layout!r}")
        packable = self.row_format is RowFormat.FP8 and plain % 2 == 0
        packable &= self.key_format is KeyFormat.MXFP4 or not self.has_indexer
        if self.layout == "flashmla_v4" and not packable:
            raise SpecError(
                f'layout "flashmla_v4" holds FP8 rows of an even width and MXFP4 keys, got '
                f"{self.row_format.name} rows with {plain} codes and {self.key_format.name} keys; "
                'use layout="separate"'
            )

    @property
    def layers(self) -> int:
        """L, layers of the model."""
        return len(self.ratios)

    @property
    def has_indexer(self) -> bool:
        """Whether any layer has indexer keys."""
        return any(kind.indexer for kind in self.kinds)

    @property
    def max_draft(self) -> int:
        """Longest run of tokens of which all but the first may be taken back afterwards."""
        spare = [self.ring - self.window, *(kind.tail - kind.span for kind in self.kinds)]
        return min(spare) + _LEAST_DRAFT

    def for_draft(self, tokens: int) -> Self:
        """Return this spec with the smallest rings that let runs of ``tokens`` be verified."""
        spare = max(check_int("tokens", tokens, minimum=1) - _LEAST_DRAFT, 0)
        kinds = tuple(dataclasses.replace(kind, tail=kind.span + spare) for kind in self.kinds)
        return dataclasses.replace(self, ring=self.window + spare, kinds=kinds)

    def kind(self, layer: int) -> Compression | None:
        """Return how a layer compresses, None for a window-only one."""
        layer = check_int("layer", layer, minimum=0, maximum=self.layers - 1)
        return next((kind for kind in self.kinds if kind.ratio == self.ratios[layer]), None)

    def describe(self, layer: int) -> str:
        """Return a layer with its kind, for messages."""
        kind = self.kind(layer)
        if kind is None:
            return f"layer {layer} (window only)"
        return f"layer {layer} (ratio {kind.ratio}, {'' if kind.indexer else 'no '}indexer)"

    def width(self, layer: int, which: Which) -> int:
        """Return the channels of an entry ("main") or of an indexer key ("index") of a layer.

        Raises:
            LayerKindError: The layer has none.
            SpecError: ``which`` is neither of the two.
        """
        if which not in ("main", "index"):
            raise SpecError(f'which must be "main" or "index", got {which!r}')
        kind = self.kind(layer)
        if kind is None:
            raise LayerKindError(
                f"{self.describe(layer)} has no compressed entries, got which={which!r}; ask "
                "spec.kind(layer) before compressing"
            )
        if which == "index" and not kind.indexer:
            raise LayerKindError(
                f"{self.describe(layer)} has no indexer keys, got which={which!r}; ask "
                "spec.kind(layer).indexer first"
            )
        return self.head_dim if which == "main" else self.index_dim

    def encode(self, rows: Tensor) -> RowTensors:
        """Return ``rows`` ``[..., D]`` as the ring and the pool store them."""
        return encode_rows(rows, self.row_format, self.rope_dim, self.row_group)

    def decode(self, stored: RowTensors) -> Tensor:
        """Return stored rows ``[..., D]`` as FP32."""
        return decode_rows(stored, self.row_format, self.row_group)

    def roundtrip(self, rows: Tensor) -> Tensor:
        """Return ``rows`` ``[..., D]`` as FP32 after storing: what later steps will see of them.

        Attention passes the rows of its own step through this, so that an answer does not depend
        on how a prompt was cut into steps.
        """
        return self.decode(self.encode(rows))

    # --- bytes: what is estimated is what is allocated, from the same plans

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a ring, and of one entry."""
        return _width_bytes(self._row_widths())

    @property
    def key_bytes(self) -> int:
        """Bytes of one indexer key."""
        return _width_bytes(key_widths(self.key_format, self.index_dim))

    def bytes_per_token(self) -> float:
        """Bytes of entries and keys that one token adds over all layers, without block padding."""
        kinds = [kind for layer in range(self.layers) if (kind := self.kind(layer))]
        return math.fsum(
            (self.row_bytes + (self.key_bytes if kind.indexer else 0)) / kind.ratio
            for kind in kinds
        )

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that one request of ``tokens`` holds, the null block not counted."""
        return -(-check_int("tokens", tokens, minimum=0) // self.block_tokens)

    def nbytes(self, *, slots: int, blocks: int) -> dict[str, int]:
        """Return the bytes of a cache by part: "ring", "ring positions", "tail", "entries", "keys".

        The first three grow with requests, the last two with tokens.

        Args:
            slots: Requests that are served at once.
            blocks: Blocks of the pool, the null block included.
        """
        parts = dict.fromkeys(("ring", "ring positions", "tail", "entries", "keys"), 0)
        for layer in range(self.layers):
            plans = self.state_plan(layer, slots) | self.pool_plan(layer, blocks)
            for plan in plans.values():
                parts[plan.part] += plan.nbytes
        return parts

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the state, blocks apart, that a reused prefix needs."""
        rows = self.layers * (self.window - 1) * self.row_bytes
        tails = 0
        for layer in range(self.layers):
            kind = self.kind(layer)
            if kind is not None and kind.overlap:
                width = self.head_dim + (self.index_dim if kind.indexer else 0)
                tails += kind.ratio * 2 * width * torch.float32.itemsize
        return rows + tails

    @property
    def replay_tokens(self) -> int:
        """Tokens that have to run again to rebuild the state of a prefix from its entries alone.

        A layer's window reaches ``window - 1`` tokens back, and each layer below it as far again.
        """
        overlaps = [kind.ratio for kind in self.kinds if kind.overlap]
        return (self.window - 1) * (self.layers - 1) + max([self.window - 1, *overlaps])

    def state_plan(self, layer: int, slots: int) -> dict[str, TensorPlan]:
        """Return the tensors that a layer has for ``slots`` requests."""
        if self.layout == "flashmla_v4":
            size = self._packed_rows(self.ring)
            plans = {"ring.packed": TensorPlan("ring", (slots, size), torch.uint8)}
        else:
            plans = _fields("ring", "ring", self._row_widths(), (slots, self.ring))
        plans["positions"] = TensorPlan("ring positions", (slots, self.ring), torch.int32)
        kind = self.kind(layer)
        if kind is not None:
            widths = {"main": self.head_dim} | ({"index": self.index_dim} if kind.indexer else {})
            for which, width in widths.items():
                shape = (slots, kind.tail, 2, kind.halves * width)
                plans[f"tail.{which}"] = TensorPlan("tail", shape, torch.float32)
        return plans

    def pool_plan(self, layer: int, blocks: int) -> dict[str, TensorPlan]:
        """Return the tensors that a layer has for ``blocks`` blocks; none for a window-only one."""
        kind = self.kind(layer)
        if kind is None:
            return {}
        entries = self.block_tokens // kind.ratio
        keys = key_widths(self.key_format, self.index_dim)
        if self.layout == "flashmla_v4":
            size = self._packed_rows(entries)
            plans = {"entries.packed": TensorPlan("entries", (blocks, size), torch.uint8)}
            if kind.indexer:
                size = entries * self.key_bytes
                plans["keys.packed"] = TensorPlan("keys", (blocks, size), torch.uint8)
            return plans
        plans = _fields("entries", "entries", self._row_widths(), (blocks, entries))
        if kind.indexer:
            plans |= _fields("keys", "keys", keys, (blocks, entries))
        return plans

    def _row_widths(self) -> dict[str, tuple[int, torch.dtype]]:
        return row_widths(self.row_format, self.head_dim, self.rope_dim, self.row_group)

    def _packed_rows(self, rows: int) -> int:
        """Bytes of a block of rows: padded so that the next block starts at a whole row."""
        alignment = self.row_alignment
        return -(-rows * self.row_bytes // alignment) * alignment

    @property
    def row_alignment(self) -> int:
        """Bytes of a packed row without its scales; packed blocks are multiples of it."""
        widths = self._row_widths()
        widths.pop("scale", None)
        return _width_bytes(widths)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON has it, with the version of the stored records."""
        found: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        found["ratios"] = list(self.ratios)
        found["kinds"] = [dataclasses.asdict(kind) for kind in self.kinds]
        found["row_format"], found["key_format"] = self.row_format.name, self.key_format.name
        return {**found, "version": _VERSION}


def _width_bytes(widths: dict[str, tuple[int, torch.dtype]]) -> int:
    return sum(width * dtype.itemsize for width, dtype in widths.values())


def _fields(
    name: str, part: str, widths: dict[str, tuple[int, torch.dtype]], outer: tuple[int, int]
) -> dict[str, TensorPlan]:
    return {
        f"{name}.{field}": TensorPlan(part, (*outer, width), dtype)
        for field, (width, dtype) in widths.items()
    }
