"""paged_decode_attention of the Triton row, in the interpreter: indexing, masks and splits."""

import resource
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import append, gather, paged_decode_attention, paged_write
from kv_kernels.library import call_query
from kv_kernels.ops.cache import CacheTensors
from kv_kernels.testing import (
    error_budget,
    largest_error,
    paged_attention_oracle,
    random_paged,
)
from kv_kernels.triton_rules import rejects_interpreted
from torch import Tensor

REFUSED = rejects_interpreted(
    call_query("gather", KVFormat.INT8, KVFormat.INT8, torch.device("cpu"), torch.float32, 16, True)
)
pytestmark = [
    pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED)),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

FORMATS = {
    "fp32": (KVFormat.FP32, torch.float32),
    "fp16": (KVFormat.FP16, torch.float16),
    "bf16": (KVFormat.BF16, torch.bfloat16),
    "fp32 over INT8": (KVFormat.INT8, torch.float32),
    "fp16 over INT8": (KVFormat.INT8, torch.float16),
    "bf16 over INT8": (KVFormat.INT8, torch.bfloat16),
}


class Call:
    """A layer full of garbage, a shuffled table and queries."""

    def __init__(
        self,
        contexts: Sequence[int],
        new: Sequence[int],
        *,
        fmt: KVFormat = KVFormat.FP32,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (4, 2),
        D: int = 16,
        N: int = 16,
        seed: int = 0,
        **layout: Any,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        spec = KVSpec(kv_heads=heads[1], head_dim=D, block_size=N, format=fmt)
        self.layer, self.step = random_paged(spec, contexts, new, generator=g, **layout)
        T = self.step.num_tokens
        self.q = torch.randn(T, heads[0], 2 * D, generator=g).to(dtype)[..., :D]

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        return paged_decode_attention(
            self.layer, self.step, self.q, return_lse=True, backend="triton", **options
        )

    def check(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Compare with FP64, within twice what the torch row errs.

        The budget is the largest of some draws: one may happen to be good.
        """
        out, lse = self.run(**options)
        options.pop("num_splits", None)
        draws = [self.q, *(self.q.roll(i, 2) for i in (1, 2, 3))]
        layer, step = self.layer, self.step
        exact = [paged_attention_oracle(q, layer, step, **options) for q in draws]
        plain = [
            paged_decode_attention(layer, step, q, return_lse=True, backend="torch", **options)
            for q in draws
        ]
        for i, got in enumerate((out, lse)):
            budget = max(error_budget(p[i], e[i]) for p, e in zip(plain, exact, strict=True))
            error = largest_error(got, exact[0][i])
            assert error <= budget, f"output {i} errs by {error:.3e}, more than {budget:.3e}"
        return out, lse


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_format_in_a_mixed_batch(fmt: tuple[KVFormat, torch.dtype], splits: int) -> None:
    """Decode, a chunk, a first prefill, an empty row and padding, over NaN: B02, D10, D11."""
    call = Call(
        [70, 9, 20, 0], [1, 3, 20, 0], fmt=fmt[0], dtype=fmt[1], heads=(6, 2), D=24, N=3,
        pad_tokens=3, storage="padded",
    )  # fmt: skip
    out, lse = call.check(num_splits=splits)
    assert (out[-3:] == 0).all() and (lse[-3:] == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 2, 4, 7])
@pytest.mark.parametrize("window", [-1, 5])
def test_batch_three_times_three_queries(splits: int, window: int) -> None:
    """D09: batch, queries, splits and key heads, all more than one."""
    call = Call([9, 3, 250], [3, 3, 3], heads=(4, 2), N=16)
    call.check(num_splits=splits, window_left=window)


@pytest.mark.parametrize("N", [1, 3, 16, 64])
@pytest.mark.parametrize("G", [1, 3, 7])
def test_any_block_size_and_any_group(N: int, G: int) -> None:
    """D10, D17: neither is tied to the tile."""
    call = Call([75, 33], [2, 1], heads=(2 * G, 2), D=80 if N == 3 else 16, N=N, storage="HND")
    call.check()


@pytest.mark.parametrize("G", [1, 2, 4, 5, 8, 11, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_codes_are_multiplied_for_any_group(G: int, dtype: torch.dtype) -> None:
    """A few rows a head are split into bytes, one or two tiles of them; more are converted."""
    call = Call(
        [75, 40, 0, 33], [1, 2, 0, 1], fmt=KVFormat.INT8, dtype=dtype, heads=(2 * G, 2),
        D=80 if G == 5 else 32, N=32 if G % 2 else 3, pad_tokens=1,
    )  # fmt: skip
    call.check(num_splits=2)
    call.check(softcap=4.0, window_left=20)


def test_queries_of_any_size_meet_codes() -> None:
    """Rows of one tile have a unit each: huge, tiny, zero, with one large channel, and NaN."""
    call = Call([75, 40], [1, 1], fmt=KVFormat.INT8, dtype=torch.bfloat16, heads=(6, 1), D=32)
    for row, factor in enumerate([3e30, 1e-30, 0.0]):
        call.q[:, row] *= factor
    call.q[:, 3, 7] = 900.0
    scale = 1e-3
    call.check(scale=scale)
    call.q[0, 4, 3], call.q[1, 5, 0] = torch.nan, torch.inf
    out, lse = call.run(scale=scale)
    bad = torch.zeros(2, 6, dtype=torch.bool)
    bad[0, 4], bad[1, 5] = True, True
    assert torch.equal(out.isnan().any(-1), bad) and torch.equal(lse.isnan(), bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_large_value_leaves_the_channels_of_others_alone(dtype: torch.dtype) -> None:
    """Weights are rounded against the largest of a tile: one value a hundred times the others."""
    call = Call([32], [1], fmt=KVFormat.INT8, dtype=dtype, heads=(4, 1), D=32, N=32)
    call.q.zero_()
    g = torch.Generator().manual_seed(1)
    rows = torch.rand(32, 1, 32, generator=g) + 0.5
    rows[5] = 0
    rows[5, 0, 0] = 100
    slots = call.step.block_table[0, 0].long() * 32 + torch.arange(32)
    call.layer.write(rows, rows, slots)
    out, _ = call.run()
    plain = paged_decode_attention(call.layer, call.step, call.q, backend="torch")
    exact, _ = paged_attention_oracle(call.q, call.layer, call.step)
    error, budget = (
        largest_error(x[..., 1:], exact[..., 1:]) for x in (out, plain)
    )  # fmt: skip
    assert error <= 2 * budget


def test_a_contiguous_layer_is_one_block_a_sequence() -> None:
    call = Call([70, 9, 128], [1, 9, 2], capacity=128, fmt=KVFormat.INT8)
    call.check(num_splits=2)


def test_more_query_heads_than_a_tile_holds() -> None:
    Call([20], [2], heads=(70, 1)).check()


@pytest.mark.parametrize("queries", [40, 90])
def test_long_chunks_take_larger_tiles(queries: int) -> None:
    call = Call([queries + 30, queries], [queries, queries], heads=(6, 2), dtype=torch.float16,
                fmt=KVFormat.FP16)  # fmt: skip
    call.check()


@pytest.mark.parametrize("window", [0, 1, 15, 16, 63, 64, 200, 2**31 - 1, 10**12])
def test_windows_at_every_edge_of_a_tile(window: int) -> None:
    """B07: keys that left the window are not even read."""
    call = Call([100, 64, 17], [1, 2, 17], heads=(2, 1), N=4)
    call.check(window_left=window, num_splits=2)


def test_blocks_that_left_the_window_may_hold_anything() -> None:
    call = Call([100], [1], heads=(2, 1), N=4)
    for cache in (call.layer.k, call.layer.v):
        cache[call.step.block_table[0, : (99 - 6) // 4].long()] = torch.nan
    call.check(window_left=6)


@pytest.mark.parametrize("softcap", [0.01, 3.0, 50.0])
def test_soft_caps(softcap: float) -> None:
    """The tangent is as exact near zero as far from it."""
    Call([40, 12], [2, 12], D=24).check(softcap=softcap, scale=1.7)


@pytest.mark.parametrize("scale", [-0.3, 1e-6, 0.0])
def test_unusual_scales(scale: float) -> None:
    Call([40], [2], D=24).check(scale=scale)


def test_empty_splits_are_the_identity() -> None:
    """D07: a window of 8 in 64 tokens over 4 splits is the mean of the last 8."""
    call = Call([64, 0, 1], [1, 0, 1], heads=(2, 1))
    call.q[0] = 0
    call.step.max_context = 1000
    out, lse = call.check(window_left=7, num_splits=4)
    values = gather(call.layer, call.step)[1][0, 56:64].double()
    torch.testing.assert_close(out[0, 0].double(), values.mean(0)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(lse[0], torch.full((2,), 8.0).log())
    # one key, split in many: exactly its value
    own = gather(call.layer, call.step)[1][2, 0]
    assert torch.equal(out[1], own.expand(2, -1))


def test_more_new_tokens_than_stored_ones_see_nothing() -> None:
    """E07: queries before the first stored token."""
    call = Call([10], [10])
    call.step.context_lens[0] = 4
    out, lse = call.run()
    assert (out[:6] == 0).all() and (lse[:6] == -torch.inf).all()
    assert out[6:].isfinite().all() and lse[6:].isfinite().all()


@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("fmt", ["fp32", "bf16 over INT8"])
def test_what_is_stored_and_not_finite_reaches_those_who_see_it(
    fmt: str, splits: int, window: int
) -> None:
    call = Call([40, 9], [20, 9], fmt=FORMATS[fmt][0], dtype=FORMATS[fmt][1], D=24, N=3)
    table, layer = call.step.block_table.long(), call.layer
    for b, token, head in ((0, 22, 0), (0, 30, 0), (0, 35, 1), (1, 4, 1)):
        block, offset = table[b, token // 3], token % 3
        if layer.v_scale is None:
            layer.v[block, offset, head, 5] = torch.nan if b == 0 else torch.inf
        else:
            layer.v_scale[block, offset, head] = torch.nan
    block = table[1, 2]
    (layer.k if layer.k_scale is None else layer.k_scale)[block, 0, 0] = torch.nan
    out, lse = call.run(num_splits=splits, window_left=window)
    expected, expected_lse = paged_decode_attention(
        layer, call.step, call.q, window_left=window, return_lse=True, backend="torch"
    )
    assert torch.equal(out.isfinite(), expected.isfinite()) and not out.isfinite().all()
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)


def test_scales_of_any_size_do_not_overflow_fp16() -> None:
    """Values of 3e4 beside values of 1e-6, both in FP16."""
    call = Call([30], [1], fmt=KVFormat.INT8, dtype=torch.float16, heads=(2, 2))
    assert call.layer.v_scale is not None
    at = call.step.block_table[0].long()
    call.layer.v_scale[at[0]] = 200.0
    call.layer.v_scale[at[1], :14] = 1e-8
    call.check()
    call.layer.v_scale[at] = 1e-6  # times a weight of 1/30 that is less than FP16 has
    call.check()


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16 over INT8"])
def test_one_split_gives_the_same_bits_alone_and_in_a_batch(fmt: str) -> None:
    shape: dict[str, Any] = {"fmt": FORMATS[fmt][0], "dtype": FORMATS[fmt][1], "N": 16, "D": 24}
    call = Call([20, 75, 33, 5], [20, 1, 3, 1], **shape, pad_tokens=2)
    together = call.run(num_splits=1)
    edges = call.step.cu_seqlens.tolist()
    for b in range(4):
        rows = slice(edges[b], edges[b + 1])
        step = Step(
            slots=call.step.slots[rows],
            positions=call.step.positions[rows],
            cu_seqlens=torch.tensor([0, edges[b + 1] - edges[b]], dtype=torch.int32),
            block_table=call.step.block_table[b : b + 1],
            context_lens=call.step.context_lens[b : b + 1],
            max_query=edges[b + 1] - edges[b],
            max_context=100,
        )
        alone = paged_decode_attention(
            call.layer, step, call.q[rows], num_splits=1, return_lse=True, backend="triton"
        )
        for mine, ours in zip(alone, together, strict=True):
            assert torch.equal(mine, ours[rows]), f"sequence {b}"
    # nor does it matter what the bounds are
    call.step.max_query, call.step.max_context = 4000, 10**6
    assert all(map(torch.equal, call.run(num_splits=1), together))


def test_bounds_may_be_larger_than_lengths() -> None:
    """A graph keeps those it was captured with: more splits than there are keys."""
    call = Call([30, 5], [1, 1])
    call.step.max_context = 10**6
    call.check()
    call.step.max_query = 50
    call.check()


def test_lengths_past_the_table_read_no_further() -> None:
    """B06, unchecked: 9 tokens in a table of 2 blocks of 4 are 8, and foreign ids stay inside."""
    call = Call([8, 8], [1, 1], N=4, heads=(2, 1))
    call.step.block_table = call.step.block_table[:, :2].clone()
    call.step.context_lens[0] = 9
    call.step.block_table[1] = torch.tensor([10**6, -5])
    out, lse = call.run()
    expected, _ = paged_decode_attention(
        call.layer, call.step, call.q, return_lse=True, backend="torch"
    )
    torch.testing.assert_close(out[0], expected[0])
    call.step.context_lens[:] = -1
    out, lse = call.run()
    assert (out == 0).all() and (lse == -torch.inf).all()


def _far_cache(form: str) -> tuple[CacheTensors, int, int]:
    """Return INT8 keys and values whose last rows lie past 2^32 elements, a block and N."""
    P, N, H, D = 300_001, 16, 8, 128
    # 5 GB of address space, of which only the pages that a test writes become memory
    codes = torch.empty(P, N, H, D, dtype=torch.int8)
    scales = torch.empty(P, H, N).transpose(1, 2)
    if form == "one long block":
        codes, scales = codes.view(1, P * N, H, D), torch.empty(1, H, P * N).transpose(1, 2)
        return CacheTensors(codes, codes, scales, scales), 0, P * N
    return CacheTensors(codes, codes, scales, scales), P - 1, N


@pytest.mark.parametrize("form", ["block 300,000", "one long block"])
def test_offsets_are_64_bit(form: str) -> None:
    """B03: block 300,000 of 16,384 elements, which 32 bits would place at 620,232,704."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache, block, N = _far_cache(form)
    spec = KVSpec(kv_heads=8, head_dim=128, block_size=N, format=KVFormat.INT8)
    layer = KVLayer(spec, *cache, is_paged=True)
    first = 300_000 * 16  # slot
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, 128, generator=g)
    step = Step(
        slots=torch.tensor([first, first + 1, first + 2]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        block_table=torch.full((1, 1), block, dtype=torch.int32),
        context_lens=torch.tensor([3 if N == 16 else first + 3], dtype=torch.int32),
        max_query=1,
        max_context=3,
    )
    # keys and values are one buffer: what is stored is read back as both
    append(layer, step, rows, rows, backend="triton")
    k, k_scale = (x.flatten(0, 1)[first : first + 3] for x in (cache.k, cache.k_scale))
    small = KVSpec(kv_heads=8, head_dim=128, block_size=16, format=KVFormat.INT8)
    near = KVLayer.paged(small, blocks=1)
    near.write(rows, rows, torch.arange(3))
    assert torch.equal(k, near.k[0, :3]) and torch.equal(k_scale, near.k_scale[0, :3])

    q = torch.randn(3, 16, 128, generator=g)
    near_step = Step(
        slots=torch.zeros(3, dtype=torch.int64),
        positions=torch.zeros(3, dtype=torch.int64),
        cu_seqlens=step.cu_seqlens,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        context_lens=torch.tensor([3]),
        max_query=1,
        max_context=3,
    )
    out = paged_decode_attention(layer, step, q, window_left=2, backend="triton")
    expected = paged_decode_attention(near, near_step, q, window_left=2, backend="triton")
    torch.testing.assert_close(out, expected)
    if N == 16:
        copied = gather(layer, step, backend="triton")
        torch.testing.assert_close(copied, gather(near, near_step), rtol=0, atol=0)
    # one fused write of the same rows
    packed = torch.cat([torch.zeros(3, 1024), rows.flatten(1), rows.flatten(1)], 1)
    k.zero_()
    paged_write(layer, step, packed, None, None, None, None, rope="none", backend="triton")
    assert torch.equal(k, near.k[0, :3])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 20, f"the test took {grown / 2**20:.2f} GB"
