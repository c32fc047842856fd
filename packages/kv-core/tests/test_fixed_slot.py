"""What a fixed-slot cache holds and says, call by call."""

import gc
import math
import re
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_core import (
    DtypeError,
    FixedSlotKVCache,
    KVFormat,
    LayerKV,
    QuantizedLayerKV,
    ShapeError,
    SlotRegion,
    SpecError,
    dequantize_int8,
    quantize_int8,
)
from torch import Tensor
from torch.autograd import profiler

HISTORY = SlotRegion("history", start=2, slots=2, slot_tokens=2, extends_length=True)


def tokens(*values: float) -> list[tuple[Tensor, Tensor]]:
    """One layer of ``[1, 1, T, 2]`` keys; values are the keys plus 100."""
    k = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, len(values), 2)
    return [(k, k + 100)]


def keys(cache: FixedSlotKVCache) -> list[float]:
    """The first element of each visible key of layer 0."""
    return cache.layers()[0].k[0, 0, :, 0].tolist()


def test_a01_a_dirty_buffer_of_the_caller_shows_no_old_bytes() -> None:
    k, v = torch.full((1, 1, 6, 2), 9.0), torch.full((1, 1, 6, 2), 9.0)
    addresses = k.data_ptr(), v.data_ptr()
    cache = FixedSlotKVCache(tokens(1, 2), capacity=6, regions=[HISTORY], storage=[(k, v)])
    assert k[0, 0, :, 0].tolist() == [1, 2, 0, 0, 0, 0]
    assert v[0, 0, :, 1].tolist() == [101, 102, 0, 0, 0, 0]
    assert cache.length == 2 and cache.capacity == 6 and cache.valid_tokens == 2
    held = cache.buffers()[0]
    assert (held.k.data_ptr(), held.v.data_ptr()) == addresses
    assert held.k is k and held.v is v


def test_a01_dirty_int8_buffers_show_no_old_codes_or_scales() -> None:
    storage = QuantizedLayerKV(
        torch.full((1, 1, 6, 2), 99, dtype=torch.int8),
        torch.full((1, 1, 6, 2), -99, dtype=torch.int8),
        torch.full((1, 1, 6), math.nan),
        torch.full((1, 1, 6), 7.0),
    )
    cache = FixedSlotKVCache(
        tokens(1, 2), capacity=6, regions=[HISTORY], storage=[storage], format=KVFormat.INT8
    )
    for (source,), codes, scale in zip(
        zip(tokens(1, 2)[0], strict=True), storage[:2], storage[2:], strict=True
    ):
        wanted_codes, wanted_scale = quantize_int8(source)
        assert torch.equal(codes[:, :, :2], wanted_codes) and not codes[:, :, 2:].any()
        assert torch.equal(scale[:, :, :2], wanted_scale)
        assert scale[:, :, 2:].tolist() == [[[0, 0, 0, 0]]]
    assert isinstance(cache.layers()[0], QuantizedLayerKV)


