"""A hybrid cache for Hugging Face's DeepSeek-V4: requests of any lengths in one pass."""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import numpy as np
import torch
from kv_core.checks import check_int
from kv_core.errors import DtypeError, NoKernelError, RollbackTooDeep, SpecError
from kv_core.hybrid.handle import LayerCacheHandle
from kv_core.hybrid.keys import KeyFormat
from kv_core.hybrid.manager import KVCacheManager
from kv_core.hybrid.rows import RowFormat
from kv_core.hybrid.spec import Compression, HybridSpec, Which
from kv_core.prefixes import token_ids
from torch import Tensor

try:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
        DeepseekV4Attention,
        DeepseekV4PreTrainedModel,
        apply_rotary_pos_emb,
    )
except ImportError as error:
    raise ImportError(
        f"kv_kernels.integrations.deepseek_v4 needs transformers 5.24 or newer ({error}); "
        "pip install kv-kernels[transformers]"
    ) from error

from kv_kernels.ops.hybrid import HybridKernels
from kv_kernels.ops.hybrid_attention import hybrid_attention
from kv_kernels.ops.indexer_topk import indexer_topk

__all__ = ["HybridCache", "hybrid_spec"]

_log = logging.getLogger("kv_kernels")
_INDEXED, _PLAIN = "compressed_sparse_attention", "heavily_compressed_attention"
_LENGTHENING = ("dynamic", "longrope")  # whose angles change with the length of a sequence
_FEWEST_BLOCK_TOKENS = 256


