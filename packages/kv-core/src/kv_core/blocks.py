"""Who holds which block of a pool, and which blocks hold a prefix that can be found again."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from kv_core.checks import check_int
from kv_core.errors import (
    BlockLeak,
    DoubleFree,
    DtypeError,
    OutOfBlocks,
    SnapshotError,
    SpecError,
    StaleHandleError,
)
from kv_core.snapshot import check_state

_SHOWN = 8  # problems that one message lists


class BlockAllocator:
    """Hands out the blocks of one pool, counts who shares each, and remembers published ones.

    A block is reserved (block 0, for padding), used by one owner or more, or free. Its reference
    count is the number of its owners. A used block may be *published* under a digest of what it
    holds; it keeps that identity when it becomes free, until it is handed out again. Free blocks
    are handed out least recently freed first, those that nobody can find before published ones.

    Every call changes all that it names or, when it raises, nothing. Pure host-side bookkeeping:
    no tensor is touched.

    Args:
        blocks: P, all blocks of the pool, a reserved one included.
        reserve_null: Whether block 0 is the null block, which is never handed out.

    Raises:
        SpecError: No block would be left to hand out.
    """

    def __init__(self, blocks: int, *, reserve_null: bool = True) -> None:
        """Start with every block free, and the lowest ids first."""
        self._reserved = int(bool(reserve_null))
        self._blocks = check_int("blocks", blocks, minimum=1 + self._reserved)
        self._holders: dict[int, dict[Hashable, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self._reserved, blocks))
        self._free_published: OrderedDict[int, None] = OrderedDict()
        self._found: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __repr__(self) -> str:
        """Return the size of the pool and its counts."""
        return (
            f"BlockAllocator(blocks={self.blocks}, reserved={self.num_reserved}, "
            f"used={self.num_used}, free={self.num_free}, published={len(self._digests)})"
        )

    @property
    def blocks(self) -> int:
        """P, all blocks of the pool."""
        return self._blocks

    @property
    def num_reserved(self) -> int:
        """Blocks that are never handed out: 1 with a null block, else 0."""
        return self._reserved

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, published ones among them."""
        return len(self._free) + len(self._free_published)

    def count(self, block: int) -> int:
        """Return the reference count of a block: how many owners it has, 0 if it is free."""
        return len(self._holders.get(block, ()))

    def owners(self, block: int) -> tuple[Hashable, ...]:
        """Return who holds a block, longest first; none if it is free."""
        return tuple(self._holders.get(block, ()))

    def is_published(self, block: int) -> bool:
        """Whether the block can be found by a digest, used or free."""
        return block in self._digests

    def allocate(self, count: int, owner: Hashable) -> list[int]:
        """Hand out free blocks; a published one loses its identity in the same moment.

        Args:
            count: How many.
            owner: Who holds them from now on: any hashable.

        Returns:
            Their ids, in the order in which they had become free.

        Raises:
            OutOfBlocks: Fewer are free. Nothing was handed out.
        """
        count = check_int("count", count, minimum=0)
        _check_owner(owner)
        if count > self.num_free:
            raise OutOfBlocks(
                f"{_blocks(count)} must be free for {owner!r}, got {self.num_free} free of "
                f"{self.blocks} ({self.num_used} used, {self.num_reserved} reserved); free some "
                "first, or allocate the layers with more blocks"
            )
        ids = []
        for _ in range(count):
            block, _ = (self._free or self._free_published).popitem(last=False)
            self.unpublish(block)
            self._holders[block] = {owner: None}
            ids.append(block)
        self._settle()
        return ids

    def share(self, ids: Sequence[int], owner: Hashable) -> None:
        """Add an owner to blocks that are used, or free but still published.

        Args:
            ids: Blocks; a free one is taken out of the free ones, with its contents.
            owner: Who holds them as well from now on.

        Raises:
            SpecError: An id outside the pool, the reserved one, one that the owner holds already,
                or one twice.
            StaleHandleError: A block was freed and nothing says what it holds. Nothing has
                changed, here as in the case above.
        """
        _check_owner(owner)
        blocks = self._ids(ids)
        seen: set[int] = set()
        for block in blocks:
            if block < self._reserved:
                raise SpecError(
                    f"block {block} is the null block, which {owner!r} cannot hold; share blocks "
                    "that were allocated"
                )
            if owner in self._holders.get(block, ()) or block in seen:
                raise SpecError(
                    f"block {block} can be shared with {owner!r} once, got it again; name every "
                    "block once and only those that this owner does not hold"
                )
            if block not in self._holders and block not in self._digests:
                raise StaleHandleError(
                    f"block {block} is free, so {owner!r} cannot share what it held; share a block "
                    "while it is used, or publish it first and look it up"
                )
            seen.add(block)
        for block in blocks:
            self._free_published.pop(block, None)
            self._holders.setdefault(block, {})[owner] = None
        self._settle()

    def free(self, ids: Sequence[int], owner: Hashable) -> list[int]:
        """Take an owner off blocks; those without another one become free, the last id first.

        So of a sequence's blocks, given in order, its tail is handed out again before its head,
        and a prefix that others may look up lives longest.

        Args:
            ids: Blocks that the owner holds.
            owner: Who gives them back.

        Returns:
            Those that became free.

        Raises:
            DoubleFree: A block that is free, reserved or held by others only, or one twice; the
                message names block and owner. Nothing has changed.
            SpecError: An id outside the pool. Nothing has changed.
        """
        _check_owner(owner)
        blocks = self._ids(ids)
        seen: set[int] = set()
        for block in blocks:
            holders = self._holders.get(block, {})
            if owner not in holders or block in seen:
                raise DoubleFree(
                    f"block {block} must be held by {owner!r} to be freed, got one that is "
                    f"{self._state(block, again=block in seen)}; free what was allocated or "
                    "shared, once"
                )
            seen.add(block)
        freed = []
        for block in reversed(blocks):
            holders = self._holders[block]
            del holders[owner]
            if not holders:
                del self._holders[block]
                queue = self._free_published if block in self._digests else self._free
                queue[block] = None
                freed.append(block)
        self._settle()
        return freed

    def publish(self, block: int, digest: bytes) -> bool:
        """Let a used block be found by a digest of everything up to its end.

        Args:
            block: A block that is full, its contents final.
            digest: What identifies them; see ``kv_core.prefixes``.

        Returns:
            Whether this block is the one that is found: False if another holds the same already.

        Raises:
            StaleHandleError: The block is not used.
            SpecError: It is published under another digest. Nothing has changed in either case.
        """
        if block not in self._holders:
            raise StaleHandleError(
                f"block {block} must be used to be published, got one that is "
                f"{self._state(block)}; publish a sequence before it is freed"
            )
        known = self._digests.get(block, digest)
        if known != digest:
            raise SpecError(
                f"block {block} is published as {known.hex()[:12]}, got {digest.hex()[:12]}; "
                "unpublish() it before its contents change"
            )
        if self._found.setdefault(digest, block) != block:
            return False
        self._digests[block] = digest
        return True

    def unpublish(self, block: int) -> None:
        """Forget what a block holds, if it was published."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._found[digest]
            if block in self._free_published:
                del self._free_published[block]
                self._free[block] = None

    def lookup(self, digest: bytes) -> int | None:
        """Return the block that was published under a digest and still holds it, or None."""
        return self._found.get(digest)

    def check(self, owners: Iterable[Hashable] | None = None) -> None:
        """Look at every block once.

        Args:
            owners: All that may hold blocks now; None does not ask.

        Raises:
            BlockLeak: A block is held by somebody else, or the records contradict each other; the
                message names blocks and owners.
        """
        found = [
            f"block {block} is recorded {places} times"
            for block in range(self.blocks)
            if (places := self._places(block)) != 1
        ]
        found += [
            f"block {block} is used by nobody" for block in self._holders if not self.count(block)
        ]
        found += [
            f"block {block} is published but {self._state(block)}"
            for block in self._digests
            if block not in self._holders and block not in self._free_published
        ]
        found += [
            f"block {block} is free as published={block in self._free_published} but its identity "
            f"says {block in self._digests}"
            for block in (*self._free, *self._free_published)
            if (block in self._free_published) != (block in self._digests)
        ]
        if {block: digest for digest, block in self._found.items()} != self._digests:
            found.append("digests and blocks disagree")
        if owners is not None:
            known = set(owners)
            found += [
                f"block {block} is held by {owner!r}, who is gone"
                for block, holders in self._holders.items()
                for owner in holders
                if owner not in known
            ]
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise BlockLeak(
                f"every block must be free, reserved or held by an owner that is known, got "
                f"{'; '.join(found[:_SHOWN])}{more}; free what each owner holds before it goes"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return all records, the order of the free blocks included.

        Raises:
            SnapshotError: An owner is neither a string nor an integer.
        """
        self._check_storable()
        meta = {
            "spec": self._spec(),
            "holders": [[block, list(owners)] for block, owners in self._holders.items()],
            "free": list(self._free),
            "free_published": list(self._free_published),
            "digests": [[block, digest.hex()] for block, digest in self._digests.items()],
        }
        return {"meta": meta, "tensors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the records of an allocator of the same size.

        Raises:
            SnapshotError: Not such a state, or one that contradicts itself. Nothing has changed.
        """
        meta, _ = check_state("BlockAllocator", state, self._spec())
        twin = BlockAllocator(self.blocks, reserve_null=bool(self._reserved))
        try:
            twin._holders = {
                _whole(block): dict.fromkeys(owners) for block, owners in meta["holders"]
            }
            twin._free = OrderedDict.fromkeys(map(_whole, meta["free"]))
            twin._free_published = OrderedDict.fromkeys(map(_whole, meta["free_published"]))
            twin._digests = {
                _whole(block): bytes.fromhex(digest) for block, digest in meta["digests"]
            }
            twin._found = {digest: block for block, digest in twin._digests.items()}
            twin._check_storable()
            twin._settle()
            twin.check()
        except (KeyError, TypeError, ValueError, BlockLeak) as error:
            raise SnapshotError(
                "meta of the state must have holders, free, free_published and digests that name "
                f"every block once, got {error!r}; load a state that was not edited"
            ) from error
        self.__dict__.update(twin.__dict__)

    def _check_storable(self) -> None:
        for block, owners in self._holders.items():
            for owner in owners:
                check_storable(owner, f"the owner of block {block}")

    def _spec(self) -> dict[str, Any]:
        kind = {"kind": "BlockAllocator", "blocks": self.blocks}
        return {**kind, "reserve_null": bool(self._reserved)}

    def _ids(self, ids: Sequence[int]) -> list[int]:
        last = self.blocks - 1
        return [check_int(f"ids[{i}]", id, minimum=0, maximum=last) for i, id in enumerate(ids)]

    def _places(self, block: int) -> int:
        places = (self._holders, self._free, self._free_published)
        return (block < self._reserved) + sum(block in place for place in places)

    def _state(self, block: int, *, again: bool = False) -> str:
        if block < self._reserved:
            return "reserved"
        if again:
            return "named twice"
        owners = self.owners(block)
        return "held by " + ", ".join(map(repr, owners[:_SHOWN])) if owners else "free"

    def _settle(self) -> None:
        # on every call, also under python -O: a count that drifts is found where it happens
        total = self.num_free + self.num_used + self.num_reserved
        if total != self.blocks:
            raise BlockLeak(
                f"free, used and reserved blocks must add up to {self.blocks}, got "
                f"{self.num_free} + {self.num_used} + {self.num_reserved}; this is a fault of "
                "kv-core, so report it with the calls before it"
            )


def check_storable(owner: object, name: str) -> None:
    """Check that an id comes back from JSON as it was.

    Raises:
        SnapshotError: Neither a string nor an integer.
    """
    if isinstance(owner, bool) or not isinstance(owner, (str, int)):
        raise SnapshotError(
            f"{name} must be a str or int to be saved, got {owner!r}; use such request ids where "
            "states are saved"
        )


def _check_owner(owner: Hashable) -> None:
    try:
        hash(owner)
    except TypeError as error:
        raise DtypeError(
            f"owner must be hashable, got {type(owner).__name__}; pass the request's id"
        ) from error


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"block ids must be whole numbers, got {value!r}")
    return value
