"""Every message of the package, read: what it names, and that no raise goes unread."""

import ast
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kv_core as kv
import numpy as np
import pytest
import torch
from kv_core import FixedSlotKVCache, KVFormat, SlotRegion

SOURCE = Path(kv.__file__).parent
# test_table_messages and the tests of the hybrid cache do for these what this file does
READ_ELSEWHERE = {"append_plan", "blocks", "layer_group", "prefixes", "sequence_records"} | {
    "sequence_state",
    "sequences",
    "step_buffers",
}
X = torch.zeros(1, 2, 2, 4)
PAIR = (X, X)
HISTORY = SlotRegion("history", 2, 2, 2, extends_length=True)


def cache(**options: Any) -> FixedSlotKVCache:
    settings = {"capacity": 6, "regions": [HISTORY], **options}
    return FixedSlotKVCache(settings.pop("prefilled", [PAIR]), **settings)


def buffers(**change: Any) -> list[tuple[torch.Tensor, ...]]:
    k, v = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4)
    return [(change.get("k", k), change.get("v", v))]


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(1, 2, 6, 4)


def window() -> kv.TokenWindow:
    held = kv.TokenWindow(
        num_views=1, frames=3, spatial=2, width=1, device="cpu", dtype=torch.float32
    )
    for frame in range(5):
        held.append(frame, frame + 1, torch.zeros(1, 1, 1, 2, 1))
    return held


def arena() -> tuple[kv.LayerKV, kv.KVSegmentLayout]:
    return kv.allocate_kv_arena(PAIR, PAIR, current_tokens=2, memory_tokens=3)


def edited(change: Callable[[dict[str, Any]], Any]) -> None:
    state = cache().state_dict()
    change(state)
    cache().load_state_dict(state)


def in_transaction() -> None:
    one = cache()
    with one.transaction():
        one.reset([PAIR])


def staged(change: Callable[[kv.LayerKV], tuple[Any, Any]]) -> None:
    whole, layout = arena()
    kv.stage_current_kv_(*change(whole), layout)


def validated() -> None:
    whole, layout = arena()
    memory = kv.LayerKV(*(t[:, :, 4:] for t in whole))
    kv.validate_kv_arena_segments(whole, PAIR, memory, layout)


def too_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_core.disjoint._MAX_WORK", 1)
    parent = torch.zeros(60_000)
    a = parent.as_strided((6, 7, 8), (3001, 401, 53))
    kv.check_disjoint([("a", a), ("b", parent.as_strided((6, 7, 8), (3011, 421, 59), 1))])


def saved(tmp_path: Path, content: bytes | None, **state: Any) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
        kv.load(tmp_path / "file")
    kv.save(tmp_path / "file", {"meta": {}, "tensors": {}, **state})


def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: os.open(tmp_path / "a" / "b", os.O_RDONLY))
    kv.save(tmp_path / "file", {"meta": {}, "tensors": {}})


def foreign(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "file")
    kv.load(tmp_path / "file")


POOL = torch.zeros(3, 4, 2, 6)
IDS = torch.zeros(2, dtype=torch.int64)


def spec(**formats: Any) -> kv.KVSpec:
    settings = formats or {"format": KVFormat.INT8}
    return kv.KVSpec(kv_heads=2, head_dim=4, block_size=4, **settings)


def pool(**options: Any) -> kv.KVLayer:
    return kv.KVLayer.paged(spec(), blocks=3, **options)


def frozen() -> None:
    layer = kv.KVLayer.contiguous(spec(), sequences=1, capacity=4)
    layer.frozen = True
    layer.ensure_capacity(5)


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    del state["tensors"][name]
    return state


def step(**change: Any) -> kv.Step:
    given: dict[str, Any] = {"slots": IDS, "positions": IDS, "cu_seqlens": IDS}
    given |= {"block_table": IDS[None], "context_lens": IDS[:1], "max_query": 2, "max_context": 8}
    return kv.Step(**given | change)


