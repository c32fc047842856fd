"""Storage that overlaps is refused; sources that overlap are read as if they had been copied."""

from collections.abc import Callable

import pytest
import torch
from kv_core import AliasError, FixedSlotKVCache, KVFormat, QuantizedLayerKV, SlotRegion
from torch import Tensor

Storage = list[tuple[Tensor, Tensor]]
REGIONS = [SlotRegion("history", 3, 2, 2, extends_length=True)]  # [3, 7) of 8


def separate(layers: int = 2) -> Storage:
    """Contiguous ``[1, 2, 8, 3]`` buffers, all numbers different."""
    whole = torch.arange(layers * 2 * 48, dtype=torch.float32).view(layers, 2, 1, 2, 8, 3)
    return [(pair[0].clone(), pair[1].clone()) for pair in whole]


def columns(layers: int = 2) -> Storage:
    """The same numbers as columns of one parent, so that byte ranges interleave."""
    parent = torch.empty(1, 2, 8, layers * 2 * 3)
    parts = parent.split(3, dim=-1)
    for part, source in zip(parts, [t for pair in separate(layers) for t in pair], strict=True):
        part.copy_(source)
    return list(zip(parts[::2], parts[1::2], strict=True))


def rows(layers: int = 2) -> Storage:
    """The same numbers as runs of tokens of one parent."""
    parent = torch.empty(1, 2, layers * 2 * 8, 3)
    parts = parent.split(8, dim=2)
    for part, source in zip(parts, [t for pair in separate(layers) for t in pair], strict=True):
        part.copy_(source)
    return list(zip(parts[::2], parts[1::2], strict=True))


def token_major(layers: int = 2) -> Storage:
    """The same numbers with tokens outside of heads."""
    return [
        tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair)  # type: ignore[misc]
        for pair in separate(layers)
    ]


LAYOUTS = [separate, columns, rows, token_major]

# Ways to take each layer's (key, value) of T tokens out of the storage itself.
SOURCES: dict[str, Callable[[Storage, int], Storage]] = {
    "own place": lambda s, t: [(k[:, :, :t], v[:, :, :t]) for k, v in s],
    "shifted by one": lambda s, t: [(k[:, :, 1 : 1 + t], v[:, :, 1 : 1 + t]) for k, v in s],
    "suffix": lambda s, t: [(k[:, :, 8 - t :], v[:, :, 8 - t :]) for k, v in s],
    "slot": lambda s, t: [(k[:, :, 3 : 3 + t], v[:, :, 4 : 4 + t]) for k, v in s],
    "layer swapped": lambda s, t: [(k[:, :, 3 : 3 + t], v[:, :, :t]) for k, v in s[::-1]],
    "key for value": lambda s, t: [(v[:, :, 3 : 3 + t], k[:, :, 2 : 2 + t]) for k, v in s],
    "one token for all": lambda s, t: [
        (k[:, :, 3:4].expand(-1, -1, t, -1), v[:, :, 7:].expand(-1, -1, t, -1)) for k, v in s
    ],
    "heads swapped by view": lambda s, t: [
        (
            k[:, :, 2 : 2 + t]
            .transpose(1, 2)[:, :1]
            .expand(-1, 2, -1, -1)[:, :, :1]
            .expand(-1, -1, t, -1),
            v[:, :1, 3 : 3 + t].expand(-1, 2, -1, -1),
        )
        for k, v in s
    ],
    "key of layer 0 everywhere": lambda s, t: [(s[0][0][:, :, 2 : 2 + t],) * 2 for _ in s],
}


def cloned(storage: Storage) -> Storage:
    return [(k.clone(), v.clone()) for k, v in storage]


