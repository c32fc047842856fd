"""The operations of a hybrid cache on every row of the table: against FP64, and bit for bit."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_core import (
    Compression,
    HybridSpec,
    KeyFormat,
    KVCacheManager,
    LayerCacheHandle,
    RowFormat,
)
from kv_kernels import HybridKernels, hybrid_attention, hybrid_ops, indexer_topk
from kv_kernels.library import call_query
from kv_kernels.registry import ROWS, Row, format_pair
from kv_kernels.testing import (
    assert_picks,
    error_budget,
    fill_garbage,
    hybrid_attention_oracle,
    indexer_scores_oracle,
    largest_error,
    random_hybrid,
    topk_oracle,
)
from torch import Tensor

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = (Compression(ratio=4, overlap=True, indexer=True), Compression(ratio=16))
SIZES: dict[str, Any] = {
    "ratios": (0, 4, 16), "kinds": KINDS, "head_dim": 32, "rope_dim": 8, "window": 8,
    "block_tokens": 16, "row_group": 8, "index_dim": 32,
    "row_format": RowFormat.FP32, "key_format": KeyFormat.FP32,
}  # fmt: skip
EVERY_TOKEN: dict[str, Any] = {
    "ratios": (1,), "kinds": (Compression(ratio=1, indexer=True),), "block_tokens": 16,
    "head_dim": 16,
}  # fmt: skip


def spec_of(**changes: Any) -> HybridSpec:
    return HybridSpec(**SIZES | changes)


# contexts, new tokens of each request, and sizes of one cache
STEPS: dict[str, dict[str, Any]] = {
    "prefill beside decode": {},
    "decode": {"new": [1, 1, 1, 1]},
    "prompts": {"contexts": [40, 3, 17], "new": [40, 3, 17], "pad": 0},
    "a run longer than the ring": {"contexts": [60, 9], "new": [33, 1], "heads": 3},
    "nothing but padding": {"contexts": [21], "new": [0]},
    "published head": {
        "contexts": [37, 18], "new": [3, 18], "heads": 2,
        "spec": {"head_dim": 512, "rope_dim": 64, "row_group": 64, "window": 16, "index_dim": 128},
    },
    "a window of more than a piece": {
        "contexts": [640, 530], "new": [1, 20], "heads": 2,
        "spec": {"ratios": (0,), "kinds": (), "window": 600, "head_dim": 16},
    },
    "more entries than a piece": {
        "contexts": [1100, 20], "new": [2, 1], "heads": 2, "spec": EVERY_TOKEN,
    },
    "packed blocks": {"only": RowFormat.FP8, "spec": {
        "layout": "flashmla_v4", "key_format": KeyFormat.MXFP4,
    }},
}  # fmt: skip
# the interpreter takes milliseconds for every step of a loop
SMALL: dict[str, dict[str, Any]] = {
    "small": {"contexts": [23, 4], "new": [2, 1], "heads": 2, "pad": 1},
}


class Call:
    """A cache full of garbage but for what it holds, an open step, and activations for it."""

    def __init__(
        self,
        dtype: torch.dtype,
        formats: dict[str, Any],
        *,
        contexts: Sequence[int] = (75, 41, 5, 58),
        new: Sequence[int] = (20, 1, 3, 0),
        pad: int = 3,
        heads: int = 4,
        spec: Any = None,
        only: Any = None,
        seed: int = 0,
    ) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.spec = spec_of(**(spec or {}) | formats)
        self.dtype, self.heads = dtype, heads
        self.manager, self.handles = random_hybrid(
            self.spec, contexts, new, generator=self.g, pad_tokens=pad, pad_requests=min(pad, 1)
        )
        self.step = self.handles[0].step
        angle = torch.randn(max(contexts), self.spec.rope_dim // 2, generator=self.g)
        self.tables = {"cos": angle.cos(), "sin": angle.sin()}
        self.sinks = torch.randn(heads, generator=self.g)

    def rows(self, *shape: int) -> Tensor:
        """Draw ``[T, ...]`` as a slice of wider rows, NaN where a token is padding."""
        wide = torch.randn(self.step.num_tokens, *shape[:-1], shape[-1] + 8, generator=self.g)
        wide[self.step.positions < 0] = torch.nan
        return wide.to(self.dtype)[..., : shape[-1]]

    def picks(self, vis: Tensor, k: int) -> Tensor:
        """Draw up to ``k`` entries for each token."""
        scores = torch.rand(len(vis), max(int(vis.max()), 1), generator=self.g)
        return topk_oracle(scores, vis, k=k)[0]

    def arguments(self, handle: LayerCacheHandle) -> Iterator[tuple[Any, ...]]:
        """Draw arguments of an attention: all entries, picked ones, and the window alone."""
        classical = None if handle.kind is None else handle.read_classical_view()
        picked = [None] if classical is None else [None, self.picks(classical.vis, 5)]
        for chosen in picked:
            q = self.rows(self.heads, self.spec.head_dim)
            row = self.rows(self.spec.head_dim)
            yield q, row, handle.read_swa_view(), classical, chosen, self.sinks


def cases(op: str, steps: dict[str, Any], small: dict[str, Any]) -> list[Any]:
    """Every row of ``op``; other dtypes only in the first case."""
    rows = {(r.k_format, r.backend): r for r in ROWS if r.op == op}
    return [
        pytest.param(
            row, dtype, step, id=f"{row.k_format.name}-{row.backend}-{str(dtype)[6:]}-{name}"
        )
        for row in rows.values()
        for i, (name, step) in enumerate((steps if row.backend == "torch" else small).items())
        for dtype in (FLOATS if i == 0 else FLOATS[:1])
        if step.get("only") in (None, row.k_format)
    ]


def skip_rejected(row: Row, dtype: torch.dtype, dim: int, **facts: Any) -> None:
    query = call_query(row.op, row.k_format, row.v_format, CPU, dtype, dim, True, **facts)
    reasons = [r.rejects(query) for r in ROWS if (r.op, r.k_format, r.v_format, r.backend) == (
        row.op, row.k_format, row.v_format, row.backend)]  # fmt: skip
    if None not in reasons:
        pytest.skip(f"{row.backend} {reasons[0]}")


@pytest.mark.parametrize(("row", "dtype", "step"), cases("hybrid_attention", STEPS, SMALL))
def test_attention_is_within_the_budget_of_fp64(row: Row, dtype: torch.dtype, step: Any) -> None:
    """Window, all entries and picked ones, turned back, with sinks; padding gives 0."""
    call = Call(dtype, {"row_format": row.k_format}, **step)
    skip_rejected(row, dtype, call.spec.head_dim, group=call.heads, lse=True)
    padding = call.step.positions < 0
    found, plain, exact = [], [], []
    for args in (args for _ in range(3) for h in call.handles for args in call.arguments(h)):
        found.append(hybrid_attention(*args, **call.tables, return_lse=True, backend=row.backend))
        exact.append(hybrid_attention_oracle(*args, **call.tables))
        out, lse = hybrid_attention_oracle(*args, **call.tables, dtype=torch.float32)
        plain.append((out.to(dtype), lse))
        assert not found[-1][0][padding].any()
    for i in range(2):
        # the largest of some draws: one may happen to be good
        budget = max(error_budget(p[i], e[i]) for p, e in zip(plain, exact, strict=True))
        error = max(largest_error(f[i], e[i]) for f, e in zip(found, exact, strict=True))
        assert error <= budget, f"output {i} errs by {error:.3e}, more than {budget:.3e}"


def test_what_a_token_does_not_see_changes_nothing() -> None:
    """Picks past what is visible, an INT64 dtype, no sinks, and a query that sees nothing."""
    call = Call(torch.float32, {})
    handle = call.handles[1]
    q, row, swa, classical, picked, _ = list(call.arguments(handle))[1]
    assert classical is not None
    extra = torch.cat([picked, classical.vis[:, None] + 1, torch.full_like(picked, -1)], 1)
    found = hybrid_attention(q, row, swa, classical, extra.long(), None)
    exact, _ = hybrid_attention_oracle(q, row, swa, classical, picked, None)
    rounded, _ = hybrid_attention_oracle(q, row, swa, classical, picked, None, dtype=torch.float32)
    assert largest_error(found, exact) <= error_budget(rounded, exact)
    alone = [x.clone() for x in (swa.request_ids, swa.positions)]
    swa.positions.fill_(-1)
    swa.request_ids.fill_(-1)
    out, lse = hybrid_attention(
        q.nan_to_num(), row, swa, classical, picked, call.sinks, return_lse=True
    )
    assert not out.any() and (lse == -torch.inf).all()
    swa.request_ids.copy_(alone[0])
    swa.positions.copy_(alone[1])


def test_a_position_past_the_table_gives_nan_there_and_nowhere_else() -> None:
    call = Call(torch.float32, {})
    args = next(call.arguments(call.handles[2]))
    short = {name: table[:60] for name, table in call.tables.items()}
    out, full = (hybrid_attention(*args, **tables) for tables in (short, call.tables))
    past = call.step.positions >= 60
    assert past.any() and out[past][..., -8:].isnan().all()
    torch.testing.assert_close(out[past][..., :-8], full[past][..., :-8], rtol=0, atol=0)
    torch.testing.assert_close(out[~past], full[~past], rtol=0, atol=0)


INDEXED: dict[str, dict[str, Any]] = {
    "prefill beside decode": {},
    "fewer than k": {"contexts": [14, 3], "new": [14, 1]},
    "nothing but padding": {"contexts": [21], "new": [0]},
    "published key": {"contexts": [130, 18], "new": [3, 1], "spec": {"index_dim": 128}},
    "more keys than a piece": {"contexts": [1100, 20], "new": [2, 1], "spec": EVERY_TOKEN},
    "packed blocks": {"only": KeyFormat.MXFP4, "spec": {
        "layout": "flashmla_v4", "row_format": RowFormat.FP8,
    }},
}  # fmt: skip


@pytest.mark.parametrize(("row", "dtype", "step"), cases("indexer_topk", INDEXED, SMALL))
@pytest.mark.parametrize("quantize_query", [False, True], ids=["", "rounded"])
def test_picks_are_the_highest_scores_of_fp64(
    row: Row, dtype: torch.dtype, step: Any, quantize_query: bool
) -> None:
    call = Call(dtype, {"key_format": row.k_format}, **step)
    skip_rejected(row, dtype, call.spec.index_dim, group=8)
    handle = next(h for h in call.handles if h.kind is not None and h.kind.indexer)
    view = handle.read_indexer_view()
    iq, iweights = call.rows(8, call.spec.index_dim), call.rows(8)
    options: dict[str, Any] = {"quantize_query": quantize_query}
    picked, counts = indexer_topk(view, iq, iweights, k=6, backend=row.backend, **options)
    assert picked.dtype == counts.dtype == torch.int32
    exact = indexer_scores_oracle(view, iq, iweights, **options)
    plain = indexer_scores_oracle(view, iq, iweights, dtype=torch.float32, **options)
    assert_picks(picked, counts, exact, view.vis, budget=error_budget(plain, exact))


def scored(scores: Sequence[Sequence[float]], backend: str | None, k: int) -> tuple[Tensor, Tensor]:
    """Pick among keys with these scores, one request for each list."""
    spec = spec_of(**EVERY_TOKEN | {"index_dim": 8, "rope_dim": 2})
    manager = KVCacheManager(spec, slots=len(scores) + 1, blocks=200)
    fill_garbage(manager)
    ids = [i for i, row in enumerate(scores) for _ in row]
    positions = [p for row in scores for p in range(len(row))]
    handle = manager.acquire(ids, positions, pad_requests=len(scores) + 1, pad_tokens=len(ids) + 1)
    T = handle[0].step.num_tokens
    keys = torch.zeros(T, 8)
    keys[: len(ids), 0] = torch.tensor([abs(score) for row in scores for score in row])
    signs = [1.0 if score >= 0 else -1.0 for row in scores for score in row]
    handle[0].flush_compression(torch.zeros(T, 16), keys)
    query = torch.zeros(T, 1, 8)
    query[:, 0, 0] = 1
    assert len(set(signs)) == 1  # the weight is the query's, not the key's
    weights = torch.full((T, 1), signs[0])
    picked, counts = indexer_topk(
        handle[0].read_indexer_view(), query, weights, k=k, backend=backend
    )
    last = torch.tensor([sum(map(len, scores[: i + 1])) - 1 for i in range(len(scores))])
    return picked[last], counts[last]


BACKENDS = sorted({row.backend for row in ROWS if row.op == "indexer_topk"})


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of the hybrid operations that this machine can run."""
    row = next(r for r in ROWS if r.op == "indexer_topk" and r.backend == request.param)
    skip_rejected(row, torch.float32, 8, group=1)
    return str(request.param)


