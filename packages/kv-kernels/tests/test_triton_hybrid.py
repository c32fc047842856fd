"""The Triton rows of the hybrid operations, in the interpreter: codes bit for bit, ties, tiles."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_core import Compression, HybridSpec, KeyFormat, KVCacheManager, LayerCacheHandle, RowFormat
from kv_core.codecs.fp4 import encode_e2m1 as encode_e2m1_plain
from kv_core.codecs.scales import decode_ue8m0 as decode_ue8m0_plain
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.reference import compress as compress_plain
from kv_core.hybrid.state_pool import StateCachePool
from kv_kernels import HybridKernels, hybrid_attention, indexer_topk
from kv_kernels.library import call_query
from kv_kernels.ops.append_swa import append_swa
from kv_kernels.ops.append_tail import append_tail
from kv_kernels.ops.flush_compression import flush_compression
from kv_kernels.registry import format_pair
from kv_kernels.testing import (
    error_budget,
    fill_garbage,
    hybrid_attention_oracle,
    largest_error,
    random_hybrid,
)
from kv_kernels.triton_rules import rejects_cuda, rejects_interpreted
from torch import Tensor

triton = pytest.importorskip("triton")
tl = triton.language

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def query(op: str, dim: int = 512, **facts: Any) -> Any:
    fmt = RowFormat.FP8
    return call_query(op, fmt, fmt, torch.device("cpu"), torch.float32, dim, True, **facts)


REFUSED = rejects_interpreted(query("append_swa"))
# numpy computes both sides of a where, and says so
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
interpreted = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))

KINDS = (Compression(ratio=4, overlap=True, indexer=True), Compression(ratio=16))
SIZES: dict[str, Any] = {
    "ratios": (0, 4, 16), "kinds": KINDS, "head_dim": 32, "rope_dim": 8, "window": 8,
    "block_tokens": 16, "row_group": 8, "index_dim": 32,
    "row_format": RowFormat.FP8, "key_format": KeyFormat.MXFP4,
}  # fmt: skip
TRITON = HybridKernels("triton")


def spec_of(**changes: Any) -> HybridSpec:
    return HybridSpec(**SIZES | changes)


# --- codes


if REFUSED is None:
    from kv_kernels import device_code as code

    @triton.jit
    def _convert(source, target, n, WHICH: tl.constexpr):
        i = tl.arange(0, 1024)
        x = tl.load(source + i, mask=i < n, other=0)
        if WHICH == "encode_e4m3":
            y = code.encode_e4m3(x)
        elif WHICH == "decode_e4m3":
            y = code.decode_e4m3(x, False)
        elif WHICH == "encode_e2m1":
            y = code.encode_e2m1(x)
        elif WHICH == "decode_e2m1":
            y = code.decode_e2m1(x.to(tl.int32))
        else:
            y = code.decode_ue8m0(x)
        tl.store(target + i, y.to(target.dtype.element_ty), mask=i < n)


def convert(which: str, source: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty(source.shape, dtype=dtype)
    _convert[(1,)](source, target, source.numel(), WHICH=which)
    return target


def near(values: Tensor) -> Tensor:
    """Positive values, both neighbours of each in FP32, and all of them negated."""
    bits = values.view(torch.int32)
    some = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    return torch.cat([some, -some, torch.zeros(2) * torch.tensor([1.0, -1.0])])


@interpreted
def test_every_code_is_decoded_as_torch_does() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    decoded = convert("decode_e4m3", byte, torch.float32)
    assert_bits(decoded, byte.view(torch.float8_e4m3fn).float())
    assert_bits(convert("decode_ue8m0", byte, torch.float32), decode_ue8m0_plain(byte))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert_bits(
        convert("decode_e2m1", byte[:16], torch.float32), torch.cat([magnitudes, -magnitudes])
    )


@interpreted
def test_every_border_between_two_codes_is_rounded_as_torch_does() -> None:
    byte = torch.arange(0x7F, dtype=torch.uint8)
    codes = byte.view(torch.float8_e4m3fn).float()
    for values in (codes[1:], (codes[1:] + codes[:-1]) / 2):
        x = near(values).clamp(-448, 448)
        expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(convert("encode_e4m3", x, torch.uint8), expected)
    nan = torch.tensor([torch.nan, -torch.nan])
    assert convert("encode_e4m3", nan, torch.uint8).tolist() == [0x7F, 0x7F]
    x = near(torch.tensor([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30]))
    assert torch.equal(convert("encode_e2m1", x, torch.uint8), encode_e2m1_plain(x))


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, NaN in the same places, and the sign of zero included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    clean = ~expected.isnan()
    assert torch.equal(actual[clean].signbit(), expected[clean].signbit())


def edge_rows(D: int) -> Tensor:
    """Rows of every magnitude, borders between scales and codes, and what is not finite."""
    g = torch.Generator().manual_seed(0)
    random = torch.randn(48, D, generator=g) * torch.logspace(-44, 38, 48)[:, None]
    ties = torch.randint(-64, 65, (16, D), generator=g) / 8
    borders = torch.randn(12, D, generator=g) / 8
    for row, top in enumerate((448.0, 450.0, 6.0, 6.03125, 1e-4, 9.9e-5, 7.05e-38, 2.0**-126)):
        borders[row, ::4] = top
    borders[8:] = torch.tensor([[3.3e38], [1e-40], [0.0], [-0.0]])
    odd = torch.randn(5, D, generator=g)
    odd[0, 1], odd[1, 3], odd[2, D - 1] = torch.nan, torch.inf, -torch.inf
    odd[3] = torch.nan
    odd[4, :8] = -torch.inf
    return torch.cat([random, ties, borders, odd])


def stored_bytes(store: PagedKVPool | StateCachePool) -> list[Tensor]:
    """Every byte that a store holds; one NaN is as good as another."""
    if isinstance(store, PagedKVPool):
        fields = [*store.entries.present(), *(store.keys or ())]
    else:
        fields = [*store.ring.present(), store.positions, *store.tails.values()]
    found = [x.contiguous() for x in fields if x is not None]
    found = [torch.where(x.isnan(), torch.nan, x) if x.dtype in FLOATS else x for x in found]
    return [x.view(torch.uint8) for x in found]


FORMATS = {
    f"{format_pair(row, key)}-{layout}": {"row_format": row, "key_format": key, "layout": layout}
    for row in RowFormat
    for key in KeyFormat
    for layout in ("separate", "flashmla_v4")
    if layout == "separate" or (row, key) == (RowFormat.FP8, KeyFormat.MXFP4)
}


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_stored_entries_and_keys_are_those_of_the_codec(
    formats: dict[str, Any], dtype: torch.dtype
) -> None:
    """Groups that no power of two counts, in a packed layout too; slots outside store nothing."""
    spec = spec_of(index_dim=96, **formats, key_global_scale=0.037)
    rows, keys = edge_rows(32).to(dtype), edge_rows(96).to(dtype)
    T = len(rows)
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:T].int()
    slots[:4] = torch.tensor([-1, -7, 52 * 4, 2**31 - 1])
    pools = [PagedKVPool(spec, 1, 52) for _ in range(2)]
    flush_compression(pools[0], slots, rows, keys, backend="triton")
    flush_compression(pools[1], slots[4:], rows[4:], keys[4:], backend="torch")
    assert all(map(torch.equal, *map(stored_bytes, pools)))


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", list(RowFormat), ids=lambda fmt: fmt.name)
def test_rings_and_tails_are_those_of_the_codec(fmt: RowFormat, dtype: torch.dtype) -> None:
    """Rows, positions, values and scores; a run longer than the ring stores its end."""
    spec = spec_of(row_format=fmt)
    managers = [KVCacheManager(spec, slots=3, blocks=30) for _ in range(2)]
    for manager, backend in zip(managers, ("triton", "torch"), strict=True):
        fill_garbage(manager)
        ids, positions = [0] * 40 + [1] * 5, [*range(40), *range(5)]
        step = manager.acquire(ids, positions, pad_tokens=81, pad_requests=3)[0].step
        rows = edge_rows(64).to(dtype)
        for state in manager.states:
            append_swa(state, step, rows[:, :32], backend=backend)
            for which, tail in state.tails.items():
                pair = rows[:, : tail.shape[-1]], -rows[:, : tail.shape[-1]]
                append_tail(state, which, step, *pair, backend=backend)
    for states in zip(*(manager.states for manager in managers), strict=True):
        assert all(map(torch.equal, *map(stored_bytes, states)))


# --- entries


def entries_oracle(
    value: Tensor, score: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, kind: Compression
) -> Tensor:
    """Return the entries of one sequence from all of its tokens, in FP64."""
    value, score, weight = value.double(), score.double(), weight.double()
    D, r = len(weight), kind.ratio
    found = []
    for w in range(len(value) // r):
        parts = [(value[w * r : w * r + r, -D:], score[w * r : w * r + r, -D:])]
        if kind.overlap and w:
            before = slice(w * r - r, w * r)
            parts.insert(0, (value[before, :D], score[before, :D]))
        v, z = (torch.cat(part) for part in zip(*parts, strict=True))
        entry = (v * z.softmax(0)).sum(0)
        entry = entry / (entry.square().mean() + 1e-6).sqrt() * weight
        angle = torch.complex(cos[w * r].double(), sin[w * r].double())
        R = 2 * len(angle)
        turned = torch.view_as_complex(entry[D - R :].reshape(-1, 2)) * angle
        found.append(torch.cat([entry[: D - R], torch.view_as_real(turned).flatten()]))
    return torch.stack(found)


def step_of(handle: LayerCacheHandle) -> dict[str, Any]:
    step, kind = handle.step, handle.kind
    assert kind is not None
    return {
        "closing": step.kinds[kind.ratio].closing, "request_ids": step.request_ids,
        "positions": step.positions, "request_slots": step.request_slots,
        "seq_start": step.seq_start, "ratio": kind.ratio, "overlap": kind.overlap,
    }  # fmt: skip


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layer", [1, 2], ids=["overlap", "plain"])
@pytest.mark.parametrize("D", [32, 24], ids=["D32", "D24"])
def test_entries_are_within_the_budget_and_the_same_in_any_step(
    D: int, layer: int, dtype: torch.dtype
) -> None:
    """Windows that lie in the step, in the tail, in both, and before the first token."""
    spec = spec_of(row_format=RowFormat.FP32, head_dim=D)
    g = torch.Generator().manual_seed(D)
    kind = spec.kind(layer)
    assert kind is not None
    value, score = (torch.randn(67, kind.halves * D, generator=g).to(dtype) for _ in range(2))
    weight, angle = 1 + 0.3 * torch.randn(D, generator=g), torch.randn(67, 4, generator=g)
    tables = angle.cos(), angle.sin()
    exact = entries_oracle(value, score, weight, *tables, kind)
    runs = []
    for chunks in ([67], [3, 30, 1, 1, 1, 27, 4], [16, 17, 34]):
        manager = KVCacheManager(spec, slots=3, blocks=12, ops=TRITON)
        fill_garbage(manager)
        found, plain, done = [], [], 0
        for n in chunks:
            handles = manager.acquire(
                ["x"] * n, range(done, done + n), pad_tokens=n + 1, pad_requests=2
            )
            handle, part = handles[layer], slice(done, done + n)
            rows = [
                torch.cat([x[part], torch.full((1, x.shape[1]), torch.nan, dtype=dtype)])
                for x in (value, score)
            ]
            made = handle.compress("main", *rows, weight, 1e-6, *tables)
            assert made.isfinite().all()
            closes = (torch.arange(done, done + n) + 1) % kind.ratio == 0
            found.append(made[:n][closes])
            tail = manager.states[layer].tail("main")
            same = compress_plain(tail, *rows, weight, 1e-6, *tables, **step_of(handle))
            plain.append(same[:n][closes])
            handle.append_tail("main", *rows)
            manager.commit(handles)
            done += n
        runs.append(torch.cat(found))
        budget = error_budget(torch.cat(plain), exact)
        error = largest_error(runs[-1], exact)
        assert error <= budget, f"errs by {error:.3e}, more than {budget:.3e}"
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@interpreted
def test_an_entry_past_the_tables_is_nan_where_it_would_be_turned() -> None:
    spec = spec_of(row_format=RowFormat.FP32)
    manager = KVCacheManager(spec, slots=1, blocks=12, ops=TRITON)
    handle = manager.acquire([0] * 32, range(32))[1]
    rows, tables = torch.randn(2, 32, 64), torch.ones(2, 17, 4)
    made = handle.compress("main", *rows, torch.ones(32), 1e-6, *tables)
    closed = made[3::4]
    assert closed[:5].isfinite().all()
    assert closed[5:, 24:].isnan().all() and closed[5:, :24].isfinite().all()


# --- picks


EVERY_TOKEN: dict[str, Any] = {
    "ratios": (1,), "kinds": (Compression(ratio=1, indexer=True),), "head_dim": 16, "row_group": 8,
    "rope_dim": 0, "index_dim": 32, "key_format": KeyFormat.FP32,
}  # fmt: skip


def pick(scores: Sequence[float], k: int, *, sign: float = 1.0) -> tuple[Tensor, Tensor]:
    """Let one token pick among keys with these scores, and let padding pick beside it."""
    manager = KVCacheManager(spec_of(**EVERY_TOKEN), slots=2, blocks=len(scores) // 16 + 3)
    fill_garbage(manager)
    n = len(scores)
    keys = torch.zeros(n, 32)
    keys[:, 3] = torch.tensor(scores)
    for ids, rows in ((range(n - 1), keys[:-1]), (range(n - 1, n), keys[-1:])):
        handles = manager.acquire([0] * len(rows), ids, pad_tokens=len(rows) + 1)
        T = handles[0].step.num_tokens
        handles[0].flush_compression(
            torch.zeros(T, 16), torch.cat([rows, torch.full((1, 32), torch.nan)])
        )
        if ids.stop < n:
            manager.commit(handles)
    iq, weight = torch.zeros(2, 1, 32), torch.full((2, 1), sign)
    iq[:, 0, 3] = sign
    view = handles[0].read_indexer_view()
    picked, counts = indexer_topk(view, iq, weight, k=k, backend="triton")
    expected = indexer_topk(view, iq, weight, k=k, backend="torch")
    assert torch.equal(picked, expected[0]) and torch.equal(counts, expected[1])
    assert (picked[1] == -1).all() and counts[1] == 0
    return picked[0], counts[0]


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct": lambda x: x.exp(),
    "few values": lambda x: (x * 2).round().clamp(min=0),
    "one value": torch.ones_like,
    "all zero": lambda x: -x.abs(),
    "tiny": lambda x: x.abs() * 1e-42,
    "infinite": lambda x: torch.where(x > 1.5, torch.inf, x.abs()),
    "NaN": lambda x: torch.where(x > 1.5, torch.nan, x.abs()),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("tiles", ["held", "read again"])
@pytest.mark.parametrize("make", SCORES.values(), ids=SCORES)
def test_picks_are_those_of_a_stable_sort(
    make: Callable[[Tensor], Tensor], tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More keys than a program scores or lists at a time, and a border tie in another tile."""
    from kv_kernels.ops.indexer_topk import triton as module

    monkeypatch.setattr(module, "_PART", 128)
    monkeypatch.setattr(module, "_LISTED", 64)
    monkeypatch.setattr(module, "_HELD", 1 << 15 if tiles == "held" else 64)
    x = torch.randn(300, generator=torch.Generator().manual_seed(4))
    scores = make(x).tolist()
    for k in (1, 77, 299, 300, 301):
        _, count = pick(scores, k)
        assert count == min(k, 300)
    if not any(score != score for score in scores):
        pick([-abs(score) for score in scores], 50, sign=-1.0)


