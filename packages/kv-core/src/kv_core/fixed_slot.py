"""A key/value cache with a fixed prefill and named regions of slots that are reused in turn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kv_core.checks import check_int
from kv_core.errors import FrozenError, ShapeError, SpecError
from kv_core.regions import SlotRegion, check_regions
from kv_core.slot_counters import SlotCounters
from kv_core.slot_storage import (
    AnyLayerKV,
    Buffers,
    LayerKV,
    Pairs,
    QuantizedLayerKV,
    SlotStorage,
    flatten,
)
from kv_core.snapshot import check_state
from kv_core.spec import KVFormat

__all__ = ["FixedSlotKVCache", "LayerKV", "QuantizedLayerKV", "SlotRegion"]


class FixedSlotKVCache:
    """Keys and values of all layers: a prefill that stays, and regions whose slots rotate.

    Three numbers describe it. *capacity* is what is allocated, *length* the extent a reader sees,
    *valid* the rows that were really written. Rows that are not valid are always exactly zero, and
    attention must not count them. Storage never moves: construction, ``write``, wrap-around,
    ``reset`` and ``load_state_dict`` keep every address. A call that raises has changed nothing.

    Sources may be views of the storage itself; each is read as if it had been copied first.

    Args:
        prefilled: For each layer a pair of key and value, such as ``[B, H, T, D]``, with the same
            T >= 0 everywhere and one floating dtype. The value's last axis may differ from the
            key's, and layers may differ from each other. Copied, never kept.
        capacity: Number of tokens to hold, at least T.
        regions: The regions. One that does not extend the length must end within the prefill;
            those with slots must not overlap. Rows of the prefill inside a region count as valid.
        seq_dim: The token axis.
        storage: Buffers to use instead of own ones, kept by reference: a pair for each layer, or
            four tensors as in ``QuantizedLayerKV`` where the format is INT8. Shaped as the prefill
            with ``capacity`` on the token axis, any strides. All contents are overwritten.
        format: None keeps the prefill's dtype; ``KVFormat.INT8`` stores codes and scales.

    Raises:
        SpecError: A size, region or format that does not fit the others; storage that requires
            grad or was made in inference mode.
        ShapeError: A tensor of another rank or size, or another number of layers.
        DtypeError: A tensor of another dtype, layout or device, or an option of the wrong type.
        AliasError: Storage tensors that overlap each other or themselves, or cannot be shown not
            to. Nothing was written, here as in the cases above.
    """

    def __init__(
        self,
        prefilled: Pairs,
        *,
        capacity: int,
        regions: Sequence[SlotRegion],
        seq_dim: int = 2,
        storage: Buffers | None = None,
        format: KVFormat | None = None,
    ) -> None:
        """Check everything, then copy the prefill and clear what follows it."""
        sources = flatten("prefill", prefilled, layers=None)
        self._storage = SlotStorage(sources, seq_dim=seq_dim, format=format)
        tokens = self._storage.tokens
        capacity = check_int("capacity", capacity, minimum=0)
        if capacity < tokens:
            raise SpecError(
                f"capacity must hold the {tokens} tokens of the prefill, got {capacity}; pass "
                f"capacity={tokens} or more"
            )
        checked = check_regions(regions, prefill_tokens=tokens, capacity=capacity)
        self._storage.use(storage, capacity)
        self._storage.put(self._storage.encode(sources), 0, capacity)
        self._counters = SlotCounters(checked, tokens)
        self._undo: dict[tuple[str, int], list[Tensor]] | None = None
        self._is_adopted = storage is not None

    def __repr__(self) -> str:
        """Return the effective settings and counters."""
        counters = self._counters
        regions = ", ".join(
            f"{region}: {region.slots} slots x {region.slot_tokens} tokens"
            f"{', extends length' if region.extends_length else ''}"
            f", newest={counters.newest[name]}, valid={counters.valid[name]}"
            for name, region in counters.regions.items()
        )
        return (
            f"FixedSlotKVCache(layers={self.num_layers}, format={self.format.name}, "
            f"capacity={self.capacity}, length={self.length}, valid_tokens={self.valid_tokens}, "
            f"seq_dim={self.seq_dim}, nbytes={self.nbytes}, "
            f"storage={'caller' if self._is_adopted else 'own'}, regions=[{regions}])"
        )

    @property
    def capacity(self) -> int:
        """Tokens that are allocated."""
        return self._storage.capacity

    @property
    def length(self) -> int:
        """Tokens that ``layers()`` shows, rows that are not valid among them."""
        return self._counters.length

    @property
    def valid_tokens(self) -> int:
        """Tokens that were really written, the prefill's included."""
        return self._counters.valid_tokens

    @property
    def seq_dim(self) -> int:
        """The token axis, not negative."""
        return self._storage.seq_dim

    @property
    def format(self) -> KVFormat:
        """How the elements are stored."""
        return self._storage.format

    @property
    def regions(self) -> tuple[SlotRegion, ...]:
        """The regions, in the order they were given."""
        return tuple(self._counters.regions.values())

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._storage.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers over the whole capacity, scales included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._storage.flat)

    def layers(self) -> list[AnyLayerKV]:
        """Return views of the first ``length`` tokens of each layer; they do not grow later."""
        return [
            type(layer)(*(tensor.narrow(self.seq_dim, 0, self.length) for tensor in layer))
            for layer in self._storage.layers
        ]

    def buffers(self) -> list[AnyLayerKV]:
        """Return each layer over the whole capacity; these addresses never change."""
        return list(self._storage.layers)

    def valid(self, region: str) -> tuple[int, ...]:
        """Return how many rows of each slot of a region are valid; they are its first ones.

        Raises:
            SpecError: There is no such region.
        """
        return self._counters.valid[self._counters.find(region).name]

    def write(self, region: str, chunk: Pairs, chunk_id: int) -> int:
        """Write a chunk into its slot and clear the rest of that slot.

        Chunk ids of a region count from 0, and id i lives in slot ``i % slots``. The newest id
        again overwrites its slot; the id after it takes the next slot, and with it the place of
        the oldest chunk. Reads metadata only, so it never waits for a device.

        Args:
            region: Name of the region.
            chunk: For each layer a pair of key and value ``[B, H, T, D]``, 1 <= T <= slot_tokens,
                otherwise sized and typed as the prefill. It may require grad; the buffers do not.
            chunk_id: The newest id of this region, or the one after it.

        Returns:
            The slot that was written.

        Raises:
            SpecError: No such region, a region without slots, or an id that is not next.
            ShapeError: Another number of layers or another size; the layer is named.
            DtypeError: Another dtype or device, which is never converted here. Bytes and counters
                are as before, here as in the cases above.
        """
        place = self._counters.find(region)
        chunk_id, slot = self._counters.admit(place, chunk_id)
        sources = flatten("chunk", chunk, layers=self.num_layers)
        tokens = self._storage.check_sources("chunk", sources, None)
        if not 1 <= tokens <= place.slot_tokens:
            raise ShapeError(
                f"chunk for region {place.name!r} must have between 1 and {place.slot_tokens} "
                f"tokens on axis {self.seq_dim}, got {tokens}; write at most one slot at a time"
            )
        start, end = place.slot_start(slot), place.slot_start(slot + 1)
        rows = self._storage.encode(sources)
        if self._undo is not None and (place.name, slot) not in self._undo:
            kept = [tensor.clone() for tensor in self._storage.view(start, end)]
            self._undo[place.name, slot] = kept
        self._storage.put(rows, start, end)
        self._counters.record(place, chunk_id, tokens)
        return slot

    def reset(self, prefilled: Pairs) -> None:
        """Begin again with another prefill of the same shapes, in the same storage.

        Raises:
            ShapeError: Another number of layers or another size than at first; the layer is named.
            DtypeError: Another dtype or device.
            FrozenError: Inside ``transaction()``. Nothing has changed, here as in the cases above.
        """
        self._refuse_in_transaction("reset")
        sources = flatten("prefill", prefilled, layers=self.num_layers)
        self._storage.check_sources("prefill", sources, self._storage.tokens)
        self._storage.put(self._storage.encode(sources), 0, self.capacity)
        self._counters = SlotCounters(self._counters.regions, self._storage.tokens)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo every ``write`` made inside if the block raises: bytes and counters, bit for bit.

        Only the slots that are written are kept aside, each once. Writes that bypass ``write``,
        through views of the buffers, are not undone.

        Raises:
            FrozenError: Inside another transaction of this cache.
        """
        self._refuse_in_transaction("transaction")
        undo: dict[tuple[str, int], list[Tensor]] = {}
        self._undo, counters = undo, self._counters.copy()
        try:
            yield
        except BaseException:
            for (name, slot), rows in undo.items():
                region = counters.regions[name]
                self._storage.put(rows, region.slot_start(slot), region.slot_start(slot + 1))
            self._counters = counters
            raise
        finally:
            self._undo = None

    def state_dict(self) -> dict[str, Any]:
        """Return spec, counters and copies of the first ``length`` tokens.

        Returns:
            ``{"meta": JSON-able dict, "tensors": dict}``; tensors are called ``layer.0.k`` and so
            on, ``layer.0.k_scale`` for the scales.
        """
        meta = {"spec": self._spec(), **self._counters.to_meta()}
        return {"meta": meta, "tensors": self._storage.state_tensors(self.length)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that a cache of the same spec returned, into the existing storage.

        Tensors may come from another device. Rows that are not valid are cleared.

        Raises:
            SnapshotError: Not such a state, counters that contradict each other, or a cache of
                another spec; the message names what differs.
            FrozenError: Inside ``transaction()``. Nothing has changed, here as in the cases above.
        """
        self._refuse_in_transaction("load_state_dict")
        meta, tensors = check_state("FixedSlotKVCache", state, self._spec())
        counters = self._counters.from_meta(meta)
        rows = self._storage.check_state_tensors(tensors, counters.length)
        self._storage.put(rows, 0, self.capacity)
        for start, end in counters.invalid_runs():
            self._storage.clear(start, end)
        self._counters = counters

    def _spec(self) -> dict[str, Any]:
        regions = {name: asdict(region) for name, region in self._counters.regions.items()}
        return {"kind": "FixedSlotKVCache", **self._storage.spec(), "regions": regions}

    def _refuse_in_transaction(self, call: str) -> None:
        if self._undo is not None:
            raise FrozenError(
                f"{call}() must be called outside of transaction(), got a cache inside one; let "
                "the block end first"
            )
