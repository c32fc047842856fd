"""What is known of one sequence: how long it is, where its blocks are, which tokens it holds."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_core.prefixes import Ids, chain


@dataclass(slots=True)
class SequenceState:
    """One sequence of a table. Its blocks hold the tokens ``[dropped, length)``.

    Attributes:
        row: ``[M]`` INT32 block ids in order; the first ``held`` are used, the rest are 0.
        held: Blocks that it holds.
        length: Tokens appended, those that were evicted included.
        dropped: Tokens evicted from its front, whole blocks only.
        ids: The token ids from its start on, as far as they are known.
        digests: Of the first full blocks of ``ids``; made when they are first asked for.
    """

    row: NDArray[np.int32]
    held: int = 0
    length: int = 0
    dropped: int = 0
    ids: "array[int]" = field(default_factory=lambda: array("q"))
    digests: list[bytes] = field(default_factory=list)

    @classmethod
    def empty(cls, max_blocks: int) -> "SequenceState":
        """Return a sequence without tokens, whose row has room for ``max_blocks``."""
        return cls(np.zeros(max_blocks, np.int32))

    def copy(self) -> "SequenceState":
        """Return the same sequence, unaffected by what happens to this one."""
        row, ids, digests = self.row.copy(), self.ids[:], list(self.digests)
        return SequenceState(row, self.held, self.length, self.dropped, ids, digests)

    @property
    def blocks(self) -> list[int]:
        """Its block ids in order."""
        ids: list[int] = self.row[: self.held].tolist()
        return ids

    @property
    def context(self) -> int:
        """Tokens that its blocks hold."""
        return self.length - self.dropped

    def hold(self, blocks: list[int]) -> None:
        """Add blocks behind those it has."""
        self.row[self.held : self.held + len(blocks)] = blocks
        self.held += len(blocks)

    def replace_last(self, block: int) -> None:
        """Put another block in the place of its last one."""
        self.row[self.held - 1] = block

    def drop(self, count: int, block_size: int) -> None:
        """Let go of its first ``count`` blocks, all of them full."""
        rest = self.blocks[count:]
        self.row[: len(rest)], self.row[len(rest) :] = rest, 0
        self.held = len(rest)
        self.dropped += count * block_size

    def cut(self, length: int, held: int, block_size: int) -> None:
        """Let go of every token from ``length`` on, and of all but ``held`` blocks."""
        self.row[held:] = 0
        self.held, self.length = held, length
        del self.ids[length:]
        del self.digests[length // block_size :]

    def extend(self, count: int, ids: Ids | None) -> None:
        """Count new tokens; their ids are kept if those of all tokens before are known."""
        if ids is not None and len(self.ids) == self.length:
            self.ids.frombytes(ids.tobytes())
        self.length += count

    def chained(self, block_size: int) -> list[bytes]:
        """Return the digest of each full block whose token ids are known."""
        self.digests.extend(chain(self.ids, block_size, self.digests))
        return self.digests