def same(a: FixedSlotKVCache, b: FixedSlotKVCache) -> bool:
    return all(
        torch.equal(x, y)
        for mine, other in zip(a.buffers(), b.buffers(), strict=True)
        for x, y in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_prefill_inside_the_storage_counts_as_copied(layout: Callable, source: Callable) -> None:
    """A02 and its kind."""
    aliased, plain = layout(), layout()
    caches = [
        FixedSlotKVCache(prefill, capacity=8, regions=REGIONS, storage=storage)
        for prefill, storage in (
            (source(aliased, 3), aliased),
            (cloned(source(plain, 3)), plain),
        )
    ]
    assert same(*caches) and caches[0].buffers()[0].k is aliased[0][0]
    assert not caches[0].buffers()[1].v[:, :, 3:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_chunk_or_reset_inside_the_storage_counts_as_copied(
    layout: Callable, source: Callable
) -> None:
    caches, stores = [], []
    for _ in range(2):
        stores.append(layout())
        cache = FixedSlotKVCache(
            [(k[:, :, :3].clone(), v[:, :, :3].clone()) for k, v in stores[-1]],
            capacity=8,
            regions=REGIONS,
            storage=stores[-1],
        )
        for chunk_id in range(2):
            cache.write("history", cloned(SOURCES["layer swapped"](separate(), 2)), chunk_id)
        caches.append(cache)
    for tokens, chunk_id in ((2, 2), (1, 3), (2, 3)):
        caches[0].write("history", source(stores[0], tokens), chunk_id)
        caches[1].write("history", cloned(source(stores[1], tokens)), chunk_id)
        assert same(*caches)
    caches[0].reset(source(stores[0], 3))
    caches[1].reset(cloned(source(stores[1], 3)))
    assert same(*caches)


def test_a02_a_prefill_in_the_suffix_survives_the_clearing() -> None:
    k = torch.arange(8.0).view(1, 1, 8, 1)
    v = k.clone()
    FixedSlotKVCache([(k[:, :, 5:], v[:, :, 5:])], capacity=8, regions=[], storage=[(k, v)])
    assert k.flatten().tolist() == v.flatten().tolist() == [5, 6, 7, 0, 0, 0, 0, 0]


def test_only_sources_that_touch_a_destination_are_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = columns()
    cache = FixedSlotKVCache(
        cloned(SOURCES["own place"](storage, 3)), capacity=8, regions=REGIONS, storage=storage
    )
    count = 0
    clone = Tensor.clone

    def counted(self: Tensor, **options: object) -> Tensor:
        nonlocal count
        count += 1
        return clone(self, **options)

    fresh = cloned(SOURCES["own place"](separate(), 2))
    monkeypatch.setattr(Tensor, "clone", counted)
    cache.write("history", fresh, 0)
    cache.write("history", SOURCES["own place"](storage, 2), 1)  # the prefix; slot 1 is written
    assert count == 0
    cache.write("history", [(fresh[0][0], storage[0][1][:, :, 5:7]), fresh[1]], 1)
    assert count == 0  # exactly its own place
    cache.write("history", [(storage[0][0][:, :, 4:6], fresh[0][1]), fresh[1]], 1)
    assert count == 1


def test_a_source_in_its_own_place_but_turned_counts_as_copied() -> None:
    """Heads and tokens exchanged: the same bytes and the same shape, in another order."""
    results = []
    for copy in (False, True):
        k, v = (torch.arange(24.0).view(1, 2, 4, 3) + at for at in (0, 100))
        turned = [(k[:, :, :2].transpose(1, 2), v[:, :, :2].transpose(1, 2))]
        FixedSlotKVCache(
            cloned(turned) if copy else turned, capacity=4, regions=[], storage=[(k, v)]
        )
        results.append((k, v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0][0, 0, :, 0].tolist() == [0, 12, 0, 0]


def reinterpreted() -> tuple[list[QuantizedLayerKV], list[tuple[Tensor, Tensor]]]:
    """INT8 buffers and floating views of the bytes of their codes."""
    memory = [torch.randn(1, 2, 8, 2) for _ in range(2)]
    k, v = (m.view(torch.int8) for m in memory)  # [1, 2, 8, 8]
    scales = torch.zeros(2, 1, 2, 8)
    return [QuantizedLayerKV(k, v, scales[0], scales[1])], [(memory[0], memory[1])]


def test_int8_reads_sources_made_of_its_own_bytes_before_it_writes() -> None:
    torch.manual_seed(0)
    storage, memory = reinterpreted()

    def wide(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = (t[:, :, :2].reshape(1, 2, 1, 4)[..., :1].expand(-1, -1, 2, 8) for t in pair)
        return k, v

    plain, prefill = [QuantizedLayerKV(*(t.clone() for t in storage[0]))], [wide(memory[0])]
    copied, aliased = (
        FixedSlotKVCache(
            sources, capacity=8, regions=REGIONS, storage=buffers, format=KVFormat.INT8
        )
        for sources, buffers in ((cloned(prefill), plain), (prefill, storage))
    )
    assert same(aliased, copied)
    chunks = [wide(memory[0])]
    kept = cloned(chunks)
    aliased.write("history", chunks, 0)
    copied.write("history", kept, 0)
    assert same(aliased, copied)


def expect_refusal(storage: Storage, first: str, second: str, **options: object) -> None:
    before = [t.clone() for layer in storage for t in layer]
    prefill = [
        (torch.ones(1, 2, 3, layer[0].shape[-1]), torch.ones(1, 2, 3, layer[1].shape[-1]))
        for layer in storage
    ]
    with pytest.raises(AliasError, match=f"^{first} and {second} "):
        FixedSlotKVCache(prefill, capacity=8, regions=REGIONS, storage=storage, **options)
    after = [t for layer in storage for t in layer]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a04_key_and_value_may_not_be_one_tensor() -> None:
    (k, _), second = separate()
    expect_refusal([(k, k), second], "layer 0 key", "layer 0 value")


def test_a04_two_layers_may_not_share_a_buffer() -> None:
    first, (_, v) = separate()
    expect_refusal([first, (first[0], v)], "layer 0 key", "layer 1 key")
    expect_refusal([first, (v, first[0].view_as(v))], "layer 0 key", "layer 1 value")


def test_a04_two_layers_may_not_overlap_partly() -> None:
    parent = torch.zeros(1, 2, 20, 3)
    (_, v0), (_, v1) = separate()
    expect_refusal([(parent[:, :, :8], v0), (parent[:, :, 7:15], v1)], "layer 0 key", "layer 1 key")
    wide = torch.zeros(1, 2, 8, 7)
    expect_refusal([(wide[..., :4], v0), (v1, wide[..., 3:])], "layer 0 key", "layer 1 value")


def test_a04_expanded_storage_is_refused() -> None:
    first, (_, v) = separate()
    expanded = torch.zeros(1, 1, 8, 3).expand(1, 2, 8, 3)
    expect_refusal([first, (expanded, v)], "layer 1 key", "layer 1 key")


def test_a04_storage_that_overlaps_itself_is_refused() -> None:
    first, (k, _) = separate()
    strided = torch.zeros(48).as_strided((1, 2, 8, 3), (24, 24, 2, 1))
    expect_refusal([first, (k, strided)], "layer 1 value", "layer 1 value")


def test_a04_scales_take_part() -> None:
    good, _ = reinterpreted()
    k, v, k_scale, v_scale = good[0]
    prefill = [(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))]
    inside = k.view(torch.float32)[..., 0]  # FP32 numbers in the bytes of the key codes
    cases = [
        ((k, v, k_scale, k_scale), "layer 0 key scale and layer 0 value scale"),
        ((k, v, inside, v_scale), "layer 0 key and layer 0 key scale"),
        ((k, k, k_scale, v_scale), "layer 0 key and layer 0 value"),
    ]
    for parts, words in cases:
        before = [t.clone() for t in good[0]]
        with pytest.raises(AliasError, match=f"^{words} share memory"):
            FixedSlotKVCache(
                prefill,
                capacity=8,
                regions=REGIONS,
                storage=[QuantizedLayerKV(*parts)],
                format=KVFormat.INT8,
            )
        assert all(torch.equal(a, b) for a, b in zip(before, good[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_that_is_not_contiguous_holds_the_same(layout: Callable) -> None:
    chunk = cloned(SOURCES["own place"](separate(), 2))
    prefill = cloned(SOURCES["own place"](separate(), 3))
    own = FixedSlotKVCache(prefill, capacity=8, regions=REGIONS)
    strided = FixedSlotKVCache(prefill, capacity=8, regions=REGIONS, storage=layout())
    for cache in (own, strided):
        for chunk_id in range(3):
            cache.write("history", chunk, chunk_id)
    assert same(own, strided)


def test_a_sibling_of_the_storage_keeps_its_bytes() -> None:
    parent = torch.full((1, 2, 11, 3), 9.0), torch.full((1, 2, 11, 3), 9.0)
    storage = [(parent[0][:, :, 3:], parent[1][:, :, 3:])]
    cache = FixedSlotKVCache(
        [(torch.ones(1, 2, 3, 3),) * 2], capacity=8, regions=REGIONS, storage=storage
    )
    cache.write("history", [(parent[0][:, :, :2], parent[1][:, :, 1:3])], 0)
    assert all(p[:, :, :3].unique().tolist() == [9] for p in parent)
    assert cache.layers()[0].k[0, 0, :, 0].tolist() == [1, 1, 1, 9, 9]
