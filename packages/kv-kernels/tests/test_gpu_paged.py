"""The paged operations on a CUDA device: every Triton row against FP64 and against torch.

Each run draws new numbers; set ``KV_TEST_SEED`` to the seed that a failure prints to have the same
ones again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_core.codecs.int8 import TINY, quantize_int8
from kv_core.errors import NoKernelError
from kv_core.layer import KVLayer
from kv_core.sequences import SequenceTable
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import append, gather, paged_decode_attention, paged_write, split_qkv_norm_rope
from kv_kernels.registry import ROWS, format_pair
from kv_kernels.testing import (
    error_budget,
    largest_error,
    make_layer,
    make_step,
    random_paged,
    split_qkv_norm_rope_oracle,
    storage_bytes,
)
from torch import Tensor

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = list(
    dict.fromkeys(
        (row.k_format, row.v_format)
        for row in ROWS
        if row.op == "append" and row.backend == "triton"
    )
)
BF16, INT8 = KVFormat.BF16, KVFormat.INT8


def _cases(pairs: Sequence[tuple[KVFormat, KVFormat]], *, attention: bool) -> list[Any]:
    """Formats with each dtype of activations that a Triton row takes there."""
    found = []
    for pair in pairs:
        floating = [fmt.dtype for fmt in pair if not fmt.is_quantized]
        for dtype in (floating[:1] or FLOATS) if attention else FLOATS:
            name = f"{format_pair(*pair)}-{str(dtype).removeprefix('torch.')}"
            found.append(pytest.param(pair, dtype, id=name))
    return found


@pytest.fixture
def g() -> torch.Generator:
    seed = int(os.environ.get("KV_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"KV_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


class Call:
    """A layer full of garbage, a shuffled table and queries, on the device."""

    def __init__(
        self,
        g: torch.Generator,
        pair: tuple[KVFormat, KVFormat],
        dtype: torch.dtype,
        contexts: Sequence[int],
        new: Sequence[int],
        *,
        heads: tuple[int, int] = (32, 8),
        D: int = 128,
        N: int = 16,
        **layout: Any,
    ) -> None:
        spec = KVSpec(
            kv_heads=heads[1], head_dim=D, block_size=N, k_format=pair[0], v_format=pair[1]
        )
        self.layer, self.step = random_paged(
            spec, contexts, new, generator=g, device="cuda", pad_tokens=3, **layout
        )
        T = self.step.num_tokens
        wide = torch.randn(T, heads[0] + 1, D, generator=g).to(dtype).cuda()
        self.q = wide[:, :-1]

    def run(self, backend: str | None = "triton", **options: Any) -> tuple[Tensor, Tensor]:
        return paged_decode_attention(
            self.layer, self.step, self.q, return_lse=True, backend=backend, **options
        )

    def check(self, **options: Any) -> tuple[Tensor, Tensor]:
        """Compare with FP64, within twice what the torch row errs at its worst in some draws."""
        out, lse = self.run(**options)
        options.pop("num_splits", None)
        original, draws = self.q, []
        for shift in range(3):
            self.q = original.roll(shift, 2)
            draws.append((self.run("torch", **options), exact(self, **options)))
        self.q = original
        for i, got in enumerate((out, lse)):
            budget = max(error_budget(plain[i], oracle[i].cpu()) for plain, oracle in draws)
            error = largest_error(got, draws[0][1][i].cpu())
            assert error <= budget, f"output {i} errs by {error:.3e}, more than {budget:.3e}"
        return out, lse


def exact(
    call: Call, *, scale: float | None = None, window_left: int = -1, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attend in FP64 on the device, one sequence after the other."""
    layer, step, q = call.layer, call.step, call.q.double()
    T, Hq, D = q.shape
    N, H = layer.block_size, layer.kv_heads
    out = torch.zeros(T, Hq, D, dtype=torch.float64, device="cuda")
    lse = torch.full((T, Hq), -torch.inf, dtype=torch.float64, device="cuda")
    edges = step.cu_seqlens.tolist()
    for b, context in enumerate(step.context_lens.tolist()):
        rows = slice(edges[b], edges[b + 1])
        count = edges[b + 1] - edges[b]
        if not count or not context:
            continue
        index = torch.arange(context, device="cuda")
        at = step.block_table[b].long()[index // N], index % N
        k, v = (
            cache[at].double() * (1.0 if s is None else s[at].double()[..., None])
            for cache, s in ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
        )
        grouped = q[rows].unflatten(1, (H, -1))  # [n, H, G, D]
        scores = torch.einsum("nhgd,shd->hgns", grouped, k)
        scores = scores * (D**-0.5 if scale is None else scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(context - count, context, device="cuda")[:, None]
        hidden = index > own
        if window_left >= 0:
            hidden |= index < own - window_left
        scores.masked_fill_(hidden, -torch.inf)
        lse[rows] = scores.logsumexp(-1).permute(2, 0, 1).flatten(1)
        out[rows] = torch.einsum("hgns,shd->nhgd", scores.softmax(-1), v).flatten(1, 2)
    return out, lse


CONTEXTS, NEW = [5000, 0, 1337, 300, 17, 64], [1, 0, 200, 300, 1, 2]


# --- attention


@pytest.mark.parametrize(("pair", "dtype"), _cases(PAIRS, attention=True))
def test_every_attention_row_is_within_the_budget(
    pair: tuple[KVFormat, KVFormat], dtype: torch.dtype, g: torch.Generator
) -> None:
    """Decode, chunks, a whole prompt, an empty row and padding in one launch, over NaN."""
    call = Call(g, pair, dtype, CONTEXTS, NEW)
    out, lse = call.check()
    assert (out[-3:] == 0).all() and (lse[-3:] == -torch.inf).all()
    assert out.isfinite().all()


SHAPES: dict[str, dict[str, Any]] = {
    "32/8 D128 N64": {"heads": (32, 8), "D": 128, "N": 64, "storage": "HND"},
    "28/4 D80 N1": {"heads": (28, 4), "D": 80, "N": 1, "storage": "padded"},
    "9/3 D64 N16": {"heads": (9, 3), "D": 64, "N": 16, "storage": "packed"},
    "16/16 D256 contiguous": {"heads": (16, 16), "D": 256, "capacity": 5056},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("fmt", "dtype"), [(BF16, torch.bfloat16), (INT8, torch.float16)], ids=["BF16", "INT8"]
)
def test_any_heads_sizes_and_blocks(
    shape: dict[str, Any], fmt: KVFormat, dtype: torch.dtype, g: torch.Generator
) -> None:
    """D10, D17: decoding in splits, then chunks."""
    Call(g, (fmt, fmt), dtype, [5000, 1, 0, 900], [1, 1, 0, 1], **shape).check()
    Call(g, (fmt, fmt), dtype, [700, 40, 0, 900], [100, 40, 0, 1], **shape).check()


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 1000},
        {"window_left": 37, "num_splits": 3},
        {"window_left": 100, "softcap": 30.0},
        {"softcap": 5.0, "num_splits": 7, "scale": 0.3},
        {"num_splits": 1},
        {"num_splits": 100},
    ],
    ids=lambda options: " ".join(f"{name} {x}" for name, x in options.items()),
)
def test_windows_caps_and_splits(options: dict[str, Any], g: torch.Generator) -> None:
    """D07, D09."""
    call = Call(g, (BF16, BF16), torch.bfloat16, [2000, 64, 0, 5, 300], [3, 3, 0, 1, 200])
    if "window_left" in options:  # what left every window may hold anything
        gone = (2000 - 3 - options["window_left"]) // 16
        for cache in (call.layer.k, call.layer.v):
            cache[call.step.block_table[0, :gone].long()] = torch.nan
    out, lse = call.run(**options)
    if "window_left" not in options:
        call.check(**options)
        return
    # the oracle multiplies what is hidden by 0, so give it numbers there
    call.layer.k.nan_to_num_(0.0)
    call.layer.v.nan_to_num_(0.0)
    expected = call.check(**options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(BF16, torch.bfloat16), (INT8, torch.bfloat16), (INT8, torch.float16)],
    ids=["BF16", "INT8", "INT8 FP16"],
)
def test_one_split_gives_the_same_bits_alone_and_in_a_batch(
    fmt: KVFormat, dtype: torch.dtype, g: torch.Generator
) -> None:
    contexts, new = [3000, 70, 500, 33, 1], [1, 70, 40, 1, 1]
    call = Call(g, (fmt, fmt), dtype, contexts, new)
    together = call.run(num_splits=1)
    edges = call.step.cu_seqlens.tolist()
    for b in range(len(contexts)):
        rows = slice(edges[b], edges[b + 1])
        step = Step(
            slots=call.step.slots[rows],
            positions=call.step.positions[rows],
            cu_seqlens=torch.tensor([0, new[b]], dtype=torch.int32, device="cuda"),
            block_table=call.step.block_table[b : b + 1],
            context_lens=call.step.context_lens[b : b + 1],
            max_query=new[b],
            max_context=contexts[b],
        )
        alone = paged_decode_attention(
            call.layer, step, call.q[rows], num_splits=1, return_lse=True, backend="triton"
        )
        for mine, ours in zip(alone, together, strict=True):
            assert torch.equal(mine, ours[rows]), f"sequence {b}"


