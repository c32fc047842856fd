"""Hugging Face models on a paged cache: the same logits and tokens as on their own."""

import contextlib
import copy
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_core.errors import CapacityError, KVError, NoKernelError, SpecError
from kv_core.spec import KVFormat
from torch import Tensor

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers 5.24 or newer is not installed"
)

from kv_kernels.integrations import attention  # noqa: E402
from kv_kernels.integrations.batch import Batch  # noqa: E402
from kv_kernels.integrations.transformers import PagedCache  # noqa: E402

LOGITS = 1e-5  # largest difference in FP32 that section 4 of the specification allows
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
MODELS = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(num_hidden_layers=3, **SIZES)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=2, **SIZES | {"num_key_value_heads": 4})
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(num_hidden_layers=2, sliding_window=8, **SIZES)
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(  # tells its window to the mask only
        transformers.Qwen2MoeConfig(
            num_hidden_layers=2, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=8,
            layer_types=["sliding_attention"] * 2,
            **{key: size for key, size in SIZES.items() if key != "head_dim"},
        )
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            num_hidden_layers=4, query_pre_attn_scalar=17, attn_logit_softcapping=3.0,
            **SIZES | WINDOWS,
        )
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(num_hidden_layers=4, **SIZES | WINDOWS)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    """Models are only run here."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def make_model() -> Callable[[str], Any]:
    """Return a function that returns a model by name, always the same."""
    made: dict[str, Any] = {}

    def make(name: str = "qwen3") -> Any:
        if name not in made:
            torch.manual_seed(0)
            made[name] = MODELS[name]().eval()
            for weight in made[name].parameters():
                # norms start at 1, which would hide one that is forgotten; flat softmaxes hide all
                weight.data.mul_(6) if weight.dim() > 1 else weight.data.add_(
                    0.3 * torch.randn_like(weight)
                )
        made[name].set_attn_implementation("eager")
        return made[name]

    return make


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: Tensor, cache: Any, cuts: Sequence[int] = (31, 40)) -> Tensor:
    """Prefill in chunks, then decode token by token."""
    edges = [0, *cuts, *range(cuts[-1] + 1, ids.shape[1] + 1)]
    chunks = [ids[:, a:b] for a, b in itertools.pairwise(edges)]
    return torch.cat([model(chunk, cache=cache).logits for chunk in chunks], 1)


def divergence(found: Tensor, wanted: Tensor) -> float:
    """Mean Kullback-Leibler divergence of next-token distributions."""
    found, wanted = found.log_softmax(-1), wanted.log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def padded(prompts: Sequence[Tensor], side: str = "left") -> dict[str, Tensor]:
    """Pad prompts to a rectangle."""
    width = max(len(prompt) for prompt in prompts)
    pads = [(width - len(p), 0) if side == "left" else (0, width - len(p)) for p in prompts]
    pairs = list(zip(prompts, pads, strict=True))
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([pad(prompt, by) for prompt, by in pairs]),
        "attention_mask": torch.stack([pad(torch.ones_like(p), by) for p, by in pairs]),
    }


def plain(model: Any, ids: Tensor) -> Tensor:
    """Logits of a model on its own, without any cache."""
    with own_attention(model):
        found: Tensor = model(ids, use_cache=False).logits
    return found


def generate(model: Any, cache: Any = None, tokens: int = 12, **inputs: Any) -> Tensor:
    """Decode greedily; without a cache, as the model does on its own."""
    options = inputs | {"max_new_tokens": tokens, "do_sample": False}
    if cache is not None:
        found: Tensor = model.generate(cache=cache, **options)
        return found
    with own_attention(model):
        found = model.generate(**options)
    return found


@contextlib.contextmanager
def own_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(before)


# --- a whole model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_it_gives_on_its_own(
    name: str, make_model: Callable[[str], Any]
) -> None:
    model, ids = make_model(name), random_ids(2, 50)
    alone = plain(model, ids)
    dynamic = logits(model, ids, transformers.DynamicCache(config=model.config))
    paged = logits(model, ids, PagedCache(model, blocks=40, block_size=5, checked=True))
    assert alone.std() > 0.5
    assert (paged - alone).abs().max() <= LOGITS
    assert (paged - dynamic).abs().max() <= LOGITS


@pytest.mark.parametrize("formats", [(KVFormat.INT8,) * 2, (KVFormat.FP16, KVFormat.INT8)])
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_cache_hardly_moves_the_distribution(
    name: str, formats: tuple[KVFormat, KVFormat], make_model: Callable[[str], Any]
) -> None:
    model, ids = make_model(name), random_ids(2, 50)
    alone = plain(model, ids)
    cache = PagedCache(model, k_format=formats[0], v_format=formats[1], blocks=16)
    found = divergence(logits(model, ids, cache), alone)
    assert found <= 1e-4
    heads, dims = cache.storage[0].kv_heads, cache.storage[0].head_dim
    wanted = {KVFormat.INT8: dims + 4, KVFormat.FP16: 2 * dims}
    assert cache.bytes_per_token == len(cache) * heads * sum(wanted[fmt] for fmt in formats)


def test_a_model_in_half_precision_gets_a_cache_of_its_dtype(
    make_model: Callable[[str], Any],
) -> None:
    model, ids = copy.deepcopy(make_model("qwen3")).to(torch.bfloat16), random_ids(1, 20)
    cache = PagedCache(model, blocks=8)
    assert cache.storage[0].spec.format is KVFormat.BF16
    alone = plain(model, ids)
    assert divergence(logits(model, ids, cache, (9,)).float(), alone.float()) < 1e-2


def test_a_model_without_the_cache_runs_as_before(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 20)
    alone = generate(model, input_ids=ids)
    left = padded([random_ids(5), random_ids(9)])
    alone_left = generate(model, **left)
    PagedCache(model, blocks=4)
    assert model.config._attn_implementation == "kv"
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), alone)
    assert torch.equal(model.generate(**left, **options), alone_left)


def test_only_the_text_part_of_a_multimodal_model_changes() -> None:
    text = transformers.LlamaConfig(num_hidden_layers=2, **SIZES)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(num_hidden_layers=2, image_size=8, patch_size=4, **sizes)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    inputs = {
        "input_ids": torch.tensor([[5, 96, 96, 96, 96, 7, 8, 9]]),
        "pixel_values": torch.randn(1, 3, 8, 8),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
    }
    wanted = generate(model, **inputs)
    seen = model.config.vision_config._attn_implementation
    cache = PagedCache(model, blocks=8)
    assert torch.equal(generate(model, cache, **inputs), wanted)
    assert cache.get_seq_length() == 8 + 11
    assert model.config.vision_config._attn_implementation == seen
    assert model.config.text_config._attn_implementation == "kv"


def test_a_cap_on_scores_needs_the_cache(make_model: Callable[[str], Any]) -> None:
    """SDPA has none, and leaving it out in silence would be wrong."""
    model = make_model("gemma2")
    PagedCache(model, blocks=4)
    with pytest.raises(NoKernelError, match=r"Gemma2Attention asks for softcap=3\.0"):
        model(random_ids(1, 4))


def test_a_window_changes_what_a_model_says(make_model: Callable[[str], Any]) -> None:
    """Else the models with windows above would show nothing."""
    for name in ("mistral", "qwen2_moe", "gemma2", "gemma3"):
        model, ids = make_model(name), random_ids(1, 30)
        short = plain(model, ids)
        changed = ids.clone()
        changed[0, 0] = 1 + ids[0, 0] % 96
        moved = (plain(model, changed) - short).abs().amax(-1)[0]
        assert moved[0] > 0.1
        assert name in ("gemma2", "gemma3") or moved[20:].max() == 0  # others have full layers too


def test_inference_mode_is_fine(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 20)
    with torch.inference_mode():
        cache = PagedCache(model, blocks=16, block_size=4)
        logits(model, ids[:, :10], cache, (5,))
    found = logits(model, ids[:, 10:], cache, (5,))
    assert (found - plain(model, ids)[:, 10:]).abs().max() <= LOGITS


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [KVFormat.FP16, KVFormat.INT8])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_on_a_gpu_a_batch_equals_each_prompt_alone(
    name: str, fmt: KVFormat, make_model: Callable[[str], Any]
) -> None:
    model = copy.deepcopy(make_model(name)).to("cuda", torch.float16)
    prompts = [random_ids(length, seed=length) for length in (3, 17, 9)]
    model.set_attn_implementation("eager")
    alone = [plain(model, prompt[None].cuda())[0].float() for prompt in prompts]
    inputs = {key: value.cuda() for key, value in padded(prompts).items()}
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    cache = PagedCache(model, format=fmt, blocks=64)
    found = model(**inputs, position_ids=places, cache=cache).logits
    for row, prompt in enumerate(prompts):
        assert divergence(found[row, -len(prompt) :].float(), alone[row]) < 1e-3


# --- batches


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8])
def test_left_padded_generation_equals_each_prompt_alone(
    name: str, fmt: KVFormat, make_model: Callable[[str], Any]
) -> None:
    model = make_model(name)
    prompts = [random_ids(length, seed=length) for length in (3, 17, 9)]
    cache = PagedCache(model, format=fmt, blocks=40, block_size=4, checked=True)
    together = generate(model, cache, **padded(prompts))
    assert cache.table.num_used_blocks == sum(-(-(len(p) + 11) // 4) for p in prompts)
    for row, prompt in zip(together, prompts, strict=True):
        cache.reset()
        alone = generate(model, cache, input_ids=prompt[None])
        assert row[-12:].tolist() == alone[0, -12:].tolist()
        if fmt is KVFormat.FP32:
            assert alone.tolist() == generate(model, input_ids=prompt[None]).tolist()


@pytest.mark.parametrize("chunk", [4, 7])
def test_prefill_in_chunks_with_padding_changes_nothing(
    chunk: int, make_model: Callable[[str], Any]
) -> None:
    """With chunks of 4, the first two hold nothing but padding for the short row."""
    model = make_model("qwen3")
    inputs = padded([random_ids(13), random_ids(3)])
    whole = generate(model, PagedCache(model, blocks=32), **inputs)
    cache = PagedCache(model, blocks=32, block_size=4)
    cut = generate(model, cache, prefill_chunk_size=chunk, **inputs)
    assert torch.equal(whole, cut)


def test_padding_may_be_anywhere(make_model: Callable[[str], Any]) -> None:
    """Rows padded on the right, and in the middle, store their tokens and nothing else."""
    model = make_model("qwen3")
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 1]])
    ids, cache = random_ids(2, 6), PagedCache(model, blocks=8, block_size=4)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=places, cache=cache).logits
    for row in range(2):
        real = mask[row].bool()
        alone = plain(model, ids[row, real][None])
        assert (out[row, real] - alone[0]).abs().max() <= LOGITS
    assert cache.table.num_used_blocks == 2


def test_the_mask_is_read_once_a_pass_and_never_made_dense(
    make_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = Batch._read

    def counted(self: Batch, mask: Tensor, shape: tuple[int, int]) -> Any:
        reads.append(tuple(mask.shape))
        return read(self, mask, shape)

    def refuse(**arguments: Any) -> None:
        raise AssertionError("somebody asked for a dense mask")

    monkeypatch.setattr(Batch, "_read", counted)
    monkeypatch.setattr(attention, "sdpa_mask", refuse)
    model = make_model("gemma3")  # four layers, two kinds of masks
    generate(
        model, PagedCache(model, blocks=16), tokens=4, **padded([random_ids(5), random_ids(2)])
    )
    assert reads == [(2, 5), (2, 6), (2, 7), (2, 8)]


def test_beam_search_equals_that_of_a_dynamic_cache(make_model: Callable[[str], Any]) -> None:
    model = make_model("qwen3")
    options = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}
    inputs = padded([random_ids(6), random_ids(11)]) | options
    wanted = generate(model, **inputs)
    cache = PagedCache(model, blocks=60, block_size=4, checked=True)
    assert torch.equal(generate(model, cache, **inputs), wanted)
    cache.table.check()
    cache.reset()
    assert cache.table.num_used_blocks == 0


def test_prompt_lookup_takes_back_what_it_guessed_wrong(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(5).repeat(4)[None]
    cache = PagedCache(model, blocks=32, block_size=4, checked=True)
    found = generate(model, cache, tokens=20, prompt_lookup_num_tokens=4, input_ids=ids)
    assert torch.equal(found, generate(model, tokens=20, input_ids=ids))


# --- prefixes


def test_a_prefix_is_prefilled_once_and_forked_for_each_request(
    make_model: Callable[[str], Any],
) -> None:
    model, prefix = make_model("qwen3"), random_ids(1, 22)
    questions = [random_ids(length, seed=length) for length in (4, 7, 2)]
    prompt = PagedCache(model, blocks=40, block_size=4, checked=True)
    model(prefix, cache=prompt)
    assert prompt.table.num_used_blocks == 6
    answers, rows = prompt.fork(rows=3), padded(questions)
    assert answers.table.num_used_blocks == 6  # nothing was copied
    inputs = {
        "input_ids": torch.cat([prefix.expand(3, -1), rows["input_ids"]], 1),
        "attention_mask": torch.cat(
            [torch.ones(3, prefix.shape[1], dtype=torch.long), rows["attention_mask"]], 1
        ),
    }
    found = generate(model, answers, **inputs)
    own = [-(-(22 + len(question) + 11) // 4) - 5 for question in questions]
    assert prompt.table.num_used_blocks == 6 + sum(own)  # five full blocks are shared by all
    for row, question in zip(found, questions, strict=True):
        alone = generate(model, input_ids=torch.cat([prefix[0], question])[None])
        assert row[-12:].tolist() == alone[0, -12:].tolist()
    for length in range(2):  # the prefix itself has not changed
        again = generate(model, prompt.fork(), input_ids=prefix, tokens=length + 1)
        assert again.tolist() == generate(model, input_ids=prefix, tokens=length + 1).tolist()


def test_a_deep_copy_is_a_fork(make_model: Callable[[str], Any]) -> None:
    """transformers' own recipe for prefixes copies the cache of the prefix for each prompt."""
    model, prefix = make_model("qwen3"), random_ids(1, 9)
    prompt = PagedCache(model, blocks=16, block_size=4)
    model(prefix, cache=prompt)
    copied = copy.deepcopy(prompt)
    assert copied.storage is prompt.storage
    found = generate(model, copied, input_ids=torch.cat([prefix, random_ids(1, 3)], 1))
    assert prompt.get_seq_length() == 9 and copied.get_seq_length() == 23
    assert torch.equal(found, generate(model, input_ids=torch.cat([prefix, random_ids(1, 3)], 1)))


