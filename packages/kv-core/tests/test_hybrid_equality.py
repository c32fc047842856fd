"""What a request gets from the hybrid cache does not depend on steps, neighbours or old memory."""

import itertools
import math
from typing import Any

import pytest
import torch
from hybrid_oracle import Stack, fill, history, tiny_fp8, tiny_spec
from kv_core import Compression, HybridSpec, KeyFormat, KVCacheManager, RowFormat
from torch import Tensor

SPECS = {
    "fp32": tiny_spec(),
    "bf16": tiny_spec(row_format=RowFormat.BF16, key_format=KeyFormat.BF16),
    "fp8-mxfp4": tiny_fp8(),
    "fp8-nvfp4": tiny_fp8(key_format=KeyFormat.NVFP4, key_global_scale=0.01),
    "packed": tiny_fp8(layout="flashmla_v4"),
    "longer-rings": tiny_fp8().for_draft(5),
}
SPLITS = {"one": [41], "singles": [1] * 41, "ragged": [5, 17, 1, 1, 17], "edges": [3, 1, 12, 16, 9]}


def manager(spec: HybridSpec, **options: Any) -> KVCacheManager:
    made = KVCacheManager(spec, **{"slots": 3, "blocks": 16, "max_tokens": 400} | options)
    fill(made, math.nan)
    return made


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_c12_t2_any_chunking_leaves_the_same_bytes_and_gives_the_same_outputs(
    spec: HybridSpec,
) -> None:
    stack, outputs, bytes_left = Stack(spec), {}, {}
    for name, counts in SPLITS.items():
        cache = manager(spec)
        outputs[name] = torch.cat([stack.run(cache, ("a", n))["a"] for n in counts])
        bytes_left[name] = history(cache, "a")
    for name in SPLITS:
        assert bytes_left[name] == bytes_left["one"], name
        assert torch.equal(outputs[name], outputs["one"]), name


def test_outputs_are_those_of_the_definitions_without_a_cache() -> None:
    spec = SPECS["fp32"]
    stack, cache = Stack(spec), manager(spec)
    out = torch.cat([stack.run(cache, ("a", n))["a"] for n in (5, 17, 1, 1, 17)])
    close(out, stack.cold("a", 41))


def test_codecs_change_outputs_no_more_than_the_definitions_say() -> None:
    """Rows, entries and keys go through the codec, those of the own step too."""
    spec = SPECS["fp8-mxfp4"]
    stack, cache = Stack(spec, top_k=100), manager(spec)
    out = torch.cat([stack.run(cache, ("a", n))["a"] for n in (5, 17, 1, 1, 17)])
    error = (out - stack.cold("a", 41)).norm() / out.norm()
    assert error < 1e-3  # entries differ by a rounding of the pool, here and there by a code


def test_mixed_batches_give_each_request_what_it_gets_alone() -> None:
    spec = SPECS["fp8-mxfp4"]
    stack, mixed = Stack(spec), manager(spec)
    steps = [[("a", 20), ("b", 3)], [("c", 9), ("a", 1), ("b", 14)], [("b", 1), ("c", 8), ("a", 5)]]
    found: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
    for step in steps:
        for request, out in stack.run(mixed, *step).items():
            found[str(request)].append(out)
    for request, outs in found.items():
        alone = manager(spec)
        total = sum(map(len, outs))
        assert torch.equal(torch.cat(outs), stack.run(alone, (request, total))[request])
        assert history(mixed, request) == history(alone, request)


@pytest.mark.parametrize("garbage", [math.nan, 1e4, -1e4])
def test_t7_slots_and_blocks_are_used_again_as_if_new(garbage: float) -> None:
    spec = SPECS["fp8-mxfp4"]
    stack, cache = Stack(spec), manager(spec, slots=1, blocks=4)
    first = stack.run(cache, ("a", 37))["a"]
    for old in ("x", "y"):
        cache.free("a" if old == "x" else "x")
        stack.run(cache, (old, 48 if old == "x" else 11))
    cache.free("y")
    again = stack.run(cache, ("a", 37))["a"]
    assert torch.equal(first, again)
    fill(cache, garbage)  # all that the request did not write itself
    cache.free("a")
    outs = [stack.run(cache, ("a", n))["a"] for n in (1, 2, 30, 4)]
    assert torch.equal(first, torch.cat(outs))


def real_ratios(**options: Any) -> HybridSpec:
    """Ratios, window and block of DeepSeek-V4 over short rows."""
    sizes = {"head_dim": 24, "rope_dim": 8, "row_group": 16, "index_dim": 32}
    ratios = (0, 4, 128)
    return HybridSpec.deepseek_v4(layers=3, compress_ratios=ratios, **sizes | options)


def test_t3_t4_edges_at_the_real_ratios() -> None:
    """One shot and steps that end at 0, 2, 3, 4, 7, 126, 127, 128, 129, 255, 256 and 299."""
    spec = real_ratios()
    stack = Stack(spec, heads=1, index_heads=2, top_k=16)
    ends = [0, 2, 3, 4, 7, 126, 127, 128, 129, 255, 256, 299]
    counts = [ends[0] + 1, *(b - a for a, b in itertools.pairwise(ends))]
    once, steps = manager(spec), manager(spec)
    whole = stack.run(once, ("a", 300))["a"]  # a prefill longer than the ring of 128
    parts = torch.cat([stack.run(steps, ("a", n))["a"] for n in counts])
    assert torch.equal(whole, parts)
    assert history(once, "a") == history(steps, "a")
    assert once.states[0].positions[0].sort().values.tolist() == list(range(172, 300))


def test_t3_entries_and_window_rows_that_a_token_sees() -> None:
    spec = real_ratios(row_format=RowFormat.FP32, key_format=KeyFormat.FP32)
    cache = manager(spec)
    handles = cache.acquire(["a"] * 300, range(300))
    for p in (0, 2, 3, 4, 7, 126, 127, 128, 129, 255, 256):
        for layer, ratio in ((1, 4), (2, 128)):
            view = handles[layer].read_classical_view()
            assert view.vis[p] == (p + 1) // ratio
    assert handles[2].read_classical_view().vis[126] == 0
    assert [handle.step.kinds[4].closings for handle in handles] == [75] * 3


def test_compression_with_other_ratios_and_overlaps() -> None:
    """Nothing is tied to 4 and 128: ratio 1, an overlap without indexer, an odd ratio."""
    kinds = (
        Compression(ratio=1, indexer=True),
        Compression(ratio=3, overlap=True),
        Compression(ratio=2, overlap=True, indexer=True, tail=7),
    )
    spec = tiny_spec(ratios=(1, 3, 2), kinds=kinds, block_tokens=6, window=5, ring=7, rope_dim=0)
    stack, cache = Stack(spec), manager(spec)
    out = torch.cat([stack.run(cache, ("a", n))["a"] for n in (1, 4, 13, 2, 9)])
    close(out, stack.cold("a", 29))


def test_a_window_only_cache_needs_no_blocks() -> None:
    spec = tiny_spec(ratios=(0, 0), kinds=())
    stack, cache = Stack(spec), manager(spec, blocks=2, max_len=1000)
    out = torch.cat([stack.run(cache, ("a", n))["a"] for n in (30, 1, 1)])
    close(out, stack.cold("a", 32))
    assert cache.blocks("a") == () and cache.pools == [None, None]
