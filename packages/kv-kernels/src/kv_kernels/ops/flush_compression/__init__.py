"""Store the entries that closed in a step, and their indexer keys, in a hybrid cache's pool."""

import torch
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.rows import RowFormat, RowTensors
from torch import Tensor

from kv_kernels.library import call_query, check_activations, dense, refuse_grad, register
from kv_kernels.registry import find


def flush_compression(
    paged: PagedKVPool,
    slots: Tensor,
    entries: Tensor,
    keys: Tensor | None,
    *,
    backend: str | None = None,
) -> None:
    """Encode entries, and keys where the layer has them, and store them by slot.

    ``LayerCacheHandle.flush_compression`` checks the arguments and calls this.

    Args:
        paged: Pool of a layer; written.
        slots: ``[n]`` rows of the pool, ``block * N + entry % N``; -1 stores nothing.
        entries: ``[n, D]`` in FP32, FP16 or BF16.
        keys: ``[n, I]``, for layers with an indexer.
        backend: Name of the row to use, as in all operations.

    Raises:
        DtypeError: A tensor is of another dtype.
        NoKernelError: No row can run the call, ``backend`` cannot, or an input requires grad. In
            every case nothing was written.
    """
    check_activations("entries", entries)
    if keys is not None:
        check_activations("keys", keys)
    refuse_grad("flush_compression", (entries, keys))
    spec, stored = paged.spec, (None, None) if keys is None else paged.keys
    assert stored is not None
    _op(
        entries, keys, slots, *paged.entries, *stored, paged.key_global_scale,
        spec.row_format.name, None if keys is None else spec.key_format.name, spec.row_group,
        backend,
    )  # fmt: skip


def _run(
    entries: Tensor,
    keys: Tensor | None,
    slots: Tensor,
    codes: Tensor,
    rope: Tensor | None,
    scale: Tensor | None,
    key_codes: Tensor | None,
    key_scale: Tensor | None,
    global_scale: Tensor | None,
    row_format: str,
    key_format: str | None,
    group: int,
    backend: str | None,
) -> None:
    row_fmt, pool = RowFormat[row_format], RowTensors(codes, rope, scale)
    key_fmt = None if key_format is None else KeyFormat[key_format]
    stored = None if key_codes is None else KeyTensors(key_codes, key_scale)
    query = call_query(
        "flush_compression", row_fmt, key_fmt or row_fmt, entries.device, entries.dtype,
        entries.shape[1], dense(entries, keys, *pool, *(stored or ())),
    )  # fmt: skip
    run = find(query, backend)
    if entries.shape[0]:
        with torch.no_grad():
            run(entries, keys, slots, pool, stored, global_scale, row_fmt, key_fmt, group)


def _fake(*args: object) -> None:
    """Return nothing, as the operation does."""


_op = register(
    "flush_compression(Tensor entries, Tensor? keys, Tensor slots, Tensor(a!) codes, "
    "Tensor(b!)? rope, Tensor(c!)? scale, Tensor(d!)? key_codes, Tensor(e!)? key_scale, "
    "Tensor? global_scale, str row_format, str? key_format, int group, str? backend) -> ()",
    _run,
    _fake,
)
