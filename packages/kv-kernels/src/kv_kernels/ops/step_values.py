"""Checked mode: the values of a step, read on the host and compared with what they point into."""

import torch
from kv_core.errors import SpecError
from kv_core.layer import KVLayer
from kv_core.step import Step
from torch import Tensor


def check_slots(layer: KVLayer, step: Step) -> None:
    """Check that each slot is -1, or one that no other token has and no padding block holds.

    Raises:
        SpecError: A slot is not; the message has the token, the slot and the bound.
    """
    slots = step.slots.tolist()
    N, capacity = layer.block_size, layer.num_blocks * layer.block_size
    seen: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if slot == -1:
            continue
        if not 0 <= slot < capacity:
            raise SpecError(
                f"slots[{token}] must be -1 or from 0 to {capacity - 1} (P={layer.num_blocks} "
                f"blocks of N={N}), got {slot}; give the token block * {N} + offset, or -1 to "
                "store nothing"
            )
        if step.null_block and slot < N:
            raise SpecError(
                f"slots[{token}] must not lie in block 0, which is kept for padding, got {slot}; "
                "give the token a slot of its sequence's blocks, or -1 to store nothing"
            )
        if slot in seen:
            raise SpecError(
                f"slots must differ, got {slot} for tokens {seen[slot]} and {token}; a row that "
                "two tokens write is undefined"
            )
        seen[slot] = token


def check_positions(positions: Tensor, rows: int, slots: Tensor | None = None) -> None:
    """Check that the position of each token, of those that are stored, is a row of the tables.

    Raises:
        SpecError: One is not; the message has the token, the position and the bound.
    """
    stored = [True] * positions.shape[0] if slots is None else (slots >= 0).tolist()
    for token, position in enumerate(positions.tolist()):
        if stored[token] and not 0 <= position < rows:
            raise SpecError(
                f"positions[{token}] must be from 0 to {rows - 1}, the rows of cos, got "
                f"{position}; build the tables for at least {position + 1} positions"
                if position >= 0
                else f"positions[{token}] must be at least 0, got {position}; count from 0"
            )


def check_finite(name: str, rows: Tensor, step: Step) -> None:
    """Check that ``[T, heads, D]`` activations of stored tokens can be quantised.

    Raises:
        SpecError: One is NaN or infinite; the message has the token and the head.
    """
    wrong = ~torch.isfinite(rows).all(-1) & (step.slots >= 0)[:, None]
    if bool(wrong.any()):
        token, head = wrong.nonzero()[0].tolist()
        raise SpecError(
            f"{name} must be finite to be quantised, got NaN or infinity in token {token}, head "
            f"{head}; find where the model made it, or pass checked=False to store a NaN scale"
        )


def check_tables(layer: KVLayer, step: Step) -> None:
    """Check the length of each sequence, and the block ids that it uses.

    Raises:
        SpecError: A length does not fit the table's row, or an id is outside the pool or twice in
            one row; the message has the sequence, the value and the bound.
    """
    lengths, table = step.context_lens.tolist(), step.block_table.tolist()
    M, N, P = step.block_table.shape[1], layer.block_size, layer.num_blocks
    for b, (length, row) in enumerate(zip(lengths, table, strict=True)):
        if not 0 <= length <= M * N:
            raise SpecError(
                f"context_lens[{b}] must be from 0 to {M * N} (M={M} blocks of N={N}), got "
                f"{length}; widen block_table or shorten the sequence"
            )
        if length > step.max_context:
            raise SpecError(
                f"context_lens[{b}] must be at most max_context={step.max_context}, got {length}; "
                "raise the bound"
            )
        used = row[: -(-length // N)]
        for i, block in enumerate(used):
            if not 0 <= block < P:
                raise SpecError(
                    f"block_table[{b}, {i}] must be from 0 to {P - 1}, the blocks of the layer, "
                    f"got {block}; only entries past {len(used)} blocks may be anything"
                )
            first = used.index(block)
            if first < i:
                raise SpecError(
                    f"block_table[{b}] must name each block once, got {block} at {first} and {i}; "
                    f"give every {N} tokens a block of their own"
                )


def check_queries(step: Step) -> None:
    """Check where the new tokens of each sequence begin and end.

    Raises:
        SpecError: ``cu_seqlens`` does not begin at 0, falls, or ends past the tokens; or a
            sequence has more new tokens than stored ones, or than the bound says.
    """
    edges, lengths = step.cu_seqlens.tolist(), step.context_lens.tolist()
    if edges[0] != 0:
        raise SpecError(f"cu_seqlens[0] must be 0, got {edges[0]}; it counts from the first token")
    for b, length in enumerate(lengths):
        count = edges[b + 1] - edges[b]
        if count < 0:
            raise SpecError(
                f"cu_seqlens must not fall, got {edges[b]} and then {edges[b + 1]} at sequence "
                f"{b}; repeat the last value for a sequence without new tokens"
            )
        if count > length:
            raise SpecError(
                f"sequence {b} must store at least its {count} new tokens, got context_lens "
                f"{length}; context_lens counts the new tokens too"
            )
        if count > step.max_query:
            raise SpecError(
                f"sequence {b} must have at most max_query={step.max_query} new tokens, got "
                f"{count}; raise the bound"
            )
    if edges[-1] > step.num_tokens:
        raise SpecError(
            f"cu_seqlens must end at T={step.num_tokens} or before, got {edges[-1]}; give every "
            "new token a row"
        )
