"""Print which row each operation uses on this machine, and why each other row cannot be used."""

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, version

import torch
from kv_core.spec import KVFormat

from kv_kernels.registry import ROWS, Query, explain

_WIDTH = 100
_COLUMNS = (16, 8, 8)  # op, format, backend; the verdict takes the rest


def main() -> None:
    """Print the table for a call of the usual size: D 128, mask blocks of 128."""
    print(_machine(), end="\n\n")
    print(_line("op", "format", "backend", "on this machine"))
    shown = ""
    for op, k_format, v_format in dict.fromkeys((r.op, r.k_format, r.v_format) for r in ROWS):
        label = k_format.name if k_format is v_format else f"{k_format.name}/{v_format.name}"
        used: set[str] = set()
        for row, reason in explain(_usual_query(op, k_format, v_format)):
            verdict = f"no: {reason}" if reason else "used" if not used else "on request"
            if verdict == "on request" and row.backend in used:
                continue
            if reason is None:
                used.add(row.backend)
            print(_line("" if shown == op else op, label, row.backend, verdict))
            shown, label = op, ""


def _usual_query(op: str, k_format: KVFormat, v_format: KVFormat) -> Query:
    is_cuda = torch.cuda.is_available()
    return Query(
        op=op,
        k_format=k_format,
        v_format=v_format,
        device="cuda" if is_cuda else "cpu",
        capability=torch.cuda.get_device_capability() if is_cuda else None,
        dtype=torch.bfloat16 if k_format.is_quantized else k_format.dtype,
        k_dim=128,
        v_dim=128,
        block_size=(128, 128),
    )


def _machine() -> str:
    device = platform.machine() + " CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = [f"{name} {_version(name)}" for name in ("kv-kernels", "torch", "triton")]
    return f"{device}; {', '.join(versions)}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def _line(op: str, kv_format: str, backend: str, verdict: str) -> str:
    cells = zip((op, kv_format, backend), _COLUMNS, strict=True)
    head = "".join(f"{cell:<{width}}" for cell, width in cells)
    return textwrap.fill(
        verdict, _WIDTH, initial_indent=head, subsequent_indent=" " * sum(_COLUMNS)
    )


if __name__ == "__main__":
    main()
