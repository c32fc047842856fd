"""The same answers on a CUDA device, without ever waiting for it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from kv_core import AliasError, FixedSlotKVCache, KVFormat, SlotRegion, quantize_int8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HISTORY = SlotRegion("history", 2, 2, 2, extends_length=True)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_and_scales_equal_the_cpu_s_bit_for_bit(dtype: torch.dtype, raw: Callable) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 72, generator=generator) * torch.logspace(-38, 4, 4096)[:, None]
    x[::97, 3], x[::101, 5], x[::103] = float("nan"), float("inf"), 0
    x = x.to(dtype)
    for here, there in zip(quantize_int8(x), quantize_int8(x.cuda()), strict=True):
        assert raw(here) == raw(there)


@pytest.mark.parametrize("fmt", [None, KVFormat.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_holds_what_it_holds_on_a_cpu_and_never_waits(
    fmt: KVFormat | None, dtype: torch.dtype, layers: Callable, raw: Callable, no_waiting: None
) -> None:
    caches = []
    for device in ("cpu", "cuda"):
        torch.cuda.set_sync_debug_mode("default")
        draws = [
            [tuple(t.to(device) for t in pair) for pair in layers(3, 2, seed=seed, dtype=dtype)]
            for seed in range(6)
        ]
        torch.cuda.set_sync_debug_mode("error")
        cache = FixedSlotKVCache(draws[0], capacity=6, regions=[HISTORY], format=fmt)
        cache.write("history", draws[1], 0)
        cache.write("history", draws[2], 1)
        with pytest.raises(KeyError), cache.transaction():
            cache.write("history", draws[3], 2)
            raise KeyError
        cache.write("history", [(k[:, :, :1], v[:, :, :1]) for k, v in draws[4]], 2)
        if fmt is None:
            shifted = [(b.k[:, :, 3:5], b.v[:, :, 3:5]) for b in cache.buffers()]
            cache.write("history", shifted, 2)
        caches.append(cache)
    torch.cuda.set_sync_debug_mode("default")
    for here, there in zip(caches[0].buffers(), caches[1].buffers(), strict=True):
        assert [raw(t) for t in here] == [raw(t) for t in there]


def test_shared_device_memory_is_refused_and_siblings_are_not() -> None:
    parent = torch.zeros(1, 2, 8, 9, device="cuda")
    prefill = [(torch.ones(1, 2, 2, 3, device="cuda"),) * 2]
    cache = FixedSlotKVCache(
        prefill, capacity=8, regions=[], storage=[(parent[..., :3], parent[..., 3:6])]
    )
    assert cache.layers()[0].v.is_cuda and not parent[..., 6:].any()
    with pytest.raises(AliasError, match="layer 0 key and layer 0 value share memory"):
        FixedSlotKVCache(
            prefill, capacity=8, regions=[], storage=[(parent[..., :3], parent[..., 2:5])]
        )


def test_a_shift_inside_one_buffer_is_right() -> None:
    k = torch.arange(4096.0, device="cuda").view(1, 1, 4096, 1).expand(1, 4, 4096, 64).contiguous()
    v = k.clone()
    FixedSlotKVCache(
        [(k[:, :, 1:4000], v[:, :, 96:4095])], capacity=4096, regions=[], storage=[(k, v)]
    )
    assert torch.equal(k[0, 3, :3999, 63].cpu(), torch.arange(1.0, 4000.0))
    assert torch.equal(v[0, 0, :3999, 0].cpu(), torch.arange(96.0, 4095.0))
