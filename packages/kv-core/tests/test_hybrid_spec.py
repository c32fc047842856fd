"""Sizes of hybrid caches: published bytes, bounds of the rings, and what cannot be built."""

from typing import Any

import pytest
import torch
from hybrid_oracle import tiny_fp8, tiny_spec
from kv_core import (
    Compression,
    DtypeError,
    HybridSpec,
    KeyFormat,
    KVCacheManager,
    LayerKindError,
    PagedKVPool,
    RowFormat,
    SpecError,
    spec_hash,
)

FLASH = [0, 0] + [4, 128] * 20 + [4]
PRO = [128, 128] + [4, 128] * 29 + [4]


def published(ratios: list[int], **options: Any) -> HybridSpec:
    return HybridSpec.deepseek_v4(layers=len(ratios), compress_ratios=ratios, **options)


def test_the_published_schedules_have_their_layers() -> None:
    for ratios, counts in ((FLASH, (2, 21, 20)), (PRO, (0, 30, 31))):
        spec = published(ratios)
        assert tuple(spec.ratios.count(ratio) for ratio in (0, 4, 128)) == counts


@pytest.mark.parametrize(
    ("options", "flash", "pro"),
    [
        ({}, 3514.25, 5031.44),
        ({"row_format": RowFormat.BF16, "key_format": KeyFormat.BF16}, 6880.0, 9848.0),
    ],
)
def test_t15_bytes_per_token_are_the_published_ones(
    options: dict[str, Any], flash: float, pro: float
) -> None:
    assert published(FLASH, **options).bytes_per_token() == flash
    assert round(published(PRO, **options).bytes_per_token(), 2) == pro


def test_t15_bytes_of_rows_keys_and_states() -> None:
    flash, pro = published(FLASH), published(PRO)
    assert (flash.row_bytes, flash.key_bytes) == (584, 68)
    assert published(FLASH, key_format=KeyFormat.NVFP4).key_bytes == 72
    assert published(FLASH, row_format=RowFormat.BF16).row_bytes == 1024
    for spec, ring, tail in ((flash, 3.07, 11.64), (pro, 4.35, 17.84)):
        parts = spec.nbytes(slots=1, blocks=1)
        assert round(parts["ring"] / 2**20, 2) == ring
        assert round(parts["tail"] / 2**20, 2) == tail
        assert parts["ring positions"] == spec.layers * 128 * 4
    assert flash.snapshot_bytes == 43 * 127 * 584 + 21 * 20480
    assert round(pro.snapshot_bytes / 1e6, 2) == 5.14
    assert (flash.replay_tokens, pro.replay_tokens) == (5461, 7747)


def test_t15_one_block_of_the_pool_is_what_its_tokens_take() -> None:
    for spec in (published(FLASH), published(PRO, key_format=KeyFormat.NVFP4)):
        one, two = (spec.nbytes(slots=1, blocks=blocks) for blocks in (1, 2))
        added = sum(two.values()) - sum(one.values())
        assert added == spec.bytes_per_token() * spec.block_tokens


@pytest.mark.parametrize("tokens", [0, 1, 4096, 131072])
def test_c18_bytes_are_a_fixed_part_and_one_for_each_block(tokens: int) -> None:
    spec = published(FLASH)
    blocks = spec.blocks_for(tokens)
    assert blocks == (tokens + 255) // 256
    parts = spec.nbytes(slots=1, blocks=blocks)
    state = sum(parts[name] for name in ("ring", "ring positions", "tail"))
    fixed = 43 * 128 * (584 + 4) + 21 * 81920 + 20 * 524288  # the window, whatever the length
    assert state == fixed
    assert parts["entries"] == blocks * (21 * 64 + 20 * 2) * 584
    assert parts["keys"] == blocks * 21 * 64 * 68


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(),
        tiny_fp8(),
        tiny_fp8(key_format=KeyFormat.NVFP4),
        tiny_fp8(layout="flashmla_v4"),
        tiny_fp8(ratios=(0, 16)).for_draft(6),
    ],
)
def test_c18_the_estimate_is_what_is_allocated(spec: HybridSpec) -> None:
    cache = KVCacheManager(spec, slots=3, blocks=5)
    parts = spec.nbytes(slots=3, blocks=5)
    state = sum(pool.nbytes for pool in cache.states)
    paged = sum(pool.nbytes for pool in cache.pools if pool is not None)
    stats = cache.stats()
    assert (stats.state_bytes, stats.paged_bytes) == (state, paged)
    assert sum(parts.values()) == state + paged and stats.parts == parts


def test_c13_the_packed_record_is_584_bytes_and_says_so() -> None:
    spec = published(FLASH, layout="flashmla_v4")
    assert (spec.row_bytes, spec.row_alignment) == (448 + 128 + 7 + 1, 576)
    plans = spec.pool_plan(2, 1)  # 64 entries a block: 585 bytes each; 2 a block: 864 each
    assert plans["entries.packed"].nbytes == 64 * 585
    assert spec.pool_plan(3, 1)["entries.packed"].nbytes == 2 * 864
    short = published(FLASH, layout="flashmla_v4", block_tokens=128)
    assert short.pool_plan(3, 1)["entries.packed"].nbytes == 1152
    assert plans["keys.packed"].nbytes == 64 * 68
    stored = spec.to_json()
    assert (stored["layout"], stored["version"]) == ("flashmla_v4", 1)
    assert spec_hash(stored) != spec_hash(published(FLASH).to_json())