def test_a06_addresses_hold_through_write_wrap_and_reset(layers: Callable) -> None:
    for fmt in (None, KVFormat.INT8):
        cache = FixedSlotKVCache(layers(2, 2), capacity=6, regions=[HISTORY], format=fmt)
        fresh = FixedSlotKVCache(layers(2, 2, seed=5), capacity=6, regions=[HISTORY], format=fmt)
        at = [t.data_ptr() for layer in cache.buffers() for t in layer]
        for chunk_id in range(5):
            cache.write("history", layers(2, 1 + chunk_id % 2, seed=chunk_id), chunk_id)
        cache.reset(layers(2, 2, seed=5))
        for mine, other in zip(cache.buffers(), fresh.buffers(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert repr(cache) == repr(fresh)
        for c in (cache, fresh):
            c.write("history", layers(2, 2, seed=9), 0)
        assert torch.equal(cache.layers()[1].v, fresh.layers()[1].v)
        assert [t.data_ptr() for layer in cache.buffers() for t in layer] == at
        state = fresh.state_dict()
        cache.load_state_dict(state)
        assert [t.data_ptr() for layer in cache.buffers() for t in layer] == at


def test_a07_a_reader_sees_the_old_chunk_or_the_new_one_never_one_twice() -> None:
    ring = SlotRegion("ring", start=0, slots=3, slot_tokens=1, extends_length=True)
    cache = FixedSlotKVCache(tokens(), capacity=3, regions=[ring])
    for chunk_id, value in enumerate([1, 2, 3]):
        assert cache.write("ring", tokens(value), chunk_id) == chunk_id
    with cache.transaction():
        assert sorted(keys(cache)) == [1, 2, 3]
        assert cache.write("ring", tokens(4), 3) == 0
        assert sorted(keys(cache)) == [2, 3, 4]
    layer = cache.layers()[0]
    same_keys = torch.zeros_like(layer.k)
    seen = torch.nn.functional.scaled_dot_product_attention(
        torch.ones(1, 1, 1, 2), same_keys, layer.v - 100
    )
    assert seen[0, 0, 0].tolist() == [3, 3]


def test_a08_the_newest_id_overwrites_and_the_next_appends() -> None:
    cache = FixedSlotKVCache(tokens(), capacity=4, regions=[SlotRegion("r", 0, 2, 2, True)])
    for value in range(1, 6):
        assert cache.write("r", tokens(value, value), 0) == 0
    assert keys(cache) == [5, 5] and cache.valid("r") == (2, 0)
    assert cache.write("r", tokens(7, 7), 1) == 1
    assert keys(cache) == [5, 5, 7, 7]
    assert cache.write("r", tokens(8, 8), 2) == 0
    assert keys(cache) == [8, 8, 7, 7]
    for wrong in (0, 1, 4, -1):
        with pytest.raises(SpecError, match=r"must be 3 \(append\) or 2 \(overwrite\), got"):
            cache.write("r", tokens(9, 9), wrong)
    assert keys(cache) == [8, 8, 7, 7]
    assert cache.write("r", tokens(6), 2) == 0
    assert keys(cache) == [6, 0, 7, 7] and cache.valid("r") == (1, 2)


def test_a08_the_first_id_is_zero() -> None:
    cache = FixedSlotKVCache(tokens(), capacity=2, regions=[SlotRegion("r", 0, 1, 2, True)])
    for wrong in (1, -1):
        with pytest.raises(SpecError, match=r"must be 0 \(append\), got"):
            cache.write("r", tokens(1), wrong)
    with pytest.raises(DtypeError, match="chunk_id for region 'r' must be an integer, got True"):
        cache.write("r", tokens(1), True)
    assert cache.write("r", tokens(1), np.int64(0)) == 0


def test_a09_a_short_chunk_says_which_rows_are_valid() -> None:
    k, v = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    region = SlotRegion("r", 0, 1, 4, extends_length=True)
    cache = FixedSlotKVCache([(k[:, :, :0], v[:, :, :0])], capacity=4, regions=[region])
    cache.write("r", [(k, v)], 0)
    assert (cache.capacity, cache.length, cache.valid_tokens) == (4, 4, 3)
    assert cache.valid("r") == (3,)
    layer, mask = cache.layers()[0], (torch.arange(4) < cache.valid("r")[0]).view(1, 4)
    query = torch.ones(1, 1, 1, 1)
    attend = torch.nn.functional.scaled_dot_product_attention
    # four terms, each rounded a few times in FP32
    budget = 16 * torch.finfo(torch.float32).eps
    seen = attend(query, layer.k, layer.v, attn_mask=mask).item()
    assert seen == pytest.approx(2.0, rel=budget)
    # what counting the empty row gives instead: logits 1, 1, 1, 0
    wrong = (1 + 2 + 3) * math.e / (3 * math.e + 1)
    assert attend(query, layer.k, layer.v).item() == pytest.approx(wrong, rel=budget)
    assert f"{wrong:.4f}" == "1.7815"


def test_a09_the_tail_of_a_reused_slot_is_zero_in_every_buffer(layers: Callable) -> None:
    for fmt in (None, KVFormat.INT8):
        cache = FixedSlotKVCache(
            layers(2, 0), capacity=6, regions=[SlotRegion("r", 0, 2, 3, True)], format=fmt
        )
        for chunk_id, count in enumerate([3, 3, 1]):
            cache.write("r", layers(2, count, seed=chunk_id), chunk_id)
        assert cache.valid("r") == (1, 3) and cache.valid_tokens == 4
        for layer in cache.buffers():
            assert all(not part[:, :, 1:3].any() and part[:, :, 0].any() for part in layer)


def test_rows_of_the_prefill_inside_a_region_are_valid() -> None:
    control = SlotRegion("control", 0, 2, 2)
    history = SlotRegion("history", 4, 3, 2, extends_length=True)
    cache = FixedSlotKVCache(tokens(1, 2, 3, 4, 5, 6, 7), capacity=12, regions=[control, history])
    assert cache.valid("control") == (2, 2) and cache.valid("history") == (2, 1, 0)
    assert (cache.length, cache.valid_tokens) == (7, 7)
    assert cache.write("control", tokens(8), 0) == 0
    assert keys(cache) == [8, 0, 3, 4, 5, 6, 7]
    assert cache.valid("control") == (1, 2) and (cache.length, cache.valid_tokens) == (7, 6)
    assert cache.write("history", tokens(9), 0) == 0
    assert keys(cache) == [8, 0, 3, 4, 9, 0, 7] and cache.length == 7
    assert cache.valid("history") == (1, 1, 0) and cache.valid_tokens == 5
    cache.write("history", tokens(10), 1)
    assert keys(cache) == [8, 0, 3, 4, 9, 0, 10, 0] and cache.length == 8


def test_a_gap_before_an_extending_region_is_visible_but_not_valid() -> None:
    cache = FixedSlotKVCache(tokens(1), capacity=6, regions=[SlotRegion("r", 3, 1, 2, True)])
    cache.write("r", tokens(5, 6), 0)
    assert keys(cache) == [1, 0, 0, 5, 6]
    assert (cache.capacity, cache.length, cache.valid_tokens) == (6, 5, 3)


def test_regions_rotate_apart_from_each_other() -> None:
    regions = [SlotRegion("a", 0, 2, 1, True), SlotRegion("b", 2, 3, 1, True)]
    cache = FixedSlotKVCache(tokens(), capacity=5, regions=regions)
    slots = {name: [cache.write(name, tokens(i), i) for i in range(5)] for name in "ab"}
    assert slots == {"a": [0, 1, 0, 1, 0], "b": [0, 1, 2, 0, 1]}
    assert keys(cache) == [4, 3, 3, 4, 2]


def region(**fields: object) -> SlotRegion:
    return SlotRegion(**{"name": "b", "start": 0, "slots": 1, "slot_tokens": 2, **fields})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: [SlotRegion("a", 0, 2, 2, True), SlotRegion("b", 3, 1, 2, True)],
            r"overlap, got 'a' \[0, 4\) and 'b' \[3, 5\); start 'b' at 4",
        ),
        (lambda: [region(), region()], r"different names, got 'b' \[0, 2\) and 'b' \[0, 2\)"),
        (lambda: [region(start=1)], r"'b' \[1, 3\) must end within the prefill, 2 tokens, got"),
        (lambda: [region(slots=3, slot_tokens=0)], "slot_tokens of region 'b' must be at least 1"),
        (lambda: [region(slots=0, slot_tokens=-1)], "slot_tokens of region 'b' must be at least 0"),
        (lambda: [region(slots=-1)], "slots of region 'b' must be at least 0, got -1"),
        (lambda: [region(start=-1)], "start of region 'b' must be at least 0, got -1"),
        (lambda: [region(name="")], "must not be empty"),
        (
            lambda: [region(slots=5, extends_length=True)],
            r"'b' \[0, 10\) must end within the capacity, 8, got end 10",
        ),
    ],
)
def test_a13_regions_that_do_not_fit_are_refused(make: Callable, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        FixedSlotKVCache(tokens(1, 2), capacity=8, regions=make())


@pytest.mark.parametrize("field", ["start", "slots", "slot_tokens"])
def test_a13_sizes_of_a_region_are_integers(field: str) -> None:
    with pytest.raises(DtypeError, match=f"{field} of region 'b' must be an integer, got 2.0"):
        region(**{field: 2.0})
    assert getattr(region(**{field: np.int32(2)}), field) == 2


def test_a13_a_region_without_slots_is_a_placeholder() -> None:
    cache = FixedSlotKVCache(
        tokens(1), capacity=2, regions=[SlotRegion("none", 2, 0, 0), SlotRegion("nil", 0, 0, 9)]
    )
    assert cache.valid("none") == () and cache.valid_tokens == 1
    with pytest.raises(SpecError, match="region 'none' must have slots to be written, got 0"):
        cache.write("none", tokens(1), 0)


def test_a15_storage_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        storage = [(torch.full((1, 1, 4, 2), 9.0), torch.full((1, 1, 4, 2), 9.0))]
        prefill = tokens(1)
    good = torch.full((1, 1, 4, 2), 9.0)
    with pytest.raises(SpecError, match="layer 0 value of the storage must not be an inference"):
        FixedSlotKVCache(tokens(1), capacity=4, regions=[], storage=[(good, storage[0][1])])
    assert good.unique().tolist() == [9]
    FixedSlotKVCache(prefill, capacity=4, regions=[])


def test_a15_a_cache_built_in_inference_mode_works_outside_and_inside() -> None:
    with torch.inference_mode():
        cache = FixedSlotKVCache(tokens(1, 2), capacity=6, regions=[HISTORY])
        cache.write("history", tokens(3, 4), 0)
        inside = tokens(5, 6)
    cache.write("history", inside, 1)
    with pytest.raises(KeyError), cache.transaction(), torch.inference_mode():
        cache.write("history", tokens(7), 2)
        raise KeyError
    assert keys(cache) == [1, 2, 3, 4, 5, 6]
    cache.write("history", tokens(7), 2)
    cache.reset(inside)
    assert keys(cache) == [5, 6]


def test_a15_chunks_with_a_graph_leave_no_graph_behind() -> None:
    weight = torch.ones(1, 1, 2, 2, requires_grad=True)
    for fmt in (None, KVFormat.INT8):
        cache = FixedSlotKVCache(
            [(weight * 2, weight * 2)], capacity=6, regions=[HISTORY], format=fmt
        )
        alive = []
        for chunk_id in range(100):
            k = weight * (2 + chunk_id)
            alive.append(weakref.ref(k))
            cache.write("history", [(k, weight * 3)], chunk_id)
            del k
        assert not any(ref() is not None for ref in alive)
        assert not any(t.requires_grad for layer in cache.buffers() for t in layer)
        assert not any(t.requires_grad for layer in cache.layers() for t in layer)


def test_a15_storage_that_requires_grad_is_refused() -> None:
    k, v = torch.full((1, 1, 4, 2), 9.0), torch.full((1, 1, 4, 2), 9.0, requires_grad=True)
    for bad in (v, v * 1):
        with pytest.raises(SpecError, match=r"layer 0 value of the storage.*detach"):
            FixedSlotKVCache(tokens(1), capacity=4, regions=[], storage=[(k, bad)])
    assert k.unique().tolist() == [9]


@pytest.mark.parametrize("fmt", [None, KVFormat.INT8])
def test_a16_a_cache_keeps_only_its_own_bytes(fmt: KVFormat | None) -> None:
    wide = torch.randn(1, 2, 5, 256)
    gone = weakref.ref(wide)
    cache = FixedSlotKVCache(
        [(wide[..., :64], wide[..., 64:128])], capacity=7, regions=[], format=fmt
    )
    del wide
    assert gone() is None
    rows = 1 * 2 * 7 * 2
    assert cache.nbytes == rows * (64 * 4 if fmt is None else 64 + 4)
    held = [weakref.ref(t) for layer in cache.buffers() for t in layer]
    assert sum(ref().untyped_storage().nbytes() for ref in held) == cache.nbytes
    gc.disable()
    try:
        del cache
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_a17_capacity_is_what_was_asked_and_settings_are_printed() -> None:
    cache = FixedSlotKVCache(tokens(*range(32)), capacity=2048, regions=[])
    assert cache.capacity == 2048 == cache.buffers()[0].k.shape[2] and cache.length == 32
    with pytest.raises(TypeError, match="max_length"):
        FixedSlotKVCache(tokens(1), capacity=4, regions=[], max_length=9)  # type: ignore[call-arg]
    cache = FixedSlotKVCache(
        tokens(1, 2), capacity=6, regions=[HISTORY], format=KVFormat.INT8, seq_dim=-2
    )
    cache.write("history", tokens(1), 0)
    assert repr(cache) == (
        "FixedSlotKVCache(layers=1, format=INT8, capacity=6, length=4, valid_tokens=3, seq_dim=2, "
        "nbytes=72, storage=own, regions=['history' [2, 6): 2 slots x 2 tokens, extends length, "
        "newest=0, valid=(1, 0)])"
    )


def test_int8_holds_the_codec_s_own_codes_for_key_and_value(layers: Callable) -> None:
    """C01-C03 through the cache."""
    k = torch.tensor([[0.02, -0.013, 0.001, 0], [127, 0.5, 1.5, 2.5], [0, 0, 0, 0]])
    v = torch.tensor([[30.0, -7.0], [9e6, 1.0], [1e-6, -5e-7]])
    prefill = [(k.view(1, 1, 3, 4)[:, :, :0], v.view(1, 1, 3, 2)[:, :, :0])]
    cache = FixedSlotKVCache(
        prefill, capacity=3, regions=[SlotRegion("r", 0, 1, 3, True)], format=KVFormat.INT8
    )
    cache.write("r", [(k.view(1, 1, 3, 4), v.view(1, 1, 3, 2))], 0)
    layer = cache.layers()[0]
    assert layer.k[0, 0, 1].tolist() == [127, 0, 2, 2] and layer.k_scale[0, 0, 2] == 0
    assert layer.v[0, 0, 2].tolist() == [127, -64]
    assert (dequantize_int8(layer.k, layer.k_scale)[0, 0, 0] - k[0]).abs().max() <= 7.9e-5
    for source, codes, scale in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        wanted = quantize_int8(source)
        assert torch.equal(codes[0, 0], wanted[0]) and torch.equal(scale[0, 0], wanted[1])


def test_a_row_that_is_not_finite_stays_visible_in_int8_and_counts(layers: Callable) -> None:
    cache = FixedSlotKVCache(
        layers(1, 0), capacity=2, regions=[SlotRegion("r", 0, 1, 2, True)], format=KVFormat.INT8
    )
    chunk = layers(1, 2)
    chunk[0][0][0, 1, 0, 3] = math.nan
    cache.write("r", chunk, 0)
    layer = cache.layers()[0]
    assert layer.k_scale.isnan().nonzero().tolist() == [[0, 1, 0]]
    assert not layer.k[0, 1, 0].any() and not layer.v_scale.isnan().any()
    assert cache.valid("r") == (2,)
    cache.write("r", layers(1, 1), 0)
    assert not layer.k_scale.isnan().any() and cache.valid("r") == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_format_keeps_bits(
    dtype: torch.dtype, layers: Callable, raw: Callable
) -> None:
    prefill, chunk = layers(2, 2, dtype=dtype), layers(2, 2, seed=1, dtype=dtype)
    chunk[1][1][0, 0, 0] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0])
    cache = FixedSlotKVCache(prefill, capacity=6, regions=[HISTORY])
    assert cache.format is KVFormat.of(dtype)
    cache.write("history", chunk, 0)
    for layer, before, after in zip(cache.layers(), prefill, chunk, strict=True):
        assert isinstance(layer, LayerKV)
        for part, first, second in zip(layer, before, after, strict=True):
            assert raw(part) == raw(torch.cat([first, second], dim=2))


