"""What flush_compression means: kv-core's codecs, and its scatter by slot."""

from kv_core.hybrid import reference
from kv_core.hybrid.keys import KeyFormat, KeyTensors, encode_keys
from kv_core.hybrid.rows import RowFormat, RowTensors, encode_rows
from torch import Tensor


def run(
    entries: Tensor,
    keys: Tensor | None,
    slots: Tensor,
    pool: RowTensors,
    stored: KeyTensors | None,
    global_scale: Tensor | None,
    row_format: RowFormat,
    key_format: KeyFormat | None,
    group: int,
) -> None:
    """Store entries and keys.

    Args:
        entries: ``[n, D]``.
        keys: ``[n, I]`` or None.
        slots: ``[n]`` rows of the pool, ``block * N + entry % N``; -1 stores nothing.
        pool: ``[P, N, ...]``; written.
        stored: ``[P, N, ...]`` of the keys; written.
        global_scale: ``[1]`` of NVFP4 keys.
        row_format: How entries are stored.
        key_format: How keys are stored, None without keys.
        group: Channels of an FP8 entry that share a scale.
    """
    rope_dim = 0 if pool.rope is None else pool.rope.shape[-1]
    reference.flush_rows(pool, encode_rows(entries, row_format, rope_dim, group), slots)
    if keys is not None and stored is not None and key_format is not None:
        reference.flush_rows(stored, encode_keys(keys, key_format, global_scale), slots)
