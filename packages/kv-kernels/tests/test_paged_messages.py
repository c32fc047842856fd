"""What a user of the paged operations reads who calls one wrongly, and that nothing has changed."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from kv_core.errors import DtypeError, KVError, NoKernelError, ShapeError, SpecError
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import append, gather, paged_decode_attention, paged_write, split_qkv_norm_rope
from kv_kernels.testing import make_layer, make_step, storage_bytes

H, HQ, D, N, P, T = 2, 4, 8, 4, 6, 5  # two sequences of 6 and 3 tokens, 3 and 1 of them new
SPEC = KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.FP32)


def step_with(**changes: Any) -> Step:
    """The right step, with fields replaced as a caller may who builds one by hand."""
    step = make_step([[3, 1], [5]], [6, 3], [3, 1], N, pad_tokens=1, null_block=True)
    parts = {field.name: getattr(step, field.name) for field in fields(step)}
    return Step(**(parts | changes))


def changed(name: str, index: Any, value: int) -> Step:
    """The right step with one number replaced."""
    tensor = getattr(step_with(), name).clone()
    tensor[index] = value
    return step_with(**{name: tensor})


def right(op: Callable[..., Any], layer: KVLayer) -> dict[str, Any]:
    """Return arguments that ``op`` takes."""
    angles = torch.outer(torch.arange(16.0), torch.ones(D // 2))
    where: dict[str, Any] = {"layer": layer, "step": step_with()}
    projection = {
        "qkv": torch.zeros(T, (HQ + 2 * H) * D), "q_norm": torch.ones(D), "k_norm": None,
        "cos": angles.cos(), "sin": angles.sin(), "rope": "half",
    }  # fmt: skip
    rows = torch.zeros(T, H, D)
    return {
        append: where | {"k": rows, "v": rows},
        paged_write: where | projection,
        split_qkv_norm_rope: projection
        | {"positions": step_with().positions, "kv_heads": H, "head_dim": D},
        paged_decode_attention: where | {"q": torch.zeros(T, HQ, D)},
        gather: where,
    }[op]


CHECKED = {"checked": True}
NAN_ROWS = torch.zeros(T, H, D)
NAN_ROWS[1, 1, 3] = torch.nan
HUGE = torch.zeros(T, (HQ + 2 * H) * D)
HUGE[2, (HQ + 1) * D] = torch.inf

WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], type[KVError], str]] = {
    "a layer that is a tensor": (
        append,
        {"layer": torch.zeros(1)},
        DtypeError,
        "layer must be a KVLayer, got Tensor; make one with KVLayer.paged",
    ),
    "a step that is a dictionary": (
        gather,
        {"step": {}},
        DtypeError,
        "step must be a Step, got dict; take one from SequenceTable.append",
    ),
    "blocks of no token": (
        append,
        {
            "layer": KVLayer.adopt(
                SPEC, torch.zeros(2, 0, H, D), torch.zeros(2, 0, H, D), is_paged=False
            )
        },
        ShapeError,
        "layer must hold at least one token, got P=2 blocks of N=0; allocate blocks and block_size",
    ),
    "a table without a column": (
        paged_decode_attention,
        {"step": step_with(block_table=torch.zeros(2, 0, dtype=torch.int32))},
        ShapeError,
        "block_table must be [B, M] with M >= 1, got M=0; give each sequence a column",
    ),
    "a step somewhere else": (
        append,
        {
            "step": step_with(
                **{
                    name: getattr(step_with(), name).to("meta")
                    for name in ("slots", "positions", "cu_seqlens", "block_table", "context_lens")
                }
            )
        },
        DtypeError,
        "step must be on cpu as the layer is, got meta; build the table with device='cpu'",
    ),
    # append
    "rows of other heads": (
        append,
        {"k": torch.zeros(T, 3, D)},
        ShapeError,
        "k must be [T, H, D] with H=2, got H=3; T is the tokens of the step with its padding",
    ),
    "rows head by head": (
        append,
        {"v": torch.zeros(H, T, D)},
        ShapeError,
        "v must be [T, H, D] with T=5, H=2, got T=2, H=5",
    ),
    "rows of another head size": (
        append,
        {"v": torch.zeros(T, H, D + 1)},
        ShapeError,
        "v must be [T, H, D] with D=8, got D=9",
    ),
    "codes instead of activations": (
        append,
        {"k": torch.zeros(T, H, D, dtype=torch.int8)},
        DtypeError,
        "k must be float32, float16 or bfloat16, got torch.int8; convert it, "
        "the cache itself encodes what it stores",
    ),
    "keys and values of two dtypes": (
        append,
        {"v": torch.zeros(T, H, D).half()},
        DtypeError,
        "v must be torch.float32, got torch.float16; convert it with .to(torch.float32)",
    ),
    "rows somewhere else": (
        append,
        {"k": torch.zeros(T, H, D, device="meta")},
        DtypeError,
        "k must be on cpu, got meta; move it with .to('cpu')",
    ),
    "rows with grad": (
        append,
        {"k": torch.zeros(T, H, D, requires_grad=True)},
        NoKernelError,
        "no kernel of append has a backward pass, and an input requires grad; call it under "
        "torch.no_grad()",
    ),
    "an unknown backend": (
        append,
        {"backend": "cuda"},
        NoKernelError,
        "no kernel runs append for FP32 on cpu (float32, D 8) with backend 'cuda': there is no "
        "'cuda' row; triton (CUDA) needs a CUDA device, got cpu; torch could run it; triton",
    ),
    "formats without a row": (
        append,
        {
            "layer": make_layer(
                KVSpec(
                    kv_heads=H,
                    head_dim=D,
                    block_size=N,
                    k_format=KVFormat.FP16,
                    v_format=KVFormat.BF16,
                ),
                P,
            )
        },
        NoKernelError,
        "no kernel runs append for FP16/BF16 on cpu (float32, D 8): rows exist for FP32, FP16,",
    ),
    "a negative slot": (
        append,
        {"step": changed("slots", 1, -2)} | CHECKED,
        SpecError,
        "slots[1] must be -1 or from 0 to 23 (P=6 blocks of N=4), got -2; give the token block * 4 "
        "+ offset, or -1 to store nothing",
    ),
    "a slot past the end": (
        append,
        {"step": changed("slots", 0, 24)} | CHECKED,
        SpecError,
        "slots[0] must be -1 or from 0 to 23 (P=6 blocks of N=4), got 24",
    ),
    "a slot twice": (
        paged_write,
        {"step": changed("slots", 0, int(step_with().slots[3]))} | CHECKED,
        SpecError,
        f"slots must differ, got {int(step_with().slots[3])} for tokens 0 and 3; a row that two "
        "tokens write is undefined",
    ),
    "a slot in the block for padding": (
        paged_write,
        {"step": changed("slots", 2, 3)} | CHECKED,
        SpecError,
        "slots[2] must not lie in block 0, which is kept for padding, got 3; give the token a slot",
    ),
    "NaN to be quantised": (
        append,
        {"layer": make_layer(KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.INT8), P)}
        | {"v": NAN_ROWS}
        | CHECKED,
        SpecError,
        "v must be finite to be quantised, got NaN or infinity in token 1, head 1; find where",
    ),
    # paged_write and its first half
    "a projection of a wrong width": (
        paged_write,
        {"qkv": torch.zeros(T, (HQ + 2 * H) * D + 1)},
        ShapeError,
        "qkv must be [T, (Hq + 2H) * D] with H=2, D=8 and Hq >= 1, got a width of 65; pack all "
        "query heads, then all key heads, then all value heads",
    ),
    "a projection without queries": (
        split_qkv_norm_rope,
        {"qkv": torch.zeros(T, 2 * H * D)},
        ShapeError,
        "qkv must be [T, (Hq + 2H) * D] with H=2, D=8 and Hq >= 1, got a width of 32",
    ),
    "heads that do not divide": (
        split_qkv_norm_rope,
        {"qkv": torch.zeros(T, (3 + 2 * H) * D)},
        ShapeError,
        "qkv must have a multiple of the H=2 key/value heads, got Hq=3; every key/value head "
        "serves as many query heads",
    ),
    "more tokens than the step": (
        paged_write,
        {"qkv": torch.zeros(T + 1, (HQ + 2 * H) * D), "rope": "none", "cos": None, "sin": None},
        ShapeError,
        "qkv must be [T, (Hq+2H)*D] with T=5, got T=6; T is the tokens of the step",
    ),
    "a projection in double": (
        paged_write,
        {"qkv": torch.zeros(T, (HQ + 2 * H) * D, dtype=torch.float64)},
        DtypeError,
        "qkv must be float32, float16 or bfloat16, got torch.float64",
    ),
    "a norm for all heads at once": (
        paged_write,
        {"q_norm": torch.ones(HQ * D)},
        ShapeError,
        "q_norm must be [D] with D=8, got D=32; one weight serves every head",
    ),
    "an integer norm": (
        paged_write,
        {"k_norm": torch.ones(D, dtype=torch.int64)},
        DtypeError,
        "k_norm must be floating, got torch.int64; convert it with .float()",
    ),
    "a negative eps": (
        paged_write,
        {"eps": -1e-6},
        SpecError,
        "eps must be at least 0, got -1e-06; pass the rms_norm_eps of the model",
    ),
    "an unknown style": (
        paged_write,
        {"rope": "neox"},
        SpecError,
        'rope must be "none", "half" or "interleaved", got \'neox\'; Hugging Face models rotate',
    ),
    "tables that nobody uses": (
        paged_write,
        {"rope": "none"},
        SpecError,
        'rope="none" takes no tables, got cos or sin; pass None for both',
    ),
    "no tables": (
        split_qkv_norm_rope,
        {"cos": None},
        SpecError,
        'rope="half" needs cos and sin, got None; pass both tables, or rope="none"',
    ),
    "doubled tables by mistake": (
        paged_write,
        {"cos": torch.ones(16, D), "sin": torch.ones(16, D)},
        ShapeError,
        "cos must rotate R elements, even and from 2 to D=8, got R=16 of a table with 8 columns; "
        "tables have one column for two rotated elements",
    ),
    "an odd head with a whole rotation": (
        split_qkv_norm_rope,
        {
            "qkv": torch.zeros(T, (HQ + 2 * H) * 7),
            "q_norm": None,
            "head_dim": 7,
            "cos": torch.ones(T, 7),
            "sin": torch.ones(T, 7),
            "doubled_tables": True,
        },
        ShapeError,
        "cos must rotate R elements, even and from 2 to D=7, got R=7 of a table with 7 columns; "
        "pad an odd head, or rotate a part of it",
    ),
    "tables of two sizes": (
        paged_write,
        {"sin": torch.ones(15, D // 2)},
        ShapeError,
        "sin must be [max_pos, R/2] with max_pos=16, got max_pos=15; both tables are alike",
    ),
    "doubled tables of other tokens": (
        paged_write,
        {"cos": torch.ones(9, D), "sin": torch.ones(9, D), "doubled_tables": True},
        ShapeError,
        "cos must be [T, R] with T=5, got T=9; doubled tables have a row for every token, in order",
    ),
    "no positions": (
        split_qkv_norm_rope,
        {"positions": None},
        SpecError,
        "positions must be given with tables [max_pos, R/2], got None; pass [T] positions, or "
        "doubled_tables=True with tables [T, R]",
    ),
    "floating positions": (
        split_qkv_norm_rope,
        {"positions": torch.zeros(T)},
        DtypeError,
        "positions must be torch.int32 or torch.int64, got torch.float32",
    ),
    "a position past the tables": (
        paged_write,
        {"step": changed("positions", 1, 16)} | CHECKED,
        SpecError,
        "positions[1] must be from 0 to 15, the rows of cos, got 16; build the tables for at least "
        "17 positions",
    ),
    "a negative position": (
        split_qkv_norm_rope,
        {"positions": torch.tensor([0, 1, -3, 0, 0])} | CHECKED,
        SpecError,
        "positions[2] must be at least 0, got -3; count from 0",
    ),
    "infinity to be quantised": (
        paged_write,
        {"layer": make_layer(KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.INT8), P)}
        | {"qkv": HUGE}
        | CHECKED,
        SpecError,
        "qkv must be finite to be quantised, got NaN or infinity in token 2, head 5",
    ),
    "no heads": (
        split_qkv_norm_rope,
        {"kv_heads": 0},
        SpecError,
        "kv_heads must be at least 1, got 0",
    ),
    # attention and gather
    "queries of another head size": (
        paged_decode_attention,
        {"q": torch.zeros(T, HQ, D + 8)},
        ShapeError,
        "q must be [T, Hq, D] with D=8, got D=16",
    ),
    "query heads that do not divide": (
        paged_decode_attention,
        {"q": torch.zeros(T, 3, D)},
        ShapeError,
        "q must have a multiple of the H=2 key/value heads, got Hq=3",
    ),
    "one query too few": (
        paged_decode_attention,
        {"q": torch.zeros(T - 1, HQ, D)},
        ShapeError,
        "q must be [T, Hq, D] with T=5, got T=4; T is the tokens of the step with its padding",
    ),
    "queries with grad": (
        paged_decode_attention,
        {"q": torch.zeros(T, HQ, D, requires_grad=True)},
        NoKernelError,
        "no kernel of paged_decode_attention has a backward pass",
    ),
    "a scale that is a tensor": (
        paged_decode_attention,
        {"scale": torch.tensor(1.0)},
        DtypeError,
        "scale must be a number, got Tensor; pass a float",
    ),
    "a scale that is NaN": (
        paged_decode_attention,
        {"scale": float("nan")},
        SpecError,
        "scale must be finite, got nan; leave it out for D ** -0.5",
    ),
    "a window of less than nothing": (
        paged_decode_attention,
        {"window_left": -2},
        SpecError,
        "window_left must be at least -1, got -2",
    ),
    "a negative cap": (
        paged_decode_attention,
        {"softcap": -1.0},
        SpecError,
        "softcap must be at least 0, got -1.0; pass 0 for no cap",
    ),
    "negative splits": (
        paged_decode_attention,
        {"num_splits": -1},
        SpecError,
        "num_splits must be at least 0, got -1",
    ),
    "a table too short": (
        paged_decode_attention,
        {"step": changed("context_lens", 0, 13)} | CHECKED,
        SpecError,
        "context_lens[0] must be from 0 to 12 (M=3 blocks of N=4), got 13; widen block_table or "
        "shorten the sequence",
    ),
    "a negative length": (
        gather,
        {"step": changed("context_lens", 1, -1)} | CHECKED,
        SpecError,
        "context_lens[1] must be from 0 to 12 (M=3 blocks of N=4), got -1",
    ),
    "a length over the bound": (
        gather,
        {"step": changed("context_lens", 1, 7)} | CHECKED,
        SpecError,
        "context_lens[1] must be at most max_context=6, got 7; raise the bound",
    ),
    "a block past the pool": (
        gather,
        {"step": changed("block_table", (0, 1), 6)} | CHECKED,
        SpecError,
        "block_table[0, 1] must be from 0 to 5, the blocks of the layer, got 6; only entries past "
        "2 blocks may be anything",
    ),
    "a negative block": (
        paged_decode_attention,
        {"step": changed("block_table", (1, 0), -1)} | CHECKED,
        SpecError,
        "block_table[1, 0] must be from 0 to 5, the blocks of the layer, got -1",
    ),
    "a block twice": (
        paged_decode_attention,
        {"step": changed("block_table", (0, 1), 3)} | CHECKED,
        SpecError,
        "block_table[0] must name each block once, got 3 at 0 and 1; give every 4 tokens a block",
    ),
    "tokens that begin late": (
        paged_decode_attention,
        {"step": changed("cu_seqlens", 0, 1)} | CHECKED,
        SpecError,
        "cu_seqlens[0] must be 0, got 1; it counts from the first token",
    ),
    "tokens that run backwards": (
        paged_decode_attention,
        {"step": changed("cu_seqlens", 2, 2)} | CHECKED,
        SpecError,
        "cu_seqlens must not fall, got 3 and then 2 at sequence 1; repeat the last value",
    ),
    "more tokens than there are": (
        paged_decode_attention,
        {"step": changed("cu_seqlens", 2, 6)} | CHECKED,
        SpecError,
        "cu_seqlens must end at T=5 or before, got 6; give every new token a row",
    ),
    "more new tokens than stored ones": (
        paged_decode_attention,
        {"step": changed("context_lens", 0, 2)} | CHECKED,
        SpecError,
        "sequence 0 must store at least its 3 new tokens, got context_lens 2; context_lens counts",
    ),
    "more new tokens than the bound": (
        paged_decode_attention,
        {"step": step_with(max_query=2)} | CHECKED,
        SpecError,
        "sequence 0 must have at most max_query=2 new tokens, got 3; raise the bound",
    ),
    "a negative width": (
        gather,
        {"length": -1},
        SpecError,
        "length must be at least 0, got -1",
    ),
    "codes asked for": (
        gather,
        {"dtype": torch.int8},
        DtypeError,
        "dtype must be torch.float32, torch.float16 or torch.bfloat16, got torch.int8; leave it "
        "out for the stored one",
    ),
}


@pytest.mark.parametrize(("op", "change", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_says_what_to_do_and_changes_nothing(
    op: Callable[..., Any], change: dict[str, Any], error: type[KVError], message: str
) -> None:
    layer = change.get("layer", make_layer(SPEC, P))
    before = storage_bytes(layer) if isinstance(layer, KVLayer) else []
    with pytest.raises(error) as raised:
        op(**(right(op, layer) | change))
    assert message in str(raised.value)
    # every message goes on to say what to do, or lists every row of the table
    assert ";" in message or re.search(r"; |at least|rows exist", str(raised.value))
    if before:
        assert all(map(torch.equal, storage_bytes(layer), before))


@pytest.mark.parametrize("op", [append, paged_write, paged_decode_attention, gather])
def test_the_right_call_passes_every_check(op: Callable[..., Any]) -> None:
    op(**right(op, make_layer(SPEC, P)), checked=True)


def test_padding_may_have_any_position_and_any_number() -> None:
    """Checked mode looks at what is stored: the last token is padding."""
    layer = make_layer(KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.INT8), P)
    given = right(paged_write, layer)
    given["step"].positions[-1] = 1000
    given["qkv"][-1] = torch.nan
    assert paged_write(**given, checked=True)[-1].isnan().all()


def test_grad_is_no_matter_where_it_is_off() -> None:
    layer = make_layer(SPEC, P)
    given = right(append, layer) | {"k": torch.zeros(T, H, D, requires_grad=True)}
    with torch.no_grad():
        append(**given)
    assert not layer.k.requires_grad
