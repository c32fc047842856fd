"""Every message of the allocator and the sequence table, read, and nothing changed by it."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kv_core as kv
import pytest
import torch
from kv_core import BlockAllocator, KVFormat, KVLayer, KVSpec, SequenceTable
from kv_core.prefixes import token_ids

SOURCE = Path(kv.__file__).parent
MODULES = (
    "append_plan",
    "blocks",
    "layer_group",
    "prefixes",
    "sequence_records",
    "sequence_state",
    "sequences",
    "step_buffers",
)


def spec(**options: Any) -> KVSpec:
    sizes = {"kv_heads": 1, "head_dim": 2, "block_size": 4, "format": KVFormat.INT8}
    return KVSpec(**{**sizes, **options})


def paged(**options: Any) -> KVLayer:
    return KVLayer.paged(spec(**options), blocks=6)


def contiguous() -> KVLayer:
    return KVLayer.contiguous(spec(), sequences=2, capacity=4)


def pool() -> BlockAllocator:
    """Blocks 1 and 2 are a's, 3 was freed, 1 is published."""
    one = BlockAllocator(6)
    one.allocate(3, "a")
    one.publish(1, bytes(32))
    one.free([3], "a")
    return one


def table() -> SequenceTable:
    """a has 6 tokens in blocks 1 and 2, b shares them, and 3 blocks are free."""
    one = SequenceTable([paged(), paged(format=KVFormat.FP16)], sequences=3, max_blocks=4)
    one.append({"a": [1, 2, 3, 4, 5, 6]})
    one.publish("a")
    one.fork("a", "b")
    return one


def evicted() -> SequenceTable:
    one = SequenceTable([paged()], sequences=2, max_blocks=4, window=3)
    one.append({"a": 9})
    one.append({"a": 1})
    return one


def lines() -> SequenceTable:
    one = SequenceTable([contiguous(), contiguous()], sequences=2)
    one.append({"a": 4})
    return one


def drifted(one: BlockAllocator) -> None:
    one._free.popitem()
    one.allocate(1, "b")


def leaking(one: SequenceTable) -> None:
    one._sequences["a"].length = 9
    try:
        one.check()
    finally:
        one._sequences["a"].length = 6


def grown_alone(one: SequenceTable) -> None:
    one.layers[1].ensure_capacity(5)
    one.append({"a": 1})


def frozen(one: SequenceTable) -> None:
    one.layers[1].frozen = True
    one.ensure_capacity(5)


def unsaved(one: SequenceTable) -> None:
    one.append({("a", 1): 1})
    one.state_dict()


def unsaved_pool(one: BlockAllocator) -> None:
    one.allocate(1, 2.5)
    one.state_dict()


def edited(one: Any, key: str) -> None:
    state = one.state_dict()
    del state["meta"][key]
    one.load_state_dict(state)


