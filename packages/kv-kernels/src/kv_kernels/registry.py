"""The table of kernels: which row runs an operation, and why each other row cannot."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from kv_core.errors import NoKernelError
from kv_core.spec import KVFormat

log = logging.getLogger("kv_kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What one call asks of a row: scalars only, so that an answer can be remembered.

    No field is a length. Lengths change from step to step, and a row that ran one step must run
    the next.
    """

    op: str
    k_format: KVFormat
    v_format: KVFormat
    device: str  # device type, "cpu" or "cuda"
    capability: tuple[int, int] | None = None  # CUDA compute capability, None elsewhere
    dtype: torch.dtype  # of the queries and the output
    k_dim: int  # D of queries and keys
    v_dim: int  # D of values
    group: int = 1  # G, query heads that share a key/value head
    block_size: tuple[int, int] | None = None  # (query, key) tokens of a mask block
    lse: bool = False  # the log-sum-exp is wanted too

    def __str__(self) -> str:
        where = self.device
        if self.capability is not None:
            where += " {}.{}".format(*self.capability)
        return (
            f"{self.op} for {_formats(self.k_format, self.v_format)} on {where} "
            f"({str(self.dtype).removeprefix('torch.')} queries, D {self.k_dim}, Dv {self.v_dim})"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run one operation on one pair of storage formats."""

    op: str
    k_format: KVFormat
    v_format: KVFormat
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


_SLOT = "kv_kernels.ops.slot_attention"

# The order is the priority. Compiled flex stands on both sides of torch: on CUDA it is the default,
# on the CPU it has to be asked for, because compiling costs more there than it saves.
ROWS: list[Row] = [
    Row("slot_attention", kv_format, kv_format, backend, f"{_SLOT}.{module}:attend", rejects)
    for kv_format in KVFormat
    for backend, module, rejects in (
        ("flex", "flex", _rule(f"{_SLOT}.flex:rejects_cuda")),
        ("torch", "reference", _runs_anywhere),
        ("flex", "flex", _rule(f"{_SLOT}.flex:rejects_cpu")),
    )
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
        known = {_formats(r.k_format, r.v_format): None for r in ROWS if r.op == query.op}
        have = f"rows exist for {', '.join(known)}" if known else "the table has no such operation"
        return f"no kernel runs {asked}: {have}"
    reasons = [f"{row.backend} {reason or 'could run it'}" for row, reason in answers]
    if backend is not None and backend not in {row.backend for row, _ in answers}:
        reasons.insert(0, f"there is no {backend!r} row")
    return f"no kernel runs {asked}: " + "; ".join(reasons)


def _formats(k_format: KVFormat, v_format: KVFormat) -> str:
    return k_format.name if k_format is v_format else f"{k_format.name}/{v_format.name}"
