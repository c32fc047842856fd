"""What a wrong call of slot_attention says: the name, what was wanted, what came, what to do."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kv_core.errors import DtypeError, NoKernelError, ShapeError, SpecError
from kv_core.fixed_slot import LayerKV, QuantizedLayerKV
from kv_kernels import SegmentMask, slot_attention


def _pair(B: int = 1, H: int = 2, S: int = 4, D: int = 8, Dv: int = 8) -> LayerKV:
    return LayerKV(torch.zeros(B, H, S, D), torch.zeros(B, H, S, Dv))


def _int8(**changes: torch.Tensor) -> QuantizedLayerKV:
    codes, scale = torch.zeros(1, 2, 4, 8, dtype=torch.int8), torch.zeros(1, 2, 4)
    return QuantizedLayerKV(codes, codes, scale, scale)._replace(**changes)


def _mask(q: int, kv: int, device: str = "cpu") -> SegmentMask:
    return SegmentMask.build(np.ones((1, 1), np.bool_), [q], [kv], device=device)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q is a list": (
        {"q": [1.0]},
        DtypeError,
        "q must be a torch.Tensor [B, Hq, N, D], got list",
    ),
    "q has three axes": ({"q": torch.zeros(4, 3, 8)}, ShapeError, "q must be [B, Hq, N, D]"),
    "q is double": (
        {"q": torch.zeros(1, 4, 3, 8, dtype=torch.float64)},
        DtypeError,
        "q must be float32, float16 or bfloat16, got torch.float64; convert it",
    ),
    "another dtype": (
        {"q": torch.zeros(1, 4, 3, 8, dtype=torch.bfloat16)},
        DtypeError,
        "chunk.k must be torch.bfloat16, got torch.float32",
    ),
    "heads that do not divide": (
        {"q": torch.zeros(1, 3, 3, 8)},
        ShapeError,
        "q must have a multiple of the H=2 heads of chunk.k, got Hq=3",
    ),
    "another batch": (
        {"chunk": _pair(B=2)},
        ShapeError,
        "chunk.k must be [B, H, T, D] with B=1, got B=2",
    ),
    "another head size": (
        {"chunk": _pair(D=9)},
        ShapeError,
        "chunk.k must be [B, H, T, D] with D=8, got D=9",
    ),
    "values of another length": (
        {"chunk": LayerKV(_pair().k, _pair(S=5).v)},
        ShapeError,
        "chunk.v must be [B, H, T, Dv] with T=4, got T=5",
    ),
    "no values at all": (
        {"chunk": _pair(Dv=0)},
        ShapeError,
        "q, k and v need at least one sequence and D, Dv >= 1",
    ),
    "text of another width": (
        {"text": _pair(Dv=9)},
        ShapeError,
        "text.v must be [B, H, S, Dv] with Dv=8, got Dv=9",
    ),
    "text as a tensor": (
        {"text": torch.zeros(1)},
        DtypeError,
        "text must be a LayerKV(k, v), got Tensor",
    ),
    "a chunk in codes": (
        {"chunk": _int8()},
        DtypeError,
        "chunk must be a LayerKV(k, v) of floating tensors, got a QuantizedLayerKV; only memory "
        "may be INT8",
    ),
    "memory as a list": (
        {"memory": [1, 2]},
        DtypeError,
        "memory must be a LayerKV(k, v) or a QuantizedLayerKV(k, v, k_scale, v_scale), got list",
    ),
    "memory of another dtype": (
        {"memory": LayerKV(*(x.half() for x in _pair()))},
        DtypeError,
        "memory.k must be torch.float32, got torch.float16",
    ),
    "codes without scales": (
        {"memory": LayerKV(_int8().k, _int8().v)},
        DtypeError,
        "memory.k must be torch.float32, got torch.int8",
    ),
    "scales of another length": (
        {"memory": _int8(k_scale=torch.zeros(1, 2, 5))},
        ShapeError,
        "memory.k_scale must be [B, H, S] with S=4, got S=5",
    ),
    "scales in half precision": (
        {"memory": _int8(v_scale=torch.zeros(1, 2, 4, dtype=torch.float16))},
        DtypeError,
        "memory.v_scale must be torch.float32, got torch.float16",
    ),
    "a dense mask": (
        {"mask": torch.ones(3, 4, dtype=torch.bool)},
        DtypeError,
        "mask must be a SegmentMask, got Tensor; make one with SegmentMask.build",
    ),
    "E08, a mask of other lengths": (
        {"mask": _mask(256, 257), "text": _pair(S=2), "memory": _pair(S=7)},
        ShapeError,
        "mask is for 256 queries and 257 keys, got 3 queries and 13 keys (text 2 + chunk 4 + "
        "memory 7); build a mask for exactly these lengths",
    ),
    "a mask somewhere else": (
        {"mask": _mask(3, 4, "meta")},
        DtypeError,
        "mask must be on cpu, got meta; build it with device='cpu'",
    ),
    "a scale that is a bool": ({"scale": True}, DtypeError, "scale must be a number, got bool"),
    "a scale that is infinite": ({"scale": float("inf")}, SpecError, "scale must be finite"),
    "an unknown backend": ({"backend": "triton"}, NoKernelError, "there is no 'triton' row"),
    "an input with grad": (
        {"q": torch.zeros(1, 4, 3, 8, requires_grad=True)},
        NoKernelError,
        "no kernel of slot_attention has a backward pass, and an input requires grad; call it "
        "under torch.no_grad() or pass detached tensors",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_says_what_to_do(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    right: dict[str, Any] = {"q": torch.zeros(1, 4, 3, 8), "chunk": _pair(), "mask": _mask(3, 4)}
    with pytest.raises(error, match=re.escape(message)):
        slot_attention(**(right | change))


def test_grad_is_no_matter_where_it_is_off(make_call: Callable[..., Any]) -> None:
    call = make_call()
    call.q.requires_grad_()
    with torch.no_grad():
        assert not call.run().requires_grad
