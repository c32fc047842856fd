"""slot_attention on every row of the table, against FP64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kv_core.fixed_slot import LayerKV, QuantizedLayerKV
from kv_core.spec import KVFormat
from kv_kernels import SegmentMask, slot_attention
from kv_kernels.ops.slot_attention import reference
from kv_kernels.registry import ROWS, Row
from kv_kernels.testing import LAYOUTS, assert_within_budget, exact_values

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads and wider values": {},
    "one head for each query head": {"heads": (3, 3), "dims": (16, 16)},
    "one key head": {"heads": (4, 1), "batch": 1},
    "odd sizes": {"dims": (33, 5), "queries": 7, "text": 1, "chunk": 3, "memory": 2},
    "head of 512": {"dims": (512, 512), "heads": (2, 1), "batch": 1},
    "one query": {"queries": 1, "segments": (1, 6)},
    "no text": {"text": None},
    "empty text": {"text": 0},
    "no memory": {"memory": None},
    "chunk alone": {"text": None, "memory": None},
    "uneven blocks": {"block_size": (16, 48)},
    **{f"{layout} memory": {"layout": layout, "joined": True} for layout in LAYOUTS},
}
SOLE_SHAPE = next(iter(SHAPES))  # for what has to be compiled for seconds
SLOT_ROWS = [row for row in ROWS if row.op == "slot_attention"]


def _dtypes(row: Row) -> list[torch.dtype]:
    floats = [torch.float32, torch.float16, torch.bfloat16]
    return floats if row.k_format.is_quantized else [row.k_format.dtype]


CASES = [
    pytest.param(row, dtype, shape, id=f"{row.k_format.name}-{row.backend}-{dtype}-{name}")
    for row in SLOT_ROWS
    for dtype in _dtypes(row)
    for name, shape in SHAPES.items()
    if row.backend != "flex" or name == SOLE_SHAPE
]


@pytest.mark.parametrize(("row", "dtype", "shape"), CASES)
def test_every_row_is_within_the_budget(
    row: Row,
    dtype: torch.dtype,
    shape: dict[str, Any],
    make_call: Callable[..., Any],
    skip_if_rejected: Callable[..., None],
) -> None:
    int8 = row.k_format is KVFormat.INT8
    if int8 and shape.get("memory", 0) is None:
        pytest.skip("there is no INT8 without memory")
    call = make_call(dtype=dtype, int8=int8, **shape)
    skip_if_rejected(row, call.query())
    call.check(row.backend)


@pytest.mark.parametrize("int8", [False, True])
def test_the_log_sum_exp_is_within_the_budget(make_call: Callable[..., Any], int8: bool) -> None:
    call = make_call(int8=int8, empty_queries=True)
    out, lse = call.run(return_lse=True)
    oracle_lse = call.oracle()[1]
    keys = [exact_values(part)[0] for part in (call.parts["text"], call.chunk)]
    k = torch.cat([*keys, exact_values(call.parts["memory"])[0]], 2).float()
    scores = call.q @ k.repeat_interleave(2, 1).mT * 32**-0.5
    plain = scores.masked_fill(~call.mask.dense(), -torch.inf).logsumexp(-1)
    assert lse.dtype == torch.float32
    assert_within_budget(lse, plain, oracle_lse)
    torch.testing.assert_close(out, call.run(), rtol=0, atol=0)
    assert (out[oracle_lse.isinf()] == 0).all() and oracle_lse.isinf().any()


def _poisoned(call: Any) -> torch.Tensor:
    """Put NaN into every key and value that no query sees; return which keys those are."""
    unseen = ~call.mask.dense().any(0)
    start = 0
    for part in (call.parts["text"], call.chunk, call.parts["memory"]):
        S = part.k.shape[2]
        rows = unseen[start : start + S]
        if isinstance(part, QuantizedLayerKV):
            part.k_scale[:, :, rows] = torch.nan
            part.v_scale[:, :, rows] = torch.inf
        else:
            part.k[:, :, rows] = torch.nan
            part.v[:, :, rows] = torch.inf
        start += S
    return unseen


@pytest.mark.parametrize("int8", [False, True])
def test_what_no_query_sees_may_hold_anything(make_call: Callable[..., Any], int8: bool) -> None:
    """Garbage is harmless: the torch row does not read it."""
    table = np.array([[True, False, True, False, False, True]] * 2, np.bool_)
    call, clean = make_call(int8=int8), make_call(int8=int8)
    mask = SegmentMask.build(table, [30, 7], [5, 20, 30, 40, 10, 40])
    call.mask = clean.mask = mask
    assert int(_poisoned(call).sum()) == 70
    torch.testing.assert_close(call.run("torch"), clean.run("torch"), rtol=0, atol=0)


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_nan_reaches_the_queries_that_see_it_and_no_other(
    make_call: Callable[..., Any], side: str
) -> None:
    call, clean = make_call(), make_call()
    getattr(call.parts["memory"], side)[:, :, 17] = torch.nan
    sees = call.mask.dense()[:, 5 + 50 + 17]
    assert 0 < int(sees.sum()) < len(sees)
    out, expected = call.run("torch"), clean.run("torch")
    assert out[:, :, sees].isnan().all()
    torch.testing.assert_close(out[:, :, ~sees], expected[:, :, ~sees], rtol=0, atol=0)


def test_queries_that_see_nothing_get_zero_and_minus_infinity() -> None:
    """E07: 8 x 8, the first two queries see nothing."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    mask = SegmentMask.build(np.array([[False], [True]]), [2, 6], [8])
    out, lse = slot_attention(q, LayerKV(k, v), mask, return_lse=True)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -torch.inf).all()
    assert out[:, :, 2:].isfinite().all() and lse[:, :, 2:].isfinite().all()