def test_a_cache_that_is_gone_gives_its_blocks_back(make_model: Callable[[str], Any]) -> None:
    model = make_model("qwen3")
    prompt = PagedCache(model, blocks=16, block_size=4)
    model(random_ids(1, 8), cache=prompt)
    fork = prompt.fork()
    model(random_ids(1, 8), cache=fork)
    assert prompt.table.num_used_blocks == 4
    del fork
    gc.collect()
    model(random_ids(1, 1), cache=prompt)
    assert prompt.table.num_used_blocks == 3
    prompt.table.check()


def test_requests_share_published_prefixes_by_their_token_ids(
    make_model: Callable[[str], Any],
) -> None:
    model, system = make_model("qwen3"), random_ids(21).tolist()
    prompts = {name: system + random_ids(5, seed=seed).tolist() for seed, name in enumerate("abc")}
    cache = PagedCache(model, blocks=40, block_size=4, checked=True)
    first = cache.pack({"a": prompts["a"]})
    assert first["input_ids"].shape == (1, 26)
    model(**first)
    assert cache.table.lookup(prompts["b"]) == 20
    rest = cache.pack({name: prompts[name] for name in "bc"})
    assert rest["input_ids"].tolist() == [prompts["b"][20:] + prompts["c"][20:]]
    assert rest["position_ids"].tolist() == [[*range(20, 26)] * 2]
    found = model(**rest).logits[0]
    for row, name in zip(found, "bc", strict=True):
        alone = plain(model, torch.tensor([prompts[name]]))[0, -1]
        assert (row - alone).abs().max() <= LOGITS
    assert cache.table.num_used_blocks == 7 + 2 * 2


