"""The arena [static | current | memory], and a cache inside of it."""

from collections.abc import Callable

import pytest
import torch
from kv_core import (
    AliasError,
    DtypeError,
    FixedSlotKVCache,
    KVError,
    KVSegmentLayout,
    LayerKV,
    ShapeError,
    SlotRegion,
    SpecError,
    allocate_kv_arena,
    stage_current_kv_,
    validate_kv_arena_segments,
)


def pair(tokens: int, seed: int = 0, widths: tuple[int, int] = (4, 6)) -> LayerKV:
    generator = torch.Generator().manual_seed(seed)
    return LayerKV(*(torch.randn(2, 3, tokens, width, generator=generator) for width in widths))


def arena(memory: int = 5) -> tuple[LayerKV, KVSegmentLayout]:
    return allocate_kv_arena(pair(2), pair(memory, 1), current_tokens=3, memory_tokens=8)


def test_the_layout_counts_tokens() -> None:
    layout = KVSegmentLayout(2, 3, 8)
    assert (layout.current_start, layout.memory_start, layout.total_tokens) == (2, 5, 13)
    for bad in ((-1, 3, 8), (2, 0, 8), (2, 3, -1)):
        with pytest.raises(SpecError, match="_tokens must be at least"):
            KVSegmentLayout(*bad)
    with pytest.raises(DtypeError, match=r"current_tokens must be an integer, got 3\.0"):
        KVSegmentLayout(2, 3.0, 8)  # type: ignore[arg-type]


def test_a_new_arena_holds_static_and_memory_and_zeros() -> None:
    whole, layout = arena()
    assert layout == KVSegmentLayout(2, 3, 8)
    for part, static, memory in zip(whole, pair(2), pair(5, 1), strict=True):
        assert part.is_contiguous() and part.shape == (2, 3, 13, static.shape[-1])
        assert torch.equal(part[:, :, :2], static) and torch.equal(part[:, :, 5:10], memory)
        assert not part[:, :, 2:5].any() and not part[:, :, 10:].any()
    assert whole.k.untyped_storage().data_ptr() != whole.v.untyped_storage().data_ptr()


def test_a_staged_arena_equals_the_concatenation_bit_for_bit() -> None:
    whole, layout = arena(memory=8)
    for seed in (2, 3):
        current = pair(3, seed)
        strided = LayerKV(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in current))
        staged = stage_current_kv_(whole, strided, layout)
        assert staged.k is whole.k and staged.v is whole.v
        for part, *segments in zip(staged, pair(2), current, pair(8, 1), strict=True):
            assert torch.equal(part, torch.cat(segments, dim=2))


def test_staging_changes_only_the_current_segment() -> None:
    whole, layout = arena()
    before = [t.clone() for t in whole]
    stage_current_kv_(whole, pair(3, 4), layout)
    for part, old in zip(whole, before, strict=True):
        assert torch.equal(part[:, :, :2], old[:, :, :2])
        assert torch.equal(part[:, :, 5:], old[:, :, 5:])
        assert not torch.equal(part[:, :, 2:5], old[:, :, 2:5])


def test_no_static_and_no_memory_is_legal() -> None:
    whole, layout = allocate_kv_arena(pair(0), pair(0), current_tokens=3, memory_tokens=0)
    stage_current_kv_(whole, pair(3), layout)
    assert torch.equal(whole.k, pair(3).k)
    empty = LayerKV(*(t[:, :, :0] for t in whole))
    validate_kv_arena_segments(whole, empty, empty, layout)


def test_tensors_with_a_graph_leave_none() -> None:
    grad = LayerKV(*(t.requires_grad_() * 1 for t in pair(2)))
    whole, layout = allocate_kv_arena(grad, pair(0), current_tokens=2, memory_tokens=4)
    stage_current_kv_(whole, grad, layout)
    assert not whole.k.requires_grad and torch.equal(whole.v[:, :, :2], whole.v[:, :, 2:4])


BAD_STAGES: dict[str, tuple[Callable, type[KVError], str]] = {
    "short": (lambda a, c: (a, pair(2)), ShapeError, "key of current must be .* T=3, got T=2"),
    "long": (lambda a, c: (a, pair(4)), ShapeError, "key of current must be .* T=3, got T=4"),
    "width": (
        lambda a, c: (a, pair(3, widths=(4, 5))),
        ShapeError,
        "value of current must be .* D=6, got D=5",
    ),
    "batch": (
        lambda a, c: (a, (c.k, c.v[:1])),
        ShapeError,
        "value of current must be .* B=2, got B=1; every segment has one batch",
    ),
    "dtype": (lambda a, c: (a, (c.k, c.v.half())), DtypeError, "value of current must be torch"),
    "device": (lambda a, c: (a, (c.k.to("meta"), c.v)), DtypeError, "key of current must be on"),
    "one tensor": (lambda a, c: (a, c.k), ShapeError, "layer 0 of the current must be a tuple"),
    "inside": (
        lambda a, c: (a, (a.k[:, :, :3], c.v)),
        AliasError,
        "key of current and key of the arena must not share memory",
    ),
    "crossed": (
        lambda a, c: (
            LayerKV(a.k, torch.zeros(2, 3, 13, 4)),
            (c.k, a.k[:, :, 2:5]),
        ),
        AliasError,
        "value of current and key of the arena must not share memory",
    ),
    "total": (
        lambda a, c: (LayerKV(a.k[:, :, :12].contiguous(), a.v), c),
        ShapeError,
        "key of the arena must be .* T=13, got T=12",
    ),
    "strided": (
        lambda a, c: (LayerKV(a.k, a.v.transpose(1, 2).contiguous().transpose(1, 2)), c),
        SpecError,
        "value of the arena must be contiguous, got strides",
    ),
    "same": (
        lambda a, c: (LayerKV(a.k, a.k), (c.k, c.k)),
        AliasError,
        "key and value of the arena must be in different allocations",
    ),
}