def test_no_keys_and_no_queries_are_sizes_like_others() -> None:
    q, nothing = torch.randn(1, 2, 3, 8), torch.empty(1, 2, 0, 8)
    mask = SegmentMask.build(np.zeros((1, 0), np.bool_), [3], [])
    for backend in ("torch", "flex"):
        out = slot_attention(q, LayerKV(nothing, nothing), mask, backend=backend)
        assert out.shape == q.shape and (out == 0).all()
    mask = SegmentMask.build(np.zeros((0, 1), np.bool_), [], [3])
    for backend in ("torch", "flex"):
        out = slot_attention(nothing, LayerKV(q, q), mask, backend=backend)
        assert out.shape == (1, 2, 0, 8)


def test_blocks_of_queries_do_not_change_the_answer(
    make_call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by working on a few queries, and a few keys, at a time."""
    call = make_call(int8=True, empty_queries=True)
    whole, oracle = call.run("torch"), call.oracle()[0]
    monkeypatch.setattr(reference, "_SCORES", 4 * 2 * 145 * 3)  # three queries
    monkeypatch.setattr(reference, "_KEYS", 11)
    assert_within_budget(call.run("torch"), whole, oracle)


def test_scores_of_one_block_of_queries_are_all_the_memory_it_takes(
    make_call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    cat = torch.cat

    def watched(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        joined = cat(tensors, dim)
        sizes.append(joined.numel())
        return joined

    call = make_call()
    monkeypatch.setattr(reference, "_SCORES", 5000)
    monkeypatch.setattr(reference.torch, "cat", watched)
    call.run("torch")
    assert sizes and max(sizes) <= 5000


def test_the_block_size_of_the_mask_does_not_change_a_bit(make_call: Callable[..., Any]) -> None:
    """E09: the bookkeeping of blocks is nothing to the torch row."""
    first = make_call(block_size=128).run("torch")
    for block_size in (1, 16, (64, 128), (150, 333)):
        other = make_call(block_size=block_size).run("torch")
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_a_permutation_of_keys_stays_within_the_budget(make_call: Callable[..., Any]) -> None:
    """E09: other places of the same keys may change last bits, and no more than that."""
    call = make_call(text=None, memory=None, chunk=120)
    table = np.array([[True, False, True], [True, True, False]])
    call.mask = SegmentMask.build(table, [20, 17], [40, 50, 30])
    before, oracle = call.run(), call.oracle()[0]
    order = torch.cat([torch.arange(90, 120), torch.arange(90)])
    call.chunk = LayerKV(*(side[:, :, order] for side in call.chunk))
    call.mask = SegmentMask.build(table[:, [2, 0, 1]], [20, 17], [30, 40, 50])
    assert_within_budget(call.run(), before, oracle)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_output_is_laid_out_like_the_queries(
    make_call: Callable[..., Any], is_transposed: bool
) -> None:
    call = make_call()
    if not is_transposed:
        call.q = call.q.contiguous()
    out = call.run()
    assert (out.transpose(1, 2) if is_transposed else out).is_contiguous()


def test_a_scale_is_used_as_it_is(make_call: Callable[..., Any]) -> None:
    call = make_call()
    torch.testing.assert_close(call.run(scale=0.0), call.run(scale=-0.0), rtol=0, atol=0)
    torch.testing.assert_close(call.run(scale=32**-0.5), call.run(), rtol=0, atol=0)
    assert not torch.equal(call.run(scale=1.0), call.run())


def test_autocast_does_not_lower_the_precision(make_call: Callable[..., Any]) -> None:
    call = make_call()
    expected = call.run("torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call.run("torch")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_inputs_stay_as_they_are(make_call: Callable[..., Any]) -> None:
    call, clean = make_call(int8=True), make_call(int8=True)
    call.run()
    for mine, other in zip(
        [call.q, *call.chunk, *call.parts["memory"]],
        [clean.q, *clean.chunk, *clean.parts["memory"]],
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_the_registered_op_passes_opcheck(
    make_call: Callable[..., Any], int8: bool, lse: bool
) -> None:
    call = make_call(int8=int8, empty_queries=True)
    op = torch.ops.kv_kernels.slot_attention.default
    torch.library.opcheck(op, call.op_args("torch", lse=lse))
    call.q = call.q.contiguous()
    torch.library.opcheck(op, call.op_args("torch", lse=lse), test_utils="test_faketensor")


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_holds_it_without_a_graph_break(
    make_call: Callable[..., Any], compiler: str
) -> None:
    torch._dynamo.reset()

    def model(q: torch.Tensor, call: Any) -> torch.Tensor:
        out = slot_attention(q * 2, call.chunk, call.mask, backend="torch", **call.parts)
        return out + 1

    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    for seed in range(2):
        call = make_call(seed, int8=True)
        torch.testing.assert_close(compiled(call.q, call), model(call.q, call), rtol=0, atol=0)