def test_c09_longest_speculative_run_of_a_ring() -> None:
    """Ratio 4 with overlap pools 8 rows: a tail of 8 verifies 2 tokens, one of 16 verifies 10."""
    for tail, draft in ((8, 2), (9, 3), (16, 10)):
        kind = Compression(ratio=4, overlap=True, indexer=True, tail=tail)
        spec = tiny_spec(ratios=(4,), kinds=(kind,), ring=8 + 20)
        assert spec.max_draft == draft
    assert tiny_spec(ring=13).max_draft == 2  # the tails are the shortest
    assert tiny_spec(ratios=(0,), kinds=(), ring=13).max_draft == 7
    for tokens in (1, 2, 3, 8):
        spec = published(FLASH).for_draft(tokens)
        assert spec.max_draft == max(tokens, 2)
        assert spec.ring == 128 + spec.max_draft - 2


def test_c10_each_layer_has_the_kind_of_its_own_ratio() -> None:
    spec = published([128, 128, 4, 128, 4, 0])
    kinds = [spec.kind(layer) for layer in range(6)]
    assert [kind and kind.ratio for kind in kinds] == [128, 128, 4, 128, 4, None]
    per_block = [PagedKVPool(spec, layer, 1).entries_per_block for layer in range(5)]
    assert per_block == [2, 2, 64, 2, 64]
    with pytest.raises(LayerKindError, match=r"layer 5 \(window only\) has no compressed entries"):
        PagedKVPool(spec, 5, 1)


def test_defaults_are_filled_in_and_the_spec_is_a_value() -> None:
    spec = tiny_spec()
    assert spec.ring == 8 and [kind.tail for kind in spec.kinds] == [8, 16]
    assert spec == tiny_spec() and hash(spec) == hash(tiny_spec())
    assert spec.describe(1) == "layer 1 (ratio 4, indexer)"
    assert spec.describe(2) == "layer 2 (ratio 16, no indexer)"


# what cannot be built -> words of the message
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: tiny_spec(block_tokens=24), SpecError, "multiple of 16, the least common one"),
    (lambda: tiny_spec(ring=7), SpecError, "ring must be at least 8, got 7"),
    (lambda: Compression(ratio=4, overlap=True, tail=7), SpecError, "tail of ratio 4 must be"),
    (lambda: Compression(ratio=0), SpecError, "ratio must be at least 1, got 0"),
    (lambda: tiny_spec(ratios=()), SpecError, "at least 1 layer, got none"),
    (lambda: tiny_spec(ratios=(4, -1)), SpecError, r"ratios\[1\] must be at least 0, got -1"),
    (lambda: tiny_spec(ratios=(4, 5)), SpecError, r"ratio in use, \[4, 5\], got \[4\]"),
    (lambda: tiny_spec(ratios=(2.5,)), DtypeError, r"ratios\[0\] must be an integer, got 2.5"),
    (lambda: tiny_fp8(row_group=5), SpecError, "multiple of row_group=5 for FP8 rows, got 12"),
    (lambda: published(FLASH, rope_dim=100), SpecError, "row_group=64 for FP8 rows, got 412"),
    (lambda: tiny_spec(rope_dim=3), SpecError, "rope_dim must be even, got 3"),
    (lambda: tiny_spec(rope_dim=18), SpecError, "rope_dim must be between 0 and 16, got 18"),
    (lambda: tiny_fp8(index_dim=40), SpecError, "multiple of 32 for MXFP4 keys, got 40"),
    (lambda: tiny_spec(index_dim=2), SpecError, "index_dim must be at least rope_dim, 4, got 2"),
    (lambda: tiny_spec(row_format="fp8"), DtypeError, "row_format must be a RowFormat, got 'fp8'"),
    (lambda: tiny_spec(key_global_scale=0.0), SpecError, "must be at least 1e-18, got 0.0"),
    (lambda: tiny_spec(key_global_scale=1e-19), SpecError, "must be at least 1e-18, got 1e-19"),
    (lambda: tiny_spec(layout="hnd"), SpecError, "layout must be one of"),
    (lambda: tiny_spec(layout="flashmla_v4"), SpecError, 'use layout="separate"'),
    (
        lambda: HybridSpec.deepseek_v4(layers=43, compress_ratios=[*FLASH, 0]),
        SpecError,
        "for each of the 43 layers, got 44; leave out the MTP layer's",
    ),
    (lambda: KVCacheManager(tiny_spec(), slots=0, blocks=4), SpecError, "slots must be at least 1"),
    (lambda: KVCacheManager(tiny_spec(), slots=1, blocks=0), SpecError, "blocks must be at least"),
    (lambda: KVCacheManager(tiny_spec(), slots=1, blocks=1), SpecError, "blocks must be at least"),
    (
        lambda: KVCacheManager(tiny_spec(), slots=2**30, blocks=4),
        SpecError,
        "less than 2.31 rows, got",
    ),
]


@pytest.mark.parametrize(("build", "error", "words"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_cannot_work_is_refused_when_it_is_built(
    build: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build()


def test_a_preset_takes_other_values_for_any_field() -> None:
    spec = published(
        FLASH,
        window=64,
        row_format=RowFormat.BF16,
        kinds=(
            Compression(ratio=4, tail=32),
            Compression(ratio=128),
        ),
    )
    assert (spec.window, spec.ring, spec.has_indexer) == (64, 64, False)
    assert torch.equal(spec.roundtrip(torch.ones(1, 512)), torch.ones(1, 512))