# --- packed requests


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_packed_requests_equal_each_alone(name: str, make_model: Callable[[str], Any]) -> None:
    model = make_model(name)
    prompts = {length: random_ids(length, seed=length).tolist() for length in (5, 1, 12)}
    cache = PagedCache(model, blocks=32, block_size=4, checked=True)
    ids, told = dict(prompts), {length: list[int]() for length in prompts}
    for _ in range(10):
        found = model(**cache.pack(ids)).logits[0].argmax(-1).tolist()
        ids = {request: [token] for request, token in zip(ids, found, strict=True)}
        for request, token in zip(ids, found, strict=True):
            told[request].append(token)
        if len(told[5]) == 4:  # one ends, and another one comes in
            cache.table.free(1)
            del ids[1]
            ids["late"], told["late"] = random_ids(6, seed=6).tolist(), []
    prompts["late"] = random_ids(6, seed=6).tolist()
    for request, tokens in told.items():
        alone = generate(model, input_ids=torch.tensor([prompts[request]]), tokens=len(tokens))
        assert tokens == alone[0, len(prompts[request]) :].tolist()


def test_rows_packed_by_cu_seq_lens_go_on_as_a_batch(make_model: Callable[[str], Any]) -> None:
    """A ragged prefill without padding, then the usual generation."""
    model = make_model("qwen3")
    prompts = [random_ids(length, seed=length) for length in (3, 8)]
    cache = PagedCache(model, blocks=32, block_size=4, checked=True)
    model(
        torch.cat([prompt[:-1] for prompt in prompts])[None],
        position_ids=torch.tensor([[*range(2), *range(7)]]),
        cu_seq_lens_q=torch.tensor([0, 2, 9], dtype=torch.int32),
        cache=cache,
    )
    assert cache.get_seq_length() == 7
    found = generate(model, cache, **padded(prompts))
    assert torch.equal(found, generate(model, **padded(prompts)))


