"""What went wrong elsewhere, on the paged operations: each case by its number, on each backend."""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kv_core.errors import NoKernelError, ShapeError, SpecError
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import (
    append,
    explain,
    find,
    gather,
    paged_decode_attention,
    paged_write,
    registry,
)
from kv_kernels.library import call_query
from kv_kernels.registry import Row
from kv_kernels.testing import (
    assert_within_budget,
    make_layer,
    make_step,
    paged_attention_oracle,
    random_paged,
    storage_bytes,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine can run on the CPU."""
    query = call_query("append", KVFormat.FP32, KVFormat.FP32, CPU, torch.float32, 8, True)
    try:
        find(query, request.param)
    except NoKernelError as error:
        pytest.skip(str(error))
    return request.param


def make_spec(H: int, D: int, N: int, fmt: KVFormat = KVFormat.FP32) -> KVSpec:
    return KVSpec(kv_heads=H, head_dim=D, block_size=N, format=fmt)


def slots_only(slots: Sequence[int], dtype: torch.dtype = torch.int64) -> Step:
    """A step that only says where tokens go."""
    T = len(slots)
    ids = torch.tensor(slots, dtype=dtype)
    return Step(
        slots=ids,
        positions=torch.zeros(T, dtype=dtype),
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=dtype),
        context_lens=torch.tensor([T], dtype=torch.int32),
        max_query=T,
        max_context=T,
    )


def rows(*values: float, H: int = 1, D: int = 8) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, H, D).clone()


def test_b01_slot_minus_one_stores_nothing_anywhere(backend: str) -> None:
    layer = make_layer(make_spec(1, 8, 4), 3, garbage=False)
    append(layer, slots_only([1, -1]), rows(7, 9), rows(7, 9), backend=backend)
    for side in (layer.k, layer.v):
        assert side.flatten(0, 1)[1].eq(7).all()
        assert side.sum() == 7 * 8


@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8], ids=lambda fmt: fmt.name)
def test_b02_the_block_for_padding_is_neither_poisoned_nor_read(
    backend: str, fmt: KVFormat
) -> None:
    layer = make_layer(make_spec(1, 8, 4, fmt), 3)
    layer.zero_blocks([0])
    step = Step(
        slots=torch.tensor([10, -1]),
        positions=torch.tensor([2, 0]),
        cu_seqlens=torch.tensor([0, 1, 1], dtype=torch.int32),
        block_table=torch.tensor([[2, 0, 0], [0, 0, 0]], dtype=torch.int32),
        context_lens=torch.tensor([3, 0], dtype=torch.int32),
        max_query=1,
        max_context=3,
        null_block=True,
    )
    torch.manual_seed(0)
    new = torch.randn(2, 1, 8)
    new[1] = torch.nan
    append(layer, slots_only([8, 9]), torch.randn(2, 1, 8), torch.randn(2, 1, 8), backend=backend)
    append(layer, step, new, new, backend=backend, checked=True)
    assert not any(tensor[0].any() for tensor in layer.tensors().values())
    q = torch.cat([torch.randn(1, 32, 8), torch.full((1, 32, 8), torch.nan)])
    out, lse = paged_decode_attention(
        layer, step, q, return_lse=True, backend=backend, checked=True
    )
    oracle = paged_attention_oracle(q, layer, step)[0]
    plain = paged_attention_oracle(q, layer, step, dtype=torch.float32)[0]
    assert_within_budget(out, plain, oracle)
    assert out[0].isfinite().all() and not out[1].any() and lse[1].eq(-torch.inf).all()


def test_b06_a_length_past_the_table_reads_no_further(backend: str) -> None:
    """8 rows of a table of 2 blocks; the ninth is not there. Checked mode says so."""
    layer = make_layer(make_spec(1, 8, 4), 4)
    filled = make_step([[3, 1]], [8], [1], 4)
    append(layer, make_step([[3, 1]], [8], [8], 4), rows(*range(8)), rows(*range(8)))
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)[:, :2]  # a third id lies behind it
    step = make_step([[3, 1]], [8], [1], 4)
    step.block_table, step.max_context = table, 9
    step.context_lens = torch.tensor([9], dtype=torch.int32)
    q = torch.zeros(1, 1, 8)
    out = paged_decode_attention(layer, step, q, backend=backend)
    assert torch.allclose(out, torch.full_like(out, 3.5))
    assert torch.equal(out, paged_decode_attention(layer, filled, q, backend=backend))
    k, _ = gather(layer, step, backend=backend)
    assert torch.equal(k[0, :, 0, 0], torch.tensor([*map(float, range(8)), 0.0]))
    with pytest.raises(SpecError, match=r"context_lens\[0\] must be from 0 to 8 .* got 9"):
        paged_decode_attention(layer, step, q, checked=True)


@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8], ids=lambda fmt: fmt.name)
def test_d01_halves_of_one_row_are_written_like_a_pool_of_their_own(
    backend: str, fmt: KVFormat
) -> None:
    k, v = torch.randn(2, 1, 2, 8)
    packed, alone = (
        make_layer(make_spec(2, 8, 4, fmt), 3, storage=storage, garbage=False)
        for storage in ("packed", "NHD")
    )
    for layer in (packed, alone):
        append(layer, slots_only([5]), k, v, backend=backend)
    for name, tensor in alone.tensors().items():
        assert torch.equal(packed.tensors()[name], tensor)
        assert bool(tensor[1, 1].any()) and tensor.count_nonzero() == tensor[1, 1].count_nonzero()


def test_d01_a_last_axis_with_gaps_is_read_or_refused_by_name() -> None:
    spec = make_spec(2, 8, 4)
    k, v = torch.zeros(2, 3, 4, 2, 16)[..., ::2]
    layer = KVLayer.adopt(spec, k, v)
    new = torch.randn(2, 1, 2, 8)
    append(layer, slots_only([5]), *new)
    assert torch.equal(layer.k[1, 1], new[0, 0])
    with pytest.raises(NoKernelError, match=r"triton .* torch could run it"):
        append(layer, slots_only([5]), *new, backend="triton")


ANGLES = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])


def turned(
    x: list[float], position: int, backend: str, rope: Any, columns: int = 2
) -> tuple[list[float], list[float]]:
    """Return the query and the stored key made of ``x`` at cos 1 (position 0) or sin 1 (1)."""
    D = len(x)
    layer = make_layer(make_spec(1, D, 4), 1)
    step = make_step([[0]], [1], [1], 4)
    step.positions = torch.tensor([position])
    cos, sin = (table[:, :columns] for table in ANGLES)
    qkv = torch.tensor([x * 3])
    q = paged_write(layer, step, qkv, None, None, cos, sin, rope=rope, backend=backend)
    return q.flatten().tolist(), layer.k[0, 0, 0].tolist()


def test_d02_what_is_not_rotated_arrives_in_the_query_and_in_the_cache(backend: str) -> None:
    x = [float(i) for i in range(1, 9)]
    for side in turned(x, 0, backend, "half"):
        assert side == x
    for side in turned(x, 1, backend, "half"):
        assert side[4:] == x[4:] and side[:4] == [-3, -4, 1, 2]


def test_d03_the_two_styles_are_told_apart(backend: str) -> None:
    x = [1.0, 2.0, 3.0, 4.0]
    for style, wanted in (("half", [-3, -4, 1, 2]), ("interleaved", [-2, 1, -4, 3])):
        for side in turned(x, 1, backend, style):
            assert side == wanted


def test_d04_positions_turn_and_slots_store(backend: str) -> None:
    """Tokens 100 and 101 in slots 0 and 1, and never the other way round."""
    layer = make_layer(make_spec(1, 4, 2), 1)
    step = slots_only([0, 1])
    step.positions = torch.tensor([100, 101])
    angles = torch.outer(torch.arange(102.0), torch.tensor([1.0, 0.1]))
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 3] * 2)
    paged_write(layer, step, qkv, None, None, cos, sin, rope="half", backend=backend, checked=True)
    for slot, position in enumerate((100, 101)):
        c, s = (
            torch.tensor(f)[None].double() for f in (cos[position].tolist(), sin[position].tolist())
        )
        a, b = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0]).double()
        wanted = torch.cat([a * c - b * s, b * c + a * s], -1)[0]
        assert torch.allclose(layer.k[0, slot, 0].double(), wanted, rtol=0, atol=1e-6)


BAD_SLOTS = {
    "twice": ([5, 5], "slots must differ, got 5 for tokens 0 and 1"),
    "below -1": ([1, -2], "slots[1] must be -1 or from 0 to 11 (P=3 blocks of N=4), got -2"),
    "past the end": ([12, 1], "slots[0] must be -1 or from 0 to 11 (P=3 blocks of N=4), got 12"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("slots", "message"), BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_d05_a_bad_slot_is_named_when_checked_and_never_writes_outside(
    backend: str, slots: list[int], message: str, dtype: torch.dtype
) -> None:
    layer = make_layer(make_spec(1, 8, 4), 3, storage="padded")
    before = storage_bytes(layer)
    with pytest.raises(SpecError, match=re.escape(message)):
        append(layer, slots_only(slots, dtype), rows(7, 9), rows(7, 9), checked=True)
    assert all(map(torch.equal, storage_bytes(layer), before))
    append(layer, slots_only(slots, dtype), rows(7, 9), rows(7, 9), backend=backend)
    inside = {slot for slot in slots if 0 <= slot < 12}
    changed = (layer.k[..., 0].isfinite()).flatten().nonzero().flatten().tolist()
    assert set(changed) == inside
    layer.k[:], layer.v[:] = torch.nan, torch.nan
    assert all(map(torch.equal, storage_bytes(layer), before))


@pytest.mark.parametrize(("tokens", "slots"), [(8, 5), (5, 8)])
def test_d06_more_rows_than_slots_and_fewer_are_refused(tokens: int, slots: int) -> None:
    layer = make_layer(make_spec(1, 8, 4), 3)
    new = torch.zeros(tokens, 1, 8)
    with pytest.raises(ShapeError, match=f"k must be .* with T={slots}, got T={tokens}; T is the"):
        append(layer, slots_only(range(slots)), new, new)


def test_d07_splits_without_a_key_change_nothing(backend: str) -> None:
    """64 keys, a window of 8, 4 splits: the mean of the last 8. Nothing at all stays nothing."""
    layer = make_layer(make_spec(1, 16, 16), 5)
    write = make_step([[4, 1, 3, 2], []], [64, 0], [64, 0], 16)
    values = torch.randn(64, 1, 16)
    append(layer, write, torch.randn(64, 1, 16), values)
    step = make_step([[4, 1, 3, 2], []], [64, 0], [1, 0], 16, pad_tokens=1)
    q = torch.zeros(2, 2, 16)
    out, lse = paged_decode_attention(
        layer, step, q, window_left=7, num_splits=4, return_lse=True, backend=backend
    )
    assert torch.allclose(out[0], values[-8:, 0].mean(0), rtol=0, atol=1e-6)
    assert lse[0].tolist() == pytest.approx([math.log(8)] * 2, abs=1e-6)
    assert not out[1].any() and lse[1].tolist() == [-math.inf] * 2


@pytest.mark.parametrize("splits", [1, 2, 4, 7])
@pytest.mark.parametrize("window", [-1, 5])
def test_d09_batches_of_chunks_with_splits(backend: str, splits: int, window: int) -> None:
    g = torch.Generator().manual_seed(splits)
    layer, step = random_paged(make_spec(2, 16, 4), [33, 7, 20], [3, 3, 3], generator=g)
    q = torch.randn(9, 4, 16, generator=g)
    out = paged_decode_attention(
        layer, step, q, window_left=window, num_splits=splits, backend=backend
    )
    oracle = paged_attention_oracle(q, layer, step, window_left=window)[0]
    plain = paged_decode_attention(layer, step, q, window_left=window, backend="torch")
    assert_within_budget(out, plain, oracle)


def test_d16_the_choice_and_every_refusal_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    find.cache_clear()
    bf16 = KVFormat.BF16
    query = call_query("paged_decode_attention", bf16, bf16, CPU, torch.bfloat16, 24, True)
    answers = [(row.backend, reason) for row, reason in explain(query)]
    assert [backend for backend, _ in answers] == ["triton", "varlen", "torch", "triton"]
    assert [reason for _, reason in answers[:3]] == [
        "(CUDA) needs a CUDA device, got cpu",
        "needs a CUDA device, got cpu",
        None,
    ]
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(make_spec(1, 24, 4, KVFormat.BF16), [5], [1], generator=g)
    q = torch.randn(1, 1, 24, dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO, "kv_kernels"):
        for _ in range(2):
            paged_decode_attention(layer, step, q)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "paged_decode_attention for BF16 on cpu (bfloat16, D 24): uses torch (triton (CUDA) needs "
        "a CUDA device, got cpu; varlen needs a CUDA device, got cpu"
    )
    with pytest.raises(NoKernelError, match=r"with backend 'varlen'.*torch could run it"):
        paged_decode_attention(layer, step, q, backend="varlen")


def _out_of_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("no memory left")


def test_d16_an_error_inside_a_row_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    find.cache_clear()
    monkeypatch.setattr(registry, "load", lambda target: _out_of_memory)
    bad = [Row("append", *[KVFormat.FP32] * 2, name, "", lambda query: None) for name in "ab"]
    monkeypatch.setattr(registry, "ROWS", bad)
    layer = make_layer(make_spec(1, 8, 4), 1)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        append(layer, slots_only([0]), rows(1), rows(1))
    find.cache_clear()


@pytest.mark.parametrize("N", [1, 3, 16, 1000])
def test_d17_any_size_of_a_block_works(backend: str, N: int) -> None:
    g = torch.Generator().manual_seed(N)
    layer, step = random_paged(make_spec(1, 16, N), [19, 4], [2, 1], generator=g)
    q = torch.randn(3, 2, 16, generator=g)
    out = paged_decode_attention(layer, step, q, backend=backend)
    plain = paged_decode_attention(layer, step, q, backend="torch")
    assert_within_budget(out, plain, paged_attention_oracle(q, layer, step)[0])


def test_d17_a_head_of_512_works_or_is_refused_by_its_limit() -> None:
    fp32 = KVFormat.FP32
    query = call_query("paged_decode_attention", fp32, fp32, CPU, torch.float32, 512, True)
    reasons = [reason for row, reason in explain(query) if row.backend == "triton"]
    assert all(reasons)
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(make_spec(1, 512, 4), [60], [30], generator=g)
    q = torch.randn(30, 4, 512, generator=g)
    out = paged_decode_attention(layer, step, q)
    plain = paged_attention_oracle(q, layer, step, dtype=torch.float32)[0]
    assert_within_budget(out, plain, paged_attention_oracle(q, layer, step)[0])


@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8], ids=lambda fmt: fmt.name)
def test_d18_chunks_and_reuse_give_the_same_answer(backend: str, fmt: KVFormat) -> None:
    """12 tokens at once, as 7 and 5, and with the first 7 stored by somebody else."""
    layer = make_layer(make_spec(1, 16, 7, fmt), 6)
    k, v, q = torch.randn(3, 12, 1, 16)

    def run(table: list[int], start: int, stop: int) -> torch.Tensor:
        step = make_step([table], [stop], [stop - start], 7)
        append(layer, step, k[start:stop], v[start:stop], backend=backend)
        return paged_decode_attention(layer, step, q[start:stop], backend=backend)

    whole = run([1, 2], 0, 12)
    pieces = torch.cat([run([3], 0, 7), run([3, 4], 7, 12)])
    reused = run([1, 5], 7, 12)
    assert (pieces - whole).abs().max() <= 1e-6
    assert (reused - whole[7:]).abs().max() <= 1e-6


def test_d20_ids_of_any_stride_mean_the_same(backend: str) -> None:
    """Ids with strides 8, 9 and 10, as columns of a wider tensor have; compiles are counted in
    test_paged_compile."""
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(
        make_spec(2, 16, 4, KVFormat.INT8), [9, 0, 6], [2, 0, 3], generator=g, pad_tokens=1
    )
    qkv, tables = torch.randn(6, 128, generator=g), torch.randn(2, 9, 8, generator=g)
    results = []
    for stride in (1, 8, 9, 10):
        ids = {}
        for name in ("slots", "positions", "cu_seqlens", "block_table", "context_lens"):
            tensor = getattr(step, name)
            ids[name] = tensor.new_full((*tensor.shape, stride), 77)[..., 0].copy_(tensor)
        strided = Step(**ids, max_query=3, max_context=9)
        q = paged_write(layer, strided, qkv, None, None, *tables, rope="half", backend=backend)
        out = paged_decode_attention(layer, strided, q, backend=backend)
        results.append((q, out, *gather(layer, strided, backend=backend)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