Call = Callable[[Any], Any]
MESSAGES: list[tuple[Callable[[], Any], Call, type[Exception], list[str]]] = [
    (
        pool,
        lambda p: p.allocate(4, "b"),
        kv.OutOfBlocks,
        ["4 blocks must be free for 'b', got 3 free of 6 (2 used, 1 reserved)", "free some first"],
    ),
    (
        pool,
        lambda p: p.share([0], "b"),
        kv.SpecError,
        ["block 0 is the null block, which 'b' cannot hold", "were allocated"],
    ),
    (
        pool,
        lambda p: p.share([1], "a"),
        kv.SpecError,
        ["block 1 can be shared with 'a' once, got it again", "name every block once"],
    ),
    (
        pool,
        lambda p: p.share([1, 3], "b"),
        kv.StaleHandleError,
        ["block 3 is free, so 'b' cannot share what it held", "publish it first"],
    ),
    (
        pool,
        lambda p: p.free([1, 3], "a"),
        kv.DoubleFree,
        ["block 3 must be held by 'a' to be freed, got one that is free", "once"],
    ),
    (
        pool,
        lambda p: p.free([1], "b"),
        kv.DoubleFree,
        ["block 1 must be held by 'b' to be freed, got one that is held by 'a'"],
    ),
    (pool, lambda p: p.free([0], "a"), kv.DoubleFree, ["block 0", "one that is reserved"]),
    (pool, lambda p: p.free([9], "a"), kv.SpecError, ["ids[0] must be between 0 and 5, got 9"]),
    (
        pool,
        lambda p: p.publish(3, bytes(32)),
        kv.StaleHandleError,
        ["block 3 must be used to be published, got one that is free", "before it is freed"],
    ),
    (
        pool,
        lambda p: p.publish(1, bytes([1] * 32)),
        kv.SpecError,
        ["block 1 is published as 000000000000, got 010101010101", "unpublish()"],
    ),
    (
        pool,
        lambda p: p.check(["b"]),
        kv.BlockLeak,
        ["block 1 is held by 'a', who is gone; block 2", "free what each owner holds"],
    ),
    (pool, lambda p: p.allocate(1, []), kv.DtypeError, ["owner must be hashable, got list"]),
    (
        pool,
        lambda p: edited(p, "free"),
        kv.SnapshotError,
        ["holders, free, free_published and digests", "KeyError('free')", "not edited"],
    ),
    (
        lambda: None,
        lambda _: drifted(pool()),
        kv.BlockLeak,
        ["must add up to 6, got 1 + 3 + 1", "report it"],
    ),
    (
        lambda: None,
        lambda _: unsaved_pool(pool()),
        kv.SnapshotError,
        ["the owner of block 4 must be a str or int to be saved, got 2.5", "use such request ids"],
    ),
    (
        lambda: None,
        lambda _: token_ids("ids", torch.zeros(2, device="meta")),
        kv.DtypeError,
        ["ids must be on the CPU, got meta", "pass how many there are"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([], sequences=1, max_blocks=1),
        kv.SpecError,
        ["layers must be at least 1 KVLayer, got none", "pass those of the model"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([paged(), 3], sequences=1, max_blocks=1),
        kv.DtypeError,
        ["layers[1] must be a KVLayer, got int", "KVLayer.paged"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([paged(), contiguous()], sequences=1, max_blocks=1),
        kv.LayerKindError,
        ["layers[1] must be paged as layers[0] is, got contiguous", "a table of its own"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([paged(), paged(block_size=8)], sequences=1, max_blocks=1),
        kv.SpecError,
        ["layers[1] must have block_size=4 as layers[0] has, got 8", "a table of their own"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable(
            [paged(), KVLayer.paged(spec(), blocks=7)], sequences=1, max_blocks=1
        ),
        kv.SpecError,
        ["layers[1] must have num_blocks=6 as layers[0] has, got 7"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable(
            [paged(), KVLayer.paged(spec(), blocks=6, device="meta")], sequences=1, max_blocks=1
        ),
        kv.SpecError,
        ["layers[1] must have device=cpu as layers[0] has, got meta"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([paged()], sequences=1),
        kv.SpecError,
        ["max_blocks is not set", "its tokens by 4, rounded up"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([contiguous()], sequences=1, max_blocks=2),
        kv.SpecError,
        ["max_blocks of contiguous layers must be between 1 and 1, got 2"],
    ),
    (
        lambda: None,
        lambda _: SequenceTable([paged()], sequences=1, max_blocks=2, window=0),
        kv.SpecError,
        ["window must be at least 1, got 0"],
    ),
    (
        table,
        lambda t: t.append(["a"]),
        kv.DtypeError,
        ["tokens must map requests to new tokens, got list", "{'a': 1}"],
    ),
    (
        table,
        lambda t: t.append(dict.fromkeys("wxyz", 1)),
        kv.CapacityError,
        ["the step has 4 requests, got room for sequences=3", "sequences=4"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "a": 0}),
        kv.SpecError,
        ["tokens of 'a' must be at least 1, got 0"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "c": []}),
        kv.SpecError,
        ["tokens of 'c' (ids) must be at least 1, got 0"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "c": 2.0}),
        kv.DtypeError,
        ["tokens of 'c' must be an integer, got 2.0"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "c": "text"}),
        kv.DtypeError,
        ["tokens of 'c' must be a number of tokens or their ids, got str", "a list of ints"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "c": [1.5]}),
        kv.DtypeError,
        ["tokens of 'c' must be integers of at most 64 bits, got float64", "as int"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "c": [[1], [2]]}),
        kv.ShapeError,
        ["tokens of 'c' must be token ids [T] on one axis, got 2 axes", "one sequence"],
    ),
    (
        table,
        lambda t: t.append({"b": 1, "a": 11}),
        kv.CapacityError,
        [
            "request 'a' needs 5 blocks of 4 tokens for its 17 tokens, got room for 4",
            "truncate() or evict() it first",
        ],
    ),
    (
        table,
        lambda t: t.append({"c": [1, 2, 3, 4, 5], "b": 5, "a": 5}),
        kv.OutOfBlocks,
        [
            "the step needs 4 blocks (1 of them to copy shared ones), got 3 free of 6 (2 used, "
            "1 reserved)",
            "free(), truncate() or evict() a sequence",
        ],
    ),
    (
        lambda: SequenceTable([paged()], sequences=2, max_blocks=4, step_tokens=5),
        lambda t: t.append({"a": 5, "b": 1}),
        kv.CapacityError,
        ["the step has 6 new tokens, got room for step_tokens=5", "split the prompt"],
    ),
    (
        table,
        lambda t: t.append({"a": 1, "b": 1}, pad_sequences=1),
        kv.SpecError,
        ["pad_sequences must be between 2 and 3, got 1"],
    ),
    (
        table,
        lambda t: t.append({"a": 2, "b": 1}, pad_tokens=2),
        kv.SpecError,
        ["pad_tokens must be between 3 and 20, got 2"],
    ),
    (
        table,
        lambda t: t.truncate("c", 1),
        kv.UnknownRequest,
        ["request 'c' must be one of the 2 that are known", "append() starts one"],
    ),
    (table, lambda t: t.free("c"), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (table, lambda t: t.evict("c", 1), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (table, lambda t: t.fork("c", "d"), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (table, lambda t: t.publish("c"), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (table, lambda t: t.slots_of("c"), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (table, lambda t: t.length(["a"]), kv.DtypeError, ["request must be hashable, got list"]),
    (table, lambda t: t.fork("a", ["a"]), kv.DtypeError, ["request must be hashable, got list"]),
    (
        table,
        lambda t: t.fork("a", "b"),
        kv.SpecError,
        ["target 'b' must be a new request, got one of 6 tokens", "free() it first"],
    ),
    (
        table,
        lambda t: t.truncate("a", 7),
        kv.SpecError,
        ["length of 'a' must be between 0 and 6, got 7"],
    ),
    (
        table,
        lambda t: t.truncate("a", 1.0),
        kv.DtypeError,
        ["length of 'a' must be an integer, got 1.0"],
    ),
    (
        table,
        lambda t: t.evict("a", -1),
        kv.SpecError,
        ["tokens of 'a' must be between 0 and 6, got -1"],
    ),
    (
        evicted,
        lambda t: t.truncate("a", 5),
        kv.RollbackTooDeep,
        [
            "request 'a' cannot go back to 5 tokens: that would need tokens [3, 4) again",
            "keep its length at 6 or more",
        ],
    ),
    (
        table,
        lambda t: t.ensure_capacity(5),
        kv.LayerKindError,
        ["paged layers do not grow, got 6 blocks of 4 tokens", "with more blocks"],
    ),
    (
        lines,
        lambda t: t.append({"b": 1, "a": 1}),
        kv.CapacityError,
        ["request 'a' needs 2 blocks of 4 tokens for its 5 tokens, got room for 1", "ensure_"],
    ),
    (
        lines,
        frozen,
        kv.FrozenError,
        ["layers[1] must not be frozen to grow from 4 to 64 tokens", "before capturing"],
    ),
    (
        lambda: None,
        lambda _: grown_alone(lines()),
        kv.StaleHandleError,
        ["layers[1] must hold 4 tokens a block, got 64", "the table's ensure_capacity()"],
    ),
    (
        table,
        leaking,
        kv.BlockLeak,
        ["request 'a' must hold 3 blocks for 9 tokens, got [1, 2] in its row", "through the table"],
    ),
    (
        lambda: None,
        lambda _: unsaved(table()),
        kv.SnapshotError,
        ["a request must be a str or int to be saved, got ('a', 1)", "use such request ids"],
    ),
    (
        table,
        lambda t: edited(t, "sequences"),
        kv.SnapshotError,
        ["[request, length, dropped, blocks, known ids]", "got TypeError", "not edited"],
    ),
    (
        table,
        lambda t: edited(t, "allocator"),
        kv.SnapshotError,
        ["meta of the state must be a dict"],
    ),
]


def everything(thing: Any) -> Any:
    """What there is to change: records, the order of free blocks, and all bytes."""
    if thing is None:
        return None
    state = thing.state_dict()
    result = [state["meta"], {name: t.tolist() for name, t in state["tensors"].items()}]
    if isinstance(thing, SequenceTable):
        step = thing._buffers.step
        result += [t.tolist() for t in (step.slots, step.positions, step.block_table)]
        result += [step.requests, step.reused, step.context_lens.tolist()]
        for layer in thing.layers:
            result += [t.tolist() for t in layer.tensors().values()]
            result += [t.data_ptr() for t in layer.tensors().values()]
    return result


@pytest.mark.parametrize(
    ("make", "call", "error", "words"), MESSAGES, ids=[words[0] for *_, words in MESSAGES]
)
def test_the_message_says_who_what_and_what_next_and_nothing_changed(
    make: Callable[[], Any], call: Call, error: type[Exception], words: list[str]
) -> None:
    thing = make()
    before = everything(thing)
    with pytest.raises(kv.KVError) as caught:
        call(thing)
    assert everything(thing) == before
    message = str(caught.value)
    assert type(caught.value) is error
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message and "  " not in message and not message.endswith(".")


def test_no_raise_of_these_modules_goes_unread() -> None:
    unread = {
        (path, node.lineno, node.end_lineno)
        for path in (SOURCE / f"{module}.py" for module in MODULES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    assert len(unread) > 20
    for make, call, _, _ in MESSAGES:
        with pytest.raises(kv.KVError) as caught:
            call(make())
        trace: Any = caught.value.__traceback__
        context: Any = caught.value.__cause__ and caught.value.__cause__.__traceback__
        for part in (trace, context):
            while part:
                path, line = Path(part.tb_frame.f_code.co_filename), part.tb_lineno
                unread -= {r for r in unread if r[0] == path and r[1] <= line <= (r[2] or r[1])}
                part = part.tb_next
    left = sorted(f"{path.name}:{first}" for path, first, _ in unread)
    # these three become the cause of a SnapshotError, whose message is read above
    assert [place.split(":")[0] for place in left] == ["blocks.py"] + ["sequence_records.py"] * 2