# --- what transformers does to a cache


def test_cropped_tokens_are_forgotten(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 20)
    cache = PagedCache(model, blocks=32, block_size=4, checked=True)
    logits(model, ids, cache, (13,))
    cache.crop(-7)
    cache.crop(0)
    assert {cache.get_seq_length(layer) for layer in range(3)} == {13}
    assert cache.table.num_used_blocks == 8
    other = random_ids(2, 3, seed=9)
    found = model(other, cache=cache).logits
    alone = plain(model, torch.cat([ids[:, :13], other], 1))[:, -3:]
    assert (found - alone).abs().max() <= LOGITS
    cache.crop(-100)
    assert cache.get_seq_length() == cache.table.num_used_blocks == 0


def test_cropped_columns_may_be_padding(make_model: Callable[[str], Any]) -> None:
    model = make_model("qwen3")
    inputs = padded([random_ids(7), random_ids(2)])
    cache = PagedCache(model, blocks=16, block_size=4, checked=True)
    wanted = generate(model, **inputs)
    for columns in (6, 4, 1):
        generate(model, cache, **inputs)
        cache.crop(columns - cache.get_seq_length())
        assert torch.equal(generate(model, cache, **inputs), wanted)
        cache.reset()


def test_rows_are_repeated_selected_and_reordered(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 6)
    cache = PagedCache(model, blocks=32, block_size=4, checked=True)
    model(ids, cache=cache)
    cache.batch_repeat_interleave(2)  # 0 0 1 1
    assert cache.batch_size == 4 and cache.table.num_used_blocks == 4
    cache.reorder_cache(torch.tensor([3, 0, 1, 3]))  # 1 0 0 1
    cache.batch_select_indices(torch.tensor([0, 1, 3]))  # 1 0 1
    assert cache.batch_size == 3
    new = random_ids(3, 5, seed=3)
    found = model(new, cache=cache).logits
    alone = plain(model, torch.cat([ids[[1, 0, 1]], new], 1))[:, -5:]
    assert (found - alone).abs().max() <= LOGITS
    cache.batch_select_indices(torch.tensor([False, True, False]))
    cache.table.check()
    assert cache.batch_size == 1 and cache.table.num_used_blocks == 3


