"""What attention and the indexer read of a layer: tensors on loan until the step is over."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kv_core.hybrid.keys import KeyFormat, KeyTensors
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.rows import RowFormat, RowTensors
from kv_core.hybrid.spec import HybridSpec
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep, KindStep


class Lease:
    """Says whether what was borrowed may still be used."""

    __slots__ = ("_check",)

    def __init__(self, check: Callable[[], None]) -> None:
        """Remember what to ask; it raises once the loan is over."""
        self._check = check

    def hold(self) -> None:
        """Return if the loan holds.

        Raises:
            StaleHandleError: It is over.
        """
        self._check()


class _View:
    """Fields that alias storage; each is checked when it is read."""

    _fields: tuple[str, ...] = ()

    def __init__(self, lease: Lease, **fields: Any) -> None:
        self._lease, self._values = lease, fields

    def __repr__(self) -> str:
        """Return the kind of view and its fields; values are not read."""
        return f"{type(self).__name__}({', '.join(self._values)})"

    def _read(self, name: str) -> Any:
        self._lease.hold()
        return self._values[name]


def _field(name: str, doc: str) -> Any:
    def read(self: _View) -> Any:
        return self._read(name)

    read.__doc__ = doc
    return property(read)


class SWAView(_View):
    """The window rings of a layer, and which of them belong to this step's requests.

    A query at position p of request b takes ring row ``q % ring`` of slot ``slots[b]`` for each q
    in ``(p - window, p]`` with ``q < seq_start[b]`` where ``swa_pos[slot, q % ring] == q``, and the
    step's own rows for the others. Nothing else says what is valid; other rows may be NaN.

    Reading a field after the step was committed, aborted, or one of its requests freed raises
    StaleHandleError; this is so for all views.
    """

    spec: HybridSpec = _field("spec", "Sizes, formats and codec of the rows.")
    format: RowFormat = _field("format", "How rows are stored.")
    rows: RowTensors = _field("rows", "``[slots, ring, ...]`` stored rows.")
    codes: Tensor = _field("codes", "``[slots, ring, D]`` rows, or ``[..., D - R]`` e4m3 codes.")
    rope: Tensor | None = _field("rope", "``[slots, ring, R]`` BF16 of FP8 rows, else None.")
    inv_scale: Tensor | None = _field("inv_scale", "UE8M0 bytes of FP8 rows, else None.")
    swa_pos: Tensor = _field(
        "swa_pos", "``[slots, ring]`` position that each row holds, -1 for none."
    )
    window: int = _field("window", "Rows that a query sees, its own included.")
    slots: Tensor = _field("slots", "``[B]`` slot of each request, -1 for padding.")
    cu_tokens: Tensor = _field("cu_tokens", "``[B + 1]`` where each request's tokens begin.")
    seq_start: Tensor = _field("seq_start", "``[B]`` position of each request's first token.")
    request_ids: Tensor = _field("request_ids", "``[T]`` request of each token, -1 for padding.")
    positions: Tensor = _field("positions", "``[T]`` position of each token, -1 for padding.")
    packed: Tensor | None = _field("packed", "``[slots, bytes]`` rings in the packed layout.")


class ClassicalView(_View):
    """The compressed entries of a layer, and which of them belong to this step's requests.

    Entry w of request b is row ``w % N`` of block ``block_table[b, w // N]``. Token t sees the
    entries below ``vis[t]``, those that this step closes included. Blocks at or past
    ``block_lens`` and entries at or past ``vis`` may hold anything, NaN among it.
    """

    spec: HybridSpec = _field("spec", "Sizes, formats and codec of the entries.")
    format: RowFormat = _field("format", "How entries are stored.")
    rows: RowTensors = _field("rows", "``[P, N, ...]`` stored entries.")
    codes: Tensor = _field("codes", "``[P, N, D]`` entries, or ``[..., D - R]`` e4m3 codes.")
    rope: Tensor | None = _field("rope", "``[P, N, R]`` BF16 of FP8 entries, else None.")
    inv_scale: Tensor | None = _field("inv_scale", "UE8M0 bytes of FP8 entries, else None.")
    ratio: int = _field("ratio", "Tokens for each entry.")
    entries_per_block: int = _field("entries_per_block", "N.")
    block_table: Tensor = _field("block_table", "``[B, M]`` block ids, 0 where unused.")
    block_lens: Tensor = _field("block_lens", "``[B]`` blocks of each request.")
    entry_lens: Tensor = _field("entry_lens", "``[B]`` entries of each request after this step.")
    vis: Tensor = _field("vis", "``[T]`` entries that each token sees, 0 for padding.")
    request_ids: Tensor = _field("request_ids", "``[T]`` request of each token, -1 for padding.")
    positions: Tensor = _field("positions", "``[T]`` position of each token, -1 for padding.")
    packed: Tensor | None = _field("packed", "``[P, bytes]`` blocks in the packed layout.")


class IndexerView(_View):
    """The indexer keys of a layer; key w of a request lies where its entry w does.

    The rules are those of ``ClassicalView``.
    """

    spec: HybridSpec = _field("spec", "Sizes and formats.")
    format: KeyFormat = _field("format", "How keys are stored.")
    stored: KeyTensors = _field("stored", "``[P, N, ...]`` stored keys.")
    keys: Tensor = _field("keys", "``[P, N, I]`` keys, or ``[P, N, I / 2]`` codes.")
    scale: Tensor | None = _field("scale", "Scales of quantised keys, else None.")
    global_scale: Tensor | None = _field("global_scale", "``[1]`` of NVFP4 keys, else None.")
    ratio: int = _field("ratio", "Tokens for each key.")
    entries_per_block: int = _field("entries_per_block", "N.")
    block_table: Tensor = _field("block_table", "``[B, M]`` block ids, 0 where unused.")
    block_lens: Tensor = _field("block_lens", "``[B]`` blocks of each request.")
    entry_lens: Tensor = _field("entry_lens", "``[B]`` keys of each request after this step.")
    vis: Tensor = _field("vis", "``[T]`` keys that each token sees, 0 for padding.")
    request_ids: Tensor = _field("request_ids", "``[T]`` request of each token, -1 for padding.")
    positions: Tensor = _field("positions", "``[T]`` position of each token, -1 for padding.")
    packed: Tensor | None = _field("packed", "``[P, bytes]`` blocks in the packed layout.")


def swa_view(lease: Lease, state: StateCachePool, step: HybridStep) -> SWAView:
    """Lend the rings of a layer."""
    return SWAView(
        lease,
        spec=state.spec,
        format=state.spec.row_format,
        rows=state.ring,
        codes=state.ring.codes,
        rope=state.ring.rope,
        inv_scale=state.ring.scale,
        swa_pos=state.positions,
        window=state.spec.window,
        slots=step.request_slots,
        cu_tokens=step.cu_tokens,
        seq_start=step.seq_start,
        request_ids=step.request_ids,
        positions=step.positions,
        packed=state.packed,
    )


def classical_view(lease: Lease, paged: PagedKVPool, step: HybridStep) -> ClassicalView:
    """Lend the entries of a layer."""
    return ClassicalView(
        lease,
        format=paged.spec.row_format,
        rows=paged.entries,
        codes=paged.entries.codes,
        rope=paged.entries.rope,
        inv_scale=paged.entries.scale,
        packed=paged.packed,
        **_table(paged, step, step.kinds[paged.kind.ratio]),
    )


def indexer_view(lease: Lease, paged: PagedKVPool, step: HybridStep) -> IndexerView:
    """Lend the keys of a layer that has an indexer."""
    assert paged.keys is not None
    return IndexerView(
        lease,
        format=paged.spec.key_format,
        stored=paged.keys,
        keys=paged.keys.codes,
        scale=paged.keys.scale,
        global_scale=paged.key_global_scale,
        packed=paged.packed_keys,
        **_table(paged, step, step.kinds[paged.kind.ratio]),
    )


def _table(paged: PagedKVPool, step: HybridStep, kind: KindStep) -> dict[str, Any]:
    return {
        "spec": paged.spec,
        "ratio": paged.kind.ratio,
        "entries_per_block": paged.entries_per_block,
        "block_table": step.block_table,
        "block_lens": step.block_lens,
        "entry_lens": kind.entry_lens,
        "vis": kind.vis,
        "request_ids": step.request_ids,
        "positions": step.positions,
    }
