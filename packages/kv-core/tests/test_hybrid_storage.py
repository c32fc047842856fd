"""Row codecs, packed blocks and masked scatters of the hybrid cache."""

import math

import pytest
import torch
from hybrid_oracle import Stack, fill, history, raw, tiny_fp8, tiny_spec
from kv_core import (
    HybridSpec,
    KeyFormat,
    KVCacheManager,
    PagedKVPool,
    RowFormat,
    StateCachePool,
    dequantize_fp8,
    dequantize_mxfp4,
    quantize_fp8,
)
from kv_core.hybrid.keys import decode_keys, encode_keys
from kv_core.hybrid.rows import RowTensors
from kv_core.paged import scatter_rows


def real(**options: object) -> HybridSpec:
    return HybridSpec.deepseek_v4(layers=3, compress_ratios=[0, 4, 128], **options)


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_t11_fp8_rows_are_codes_scales_a_zero_and_bf16() -> None:
    spec, x = real(), rows(5, 512)
    stored = spec.encode(x)
    codes, scale = quantize_fp8(x[:, :448])
    assert stored.rope is not None and stored.scale is not None
    assert raw(stored.codes) == raw(codes)
    assert torch.equal(stored.scale[:, :7], scale) and not stored.scale[:, 7].any()
    assert torch.equal(stored.rope, x[:, 448:].bfloat16())
    back = spec.roundtrip(x)
    assert torch.equal(back[:, 448:], x[:, 448:].bfloat16().float())
    assert torch.equal(back[:, :448], dequantize_fp8(codes, scale))
    assert torch.equal(spec.roundtrip(back), back)
    error = (back - x)[:, :448].norm() / x[:, :448].norm()
    assert 0.02 < error < 0.03


@pytest.mark.parametrize("row_format", RowFormat)
def test_poison_stays_in_its_row_and_zeros_come_back(row_format: RowFormat) -> None:
    spec, x = real(row_format=row_format), rows(3, 512)
    x[0, 5], x[1] = math.nan, 0.0
    back = spec.roundtrip(x)
    assert back[0].isnan().sum() == 1 and not back[1].any()
    assert torch.equal(back[2], spec.roundtrip(x[2:])[0])


@pytest.mark.parametrize("key_format", KeyFormat)
def test_keys_read_as_their_codec_says(key_format: KeyFormat) -> None:
    x, total = rows(7, 128), torch.tensor([0.01])
    stored = encode_keys(x, key_format, total)
    back = decode_keys(stored, key_format, total)
    limit = {"FP32": 0.0, "BF16": 0.003, "MXFP4": 0.13, "NVFP4": 0.11}[key_format.name]
    assert (back - x).norm() / x.norm() <= limit
    again = decode_keys(encode_keys(back, key_format, total), key_format, total)
    assert torch.equal(again, back)