def test_d13_of_equal_scores_the_lower_index_is_picked(backend: str) -> None:
    for _ in range(3):
        picked, counts = scored([[2, 1, 1, 1, 1], [0, 0, 0, 0], [1, 2, 1, 2, 1, 2]], backend, 3)
        assert picked.tolist() == [[0, 1, 2], [0, 1, 2], [1, 3, 5]] and counts.tolist() == [3, 3, 3]
    picked, _ = scored([[-3, -1, -1, -2, -1]], backend, 2)
    assert picked.tolist() == [[1, 2]]


def test_d13_ties_over_many_blocks_do_not_depend_on_the_batch(backend: str) -> None:
    """A border tie far apart: keys of score 1 but for three."""
    n = 1100 if backend == "torch" else 70  # every token scores, and the interpreter is slow
    long = [1.0] * n
    long[n // 2], long[n - 5], long[3] = 2.0, 1.5, 0.5
    wanted = [0, 1, 2, 4, n // 2, n - 5]
    alone, _ = scored([long], backend, 6)
    among, _ = scored([[1.0] * 17, long, [5.0]], backend, 6)
    assert alone[0].tolist() == among[1].tolist() == wanted
    assert among[0].tolist() == [0, 1, 2, 3, 4, 5] and among[2].tolist() == [0] + [-1] * 5


def test_d11_fewer_candidates_than_k_keep_the_width(backend: str) -> None:
    """In ascending order (the case's own is by score), then -1; and with no candidate at all."""
    picked, counts = scored([[0.5, 0.9, 0.1]], backend, 8)
    assert picked.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]] and counts.tolist() == [3]
    call = Call(torch.float32, {}, contexts=[3], new=[2], pad=1)
    view = call.handles[1].read_indexer_view()
    picked, counts = indexer_topk(view, call.rows(2, 32), call.rows(2), k=8, backend=backend)
    assert picked.shape == (3, 8) and (picked == -1).all() and not counts.any()


