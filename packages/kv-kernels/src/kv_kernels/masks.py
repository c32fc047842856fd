"""Attention masks over segments: runs of tokens that see, and are seen by, the same tokens.

Nothing here but `SegmentMask.dense` takes memory for every pair of tokens. With nq and nk segments,
``bq x bk`` blocks and ``R x C`` of them, building the block lists takes at most about

    33 bytes x R x C  +  12 bytes x nq x C  +  16 MB

on the host, beside copies of the table: 35 MB for 96,000 queries and keys in blocks of 128.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from kv_core.checks import check_int
from kv_core.errors import DtypeError, ShapeError, SpecError
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Elements that one temporary of the prefix sums may hold.
_SLICE_ELEMENTS = 2**18


def check_block_size(value: object) -> tuple[int, int]:
    """Return the block size of a mask as ``(query tokens, key tokens)``.

    Args:
        value: A positive integer for both, or a pair of them.

    Raises:
        DtypeError: Not an integer or a sequence of integers; bool and strings are neither.
        SpecError: Another number of them than two, or one below 1.
    """
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise SpecError(
                f"block_size must be a number or a pair (query, key), got {len(value)} numbers "
                f"{tuple(value)}; pass one number for both"
            )
        query, key = value
        return (
            check_int("block_size of queries", query, minimum=1),
            check_int("block_size of keys", key, minimum=1),
        )
    size = check_int("block_size", value, minimum=1)
    return size, size


def mask_key(
    table: BoolArray,
    q_lengths: IntArray,
    kv_lengths: IntArray,
    block_size: tuple[int, int],
    device: torch.device,
) -> bytes:
    """Return a hash of all that a mask is made of, its version aside."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(f"{table.shape} {block_size} {device} ".encode())
    for part in (table, q_lengths, kv_lengths):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SegmentMask:
    """Who sees whom, for pairs of segments of queries and keys.

    A query token sees a key token where ``table[q_segment[query], kv_segment[key]]``. Everything
    else, the dense mask and the block lists, follows from the table and the segments' lengths.

    Attributes:
        table: bool ``[nq + 1, nk + 1]``. The last row and column are the padding segment, which
            sees nothing and is seen by nothing.
        q_segment: int32 segment of each query token, and nq up to a whole number of blocks, so that
            a kernel that works in blocks never reads past the end.
        kv_segment: The same of each key token, with nk.
        q_len: Number of query tokens.
        kv_len: Number of key tokens.
        block_size: Tokens of a block, ``(queries, keys)``.
        version: What the caller says this mask describes; see `stamped`.
    """

    table: Tensor
    q_segment: Tensor
    kv_segment: Tensor
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    version: int
    _body: "_Body"

    @classmethod
    def build(
        cls,
        table: BoolArray,
        q_lengths: IntArray | Sequence[int],
        kv_lengths: IntArray | Sequence[int],
        *,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
        version: int = 0,
    ) -> "SegmentMask":
        """Make a mask from a table over segments and their lengths.

        Args:
            table: bool ``[nq, nk]``, True where the tokens of a query segment see those of a key
                segment. Copied.
            q_lengths: Tokens of each query segment, ``[nq]`` integers.
            kv_lengths: Tokens of each key segment, ``[nk]`` integers.
            block_size: Tokens of a block of the block lists, a number or ``(queries, keys)``. Any
                size works, also one that does not divide the lengths or exceeds them.
            device: Where the table, the segments and the block lists live.
            version: Kept as it is, for telling a stale mask.

        Raises:
            DtypeError: The table is not bool, or lengths or sizes are not integers.
            ShapeError: There is not one length for each row, and for each column, of the table.
            SpecError: A length is negative, or the block size is not one.
        """
        if not isinstance(table, np.ndarray) or table.dtype != np.bool_:
            got = getattr(table, "dtype", type(table).__name__)
            raise DtypeError(f"table must be a numpy array of bool, got {got}; compare or convert")
        if table.ndim != 2:
            raise ShapeError(f"table must be [nq, nk], got {table.ndim} axes {list(table.shape)}")
        q_lengths = _check_lengths("q_lengths", q_lengths, table.shape[0])
        kv_lengths = _check_lengths("kv_lengths", kv_lengths, table.shape[1])
        sizes = check_block_size(block_size)
        device = torch.device(device)
        check_int("version", version)
        return cls(
            table=torch.from_numpy(np.pad(table, ((0, 1), (0, 1)))).to(device),
            q_segment=_segment_ids(q_lengths, sizes[0]).to(device),
            kv_segment=_segment_ids(kv_lengths, sizes[1]).to(device),
            q_len=int(q_lengths.sum()),
            kv_len=int(kv_lengths.sum()),
            block_size=sizes,
            version=version,
            _body=_Body(table.copy(), q_lengths, kv_lengths),
        )

    def __repr__(self) -> str:
        """Return sizes, block and version."""
        rows, columns = (size - 1 for size in self.table.shape)
        return (
            f"SegmentMask({self.q_len} queries in {rows} segments, {self.kv_len} keys in "
            f"{columns}, block_size={self.block_size}, device={self.device}, "
            f"version={self.version})"
        )

    @property
    def device(self) -> torch.device:
        """Where the mask lives."""
        return self.table.device

    @property
    def key(self) -> bytes:
        """A hash of table, lengths, block size and device; equal keys mean equal masks."""
        body = self._body
        return mask_key(body.table, body.q_lengths, body.kv_lengths, self.block_size, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of table, segments and, once they were asked for, block lists."""
        tensors = [self.table, self.q_segment, self.kv_segment, *self._body.block_lists()]
        return sum(tensor.nbytes for tensor in tensors)

    def stamped(self, version: int) -> "SegmentMask":
        """Return the same mask with another version, sharing all storage and the block lists."""
        return replace(self, version=check_int("version", version))

    def dense(self) -> Tensor:
        """Return the mask of every pair of tokens, bool ``[q_len, kv_len]``."""
        columns = self.table.index_select(1, self.kv_segment[: self.kv_len])
        return columns.index_select(0, self.q_segment[: self.q_len])

    def block_mask(self) -> "BlockMask":
        """Return the mask as FlexAttention takes it, for any batch size and number of heads.

        The lists equal those of ``create_block_mask`` entry by entry, the unused tail of a row
        included. They are made on the first call, then kept and shared with `stamped` copies.
        """
        if self._body.block_mask is None:
            self._body.block_mask = self._build_block_mask()
        return self._body.block_mask

    def _build_block_mask(self) -> "BlockMask":
        # late, because most of flex's import time is of no use to a dense mask
        from torch.nn.attention.flex_attention import BlockMask

        full, partial = _classify(self._body, self.block_size)
        lists: dict[str, Any] = {}
        for prefix, blocks in (("", partial), ("full_", full)):
            for side, rows in (("kv", blocks), ("q", blocks.T)):
                count, indices = _ordered(rows)
                lists[f"{prefix}{side}_num_blocks"] = count.to(self.device)
                lists[f"{prefix}{side}_indices"] = indices.to(self.device)
        table, q_segment, kv_segment = self.table, self.q_segment, self.kv_segment

        def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return table[q_segment[q_idx], kv_segment[kv_idx]]

        return BlockMask(
            seq_lengths=(self.q_len, self.kv_len),
            BLOCK_SIZE=self.block_size,
            mask_mod=sees,
            **lists,
        )


@dataclass(slots=True, eq=False)
class _Body:
    """What a mask was built from, on the host, and its block lists once they are made."""

    table: BoolArray
    q_lengths: IntArray
    kv_lengths: IntArray
    block_mask: "BlockMask | None" = field(default=None)

    def block_lists(self) -> list[Tensor]:
        """Return the tensors of the block mask, if there is one."""
        mask: Any = self.block_mask
        if mask is None:
            return []
        names = [f"{full}{side}_" for full in ("", "full_") for side in ("kv", "q")]
        return [getattr(mask, name + what) for name in names for what in ("num_blocks", "indices")]


def _check_lengths(name: str, lengths: IntArray | Sequence[int], count: int) -> IntArray:
    found = np.array(lengths)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise DtypeError(f"{name} must be integers, got {found.dtype}; convert them")
    if found.shape != (count,):
        raise ShapeError(
            f"{name} must have one length for each of the table's {count} segments, "
            f"got shape {list(found.shape)}"
        )
    if (found < 0).any():
        raise SpecError(f"{name} must not be negative, got {found.min()}")
    return found.astype(np.int64)


def _segment_ids(lengths: IntArray, block: int) -> Tensor:
    """Return the int32 segment of each token, then ``len(lengths)`` up to whole blocks."""
    total = int(lengths.sum())
    ids = np.full(-(-total // block) * block, len(lengths), np.int32)
    ids[:total] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return torch.from_numpy(ids)


def _classify(body: _Body, block_size: tuple[int, int]) -> tuple[BoolArray, BoolArray]:
    """Return which blocks are full and which partial, bool ``[R, C]`` each.

    A block that the end of a sequence cuts holds fewer visible pairs than its size, so that it is
    never full.
    """
    block_q, block_kv = block_size
    keys_seen = _block_sums(body.table.T, body.kv_lengths, block_kv).T  # [nq, C]
    pairs_seen = _block_sums(keys_seen, body.q_lengths, block_q)  # [R, C]
    full = pairs_seen == block_q * block_kv
    return full, (pairs_seen > 0) & ~full


def _block_sums(values: npt.NDArray[Any], lengths: IntArray, block: int) -> IntArray:
    """Sum what each token holds over blocks of tokens, from prefix sums over segments.

    Args:
        values: ``[n, m]``, what every token of a segment holds.
        lengths: ``[n]`` tokens of each segment.
        block: Tokens of a block.

    Returns:
        int64 ``[blocks, m]``; the last block may be cut.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)])  # [n + 1]
    total = int(starts[-1])
    edges = np.minimum(np.arange(-(-total // block) + 1) * block, total)
    # the segment that holds each edge; the end of the sequence counts to the last one
    holder = np.minimum(np.searchsorted(starts, edges, side="right") - 1, max(len(lengths) - 1, 0))
    inside = (edges - starts[holder])[:, None]
    sums = np.zeros((len(edges) - 1, values.shape[1]), np.int64)
    if not sums.size:
        return sums
    width = max(1, _SLICE_ELEMENTS // (len(lengths) + len(edges)))
    for first in range(0, values.shape[1], width):
        part = values[:, first : first + width].astype(np.int64)
        before = np.zeros((len(lengths) + 1, part.shape[1]), np.int64)
        np.cumsum(part * lengths[:, None], axis=0, out=before[1:])
        sums[:, first : first + width] = np.diff(before[holder] + inside * part[holder], axis=0)
    return sums


def _ordered(blocks: BoolArray) -> tuple[Tensor, Tensor]:
    """List the True columns of each row, then the others, both ascending, as torch does.

    Returns:
        int32 counts ``[1, 1, R]`` and int32 columns ``[1, 1, R, C]``.
    """
    counts = blocks.sum(axis=1, dtype=np.int32)
    columns = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(columns)[None, None]