def test_a_stored_nan_reaches_those_who_see_it_and_nobody_else(g: torch.Generator) -> None:
    call = Call(g, (BF16, BF16), torch.bfloat16, [400, 9], [200, 9])
    table = call.step.block_table.long()
    call.layer.v[table[0, 300 // 16], 300 % 16, 2, 7] = torch.nan
    call.layer.v[table[0, 350 // 16], 350 % 16, 3, 9] = torch.inf
    call.layer.k[table[1, 0], 4, 1, 3] = torch.nan
    for window in (-1, 20):
        out, lse = call.run(window_left=window)
        expected, expected_lse = call.run("torch", window_left=window)
        assert torch.equal(out.isfinite(), expected.isfinite()) and not out.isfinite().all()
        assert torch.equal(lse.isnan(), expected_lse.isnan())


def test_the_default_is_the_first_row_that_runs(g: torch.Generator) -> None:
    call = Call(g, (BF16, BF16), torch.bfloat16, [50], [1])
    assert all(map(torch.equal, call.run(None), call.run("triton")))
    with pytest.raises(NoKernelError, match="TRITON_INTERPRET"):
        split_qkv_norm_rope(
            torch.zeros(1, 48), None, None, None, None, None,
            kv_heads=1, head_dim=16, rope="none", backend="triton",
        )  # fmt: skip


# --- writes and copies


def edge_rows(g: torch.Generator, D: int) -> Tensor:
    """Rows of every magnitude, ties, and what is not finite: ``[T, D]`` FP32."""
    random = torch.randn(160, D, generator=g) * torch.logspace(-44, 38, 160)[:, None]
    ties = torch.randint(-254, 255, (64, D), generator=g) / 2
    ties[:, 0] = 127
    odd = torch.randn(12, D, generator=g)
    odd[0] = 0
    odd[1] = -0.0
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf), 2):
        odd[row, row] = value
    odd[5] = torch.nan
    odd[6] = TINY * torch.rand(D, generator=g)
    odd[7] = TINY / 2
    odd[7, 3] = TINY
    odd[8] = 1e-40
    odd[9] = 65519.0
    odd[10] = 65520.0
    odd[11] = (1 + 2.0**-8) * 2.0 ** torch.arange(-10, -10 + D)  # between two BF16 numbers
    return torch.cat([random, ties, odd])


def assert_storage_equal(actual: KVLayer, expected: KVLayer) -> None:
    """The same bytes; one NaN is as good as another."""
    for name, tensor in expected.tensors().items():
        got = actual.tensors()[name]
        torch.testing.assert_close(got, tensor, rtol=0, atol=0, equal_nan=True, msg=name)
        if tensor.is_floating_point():
            clean = ~tensor.isnan()
            assert torch.equal(got[clean].signbit(), tensor[clean].signbit()), name


@pytest.mark.parametrize(("pair", "dtype"), _cases(PAIRS, attention=False))
def test_append_stores_the_bits_of_the_torch_row(
    pair: tuple[KVFormat, KVFormat], dtype: torch.dtype, g: torch.Generator
) -> None:
    """C02, C03, D05, D14: codes, scales and roundings."""
    D, H = 64, 2
    rows = edge_rows(g, D).to(dtype).cuda()
    T = len(rows)
    k = torch.stack([rows, rows.roll(1, 0)], 1)  # [T, 2, D]
    spec = KVSpec(kv_heads=H, head_dim=D, block_size=16, k_format=pair[0], v_format=pair[1])
    layers = [make_layer(spec, T // 8, storage="padded", device="cuda") for _ in range(2)]
    slots = torch.randperm(T // 8 * 16, generator=g)[:T].cuda()
    slots[:4] = torch.tensor([-1, -5, T // 8 * 16, 2**40])
    step = Step(
        slots=slots,
        positions=torch.zeros_like(slots),
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device="cuda"),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.zeros(1, dtype=torch.int32, device="cuda"),
        max_query=T,
        max_context=0,
    )
    for layer, backend in zip(layers, ("triton", "torch"), strict=True):
        append(layer, step, k, -k, backend=backend)
    assert_storage_equal(*layers)
    if pair[0].is_quantized:
        codes, scale = quantize_int8(k.cpu())  # on another machine still the same
        live = slots[4:].cpu()
        assert torch.equal(layers[0].k.cpu().flatten(0, 1)[live], codes[4:])
        assert layers[0].k_scale is not None
        torch.testing.assert_close(
            layers[0].k_scale.cpu().flatten(0, 1)[live], scale[4:],
            rtol=0, atol=0, equal_nan=True,
        )  # fmt: skip


class Prepare:
    """A packed row for each token, norms and tables."""

    def __init__(
        self, g: torch.Generator, dtype: torch.dtype, T: int, *, heads: tuple[int, int], D: int,
        R: int, norms: bool,
    ) -> None:  # fmt: skip
        Hq, H = heads
        self.qkv = torch.randn(T, (Hq + 2 * H) * D + 64, generator=g).to(dtype).cuda()[:, :-64]
        self.q_norm, self.k_norm = (
            (1 + 0.3 * torch.randn(D, generator=g)).to(dtype).cuda() if norms else None
            for _ in range(2)
        )
        angles = torch.outer(torch.arange(2000.0), 10000.0 ** -(torch.arange(0, R, 2) / max(R, 1)))
        self.cos, self.sin = (f(angles).cuda() if R else None for f in (torch.cos, torch.sin))
        self.positions = torch.randint(0, 2000, (T,), generator=g).cuda()

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.qkv, self.q_norm, self.k_norm, self.cos, self.sin


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "half 32/8 D128": ("half", {"heads": (32, 8), "D": 128, "R": 128, "norms": True}),
    "interleaved 9/3 D64": ("interleaved", {"heads": (9, 3), "D": 64, "R": 64, "norms": False}),
    "half 28/4 D80 R48": ("half", {"heads": (28, 4), "D": 80, "R": 48, "norms": True}),
    "none 16/16 D256": ("none", {"heads": (16, 16), "D": 256, "R": 0, "norms": True}),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_norm_and_rope_are_within_the_budget(
    rope: tuple[str, dict[str, Any]], dtype: torch.dtype, g: torch.Generator
) -> None:
    style, sizes = rope
    given = Prepare(g, dtype, 37, **sizes)
    where: dict[str, Any] = {"kv_heads": sizes["heads"][1], "head_dim": sizes["D"], "rope": style}
    positions = None if style == "none" else given.positions
    parts = split_qkv_norm_rope(*given.tensors, positions, **where, backend="triton")
    plain = split_qkv_norm_rope(*given.tensors, positions, **where, backend="torch")
    oracle = split_qkv_norm_rope_oracle(*given.tensors, positions, **where)
    for part, reference, expected in zip(parts, plain, oracle, strict=True):
        budget = error_budget(reference, expected)
        assert largest_error(part, expected) <= budget
    assert torch.equal(parts[2], plain[2])


@pytest.mark.parametrize("T", [1, 19, 700])
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [*_cases([(INT8, INT8)], attention=False), *_cases(PAIRS, attention=True)[:3],
     *_cases([(BF16, INT8), (INT8, KVFormat.FP16)], attention=True)],
)  # fmt: skip
def test_a_fused_write_is_the_unfused_one_bit_for_bit(
    pair: tuple[KVFormat, KVFormat], dtype: torch.dtype, T: int, g: torch.Generator
) -> None:
    """Also where few rows and many take other tiles, and whatever is stored: the rows agree."""
    D, heads, N = 128, (32, 8), 16
    given = Prepare(g, dtype, 700, heads=heads, D=D, R=D, norms=True)
    given.qkv = given.qkv[:T]
    positions = given.positions[:T]
    spec = KVSpec(kv_heads=8, head_dim=D, block_size=N, k_format=pair[0], v_format=pair[1])
    layers = [make_layer(spec, 50, storage="HND", device="cuda") for _ in range(2)]
    slots = torch.randperm(50 * N, generator=g)[:T].cuda()
    if T > 1:
        slots[1] = -1
    step = Step(
        slots=slots,
        positions=positions,
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device="cuda"),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        context_lens=torch.zeros(1, dtype=torch.int32, device="cuda"),
        max_query=T,
        max_context=0,
    )
    q = paged_write(layers[0], step, *given.tensors, rope="half", backend="triton")
    parts = split_qkv_norm_rope(
        *given.tensors, positions, kv_heads=8, head_dim=D, rope="half", backend="triton"
    )
    append(layers[1], step, *parts[1:], backend="triton")
    assert torch.equal(q, parts[0])
    assert all(map(torch.equal, *map(storage_bytes, layers)))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: format_pair(*pair))
def test_gather_is_a_copy(pair: tuple[KVFormat, KVFormat], g: torch.Generator) -> None:
    call = Call(g, pair, torch.float32, [500, 0, 33], [1, 0, 1], heads=(4, 2), D=80)
    for dtype in (torch.bfloat16, torch.float32):
        got, expected = (
            gather(call.layer, call.step, length=600, dtype=dtype, backend=backend)
            for backend in ("triton", "torch")
        )
        assert all(map(torch.equal, got, expected))


# --- large pools, graphs, streams


@pytest.mark.parametrize("form", ["paged", "contiguous"])
def test_a_pool_of_more_than_two_to_the_31_elements(form: str, g: torch.Generator) -> None:
    """B03: the same tokens at the far end of a large pool and in a small one."""
    H, D, N = 8, 128, 64
    context, new = 1000, 7
    spec = KVSpec(kv_heads=H, head_dim=D, block_size=N, format=INT8)
    if form == "paged":
        P = 2**31 // (N * H * D) + 40
        far = KVLayer.paged(spec, blocks=P, device="cuda")
        tables = [[P - 1 - i for i in range(-(-context // N))]]
    else:
        N = 2**21  # one sequence fills 2^31 elements
        far = KVLayer.contiguous(spec, sequences=2, capacity=N, device="cuda")
        tables = [[1]]
    assert far.k.numel() > 2**31
    near = KVLayer.paged(spec, blocks=20, device="cuda")
    near_tables = [list(range(1, 1 - (-context // 64)))]
    given = Prepare(g, torch.bfloat16, context, heads=(32, H), D=D, R=D, norms=True)
    outs = []
    for layer, table in ((far, tables), (near, near_tables)):
        whole = make_step(table, [context], [context], layer.block_size, device="cuda")
        q = paged_write(layer, whole, *given.tensors, rope="half", backend="triton")
        step = make_step(table, [context], [new], layer.block_size, device="cuda")
        outs.append(
            (
                *paged_decode_attention(
                    layer, step, q[-new:], num_splits=2, return_lse=True, backend="triton"
                ),
                *gather(layer, step, backend="triton"),
            )
        )
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)
    assert not outs[0][0].isnan().any()


def test_a_captured_step_of_all_layers_replays_over_100_steps(g: torch.Generator) -> None:
    """Tables, lengths and batches change; the graph, and the layers it writes, equal eager ones."""
    heads, D, B = (8, 2), 64, 6
    formats = [(BF16, BF16), (INT8, INT8), (BF16, INT8)]
    specs = [
        KVSpec(kv_heads=heads[1], head_dim=D, block_size=16, k_format=k, v_format=v)
        for k, v in formats
    ]
    layers = [KVLayer.paged(spec, blocks=200, device="cuda") for spec in specs * 2]
    replayed, eager = layers[:3], layers[3:]
    table = SequenceTable(layers, sequences=B, max_blocks=40, step_tokens=256)
    given = [
        Prepare(g, torch.bfloat16, 256, heads=heads, D=D, R=D, norms=True) for _ in replayed
    ]  # fmt: skip
    inputs = [one.qkv[:B].clone() for one in given]
    steps: list[Step] = []

    def forward(own: list[KVLayer], rows: list[Tensor]) -> list[Tensor]:
        outs = []
        for layer, qkv, one in zip(own, rows, given, strict=True):
            tensors = (qkv, *one.tensors[1:])
            q = paged_write(layer, steps[0], *tensors, rope="half", backend="triton")
            outs.append(paged_decode_attention(layer, steps[0], q, backend="triton"))
        return outs

    def start(request: str, tokens: int) -> None:
        """Store a prompt in both sets of layers."""
        step = table.append({request: tokens})
        for layer, one in zip(layers, given * 2, strict=True):
            tensors = (one.qkv[:tokens], *one.tensors[1:])
            paged_write(layer, step, *tensors, rope="half", backend="triton")

    running = {"r0": 0}
    start("r0", 20)
    steps.append(table.append({"r0": 1}, pad_sequences=B, pad_tokens=B))
    forward(eager, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(replayed, inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward(replayed, inputs)
    held = torch.cuda.memory_reserved()
    for turn in range(100):
        if turn % 3 == 0 and len(running) < B:
            start(f"r{turn}+", 1 + int(torch.randint(200, (1,), generator=g)))
            running[f"r{turn}+"] = 0
        if turn % 11 == 10:
            oldest = next(iter(running))
            table.free(oldest)
            del running[oldest]
        if turn % 17 == 16:
            name = next(iter(running))
            table.truncate(name, table.length(name) - 1)
        order = list(running)[:: 1 if turn % 2 else -1]
        table.append(dict.fromkeys(order, 1), pad_sequences=B, pad_tokens=B)
        for target, one in zip(inputs, given, strict=True):
            target.copy_(one.qkv[torch.randint(0, 256, (B,), generator=g).cuda()])
        graph.replay()
        expected = forward(eager, inputs)
        for layer, (a, b) in enumerate(zip(outs, expected, strict=True)):
            assert torch.equal(a, b), f"step {turn}, layer {layer}"
            assert a[: len(order)].any() and not a[len(order) :].any()
    for ours, theirs in zip(replayed, eager, strict=True):
        assert_storage_equal(ours, theirs)
    assert torch.cuda.memory_reserved() <= held + (64 << 20)


def test_no_call_waits_for_the_device(g: torch.Generator) -> None:
    call = Call(g, (INT8, INT8), torch.bfloat16, [300, 0, 40], [1, 0, 20])
    given = Prepare(
        g, torch.bfloat16, call.step.num_tokens, heads=(32, 8), D=128, R=128, norms=True
    )

    def everything() -> None:
        q = paged_write(call.layer, call.step, *given.tensors, rope="half")
        for options in ({}, {"num_splits": 1}, {"window_left": 9, "return_lse": True}):
            paged_decode_attention(call.layer, call.step, q, **options)
        parts = split_qkv_norm_rope(
            *given.tensors, given.positions, kv_heads=8, head_dim=128, rope="half"
        )
        append(call.layer, call.step, *parts[1:])
        gather(call.layer, call.step)

    everything()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _op_arguments(g: torch.Generator) -> dict[str, Callable[[], tuple[Any, ...]]]:
    spec = KVSpec(kv_heads=2, head_dim=64, block_size=16, format=INT8)
    layer = make_layer(spec, 8, garbage=False, device="cuda")
    step = make_step([[3, 1], [5]], [20, 4], [3, 1], 16, pad_tokens=1, device="cuda")
    given = Prepare(g, torch.bfloat16, 5, heads=(4, 2), D=64, R=64, norms=True)
    k = torch.randn(5, 2, 64, generator=g).to(torch.bfloat16).cuda()
    q = torch.randn(5, 4, 64, generator=g).to(torch.bfloat16).cuda()
    caches = tuple(layer.tensors().values())
    names = ("INT8", "INT8", "triton")
    table = (step.block_table, step.context_lens)
    return {
        "split_qkv_norm_rope": lambda: (
            *given.tensors, given.positions, 2, 64, "half", 1e-6, "triton",
        ),
        "append": lambda: (k, k, step.slots, *caches, *names),
        "paged_write": lambda: (
            *given.tensors, step.positions, step.slots, *caches, "half", 1e-6, *names,
        ),
        "paged_decode_attention": lambda: (
            q, *caches, *table, step.cu_seqlens, 3, 32, 0.125, -1, 0.0, 2, *names, True,
        ),
        "gather": lambda: (*caches, *table, 20, torch.bfloat16, *names),
    }  # fmt: skip


@pytest.mark.parametrize(
    "op", ["split_qkv_norm_rope", "append", "paged_write", "paged_decode_attention", "gather"]
)
def test_opcheck_passes(op: str, g: torch.Generator) -> None:
    overload = getattr(torch.ops.kv_kernels, op).default
    torch.library.opcheck(overload, _op_arguments(g)[op]())