def contents(manager: KVCacheManager) -> list[Tensor]:
    """Return every byte of a cache."""
    stores = [*manager.states, *(pool for pool in manager.pools if pool is not None)]
    return [
        tensor.contiguous().view(-1).view(torch.uint8)
        for store in stores
        for tensor in store.tensors().values()
    ]


PAIRS = {
    f"{format_pair(row, key)}-{layout}": (row, key, layout)
    for row in RowFormat
    for key in KeyFormat
    for layout in ("separate", "flashmla_v4")
    if layout == "separate" or (row, key) == (RowFormat.FP8, KeyFormat.MXFP4)
}


@pytest.mark.parametrize(("row", "key", "layout"), PAIRS.values(), ids=PAIRS)
def test_storage_is_bit_for_bit_that_of_kv_core(row: Any, key: Any, layout: str) -> None:
    """Ring, tail, entries and keys, from activations of any dtype; and entries within FP32."""
    spec = spec_of(row_format=row, key_format=key, layout=layout)
    angle = torch.randn(80, 4, generator=torch.Generator().manual_seed(9))
    for name in sorted({r.backend for r in ROWS if r.op == "append_swa"}):
        swa = next(r for r in ROWS if r.op == "append_swa" and r.backend == name)
        skip_rejected(swa, torch.float32, spec.head_dim)
        managers = [
            random_hybrid(
                spec, [40, 21, 6], [0, 0, 0], generator=torch.Generator().manual_seed(1), ops=ops,
                pad_tokens=1, pad_requests=1, max_len=80, spare_blocks=8,
            )
            for ops in (None, HybridKernels(name))
        ]  # fmt: skip
        for manager, handles in managers:
            manager.abort(handles)
        for dtype in FLOATS:
            made: list[list[Tensor]] = []
            for manager, _ in managers:
                g = torch.Generator().manual_seed(2)
                positions = [manager.length(0) + i for i in range(9)] + [manager.length(2)]
                handles = manager.acquire([0] * 9 + [2], positions, pad_tokens=12)
                made.append([layer_pass(handle, g, dtype, angle) for handle in handles[1:]])
                made[-1].append(layer_pass(handles[0], g, dtype, angle))
                manager.commit(handles)
            rounding = 0.0 if name == "torch" else 8 * torch.finfo(torch.float32).eps
            for ours, theirs in zip(*made, strict=True):
                largest = max([*theirs.abs().flatten().tolist(), 0.0])
                torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding * largest)
            assert all(map(torch.equal, *(contents(manager) for manager, _ in managers)))


