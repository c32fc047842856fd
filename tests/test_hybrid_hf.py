"""T1: the hybrid cache against Hugging Face's DeepSeek-V4, request by request.

Hugging Face runs each request alone and without a cache. Ours runs all of them together, in ragged
steps over memory full of NaN; attention and top-k are the plain ones of kv-core's tests.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

sys.path.insert(0, str(Path(__file__).parent.parent / "packages" / "kv-core" / "tests"))
from hybrid_oracle import fill, hybrid_attention, indexer_topk, tokens_of  # noqa: E402
from kv_core import (  # noqa: E402
    Compression,
    HybridSpec,
    KeyFormat,
    KVCacheManager,
    LayerCacheHandle,
    RowFormat,
)

LENGTHS = {"a": 75, "b": 41, "c": 58}
STEPS = [
    {"a": 20, "b": 3},
    {"b": 1, "a": 1, "c": 30},
    {"c": 1, "a": 1, "b": 1},
    {"a": 37, "c": 2, "b": 7},
    {"b": 28, "c": 1},
    {"a": 1, "c": 17, "b": 1},
    {"c": 7, "a": 14},
    {"a": 1},
]
WINDOW, TOP_K = 8, 3
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=97,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(TYPES),
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.25,
        q_lora_rank=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=TYPES,
        mlp_layer_types=["moe"] * len(TYPES),
        compress_rates=dict(RATES),
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=TOP_K,
        max_position_embeddings=512,
        initializer_range=0.2,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    config.index_head_dim = 16
    made = transformers.DeepseekV4ForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith(("sinks", "position_bias")):  # zeros otherwise
            torch.nn.init.normal_(parameter)
    return made


def spec() -> HybridSpec:
    kinds = {
        "compressed_sparse_attention": Compression(ratio=4, overlap=True, indexer=True),
        "heavily_compressed_attention": Compression(ratio=16),
    }
    return HybridSpec(
        ratios=tuple(RATES.get(name, 0) for name in TYPES),
        kinds=tuple(kinds.values()),
        head_dim=32,
        rope_dim=8,
        window=WINDOW,
        block_tokens=16,
        row_format=RowFormat.FP32,
        key_format=KeyFormat.FP32,
        index_dim=16,
    )


def tables(rotary: Any, label: str) -> tuple[Tensor, Tensor]:
    positions = torch.arange(128)[None]
    cos, sin = rotary(torch.zeros(1), positions, layer_type=label)
    return cos[0], sin[0]


class Cached:
    """Stands in for one layer's attention, over the handle of the open step."""

    def __init__(self, module: Any, current: Callable[[], LayerCacheHandle]) -> None:
        self.module, self.current = module, current
        self.outputs: list[Tensor] = []

    def __call__(self, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        m, h, x = self.module, self.current(), hidden_states[0]
        cos, sin = (table[0] for table in position_embeddings[m.rope_layer_type])
        rotate = v4.apply_rotary_pos_emb
        residual = m.q_a_norm(m.q_a_proj(x))
        q = rotate(m.q_b_norm(m.q_b_proj(residual).view(len(x), -1, m.head_dim)), cos, sin)
        kv = rotate(m.kv_norm(m.kv_proj(x))[:, None], cos, sin)[:, 0]
        classical, picked, pairs = None, None, {}
        if h.kind is not None:
            compressor = m.compressor
            parts = {"main": compressor}
            if h.kind.indexer:
                parts["index"] = compressor.indexer
            new = {}
            for name, part in parts.items():
                bias = part.position_bias[h.step.positions % h.kind.ratio]
                pairs[name] = part.kv_proj(x), part.gate_proj(x) + bias
                norm, table = part.kv_norm, tables(part.rotary_emb, part.rope_layer_type)
                weight, eps = norm.weight, norm.variance_epsilon
                new[name] = h.compress(name, *pairs[name], weight, eps, *table)
            h.flush_compression(new["main"], new.get("index"))
            classical = h.read_classical_view()
            if h.kind.indexer:
                indexer = compressor.indexer
                iq = indexer.q_b_proj(residual).view(len(x), -1, indexer.head_dim)
                weights = indexer.scorer.weights_proj(x)
                picked, _ = indexer_topk(
                    h.read_indexer_view(), rotate(iq, cos, sin), weights, TOP_K
                )
        out = hybrid_attention(q, kv, h.read_swa_view(), classical, picked, m.sinks)
        h.write_swa(kv)
        for name, pair in pairs.items():
            h.append_tail(name, *pair)
        out = rotate(out, cos, -sin)
        self.outputs.append(out)
        grouped = m.o_a_proj(out.reshape(1, len(x), m.config.o_groups, -1)).flatten(2)
        return m.o_b_proj(grouped), None


@dataclass
class Alone:
    """What Hugging Face makes of one request.

    Attributes:
        logits: Without any cache.
        outputs: Of the attention of each layer, without any cache.
        cache: Its own cache after the whole prompt.
        error: How far its own cache, token by token, is from ``logits``.
    """

    logits: Tensor
    outputs: list[Tensor]
    cache: Any
    error: float


def prompts() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randint(2, 97, (n,), generator=g) for name, n in LENGTHS.items()}


