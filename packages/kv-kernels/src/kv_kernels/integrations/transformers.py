"""A paged cache for Hugging Face models: FP32, FP16, BF16 or INT8, batched, prefixes shared."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch
from kv_core.checks import check_int, check_tensor
from kv_core.errors import DtypeError, SpecError
from kv_core.layer import KVLayer
from kv_core.prefixes import token_ids
from kv_core.sequences import SequenceTable
from kv_core.spec import KVFormat
from torch import Tensor

try:
    from transformers import __version__ as _version

    if tuple(map(int, _version.split(".")[:2])) < (5, 24):
        raise ImportError(f"{_version} is installed, which takes no cache=")
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        f"kv_kernels.integrations.transformers needs transformers 5.24 or newer ({error}); "
        "pip install kv-kernels[transformers]"
    ) from error

from kv_kernels.integrations.attention import NAME, PendingKeys, attention, padding_mask
from kv_kernels.integrations.batch import Batch, row_indices
from kv_kernels.integrations.decoder import decoder_config, layer_specs, use_attention
from kv_kernels.integrations.pool import Pool

__all__ = ["PagedCache", "PagedCacheLayer"]

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)


class PagedCacheLayer(CacheLayerMixin):
    """One layer of a ``PagedCache``: hands new keys on to attention, which stores them."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, index: int, config: Any) -> None:
        """Belong to a batch; a ``PagedCache`` makes its own."""
        super().__init__()
        self.is_initialized = True
        self.is_sliding = False
        self._batch, self._index, self._config = batch, index, config

    @property
    def storage(self) -> KVLayer:
        """Where the keys and values of this layer are."""
        return self._batch.pool.layers[self._index]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: storage was allocated when the cache was made."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass a layer's new keys and values on to the attention function, which stores them.

        Args:
            key_states: ``[B, H, Q, D]``, rotated.
            value_states: Like ``key_states``.
            args: Others that a model passes; not used.
            kwargs: The same.

        Returns:
            The keys, marked as pending, and the values.

        Raises:
            SpecError: The model no longer calls the attention function "kv".
            ShapeError: Other heads or sizes than the cache was made for.
        """
        if self._config._attn_implementation != NAME:
            raise SpecError(
                f'the model\'s attention must be "{NAME}" while it has a PagedCache, got '
                f'"{self._config._attn_implementation}"; call '
                f'model.set_attn_implementation("{NAME}")'
            )
        storage = self.storage
        sizes = {"H": storage.kv_heads, "D": storage.head_dim}
        hint = f"layer {self._index} of the cache was made from the model's configuration"
        check_tensor("key_states", key_states, "B H Q D", sizes, hint=hint)
        sizes |= {"B": key_states.shape[0], "Q": key_states.shape[2]}
        check_tensor("value_states", value_states, "B H Q D", sizes, hint=hint)
        return PendingKeys.of(key_states, self._batch, self._index), value_states

    def get_seq_length(self) -> int:
        """Return the columns that the model has seen, padding included, the same in all layers."""
        return self._batch.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns a mask covers, and 0: none is ever left out in front."""
        return self._batch.columns + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: what limits a sequence is the pool that all share."""
        return -1

    def _refuse_alone(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what would make one layer hold other tokens than the rest."""
        raise SpecError(
            f"layer {self._index} shares its sequences with all other layers of the cache; call "
            "the method of the same name of the PagedCache"
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_alone

    def _refuse_move(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to leave the device."""
        raise SpecError(
            f"layer {self._index} of a paged cache stays on {self.storage.device}, got a request "
            "to move it; use transformers' DynamicCache(offloading=True) where memory is short"
        )

    offload = prefetch = _refuse_move


class PagedCache(Cache):
    """Keys and values of a decoder's layers in blocks that sequences share.

    Making one sets the model's attention function to "kv", which stores and attends in it; runs
    without a ``PagedCache`` are then attended by transformers' "sdpa". It holds one batch of rows,
    each a sequence of its own without its padding, and any number of requests that ``pack`` names.
    Storage is allocated once, for all sequences together, and never moves.

    Attributes:
        layers: One ``PagedCacheLayer`` for each layer of the model.

    Example:
        ``model.generate(**inputs, cache=PagedCache(model, format=KVFormat.INT8))``
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        format: KVFormat | None = None,
        k_format: KVFormat | None = None,
        v_format: KVFormat | None = None,
        blocks: int = 1024,
        block_size: int = 16,
        sequences: int = 64,
        backend: str | None = None,
        checked: bool = False,
    ) -> None:
        """Allocate storage beside a model and tie the two together.

        Args:
            model: A decoder with grouped, multi-query or multi-head attention, full or in a
                sliding window, that calls attention through transformers' interface. Its attention
                function is set.
            format: How keys and values are stored; by default in the dtype of the model.
            k_format: How keys are stored, where that differs.
            v_format: How values are stored, where that differs.
            blocks: P, blocks of the pool, of which one is reserved.
            block_size: N, tokens of a block.
            sequences: Rows, or requests, that one pass may have.
            backend: Row of the kernel table to use; by default the first that fits.
            checked: Let kernels read slots, tables and lengths and refuse wrong ones. Slow.

        Raises:
            NoKernelError: The model is of another kind; the message says which.
            SpecError: A size is below 1, or ``blocks`` below 2.
            DtypeError: A format is not a ``KVFormat``.
        """
        if not isinstance(model, PreTrainedModel):
            raise DtypeError(
                f"model must be a transformers PreTrainedModel, got {type(model).__name__}; pass "
                "the model itself, not its configuration"
            )
        config = decoder_config(model)
        blocks = check_int("blocks", blocks, minimum=2)
        if format is None and (k_format is None or v_format is None):
            format = KVFormat.of(model.dtype)
        formats = {"format": format, "k_format": k_format, "v_format": v_format}
        specs = layer_specs(config, block_size=block_size, **formats)
        storage = [KVLayer.paged(spec, blocks=blocks, device=model.device) for spec in specs]
        table = SequenceTable(storage, sequences=sequences, max_blocks=blocks - 1)
        use_attention(model, config, NAME)
        self._adopt(Pool(storage, table, backend, checked), config)

    def _adopt(self, pool: Pool, config: Any) -> None:
        self._pool, self._config, self._batch = pool, config, Batch(pool)
        layers = [PagedCacheLayer(self._batch, at, config) for at in range(len(pool.layers))]
        super().__init__(layers=layers)
        # not freed right here: garbage is collected at any time, also while the table changes
        lost = weakref.finalize(self, pool.orphans.append, self._batch.rows)
        lost.atexit = False

    @property
    def table(self) -> SequenceTable:
        """Every sequence of the pool: to free, fork, truncate or look up requests of ``pack``."""
        return self._pool.table

    @property
    def storage(self) -> list[KVLayer]:
        """Keys and values of each layer."""
        return self._pool.layers

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and scales of all layers."""
        return sum(layer.nbytes for layer in self.storage)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        return sum(layer.spec.bytes_per_token for layer in self.storage)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first pass."""
        return len(self._batch.rows) or -1

    def __repr__(self) -> str:
        """Return layers, storage and rows."""
        return (
            f"PagedCache({len(self.layers)} layers of {self.storage[0]}, "
            f"rows={len(self._batch.rows)}, columns={self._batch.columns})"
        )

    def fork(self, rows: int | None = None) -> Self:
        """Return a cache that goes on from what this one holds, in the same blocks.

        What both hold is stored once. A block is copied when one of them writes to it, and blocks
        return to the pool when the last cache that has them is reset or gone.

        Args:
            rows: Let the only row of this batch begin that many rows; by default every row begins
                one.

        Raises:
            SpecError: ``rows`` is below 1, or the batch does not have exactly one row.
        """
        ours = self._batch
        if rows is not None and len(ours.rows) != 1:
            raise SpecError(
                f"fork(rows={rows}) needs a cache of one row, got {len(ours.rows)}; prefill the "
                "common prefix once with a batch of one, or leave rows out"
            )
        count = len(ours.rows) if rows is None else check_int("rows", rows, minimum=1)
        forked: Self = type(self).__new__(type(self))
        forked._adopt(self._pool, self._config)
        forked._batch.go_on_from(ours, list(range(count)) if rows is None else [0] * count)
        return forked

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return ``fork()``: independent contents, without copying what neither changes."""
        return self.fork()

    def pack(self, requests: Mapping[Hashable, Sequence[int] | Tensor]) -> dict[str, Any]:
        """Prepare one pass over new tokens of several requests, without padding.

        Every token gets a slot here. Full blocks at the start of a new request that another one
        has stored already are shared, and their tokens are left out of the pass.

        Args:
            requests: New token ids of each request, all of its prompt if it is new. A request goes
                on until ``table.free(request)``.

        Returns:
            Arguments for the model, for one pass: ``input_ids`` and ``position_ids`` ``[1, T]``,
            ``cache``, and ``logits_to_keep``, so that ``logits[0, i]`` belongs to the last token
            of request i. If another pass comes first, these tokens are taken back.

        Raises:
            SpecError: There are no requests, or one without tokens.
            DtypeError: Token ids are not integers on the CPU.
            CapacityError: Too many requests for one pass, or too few free blocks. Nothing has
                changed.
        """
        pool, device = self._pool, self.storage[0].device
        ids = {request: token_ids(f"ids of {request!r}", new) for request, new in requests.items()}
        empty = [request for request, new in ids.items() if not len(new)]
        if empty or not ids:
            raise SpecError(
                f"requests must have tokens, got none for {empty or 'any'}; leave out those that "
                "have nothing new"
            )
        pool.settle()
        forward = pool.start(ids)
        step = forward.step
        assert step is not None
        new = [tokens[step.reused.get(request, 0) :] for request, tokens in ids.items()]
        last = np.cumsum([len(tokens) for tokens in new]) - 1
        forward.shape = (1, int(last[-1]) + 1)
        # a cache of its own, so that no other pass can be taken for this one
        packed: Self = type(self).__new__(type(self))
        packed._adopt(pool, self._config)
        packed._batch.packed = forward
        return {
            "input_ids": torch.from_numpy(np.concatenate(new)).to(device)[None],
            "position_ids": step.positions.clone()[None],
            "cache": packed,
            "use_cache": True,
            "logits_to_keep": torch.from_numpy(last).to(device),
        }

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of the batch; a negative number, as transformers counts."""
        count = check_int("tokens_to_remove", tokens_to_remove)
        if count > 0:
            raise SpecError(
                f"tokens_to_remove must be at most 0, got {count}; pass -{count} to remove that "
                "many columns"
            )
        self._batch.crop(-count)

    def reset(self) -> None:
        """Give the blocks of the batch back; requests of ``pack`` and other forks stay."""
        self._batch.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what row ``beam_idx[i]`` holds. Waits for the device."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; one that is named twice is forked."""
        self._batch.take(row_indices(indices, len(self._batch.rows)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row begin ``repeats`` rows, which share its blocks."""
        count = check_int("repeats", repeats, minimum=1)
        self._batch.take([at for at in range(len(self._batch.rows)) for _ in range(count)])
