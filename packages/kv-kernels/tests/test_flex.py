"""Compiled FlexAttention on the CPU: how often it compiles, what it copies, what it refuses.

Each new shape takes seconds, so the tests here share shapes where they can.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kv_core.errors import CapacityError
from kv_kernels import SegmentMask, slot_attention
from kv_kernels.ops.slot_attention import parts
from kv_kernels.ops.slot_attention.flex import compiles, rejects_cpu
from kv_kernels.testing import assert_within_budget


@pytest.fixture(autouse=True)
def _ready(make_call: Callable[..., Any]) -> None:
    call = make_call()
    if reason := rejects_cpu(call.query()):
        pytest.skip(reason)
    torch._dynamo.reset()
    parts.release_scratch()


def test_twenty_masks_of_one_shape_compile_once_and_the_limit_is_an_error(
    make_call: Callable[..., Any],
) -> None:
    """E05, D16, D20: masks, segment counts and caches change; attention is compiled once."""
    before = compiles()
    for seed in range(20):
        call = make_call(seed, segments=(2 + seed % 5, 3 + seed % 7))
        if seed in (0, 7, 19):
            call.check("flex")
        else:
            call.run("flex")
    assert compiles() - before == 1

    with torch.inference_mode():
        made_inside = make_call(3)
        made_inside.run("flex")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made_inside.check("flex")
    assert compiles() - before == 1, "modes of the caller are no reason to compile"

    longer = make_call(memory=91)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            with pytest.raises(CapacityError, match="146 keys") as caught:
                longer.run("flex")
    assert "after 1 compilation(s)" in str(caught.value)
    assert "torch._dynamo.config.recompile_limit is reached" in str(caught.value)
    assert compiles() - before == 1
    call.check("flex")

    with torch.compiler.set_stance("force_eager"), pytest.raises(CapacityError, match="uncompiled"):
        call.run("flex")


def test_adjacent_parts_are_attended_where_they_are(make_call: Callable[..., Any]) -> None:
    """The arena: text, chunk and memory are slices of one buffer, and nothing is copied."""
    call = make_call(joined=True, layout="contiguous")
    call.check("flex")
    assert parts.scratch_nbytes() == 0
    apart = make_call(seed=1)
    apart.run("flex")
    B, H, S = 2, 2, 145
    assert parts.scratch_nbytes() == B * H * S * (32 + 48) * 4


def test_int8_memory_is_dequantised_into_one_scratch(make_call: Callable[..., Any]) -> None:
    before = compiles()
    for seed in range(3):
        make_call(seed, int8=True).check("flex")
    assert parts.scratch_nbytes() == 2 * 2 * 145 * (32 + 48) * 4
    assert compiles() - before == 1


def test_scratch_made_in_inference_mode_can_be_used_outside(make_call: Callable[..., Any]) -> None:
    with torch.inference_mode():
        make_call(int8=True).run("flex")
    make_call(int8=True).check("flex")


def test_full_blocks_listed_as_partial_stay_within_the_budget(
    make_call: Callable[..., Any],
) -> None:
    """E09: one mask, other bookkeeping."""
    call = make_call()
    table = np.array([[True, False], [True, True]])
    call.mask = SegmentMask.build(table, [20, 17], [70, 75], block_size=16)
    args = list(call.op_args("flex", lists=True))
    counts, indices, full_counts, full_indices = args[12]
    assert full_counts.sum() > 0
    plain = call.run("flex")
    both = torch.zeros(*indices.shape, dtype=torch.bool)
    for count, index in ((counts, indices), (full_counts, full_indices)):
        listed = torch.arange(index.shape[-1]) < count[..., None]
        both.scatter_(-1, index.long(), listed | both.gather(-1, index.long()))
    order = (~both).int().argsort(dim=-1, stable=True).int()
    none = torch.zeros_like(full_counts)
    args[12] = [both.sum(-1, dtype=torch.int32), order, none, order.clone()]
    out = torch.ops.kv_kernels.slot_attention(*args)[0]
    assert_within_budget(out, plain, call.oracle()[0])


def test_queries_that_see_nothing_get_zero(make_call: Callable[..., Any]) -> None:
    """E07: dense and flex agree."""
    call = make_call(empty_queries=True)
    call.check("flex")
    sees_nothing = ~call.mask.dense().any(1)
    assert sees_nothing.any() and (call.run("flex")[:, :, sees_nothing] == 0).all()


def test_a_compiled_model_holds_it_without_a_graph_break(make_call: Callable[..., Any]) -> None:
    def model(q: torch.Tensor, call: Any) -> torch.Tensor:
        out = slot_attention(q * 2, call.chunk, call.mask, backend="flex", **call.parts)
        return out + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = compiles()
    for seed in range(3):
        call = make_call(seed)
        call.mask.block_mask()  # a compiled region reads block lists, it does not build them
        torch.testing.assert_close(compiled(call.q, call), model(call.q, call), rtol=0, atol=0)
    assert compiles() - before == 1
