"""Whether torch's own paged attention, ``torch.nn.attention.varlen.varlen_attn``, can be used."""

import functools
import importlib
import inspect

from kv_kernels.registry import Query

TARGET = "torch.nn.attention.varlen:varlen_attn"

_NEEDED = ("seqused_k", "block_table", "window_size", "enable_gqa", "num_splits")


def rejects(query: Query) -> str | None:
    """Say why torch's function cannot run ``query``: it has not been proven here on a GPU yet.

    By torch's documentation 2.10 has the function without paging, and 2.12 with all that is needed.
    """
    if query.device != "cuda":
        return f"needs a CUDA device, got {query.device}"
    missing = missing_parameters()
    if missing:
        return f"needs a newer torch: varlen_attn has no {', '.join(missing)}"
    return "is not yet checked against the torch row on a GPU"


@functools.cache
def missing_parameters() -> tuple[str, ...]:
    """Return what this torch's ``varlen_attn`` lacks; all of it where there is no such function."""
    module, name = TARGET.split(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return _NEEDED
    known = inspect.signature(function).parameters
    return tuple(parameter for parameter in _NEEDED if parameter not in known)
