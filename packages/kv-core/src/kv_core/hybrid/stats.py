"""What a hybrid cache reports about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridStats:
    """What a hybrid cache holds now.

    Attributes:
        slots: Requests that can be served at once.
        used_slots: Requests that are.
        blocks: Blocks of the pool, the null block included.
        used_blocks: Blocks that requests and snapshots hold.
        capacity: Tokens that the blocks can hold.
        length: Tokens of all requests, shared ones counted for each.
        valid: Ring rows of one layer that hold a committed token.
        state_bytes: Allocated for slots: rings, their positions and tails.
        paged_bytes: Allocated for blocks: entries and keys.
        parts: Both, part by part.
        prefix_states: States kept for prefixes.
        prefix_bytes: Allocated for them.
    """

    slots: int
    used_slots: int
    blocks: int
    used_blocks: int
    capacity: int
    length: int
    valid: int
    state_bytes: int
    paged_bytes: int
    parts: dict[str, int]
    prefix_states: int
    prefix_bytes: int