# call -> the words that a reader needs: who, on which axis, wanted, got, and what to do next
MESSAGES: list[tuple[Callable[..., Any], list[str]]] = [
    (lambda: kv.check_tensor("k", 3, "B D", {}), ["k must be", "[B, D]", "got int", "as_tensor"]),
    (
        lambda: kv.check_tensor("k", X.to_sparse(), "B H T D", {}),
        ["k must be a dense tensor", "got layout torch.sparse_coo", "to_dense()"],
    ),
    (
        lambda: kv.check_tensor("k", X, "B D", {}),
        ["k must be [B, D]", "got 4 axes [1, 2, 2, 4]", "reshape"],
    ),
    (
        lambda: kv.check_tensor("k", X, "B H T D", {"H": 3}),
        ["k must be [B, H, T, D] with H=3, got H=2"],
    ),
    (
        lambda: kv.check_tensor("k", X, "B H T D", {}, dtype=torch.float16),
        ["k must be torch.float16, got torch.float32", ".to(torch.float16)"],
    ),
    (
        lambda: kv.check_tensor("k", X, "B H T D", {}, device=torch.device("cuda:1")),
        ["k must be on cuda:1, got cpu", ".to('cuda:1')"],
    ),
    (
        lambda: kv.check_int("n", np.array(2.5)),
        ["n must be an integer, got array(2.5)", "as int"],
    ),
    (lambda: kv.check_int("n", 1.5), ["n must be an integer, got 1.5 of type float", "as int"]),
    (lambda: kv.check_int("n", 9, minimum=1, maximum=3), ["n must be between 1 and 3, got 9"]),
    (lambda: kv.check_int("n", 0, minimum=1), ["n must be at least 1, got 0"]),
    (lambda: kv.check_disjoint([("a", X), ("b", X)]), ["a and b share memory", "own buffer"]),
    (too_hard, ["a and b cannot be shown to be disjoint", "own slice of one parent"]),
    (
        lambda: kv.check_disjoint([("a", X[:, :1].expand(1, 3, 2, 4))]),
        ["a and a share memory", "axis 1 has size 3 and stride 0", ".contiguous()"],
    ),
    (
        lambda: kv.check_disjoint([("a", X.as_strided((3, 3), (2, 1)))]),
        ["a and a share memory, or cannot be shown not to", "axis 0 has stride 2", "own memory"],
    ),
    (
        lambda: KVFormat.of(torch.int16),
        ["dtype must be one of torch.float32 (FP32)", "got torch.int16", "convert"],
    ),
    (
        lambda: kv.quantize_int8(X.long()),
        ["x must be a floating tensor [..., D], got torch.int64", "activations"],
    ),
    (lambda: kv.quantize_int8(X[..., :0]), ["x must be [..., D] with D >= 1, got [1, 2, 2, 0]"]),
    (
        lambda: kv.quantize_int8(X + math.nan, checked=True),
        ["x must be finite, got NaN or infinity in row (0, 0, 0)", "checked=False"],
    ),
    (
        lambda: kv.dequantize_int8(X.char(), X[..., 0], torch.int32),
        ["dtype must be a floating dtype, got torch.int32", "torch.float32"],
    ),
    (
        lambda: kv.quantize_nvfp4(torch.ones(1, 16), 0.0),
        ["global_scale must be positive and finite, got 0.0", "6 * 448"],
    ),
    (lambda: SlotRegion(3, 0, 1, 1), ["name of a region must be a string, got 3", "'history'"]),
    (lambda: SlotRegion("", 0, 1, 1), ["name of a region must not be empty", "'history'"]),
    (lambda: SlotRegion("r", 0, 1, 1, 1), ["extends_length of region 'r' must be a bool, got 1"]),
    (lambda: cache(regions=None), ["regions must be a sequence", "got NoneType", "list"]),
    (lambda: cache(regions=["r"]), ["regions must be SlotRegion objects, got 'r'", "SlotRegion("]),
    (
        lambda: cache(regions=[HISTORY] * 2),
        ["different names", "'history' [2, 6) and 'history'", "rename"],
    ),
    (
        lambda: cache(capacity=5),
        ["region 'history' [2, 6) must end within the capacity, 5, got end 6", "capacity=6"],
    ),
    (
        lambda: cache(regions=[SlotRegion("r", 1, 1, 2)]),
        [
            "region 'r' [1, 3) must end within the prefill, 2 tokens, got end 3",
            "extends_length=True",
        ],
    ),
    (
        lambda: cache(regions=[HISTORY, SlotRegion("r", 5, 1, 1, True)]),
        ["regions must not overlap, got 'history' [2, 6) and 'r' [5, 6)", "start 'r' at 6"],
    ),
    (lambda: cache(capacity=1), ["capacity must hold the 2 tokens", "got 1", "capacity=2"]),
    (lambda: cache(capacity=6.0), ["capacity must be an integer, got 6.0"]),
    (lambda: cache(seq_dim=4), ["seq_dim must be between -4 and 3, got 4"]),
    (lambda: cache(prefilled=[(1, 2)]), ["layer 0 key of the prefill", "got int", "[B, H, T, D]"]),
    (
        lambda: cache(prefilled=X),
        ["prefill must be a sequence of layers, got Tensor", "(key, value)"],
    ),
    (lambda: cache(prefilled=[]), ["prefill must have at least 1 layer, got 0", "(key, value)"]),
    (
        lambda: cache(prefilled=[X]),
        ["layer 0 of the prefill must be a tuple (key, value), got Tensor"],
    ),
    (
        lambda: cache(prefilled=[PAIR, (X, X[:, :, :1])]),
        [
            "layer 1 value of the prefill must be [B, H, T, D] with T=2, got T=1",
            "only its last axis",
        ],
    ),
    (
        lambda: cache(prefilled=[PAIR, (X[:, :, :1], X)]),
        ["layer 1 key of the prefill must be", "T=2, got T=1", "same number of tokens"],
    ),
    (
        lambda: cache(format="int8"),
        ["format must be a KVFormat or None, got 'int8'", "KVFormat.INT8"],
    ),
    (
        lambda: cache(prefilled=[(X.char(), X.char())]),
        ["layer 0 key of the prefill must be a floating tensor, got torch.int8", "KVFormat.INT8"],
    ),
    (
        lambda: cache(format=KVFormat.FP16),
        ["format must match the prefill, which is torch.float32, got FP16", ".to(torch.float16)"],
    ),
    (
        lambda: cache(format=KVFormat.INT8, seq_dim=3, regions=[]),
        ["seq_dim must not be the last axis with format INT8", "move the token axis"],
    ),
    (
        lambda: cache(storage=buffers(v=torch.zeros(1, 2, 5, 4))),
        [
            "layer 0 value of the storage must be [B, H, S, D] with S=6, got S=5",
            "S is the capacity, 6",
        ],
    ),
    (
        lambda: cache(storage=buffers(), format=KVFormat.INT8),
        [
            "layer 0 of the storage must be a tuple (key, value, key scale, value scale)",
            "got 2 items; pass exactly these 4 tensors",
        ],
    ),
    (
        lambda: cache(storage=buffers(v=in_inference_mode())),
        ["layer 0 value of the storage", "inference tensor", "torch.no_grad()"],
    ),
    (
        lambda: cache(storage=buffers(k=torch.zeros(1, 2, 6, 4, requires_grad=True))),
        ["layer 0 key of the storage must not require grad", ".detach()"],
    ),
    (
        lambda: cache().write(2, [PAIR], 0),
        ["region must be the name of a region, got 2", "'history'"],
    ),
    (lambda: cache().write("h", [PAIR], 0), ["region must be one of 'history', got 'h'"]),
    (
        lambda: cache(regions=[SlotRegion("r", 0, 0, 0)]).write("r", [PAIR], 0),
        ["region 'r' must have slots", "got 0 slots", "slots >= 1"],
    ),
    (
        lambda: cache().write("history", [PAIR], 4),
        ["chunk_id for region 'history' must be 0 (append), got 4", "in order"],
    ),
    (
        lambda: cache().write("history", [(torch.zeros(1, 2, 3, 4),) * 2], 0),
        [
            "chunk for region 'history' must have between 1 and 2 tokens on axis 2, got 3",
            "one slot",
        ],
    ),
    (
        lambda: cache().write("history", [PAIR, PAIR], 0),
        ["chunk must have 1 layers, got 2", "(key, value) tuple for each layer"],
    ),
    (in_transaction, ["reset() must be called outside of transaction()", "let the block end"]),
    (
        lambda: edited(lambda s: s.pop("meta")),
        ["state must be a dict", "got ['tensors']", "state_dict()"],
    ),
    (lambda: edited(lambda s: s.update(meta=1)), ["meta of the state must be a dict, got int"]),
    (
        lambda: edited(lambda s: s.update(tensors=1)),
        ["tensors of the state must be a dict, got int"],
    ),
    (
        lambda: edited(lambda s: s["tensors"].update(a=1)),
        ["tensors of the state must map strings to tensors, got 'a': int", "'meta'"],
    ),
    (
        lambda: edited(lambda s: s["tensors"].update(a=X.to_sparse())),
        ["tensor 'a' of the state must be dense", "got layout torch.sparse_coo", "to_dense()"],
    ),
    (
        lambda: edited(lambda s: s["meta"].pop("spec")),
        ["meta['spec'], got NoneType", "state_dict()"],
    ),
    (
        lambda: edited(lambda s: s["meta"]["spec"].update(capacity=7)),
        ["made by another FixedSlotKVCache", "capacity is 6 here and 7 in the state", "build"],
    ),
    (
        lambda: edited(lambda s: s["meta"].pop("newest")),
        ["meta of the state must have whole numbers", "KeyError('newest')", "not edited"],
    ),
    (
        lambda: edited(lambda s: s["meta"]["newest"].update(history=0)),
        ["counters of region 'history' must agree, got newest 0 with valid (0, 0)", "not edited"],
    ),
    (
        lambda: edited(lambda s: s["meta"].update(length=4)),
        ["length in the state must be 2", "got 4"],
    ),
    (
        lambda: edited(lambda s: s["tensors"].pop("layer.0.v")),
        ["must be the 2 of 1 layers, got 1", "layer.0.v", "load a whole state"],
    ),
    (
        lambda: edited(lambda s: s["tensors"].update({"layer.0.v": X[:, :1]})),
        ["'layer.0.v' of the state must be [1, 2, 2, 4] torch.float32, got [1, 1, 2, 4]"],
    ),
    (lambda tmp_path: kv.load(tmp_path / "no"), ["no is not a file", "saved to"]),
    (
        lambda tmp_path: saved(tmp_path, b"?"),
        ["file is not a whole saved state", "cut short", "earlier file"],
    ),
    (foreign, ["file is a safetensors file but not a saved state of version 1", "kv_core.save"]),
    (
        lambda tmp_path: saved(tmp_path, None, meta={"a": X}),
        ["meta of the state must be JSON", "'tensors'"],
    ),
    (
        lambda tmp_path: kv.save(
            tmp_path / "file", {"meta": {}, "tensors": {"a": torch.zeros(1, dtype=torch.cdouble)}}
        ),
        ["dtypes that safetensors stores, got torch.complex128", "convert"],
    ),
    (unwritable, ["file could not be written", "No such file", "untouched", "save again"]),
    (lambda: kv.spec_hash({"a": X}), ["spec must be JSON, got a value that is not", "string keys"]),
    (
        lambda: kv.TokenWindow(num_views=1, frames=1, spatial=1, width=1, device="cpu", dtype=int),
        ["dtype must be a floating dtype, got <class 'int'>", "torch.float32"],
    ),
    (
        lambda: window().append(9, 10, X),
        [
            "frames must be appended in order from frame 5, got frames [9, 10)",
            "append frame 5 next",
        ],
    ),
    (
        lambda: window().append(5, 9, X),
        ["between 1 and 3 frames", "at once, got 4 (frames [5, 9))", "split them"],
    ),
    (
        lambda: window().read(3, 3),
        ["at least 1 frame must be read, got frames [3, 3)", "frames [2, 5)"],
    ),
    (
        lambda: window().read(4, 6),
        ["must have been appended", "[4, 6)", "holds frames [2, 5)", "up to frame 6"],
    ),
    (
        lambda: window().read(1, 5),
        ["must still be held", "[1, 5)", "holds frames [2, 5)", "from frame 2 on", "frames=4"],
    ),
    (
        lambda: window().load_state_dict(
            {"meta": {**window().state_dict()["meta"], "end": -1}, "tensors": {}}
        ),
        ["end in the state must be a number of frames, got -1", "not edited"],
    ),
    (
        lambda: window().load_state_dict({"meta": window().state_dict()["meta"], "tensors": {}}),
        ["tensor 'frames' of the state must be [1, 1, 3, 2, 1] torch.float32, got none"],
    ),
    (
        lambda: kv.allocate_kv_arena(PAIR, PAIR, current_tokens=1, memory_tokens=1),
        ["memory_tokens must be at least the 2 tokens of memory, got 1", "memory_tokens=2"],
    ),
    (
        lambda: staged(lambda a: (a, (a.k[:, :, :2], X))),
        ["key of current and key of the arena must not share memory", ".clone()"],
    ),
    (
        lambda: staged(lambda a: ((a.k.transpose(1, 2).contiguous().transpose(1, 2), a.v), PAIR)),
        ["key of the arena must be contiguous, got strides", "allocate_kv_arena"],
    ),
    (
        lambda: staged(lambda a: ((a.k, a.k), PAIR)),
        ["key and value of the arena must be in different allocations", "allocate_kv_arena"],
    ),
    (
        validated,
        ["key of static must be tokens [0, 2) of the arena's key", "pass arena.k[:, :, 0:2]"],
    ),
    # --- FP8 and FP4
    (lambda: kv.quantize_fp8(3), ["x must be a floating tensor", "got int", "activations"]),
    (
        lambda: kv.quantize_mxfp4(torch.zeros(2, 40)),
        ["x must be [..., D] with D a multiple of 32", "got [2, 40]", "share a scale"],
    ),
    (
        lambda: kv.quantize_nvfp4(torch.full((1, 16), torch.inf), checked=True),
        ["x must be finite", "at (0, 0)", "checked=False"],
    ),
    (
        lambda: kv.dequantize_mxfp4(IDS.to(torch.uint8), IDS.to(torch.uint8)),
        ["codes must hold a multiple of 32 channels", "got 4", "whole groups"],
    ),
    # --- paged and contiguous layers
    (lambda: spec(format=None), ["k_format is not set", "format=", "k_format= and v_format="]),
    (lambda: spec(v_format=8), ["v_format must be a KVFormat", "got 8", "KVFormat.INT8"]),
    (lambda: pool(layout="DH"), ["layout must be", '"NHD"', '"HND"', "'DH'"]),
    (
        lambda: kv.KVLayer.adopt(
            spec(format=KVFormat.FP32), POOL[..., :4], POOL[..., :4], POOL[..., 0]
        ),
        ["k_scale must be None for FP32", "got a tensor", "leave it out"],
    ),
    (
        lambda: pool().write(X[0].to(torch.int8), X[0], torch.tensor([0, 1])),
        ["k must be floating", "torch.int8", "pass activations"],
    ),
    (
        lambda: pool().copy_blocks([0, 1], [2]),
        ["target must be as many different blocks as source", "got 1 for 2", "once"],
    ),
    (lambda: pool().ensure_capacity(9), ["does not grow", "3 blocks of 4", "more blocks"]),
    (frozen, ["holds 4 tokens", "frozen", "grow to 5", "capacity=5", "frozen=False"]),
    (
        lambda: pool().load_state_dict(without(pool().state_dict(), "v_scale")),
        ["tensor 'v_scale'", "[3, 4, 2]", "got none", "not edited"],
    ),
    (lambda: pool().read([0, 1]), ["slots must be a torch.Tensor of ids", "list", "as_tensor"]),
    (
        lambda: step(slots=torch.zeros(2)),
        ["slots must be torch.int32 or torch.int64", "torch.float32", ".to(torch.int32)"],
    ),
    (
        lambda: step(cu_seqlens=torch.zeros(3, dtype=torch.int32)),
        ["cu_seqlens must be [B+1] with B+1=2, got B+1=3"],
    ),
]


def provoke(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> kv.KVError:
    wanted = call.__code__.co_varnames[: call.__code__.co_argcount]
    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    with pytest.raises(kv.KVError) as caught, monkeypatch.context():
        call(**{name: fixtures[name] for name in wanted})
    monkeypatch.undo()
    return caught.value


@pytest.mark.parametrize(("call", "words"), MESSAGES, ids=[words[0] for _, words in MESSAGES])
def test_the_message_says_who_what_and_what_next(
    call: Callable[..., Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = str(provoke(call, tmp_path, monkeypatch))
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message and "  " not in message and not message.endswith(".")


def test_no_raise_goes_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = {
        (path, node.lineno, node.end_lineno)
        for path in SOURCE.rglob("*.py")
        if path.stem not in READ_ELSEWHERE and path.parent.name != "hybrid"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    assert len(unread) > 50
    for call, _ in MESSAGES:
        trace = provoke(call, tmp_path, monkeypatch).__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        assert trace is not None
        at = Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno
        unread -= {r for r in unread if r[0] == at[0] and r[1] <= at[1] <= (r[2] or r[1])}
    assert not sorted(f"{path.name}:{first}" for path, first, _ in unread)