@pytest.mark.parametrize(("make", "kind", "words"), BAD_STAGES.values(), ids=BAD_STAGES)
def test_a_refused_stage_changes_nothing(make: Callable, kind: type, words: str) -> None:
    whole, layout = arena()
    before = [t.clone() for t in whole]
    given, current = make(whole, pair(3, 9))
    with pytest.raises(kind, match=words):
        stage_current_kv_(given, current, layout)
    assert all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))


def test_halves_of_one_allocation_are_refused_although_they_are_disjoint() -> None:
    both = torch.zeros(2, 2, 3, 13, 4)
    layout = KVSegmentLayout(2, 3, 8)
    with pytest.raises(AliasError, match="must be in different allocations"):
        stage_current_kv_(LayerKV(both[0], both[1]), pair(3, widths=(4, 4)), layout)


def test_segments_that_are_the_arena_s_own_are_accepted() -> None:
    whole, layout = arena()
    static, memory = (
        LayerKV(*(t.narrow(2, start, count) for t in whole)) for start, count in ((0, 2), (5, 8))
    )
    validate_kv_arena_segments(whole, static, memory, layout)
    wrong: list[tuple[LayerKV, LayerKV, type[KVError], str]] = [
        (LayerKV(*(t.clone() for t in static)), memory, AliasError, "key of static must be tokens"),
        (
            static,
            LayerKV(memory.k, memory.v.clone()),
            AliasError,
            r"value .* pass arena.v\[:, :, 5",
        ),
        (static, LayerKV(*(t[:, :, 4:12] for t in whole)), AliasError, r"key .* \[5, 13\)"),
        (static, LayerKV(*(t[:, :, 5:12] for t in whole)), ShapeError, "T=8, got T=7"),
        (static, LayerKV(memory.k, memory.v.double()), DtypeError, "value of memory must be torch"),
    ]
    for s, m, kind, words in wrong:
        with pytest.raises(kind, match=words):
            validate_kv_arena_segments(whole, s, m, layout)


def test_allocation_checks_before_it_allocates() -> None:
    cases: list[tuple[Callable, type[KVError], str]] = [
        (
            lambda: arena(memory=9),
            SpecError,
            "memory_tokens must be at least the 9 .*, got 8; pass",
        ),
        (
            lambda: allocate_kv_arena(
                pair(2), pair(2, widths=(4, 5)), current_tokens=1, memory_tokens=2
            ),
            ShapeError,
            "value of memory must be .* D=6, got D=5",
        ),
        (
            lambda: allocate_kv_arena(
                (pair(2).k, pair(3).v), pair(2), current_tokens=1, memory_tokens=2
            ),
            ShapeError,
            "value of static must be .* T=2, got T=3",
        ),
        (
            lambda: allocate_kv_arena(
                pair(2), [t.half() for t in pair(2)], current_tokens=1, memory_tokens=2
            ),
            DtypeError,
            "key of memory must be torch.float32, got torch.float16",
        ),
        (
            lambda: allocate_kv_arena(pair(2), pair(2), current_tokens=0, memory_tokens=2),
            SpecError,
            "current_tokens must be at least 1, got 0",
        ),
    ]
    for make, kind, words in cases:
        with pytest.raises(kind, match=words):
            make()


def test_a_cache_in_the_memory_segment_writes_into_the_arena() -> None:
    arenas = [arena(memory=0) for _ in range(2)]
    layout = arenas[0][1]
    storage = [LayerKV(*(t[:, :, layout.memory_start :] for t in whole)) for whole, _ in arenas]
    history = SlotRegion("history", 2, 3, 2, extends_length=True)
    prefill = [pair(2, 20), pair(2, 21)]
    cache = FixedSlotKVCache(prefill, capacity=8, regions=[history], storage=storage)
    before = [t.clone() for whole, _ in arenas for t in whole]
    chunks = [pair(2, 30), pair(2, 31)]
    assert cache.write("history", chunks, 0) == 0
    for (whole, _), old, given, chunk in zip(
        arenas, (before[:2], before[2:]), prefill, chunks, strict=True
    ):
        for part, was, first, written in zip(whole, old, given, chunk, strict=True):
            assert torch.equal(part[:, :, :5], was[:, :, :5])
            assert torch.equal(part[:, :, 5:9], torch.cat([first, written], dim=2))
            assert not part[:, :, 9:].any()
        static = LayerKV(*(t[:, :, :2] for t in whole))
        validate_kv_arena_segments(
            whole, static, storage[0] if whole is arenas[0][0] else storage[1], layout
        )
    for whole, _ in arenas:
        stage_current_kv_(whole, pair(3, 40), layout)
    # the chunk that was staged, written to the memory from where it lies
    staged = [LayerKV(*(t[:, :, 2:4] for t in whole)) for whole, _ in arenas]
    cache.write("history", staged, 1)
    assert torch.equal(arenas[1][0].v[:, :, 9:11], pair(3, 40).v[:, :, :2])