def test_a_pass_that_fails_is_taken_back(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 12)
    cache = PagedCache(model, blocks=16, block_size=4, checked=True)
    model(ids[:, :7], cache=cache)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory, say")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, 7:], cache=cache)
    hook.remove()
    assert {cache.get_seq_length(layer) for layer in range(3)} == {7}
    found = model(ids[:, 7:], cache=cache).logits
    alone = plain(model, ids)[:, 7:]
    assert (found - alone).abs().max() <= LOGITS
    cache.table.check()


def test_a_full_pool_is_an_error_that_changes_nothing(make_model: Callable[[str], Any]) -> None:
    model, ids = make_model("qwen3"), random_ids(1, 30)
    cache = PagedCache(model, blocks=6, block_size=4)
    model(ids[:, :18], cache=cache)
    with pytest.raises(CapacityError, match="blocks"):
        model(ids[:, 18:], cache=cache)
    assert cache.get_seq_length() == 18 and cache.table.num_used_blocks == 5
    with pytest.raises(CapacityError, match="blocks"):
        cache.pack({"a": [1, 2, 3]})
    assert (
        model(ids[:, 18:20], cache=cache).logits - plain(model, ids[:, :20])[:, 18:]
    ).abs().max() <= LOGITS


def test_two_models_take_turns_without_meeting(make_model: Callable[[str], Any]) -> None:
    first, second, ids = make_model("qwen3"), make_model("llama"), random_ids(1, 8)
    wanted = [plain(model, ids) for model in (first, second)]
    caches = [PagedCache(model, blocks=8, block_size=4) for model in (first, second)]
    found = [[], []]
    for token in ids.T[:, :, None]:
        for at, model in enumerate((first, second)):
            found[at].append(model(token, cache=caches[at]).logits)
    for got, want in zip(found, wanted, strict=True):
        assert (torch.cat(got, 1) - want).abs().max() <= LOGITS


