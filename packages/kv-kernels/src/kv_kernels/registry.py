"""The table of kernels: which row runs an operation, and why each other row cannot."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from kv_core.errors import NoKernelError
from kv_core.hybrid.keys import KeyFormat
from kv_core.hybrid.rows import RowFormat
from kv_core.spec import KVFormat

log = logging.getLogger("kv_kernels")

Format = KVFormat | RowFormat | KeyFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What one call asks of a row: scalars only, so that an answer can be remembered.

    No field is a length. Lengths change from step to step, and a row that ran one step must run
    the next.
    """

    op: str
    k_format: Format  # of keys; of the rows or keys of a hybrid cache
    v_format: Format  # of values; of the indexer keys that are stored beside rows
    device: str  # device type, "cpu" or "cuda"
    capability: tuple[int, int] | None = None  # CUDA compute capability, None elsewhere
    dtype: torch.dtype  # of queries or other activations, or of what is gathered
    k_dim: int  # D of queries and keys
    v_dim: int  # D of values
    group: int = 1  # G, query heads that share a key/value head
    block_size: tuple[int, int] | None = None  # (query, key) tokens of a mask block
    lse: bool = False  # the log-sum-exp is wanted too
    unit_stride: bool = True  # the elements of each last axis lie next to each other

    def __str__(self) -> str:
        where = self.device
        if self.capability is not None:
            where += " {}.{}".format(*self.capability)
        heads = f"D {self.k_dim}" + (f", Dv {self.v_dim}" if self.v_dim != self.k_dim else "")
        return (
            f"{self.op} for {format_pair(self.k_format, self.v_format)} on {where} "
            f"({str(self.dtype).removeprefix('torch.')}, {heads})"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run one operation on one pair of storage formats."""

    op: str
    k_format: Format
    v_format: Format
    backend: str
    target: str  # "module:function", imported when first used
    rejects: Callable[[Query], str | None] = field(repr=False)  # why not, or None if it can


def load(target: str) -> Any:
    """Import what ``"module:name"`` names."""
    module, name = target.split(":")
    return getattr(import_module(module), name)


def _rule(target: str) -> Callable[[Query], str | None]:
    """Name a rule by its place, so that reading the table imports no kernel."""
    return lambda query: load(target)(query)


def _runs_anywhere(query: Query) -> None:
    """Reject nothing."""


_OPS = "kv_kernels.ops"
_SLOT = f"{_OPS}.slot_attention"
_HALVES = (KVFormat.FP16, KVFormat.BF16)
_FLOATS = (KVFormat.FP32, *_HALVES)
_SAME = tuple((kv_format, kv_format) for kv_format in KVFormat)
_MIXED = tuple(pair for f in _FLOATS for pair in ((f, KVFormat.INT8), (KVFormat.INT8, f)))


def _slot_rows() -> Iterator[Row]:
    """Compiled flex stands on both sides of torch.

    On CUDA it is the default; on the CPU it has to be asked for, because compiling costs more there
    than it saves.
    """
    for k_format, v_format in _SAME:
        for backend, module, rejects in (
            ("flex", "flex", _rule(f"{_SLOT}.flex:rejects_cuda")),
            ("torch", "reference", _runs_anywhere),
            ("flex", "flex", _rule(f"{_SLOT}.flex:rejects_cpu")),
        ):
            target = f"{_SLOT}.{module}:attend"
            yield Row("slot_attention", k_format, v_format, backend, target, rejects)


def _paged_rows(op: str, pairs: Sequence[tuple[KVFormat, KVFormat]]) -> Iterator[Row]:
    """Triton stands on both sides of torch: its interpreter is for tests, and has to be asked for.

    An operation without a cache (``split_qkv_norm_rope``) has the format of its activations.
    """
    for k_format, v_format in pairs:
        triton = partial(Row, op, k_format, v_format, "triton", f"{_OPS}.{op}.triton:run")
        yield triton(_rule("kv_kernels.triton_rules:rejects_cuda"))
        if op == "paged_decode_attention" and k_format is v_format and k_format in _HALVES:
            rule = _rule(f"{_OPS}.{op}.varlen:rejects")
            target = "torch.nn.attention.varlen:varlen_attn"
            yield Row(op, k_format, v_format, "varlen", target, rule)
        yield Row(op, k_format, v_format, "torch", f"{_OPS}.{op}.reference:run", _runs_anywhere)
        yield triton(_rule("kv_kernels.triton_rules:rejects_interpreted"))


_ROWS = tuple((row, row) for row in RowFormat)
_KEYS = tuple((key, key) for key in KeyFormat)
_TAILS = ((KVFormat.FP32, KVFormat.FP32),)  # what entries are made from is always FP32
_FLUSHED = tuple((row, key) for row in RowFormat for key in (row, *KeyFormat))


def _hybrid_rows(op: str, pairs: Sequence[tuple[Format, Format]]) -> Iterator[Row]:
    """As for paged rows, Triton stands on both sides of torch."""
    for k_format, v_format in pairs:
        triton = partial(Row, op, k_format, v_format, "triton", f"{_OPS}.{op}.triton:run")
        yield triton(_rule("kv_kernels.triton_rules:rejects_cuda"))
        yield Row(op, k_format, v_format, "torch", f"{_OPS}.{op}.reference:run", _runs_anywhere)
        yield triton(_rule("kv_kernels.triton_rules:rejects_interpreted"))


# The order is the priority.
ROWS: list[Row] = [
    *_slot_rows(),
    *_paged_rows("split_qkv_norm_rope", tuple((f, f) for f in _FLOATS)),
    *_paged_rows("append", _SAME + _MIXED),
    *_paged_rows("paged_write", _SAME + _MIXED),
    *_paged_rows("paged_decode_attention", _SAME + _MIXED),
    *_paged_rows("gather", _SAME + _MIXED),
    *_hybrid_rows("append_swa", _ROWS),
    *_hybrid_rows("append_tail", _TAILS),
    *_hybrid_rows("compress", _TAILS),
    *_hybrid_rows("flush_compression", _FLUSHED),
    *_hybrid_rows("indexer_topk", _KEYS),
    *_hybrid_rows("hybrid_attention", _ROWS),
]


def explain(query: Query) -> list[tuple[Row, str | None]]:
    """List each row for the query's operation and formats with the reason against it.

    Args:
        query: What is asked.

    Returns:
        Pairs in order of priority; the reason is None for a row that can run. The first such row is
        what ``find(query)`` takes.
    """
    return [
        (row, row.rejects(query))
        for row in ROWS
        if (row.op, row.k_format, row.v_format) == (query.op, query.k_format, query.v_format)
    ]


@functools.lru_cache(maxsize=1024)
def find(query: Query, backend: str | None = None) -> Callable[..., Any]:
    """Return the function of the first row that can run ``query``; the answer is remembered.

    Args:
        query: What is asked.
        backend: Use this backend or refuse; it is never replaced by another.

    Raises:
        NoKernelError: No row can run it. The message lists every row and why not.
    """
    answers = explain(query)
    for row, reason in answers:
        if reason is None and backend in (None, row.backend):
            log.info("%s: %s", query, _chosen(row, answers))
            return load(row.target)
    raise NoKernelError(_refusal(query, backend, answers))


def _chosen(chosen: Row, answers: list[tuple[Row, str | None]]) -> str:
    skipped = [f"{row.backend} {reason}" for row, reason in answers if reason is not None]
    return f"uses {chosen.backend}" + (f" ({'; '.join(skipped)})" if skipped else "")


def _refusal(query: Query, backend: str | None, answers: list[tuple[Row, str | None]]) -> str:
    asked = str(query) + (f" with backend {backend!r}" if backend is not None else "")
    if not answers:
        known = {format_pair(r.k_format, r.v_format): None for r in ROWS if r.op == query.op}
        have = f"rows exist for {', '.join(known)}" if known else "the table has no such operation"
        return f"no kernel runs {asked}: {have}"
    reasons = [f"{row.backend} {reason or 'could run it'}" for row, reason in answers]
    if backend is not None and backend not in {row.backend for row, _ in answers}:
        reasons.insert(0, f"there is no {backend!r} row")
    return f"no kernel runs {asked}: " + "; ".join(reasons)


def format_pair(k_format: Format, v_format: Format) -> str:
    """Name the formats of keys and values, or of rows and keys; once where they are the same."""
    return k_format.name if k_format is v_format else f"{k_format.name}/{v_format.name}"
