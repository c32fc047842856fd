"""T10: every way to use the hybrid cache wrongly: kind of error, message, and nothing changed."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kv_core as kv
import pytest
import torch
from hybrid_oracle import digest, tiny_fp8, tiny_spec
from kv_core import Compression, HybridSpec, KVCacheManager

SOURCE = Path(kv.__file__).parent / "hybrid"
Call = Callable[[KVCacheManager], Any]
X = torch.zeros(3, 16)
WIDE = torch.zeros(3, 32)
KEYS = torch.zeros(3, 8)
TABLE = torch.zeros(99, 2)
IDS = list(range(100))


def idle(spec: HybridSpec | None = None, **options: Any) -> KVCacheManager:
    """Two requests of 20 and 16 tokens, two free blocks and a free slot."""
    sizes = {"slots": 3, "blocks": 6, "max_tokens": 64}
    cache = KVCacheManager(spec or tiny_spec(), **sizes | options)
    cache.commit(cache.acquire(["a"] * 20 + ["b"] * 16, [*range(20), *range(16)]))
    return cache


def opened() -> KVCacheManager:
    """A step of 2 tokens and 1; the second request closes no window."""
    cache = idle()
    cache.acquire(["a"] * 2 + ["b"], [20, 21, 16])
    return cache


def closing() -> KVCacheManager:
    """A step of 3 tokens of which 1 closes a window of ratio 4."""
    cache = idle()
    cache.acquire(["b"] * 3, [16, 17, 18])
    cache.abort(cache._handles)
    cache.acquire(["a"] * 3, [20, 21, 22])
    cache.commit(cache._handles)
    cache.acquire(["a"] * 3, [23, 24, 25])
    return cache


def full() -> KVCacheManager:
    cache = idle()
    cache.commit(cache.acquire(["c"], [0]))
    return cache


def snapped() -> KVCacheManager:
    cache = idle()
    cache.snapshot("b")
    return cache


def restored() -> KVCacheManager:
    cache = idle()
    cache.restore("c", cache.snapshot("b"))
    return cache


def shared() -> KVCacheManager:
    cache = idle(tiny_spec().for_draft(12), slots=4)
    cache.commit(cache.acquire(["a"] * 4, range(20, 24)))
    cache.fork("a", "c", 16)
    return cache


def replaying() -> KVCacheManager:
    cache = KVCacheManager(tiny_spec(ratios=(4,), **KIND), slots=3, blocks=9)
    cache.commit(cache.acquire(["a"] * 40, range(40)))
    cache.publish("a", IDS[:40])
    cache.reuse("c", IDS, replay=True)
    return cache


KIND: dict[str, Any] = {"kinds": (Compression(ratio=4, overlap=True, indexer=True),)}


def no_blocks() -> KVCacheManager:
    return idle(blocks=4)


def published() -> KVCacheManager:
    cache = idle()
    cache.publish("b", IDS[:16])
    return cache


def written() -> KVCacheManager:
    cache = opened()
    cache._handles[0].write_swa(X)
    return cache


def freed() -> KVCacheManager:
    cache = opened()
    cache.free("b")
    return cache


def after(cache: KVCacheManager, read: Callable[[Any], Any]) -> None:
    """Read a view after its step."""
    view = cache._handles[0].read_swa_view()
    generation = cache._open._generation
    cache._open._generation += 1  # as commit() does, without changing anything else
    try:
        read(view)
    finally:
        cache._open._generation = generation


def edited(cache: KVCacheManager, change: Callable[[dict[str, Any]], Any]) -> None:
    state = cache.state_dict()
    change(state)
    cache.load_state_dict(state)


def compress(cache: KVCacheManager, layer: int = 1, **change: Any) -> None:
    given: dict[str, Any] = {"which": "main", "value": WIDE, "score": WIDE, "weight": X[0]}
    given |= {"eps": 1e-6, "cos": TABLE, "sin": TABLE} | change
    cache._handles[layer].compress(**given)


def spec_of(**options: Any) -> Call:
    return lambda _: tiny_spec(**options)


# how it is built, what is called, the kind of error, and the words that a reader needs
MESSAGES: list[tuple[Callable[[], KVCacheManager], Call, type[Exception], list[str]]] = [
    # --- acquire
    (
        idle,
        lambda c: c.acquire(["a", "a"], [20]),
        kv.ShapeError,
        ["positions must have one item for each of the 2 request_ids, got 1", "every token"],
    ),
    (
        idle,
        lambda c: c.acquire([], []),
        kv.SpecError,
        ["at least 1 token and 1 request, got 0 and 0", "pad it"],
    ),
    (
        idle,
        lambda c: c.acquire(["c"], [-1]),
        kv.SpecError,
        ["positions[0] of request 'c' must be at least 0, got -1"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"], [20.0]),
        kv.DtypeError,
        ["positions[0] of request 'a' must be an integer, got 20.0"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"], torch.tensor([20])),
        kv.DtypeError,
        ["positions must be a list", "got Tensor", "on the host"],
    ),
    (
        idle,
        lambda c: c.acquire("aa", [20, 21]),
        kv.DtypeError,
        ["request_ids must be a list", "got str"],
    ),
    (
        idle,
        lambda c: c.acquire([["a"]], [20]),
        kv.DtypeError,
        ["request must be hashable, got list", "str or int"],
    ),
    (
        idle,
        lambda c: c.acquire(["a", "b", "a"], [20, 16, 21]),
        kv.SpecError,
        ["tokens of request 'a' must be next to each other", "index 2 after those of 'b'", "sort"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"] * 3, [20, 21, 23]),
        kv.SpecError,
        ["positions[2] of request 'a' must be 22", "got 23", "no gap"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"] * 3, [20, 21, 21]),
        kv.SpecError,
        ["positions[2] of request 'a' must be 22", "got 21"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"], [19]),
        kv.SpecError,
        ["first position of request 'a' must be 20, its committed length, got 19"],
    ),
    (
        idle,
        lambda c: c.acquire(["c"], [1]),
        kv.SpecError,
        ["first position of request 'c' must be 0", "got 1"],
    ),
    (
        lambda: idle(max_len=24),
        lambda c: c.acquire(["a"] * 5, range(20, 25)),
        kv.SpecError,
        ["positions of request 'a' must be below max_len=24, got 24", "larger max_len"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"] * 3, range(20, 23), speculative=True),
        kv.RingTooSmall,
        ["'a' has a speculative run of 3 tokens, got rings for 2", "for_draft(3)"],
    ),
    (
        full,
        lambda c: c.acquire(["d"], [0]),
        kv.OutOfSlots,
        ["1 slot(s) must be free for 'd', got 0 free of 3", "more slots"],
    ),
    (
        no_blocks,
        lambda c: c.acquire(["a"] * 13 + ["c"], [*range(20, 33), 0]),
        kv.OutOfBlocks,
        ["2 block(s) must be free for a step of 2 requests, got 0 free of 4", "more blocks"],
    ),
    (
        idle,
        lambda c: c.acquire(["a"] * 65, range(20, 85)),
        kv.CapacityError,
        ["the step has 65 tokens, got room for max_tokens=64", "split it"],
    ),
    (
        opened,
        lambda c: c.acquire(["a"], [22]),
        kv.SpecError,
        ["a step must be closed before the next", "open one of 2 requests", "abort()"],
    ),
    # --- commit and abort
    (
        idle,
        lambda c: c.commit(c._handles),
        kv.StaleHandleError,
        ["handles must be those of the open step, got some although no step is open", "once"],
    ),
    (
        opened,
        lambda c: c.commit(idle()._handles),
        kv.StaleHandleError,
        ["handles must be those of the open step, got others"],
    ),
    (opened, lambda c: c.abort([]), kv.StaleHandleError, ["what acquire() returned"]),
    (opened, lambda c: c.commit(None), kv.StaleHandleError, ["what acquire() returned"]),
    (
        opened,
        lambda c: c.commit(c._handles, accepted={"c": 1}),
        kv.UnknownRequest,
        ["accepted must name requests of the step, got 'c'", "'a', 'b'"],
    ),
    (
        opened,
        lambda c: c.commit(c._handles, accepted={"a": 3}),
        kv.SpecError,
        ["accepted['a'] must be between 0 and 2, got 3"],
    ),
    (
        closing,
        lambda c: c.commit(c._handles, accepted={"a": 1}),
        kv.RollbackTooDeep,
        ["'a' cannot go back to 24 tokens", "rings of 8 rows and tails of [8, 16]", "26"],
    ),
    (
        written,
        lambda c: c.abort(c._handles),
        kv.RollbackTooDeep,
        ["'a' cannot go back to 20 tokens", "written up to 22", "for_draft(3)"],
    ),
    # --- handles and views
    (
        idle,
        lambda c: c._handles[0].write_swa(X),
        kv.StaleHandleError,
        ["a step must be open to use a handle", "acquire()"],
    ),
    (
        freed,
        lambda c: c._handles[0].write_swa(X),
        kv.StaleHandleError,
        ["must be live to use a handle, got 'b', which was freed", "abort()"],
    ),
    (
        opened,
        lambda c: after(c, lambda view: view.codes),
        kv.StaleHandleError,
        ["a view must be read in the step it was made in", "new one"],
    ),
    (
        opened,
        lambda c: c._handles[0].write_swa(X[:2]),
        kv.ShapeError,
        ["rows must be [T, D] with T=3, got T=2", "each token", "layer 0 (window only)"],
    ),
    (
        opened,
        lambda c: c._handles[0].write_swa(WIDE),
        kv.ShapeError,
        ["rows must be [T, D] with D=16, got D=32"],
    ),
    (
        opened,
        lambda c: c._handles[0].write_swa(X.int()),
        kv.DtypeError,
        ["rows must be floating, got torch.int32", "activations"],
    ),
    (
        opened,
        lambda c: c._handles[0].write_swa(X.to("meta")),
        kv.DtypeError,
        ["rows must be on cpu, got meta"],
    ),
    (
        opened,
        lambda c: c._handles[1].append_tail("main", WIDE, X),
        kv.ShapeError,
        ["score must be [T, W] with W=32, got W=16"],
    ),
    (
        opened,
        lambda c: c._handles[1].append_tail("tail", WIDE, WIDE),
        kv.SpecError,
        ['which must be "main" or "index"', "'tail'"],
    ),
    (
        opened,
        lambda c: c._handles[2].append_tail("index", X, X),
        kv.LayerKindError,
        ["layer 2 (ratio 16, no indexer) has no indexer keys", "spec.kind(layer).indexer"],
    ),
    (
        opened,
        lambda c: compress(c, 0),
        kv.LayerKindError,
        ["layer 0 (window only) has no compressed entries", "spec.kind(layer)"],
    ),
    (opened, lambda c: compress(c, value=X), kv.ShapeError, ["value must be", "W=32, got W=16"]),
    (opened, lambda c: compress(c, weight=KEYS[0]), kv.ShapeError, ["weight must be", "D=16"]),
    (opened, lambda c: compress(c, cos=X), kv.ShapeError, ["cos must be", "R/2=2, got R/2=16"]),
    (opened, lambda c: compress(c, sin=TABLE[:9]), kv.ShapeError, ["sin must be", "S=99, got S=9"]),
    (
        opened,
        lambda c: c._handles[0].flush_compression(X),
        kv.LayerKindError,
        ["layer 0 (window only) has no compressed entries"],
    ),
    (
        opened,
        lambda c: c._handles[1].flush_compression(X),
        kv.LayerKindError,
        ["layer 1 (ratio 4, indexer) must be flushed with indexer keys, got none"],
    ),
    (
        opened,
        lambda c: c._handles[2].flush_compression(X, KEYS),
        kv.LayerKindError,
        ["layer 2 (ratio 16, no indexer) must be flushed without indexer keys, got some"],
    ),
    (
        closing,
        lambda c: c._handles[1].flush_compression(X[:2], KEYS[:2]),
        kv.ShapeError,
        ["entries must be [T, D] with T=3 rows, or 1 for the tokens that close", "got 2"],
    ),
    (
        closing,
        lambda c: c._handles[1].flush_compression(X[:1], KEYS),
        kv.ShapeError,
        ["keys must be [T, I] with T=1, got T=3"],
    ),
    (
        closing,
        lambda c: c._handles[1].flush_compression(X, X),
        kv.ShapeError,
        ["keys must be [T, I] with I=8, got I=16"],
    ),
    (
        opened,
        lambda c: c._handles[2].read_indexer_view(),
        kv.LayerKindError,
        ["has no indexer keys", "which='index'"],
    ),
    (
        written,
        lambda c: c._handles[0].read_swa_view(),
        kv.RingTooSmall,
        ["the ring of layer 0 (window only) must hold 9 rows", "got 8", "read_swa_view() first"],
    ),
    # --- requests
    (
        idle,
        lambda c: c.free("c"),
        kv.UnknownRequest,
        ["request 'c' must be one of the 2 that are known", "acquire() starts one"],
    ),
    (idle, lambda c: c.rollback("c", 0), kv.UnknownRequest, ["request 'c' must be one of the 2"]),
    (idle, lambda c: c.length([]), kv.DtypeError, ["request must be hashable, got list"]),
    (
        idle,
        lambda c: c.rollback("a", 21),
        kv.SpecError,
        ["length of 'a' must be between 0 and 20, got 21"],
    ),
    (
        idle,
        lambda c: c.rollback("a", 18),
        kv.RollbackTooDeep,
        ["'a' cannot go back to 18 tokens", "lost rows", "for_draft(3)"],
    ),
    (
        restored,
        lambda c: c.rollback("c", 15),
        kv.RollbackTooDeep,
        ["'c' can go back to 16 tokens, where it was started from a prefix, got 15", "anew"],
    ),
    (
        shared,
        lambda c: c.rollback("a", 15),
        kv.SharedBlockError,
        ["'a' must keep the blocks that it shares whole", "length 15 inside block 1", "'c' also"],
    ),
    (
        opened,
        lambda c: c.rollback("a", 19),
        kv.FrozenError,
        ["'a' must not be in the open step, got 2 tokens", "commit() or abort() it first"],
    ),
    (
        idle,
        lambda c: c.fork("a", "b"),
        kv.SpecError,
        ["request 'b' must be new, got one of 16 tokens", "choose another id"],
    ),
    (
        idle,
        lambda c: c.fork("a", "c", 0),
        kv.SpecError,
        ["length of 'a' to fork must be between 1 and 20, got 0"],
    ),
    (
        restored,
        lambda c: c.fork("c", "d", 15),
        kv.RollbackTooDeep,
        ["'c' can be forked from 16 tokens on", "got 15", "fork what it was started from"],
    ),
    (full, lambda c: c.fork("a", "d"), kv.OutOfSlots, ["1 slot(s) must be free for 'd'"]),
    (
        no_blocks,
        lambda c: c.fork("a", "c"),
        kv.OutOfBlocks,
        ["1 block(s) must be free for the copy of a block for 'c', got 0 free of 4"],
    ),
    (
        idle,
        lambda c: c.snapshot("a", 17),
        kv.SpecError,
        ["to set aside must be a multiple of block_tokens=16, got 17", "use 16 or 32"],
    ),
    (
        idle,
        lambda c: c.snapshot("a"),
        kv.RollbackTooDeep,
        ["the state of request 'a' at 16 tokens", "got one of 20 tokens", "end a step at 16"],
    ),
    (
        snapped,
        lambda c: c.restore("a", next(iter(c._snapshots))),
        kv.SpecError,
        ["request 'a' must be new"],
    ),
    (
        idle,
        lambda c: c.restore("c", next(iter(snapped()._snapshots))),
        kv.StaleHandleError,
        ["the snapshot must be held by this manager", "length=16", "not released"],
    ),
    (
        replaying,
        lambda c: c.fork("c", "d"),
        kv.SpecError,
        ["'c' must have its state, got 25 of 32 tokens replayed", "run the others first"],
    ),
    (
        idle,
        lambda c: c.publish("a", IDS[:15]),
        kv.ShapeError,
        ["ids of 'a' must be at least the 16 tokens of its full blocks, got 15", "from the start"],
    ),
    (idle, lambda c: c.lookup("abc"), kv.DtypeError, ["ids must be", "got str"]),
    # --- states
    (opened, lambda c: c.state_dict(), kv.FrozenError, ["no step may be open while", "saved"]),
    (opened, lambda c: c.load_state_dict({}), kv.FrozenError, ["no step may be open", "loaded"]),
    (snapped, lambda c: c.state_dict(), kv.SnapshotError, ["no snapshot may be held", "publish()"]),
    (
        snapped,
        lambda c: c.load_state_dict({}),
        kv.SnapshotError,
        ["no snapshot may be held", "release()"],
    ),
    (
        idle,
        lambda c: edited(c, lambda s: s["tensors"].pop("0.positions")),
        kv.SnapshotError,
        ["tensor '0.positions' of the state must be [3, 8] torch.int32, got none", "not edited"],
    ),
    (
        idle,
        lambda c: edited(c, lambda s: s["meta"]["requests"][0].__setitem__(1, -1)),
        kv.SnapshotError,
        ["requests, free_slots and prefixes that fit each other", "request 'a' of [-1,"],
    ),
    (
        idle,
        lambda c: edited(c, lambda s: s["meta"]["requests"][0].__setitem__(0, "z")),
        kv.SnapshotError,
        ["fit each other", "request 'z' with blocks [1, 2] that it does not hold"],
    ),
    (
        idle,
        lambda c: edited(c, lambda s: s["meta"]["requests"].pop()),
        kv.SnapshotError,
        ["fit each other", "3 blocks held, others in the requests"],
    ),
    (
        idle,
        lambda c: edited(c, lambda s: s["meta"]["free_slots"].append(0)),
        kv.SnapshotError,
        ["fit each other", "slots [0, 1] used and [0, 2] free"],
    ),
    (
        published,
        lambda c: edited(c, lambda s: s["meta"]["prefixes"].append("ab" * 32)),
        kv.SnapshotError,
        ["fit each other", "state of prefix abababababab, which no block holds"],
    ),
    (
        published,
        lambda c: edited(c, lambda s: s["tensors"].update({"prefix.0.0.ring.0": X.int()})),
        kv.SnapshotError,
        ["fit each other", "prefix.0.0.ring.0 of [3, 16]"],
    ),
    # --- construction
    (idle, spec_of(ratios=()), kv.SpecError, ["ratios must name at least 1 layer, got none"]),
    (idle, spec_of(ratios=(4, 5)), kv.SpecError, ["kinds must have one Compression", "[4, 5]"]),
    (idle, spec_of(block_tokens=24), kv.SpecError, ["must be a multiple of 16", "24; use 32"]),
    (idle, spec_of(rope_dim=3), kv.SpecError, ["rope_dim must be even, got 3", "pairs"]),
    (idle, spec_of(row_format=8), kv.DtypeError, ["row_format must be a RowFormat, got 8"]),
    (idle, spec_of(index_dim=2), kv.SpecError, ["index_dim must be at least rope_dim, 4, got 2"]),
    (
        idle,
        spec_of(key_global_scale=math.nan),
        kv.SpecError,
        ["must be at least 1e-18, got nan", "2688"],
    ),
    (idle, spec_of(layout="x"), kv.SpecError, ["layout must be one of", "'x'"]),
    (idle, spec_of(layout="flashmla_v4"), kv.SpecError, ["FP8 rows of an even width", "FP32 rows"]),
    (idle, lambda _: tiny_fp8(row_group=5), kv.SpecError, ["multiple of row_group=5", "got 12"]),
    (
        idle,
        lambda _: tiny_fp8(index_dim=40),
        kv.SpecError,
        ["index_dim must be a multiple of 32 for MXFP4 keys, got 40", "KeyFormat.BF16"],
    ),
    (
        idle,
        lambda _: HybridSpec.deepseek_v4(layers=2, compress_ratios=[4, 128, 0]),
        kv.SpecError,
        ["one ratio for each of the 2 layers, got 3", "leave out the MTP layer's"],
    ),
    (
        idle,
        lambda _: KVCacheManager(tiny_spec(), slots=2**28, blocks=2),
        kv.SpecError,
        ["slots and blocks must give less than 2^31 rows", "several caches"],
    ),
    (
        idle,
        lambda _: kv.PagedKVPool(tiny_spec(), 0, 2),
        kv.LayerKindError,
        ["layer 0 (window only) has no compressed entries, so it needs no pool"],
    ),
]


@pytest.mark.parametrize(
    ("make", "call", "error", "words"), MESSAGES, ids=[words[0] for *_, words in MESSAGES]
)
def test_t10_the_message_says_who_what_and_what_next_and_nothing_changed(
    make: Callable[[], KVCacheManager],
    call: Call,
    error: type[Exception],
    words: list[str],
) -> None:
    cache = make()
    before = digest(cache)
    with pytest.raises(kv.KVError) as caught:
        call(cache)
    assert digest(cache) == before
    message = str(caught.value)
    assert type(caught.value) is error, message
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message and "  " not in message and not message.endswith(".")


def test_no_raise_of_the_hybrid_cache_goes_unread() -> None:
    unread = {
        (path, node.lineno, node.end_lineno)
        for path in SOURCE.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    assert len(unread) > 40
    for make, call, _, _ in MESSAGES:
        with pytest.raises(kv.KVError) as caught:
            call(make())
        for error in (caught.value, caught.value.__cause__):
            part: Any = error and error.__traceback__
            while part:
                path, line = Path(part.tb_frame.f_code.co_filename), part.tb_lineno
                unread -= {r for r in unread if r[0] == path and r[1] <= line <= (r[2] or r[1])}
                part = part.tb_next
    assert not sorted(f"{path.name}:{first}" for path, first, _ in unread)
