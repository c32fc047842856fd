"""slot_attention on a CUDA device: every row and block size against FP64, and what it costs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kv_core.errors import CapacityError, NoKernelError
from kv_core.fixed_slot import LayerKV
from kv_core.spec import KVFormat
from kv_kernels.ops.slot_attention import parts
from kv_kernels.ops.slot_attention.flex import compiles
from kv_kernels.registry import ROWS, Row
from kv_kernels.testing import assert_within_budget, random_mask

pytestmark = pytest.mark.gpu

BIG: dict[str, Any] = {
    "device": "cuda",
    "heads": (8, 2),
    "dims": (64, 64),
    "queries": 1000,
    "text": 77,
    "chunk": 1024,
    "memory": 1999,
    "segments": (6, 11),
    "block_size": 128,
}
SOME = {"128": 128, "64x128": (64, 128), "16": 16}
BLOCKS = {
    **SOME,
    "128x64": (128, 64),
    "256": 256,
    "64": 64,
    "32": 32,
    "48": 48,
    "96x160": (96, 160),
}
HEADS = {
    "128": (128, 128),
    "256": (256, 256),
    "80": (80, 80),
    "wide values": (64, 128),
    "narrow values": (128, 40),
    "odd": (33, 17),
}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ROW_CASES = [
    pytest.param(row, dtype, id=f"{row.k_format.name}-{row.backend}-{dtype}")
    for row in ROWS
    if row.op == "slot_attention"
    for dtype in (FLOATS if row.k_format.is_quantized else [row.k_format.dtype])
]


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    torch._dynamo.reset()
    parts.release_scratch()
    yield
    parts.release_scratch()


@pytest.mark.parametrize(("row", "dtype"), ROW_CASES)
@pytest.mark.parametrize("block_size", SOME.values(), ids=SOME)
def test_every_row_is_within_the_budget(
    row: Row,
    dtype: torch.dtype,
    block_size: Any,
    make_call: Callable[..., Any],
    skip_if_rejected: Callable[..., None],
) -> None:
    int8 = row.k_format is KVFormat.INT8
    call = make_call(**BIG | {"dtype": dtype, "int8": int8, "block_size": block_size})
    skip_if_rejected(row, call.query())
    call.check(row.backend)


@pytest.mark.parametrize("block_size", BLOCKS.values(), ids=BLOCKS)
def test_flex_takes_every_block_in_multiples_of_16(
    block_size: Any, make_call: Callable[..., Any]
) -> None:
    call = make_call(**BIG | {"dtype": torch.bfloat16, "block_size": block_size})
    call.check("flex")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", HEADS.values(), ids=HEADS)
def test_flex_takes_every_head_from_16_to_256(
    dims: tuple[int, int], dtype: torch.dtype, make_call: Callable[..., Any]
) -> None:
    call = make_call(**BIG | {"dtype": dtype, "dims": dims, "heads": (4, 4), "queries": 300})
    call.check("flex")


@pytest.mark.parametrize("queries", [1, 20, 127])
def test_few_queries_take_the_same_kernel(queries: int, make_call: Callable[..., Any]) -> None:
    """A split over keys would need a tile of queries that small blocks cannot hold."""
    options = {"queries": queries, "segments": (1, 11), "block_size": 16, "dtype": torch.bfloat16}
    make_call(**BIG | options).check("flex")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_log_sum_exp_is_within_the_budget(
    dtype: torch.dtype, make_call: Callable[..., Any]
) -> None:
    """E07 on CUDA: queries that see nothing have 0 and minus infinity."""
    call = make_call(**BIG | {"dtype": dtype, "empty_queries": True})
    out, lse = call.run("flex", return_lse=True)
    exact, exact_lse = call.run("torch", return_lse=True)
    oracle, oracle_lse = call.oracle()
    assert lse.dtype == torch.float32 and oracle_lse.isinf().any()
    assert_within_budget(out, exact, oracle)
    assert_within_budget(lse, exact_lse, oracle_lse)
    assert (out[oracle_lse.isinf().to(out.device)] == 0).all()


def test_fp32_stays_exact_when_torch_may_use_tf32(make_call: Callable[..., Any]) -> None:
    call = make_call(**BIG)
    exact, oracle = call.run("torch"), call.oracle()[0]
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert_within_budget(call.run("flex"), exact, oracle)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(("queries", "keys", "block_size"), [(256, 384, 256), (512, 512, 48)])
def test_what_lies_behind_the_last_key_is_never_read(
    queries: int, keys: int, block_size: int, make_call: Callable[..., Any]
) -> None:
    """Lengths in multiples of 128 whose last block is cut; behind it lies NaN."""
    sizes = {"queries": queries, "text": None, "chunk": keys, "memory": None}
    call = make_call(**BIG | sizes | {"dtype": torch.bfloat16, "block_size": block_size})
    sides = []
    for side in call.chunk:
        B, H, S, D = side.shape
        buffer = side.new_full((B, H, S + 512, D), torch.nan)
        buffer[:, :, :S] = side
        sides.append(buffer[:, :, :S])
    call.chunk = LayerKV(*sides)
    assert call.run("flex").isfinite().all()
    call.check("flex")


def test_masks_do_not_compile_and_lengths_compile_at_most_once_each(
    make_call: Callable[..., Any],
) -> None:
    """E05 on CUDA."""
    before = compiles()
    for seed in range(20):
        segments = (2 + seed % 5, 3 + seed % 7)
        call = make_call(seed, **BIG | {"dtype": torch.bfloat16, "segments": segments})
        call.run()
    assert compiles() - before == 1
    lengths = [300, 500, 640, 300, 900, 1024, 500]
    seen = []
    for queries in lengths:
        make_call(**BIG | {"dtype": torch.bfloat16, "queries": queries}).check("flex")
        seen.append(compiles() - before)
    print("compilations after each length", dict(zip(lengths, seen, strict=True)))
    assert seen[-1] <= 1 + len(set(lengths))
    for queries in lengths:
        make_call(**BIG | {"dtype": torch.bfloat16, "queries": queries}).run()
    assert compiles() - before == seen[-1]


def test_the_recompile_limit_is_an_error(make_call: Callable[..., Any]) -> None:
    """D16: never dense without a word."""
    first = make_call(**BIG | {"dtype": torch.bfloat16})
    first.run()
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(CapacityError, match="is reached"),
    ):
        make_call(**BIG | {"dtype": torch.bfloat16, "queries": 77}).run()
    first.check("flex")


def test_adjacent_parts_are_attended_where_they_are(make_call: Callable[..., Any]) -> None:
    call = make_call(**BIG | {"dtype": torch.bfloat16, "joined": True})
    call.check("flex")
    assert parts.scratch_nbytes() == 0
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call.run("flex")
    torch.cuda.synchronize()
    joined = 2 * sum(side.nbytes for side in call.chunk)
    assert torch.cuda.max_memory_allocated() - held < out.nbytes + joined / 2


@pytest.mark.parametrize("int8", [False, True])
def test_a_call_never_waits_for_the_device(make_call: Callable[..., Any], int8: bool) -> None:
    call = make_call(**BIG | {"dtype": torch.bfloat16, "int8": int8})
    call.run("flex")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        call.run("flex")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("int8", [False, True])
def test_a_captured_call_replays_with_new_contents(
    make_call: Callable[..., Any], int8: bool
) -> None:
    """D19: scratch of a captured call belongs to the graph."""
    call = make_call(**BIG | {"dtype": torch.bfloat16, "int8": int8})
    call.run("flex")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run("flex")
    # a longer call grows the scratch of eager calls, which the graph must not depend on
    longer = make_call(1, **BIG | {"dtype": torch.bfloat16, "int8": int8, "memory": 4999})
    longer.run("flex")
    other = make_call(2, **BIG | {"dtype": torch.bfloat16, "int8": int8})
    targets = [call.q, *call.chunk, *call.parts["text"], *call.parts["memory"]]
    sources = [other.q, *other.chunk, *other.parts["text"], *other.parts["memory"]]
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert_within_budget(out, call.run("torch"), call.oracle()[0])


def test_a_compiled_model_holds_it(make_call: Callable[..., Any]) -> None:
    from kv_kernels import slot_attention

    def model(q: torch.Tensor, call: Any) -> torch.Tensor:
        return slot_attention(q * 2, call.chunk, call.mask, **call.parts) + 1

    compiled = torch.compile(model, fullgraph=True)
    for seed in range(2):
        call = make_call(seed, **BIG | {"dtype": torch.bfloat16})
        call.mask.block_mask()
        torch.testing.assert_close(compiled(call.q, call), model(call.q, call), rtol=0, atol=0)


def test_a_head_of_512_goes_to_the_exact_row_or_is_refused(make_call: Callable[..., Any]) -> None:
    """D17."""
    call = make_call(**BIG | {"dims": (512, 512), "heads": (2, 1), "queries": 100})
    torch.testing.assert_close(call.run(), call.run("torch"), rtol=0, atol=0)
    with pytest.raises(NoKernelError, match="takes D from 16 to 256, got 512"):
        call.run("flex")


def test_masks_of_the_device_are_drawn_alike() -> None:
    masks = [
        random_mask(100, 200, generator=torch.Generator().manual_seed(0), device=device)
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(masks[0].dense(), masks[1].dense().cpu())
