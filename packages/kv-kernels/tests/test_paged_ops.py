"""The paged operations on every row of the table, against FP64 and bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import (
    append,
    gather,
    paged_decode_attention,
    paged_write,
    split_qkv_norm_rope,
)
from kv_kernels.library import call_query
from kv_kernels.registry import ROWS, Row, format_pair
from kv_kernels.testing import (
    assert_within_budget,
    error_budget,
    largest_error,
    make_layer,
    paged_attention_oracle,
    random_paged,
    split_qkv_norm_rope_oracle,
    storage_bytes,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# heads (Hq, H), contexts, new tokens and more of one call
ATTENTION: dict[str, dict[str, Any]] = {
    "decode with an empty row": {},
    "decode over blocks of one token": {"N": 1, "D": 24, "heads": (3, 3)},
    "chunks": {"N": 3, "new": [3, 0, 7, 10], "pad": 0, "heads": (7, 1)},
    "prefill beside decode": {"new": [5, 0, 1, 16], "D": 80, "heads": (14, 2)},
    "one block a sequence": {"capacity": 40, "new": [2, 0, 9, 1], "D": 16},
    "a window": {"new": [5, 0, 20, 1], "options": {"window_left": 4}},
    "the own token alone": {"new": [5, 0, 30, 1], "options": {"window_left": 0}},
    "a soft cap": {"new": [2, 0, 5, 1], "options": {"softcap": 3.0, "scale": 0.7}},
    "heads outside": {"storage": "HND", "new": [2, 0, 5, 1], "ids": torch.int64},
    "halves of one row": {"storage": "packed", "N": 3, "D": 80},
    "a part of a buffer": {"storage": "padded", "new": [2, 0, 5, 1], "options": {"num_splits": 3}},
}
# the interpreter takes milliseconds for every step of a loop
SMALL: dict[str, dict[str, Any]] = {
    "small": {
        "contexts": [5, 0, 18],
        "new": [2, 0, 1],
        "storage": "padded",
        "D": 24,
        "options": {"window_left": 9, "softcap": 5.0, "num_splits": 2},
    },
}


class Call:
    """A layer full of garbage, a step over a shuffled table, and activations for it."""

    def __init__(
        self,
        row: Row,
        dtype: torch.dtype,
        *,
        heads: tuple[int, int] = (6, 2),
        D: int = 64,
        N: int = 16,
        contexts: Any = (5, 0, 33, 16),
        new: Any = (1, 0, 1, 1),
        pad: int = 2,
        capacity: int | None = None,
        storage: str = "NHD",
        ids: torch.dtype = torch.int32,
        options: Any = None,
        seed: int = 0,
    ) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.dtype, self.heads, self.D, self.storage = dtype, heads, D, storage
        self.spec = KVSpec(
            kv_heads=heads[1],
            head_dim=D,
            block_size=N,
            k_format=row.k_format,
            v_format=row.v_format,
        )
        self.layer, self.step = random_paged(
            self.spec, contexts, new, generator=self.g, storage=storage, capacity=capacity,
            pad_tokens=pad, dtype=ids,
        )  # fmt: skip
        self.options = options or {}

    def rows(self, heads: int) -> torch.Tensor:
        """Draw ``[T, heads, D]`` in the layout of a projection: a slice of wider rows."""
        T = self.step.num_tokens
        wide = torch.randn(T, (heads + 1) * self.D, generator=self.g).to(self.dtype)
        return wide[:, : heads * self.D].unflatten(1, (heads, self.D))

    def plain(self, q: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What a row may err twice as much as: ``torch``, which is held to a plain formula."""
        if backend != "torch":
            return paged_decode_attention(
                self.layer, self.step, q, return_lse=True, backend="torch", **self.options
            )
        out, lse = self.oracle(q, torch.float32)
        return out.to(q.dtype), lse

    def oracle(
        self, q: torch.Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {name: x for name, x in self.options.items() if name != "num_splits"}
        return paged_attention_oracle(q, self.layer, self.step, dtype=dtype, **options)

    def check(self, backend: str, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compare with FP64. The budget is the largest of some draws: one may happen to be good."""
        others = [self.rows(self.heads[0]) for _ in range(11)]
        draws = [(self.plain(x, backend), self.oracle(x)) for x in (q, *others)]
        for i, got in enumerate((out, lse)):
            budget = max(error_budget(plain[i], oracle[i]) for plain, oracle in draws)
            error = largest_error(got, draws[0][1][i])
            assert error <= budget, f"output {i} errs by {error:.3e}, more than {budget:.3e}"

    def empty_layer(self) -> KVLayer:
        """A second layer like the first, full of the same garbage."""
        capacity = None if self.layer.is_paged else self.layer.capacity
        return make_layer(self.spec, self.layer.num_blocks, storage=self.storage, capacity=capacity)


def _dtypes(row: Row) -> list[torch.dtype]:
    if row.backend == "torch":
        return list(FLOATS)
    floating = [fmt.dtype for fmt in (row.k_format, row.v_format) if not fmt.is_quantized]
    return floating[:1] or list(FLOATS)


def _cases(op: str, shapes: dict[str, Any], small: dict[str, Any]) -> list[Any]:
    """Every row of ``op``; shapes other than the first only where keys and values are alike."""
    rows = {(r.k_format, r.v_format, r.backend): r for r in ROWS if r.op == op}
    return [
        pytest.param(
            row, dtype, shape, id=f"{format_pair(*formats)}-{backend}-{str(dtype)[6:]}-{name}"
        )
        for (*formats, backend), row in rows.items()
        for dtype in _dtypes(row)
        for i, (name, shape) in enumerate((shapes if backend == "torch" else small).items())
        if i == 0 or (row.k_format is row.v_format and dtype in (torch.float32, row.k_format.dtype))
    ]


@pytest.fixture
def skip(skip_if_rejected: Callable[..., None]) -> Callable[..., None]:
    """Return a function that skips a test where no row of this kind can run the call."""

    def skip(row: Row, call: Call, **more: Any) -> None:
        alike = [
            other
            for other in ROWS
            if (other.op, other.k_format, other.v_format, other.backend)
            == (row.op, row.k_format, row.v_format, row.backend)
        ]
        query = call_query(
            row.op, row.k_format, row.v_format, torch.device("cpu"), call.dtype, call.D,
            True, **more,
        )  # fmt: skip
        if all(other.rejects(query) for other in alike):
            skip_if_rejected(alike[-1], query)

    return skip


@pytest.mark.parametrize(
    ("row", "dtype", "shape"), _cases("paged_decode_attention", ATTENTION, SMALL)
)
def test_attention_is_within_the_budget(
    row: Row, dtype: torch.dtype, shape: dict[str, Any], skip: Callable[..., None]
) -> None:
    call = Call(row, dtype, **shape)
    skip(row, call)
    q = call.rows(call.heads[0])
    before = storage_bytes(call.layer)
    out, lse = paged_decode_attention(
        call.layer, call.step, q, return_lse=True, backend=row.backend, checked=True, **call.options
    )
    assert out.dtype == dtype and out.is_contiguous() and lse.dtype == torch.float32
    call.check(row.backend, q, out, lse)
    assert all(map(torch.equal, storage_bytes(call.layer), before))


WRITES: dict[str, dict[str, Any]] = {
    "chunks": {"new": [2, 0, 20, 1]},
    "blocks of three": {"new": [2, 0, 20, 1], "N": 3, "D": 24, "storage": "HND"},
    "one block a sequence": {"new": [5, 0, 2, 1], "capacity": 33, "D": 80, "ids": torch.int64},
    "halves of one row": {"new": [5, 0, 2, 1], "storage": "packed", "N": 1, "D": 16},
    "a part of a buffer": {"new": [5, 0, 2, 1], "storage": "padded", "heads": (3, 3)},
    "nothing but padding": {"contexts": [0, 0], "new": [0, 0]},
}
SMALL_WRITE = {"small": {"contexts": [5, 20], "new": [2, 3], "storage": "padded", "D": 24, "N": 3}}


@pytest.mark.parametrize(("row", "dtype", "shape"), _cases("append", WRITES, SMALL_WRITE))
def test_append_stores_what_core_stores_and_nothing_else(
    row: Row, dtype: torch.dtype, shape: dict[str, Any], skip: Callable[..., None]
) -> None:
    """Codes, scales and every byte around them."""
    call = Call(row, dtype, **shape)
    skip(row, call)
    k, v = (call.rows(call.heads[1]) for _ in range(2))
    layer, truth = call.empty_layer(), call.empty_layer()
    append(layer, call.step, k, v, backend=row.backend, checked=True)
    live = call.step.slots >= 0
    truth.write(k[live], v[live], call.step.slots[live])
    assert all(map(torch.equal, storage_bytes(layer), storage_bytes(truth)))


ROPES: dict[str, dict[str, Any]] = {
    "half": {"rope": "half"},
    "interleaved": {"rope": "interleaved"},
    "none": {"rope": "none"},
    "a part": {"rope": "half", "R": 6},
    "a part, interleaved, no norm": {"rope": "interleaved", "R": 4, "norms": False},
    "doubled": {"rope": "half", "doubled": True},
    "weights of another dtype": {"rope": "half", "norm_dtype": torch.float32},
}


class Prepare:
    """Arguments of the first half of a write."""

    def __init__(
        self,
        call: Call,
        *,
        rope: str,
        R: int | None = None,
        norms: bool = True,
        norm_dtype: torch.dtype | None = None,
        doubled: bool = False,
    ) -> None:
        (Hq, H), D, g = call.heads, call.D, call.g
        R, T = D if R is None else R, call.step.num_tokens
        self.qkv = call.rows(Hq + 2 * H).flatten(1)
        self.q_norm, self.k_norm = (
            1 + 0.3 * torch.randn(D, generator=g).to(norm_dtype or call.dtype) if norms else None
            for _ in range(2)
        )
        self.positions = call.step.positions
        table = torch.outer(torch.arange(40.0), 10.0 ** -torch.arange(0, 4, 8 / R)[: R // 2])
        self.cos, self.sin = (
            (None, None)
            if rope == "none"
            else (f(table).to(call.dtype) for f in (torch.cos, torch.sin))
        )
        self.exact = self.cos, self.sin, self.positions
        if doubled:
            self.cos, self.sin = (
                torch.cat([t[self.positions]] * 2, -1) for t in (self.cos, self.sin)
            )
        assert T == self.qkv.shape[0]
        self.options = {"rope": rope, "eps": 1e-5, "doubled_tables": doubled}
        self.sizes = {"kv_heads": H, "head_dim": D}

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.qkv, self.q_norm, self.k_norm, self.cos, self.sin

    def oracle(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        rope, eps = self.options["rope"], self.options["eps"]
        return split_qkv_norm_rope_oracle(
            self.qkv, self.q_norm, self.k_norm, *self.exact, **self.sizes, rope=rope, eps=eps,
            dtype=dtype,
        )  # fmt: skip


SMALL_ROPES = {name: ROPES[name] for name in ("half", "interleaved", "a part", "none", "doubled")}


@pytest.mark.parametrize(
    ("row", "dtype", "rope"), _cases("split_qkv_norm_rope", ROPES, SMALL_ROPES)
)
def test_norm_and_rope_are_within_the_budget(
    row: Row, dtype: torch.dtype, rope: dict[str, Any], skip: Callable[..., None]
) -> None:
    call = Call(row, dtype, D=24, new=[2, 0, 3, 1])
    skip(row, call)
    given = Prepare(call, **rope)
    parts = split_qkv_norm_rope(
        *given.tensors, given.positions, **given.sizes, **given.options, backend=row.backend,
        checked=True,
    )  # fmt: skip
    plain = given.oracle(torch.float32)
    if row.backend != "torch":
        plain = split_qkv_norm_rope(
            *given.tensors, given.positions, **given.sizes, **given.options, backend="torch"
        )
    for part, reference, oracle in zip(parts, plain, given.oracle(torch.float64), strict=True):
        assert part.dtype == dtype and part.is_contiguous() and part.shape == oracle.shape
        assert_within_budget(part, reference.to(dtype), oracle)
    v = given.qkv.unflatten(1, (-1, 24))[:, -2:]
    assert torch.equal(parts[2], v)


FUSED = {**WRITES, "interleaved": {"new": [2, 0, 5, 1], "rope": {"rope": "interleaved", "R": 8}}}


@pytest.mark.parametrize(("row", "dtype", "shape"), _cases("paged_write", FUSED, SMALL_WRITE))
def test_a_fused_write_is_the_unfused_one_bit_for_bit(
    row: Row, dtype: torch.dtype, shape: dict[str, Any], skip: Callable[..., None]
) -> None:
    rope = shape.get("rope", {"rope": "half"})
    call = Call(row, dtype, **{name: x for name, x in shape.items() if name != "rope"})
    skip(row, call)
    given = Prepare(call, **rope)
    fused, unfused = call.empty_layer(), call.empty_layer()
    q = paged_write(
        fused, call.step, *given.tensors, **given.options, backend=row.backend, checked=True
    )
    parts = split_qkv_norm_rope(
        *given.tensors, given.positions, **given.sizes, **given.options, backend=row.backend
    )
    append(unfused, call.step, *parts[1:], backend=row.backend)
    assert torch.equal(q, parts[0])
    assert all(map(torch.equal, storage_bytes(fused), storage_bytes(unfused)))


GATHERS = {**ATTENTION}
SMALL_GATHER = {
    "small": {"contexts": [5, 0, 20], "storage": "padded", "D": 24, "N": 3, "new": [0] * 3}
}


@pytest.mark.parametrize(("row", "dtype", "shape"), _cases("gather", GATHERS, SMALL_GATHER))
@pytest.mark.parametrize("length", [None, 7])
def test_gather_returns_what_is_stored_and_zeros(
    row: Row,
    dtype: torch.dtype,
    shape: dict[str, Any],
    length: int | None,
    skip: Callable[..., None],
) -> None:
    call = Call(row, dtype, **shape)
    skip(row, call)
    both = gather(
        call.layer, call.step, length=length, dtype=dtype, backend=row.backend, checked=True
    )
    step, N = call.step, call.layer.block_size
    S = step.max_context if length is None else length
    for got, side in zip(both, (0, 1), strict=True):
        assert got.shape == (step.num_sequences, S, call.heads[1], call.D) and got.dtype == dtype
        for b, context in enumerate(step.context_lens.tolist()):
            slots = [int(step.block_table[b, t // N]) * N + t % N for t in range(min(context, S))]
            stored = call.layer.read(torch.tensor(slots, dtype=torch.int64), dtype)[side]
            assert torch.equal(got[b, : len(slots)], stored)
            assert not got[b, len(slots) :].any()


@pytest.mark.parametrize("formats", [(KVFormat.INT8,) * 2, (KVFormat.FP16, KVFormat.INT8)])
def test_gather_defaults_to_what_is_stored(formats: tuple[KVFormat, KVFormat]) -> None:
    spec = KVSpec(kv_heads=1, head_dim=8, k_format=formats[0], v_format=formats[1])
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(spec, [3], [1], generator=g)
    k, v = gather(layer, step)
    assert k.dtype == v.dtype == (torch.float16 if KVFormat.FP16 in formats else torch.float32)
    assert k.shape == (1, 3, 1, 8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_torch_row_takes_any_format_with_any_activations(dtype: torch.dtype) -> None:
    rows = [r for r in ROWS if r.op == "paged_decode_attention" and r.backend == "torch"]
    for row in rows:
        call = Call(row, dtype, D=16, new=[2, 0, 5, 1])
        q = call.rows(call.heads[0])
        call.check("torch", q, *paged_decode_attention(call.layer, call.step, q, return_lse=True))


def test_long_queries_and_long_keys_are_cut_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The torch row, with room for two queries, and for keys that end inside a block."""
    from kv_kernels.ops.paged_decode_attention import reference

    row = next(r for r in ROWS if r.op == "paged_decode_attention" and r.backend == "torch")
    for shape in ({"N": 3}, {"N": 16}, {"capacity": 40}):
        call = Call(row, torch.float32, new=[5, 0, 20, 16], D=16, **shape)
        q = call.rows(6)
        for window in (-1, 11):
            call.options = {"window_left": window}
            whole = paged_decode_attention(call.layer, call.step, q, **call.options)
            monkeypatch.setattr(reference, "_SCORES", 2 * 33 * 6)
            monkeypatch.setattr(reference, "_KEYS", 7)
            cut = paged_decode_attention(call.layer, call.step, q, **call.options)
            monkeypatch.undo()
            assert_within_budget(cut, whole, call.oracle(q)[0])


def test_a_stored_nan_reaches_those_who_see_it_and_nobody_else() -> None:
    row = next(r for r in ROWS if r.op == "paged_decode_attention" and r.backend == "torch")
    for side in ("k", "v"):
        call = Call(row, torch.float32, contexts=[12], new=[12], pad=0, D=16)
        block = int(call.step.block_table[0, 0])
        getattr(call.layer, side)[block, 5] = torch.nan
        q = call.rows(6)
        out = paged_decode_attention(call.layer, call.step, q, window_left=3)
        poisoned = out.isnan().any(-1).any(-1).tolist()
        assert poisoned == [5 <= t <= 8 for t in range(12)]


def test_no_token_and_no_sequence_are_fine() -> None:
    spec = KVSpec(kv_heads=2, head_dim=8, format=KVFormat.FP32)
    layer = make_layer(spec, 2)
    step = Step(
        slots=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
        max_query=0,
        max_context=0,
    )
    none = torch.zeros(0, 2, 8)
    append(layer, step, none, none, checked=True)
    out, lse = paged_decode_attention(layer, step, none, return_lse=True, checked=True)
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)
    q = paged_write(layer, step, torch.zeros(0, 48), None, None, None, None, rope="none")
    assert q.shape == (0, 2, 8)
    assert gather(layer, step)[0].shape == (0, 0, 2, 8)
