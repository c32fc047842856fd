"""What the Triton rows can run, and why not; imports no Triton."""

import functools
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from kv_core.spec import KVFormat

from kv_kernels.registry import Query

MAX_HEAD = 256
MAX_ROW = 512  # D of a hybrid cache's rows
MAX_INDEX_HEADS, MAX_INDEX = 128, 256  # heads and width of an indexer's queries

_HYBRID = (
    "append_swa",
    "append_tail",
    "compress",
    "flush_compression",
    "indexer_topk",
    "hybrid_attention",
)

_VARIABLE = "TRITON_INTERPRET"
_YES = ("1", "y", "yes", "on", "true")  # as Triton reads it


def rejects_cuda(query: Query) -> str | None:
    """Say why a compiled kernel cannot run ``query`` on a CUDA device, or None if it can."""
    if query.device != "cuda":
        return f"(CUDA) needs a CUDA device, got {query.device}"
    if query.capability is not None and query.capability < (8, 0):
        return "(CUDA) needs compute capability 8.0 or newer, got {}.{}".format(*query.capability)
    if not _is_installed():
        return "(CUDA) needs triton, which is not installed"
    if _interprets():
        return f"(CUDA) cannot compile while {_VARIABLE} is set; unset it and start Python again"
    return _limits("(CUDA)", query)


def rejects_interpreted(query: Query) -> str | None:
    """Say why Triton's interpreter cannot run ``query`` on the CPU, or None if it can."""
    if query.device != "cpu":
        return f"(interpreter) needs the CPU, got {query.device}"
    if not _is_installed():
        return "(interpreter) needs triton, which is not installed"
    if not _interprets():
        if _is_asked():
            return (
                f"(interpreter) needs {_VARIABLE}=1 from before Triton is imported, and it was set "
                "after that; set it where Python is started"
            )
        return f"(interpreter) needs {_VARIABLE}=1 where Python is started, and it is not set"
    return _clash() or _limits("(interpreter)", query)


def _limits(mode: str, query: Query) -> str | None:
    if not query.unit_stride:
        return f"{mode} needs the elements of the last axis next to each other, got another stride"
    if query.op in _HYBRID:
        return _hybrid_limits(mode, query)
    if query.k_dim > MAX_HEAD:
        return f"{mode} takes D up to {MAX_HEAD}, got {query.k_dim}"
    if query.op == "paged_decode_attention":
        for name, fmt in (("keys", query.k_format), ("values", query.v_format)):
            assert isinstance(fmt, KVFormat)
            if not fmt.is_quantized and fmt.dtype != query.dtype:
                ours, theirs = (str(d).removeprefix("torch.") for d in (query.dtype, fmt.dtype))
                return f"{mode} needs {name} in the dtype of the queries ({ours}), got {theirs}"
    return None


def _hybrid_limits(mode: str, query: Query) -> str | None:
    if query.op == "indexer_topk":
        if query.group > MAX_INDEX_HEADS:
            return f"{mode} takes up to {MAX_INDEX_HEADS} indexer heads, got {query.group}"
        if query.k_dim > MAX_INDEX:
            return f"{mode} takes I up to {MAX_INDEX}, got {query.k_dim}"
    elif query.op == "append_tail":
        if query.k_dim > 2 * MAX_ROW:
            return f"{mode} takes values up to {2 * MAX_ROW} wide, got {query.k_dim}"
    elif query.k_dim > MAX_ROW:
        return f"{mode} takes D up to {MAX_ROW}, got {query.k_dim}"
    if query.op in ("compress", "hybrid_attention") and query.k_dim % 2:
        return f"{mode} takes an even D, for channels are rotated in pairs, got {query.k_dim}"
    return None


def _is_asked() -> bool:
    return os.environ.get(_VARIABLE, "").lower() in _YES


def _interprets() -> bool:
    """Whether kernels are interpreted: decided once, when Triton is imported."""
    language = sys.modules.get("triton.language")
    if language is None or not hasattr(language, "cdiv"):
        return _is_asked()
    return type(language.cdiv).__name__ == "InterpretedFunction"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _clash() -> str | None:
    """Say which installed versions do not go together, if any."""
    try:
        triton, numpy = version("triton"), version("numpy")
    except PackageNotFoundError:
        return None
    newer = tuple(int(part) for part in numpy.split(".")[:2]) >= (2, 4)
    if triton.startswith("3.6.") and newer:
        return f"(interpreter) of triton {triton} needs numpy below 2.4, got {numpy}"
    return None