@pytest.mark.parametrize(("shape", "seq_dim"), [((5, 4), 0), ((2, 5, 3, 4), 1), ((2, 4, 5), 2)])
def test_the_token_axis_may_be_any(shape: tuple[int, ...], seq_dim: int) -> None:
    x = torch.randn(shape)
    cache = FixedSlotKVCache(
        [(x, x + 1)], capacity=9, regions=[SlotRegion("r", 5, 2, 2, True)], seq_dim=seq_dim
    )
    chunk = x.narrow(seq_dim, 0, 2) * 2
    cache.write("r", [(chunk, chunk)], 0)
    assert torch.equal(cache.layers()[0].k, torch.cat([x, chunk], seq_dim))
    assert cache.buffers()[0].v.shape[seq_dim] == 9


def test_int8_refuses_tokens_on_the_last_axis() -> None:
    x = torch.randn(2, 4, 5)
    with pytest.raises(SpecError, match="seq_dim must not be the last axis with format INT8"):
        FixedSlotKVCache([(x, x)], capacity=9, regions=[], seq_dim=-1, format=KVFormat.INT8)


def test_layers_may_differ_from_each_other() -> None:
    prefill = [
        (torch.ones(1, h, 2, d), torch.ones(1, h, 2, e)) for h, d, e in [(1, 4, 6), (3, 2, 8)]
    ]
    for fmt in (None, KVFormat.INT8):
        cache = FixedSlotKVCache(prefill, capacity=4, regions=[], format=fmt)
        assert [layer.v.shape for layer in cache.buffers()] == [(1, 1, 4, 6), (1, 3, 4, 8)]