@pytest.fixture(scope="module")
@torch.no_grad()
def alone(model: Any) -> dict[str, Alone]:
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    found = {}
    for request, ids in prompts().items():
        outputs: list[Tensor] = []
        hooks = [
            layer.self_attn.o_a_proj.register_forward_pre_hook(
                lambda _, args, into=outputs: into.append(args[0][0].flatten(1))
            )
            for layer in model.model.layers
        ]
        logits = model(ids[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        whole, single = (transformers.DynamicCache(config=model.config) for _ in range(2))
        model(ids[None], **{name: whole})
        steps = [model(token[None, None], **{name: single}).logits[0] for token in ids]
        error = (torch.cat(steps) - logits).abs().max().item()
        found[request] = Alone(logits, outputs, whole, error)
    return found


@pytest.fixture
def cached(
    model: Any, alone: dict[str, Alone]
) -> Iterator[tuple[Any, KVCacheManager, list[Cached]]]:
    manager = KVCacheManager(spec(), slots=4, blocks=24)
    fill(manager, math.nan)
    layers = model.model.layers
    stands: list[Cached] = []
    for index, layer in enumerate(layers):
        stand = Cached(layer.self_attn, lambda index=index: manager._handles[index])
        layer.self_attn.forward = stand
        stands.append(stand)
    yield model, manager, stands
    for layer in layers:
        del layer.self_attn.forward


@torch.no_grad()
def together(
    model: Any, manager: KVCacheManager, stands: list[Cached]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Run the ragged schedule; return logits and attention outputs by request."""
    ids, logits = prompts(), {name: [] for name in LENGTHS}
    outputs: dict[str, list[list[Tensor]]] = {name: [[] for _ in stands] for name in LENGTHS}
    for step in STEPS:
        owners, positions = tokens_of(manager, list(step.items()))
        tokens = torch.stack([ids[o][p] for o, p in zip(owners, positions, strict=True)])
        handles = manager.acquire(owners, positions)
        found = model(tokens[None], position_ids=torch.tensor([positions]), use_cache=False)
        manager.commit(handles)
        counts = list(step.values())
        for name, part in zip(step, found.logits[0].split(counts), strict=True):
            logits[name].append(part)
        for layer, stand in enumerate(stands):
            for name, part in zip(step, stand.outputs.pop().flatten(1).split(counts), strict=True):
                outputs[name][layer].append(part)
    return (
        {name: torch.cat(parts) for name, parts in logits.items()},
        {name: [torch.cat(parts) for parts in layers] for name, layers in outputs.items()},
    )


def test_ragged_batches_equal_each_request_alone(
    cached: tuple[Any, KVCacheManager, list[Cached]], alone: dict[str, Alone]
) -> None:
    logits, outputs = together(*cached)
    assert {name: cached[1].length(name) for name in LENGTHS} == LENGTHS
    for name, expected in alone.items():
        for mine, theirs in zip(outputs[name], expected.outputs, strict=True):
            close(mine, theirs)
        # twice what Hugging Face's own cache errs
        assert (logits[name] - expected.logits).abs().max().item() <= 2 * expected.error


def test_states_equal_those_of_hugging_faces_cache(
    cached: tuple[Any, KVCacheManager, list[Cached]], alone: dict[str, Alone]
) -> None:
    """Window rows, entries, keys, open windows and overlaps of every request."""
    together(*cached)
    manager = cached[1]
    for name, expected in alone.items():
        record = manager._table.records[name]
        layers = zip(expected.cache.layers, manager.states, manager.pools, strict=True)
        for theirs, state, pool in layers:
            slot, length = record.slot, record.length
            window = [p % state.spec.ring for p in range(length - WINDOW + 1, length)]
            close(state.ring.codes[slot, window], theirs.keys[0, 0])
            if pool is None:
                continue
            ratio, kind = pool.kind.ratio, pool.kind
            stores = {"main": ("compressor", pool.entries), "index": ("indexer", pool.keys)}
            for which, tail in state.tails.items():
                label, store = stores[which]
                assert store is not None
                rows = store.codes[record.blocks].flatten(0, 1)[: length // ratio]
                close(rows, theirs.compressed_kv[label][0])
                closed = length // ratio * ratio
                open_rows = [p % kind.tail for p in range(closed, length)]
                close(tail[slot, open_rows, 0], theirs.buffer_kv[label][0])
                if kind.overlap:
                    last = [p % kind.tail for p in range(closed - ratio, closed)]
                    value, gate = tail[slot, last, :, : tail.shape[-1] // 2].unbind(1)
                    close(value, theirs.overlap_kv[label][0])
                    close(gate, theirs.overlap_gate[label][0])


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
