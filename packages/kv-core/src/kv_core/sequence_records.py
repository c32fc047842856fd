"""The sequences of a table as a snapshot has them, and whether they agree with an allocator."""

from array import array
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_core.blocks import BlockAllocator, check_storable
from kv_core.checks import check_int
from kv_core.errors import BlockLeak, SnapshotError
from kv_core.sequence_state import SequenceState

Sequences = dict[Hashable, SequenceState]


def check_sequences(
    sequences: Mapping[Hashable, SequenceState], allocator: BlockAllocator, block_size: int
) -> None:
    """Compare the sequences with what the allocator knows, block by block.

    Raises:
        BlockLeak: A block is held by nobody that is known, by too few or too many, or counts do
            not add up; the message names blocks and requests.
    """
    allocator.check(sequences)
    held: dict[Hashable, list[int]] = {request: [] for request in sequences}
    for block in range(allocator.blocks):
        for owner in allocator.owners(block):
            held[owner].append(block)
    for request, state in sequences.items():
        needs = -(-state.context // block_size)
        if sorted(state.blocks) != held[request] or state.held != needs:
            raise BlockLeak(
                f"request {request!r} must hold {needs} blocks for {state.context} tokens, got "
                f"{state.blocks} in its row and {held[request]} in the allocator; change blocks "
                "through the table only"
            )


def to_records(sequences: Sequences) -> tuple[list[list[Any]], Tensor]:
    """Return a row for each sequence, as JSON has it, and all their token ids.

    Raises:
        SnapshotError: A request is neither a string nor an integer.
    """
    for request in sequences:
        check_storable(request, "a request")
    rows = [
        [request, state.length, state.dropped, state.blocks, len(state.ids)]
        for request, state in sequences.items()
    ]
    ids = [np.array(state.ids, np.int64) for state in sequences.values()]
    return rows, torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids]))


def from_records(
    rows: Any, ids: Any, *, allocator: BlockAllocator, block_size: int, max_blocks: int
) -> Sequences:
    """Return the sequences that ``to_records`` described.

    Raises:
        SnapshotError: They contradict themselves, their ids or the allocator.
    """
    result: Sequences = {}
    try:
        stored = ids.to("cpu", torch.int64).numpy()
        for request, length, dropped, blocks, known in rows:
            for number in (length, dropped, known):
                check_int(f"a count of {request!r}", number, minimum=0)
            if dropped > length or known > min(length, len(stored)):
                raise ValueError(f"{request!r} with {length=}, {dropped=}, {known=}")
            state = SequenceState.empty(max_blocks)
            state.hold(blocks)
            state.length, state.dropped = length, dropped
            state.ids = array("q", stored[:known].tolist())
            result[request], stored = state, stored[known:]
        if len(stored):
            raise ValueError(f"{len(stored)} ids too many")
        check_sequences(result, allocator, block_size)
    except (AttributeError, OverflowError, TypeError, ValueError, BlockLeak) as error:
        raise SnapshotError(
            "sequences of the state must be [request, length, dropped, blocks, known ids] and "
            f"agree with its allocator and its tensor 'ids', got {error!r}; load a state that was "
            "not edited"
        ) from error
    return result