# --- refusals


def deepseek() -> Any:
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    return transformers.T5ForConditionalGeneration(config)


def lfm2() -> Any:
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, **layers))


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (deepseek, "DeepseekV3ForCausalLM has multi-head latent attention"),
        (t5, "T5ForConditionalGeneration is an encoder-decoder, and cross-attention"),
        (lfm2, "Lfm2ForCausalLM has a layer of type 'conv' (layer 0)"),
        (mamba, "MambaForCausalLM"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(make: Callable[[], Any], words: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(NoKernelError) as caught:
        PagedCache(model)
    assert words in str(caught.value) and "DynamicCache" in str(caught.value)
    assert model.config._attn_implementation == before


def test_attention_sinks_are_refused_by_name() -> None:
    config = transformers.GptOssConfig(
        num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1,
        **SIZES | {"layer_types": ["full_attention"]},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    cache = PagedCache(model, blocks=4)
    with pytest.raises(NoKernelError, match=r"GptOssAttention asks for attention sinks \(s_aux\)"):
        model(random_ids(1, 4), cache=cache)
    assert cache.get_seq_length() == cache.table.num_used_blocks == 0


def misuse(name: str) -> Callable[[Any, PagedCache], object]:
    """Return something that no cache should put up with."""
    ids = random_ids(2, 5)
    new = ids[:, :1]

    def masked(mask: Tensor) -> Callable[[Any, PagedCache], object]:
        return lambda model, cache: model(new, attention_mask=mask, cache=cache)

    def eager(model: Any, cache: PagedCache) -> None:
        model.set_attn_implementation("eager")
        model(new, cache=cache)

    def trained(model: Any, cache: PagedCache) -> None:
        with torch.enable_grad():
            model(new, cache=cache)

    def unpacked(model: Any, cache: PagedCache) -> None:
        model(new, cache=cache.pack({"a": [1, 2, 3]})["cache"])

    one = torch.ones(2, 6, dtype=torch.long)
    return {
        "short mask": masked(one[:, :1]),
        "holes later": masked(torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])),
        "4D mask": masked(torch.zeros(2, 1, 1, 6)),
        "other batch": lambda model, cache: model(ids[:1], cache=cache),
        "weights": lambda model, cache: model(new, cache=cache, output_attentions=True),
        "eager": eager,
        "grad": trained,
        "not packed": unpacked,
        "bad cu_seq_lens": lambda model, cache: model(
            ids[:1], cu_seq_lens_q=torch.tensor([0, 2]), cache=cache
        ),
        "crop": lambda model, cache: cache.crop(3),
        "crop a layer": lambda model, cache: cache.layers[0].crop(-1),
        "offload": lambda model, cache: cache.layers[0].offload(),
        "row": lambda model, cache: cache.reorder_cache(torch.tensor([0, 2])),
        "float rows": lambda model, cache: cache.reorder_cache(torch.tensor([0.0, 1.0])),
        "fork": lambda model, cache: cache.fork(rows=3),
        "empty pack": lambda model, cache: cache.pack({"a": []}),
        "config": lambda model, cache: PagedCache(model.config),
        "one block": lambda model, cache: PagedCache(model, blocks=1),
        "cat": lambda model, cache: torch.cat(cache.update(*[torch.zeros(2, 2, 1, 24)] * 2, 0)),
        "other heads": lambda model, cache: cache.update(*[torch.zeros(2, 4, 1, 24)] * 2, 0),
    }[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "short mask",
            "with S=6, got S=1; it covers the 5 columns in the cache and the 1 new ones; reset()",
        ),
        ("holes later", "must keep the 5 tokens that row 0 has stored, got 4"),
        ("4D mask", "was given a mask [2, 1, 1, 6] of its own; pass the 2D attention_mask"),
        ("other batch", "must have the 2 rows that the cache holds, got 1; call reset()"),
        ("weights", "asks for attention weights, which are never formed; leave"),
        ("eager", 'must be "kv" while it has a PagedCache, got "eager"; call'),
        ("grad", "requires grad; call it under torch.no_grad()"),
        ("not packed", "must run on the [1, 3] tokens that pack() returned, got [2, 1]; call"),
        ("bad cu_seq_lens", "cu_seq_lens_q must rise from 0 to the tokens of one row, got [0, 2]"),
        ("crop", "tokens_to_remove must be at most 0, got 3; pass -3"),
        ("crop a layer", "layer 0 shares its sequences with all other layers of the cache; call"),
        ("offload", "layer 0 of a paged cache stays on cpu, got a request to move it; use"),
        ("row", "row must be between 0 and 1, got 2; name"),
        ("float rows", "indices must be a list of rows, got [2] torch.float32; pass integers"),
        ("fork", "fork(rows=3) needs a cache of one row, got 2; prefill"),
        ("empty pack", "requests must have tokens, got none for ['a']; leave out"),
        ("config", "model must be a transformers PreTrainedModel, got Qwen3Config; pass"),
        ("one block", "blocks must be at least 2, got 1"),
        ("cat", "the model calls cat on keys after it gave them to the cache"),
        ("other heads", "key_states must be [B, H, Q, D] with H=2, got H=4; layer 0"),
    ],
)
def test_misuse_is_an_error_that_says_what_to_do_and_changes_nothing(
    name: str, words: str, make_model: Callable[[str], Any]
) -> None:
    model, ids = make_model("qwen3"), random_ids(2, 5)
    cache = PagedCache(model, blocks=16, block_size=4)
    model(ids, cache=cache)
    with pytest.raises(KVError) as caught:
        misuse(name)(model, cache)
    assert words in str(caught.value)
    model.set_attn_implementation("kv")
    new = random_ids(2, 2, seed=5)
    found = model(new, cache=cache).logits
    alone = plain(model, torch.cat([ids, new], 1))[:, -2:]
    assert (found - alone).abs().max() <= LOGITS
    cache.table.check()


