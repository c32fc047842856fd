"""Digests that identify a block by all tokens from the start of its sequence to its end."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kv_core.errors import DtypeError, ShapeError

Ids = NDArray[np.int64]
TokenIds = Sequence[int] | NDArray[np.integer] | Tensor  # what callers pass

ROOT = bytes(32)  # what the first block of a sequence is chained to


def chain(
    ids: "Ids | array[int]", block_size: int, digests: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """Yield the digest of each full block: SHA-256 of the one before it and its token ids.

    A digest stands for the block's own ids and everything before them, and no two different
    prefixes are known to share one, so equal digests need no second comparison.

    Args:
        ids: Token ids of a sequence from its start, INT64.
        block_size: N.
        digests: Of its first blocks, if they are known; those are not repeated.
    """
    parent = digests[-1] if digests else ROOT
    for block in range(len(digests), len(ids) // block_size):
        tokens = ids[block * block_size : (block + 1) * block_size].tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        yield parent


def token_ids(name: str, given: object) -> Ids:
    """Return token ids as INT64.

    Args:
        name: What they are called in messages.
        given: A sequence, numpy array or CPU tensor of integers on one axis.

    Raises:
        DtypeError: Something else, or a tensor on a device that would have to be waited for.
        ShapeError: Another number of axes.
    """
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise DtypeError(
                f"{name} must be on the CPU, got {given.device}; keep the ids that were sampled on "
                "the host, or pass how many there are"
            )
        given = given.detach()
        given = given.float().numpy() if given.is_floating_point() else given.numpy()
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
        raise DtypeError(
            f"{name} must be a number of tokens or their ids, got {type(given).__name__}; pass an "
            "int, or a list of ints"
        )
    try:
        ids = np.asarray(given if len(given) else np.empty(0, np.int64))
    except ValueError:  # lists of unequal lengths
        ids = np.empty((0, 0))
    if ids.ndim != 1:
        raise ShapeError(
            f"{name} must be token ids [T] on one axis, got {ids.ndim} axes; pass those of one "
            "sequence"
        )
    if ids.dtype.kind not in "iu" or not np.can_cast(ids.dtype, np.int64):
        raise DtypeError(
            f"{name} must be integers of at most 64 bits, got {ids.dtype}; pass token ids as int"
        )
    return ids.astype(np.int64)
