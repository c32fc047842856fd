"""What a user of the hybrid operations reads who calls one wrongly; nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_core import (
    Compression,
    DtypeError,
    HybridSpec,
    KeyFormat,
    KVCacheManager,
    KVError,
    LayerCacheHandle,
    NoKernelError,
    RowFormat,
    ShapeError,
    SpecError,
    StaleHandleError,
)
from kv_kernels import HybridKernels, hybrid_attention, indexer_topk
from kv_kernels.testing import random_hybrid
from torch import Tensor

HQ, D, T = 3, 16, 6  # two requests, of 5 tokens and 1; the seventh is padding
SPEC = HybridSpec(
    ratios=(4, 0), kinds=(Compression(ratio=4, overlap=True, indexer=True),), head_dim=D,
    rope_dim=4, window=8, block_tokens=16, row_format=RowFormat.FP32, key_format=KeyFormat.FP32,
    index_dim=8,
)  # fmt: skip
NO_ROPE = HybridSpec(
    ratios=(0,), head_dim=D, rope_dim=0, window=8, row_format=RowFormat.FP32,
    key_format=KeyFormat.FP32,
)  # fmt: skip


class Step:
    """An open step of two layers, and the arguments that its operations take."""

    def __init__(self, ops: Any = None) -> None:
        g = torch.Generator().manual_seed(0)
        self.manager, self.handles = random_hybrid(
            SPEC, [25, 9], [5, 1], generator=g, ops=ops, pad_tokens=1, max_len=40
        )

    def attention(self, **changes: Any) -> dict[str, Any]:
        handle = self.handles[0]
        right: dict[str, Any] = {
            "q": torch.zeros(T + 1, HQ, D), "kv_new": torch.zeros(T + 1, D),
            "swa_view": handle.read_swa_view(), "classical_view": handle.read_classical_view(),
            "picked": torch.full((T + 1, 2), -1, dtype=torch.int32), "sinks": torch.zeros(HQ),
        }  # fmt: skip
        return right | changes

    def topk(self, **changes: Any) -> dict[str, Any]:
        right: dict[str, Any] = {
            "view": self.handles[0].read_indexer_view(), "iq": torch.zeros(T + 1, 2, 8),
            "iweights": torch.zeros(T + 1, 2), "k": 3,
        }  # fmt: skip
        return right | changes


def picks(*entries: int) -> Tensor:
    """Picks of the third token, which sees 5 entries."""
    found = torch.full((T + 1, len(entries)), -1)
    found[2] = torch.tensor(entries)
    return found


def other_step() -> LayerCacheHandle:
    manager = KVCacheManager(SPEC, slots=1, blocks=4)
    return manager.acquire(["x"] * 2, [0, 1])[0]


def no_rope() -> Any:
    manager = KVCacheManager(NO_ROPE, slots=1, blocks=2)
    return manager.acquire(["x"], [0], pad_tokens=T + 1)[0].read_swa_view()


def wrong_table(step: Step, value: int) -> dict[str, Any]:
    step.handles[0].step.block_table[1, 0] = value
    return step.attention(checked=True)


Call = Callable[[Step], Any]
WRONG: dict[str, tuple[Call, type[KVError], str]] = {
    # attention
    "a handle instead of a view": (
        lambda s: hybrid_attention(**s.attention(swa_view=s.handles[0])),
        DtypeError,
        "swa_view must be a SWAView, got LayerCacheHandle; take it from handle.read_swa_view()",
    ),
    "the views exchanged": (
        lambda s: hybrid_attention(**s.attention(classical_view=s.handles[0].read_swa_view())),
        DtypeError,
        "classical_view must be a ClassicalView, got SWAView; take it from "
        "handle.read_classical_view()",
    ),
    "a view of another step": (
        lambda s: hybrid_attention(
            **s.attention(classical_view=other_step().read_classical_view(), picked=None)
        ),
        ShapeError,
        "classical_view must belong to the step and layer of swa_view, got 2 tokens and 7; take "
        "both from one handle",
    ),
    "queries without padding": (
        lambda s: hybrid_attention(**s.attention(q=torch.zeros(T, HQ, D))),
        ShapeError,
        "q must be [T, Hq, D] with T=7, got T=6; T is the tokens of the step with its padding",
    ),
    "queries of another width": (
        lambda s: hybrid_attention(**s.attention(q=torch.zeros(T + 1, HQ, D + 1))),
        ShapeError,
        "q must be [T, Hq, D] with D=16, got D=17; T is the tokens of the step",
    ),
    "queries in double": (
        lambda s: hybrid_attention(**s.attention(q=torch.zeros(T + 1, HQ, D).double())),
        DtypeError,
        "q must be float32, float16 or bfloat16, got torch.float64; convert it, the cache "
        "itself encodes what it stores",
    ),
    "rows by head": (
        lambda s: hybrid_attention(**s.attention(kv_new=torch.zeros(T + 1, 1, D))),
        ShapeError,
        "kv_new must be [T, D], got 3 axes [7, 1, 16]; T is the tokens of the step",
    ),
    "codes instead of rows": (
        lambda s: hybrid_attention(
            **s.attention(kv_new=torch.zeros(T + 1, D).to(torch.float8_e4m3fn))
        ),
        DtypeError,
        "kv_new must be float32, float16 or bfloat16, got torch.float8_e4m3fn",
    ),
    "one sink": (
        lambda s: hybrid_attention(**s.attention(sinks=torch.zeros(1))),
        ShapeError,
        "sinks must be [Hq] with Hq=3, got Hq=1; one for each query head",
    ),
    "integer sinks": (
        lambda s: hybrid_attention(**s.attention(sinks=torch.zeros(HQ, dtype=torch.int64))),
        DtypeError,
        "sinks must be floating, got torch.int64; convert it with .float()",
    ),
    "picks without entries": (
        lambda s: hybrid_attention(**s.attention(classical_view=None)),
        SpecError,
        "picked must be None without entries, got a tensor; pass handle.read_classical_view() as "
        "classical_view",
    ),
    "picks of other tokens": (
        lambda s: hybrid_attention(**s.attention(picked=picks(0, 1)[:3])),
        ShapeError,
        "picked must be [T, k] with T=7, got T=3; what indexer_topk returned for this step",
    ),
    "picks as a mask": (
        lambda s: hybrid_attention(**s.attention(picked=picks(0, 1) > 0)),
        DtypeError,
        "picked must be torch.int32 or torch.int64, got torch.bool; pass what indexer_topk",
    ),
    "tables without a position": (
        lambda s: hybrid_attention(
            **s.attention(cos=torch.zeros(0, 2), sin=torch.zeros(0, 2))
        ),
        ShapeError,
        "cos and sin must be [S, R/2] with S >= 1, got S=0; give them a row for every position",
    ),
    "only a cosine": (
        lambda s: hybrid_attention(**s.attention(cos=torch.zeros(40, 2))),
        SpecError,
        "cos and sin must be given together, got no sin; pass both to rotate the output back",
    ),
    "doubled tables": (
        lambda s: hybrid_attention(
            **s.attention(cos=torch.zeros(40, 4), sin=torch.zeros(40, 4))
        ),
        ShapeError,
        "cos must be [S, R/2] with R/2=2, got R/2=4; a column for each pair of the last R channels",
    ),
    "tables of two lengths": (
        lambda s: hybrid_attention(
            **s.attention(cos=torch.zeros(40, 2), sin=torch.zeros(39, 2))
        ),
        ShapeError,
        "sin must be [S, R/2] with S=40, got S=39",
    ),
    "tables for rows without positions": (
        lambda s: hybrid_attention(
            **s.attention(
                swa_view=no_rope(), classical_view=None, picked=None, cos=torch.zeros(40, 0),
                sin=torch.zeros(40, 0),
            )
        ),
        SpecError,
        "cos and sin need a spec with rope_dim of at least 2, got 0; leave them out",
    ),
    "an infinite scale": (
        lambda s: hybrid_attention(**s.attention(scale=float("inf"))),
        SpecError,
        "scale must be finite, got inf; leave it out for D ** -0.5",
    ),
    "queries with grad": (
        lambda s: hybrid_attention(
            **s.attention(q=torch.zeros(T + 1, HQ, D, requires_grad=True))
        ),
        NoKernelError,
        "no kernel of hybrid_attention has a backward pass, and an input requires grad; call it "
        "under torch.no_grad()",
    ),
    "sinks of a model that trains": (
        lambda s: hybrid_attention(**s.attention(sinks=torch.zeros(HQ, requires_grad=True))),
        NoKernelError,
        "no kernel of hybrid_attention has a backward pass",
    ),
    "an unknown backend": (
        lambda s: hybrid_attention(**s.attention(backend="cuda")),
        NoKernelError,
        "no kernel runs hybrid_attention for FP32 on cpu (float32, D 16) with backend 'cuda': "
        "there is no 'cuda' row; ",
    ),
    "a view after the step": (
        lambda s: (view := s.attention(), s.manager.commit(s.handles), hybrid_attention(**view)),
        StaleHandleError,
        "a view must be read in the step it was made in",
    ),
    "a block past the pool": (
        lambda s: hybrid_attention(**wrong_table(s, 99)),
        SpecError,
        "block_table[1, 0] must be from 1 to 4, the blocks of the pool without the null block, got "
        "99; token 5 sees 2 entries",
    ),
    "the null block": (
        lambda s: hybrid_attention(**wrong_table(s, 0)),
        SpecError,
        "block_table[1, 0] must be from 1 to 4, the blocks of the pool without the null block, got "
        "0",
    ),
    "a pick past what is seen": (
        lambda s: hybrid_attention(**s.attention(picked=picks(0, 5), checked=True)),
        SpecError,
        "picked[2] must have entries from 0 to 4 that token 2 sees, or -1, got 5; pass what",
    ),
    "a negative pick": (
        lambda s: hybrid_attention(**s.attention(picked=picks(-2, 0), checked=True)),
        SpecError,
        "picked[2] must have entries from 0 to 4 that token 2 sees, or -1, got -2",
    ),
    "a pick twice": (
        lambda s: hybrid_attention(**s.attention(picked=picks(3, 3), checked=True)),
        SpecError,
        "picked[2] must have each entry once, got 3 twice; it would count twice",
    ),
    # top-k
    "entries instead of keys": (
        lambda s: indexer_topk(**s.topk(view=s.handles[0].read_classical_view())),
        DtypeError,
        "view must be an IndexerView, got ClassicalView; take it from handle.read_indexer_view()",
    ),
    "index queries of another width": (
        lambda s: indexer_topk(**s.topk(iq=torch.zeros(T + 1, 2, 16))),
        ShapeError,
        "iq must be [T, Hi, I] with I=8, got I=16; T is the tokens of the step with its padding, I "
        "the width of a key",
    ),
    "weights of other heads": (
        lambda s: indexer_topk(**s.topk(iweights=torch.zeros(T + 1, 3))),
        ShapeError,
        "iweights must be [T, Hi] with Hi=2, got Hi=3; one factor for each head of iq",
    ),
    "weights in double": (
        lambda s: indexer_topk(**s.topk(iweights=torch.zeros(T + 1, 2).double())),
        DtypeError,
        "iweights must be float32, float16 or bfloat16, got torch.float64",
    ),
    "a choice of none": (
        lambda s: indexer_topk(**s.topk(k=0)),
        SpecError,
        "k must be at least 1, got 0",
    ),
    "half a choice": (
        lambda s: indexer_topk(**s.topk(k=2.5)),
        DtypeError,
        "k must be an integer, got 2.5 of type float; pass a whole number as int",
    ),
    "index queries with grad": (
        lambda s: indexer_topk(**s.topk(iq=torch.zeros(T + 1, 2, 8, requires_grad=True))),
        NoKernelError,
        "no kernel of indexer_topk has a backward pass",
    ),
    "an unknown backend of top-k": (
        lambda s: indexer_topk(**s.topk(backend="flex")),
        NoKernelError,
        "no kernel runs indexer_topk for FP32 on cpu (float32, D 8) with backend 'flex': there is "
        "no 'flex' row",
    ),
    "keys past the pool": (
        lambda s: (wrong_table(s, -1), indexer_topk(**s.topk(checked=True))),
        SpecError,
        "block_table[1, 0] must be from 1 to 4, the blocks of the pool without the null block, got "
        "-1",
    ),
    # what handles call
    "rows in double": (
        lambda s: s.handles[1].write_swa(torch.zeros(T + 1, D).double()),
        DtypeError,
        "rows must be float32, float16 or bfloat16, got torch.float64; convert it, the cache",
    ),
    "rows with grad": (
        lambda s: s.handles[1].write_swa(torch.zeros(T + 1, D, requires_grad=True)),
        NoKernelError,
        "no kernel of append_swa has a backward pass",
    ),
    "scores in double": (
        lambda s: s.handles[0].append_tail(
            "main", torch.zeros(T + 1, 2 * D), torch.zeros(T + 1, 2 * D).double()
        ),
        DtypeError,
        "score must be float32, float16 or bfloat16, got torch.float64",
    ),
    "a weight with grad": (
        lambda s: s.handles[0].compress(
            "main", torch.zeros(T + 1, 2 * D), torch.zeros(T + 1, 2 * D),
            torch.ones(D, requires_grad=True), 1e-6, torch.ones(40, 2), torch.ones(40, 2),
        ),
        NoKernelError,
        "no kernel of compress has a backward pass",
    ),
    "keys with grad": (
        lambda s: s.handles[0].flush_compression(
            torch.zeros(T + 1, D), torch.zeros(T + 1, 8, requires_grad=True)
        ),
        NoKernelError,
        "no kernel of flush_compression has a backward pass",
    ),
    "entries in double": (
        lambda s: s.handles[0].flush_compression(
            torch.zeros(T + 1, D).double(), torch.zeros(T + 1, 8)
        ),
        DtypeError,
        "entries must be float32, float16 or bfloat16, got torch.float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_says_what_to_do_and_changes_nothing(
    call: Call, kind: type[KVError], message: str
) -> None:
    step = Step(HybridKernels())
    before = contents(step.manager)
    with pytest.raises(kind) as caught:
        call(step)
    assert message in str(caught.value)
    assert all(map(torch.equal, before, contents(step.manager)))


def test_a_manager_with_an_unknown_backend_stores_nothing() -> None:
    manager = KVCacheManager(SPEC, slots=1, blocks=3, ops=HybridKernels("cuda"))
    before = contents(manager)
    handle = manager.acquire(["x"], [0])[1]
    with pytest.raises(NoKernelError, match="no kernel runs append_swa for FP32 on cpu"):
        handle.write_swa(torch.ones(1, D))
    assert all(map(torch.equal, before, contents(manager)))


def contents(manager: KVCacheManager) -> list[Tensor]:
    """Return a copy of every byte of a cache; empty blocks and slots included."""
    stores = [*manager.states, *(pool for pool in manager.pools if pool is not None)]
    return [
        tensor.contiguous().view(-1).view(torch.uint8).clone()
        for store in stores
        for tensor in store.tensors().values()
    ]
