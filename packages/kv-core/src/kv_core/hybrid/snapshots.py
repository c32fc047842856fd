"""State of a request set aside: to go on from it later, or to reuse it for a common prefix."""

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import Tensor

LayerStates = list[dict[str, Tensor]]  # by layer, as StateCachePool.capture returns them


@dataclass(eq=False, slots=True)
class HybridSnapshot:
    """A request as it was after ``length`` tokens: its blocks, held, and a copy of its state.

    The blocks stay allocated until ``KVCacheManager.release``.

    Attributes:
        length: Tokens, a multiple of a block's.
        blocks: Block ids in order.
        layers: State of each layer.
        is_held: Whether the blocks are still held.
    """

    length: int
    blocks: tuple[int, ...]
    layers: LayerStates = field(repr=False)
    is_held: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the copied state; blocks are shared."""
        return states_nbytes(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """How much of a prompt the cache holds, part by part, and what there is to run.

    A prefix is only as long as the shortest part of the state: entries without the window ring
    and the overlap of their boundary are not enough.

    Attributes:
        tokens: Tokens at the front that need no entries written; 0 is a miss.
        start: Position of the first token to run.
        parts: Tokens found by part: "entries" in blocks, "state" with ring and overlap.
    """

    tokens: int
    start: int
    parts: dict[str, int]

    @property
    def replay(self) -> int:
        """Tokens of the prefix that have to run again, only to rebuild the state."""
        return self.tokens - self.start

    @property
    def limit(self) -> str:
        """The part that was found for the fewest tokens, "state" or "entries"."""
        return min(self.parts, key=lambda part: (self.parts[part], part == "state"))


class PrefixStates:
    """States by the digest of the block they follow, the least recently used dropped first.

    Args:
        limit: Most states to keep.
    """

    def __init__(self, limit: int) -> None:
        """Start with none."""
        self._limit = limit
        self._states: OrderedDict[bytes, LayerStates] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        """Whether there is a state after this block."""
        return digest in self._states

    def __len__(self) -> int:
        """Return how many states are kept."""
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(map(states_nbytes, self._states.values()))

    def put(self, digest: bytes, layers: LayerStates) -> None:
        """Keep a state, and drop the one that was used longest ago if there are too many."""
        self._states[digest] = layers
        self._states.move_to_end(digest)
        while len(self._states) > self._limit:
            self._states.popitem(last=False)

    def take(self, digest: bytes) -> LayerStates:
        """Return a state and count it as used."""
        self._states.move_to_end(digest)
        return self._states[digest]

    def drop(self, digest: bytes) -> None:
        """Forget a state, if there is one."""
        self._states.pop(digest, None)

    def digests(self) -> list[bytes]:
        """Return the digests of all states, the least recently used first."""
        return list(self._states)

    def items(self) -> list[tuple[bytes, LayerStates]]:
        """Return all states, the least recently used first."""
        return list(self._states.items())


def states_nbytes(layers: LayerStates) -> int:
    """Return the bytes of the states of all layers."""
    return sum(
        tensor.numel() * tensor.element_size() for layer in layers for tensor in layer.values()
    )