@interpreted
def test_tokens_are_scored_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt over a wide table: the scores of all of its tokens would not fit."""
    from kv_kernels.ops.indexer_topk import triton as module

    spec = spec_of(row_format=RowFormat.FP32)
    g = torch.Generator().manual_seed(6)
    _, handles = random_hybrid(spec, [40, 20], [20, 3], generator=g, pad_tokens=2, max_len=160)
    view = handles[1].read_indexer_view()
    iq, weights = torch.randn(25, 5, 32, generator=g), torch.randn(25, 5, generator=g)
    whole = indexer_topk(view, iq, weights, k=3, backend="triton")
    monkeypatch.setattr(module, "_SCORES", 40 * 7 + 1)
    sliced = indexer_topk(view, iq, weights, k=3, backend="triton")
    assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])


# --- attention


class Attention:
    """A cache full of garbage but for what it holds, and activations of its step."""

    def __init__(
        self,
        contexts: Sequence[int] = (40, 22, 3),
        new: Sequence[int] = (5, 1, 3),
        *,
        dtype: torch.dtype = torch.bfloat16,
        heads: int = 3,
        layer: int = 1,
        k: int | None = None,
        seed: int = 0,
        **spec: Any,
    ) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.spec, self.dtype = spec_of(**spec), dtype
        self.manager, handles = random_hybrid(
            self.spec, contexts, new, generator=self.g, pad_tokens=2, pad_requests=1
        )
        self.handle = handles[layer]
        T = self.handle.step.num_tokens
        self.q = torch.randn(T, heads, self.spec.head_dim, generator=self.g).to(dtype)
        self.row = torch.randn(T, self.spec.head_dim, generator=self.g).to(dtype)
        self.sinks = torch.randn(heads, generator=self.g)
        angle = torch.randn(max(contexts), self.spec.rope_dim // 2, generator=self.g)
        self.tables = {"cos": angle.cos(), "sin": angle.sin()} if self.spec.rope_dim else {}
        self.classical = None if self.handle.kind is None else self.handle.read_classical_view()
        self.picked = None
        if k is not None:
            assert self.classical is not None
            most = max(int(self.classical.vis.max()), k)
            self.picked = torch.rand(T, most, generator=self.g).argsort(1)[:, :k].int()
            self.picked[::2, ::3] = -1

    def arguments(self) -> tuple[Any, ...]:
        swa = self.handle.read_swa_view()
        return self.q, self.row, swa, self.classical, self.picked, self.sinks

    def check(self) -> Tensor:
        """Compare with FP64, within twice what the torch row errs at its worst in some draws."""
        out, lse = hybrid_attention(
            *self.arguments(), **self.tables, return_lse=True, backend="triton"
        )
        exact = hybrid_attention_oracle(*self.arguments(), **self.tables)
        first, plain = self.q, []
        for shift in range(3):
            self.q = first.roll(shift, 2)
            got = hybrid_attention(
                *self.arguments(), **self.tables, return_lse=True, backend="torch"
            )
            plain.append((got, hybrid_attention_oracle(*self.arguments(), **self.tables)))
        self.q = first
        for i, got in enumerate((out, lse)):
            budget = max(error_budget(p[i], e[i]) for p, e in plain)
            error = largest_error(got, exact[i])
            assert error <= budget, f"output {i} errs by {error:.3e}, more than {budget:.3e}"
        padding = self.handle.step.positions < 0
        assert not out[padding].any() and (lse[padding] == -torch.inf).all()
        return out


CASES: dict[str, dict[str, Any]] = {
    "all entries": {},
    "picked entries": {"k": 5},
    "one pick": {"k": 1, "heads": 1},
    "the window alone": {"layer": 0, "dtype": torch.float32},
    "windows of many tiles": {
        "layer": 0, "window": 70, "ring": 75, "contexts": [150, 71], "new": [2, 1],
    },
    "a run longer than the ring": {"contexts": [30], "new": [20], "row_format": RowFormat.BF16},
    "more heads than a tile": {"heads": 70, "contexts": [20], "new": [1], "k": 3},
    "no rotary channels": {"rope_dim": 0, "k": 4},
    "a head of the published size": {
        "head_dim": 512, "rope_dim": 64, "row_group": 64, "index_dim": 128, "k": 6,
        "contexts": [37], "new": [2],
    },
    "FP32 of the published size": {
        "head_dim": 512, "rope_dim": 64, "row_group": 64, "index_dim": 128, "k": 6,
        "contexts": [37], "new": [2], "row_format": RowFormat.FP32, "dtype": torch.float32,
    },
    "groups and rows that no power of two counts": {
        "head_dim": 46, "rope_dim": 10, "row_group": 12, "dtype": torch.float16, "k": 5,
        "index_dim": 32,
    },
    "more rotary channels than a group has": {
        "head_dim": 48, "rope_dim": 16, "row_group": 8, "index_dim": 32, "k": 5,
    },
    "one group of many channels": {
        "head_dim": 192, "rope_dim": 32, "row_group": 160, "index_dim": 32, "k": 5,
    },
    "packed": {"layout": "flashmla_v4", "k": 5},
    "FP16 over FP32": {"row_format": RowFormat.FP32, "dtype": torch.float16, "k": 5},
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_within_the_budget_of_fp64(case: dict[str, Any]) -> None:
    """Over NaN, with sinks and the output turned back; padding gives 0."""
    Attention(**case).check()


@interpreted
@pytest.mark.parametrize("score", [-400.0, 400.0], ids=["all far below 0", "all far above 0"])
def test_scores_may_be_far_from_zero(score: float) -> None:
    """More tiles than peaks are read at a time, none of whose weights would fit without a peak."""
    call = Attention(
        [560, 3], [1, 1], dtype=torch.float32, layer=0, window=544, ring=560, heads=1,
        row_format=RowFormat.FP32,
    )  # fmt: skip
    call.manager.states[0].ring.codes.normal_(1, 1 / 64, generator=call.g)
    call.row = 1 + call.row / 64
    call.q = call.q / 64 + score * call.spec.head_dim**-0.5
    call.check()


@interpreted
def test_tokens_are_attended_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt: the scores of all of its tokens would not fit. Any slice gives the same bits,
    and so does any number of channels that a program sums."""
    from kv_kernels.ops.hybrid_attention import triton as module

    call = Attention(k=5, head_dim=48, rope_dim=16, row_group=8)
    whole = hybrid_attention(*call.arguments(), **call.tables, return_lse=True, backend="triton")
    for slots, scratch in [(1, 1), (2, 10**5), (4, 3 * 10**4)]:
        monkeypatch.setattr(module, "choose_slots", lambda *_, slots=slots: slots)
        monkeypatch.setattr(module, "_SCRATCH", scratch)
        some = hybrid_attention(*call.arguments(), **call.tables, return_lse=True, backend="triton")
        assert all(map(torch.equal, some, whole))