def layer_pass(
    handle: LayerCacheHandle, g: torch.Generator, dtype: torch.dtype, angle: Tensor
) -> Tensor:
    """Run the cache half of a layer on random activations; return the entries it made."""
    spec, kind, T = handle.spec, handle.kind, handle.step.num_tokens

    def draw(width: int) -> Tensor:
        return torch.randn(T, width, generator=g).to(dtype)

    made: dict[str, Tensor] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    if kind is not None:
        widths = {"main": spec.head_dim} | ({"index": spec.index_dim} if kind.indexer else {})
        for which, width in widths.items():
            pairs[which] = draw(kind.halves * width), draw(kind.halves * width)
            weight = torch.linspace(0.5, 1.5, width)
            made[which] = handle.compress(
                which,
                *pairs[which],
                weight,
                1e-6,
                angle.cos(),
                angle.sin(),  # type: ignore[arg-type]
            )
        # not those that were made: sums of another order may round to other codes
        keys = draw(spec.index_dim).float() if kind.indexer else None
        handle.flush_compression(draw(spec.head_dim), keys)
    handle.write_swa(draw(spec.head_dim))
    for which, pair in pairs.items():
        handle.append_tail(which, *pair)  # type: ignore[arg-type]
    return made.get("main", torch.zeros(0))