@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4])
def test_fp4_keys_find_most_of_what_exact_ones_find(key_format: KeyFormat) -> None:
    """FP4 is judged by the recall of the top 64 of 512 entries, here of random keys."""
    g = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(512, 128, generator=g), torch.randn(20, 32, 128, generator=g)
    heads, total = torch.rand(20, 32, generator=g), torch.tensor([1 / 448])
    stored = decode_keys(encode_keys(keys, key_format, total), key_format, total)

    def top(of: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qh,qhk->qk", heads, (queries @ of.T).relu())
        return torch.zeros(20, 512).scatter_(1, scores.topk(64).indices, 1.0)

    recall = (top(keys) * top(stored)).sum(1) / 64
    worse = keys + torch.randn(512, 128, generator=g) * 0.25  # twice the error of FP4
    assert recall.mean() > (top(keys) * top(worse)).sum(1).mean() / 64
    assert recall.mean() > 0.85


def test_t14_a_packed_block_is_rows_then_scales_padded_to_rows() -> None:
    spec = real(layout="flashmla_v4")
    pool, x = PagedKVPool(spec, 1, 3), rows(64, 512)
    assert pool.packed is not None and pool.packed.shape == (3, 65 * 576)
    assert pool.packed.data_ptr() == pool.entries.codes.data_ptr()
    scatter_rows(pool.entries.present(), spec.encode(x).present(), 64 + torch.arange(64))
    codes, scale = quantize_fp8(x[:, :448])
    block = pool.packed[1]
    data = block[: 64 * 576].view(64, 576)
    assert raw(data[:, :448].contiguous()) == raw(codes)
    assert raw(data[:, 448:].contiguous()) == raw(x[:, 448:].bfloat16())
    scales = block[64 * 576 : 64 * 584].view(64, 8)
    assert torch.equal(scales[:, :7], scale) and not scales[:, 7].any()
    assert not block[64 * 584 :].any()  # the padding
    assert not pool.packed[0].any() and not pool.packed[2].any()
    stored = RowTensors(*(field[1] for field in pool.entries.present()))
    assert torch.equal(spec.decode(stored), spec.roundtrip(x))


def test_t14_packed_keys_are_values_then_scales() -> None:
    spec = real(layout="flashmla_v4")
    pool, x = PagedKVPool(spec, 1, 2), rows(64, 128)
    assert pool.keys is not None and pool.packed_keys is not None
    encoded = encode_keys(x, spec.key_format, None)
    scatter_rows(pool.keys.present(), encoded.present(), 64 + torch.arange(64))
    block = pool.packed_keys[1]
    assert block.shape == (64 * 68,)
    values, scale = block[: 64 * 64].view(64, 64), block[64 * 64 :].view(64, 4)
    assert torch.equal(
        dequantize_mxfp4(values.contiguous(), scale.contiguous()),
        decode_keys(encoded, spec.key_format, None),
    )


@pytest.mark.parametrize(("ratio", "entries", "size"), [(4, 64, 585), (128, 2, 864)])
def test_t14_bytes_that_an_entry_costs_in_a_packed_block(
    ratio: int, entries: int, size: int
) -> None:
    pool = PagedKVPool(real(layout="flashmla_v4"), {4: 1, 128: 2}[ratio], 1)
    assert pool.entries_per_block == entries and pool.packed is not None
    assert pool.packed.shape[1] == entries * size and pool.packed.shape[1] % 576 == 0
    state = StateCachePool(real(layout="flashmla_v4"), 0, 2)
    assert state.packed is not None and state.packed.shape == (2, 130 * 576)


def test_a_packed_cache_holds_the_rows_of_a_separate_one() -> None:
    outs, held = [], []
    for layout in ("separate", "flashmla_v4"):
        spec = tiny_fp8(layout=layout)
        cache = KVCacheManager(spec, slots=2, blocks=8)
        fill(cache, math.nan)
        stack = Stack(spec)
        outs.append(torch.cat([stack.run(cache, ("a", n))["a"] for n in (9, 1, 24)]))
        held.append(history(cache, "a"))
    assert torch.equal(*outs) and held[0] == held[1]


@pytest.mark.parametrize("slots", [[-1, 3, -1, 0, 5], [-1] * 5, [4, 3, 2, 1, 0], [0, -1, -1, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float32, torch.int32])
def test_c16_a_scatter_writes_its_rows_and_no_others(slots: list[int], dtype: torch.dtype) -> None:
    """FP8 moves as bytes; -1 stores nothing, NaN rows under it leave no trace."""
    storage = (torch.arange(24).reshape(3, 2, 4) % 100).to(dtype)
    values = (torch.arange(20).reshape(5, 4) + 30).to(dtype)
    if dtype.is_floating_point:
        values[[slot < 0 for slot in slots]] = torch.full((4,), math.nan).to(dtype)
    expected = storage.clone().view(torch.uint8 if dtype.itemsize == 1 else dtype)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // 2, slot % 2] = values.view(expected.dtype)[row]
    scatter_rows([storage], [values], torch.tensor(slots, dtype=torch.int32))
    assert raw(storage) == raw(expected)


@pytest.mark.parametrize("spec", [tiny_spec(), tiny_fp8(), tiny_fp8(layout="flashmla_v4")])
def test_c05_copies_of_slots_and_blocks_leave_no_part_behind(spec: HybridSpec) -> None:
    cache = KVCacheManager(spec, slots=2, blocks=8)
    fill(cache, 9.0)
    Stack(spec).run(cache, ("a", 30))
    for state, pool in zip(cache.states, cache.pools, strict=True):
        state.copy_slot(0, 1)
        for tensor in state.tensors().values():
            assert raw(tensor[0]) == raw(tensor[1])
        if pool is None:
            continue
        block = cache.blocks("a")[0]
        pool.copy_block(block, 5)
        for tensor in pool.tensors().values():
            assert raw(tensor[block]) == raw(tensor[5])
