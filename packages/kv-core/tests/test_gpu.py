"""The same answers on a CUDA device, without ever waiting for it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from kv_core import (
    AliasError,
    FixedSlotKVCache,
    KVFormat,
    KVLayer,
    KVSpec,
    SequenceTable,
    SlotRegion,
    quantize_fp8,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
)

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


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_mxfp4, quantize_nvfp4])
def test_fp8_and_fp4_equal_the_cpu_s_bit_for_bit(quantize: Callable, raw: Callable) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 192, generator=generator) * torch.logspace(-38, 30, 4096)[:, None]
    x[::97, 3], x[::101, 5], x[::103] = float("nan"), float("inf"), 0
    for here, there in zip(quantize(x), quantize(x.cuda()), strict=True):
        assert raw(here) == raw(there)


@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("v_format", [KVFormat.FP16, KVFormat.INT8], ids=lambda f: f.name)
def test_a_table_and_its_layers_do_what_they_do_on_a_cpu_and_never_wait(
    v_format: KVFormat, is_paged: bool, raw: Callable, no_waiting: None
) -> None:
    spec = KVSpec(kv_heads=2, head_dim=24, block_size=4, format=KVFormat.INT8, v_format=v_format)
    seen = []
    for device in ("cpu", "cuda"):
        torch.cuda.set_sync_debug_mode("default")
        if is_paged:
            layers = [KVLayer.paged(spec, blocks=40, device=device) for _ in range(2)]
            table = SequenceTable(layers, sequences=4, max_blocks=8)
        else:
            make = KVLayer.contiguous
            layers = [make(spec, sequences=6, capacity=32, device=device) for _ in range(2)]
            table = SequenceTable(layers, sequences=4)
        g = torch.Generator().manual_seed(0)
        drawn = [torch.randn(2, 16, 2, 24, generator=g).to(device) for _ in range(3)]
        addresses = [tensor.data_ptr() for layer in layers for tensor in layer.tensors().values()]
        torch.cuda.set_sync_debug_mode("error")
        for at, work in enumerate(({"a": 7, "b": 9}, {"b": 2, "c": 5, "a": 1}, {"d": 1, "a": 1})):
            if at == 2:
                table.fork("a", "d")  # a shared block that is not full: the step copies it
            step = table.append(work, pad_tokens=16, pad_sequences=4)
            for layer in layers:
                layer.write(*drawn[at], step.slots)
        torch.cuda.set_sync_debug_mode("default")
        assert addresses == [
            tensor.data_ptr() for layer in layers for tensor in layer.tensors().values()
        ]
        table.check()
        seen.append(
            [raw(tensor) for layer in layers for tensor in layer.tensors().values()]
            + [raw(getattr(step, name)) for name in ("slots", "positions", "block_table")]
        )
    assert seen[0] == seen[1]


def test_b14_growth_clears_before_anyone_can_write() -> None:
    spec = KVSpec(kv_heads=8, head_dim=128, format=KVFormat.FP16)
    layer = KVLayer.contiguous(spec, sequences=64, capacity=64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert layer.ensure_capacity(4096)
        rows = torch.ones(64, 8, 128, dtype=torch.float16, device="cuda")
        slots = torch.arange(64, device="cuda") * layer.block_size + 4095
        layer.write(rows, rows, slots)
        k, v = layer.read(slots)
    side.synchronize()
    assert (k == 1).all() and (v == 1).all()
    assert not layer.read(slots - 1)[0].any()