def hybrid_spec(model: PreTrainedModel, *, draft: int = 1, **options: Any) -> HybridSpec:
    """Return the cache spec of a DeepSeek-V4 model, read from its configuration.

    Args:
        model: Any DeepSeek-V4 model of transformers.
        draft: Most tokens of a speculative run; rings are as much longer.
        options: Any field of ``HybridSpec`` but those that the model decides.

    Raises:
        NoKernelError: The model is of another kind; the message says which.
        SpecError: Sizes that do not fit each other.
        DtypeError: Not a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise DtypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; pass the "
            "model itself, not its configuration"
        )
    if reason := _refusal(model):
        raise NoKernelError(f"{type(model).__name__} {reason}")
    config = model.config
    rates = {name: config.compress_rates[name] for name in (_INDEXED, _PLAIN)}
    ratios = tuple(rates.get(layer_type, 0) for layer_type in config.layer_types)
    kinds = (
        Compression(ratio=rates[_INDEXED], overlap=True, indexer=True),
        Compression(ratio=rates[_PLAIN]),
    )
    used = tuple(kind for kind in kinds if kind.ratio in ratios)
    unit = math.lcm(*(kind.ratio for kind in used))
    settings: dict[str, Any] = {
        "block_tokens": -(-_FEWEST_BLOCK_TOKENS // unit) * unit,
        "ratios": ratios,
        "kinds": used,
        "head_dim": config.head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "window": config.sliding_window,
        "index_dim": config.index_head_dim,
    }
    if given := sorted(set(options) & (set(settings) - {"block_tokens"})):
        raise SpecError(
            f"options must leave out what the model decides, got {', '.join(given)}; pass formats "
            "and block_tokens only"
        )
    return HybridSpec(**settings | options).for_draft(draft)


def _refusal(model: PreTrainedModel) -> str | None:
    if not isinstance(model, DeepseekV4PreTrainedModel):
        return "is not a DeepSeek-V4 model of transformers; use PagedCache or its own DynamicCache"
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        return (
            f"is spread over the devices {sorted(map(str, devices))}; a cache lives on one, load "
            "the model there"
        )
    for label, kind in model.base_model.rotary_emb.rope_type.items():
        if kind in _LENGTHENING:
            return (
                f"has rope_type {kind!r} for {label!r} layers, whose angles change as a sequence "
                "grows, and rows are stored rotated; use transformers' own DynamicCache"
            )
    return None


class HybridCache(Cache):
    """What a DeepSeek-V4 model remembers of its requests: windows, entries and indexer keys.

    Making one lets the attention of this model, and of no other, run on a ``HybridCache`` that is
    passed to it; with any other cache, or none, it does what it did before. Requests are named by
    the caller and of any length; ``pack`` puts their new tokens into one row.

    Attributes:
        manager: Slots and blocks: to free, fork, snapshot or roll back requests, and for stats.
        spec: Sizes and formats.

    Example:
        ``logits = model(**cache.pack({"a": prompt, "b": [next_token]})).logits``
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        row_format: RowFormat = RowFormat.FP8,
        key_format: KeyFormat = KeyFormat.MXFP4,
        slots: int = 64,
        blocks: int = 1024,
        max_tokens: int = 8192,
        draft: int = 1,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        """Allocate storage beside a model and tie the two together.

        Args:
            model: A DeepSeek-V4 model of transformers, on one device.
            row_format: How rows and entries are stored.
            key_format: How indexer keys are stored. Where they are quantised, keys and queries are
                turned by a Hadamard matrix first if it exists, which spreads outliers.
            slots: Requests that can be served at once.
            blocks: Blocks of the pool, of which one is reserved.
            max_tokens: Most tokens of a pass.
            draft: Most tokens of a speculative run.
            backend: Row of the kernel table to use; by default the first that fits.
            options: Other fields of ``HybridSpec``: ``block_tokens``, ``row_group``, ``layout`` and
                ``key_global_scale``.

        Raises:
            NoKernelError: The model is of another kind; the message says which.
            SpecError: A size is out of range, or sizes do not fit each other.
            DtypeError: Not a transformers model, or a format of another type.
        """
        super().__init__(layers=[])
        formats = {"row_format": row_format, "key_format": key_format}
        self.spec = hybrid_spec(model, draft=draft, **formats, **options)
        blocks = check_int("blocks", blocks, minimum=2)
        room = (blocks - 1) * self.spec.block_tokens
        self.manager = KVCacheManager(
            self.spec, slots=slots, blocks=blocks, device=model.device,
            ops=HybridKernels(backend), max_tokens=max_tokens,
            max_len=min(room, model.config.max_position_embeddings),
        )  # fmt: skip
        self._backend = backend
        self._rotary = model.base_model.rotary_emb
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}
        self._hadamard = _hadamard(self.spec, model.device)
        self._handles: list[LayerCacheHandle] = []  # of the open pass
        self._attended: set[int] = set()
        self._is_draft = False
        for layer in model.base_model.layers:
            # on the instance: nothing that other models share is touched
            layer.self_attn.forward = MethodType(_attention, layer.self_attn)

    def __repr__(self) -> str:
        """Return what the manager holds."""
        return f"HybridCache({self.manager!r})"

    def pack(
        self,
        requests: Mapping[Hashable, Sequence[int] | Tensor],
        *,
        every_logit: bool = False,
        speculative: bool = False,
    ) -> dict[str, Any]:
        """Prepare one pass over new tokens of several requests, without padding.

        Args:
            requests: New token ids of each request, all of its prompt if it is new. A request goes
                on until ``manager.free(request)``.
            every_logit: Ask the model for the logits of all tokens, request after request.
            speculative: Whether tokens may be taken back: the pass is then over with ``commit``
                and not with the model's last layer. All logits are asked for.

        Returns:
            Arguments for the model: ``input_ids`` and ``position_ids`` ``[1, T]``, ``cache``,
            ``attention_mask`` (that there is none to make), and ``logits_to_keep``, so that
            ``logits[0, i]`` belongs to the last token of request i.

        Raises:
            SpecError: There are no requests, or one without tokens; or a speculative pass waits for
                its ``commit``.
            DtypeError: Token ids are not integers on the CPU.
            RollbackTooDeep: An earlier pass broke off and cannot be taken back; the message says
                which request has to be freed. Nothing has changed.
            CapacityError: Too many tokens or requests for one pass, or too few slots or blocks.
                Nothing has changed.
        """
        ids = {request: token_ids(f"ids of {request!r}", new) for request, new in requests.items()}
        empty = [request for request, new in ids.items() if not len(new)]
        if empty or not ids:
            raise SpecError(
                f"requests must have tokens, got none for {empty or 'any'}; leave out those that "
                "have nothing new"
            )
        self._settle()
        manager, known = self.manager, set(self.manager.requests)
        owners: list[Hashable] = []
        positions: list[int] = []
        for request, new in ids.items():
            start = manager.length(request) if request in known else 0
            owners += [request] * len(new)
            positions += range(start, start + len(new))
        self._handles = manager.acquire(owners, positions, speculative=speculative)
        self._attended, self._is_draft = set(), speculative
        self._extend_tables(max(positions) + 1)
        device = manager.device
        last = np.cumsum([len(new) for new in ids.values()]) - 1
        keep = 0 if every_logit or speculative else torch.from_numpy(last).to(device)
        return {
            "input_ids": torch.from_numpy(np.concatenate(list(ids.values()))).to(device)[None],
            "position_ids": torch.tensor([positions], device=device),
            # as a dictionary it is taken for one that was made already
            "attention_mask": {"sliding_attention": None},
            "cache": self,
            "use_cache": True,
            "logits_to_keep": keep,
        }

    def commit(self, accepted: Mapping[Hashable, int] | None = None) -> None:
        """End a speculative pass.

        Args:
            accepted: How many of its tokens each request keeps; one that is not named keeps all.

        Raises:
            SpecError: No speculative pass is open, or the model did not run on it to its end; or a
                number is out of range.
            UnknownRequest: A request is not in the pass.
            RollbackTooDeep: A request would keep too little. The pass stays open.
        """
        if not self._handles or not self._is_complete:
            raise SpecError(
                "commit() must follow a speculative pass, got "
                f"{'one that the model did not end' if self._handles else 'none'}; call "
                "model(**cache.pack(…, speculative=True)) first"
            )
        self.manager.commit(self._handles, accepted)
        self._handles = []

    @property
    def _is_complete(self) -> bool:
        return len(self._attended) == self.spec.layers

    def _settle(self) -> None:
        """Take back a pass that did not reach the last layer."""
        if not self._handles:
            return
        if self._is_complete:
            raise SpecError(
                "a speculative pass must be ended before the next, got one that is open; call "
                "commit(accepted={…})"
            )
        try:
            self.manager.abort(self._handles)
        except RollbackTooDeep as error:
            raise RollbackTooDeep(
                "a forward pass broke off after it had written over rows that its requests need: "
                f"{error}; end that request with manager.free() and run its tokens anew, and the "
                "others can go on"
            ) from error
        if self._attended:
            _log.warning(
                "a forward pass ended after %d of %d layers; its tokens are taken back",
                len(self._attended),
                self.spec.layers,
            )
        self._handles = []

    def _extend_tables(self, length: int) -> None:
        """Make angles for positions below ``length``, twice as many as before where it is more."""
        held = next((len(cos) for cos, _ in self._tables.values()), 0)
        if length <= held:
            return
        count = min(max(length, 2 * held, self.spec.block_tokens), self.manager.max_len)
        device = self.manager.device
        positions, like = torch.arange(count, device=device)[None], torch.zeros(1, device=device)
        for label in self._rotary.layer_types:
            cos, sin = self._rotary(like, position_ids=positions, layer_type=label)
            self._tables[label] = cos[0], sin[0]

    def _attend(self, module: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Run one layer's attention over ``x`` ``[T, hidden]``; return ``[T, Hq, D]``.

        The projections are the model's; what its cache and its dense masks do is done here.
        """
        layer = module.layer_idx
        handle, table = self._handles[layer], self._tables[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(x))
        q = module.q_b_norm(module.q_b_proj(residual).unflatten(1, (-1, module.head_dim)))
        q = apply_rotary_pos_emb(q, *angles)
        row = apply_rotary_pos_emb(module.kv_norm(module.kv_proj(x))[:, None], *angles)[:, 0]
        made: dict[Which, tuple[Tensor, Tensor]] = {}
        classical, picked, kind = None, None, handle.kind
        if kind is not None:
            parts: dict[Which, Any] = {"main": module.compressor}
            if kind.indexer:
                parts["index"] = module.compressor.indexer
            entries: dict[Which, Tensor] = {}
            for which, part in parts.items():
                bias = part.position_bias[handle.step.positions.long() % kind.ratio]
                made[which] = part.kv_proj(x), part.gate_proj(x) + bias
                norm = part.kv_norm
                entries[which] = handle.compress(
                    which, *made[which], norm.weight, norm.variance_epsilon, *table
                )
            keys = entries.get("index")
            handle.flush_compression(entries["main"], None if keys is None else self._spread(keys))
            classical = handle.read_classical_view()
            if kind.indexer:
                indexer = module.compressor.indexer
                iq = indexer.q_b_proj(residual).unflatten(1, (-1, indexer.head_dim))
                iq = self._spread(apply_rotary_pos_emb(iq, *angles))
                picked, _ = indexer_topk(
                    handle.read_indexer_view(), iq, indexer.scorer.weights_proj(x),
                    k=indexer.index_topk, quantize_query=self.spec.key_format.is_quantized,
                    backend=self._backend,
                )  # fmt: skip
        out = hybrid_attention(
            q, row, handle.read_swa_view(), classical, picked, module.sinks,
            scale=module.scaling, cos=table[0], sin=table[1], backend=self._backend,
        )  # fmt: skip
        handle.write_swa(row)
        for which, pair in made.items():
            handle.append_tail(which, *pair)
        self._attended.add(layer)
        if self._is_complete and not self._is_draft:
            self.manager.commit(self._handles)
            self._handles = []
        return out

    def _spread(self, rows: Tensor) -> Tensor:
        """Turn keys or queries by the Hadamard matrix, which their products do not notice."""
        return rows if self._hadamard is None else (rows.float() @ self._hadamard).to(rows.dtype)

    def _check(self, module: Any, hidden_states: Tensor, mask: object, options: Any) -> None:
        """Refuse a pass that is not the one that ``pack`` prepared."""
        name = type(module).__name__
        if options.get("output_attentions"):
            raise NoKernelError(
                f"{name} asks for attention weights, which are never formed; leave "
                "output_attentions out, or use transformers' own DynamicCache"
            )
        if module.training and module.attention_dropout:
            raise NoKernelError(
                f"{name} asks for dropout {module.attention_dropout}, which has no kernel here; "
                "call model.eval()"
            )
        if not self._handles or module.layer_idx in self._attended:
            raise SpecError(
                "the model must run once on what pack() returned, got "
                f"{'a second run' if self._handles else 'a run without it'}; call "
                "model(**cache.pack({…}))"
            )
        wanted = [1, self._handles[0].step.num_tokens]
        if list(hidden_states.shape[:2]) != wanted or mask is not None:
            extra = " with an attention_mask" if mask is not None else ""
            raise SpecError(
                f"the model must run on the {wanted} tokens that pack() returned, got "
                f"{list(hidden_states.shape[:2])}{extra}; call model(**cache.pack({{…}}))"
            )

    def _refuse_rows(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what takes the requests for rows of one length."""
        raise NoKernelError(
            "generate() has no kernel with a HybridCache, for it wants one length for all rows; "
            "call model(**cache.pack({…})) for each step, and the manager to free or fork requests"
        )

    get_seq_length = get_mask_sizes = get_max_length = update = _refuse_rows
    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse_rows


def _attention(
    self: DeepseekV4Attention,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in a ``HybridCache``, or do what the class does: the ``forward`` of tied layers."""
    if not isinstance(cache, HybridCache):
        found: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, position_ids, attention_mask, cache, **kwargs
        )
        return found
    cache._check(self, hidden_states, attention_mask, kwargs)
    cos, sin = position_embeddings[self.rope_layer_type]
    out = cache._attend(self, hidden_states[0], (cos[0], sin[0]))
    grouped = self.o_a_proj(out.reshape(1, out.shape[0], self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(grouped), None


def _hadamard(spec: HybridSpec, device: torch.device) -> Tensor | None:
    """Return the orthonormal ``[I, I]`` matrix of Sylvester's construction, if keys need one."""
    size = spec.index_dim
    if not (spec.has_indexer and spec.key_format.is_quantized) or size & (size - 1):
        return None
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)