CHUNKS = [[41], [1] * 41, [5, 17, 1, 1, 17]]
STORED: dict[str, dict[str, Any]] = {
    "FP32": {},
    "FP8": {"row_format": RowFormat.FP8, "key_format": KeyFormat.MXFP4},
    "packed": {"row_format": RowFormat.FP8, "key_format": KeyFormat.MXFP4, "layout": "flashmla_v4"},
}


@pytest.mark.parametrize("formats", STORED.values(), ids=STORED)
def test_c12_any_chunking_gives_the_same_answer(formats: dict[str, Any]) -> None:
    """Outputs within what FP32 sums may differ, far below what a code is worth; picks equal."""
    spec = spec_of(**formats)
    g = torch.Generator().manual_seed(3)
    inputs = [
        {
            "q": torch.randn(41, 3, 32, generator=g), "kv": torch.randn(41, 32, generator=g),
            "iq": torch.randn(41, 8, 32, generator=g), "iw": torch.randn(41, 8, generator=g),
            "main": torch.randn(2, 41, 64, generator=g),
            "index": torch.randn(2, 41, 64, generator=g),
        }
        for _ in range(spec.layers)
    ]  # fmt: skip
    angle = torch.randn(41, 4, generator=g)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    runs = []
    for chunks in CHUNKS:
        manager = KVCacheManager(spec, slots=3, blocks=8, ops=hybrid_ops)
        fill_garbage(manager)
        outs: list[list[Tensor]] = [[] for _ in inputs]
        picks: list[Tensor] = []
        done = 0
        for n in chunks:
            span = slice(done, done + n)
            handles = manager.acquire([7] * n, range(done, done + n))
            for handle, x in zip(handles, inputs, strict=True):
                cut = {
                    name: rows[:, span] if name in ("main", "index") else rows[span]
                    for name, rows in x.items()
                }
                out, picked = attend(handle, cut, tables)
                outs[handle.layer].append(out)
                if picked is not None:
                    picks.append(picked)
            manager.commit(handles)
            done += n
        runs.append((torch.stack([torch.cat(layer) for layer in outs]), torch.cat(picks)))
    for out, picked in runs[1:]:
        assert torch.equal(picked, runs[0][1])
        rounding = 8 * torch.finfo(torch.float32).eps * float(runs[0][0].abs().max())
        assert float((out - runs[0][0]).abs().max()) <= rounding