def test_views_taken_earlier_do_not_grow() -> None:
    cache = FixedSlotKVCache(tokens(1, 2), capacity=6, regions=[HISTORY])
    early = cache.layers()[0].k
    cache.write("history", tokens(3), 0)
    assert early.shape[2] == 2 and cache.layers()[0].k.shape[2] == 4


def test_an_empty_prefill_and_no_room_are_legal() -> None:
    cache = FixedSlotKVCache(tokens(), capacity=0, regions=[])
    assert (cache.length, cache.capacity, cache.nbytes, cache.valid_tokens) == (0, 0, 0, 0)
    assert cache.layers()[0].k.shape == (1, 1, 0, 2)


def test_the_cache_works_without_data() -> None:
    """On the meta device there is nothing to read, only sizes."""
    storage = [tuple(torch.empty(1, 2, 6, 4, device="meta") for _ in range(2))]
    prefill = [(torch.empty(1, 2, 2, 4, device="meta"),) * 2]
    for buffers in (None, storage):
        cache = FixedSlotKVCache(prefill, capacity=6, regions=[HISTORY], storage=buffers)
        assert cache.write("history", prefill, 0) == 0
        cache.reset(prefill)
        assert cache.layers()[0].k.device.type == "meta"


@pytest.mark.parametrize("fmt", [None, KVFormat.INT8])
def test_no_call_of_a_step_reads_values(fmt: KVFormat | None, layers: Callable) -> None:
    cache = FixedSlotKVCache(layers(2, 2), capacity=6, regions=[HISTORY], format=fmt)
    prefill, chunk = layers(2, 2), layers(2, 1)
    inside = [(pair.k[:, :, :1].float(), pair.v[:, :, 1:].float()) for pair in cache.layers()]
    with profiler.profile() as seen:
        with cache.transaction():
            cache.write("history", chunk, 0)
            cache.write("history", inside, 1)
        cache.layers(), cache.valid("history"), cache.valid_tokens, repr(cache)
        cache.reset(prefill)
    ran = {event.name for event in seen.function_events}
    assert "aten::copy_" in ran
    assert not {name for name in ran if re.search("item|scalar|nonzero|equal|unique", name)}


def test_chunks_of_a_wrong_size_name_the_limit() -> None:
    cache = FixedSlotKVCache(tokens(1, 2), capacity=6, regions=[HISTORY])
    for values in ((1, 2, 3), ()):
        with pytest.raises(
            ShapeError, match=rf"between 1 and 2 tokens on axis 2, got {len(values)}"
        ):
            cache.write("history", tokens(*values), 0)
