"""What the tests of kv-core share: reading every byte of an object, and building layers."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kv_core import FixedSlotKVCache
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # oracles lie beside the tests

Layers = list[tuple[Tensor, Tensor]]


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in logical order."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(name="raw")
def _raw() -> Callable[[Tensor], bytes]:
    return raw


@pytest.fixture
def digest() -> Callable[[FixedSlotKVCache], tuple[object, ...]]:
    """Return a function that reads all bytes, counters and addresses of a cache."""

    def read(cache: FixedSlotKVCache) -> tuple[object, ...]:
        flat = [tensor for layer in cache.buffers() for tensor in layer]
        return repr(cache), [raw(tensor) for tensor in flat], [t.data_ptr() for t in flat]

    return read


@pytest.fixture
def layers() -> Callable[..., Layers]:
    """Return a function that draws one key and value for each layer."""

    def draw(
        count: int,
        tokens: int,
        *,
        seed: int = 0,
        heads: int = 2,
        widths: Sequence[int] = (4, 6),
        dtype: torch.dtype = torch.float32,
    ) -> Layers:
        generator = torch.Generator().manual_seed(seed)
        k, v = (
            [torch.randn(2, heads, tokens, width, generator=generator) for _ in range(count)]
            for width in widths
        )
        return [(x.to(dtype), y.to(dtype)) for x, y in zip(k, v, strict=True)]

    return draw
