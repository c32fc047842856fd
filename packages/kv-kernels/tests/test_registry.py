"""The table: what is chosen, what is refused, and that it says why."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_core.errors import NoKernelError
from kv_core.spec import KVFormat
from kv_kernels import registry
from kv_kernels.__main__ import main
from kv_kernels.ops.paged_decode_attention import varlen
from kv_kernels.ops.slot_attention import flex
from kv_kernels.registry import ROWS, Query, Row, explain, find, format_pair, load

CPU = Query(
    op="slot_attention",
    k_format=KVFormat.BF16,
    v_format=KVFormat.BF16,
    device="cpu",
    dtype=torch.bfloat16,
    k_dim=128,
    v_dim=128,
    block_size=(128, 128),
)
CUDA = replace(CPU, device="cuda", capability=(9, 0))


@pytest.fixture(autouse=True)
def _forget() -> None:
    find.cache_clear()


def _backend(function: Callable[..., Any]) -> str:
    return next(row.backend for row in ROWS if load(row.target) is function)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda r: f"{r.op}-{format_pair(r.k_format, r.v_format)}-{r.backend}"
)
def test_every_row_names_a_function_and_a_rule_that_answers(row: Row) -> None:
    assert callable(load(row.target))
    for query in (CPU, CUDA):
        query = replace(query, op=row.op, k_format=row.k_format, v_format=row.v_format)
        reason = row.rejects(query)
        assert reason is None or (isinstance(reason, str) and reason)


def test_flex_is_first_on_cuda_and_torch_is_first_on_the_cpu() -> None:
    assert _backend(find(CUDA)) == "flex"
    assert _backend(find(CPU)) == "torch"
    assert _backend(find(CPU, "flex")) == "flex"


@pytest.mark.parametrize("kv_format", KVFormat, ids=lambda kv_format: kv_format.name)
def test_every_format_has_an_exact_row_on_every_device(kv_format: KVFormat) -> None:
    for query in (CPU, CUDA):
        query = replace(query, k_format=kv_format, v_format=kv_format, k_dim=512, v_dim=5)
        assert _backend(find(query)) == "torch"


REFUSALS = {
    "an unknown backend": (
        CPU,
        "cuda",
        "no kernel runs slot_attention for BF16 on cpu (bfloat16, D 128) with backend "
        "'cuda': there is no 'cuda' row; flex (CUDA) needs a CUDA device, got cpu; torch could run "
        "it; flex could run it",
    ),
    "D17, a large head": (
        replace(CUDA, k_dim=512, v_dim=512),
        "flex",
        "no kernel runs slot_attention for BF16 on cuda 9.0 (bfloat16, D 512) with "
        "backend 'flex': flex (CUDA) takes D from 16 to 256, got 512; torch could run it; flex "
        "(CPU) needs the CPU, got cuda",
    ),
    "D17, a small head of values": (
        replace(CUDA, v_dim=8),
        "flex",
        "flex (CUDA) takes Dv from 16 to 256, got 8",
    ),
    "D17, blocks that no tile divides": (
        replace(CUDA, block_size=(150, 333)),
        "flex",
        "flex (CUDA) needs mask blocks in multiples of 16, got (150, 333)",
    ),
    "an old GPU": (
        replace(CUDA, capability=(7, 5)),
        "flex",
        "flex (CUDA) needs compute capability 8.0 or newer, got 7.5",
    ),
    "a log-sum-exp from flex on the CPU": (
        replace(CPU, lse=True),
        "flex",
        "flex (CPU) returns no log-sum-exp, because torch compiles none there",
    ),
    "formats without a row": (
        replace(CPU, k_format=KVFormat.FP16, v_format=KVFormat.INT8),
        None,
        "no kernel runs slot_attention for FP16/INT8 on cpu (bfloat16, D 128): "
        "rows exist for FP32, FP16, BF16, INT8",
    ),
    "an unknown operation": (replace(CPU, op="fly"), None, "the table has no such operation"),
}


@pytest.mark.parametrize(("query", "backend", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_names_every_row_and_why_not(
    query: Query, backend: str | None, message: str
) -> None:
    """D16, D17: limits are answers before anything runs, and a named backend is never replaced."""
    with pytest.raises(NoKernelError, match=re.escape(message)):
        find(query, backend)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(flex.sys, "platform", "linux")
    assert flex.rejects_cpu(CPU) == (
        "(CPU) needs a C++ compiler, and 'no-such-compiler' is not there; set CXX to name one"
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert flex.rejects_cpu(CPU) == ("(CPU) needs AVX2 on Linux or Windows, got DEFAULT on linux")


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None)
    assert flex.rejects_cuda(CUDA) == "(CUDA) needs triton, which is not installed"


def test_explain_gives_every_row_in_order_with_its_reason() -> None:
    answers = explain(CPU)
    assert [row.backend for row, _ in answers] == ["flex", "torch", "flex"]
    assert [reason for _, reason in answers[:2]] == ["(CUDA) needs a CUDA device, got cpu", None]


def test_an_answer_is_remembered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """D16: the choice can be read, and is not repeated at every step."""
    with caplog.at_level(logging.INFO, "kv_kernels"):
        assert find(CPU) is find(CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "slot_attention for BF16 on cpu (bfloat16, D 128): uses torch "
        "(flex (CUDA) needs a CUDA device, got cpu)"
    ]


def _out_of_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("no memory left")


def _never(*args: Any) -> None:
    raise AssertionError("another row was tried")


def test_an_error_inside_a_row_is_not_a_reason_to_try_another(
    monkeypatch: pytest.MonkeyPatch, make_call: Callable[..., Any]
) -> None:
    """D16: only "cannot" leads elsewhere; out of memory reaches the caller."""
    monkeypatch.setattr(registry, "load", {"bad": _out_of_memory, "other": _never}.__getitem__)
    rows = [
        Row("slot_attention", KVFormat.FP32, KVFormat.FP32, name, target, lambda query: None)
        for name, target in (("fast", "bad"), ("slow", "other"))
    ]
    monkeypatch.setattr(registry, "ROWS", rows)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        make_call().run()
    find.cache_clear()


def test_a_query_names_values_of_another_size() -> None:
    assert str(replace(CPU, v_dim=5)) == "slot_attention for BF16 on cpu (bfloat16, D 128, Dv 5)"


PAGED = ("append", "paged_write", "paged_decode_attention", "gather")


@pytest.mark.parametrize("op", PAGED)
def test_every_pair_with_int8_on_either_side_has_its_rows(op: str) -> None:
    floats = (KVFormat.FP32, KVFormat.FP16, KVFormat.BF16)
    pairs = [(f, f) for f in KVFormat]
    pairs += [pair for f in floats for pair in ((f, KVFormat.INT8), (KVFormat.INT8, f))]
    for pair in pairs:
        rows = [row for row in ROWS if (row.op, row.k_format, row.v_format) == (op, *pair)]
        backends = [row.backend for row in rows if row.backend != "varlen"]
        assert backends == ["triton", "torch", "triton"]
        assert [row.backend for row in rows][1:2] == ["varlen"] or len(rows) == 3


def test_torchs_own_paged_attention_is_refused_until_it_ran_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = replace(CUDA, op="paged_decode_attention")
    assert varlen.missing_parameters() == () or "block_table" in varlen.missing_parameters()
    monkeypatch.setattr(varlen, "missing_parameters", lambda: ())
    assert varlen.rejects(query) == "is not yet checked against the torch row on a GPU"
    monkeypatch.setattr(varlen, "missing_parameters", lambda: ("seqused_k", "block_table"))
    assert varlen.rejects(query) == (
        "needs a newer torch: varlen_attn has no seqused_k, block_table"
    )


def test_the_table_can_be_read_at_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    verdicts: dict[tuple[str, str], list[list[str]]] = {}  # (op, formats) -> [backend, …, verdict]
    op, labels, before = "", [], 0
    for line in filter(None, lines[2:]):
        indent, words = len(line) - len(line.lstrip()), line.split()
        if indent == 0:
            op = line
        elif indent == 2:
            labels = [*labels, *words] if before == 2 else words
            labels = [word.rstrip(",") for word in labels]
        elif indent == 4:
            for label in labels:
                verdicts.setdefault((op, label), []).append(words)
        before = indent
    for row in ROWS:
        label = format_pair(row.k_format, row.v_format)
        said = verdicts[row.op, label]
        assert row.backend in [words[0] for words in said]
        assert [words[-1] for words in said].count("used") == 1
