"""What the Triton rows store, in the interpreter: codes, scales and roundings bit for bit."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kv_core.codecs.int8 import TINY, quantize_int8
from kv_core.errors import NoKernelError
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import append, gather, paged_write, split_qkv_norm_rope
from kv_kernels.library import call_query
from kv_kernels.registry import ROWS, Query, load
from kv_kernels.testing import make_layer, storage_bytes
from kv_kernels.triton_rules import rejects_cuda, rejects_interpreted

# numpy computes both sides of a where, and says so
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def query(op: str = "append", dtype: torch.dtype = torch.float32, **changes: object) -> Query:
    arguments = {"device": CPU, "dim": 64, "unit_stride": True, "format": "INT8", **changes}
    fmt = arguments.pop("format")
    return call_query(op, KVFormat[fmt], KVFormat[fmt], dtype=dtype, **arguments)  # type: ignore[arg-type]


interpreted = pytest.mark.skipif(
    rejects_interpreted(query()) is not None, reason=str(rejects_interpreted(query()))
)


def step_of(slots: torch.Tensor, positions: torch.Tensor | None = None) -> Step:
    """A step that only stores."""
    return Step(
        slots=slots,
        positions=torch.zeros_like(slots) if positions is None else positions,
        cu_seqlens=torch.tensor([0, len(slots)], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        context_lens=torch.zeros(1, dtype=torch.int32),
        max_query=len(slots),
        max_context=0,
    )


def stored(rows: torch.Tensor, fmt: KVFormat = KVFormat.INT8) -> KVLayer:
    """Append ``rows`` ``[T, D]`` as the keys of one head, and negated as the values."""
    spec = KVSpec(kv_heads=1, head_dim=rows.shape[1], block_size=4, format=fmt)
    layer = make_layer(spec, len(rows) // 4 + 1)
    k = rows[:, None]
    append(layer, step_of(torch.arange(len(rows))), k, -k, backend="triton")
    return layer


def row(*values: float) -> list[float]:
    return [*values, *[0.0] * (8 - len(values))]


EDGES = {
    "ties": row(127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5),
    "zeros": row(0.0, -0.0),
    "tiny": row(1e-6, -5e-7),
    "wide": row(300, 1, -1, 0.4),
    "huge": row(9e6, -8e6),
    "subnormal": row(1e-40, -3e-41),
    "just zero": row(TINY * (1 - 2**-24), TINY / 3),
    "just not zero": row(TINY, TINY / 2, -TINY / 254),
    "infinite": row(1.0, float("inf"), 2.0),
    "minus infinity": row(-float("inf"), 3.0),
    "NaN": row(5.0, float("nan"), 1.0),
    "all NaN": row(*[float("nan")] * 8),
    "largest": row(3.4e38, -1e38, 1e30),
}


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, NaN in the same places, and the sign of zero included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    clean = ~expected.isnan()
    assert torch.equal(actual[clean].signbit(), expected[clean].signbit())


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_and_scales_are_those_of_the_codec(dtype: torch.dtype) -> None:
    """C02, C03, D14: every edge, and random rows of every magnitude."""
    g = torch.Generator().manual_seed(0)
    random = torch.randn(64, 8, generator=g) * torch.logspace(-42, 37, 64)[:, None]
    halves = torch.randint(-254, 255, (32, 8), generator=g) / 2
    halves[:, 0] = 127
    rows = torch.cat([torch.tensor(list(EDGES.values())), random, halves]).to(dtype)
    layer = stored(rows)
    for cache, scale, x in (
        (layer.k, layer.k_scale, rows),
        (layer.v, layer.v_scale, -rows),
    ):
        codes, scales = quantize_int8(x)
        assert scale is not None
        assert torch.equal(cache.flatten(0, 1)[: len(x), 0], codes)
        assert_bits(scale.flatten(0, 1)[: len(x), 0], scales)


@interpreted
def test_halves_round_to_even() -> None:
    """C02."""
    layer = stored(torch.tensor([EDGES["ties"]]))
    assert layer.k[0, 0, 0].tolist() == [127, 0, 2, 2, 0, -2, 126, -126]


@interpreted
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.FP16, KVFormat.BF16], ids=str)
def test_casts_are_those_of_torch(source: torch.dtype, fmt: KVFormat) -> None:
    """D14: a table of 256 values, and all ties, through append and gather."""
    g = torch.Generator().manual_seed(1)
    table = torch.randn(160, generator=g) * torch.logspace(-44, 38, 160)
    ties = (torch.arange(80) * 2 + 1) * 2.0**-8 + 1  # between two BF16 numbers
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.0, 65520.0, 3.4e38])
    odd = torch.tensor(
        [1e-45, 2**-126, 2**-133, 6e-8, 3e-8, 2**-25, 1.0 + 2**-11, 1.0 + 3 * 2**-11]
    )
    rows = torch.cat([table, ties, special, odd]).to(source).reshape(32, 8)
    layer = stored(rows, fmt)
    assert_bits(layer.k.flatten(0, 1)[:32, 0], rows.to(fmt.dtype))
    whole = torch.arange(layer.num_blocks, dtype=torch.int32)[None]
    step = Step(
        slots=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        cu_seqlens=torch.zeros(2, dtype=torch.int32),
        block_table=whole,
        context_lens=torch.tensor([32]),
        max_query=0,
        max_context=33,
    )
    for dtype in FLOATS:
        k, v = gather(layer, step, dtype=dtype, backend="triton")
        expected = gather(layer, step, dtype=dtype, backend="torch")
        assert_bits(k, expected[0])
        assert_bits(v, expected[1])


WRITES = {
    "half, both norms": ("half", 16, 16, (True, True)),
    "interleaved and partial": ("interleaved", 24, 16, (True, False)),
    "half and partial": ("half", 80, 48, (False, True)),
    "plain": ("none", 24, 0, (False, False)),
}


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("is_int8", [False, True], ids=["floating", "INT8"])
def test_fused_equals_unfused(
    case: tuple[str, int, int, tuple[bool, bool]], dtype: torch.dtype, is_int8: bool
) -> None:
    rope, D, R, norms = case
    g = torch.Generator().manual_seed(D)
    T, Hq, H = 5, 4, 2
    qkv = torch.randn(T, (Hq + 2 * H) * D + 8, generator=g).to(dtype)[:, :-8]
    q_norm, k_norm = (1 + 0.3 * torch.randn(D, generator=g) if on else None for on in norms)
    cos, sin = (torch.randn(9, R // 2, generator=g) if R else None for _ in range(2))
    slots = torch.tensor([7, -1, 3, 12, 0])
    positions = torch.tensor([8, 3, -1, 9, 4])  # two of them outside the tables
    fmt = KVFormat.INT8 if is_int8 else KVFormat.of(dtype)
    spec = KVSpec(kv_heads=H, head_dim=D, block_size=3, format=fmt)
    layers = [make_layer(spec, 4, storage="padded") for _ in range(2)]
    step = step_of(slots, positions)
    q = paged_write(layers[0], step, qkv, q_norm, k_norm, cos, sin, rope=rope, backend="triton")
    parts = split_qkv_norm_rope(
        qkv, q_norm, k_norm, cos, sin, positions,
        kv_heads=H, head_dim=D, rope=rope, backend="triton",
    )  # fmt: skip
    append(layers[1], step, *parts[1:], backend="triton")
    assert_bits(q, parts[0])
    assert all(map(torch.equal, *map(storage_bytes, layers)))
    # outside the tables there is NaN where something is rotated, and nothing is read
    outside = parts[0].isnan()
    assert outside[2:4, :, :R].all() and outside.sum() == 2 * Hq * R


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_token_has_the_same_bits_in_any_step(dtype: torch.dtype) -> None:
    """Few rows and many take tiles of different heights and warps."""
    g = torch.Generator().manual_seed(2)
    D, T = 128, 520
    qkv = torch.randn(T, 8 * D, generator=g).to(dtype)
    weight = 1 + 0.3 * torch.randn(D, generator=g)
    cos, sin = (torch.randn(T, D // 2, generator=g) for _ in range(2))

    def split(rows: slice) -> tuple[torch.Tensor, ...]:
        return split_qkv_norm_rope(
            qkv[rows], weight, weight, cos, sin, torch.arange(T)[rows],
            kv_heads=2, head_dim=D, rope="half", backend="triton",
        )  # fmt: skip

    together = split(slice(None))
    for rows in (slice(0, 1), slice(3, 6), slice(519, 520)):
        for alone, all_rows in zip(split(rows), together, strict=True):
            assert_bits(alone, all_rows[rows])


@interpreted
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fmt", [KVFormat.FP32, KVFormat.INT8], ids=str)
def test_slots_outside_the_storage_store_nothing(fmt: KVFormat, ids: torch.dtype) -> None:
    """B01, D05: nothing wraps to the last slot, whatever the value."""
    spec = KVSpec(kv_heads=2, head_dim=16, block_size=4, format=fmt)
    layer, untouched = (make_layer(spec, 3, storage="padded") for _ in range(2))
    bad = [-1, -2, 12, 13, 2**31 - 1, -(2**31)]
    slots = torch.tensor(bad, dtype=ids)
    k = torch.full((len(bad), 2, 16), 7.0)
    append(layer, step_of(slots), k, k, backend="triton")
    assert all(map(torch.equal, storage_bytes(layer), storage_bytes(untouched)))
    slots[1] = 1
    append(layer, step_of(slots), k, k, backend="triton")
    untouched.write(k[:1], k[:1], torch.tensor([1]))
    assert all(map(torch.equal, storage_bytes(layer), storage_bytes(untouched)))


@interpreted
@pytest.mark.parametrize("fmt", list(KVFormat), ids=str)
def test_gather_is_a_copy(fmt: KVFormat) -> None:
    """B06: garbage in the table, and behind the last token, is neither read nor returned."""
    g = torch.Generator().manual_seed(4)
    spec = KVSpec(kv_heads=2, head_dim=24, block_size=3, format=fmt)
    layer = make_layer(spec, 6, storage="HND")
    rows = [torch.randn(10, 2, 24, generator=g) for _ in range(2)]
    layer.write(*rows, torch.tensor([3, 4, 5, 15, 16, 6, 7, 8, 9, 10]))
    step = Step(
        slots=torch.zeros(0, dtype=torch.int64),
        positions=torch.zeros(0, dtype=torch.int64),
        cu_seqlens=torch.zeros(4, dtype=torch.int32),
        block_table=torch.tensor([[1, 5, -7], [2, 3, 99], [2**31 - 1, -1, 6]]),
        context_lens=torch.tensor([5, 40, 0]),
        max_query=0,
        max_context=11,
    )
    for got, expected in zip(
        gather(layer, step, backend="triton"), gather(layer, step, backend="torch"), strict=True
    ):
        assert_bits(got, expected)


# --- D14, D16, D17: what a row takes, and what it says otherwise


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_rules_name_the_limit_and_the_value(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D17: the same limits, compiled and interpreted."""
    kind = type("InterpretedFunction" if device == "cpu" else "JITFunction", (), {})
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(cdiv=kind()))
    rule = rejects_cuda if device == "cuda" else rejects_interpreted
    capability = (9, 0) if device == "cuda" else None

    def reason(op: str, dtype: torch.dtype = torch.float32, **changes: object) -> str | None:
        return rule(replace(query(op, dtype, **changes), device=device, capability=capability))

    assert reason("append") is None
    assert reason("append", torch.float16, format="BF16") is None
    assert str(reason("paged_write", dim=512)).endswith("takes D up to 256, got 512")
    assert "last axis" in str(reason("append", unit_stride=False))
    attention = str(reason("paged_decode_attention", torch.float16, format="BF16"))
    assert attention.endswith("needs keys in the dtype of the queries (float16), got bfloat16")
    assert reason("paged_decode_attention", torch.float16) is None  # over INT8
    other = "cpu" if device == "cuda" else "cuda"
    assert f"got {other}" in str(rule(replace(query(), device=other)))


