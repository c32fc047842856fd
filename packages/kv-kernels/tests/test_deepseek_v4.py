"""Hugging Face's DeepSeek-V4 on a hybrid cache: ragged batches, each request as if alone."""

import copy
import logging
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from kv_core import (
    DtypeError,
    KeyFormat,
    KVError,
    NoKernelError,
    RingTooSmall,
    RollbackTooDeep,
    RowFormat,
    SpecError,
)
from kv_kernels.testing import fill_garbage
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.models.deepseek_v4")

from kv_kernels.integrations.deepseek_v4 import HybridCache, hybrid_spec  # noqa: E402

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
TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]
PLAIN: dict[str, Any] = {"row_format": RowFormat.FP32, "key_format": KeyFormat.FP32}
QUANTISED: dict[str, Any] = {"row_group": 8}  # FP8 rows and MXFP4 keys
ROOM: dict[str, Any] = {"slots": 4, "blocks": 24, "block_tokens": 16}


def config(**changes: Any) -> Any:
    """A small model whose indexer never ties: with 32 heads no score is exactly zero."""
    settings: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 32, "partial_rotary_factor": 0.25,
        "q_lora_rank": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "layer_types": TYPES,
        "mlp_layer_types": ["moe"] * 4, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 16,
        "index_n_heads": 32, "index_head_dim": 32, "index_topk": 3,
        "compress_rates": {TYPES[1]: 4, TYPES[2]: 16}, "max_position_embeddings": 512,
        "initializer_range": 0.2, "attn_implementation": "eager",
        "experts_implementation": "eager",
    }  # fmt: skip
    return transformers.DeepseekV4Config(**settings | changes)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    made = transformers.DeepseekV4ForCausalLM(config()).eval()
    for name, parameter in made.named_parameters():
        if name.endswith(("sinks", "position_bias")):  # zeros otherwise
            torch.nn.init.normal_(parameter)
    return made.requires_grad_(False)


@pytest.fixture(autouse=True)
def _untie(model: Any) -> Iterator[None]:
    """Leave the model as it was: what a cache ties lies on the layers themselves."""
    yield
    for layer in model.model.layers:
        layer.self_attn.__dict__.pop("forward", None)


def prompts() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randint(2, 97, (n,), generator=g) for name, n in LENGTHS.items()}


@pytest.fixture(scope="module")
def alone(model: Any) -> dict[str, Tensor]:
    """Logits of each request by itself, without any cache."""
    return {name: model(ids[None], use_cache=False).logits[0] for name, ids in prompts().items()}


def together(model: Any, cache: HybridCache, steps: Any = STEPS) -> dict[str, Tensor]:
    """Run requests in ragged steps; return their logits."""
    rest = {name: list(ids) for name, ids in prompts().items()}
    logits: dict[str, list[Tensor]] = {name: [] for name in LENGTHS}
    for step in steps:
        new = {name: [int(rest[name].pop(0)) for _ in range(n)] for name, n in step.items()}
        found = model(**cache.pack(new, every_logit=True)).logits[0]
        for name, part in zip(new, found.split(list(step.values())), strict=True):
            logits[name].append(part)
    return {name: torch.cat(parts) for name, parts in logits.items()}


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((got[name] - wanted[name]).abs().max()) for name in LENGTHS)


