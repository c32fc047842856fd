"""The buffers of a fixed-slot cache: checked once, then written all together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kv_core.checks import check_disjoint, check_int, check_owned, check_tensor
from kv_core.codecs.int8 import quantize_int8
from kv_core.disjoint import Footprint, detached_from
from kv_core.errors import DtypeError, ShapeError, SnapshotError, SpecError
from kv_core.spec import KVFormat


class LayerKV(NamedTuple):
    """Keys and values of one layer, of equal shape but for the last axis."""

    k: Tensor
    v: Tensor


class QuantizedLayerKV(NamedTuple):
    """INT8 codes of one layer's keys and values, and the FP32 scale of each of their rows."""

    k: Tensor  # [..., Dk] INT8
    v: Tensor  # [..., Dv] INT8
    k_scale: Tensor  # [...]
    v_scale: Tensor  # [...]


AnyLayerKV: TypeAlias = LayerKV | QuantizedLayerKV
Pairs: TypeAlias = Sequence[LayerKV | tuple[Tensor, Tensor]]
Buffers: TypeAlias = Sequence[AnyLayerKV | tuple[Tensor, ...]]

_WORDS = {"k": "key", "v": "value", "k_scale": "key scale", "v_scale": "value scale"}


class SlotStorage:
    """Every buffer of every layer, in one list that each mutation goes through.

    ``layers`` holds what readers see; ``flat`` the same tensors in the order of layers and fields.
    Key and value tensors that come in are called sources: two for each layer, key first.
    """

    def __init__(self, sources: Sequence[Tensor], *, seq_dim: int, format: KVFormat | None) -> None:
        """Check a prefill and learn sizes, dtype and devices from it; ``use`` adds the buffers."""
        first = sources[0]
        if not isinstance(first, Tensor) or first.dim() == 0:
            got = "a scalar" if isinstance(first, Tensor) else type(first).__name__
            raise (ShapeError if isinstance(first, Tensor) else DtypeError)(
                f"layer 0 key of the prefill must be a tensor with a token axis, got {got}; pass "
                "a (key, value) pair such as [B, H, T, D] for each layer"
            )
        rank = first.dim()
        self.seq_dim = check_int("seq_dim", seq_dim, minimum=-rank, maximum=rank - 1) % rank
        self.axes = _axes(rank, self.seq_dim)
        self.dtype = first.dtype
        self.format = _check_format(format, first.dtype, self.seq_dim == rank - 1)
        self.kind = QuantizedLayerKV if self.format.is_quantized else LayerKV
        self.tokens = first.shape[self.seq_dim]
        self.sizes = self._check_prefill(sources)
        self.devices = [source.device for source in sources]

    def _check_prefill(self, sources: Sequence[Tensor]) -> list[dict[str, int]]:
        letters, tokens = self.axes.split(), {"T": self.tokens}
        sizes: list[dict[str, int]] = []
        for at, source in enumerate(sources):
            wanted, device, hint = tokens, None, "every layer needs the same number of tokens"
            if at % 2:
                wanted = {axis: n for axis, n in sizes[-1].items() if axis != letters[-1]} | tokens
                device, hint = sources[at - 1].device, "only its last axis may differ from the key"
            name = _source_name("prefill", at)
            dtype = self.dtype
            check_tensor(name, source, self.axes, wanted, dtype=dtype, device=device, hint=hint)
            sizes.append(dict(zip(letters, source.shape, strict=True)))
        return sizes

    def use(self, buffers: Buffers | None, capacity: int) -> None:
        """Adopt the caller's buffers after checking them all, or allocate buffers of zeros."""
        self.capacity = capacity
        if buffers is None:
            flat = self._allocate()
        else:
            parts = [_WORDS[field] for field in self.kind._fields]
            flat = flatten("storage", buffers, layers=self.num_layers, parts=parts)
            self._check_buffers(flat)
        fields = len(self.kind._fields)
        self.layers: list[AnyLayerKV] = [
            self.kind(*flat[at : at + fields]) for at in range(0, len(flat), fields)
        ]
        self.flat = flat
        self._footprint = Footprint(flat)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.sizes) // 2

    def names(self) -> list[tuple[int, str]]:
        """Return layer and field of each tensor of ``flat``."""
        return [(layer, field) for layer in range(self.num_layers) for field in self.kind._fields]

    def _expected(self, layer: int, field: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of one buffer."""
        sizes = self.sizes[2 * layer + (field[0] == "v")] | {"T": self.capacity}
        shape = tuple(sizes.values())
        if field.endswith("scale"):
            return shape[:-1], torch.float32
        return shape, self.format.dtype

    def _allocate(self) -> list[Tensor]:
        # also where the caller is in inference mode: its tensors could never be written outside
        with torch.inference_mode(False):
            specs = [(layer, *self._expected(layer, field)) for layer, field in self.names()]
            return [
                torch.zeros(shape, dtype=dtype, device=self.devices[2 * layer])
                for layer, shape, dtype in specs
            ]

    def _check_buffers(self, flat: Sequence[Tensor]) -> None:
        named = []
        for (layer, field), tensor in zip(self.names(), flat, strict=True):
            name = f"layer {layer} {_WORDS[field]}"
            shape, dtype = self._expected(layer, field)
            axes = self.axes.replace("T", "S").split()[: len(shape)]
            check_tensor(
                f"{name} of the storage",
                tensor,
                " ".join(axes),
                dict(zip(axes, shape, strict=True)),
                dtype=dtype,
                device=self.devices[2 * layer],
                hint=f"S is the capacity, {self.capacity}, and the rest is as in the prefill",
            )
            check_owned(f"{name} of the storage", tensor)
            named.append((name, tensor))
        check_disjoint(named)

    def check_sources(self, what: str, sources: Sequence[Tensor], tokens: int | None) -> int:
        """Compare a later prefill or chunk with the first prefill; return its number of tokens.

        Raises:
            ShapeError: Another size; T must be ``tokens``, or what layer 0 key has where None.
            DtypeError: Another dtype or device.
        """
        hint = f"size the {what} as the prefill the cache was built with"
        for at, source in enumerate(sources):
            name, axes = _source_name(what, at), self.axes
            if tokens is None:
                check_tensor(name, source, axes, {}, hint=hint)
                tokens = source.shape[self.seq_dim]
            sizes, device = self.sizes[at] | {"T": tokens}, self.devices[at]
            check_tensor(name, source, axes, sizes, dtype=self.dtype, device=device, hint=hint)
        return tokens or 0

    @torch.no_grad()
    def encode(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return what is stored of the sources, in the order of ``flat``."""
        if not self.format.is_quantized:
            return list(sources)
        coded = [quantize_int8(source) for source in sources]
        return [
            part
            for (k, k_scale), (v, v_scale) in zip(coded[::2], coded[1::2], strict=True)
            for part in (k, v, k_scale, v_scale)
        ]

    @torch.no_grad()
    def put(self, rows: Sequence[Tensor], start: int, end: int) -> None:
        """Write encoded rows from ``start`` on, then zeros up to ``end``, in every buffer.

        All rows are read as they were before the first of them is written.
        """
        tokens = rows[0].shape[self.seq_dim]
        written = self.view(start, end)
        places = [tensor.narrow(self.seq_dim, 0, tokens) for tensor in written]
        rows = detached_from(self._footprint, rows, places, written)
        for place, row in zip(places, rows, strict=True):
            place.copy_(row)
        self.clear(start + tokens, end)

    @torch.no_grad()
    def clear(self, start: int, end: int) -> None:
        """Write zeros from ``start`` to ``end`` in every buffer."""
        if start < end:
            for tensor in self.view(start, end):
                tensor.zero_()

    def view(self, start: int, end: int) -> list[Tensor]:
        """Return views of the rows from ``start`` to ``end`` of every buffer."""
        return [tensor.narrow(self.seq_dim, start, end - start) for tensor in self.flat]

    def spec(self) -> dict[str, Any]:
        """Return everything that makes two storages exchangeable, as JSON has it."""
        sizes = [list((size | {"T": self.capacity}).values()) for size in self.sizes]
        return {
            "format": self.format.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "capacity": self.capacity,
            "seq_dim": self.seq_dim,
            "prefill_tokens": self.tokens,
            "layers": [{"k": k, "v": v} for k, v in zip(sizes[::2], sizes[1::2], strict=True)],
        }

    def state_tensors(self, length: int) -> dict[str, Tensor]:
        """Return dense copies of the first ``length`` rows by name."""
        return {
            f"layer.{layer}.{field}": tensor.clone(memory_format=torch.contiguous_format)
            for (layer, field), tensor in zip(self.names(), self.view(0, length), strict=True)
        }

    def check_state_tensors(self, tensors: Mapping[str, Tensor], length: int) -> list[Tensor]:
        """Return the tensors of a state in the order of ``flat`` if they fit.

        Raises:
            SnapshotError: A tensor is missing, unknown, or of another shape or dtype.
        """
        wanted = {f"layer.{layer}.{field}": (layer, field) for layer, field in self.names()}
        odd = sorted(wanted.keys() ^ tensors.keys())
        if odd:
            raise SnapshotError(
                f"tensors of the state must be the {len(wanted)} of {self.num_layers} layers, got "
                f"{len(tensors)} (missing or unknown: {', '.join(odd[:4])}); load a whole state"
            )
        for name, (layer, field) in wanted.items():
            shape, dtype = self._expected(layer, field)
            shape = (*shape[: self.seq_dim], length, *shape[self.seq_dim + 1 :])
            got = tensors[name]
            if got.shape != shape or got.dtype != dtype:
                raise SnapshotError(
                    f"tensor {name!r} of the state must be {list(shape)} {dtype}, got "
                    f"{list(got.shape)} {got.dtype}; load a state that was not edited"
                )
        return [tensors[name] for name in wanted]


def flatten(
    what: str, given: Any, *, layers: int | None, parts: Sequence[str] = ("key", "value")
) -> list[Tensor]:
    """Return the tensors of all layers in one list, once every layer has one for each part.

    Raises:
        DtypeError: Not a sequence of layers.
        ShapeError: No layer, another number of layers, or a layer with another number of parts.
    """
    wanted = f"({', '.join(parts)})"
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise DtypeError(
            f"{what} must be a sequence of layers, got {type(given).__name__}; pass a list of "
            f"{wanted} tuples"
        )
    if not given or (layers is not None and len(given) != layers):
        count = "at least 1 layer" if layers is None else f"{layers} layers"
        raise ShapeError(
            f"{what} must have {count}, got {len(given)}; pass a {wanted} tuple for each layer"
        )
    flat: list[Tensor] = []
    for at, layer in enumerate(given):
        if not isinstance(layer, (tuple, list)) or len(layer) != len(parts):
            got = (
                f"{len(layer)} items" if isinstance(layer, (tuple, list)) else type(layer).__name__
            )
            raise ShapeError(
                f"layer {at} of the {what} must be a tuple {wanted}, got {got}; pass exactly "
                f"these {len(parts)} tensors"
            )
        flat.extend(layer)
    return flat


def _source_name(what: str, at: int) -> str:
    return f"layer {at // 2} {('key', 'value')[at % 2]} of the {what}"


def _axes(rank: int, seq_dim: int) -> str:
    """Name the axes for messages; T is the token axis."""
    if (rank, seq_dim) == (4, 2):
        return "B H T D"
    return " ".join("T" if axis == seq_dim else f"axis{axis}" for axis in range(rank))


def _check_format(format: KVFormat | None, dtype: torch.dtype, tokens_last: bool) -> KVFormat:
    if format is not None and not isinstance(format, KVFormat):
        raise DtypeError(
            f"format must be a KVFormat or None, got {format!r}; for example KVFormat.INT8"
        )
    if not dtype.is_floating_point:
        raise DtypeError(
            f"layer 0 key of the prefill must be a floating tensor, got {dtype}; pass the "
            "activations, and format=KVFormat.INT8 to have them quantised"
        )
    of_prefill = KVFormat.of(dtype)
    if format is None or format is of_prefill:
        return of_prefill
    if not format.is_quantized:
        raise DtypeError(
            f"format must match the prefill, which is {dtype}, got {format.name}; convert the "
            f"prefill with .to({format.dtype}) or leave format out"
        )
    if tokens_last:
        raise SpecError(
            "seq_dim must not be the last axis with format INT8, got the last: a scale belongs to "
            "a row along it; move the token axis forward"
        )
    return format