def test_old_devices_and_interpreted_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("InterpretedFunction", (), {})
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(cdiv=kind()))
    turing = replace(query(), device="cuda", capability=(7, 5))
    assert "compute capability 8.0 or newer, got 7.5" in str(rejects_cuda(turing))
    hopper = replace(query(), device="cuda", capability=(9, 0))
    assert "cannot compile while TRITON_INTERPRET is set" in str(rejects_cuda(hopper))


def test_the_variable_counts_only_if_it_was_set_before_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D14."""
    compiled = SimpleNamespace(cdiv=object())  # what a compiling Triton has there
    monkeypatch.setitem(sys.modules, "triton.language", compiled)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "it is not set" in str(rejects_interpreted(query()))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "it was set after that" in str(rejects_interpreted(query()))


LATE = """
import os, triton, torch
from kv_core.spec import KVFormat, KVSpec
from kv_core.layer import KVLayer
from kv_kernels import split_qkv_norm_rope
os.environ["TRITON_INTERPRET"] = "1"
split_qkv_norm_rope(torch.zeros(1, 48), None, None, None, None, None, kv_heads=1, head_dim=16,
    rope="none", backend="triton")
"""


def test_a_process_that_sets_it_late_is_told() -> None:
    """D14."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "it was set after that; set it where Python is started" in done.stderr


@interpreted
def test_a_last_axis_with_gaps_is_refused_by_name() -> None:
    """D01."""
    spec = KVSpec(kv_heads=1, head_dim=16, format=KVFormat.FP32)
    k, v = (torch.zeros(2, 16, 1, 32)[..., ::2] for _ in range(2))
    layer = KVLayer.adopt(spec, k, v, None, None, is_paged=True)
    rows = torch.ones(1, 1, 16)
    with pytest.raises(NoKernelError, match=r"triton \(interpreter\) needs the elements of the la"):
        append(layer, step_of(torch.tensor([3])), rows, rows, backend="triton")
    assert not k.any() and not v.any()


def test_no_constant_of_a_kernel_is_nan() -> None:
    """Triton compares them with what they were before every launch, and NaN differs from itself."""
    for row in ROWS:
        if row.backend == "triton":
            load(row.target)
    constants = [
        (name, constant, getattr(value, "value", value))
        for name, module in list(sys.modules.items())
        if name.startswith("kv_kernels.")
        for constant, value in vars(module).items()
        if not constant.startswith("__")
    ]
    assert len(constants) > 100
    assert not [c for c in constants if isinstance(c[2], float) and c[2] != c[2]]