def budget_of(model: Any, alone: dict[str, Tensor]) -> float:
    """Return twice what Hugging Face's own cache errs, token by token."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    single = transformers.DynamicCache(config=model.config)
    steps = [model(token[None, None], **{name: single}).logits[0] for token in prompts()["a"]]
    return 2 * float((torch.cat(steps) - alone["a"]).abs().max())


def test_ragged_batches_equal_each_request_alone(model: Any, alone: dict[str, Tensor]) -> None:
    """T1 with the whole model, over memory full of NaN."""
    budget = budget_of(model, alone)
    cache = HybridCache(model, **PLAIN, **ROOM)
    fill_garbage(cache.manager)
    assert difference(together(model, cache), alone) <= budget < 1e-4
    assert {name: cache.manager.length(name) for name in LENGTHS} == LENGTHS


def test_quantised_rows_and_keys_give_the_same_for_any_chunking(
    model: Any, alone: dict[str, Tensor]
) -> None:
    """C12 in the stored formats: what is attended is what is stored."""
    caches = [HybridCache(model, **QUANTISED, **ROOM) for _ in range(2)]
    for cache in caches:
        fill_garbage(cache.manager)
    ragged = together(model, caches[0])
    whole = together(model, caches[1], [{name: n} for name, n in LENGTHS.items()])
    assert difference(ragged, whole) <= budget_of(model, alone)
    for name, logits in alone.items():
        error = (ragged[name] - logits).abs().median()
        assert 0.001 * logits.std() < error < 0.5 * logits.std()
    assert caches[0].spec.row_format is RowFormat.FP8 and caches[0].spec.key_bytes == 17


def test_a_model_in_bf16_is_as_near_as_its_own_rounding(
    model: Any, alone: dict[str, Tensor]
) -> None:
    half = copy.deepcopy(model).bfloat16()
    for name, parameter in half.named_parameters():
        if name.endswith(("sinks", "position_bias", "norm.weight")):  # as checkpoints are loaded
            parameter.data = parameter.data.float()
    formats = {"row_format": RowFormat.BF16, "key_format": KeyFormat.BF16}
    found = together(half, HybridCache(half, **formats, **ROOM))
    for name, ids in prompts().items():
        theirs = half(ids[None], use_cache=False).logits[0].float()
        rounding = (theirs - alone[name]).abs().median()
        assert 0 < (found[name].float() - theirs).abs().median() <= 2 * rounding


def test_a_cache_made_for_one_model_leaves_others_alone(
    model: Any, alone: dict[str, Tensor]
) -> None:
    twin = copy.deepcopy(model)
    HybridCache(model, **PLAIN, **ROOM)
    assert "forward" not in twin.model.layers[0].self_attn.__dict__
    ids = prompts()["b"]
    for other in (model, twin, copy.deepcopy(model)):
        assert torch.equal(other(ids[None], use_cache=False).logits[0], alone["b"])


def test_last_logits_are_those_of_each_request(model: Any, alone: dict[str, Tensor]) -> None:
    cache = HybridCache(model, **PLAIN, **ROOM)
    logits = model(**cache.pack({name: ids[:30] for name, ids in prompts().items()})).logits[0]
    assert logits.shape[0] == 3
    for got, name in zip(logits, LENGTHS, strict=True):
        torch.testing.assert_close(got, alone[name][29], rtol=1e-4, atol=1e-4)


def test_drafts_are_verified_and_taken_back(model: Any, alone: dict[str, Tensor]) -> None:
    """T5 with the whole model: wrong drafts leave no trace."""
    cache = HybridCache(model, **PLAIN, **ROOM, draft=4)
    ids = prompts()["a"]
    model(**cache.pack({"a": ids[:21]}))
    done = 21
    for accepted in (1, 3, 4, 2, 1, 4, 4, 3):
        draft = ids[done : done + 4].clone()
        draft[accepted:] = 5
        found = model(**cache.pack({"a": draft}, speculative=True)).logits[0]
        wanted = alone["a"][done : done + accepted]
        torch.testing.assert_close(found[:accepted], wanted, rtol=1e-4, atol=1e-4)
        cache.commit({"a": accepted})
        done += accepted
    assert cache.manager.length("a") == done
    with pytest.raises(RingTooSmall, match=r"run of 5 tokens, got rings for 4"):
        cache.pack({"a": ids[:5]}, speculative=True)


def test_a_pass_that_broke_off_is_taken_back(
    model: Any, alone: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    cache = HybridCache(model, **PLAIN, **ROOM, draft=4)
    ids = prompts()["a"]
    model(**cache.pack({"a": ids[:9]}))
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**cache.pack({"a": [5, 5], "new": [7]}))
    hook.remove()
    assert cache.manager.length("a") == 9
    with caplog.at_level(logging.WARNING, "kv_kernels"):
        logits = model(**cache.pack({"a": ids[9:20]})).logits[0]
    assert "ended after 3 of 4 layers" in caplog.text
    assert cache.manager.requests == ("a",)
    torch.testing.assert_close(logits[0], alone["a"][19], rtol=1e-4, atol=1e-4)


def test_a_pass_that_broke_off_too_late_names_the_request_to_free(
    model: Any, alone: dict[str, Tensor]
) -> None:
    """Its ring had no room for both; other requests go on once it is gone."""
    cache = HybridCache(model, **PLAIN, **ROOM)
    ids = prompts()
    model(**cache.pack({"a": ids["a"][:40], "b": ids["b"][:20]}))
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**cache.pack({"a": ids["a"][40:50]}))
    hook.remove()
    for _ in range(2):
        with pytest.raises(RollbackTooDeep, match=r"'a'.*end that request with manager.free"):
            cache.pack({"b": ids["b"][20:30]})
    cache.manager.free("a")
    logits = model(**cache.pack({"b": ids["b"][20:30]})).logits[0]
    torch.testing.assert_close(logits[0], alone["b"][29], rtol=1e-4, atol=1e-4)


def test_published_sizes_come_from_the_configuration() -> None:
    """C13: 584 bytes a row and 3514.25 a token, from the schedule that the checkpoint has."""
    flash = config(
        layer_types=TYPES[:1] * 2 + TYPES[1:3] * 20 + TYPES[1:2], num_hidden_layers=43,
        mlp_layer_types=["moe"] * 43, head_dim=512, partial_rotary_factor=0.125,
        index_head_dim=128, sliding_window=128, compress_rates={TYPES[1]: 4, TYPES[2]: 128},
        hidden_size=8, q_lora_rank=4, moe_intermediate_size=4, num_attention_heads=2,
        o_lora_rank=2, n_routed_experts=2, vocab_size=8,
    )  # fmt: skip
    with torch.device("meta"):
        spec = hybrid_spec(transformers.DeepseekV4ForCausalLM(flash))
    assert spec.row_bytes == 584 and spec.bytes_per_token() == 3514.25
    assert spec.block_tokens == 256 and spec.window == spec.ring == 128


def dynamic() -> Any:
    made = transformers.DeepseekV4ForCausalLM(config(num_hidden_layers=1, layer_types=TYPES[:1]))
    made.model.rotary_emb.rope_type["compress"] = "longrope"
    return made


def llama() -> Any:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    )


def spread() -> Any:
    made = transformers.DeepseekV4ForCausalLM(config(num_hidden_layers=1, layer_types=TYPES[:1]))
    made.hf_device_map = {"a": 0, "b": 1}
    return made


MODELS: dict[str, tuple[Any, dict[str, Any], type[KVError], str]] = {
    "a configuration": (
        config,
        {},
        DtypeError,
        "model must be a transformers PreTrainedModel, got DeepseekV4Config; pass the model itself",
    ),
    "another family": (
        llama,
        {},
        NoKernelError,
        "LlamaForCausalLM is not a DeepSeek-V4 model of transformers; use PagedCache",
    ),
    "two devices": (
        spread,
        {},
        NoKernelError,
        "DeepseekV4ForCausalLM is spread over the devices ['0', '1']; a cache lives on one",
    ),
    "angles that move": (
        dynamic,
        {},
        NoKernelError,
        "has rope_type 'longrope' for 'compress' layers, whose angles change as a sequence grows",
    ),
    "sizes of the model's": (
        lambda: transformers.DeepseekV4ForCausalLM(config()),
        {"window": 9, "head_dim": 3},
        SpecError,
        "options must leave out what the model decides, got head_dim, window; pass formats",
    ),
    "groups that do not divide": (
        lambda: transformers.DeepseekV4ForCausalLM(config()),
        {},
        SpecError,
        "head_dim - rope_dim must be a positive multiple of row_group=64 for FP8 rows, got 24",
    ),
    "one block": (
        lambda: transformers.DeepseekV4ForCausalLM(config()),
        PLAIN | {"blocks": 1},
        SpecError,
        "blocks must be at least 2, got 1",
    ),
}


@pytest.mark.parametrize(("make", "options", "kind", "message"), MODELS.values(), ids=MODELS)
def test_a_model_that_does_not_fit_is_refused_by_name(
    make: Any, options: dict[str, Any], kind: type[KVError], message: str
) -> None:
    made = make()
    with pytest.raises(kind) as caught:
        HybridCache(made, **options)
    assert message in str(caught.value)
    if isinstance(made, torch.nn.Module):
        assert all("forward" not in part.__dict__ for part in made.modules())


CALLS: dict[str, tuple[Any, type[KVError], str]] = {
    "without pack": (
        lambda model, cache, packed: (
            cache.manager.abort(cache._handles),
            cache._handles.clear(),
            model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]), cache=cache,
                  attention_mask={"none": None}),
        ),
        SpecError,
        "the model must run once on what pack() returned, got a run without it; call "
        "model(**cache.pack({…}))",
    ),
    "other tokens": (
        lambda model, cache, packed: model(
            **packed | {"input_ids": torch.ones(1, 3, dtype=torch.int64),
                        "position_ids": torch.arange(3)[None], "logits_to_keep": 0}
        ),
        SpecError,
        "the model must run on the [1, 4] tokens that pack() returned, got [1, 3]; call",
    ),
    "a mask": (
        lambda model, cache, packed: model(
            **packed | {"attention_mask": {"any": torch.ones(1, 1, 4, 4)}}
        ),
        SpecError,
        "got [1, 4] with an attention_mask; call model(**cache.pack({…}))",
    ),
    "generate": (
        lambda model, cache, packed: model.generate(
            torch.tensor([[1, 2]]), cache=cache, max_new_tokens=2
        ),
        NoKernelError,
        "generate() has no kernel with a HybridCache, for it wants one length for all rows; call "
        "model(**cache.pack({…})) for each step, and the manager to free or fork requests",
    ),
    "commit before the model ran": (
        lambda model, cache, packed: cache.commit(),
        SpecError,
        "commit() must follow a speculative pass, got one that the model did not end; call",
    ),
    "no tokens": (
        lambda model, cache, packed: cache.pack({"a": [], "b": [1]}),
        SpecError,
        "requests must have tokens, got none for ['a']; leave out those that have nothing new",
    ),
    "attention weights": (
        lambda model, cache, packed: model.model.layers[0].self_attn(
            torch.zeros(1, 4, 64), {}, None, None, cache, output_attentions=True
        ),
        NoKernelError,
        "DeepseekV4Attention asks for attention weights, which are never formed; leave",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), CALLS.values(), ids=CALLS)
def test_a_pass_that_does_not_fit_is_refused(
    model: Any, alone: dict[str, Tensor], call: Any, kind: type[KVError], message: str
) -> None:
    cache = HybridCache(model, **PLAIN, **ROOM)
    ids = prompts()["a"][:9]
    packed = cache.pack({"a": ids[:4]})
    with pytest.raises(kind) as caught:
        call(model, cache, packed)
    assert message in str(caught.value)
    logits = model(**cache.pack({"a": ids}, every_logit=True)).logits[0]
    torch.testing.assert_close(logits, alone["a"][:9], rtol=1e-4, atol=1e-4)


def test_an_open_draft_blocks_the_next_pass(model: Any) -> None:
    cache = HybridCache(model, **PLAIN, **ROOM, draft=3)
    with pytest.raises(SpecError, match="got none; call"):
        cache.commit()
    model(**cache.pack({"a": [3, 4]}, speculative=True))
    with pytest.raises(SpecError, match=r"got one that is open; call commit\(accepted"):
        cache.pack({"a": [5]})
    cache.commit({"a": 1})
    assert cache.manager.length("a") == 1