def attend(
    handle: LayerCacheHandle, x: dict[str, Tensor], tables: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Run one layer in the documented order."""
    kind, classical, picked = handle.kind, None, None
    cut = {}
    if kind is not None:
        made = {}
        for which, width in (("main", 32), ("index", 32)):
            if which == "main" or kind.indexer:
                cut[which] = x[which][..., : kind.halves * width].unbind(0)
                made[which] = handle.compress(
                    which,
                    *cut[which],
                    torch.ones(width),
                    1e-6,
                    *tables.values(),  # type: ignore[arg-type]
                )
        handle.flush_compression(made["main"], made.get("index"))
        classical = handle.read_classical_view()
        if kind.indexer:
            picked, _ = indexer_topk(handle.read_indexer_view(), x["iq"], x["iw"], k=3)
    swa = handle.read_swa_view()
    out = hybrid_attention(x["q"], x["kv"], swa, classical, picked, torch.ones(3), **tables)
    handle.write_swa(x["kv"])
    for which, pair in cut.items():
        handle.append_tail(which, *pair)  # type: ignore[arg-type]
    return out, picked


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def recall(key_format: KeyFormat, turn: Tensor, scale: float = 1.0) -> float:
    """Return which part of the picks over exact keys is also picked over stored ones."""
    entries, k, width, heads = 512, 128, 128, 16
    g = torch.Generator().manual_seed(5)
    keys, query = (torch.randn(n, width, generator=g) for n in (entries, heads))
    keys[:, 17] += 8  # one channel far out, as in trained models
    weights = torch.randn(1, heads, generator=g)
    ids: list[Hashable] = ["x"] * entries
    found = []
    for fmt in (KeyFormat.FP32, key_format):
        spec = spec_of(
            **EVERY_TOKEN | {"index_dim": width, "key_format": fmt, "key_global_scale": scale}
        )
        manager = KVCacheManager(spec, slots=1, blocks=entries // 16 + 1, ops=hybrid_ops)
        (handle,) = manager.acquire(ids[:-1], range(entries - 1))
        handle.flush_compression(torch.zeros(entries - 1, 16), keys[:-1] @ turn)
        manager.commit(handle)
        (handle,) = manager.acquire(ids[:1], [entries - 1])
        handle.flush_compression(torch.zeros(1, 16), keys[-1:] @ turn)
        view = handle.read_indexer_view()
        picked, _ = indexer_topk(
            view, (query @ turn)[None], weights, k=k, quantize_query=fmt is not KeyFormat.FP32
        )
        found.append(set(picked[0].tolist()))
    return len(found[0] & found[1]) / k


@pytest.mark.parametrize("key_format", [KeyFormat.MXFP4, KeyFormat.NVFP4], ids=["mx", "nv"])
def test_fp4_keys_are_judged_by_recall_and_a_hadamard_turn_helps(key_format: KeyFormat) -> None:
    """Chance alone would give a recall of one in four."""
    plain, turned = (recall(key_format, turn) for turn in (torch.eye(128), hadamard(128)))
    assert 0.25 < plain < turned
    assert recall(KeyFormat.BF16, torch.eye(128)) >= turned