def test_a_mask_that_is_not_causal_is_refused(make_model: Callable[[str], Any]) -> None:
    model = make_model("gemma3")
    cache = PagedCache(model, blocks=4)
    mask = attention.padding_mask(use_vmap=True)
    masks = {"full_attention": mask, "sliding_attention": mask}
    with pytest.raises(NoKernelError, match="mask that is not causal"):
        model(random_ids(1, 3), attention_mask=masks, cache=cache)
    assert issubclass(SpecError, KVError)


# --- imports


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_the_package_leaves_transformers_alone() -> None:
    done = run(
        "import sys, kv_kernels, kv_kernels.integrations; print('transformers' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


def test_without_transformers_the_import_says_what_to_install() -> None:
    done = run(
        "import sys; sys.modules['transformers'] = None\n"
        "import kv_kernels.integrations.transformers"
    )
    assert "ImportError: kv_kernels.integrations.transformers needs transformers" in done.stderr
    assert "pip install kv-kernels[transformers]" in done.stderr


def test_a_transformers_that_would_ignore_the_cache_is_refused() -> None:
    done = run(
        "import transformers; transformers.__version__ = '5.9.1'\n"
        "import kv_kernels.integrations.transformers"
    )
    assert "needs transformers 5.24 or newer (5.9.1 is installed, which" in done.stderr


# --- packed passes that do not come to an end


def test_a_pack_that_nobody_ran_is_taken_back_by_the_next_pass(
    make_model: Callable[[str], Any],
) -> None:
    """Also where that pass has the same shape."""
    model, ids = make_model("qwen3"), random_ids(1, 3)
    cache = PagedCache(model, blocks=32, block_size=4)
    lost = cache.pack({"a": [5, 6, 7]})
    found = model(ids, cache=cache).logits
    assert (found - plain(model, ids)).abs().max() <= LOGITS
    assert "a" not in cache.table.requests and cache.batch_size == 1
    with pytest.raises(SpecError, match=r"what pack.. returned is for one pass"):
        model(**lost)
    next_ids = random_ids(1, 1, seed=9)
    found = model(next_ids, cache=cache).logits
    assert (found - plain(model, torch.cat([ids, next_ids], 1))[:, -1:]).abs().max() <= LOGITS


def test_what_pack_returned_runs_once(make_model: Callable[[str], Any]) -> None:
    model = make_model("qwen3")
    cache = PagedCache(model, blocks=32, block_size=4)
    packed = cache.pack({"a": [5, 6, 7]})
    model(**packed)
    with pytest.raises(SpecError, match=r"what pack.. returned is for one pass"):
        model(**packed)
    assert cache.table.length("a") == 3


@pytest.mark.parametrize("end", ["free", "truncate"])
def test_a_request_of_a_broken_pass_may_end_before_the_next(
    end: str, make_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model("qwen3"), random_ids(1, 20)
    cache = PagedCache(model, blocks=32, block_size=4)
    model(**cache.pack({"bad": [5, 6]}))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(**cache.pack({"bad": [7], "good": ids[0].tolist()}))
    if end == "free":
        cache.table.free("bad")
    else:
        cache.table.truncate("bad", 1)
    found = model(**cache.pack({"good": ids[0].tolist()})).logits
    assert (found - plain(model, ids)[:, -1:]).abs().max() <= LOGITS
    assert cache.table.length("good") == 20
    found = model(**cache.pack({"new": ids[0].tolist()})).logits  # on blocks of good
    assert (found - plain(model, ids)[:, -1:]).abs().max() <= LOGITS


@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8])
def test_a_model_under_autocast_runs(fmt: KVFormat, make_model: Callable[[str], Any]) -> None:
    """There the values come in BF16, and rotated queries and keys in FP32."""
    model, ids = make_model("llama"), random_ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        own = plain(model, ids)
        found = model(ids, cache=PagedCache(model, format=fmt, blocks=16)).logits
    assert divergence(found.float(), own.float()) < 1e-3
