"""Print which row each operation uses on this machine, and why each other row cannot be used."""

import platform
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from kv_core.spec import KVFormat

from kv_kernels.registry import ROWS, Format, Query, explain, format_pair

_WIDTH = 100
_INDENT = 4
_BACKEND = 10  # width of a backend's column; the verdict takes the rest
_HYBRID = (
    "append_swa",
    "append_tail",
    "compress",
    "flush_compression",
    "hybrid_attention",
)

Verdicts = tuple[tuple[str, str], ...]  # (backend, verdict), in order of priority


def main() -> None:
    """Print the table for a call of the usual size: D 128 or 512 (hybrid), mask blocks of 128."""
    print(_machine())
    print("Formats of keys/values, or of rows/indexer keys: one name where both are the same.")
    for op in dict.fromkeys(row.op for row in ROWS):
        print(f"\n{op}")
        # formats that are served alike stand together
        alike: dict[Verdicts, list[str]] = {}
        for k_format, v_format in dict.fromkeys(
            (r.k_format, r.v_format) for r in ROWS if r.op == op
        ):
            verdicts = tuple(_verdicts(_usual_query(op, k_format, v_format)))
            alike.setdefault(verdicts, []).append(format_pair(k_format, v_format))
        for verdicts, formats in alike.items():
            print(_wrapped(", ".join(formats), " " * (_INDENT // 2), " " * (_INDENT // 2)))
            for backend, verdict in verdicts:
                head = " " * _INDENT + f"{backend:<{_BACKEND}}"
                print(_wrapped(verdict, head, " " * len(head)))


def _verdicts(query: Query) -> Iterator[tuple[str, str]]:
    """Say of each row whether it is used, could be asked for, or cannot run."""
    able: set[str] = set()
    for row, reason in explain(query):
        if reason is not None:
            yield row.backend, f"no: {reason}"
        elif row.backend not in able:
            yield row.backend, "on request" if able else "used"
            able.add(row.backend)


def _usual_query(op: str, k_format: Format, v_format: Format) -> Query:
    is_cuda = torch.cuda.is_available()
    floating = [
        fmt.dtype
        for fmt in (k_format, v_format)
        if isinstance(fmt, KVFormat) and not fmt.is_quantized
    ]
    head_dim = 512 if op in _HYBRID else 128
    return Query(
        op=op,
        k_format=k_format,
        v_format=v_format,
        device="cuda" if is_cuda else "cpu",
        capability=torch.cuda.get_device_capability() if is_cuda else None,
        dtype=floating[0] if floating else torch.bfloat16,
        k_dim=head_dim,
        v_dim=head_dim,
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


def _wrapped(text: str, head: str, indent: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=indent)


if __name__ == "__main__":
    main()