@interpreted
def test_picks_of_64_bits_are_not_cut() -> None:
    call = Attention(k=5, dtype=torch.float32)
    assert call.picked is not None
    wide = call.picked.long()
    wide[0, 1], wide[1, 2] = 2**32 + 1, -(2**32)
    call.picked = wide
    outs = [hybrid_attention(*call.arguments(), backend=name) for name in ("triton", "torch")]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@interpreted
def test_a_nan_stays_with_the_tokens_that_see_it() -> None:
    """One in this step's rows, one in the ring, one in an entry, one in a scale."""
    call = Attention([40, 30, 9], [6, 1, 3], dtype=torch.float32)
    call.row[4, 5] = torch.nan  # request 0 at position 38
    state, slot = call.manager.states[1], int(call.handle.step.request_slots[1])
    assert call.classical is not None and state.ring.scale is not None
    assert call.classical.rows.scale is not None
    state.ring.scale[slot, 25 % 8, 1] = 255  # request 1, position 25
    block = int(call.handle.step.block_table[2, 0])
    call.classical.rows.scale[block, 1, 0] = 255  # request 2, entry 1
    outs = [hybrid_attention(*call.arguments(), backend=name) for name in ("triton", "torch")]
    assert torch.equal(outs[0].isnan(), outs[1].isnan())
    tokens = outs[0].isnan().flatten(1).any(1)
    assert tokens.tolist() == [False] * 4 + [True] * 3 + [False, True, True] + [False] * 2


@interpreted
def test_table_ids_outside_the_pool_are_not_followed() -> None:
    call = Attention(dtype=torch.float32)
    table = call.handle.step.block_table
    table[0, 1], table[1, 0] = 2**31 - 1, -5
    outs = [
        hybrid_attention(*call.arguments(), return_lse=True, backend=name)
        for name in ("triton", "torch")
    ]
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


CHUNKS = [[41], [1] * 5 + [12] + [1] * 24, [5, 17, 2, 17]]


CHUNKED: dict[str, dict[str, Any]] = {
    "FP8-MXFP4": {},
    "BF16-NVFP4": {"row_format": RowFormat.BF16, "key_format": KeyFormat.NVFP4},
}


@interpreted
@pytest.mark.parametrize("formats", CHUNKED.values(), ids=CHUNKED)
def test_any_chunking_gives_the_same_bits(formats: dict[str, Any]) -> None:
    """C12: bytes of the cache, picks and outputs, with other requests in the step and without."""
    spec = spec_of(**formats)
    g = torch.Generator().manual_seed(3)
    T = 41
    inputs = [
        {
            name: torch.randn(T, *shape, generator=g).to(torch.bfloat16)
            for name, shape in {
                "q": (3, 32), "kv": (32,), "iq": (8, 32), "iw": (8,), "value": (64,),
                "score": (64,), "ivalue": (64,), "iscore": (64,),
            }.items()
        }
        for _ in range(spec.layers)
    ]  # fmt: skip
    angle = torch.randn(T, 4, generator=g)
    tables = angle.cos(), angle.sin()
    runs = []
    for chunks in CHUNKS:
        manager = KVCacheManager(spec, slots=3, blocks=8, ops=TRITON)
        outs: list[list[Tensor]] = [[] for _ in inputs]
        done = 0
        for n in chunks:
            handles = manager.acquire([7] * n, range(done, done + n), pad_tokens=n + n % 2)
            part = [done + i if i < n else 0 for i in range(n + n % 2)]
            for handle, x in zip(handles, inputs, strict=True):
                cut = {name: rows[part] for name, rows in x.items()}
                outs[handle.layer].append(run_layer(handle, cut, tables)[:n])
            manager.commit(handles)
            done += n
        slot = [int(state.positions.max(1).values.argmax()) for state in manager.states]
        parts = [torch.cat(layer) for layer in outs]
        for layer, (state, pool) in enumerate(zip(manager.states, manager.pools, strict=True)):
            parts += [x[slot[layer]].view(torch.uint8) for x in state.tensors().values()]
            for x in () if pool is None else pool.tensors().values():
                parts.append(x[list(manager.blocks(7))].view(torch.uint8))
        runs.append(parts)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def run_layer(
    handle: LayerCacheHandle, x: dict[str, Tensor], tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Run one layer in the documented order on Triton rows."""
    kind, classical, picked = handle.kind, None, None
    if kind is not None:
        pairs = {"main": (x["value"], x["score"]), "index": (x["ivalue"], x["iscore"])}
        pairs = {
            which: (value[:, : kind.halves * 32], score[:, : kind.halves * 32])
            for which, (value, score) in pairs.items()
            if which == "main" or kind.indexer
        }
        made = {
            which: handle.compress(which, *pair, torch.ones(32), 1e-6, *tables)  # type: ignore[arg-type]
            for which, pair in pairs.items()
        }
        handle.flush_compression(made["main"], made.get("index"))
        classical = handle.read_classical_view()
        if kind.indexer:
            view = handle.read_indexer_view()
            picked, _ = indexer_topk(view, x["iq"], x["iw"], k=3, backend="triton")
    out = hybrid_attention(
        x["q"], x["kv"], handle.read_swa_view(), classical, picked, torch.ones(3),
        cos=tables[0], sin=tables[1], backend="triton",
    )  # fmt: skip
    handle.write_swa(x["kv"])
    if kind is not None:
        for which, pair in pairs.items():
            handle.append_tail(which, *pair)  # type: ignore[arg-type]
    return out


# --- what a row takes, and what it says otherwise


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_rules_name_the_limit_and_the_value(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_kernels import triton_rules

    monkeypatch.setattr(triton_rules, "_interprets", lambda: device == "cpu")
    rule = rejects_cuda if device == "cuda" else rejects_interpreted
    capability = (9, 0) if device == "cuda" else None

    def reason(op: str, dim: int = 512, **facts: Any) -> str | None:
        return rule(replace(query(op, dim, **facts), device=device, capability=capability))

    for op in ("append_swa", "compress", "flush_compression", "hybrid_attention"):
        assert reason(op) is None
        assert str(reason(op, 514)).endswith("takes D up to 512, got 514")
    assert reason("append_tail", 1024) is None
    assert str(reason("append_tail", 1026)).endswith("takes values up to 1024 wide, got 1026")
    assert reason("indexer_topk", 256, group=128) is None
    assert str(reason("indexer_topk", 257)).endswith("takes I up to 256, got 257")
    assert "takes up to 128 indexer heads, got 129" in str(reason("indexer_topk", 64, group=129))
    for op in ("compress", "hybrid_attention"):
        assert "takes an even D" in str(reason(op, 63))
