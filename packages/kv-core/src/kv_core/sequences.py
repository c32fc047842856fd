"""Which sequences there are, where each one's tokens are stored, and the step that adds more."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kv_core.append_plan import RowPlan, find_prefix, plan_append, unseen
from kv_core.blocks import BlockAllocator
from kv_core.checks import check_int
from kv_core.errors import (
    CapacityError,
    DtypeError,
    FrozenError,
    LayerKindError,
    RollbackTooDeep,
    SpecError,
    StaleHandleError,
    UnknownRequest,
)
from kv_core.layer import KVLayer, grown_capacity
from kv_core.layer_group import check_group
from kv_core.prefixes import Ids, TokenIds, token_ids
from kv_core.sequence_records import check_sequences, from_records, to_records
from kv_core.sequence_state import SequenceState
from kv_core.snapshot import check_state
from kv_core.step import Step
from kv_core.step_buffers import StepBuffers

_LEAST_CONTEXT = 256  # tokens; below this the bound of the context never changes


class SequenceTable:
    """The sequences of a group of layers: their lengths, their blocks, and one step at a time.

    All layers of the group store the same tokens in the same blocks, so one table serves them
    all; layers with another sliding window take a table of their own. Requests may be called
    anything hashable. Every call validates and plans before it changes anything: one that raises
    leaves bytes, counters and the order of free blocks as they were. Device tensors are written
    and never read, so nothing here waits for a device.

    Blocks are shared by ``fork`` and by prefixes that were published. No write ever lands in a
    block that two sequences hold: ``append`` copies it first, on all layers. A published block
    that its only holder is about to write loses its identity instead.

    Tables of contiguous layers have one block for each sequence and no null block; nothing is
    published there, so ``publish`` and ``lookup`` say 0.

    Args:
        layers: The layers, equal in kind, blocks, block size and device; formats may differ.
        sequences: B, requests that one step may have.
        max_blocks: M, blocks that a sequence may hold; see ``blocks_for``. 1 for contiguous
            layers, where it may be left out.
        step_tokens: T, tokens that one step may have; by default all that the pool can hold, at
            16 bytes each.
        window: Tokens that a query sees, itself included (``window_left + 1``). ``append`` gives
            back the blocks that a request's next query does not see. None keeps all.

    Attributes:
        allocator: Who holds which block. Read it; to change it is the table's business.

    Raises:
        SpecError: No layers, layers of different sizes or devices, or a size that is not possible.
        LayerKindError: Paged and contiguous layers together.
        DtypeError: Something that is not a ``KVLayer``, or not an integer.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        *,
        sequences: int,
        max_blocks: int | None = None,
        step_tokens: int | None = None,
        window: int | None = None,
    ) -> None:
        """Check the layers and allocate the tensors of the step."""
        self._layers = check_group(layers)
        first = self._layers[0]
        self._is_paged, self._block_size = first.is_paged, first.block_size
        self._max_sequences = check_int("sequences", sequences, minimum=1)
        if not first.is_paged:
            max_blocks = 1 if max_blocks is None else max_blocks
            max_blocks = check_int(
                "max_blocks of contiguous layers", max_blocks, minimum=1, maximum=1
            )
        elif max_blocks is None:
            raise SpecError(
                "max_blocks is not set; pass the blocks of the longest sequence: its tokens by "
                f"{first.block_size}, rounded up"
            )
        self._max_blocks = check_int("max_blocks", max_blocks, minimum=1)
        self._given_step_tokens = step_tokens
        if step_tokens is not None:
            self._given_step_tokens = check_int("step_tokens", step_tokens, minimum=1)
        self._window = None if window is None else check_int("window", window, minimum=1)
        self.allocator = BlockAllocator(first.num_blocks, reserve_null=first.is_paged)
        self._sequences: dict[Hashable, SequenceState] = {}
        self._buffers = self._make_buffers()

    def __repr__(self) -> str:
        """Return the settings and counters."""
        kind, pool = "paged" if self._is_paged else "contiguous", self.allocator
        return (
            f"SequenceTable({kind}, layers={len(self._layers)}, P={pool.blocks}, "
            f"N={self.block_size}, sequences={self._max_sequences}, max_blocks={self.max_blocks}, "
            f"step_tokens={self.step_tokens}, window={self.window}, "
            f"requests={len(self._sequences)}, "
            f"tokens={sum(state.context for state in self._sequences.values())}, "
            f"blocks={pool.num_used} used + {pool.num_free} free + {pool.num_reserved} reserved)"
        )

    @property
    def layers(self) -> tuple[KVLayer, ...]:
        """The layers."""
        return self._layers

    @property
    def is_paged(self) -> bool:
        """Whether the layers are paged."""
        return self._is_paged

    @property
    def block_size(self) -> int:
        """N, tokens of a block; of contiguous layers their capacity."""
        return self._block_size

    @property
    def max_blocks(self) -> int:
        """M, blocks that a sequence may hold."""
        return self._max_blocks

    @property
    def step_tokens(self) -> int:
        """Tokens that one step may have."""
        if self._given_step_tokens is not None:
            return self._given_step_tokens
        pool = self.allocator
        blocks = min(self._max_sequences * self.max_blocks, pool.blocks - pool.num_reserved)
        return max(self._max_sequences, blocks * self.block_size)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all."""
        return self._window

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """All requests, in the order in which they began."""
        return tuple(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, those of prefixes that nobody holds among them."""
        return self.allocator.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold, each counted once."""
        return self.allocator.num_used

    def blocks_for(self, tokens: int, extra: int = 0) -> int:
        """Return how many blocks a sequence of that many tokens takes.

        Args:
            tokens: Its longest length.
            extra: Tokens that are appended on trial beyond it, as speculative decoding does.
        """
        tokens = check_int("tokens", tokens, minimum=0) + check_int("extra", extra, minimum=0)
        return -(-tokens // self.block_size)

    def length(self, request: Hashable) -> int:
        """Return the tokens of a sequence, evicted ones included: its next token's position.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        return self._find(request).length

    def context(self, request: Hashable) -> int:
        """Return the tokens of a sequence that its blocks still hold.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        return self._find(request).context

    def blocks_of(self, request: Hashable) -> list[int]:
        """Return a copy of a sequence's block ids, in order.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        return self._find(request).blocks

    def slots_of(self, request: Hashable) -> Tensor:
        """Return ``[context]`` INT64 on the CPU: the slot of each token that is held, in order.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        state = self._find(request)
        index = torch.arange(state.context)
        blocks = torch.tensor(state.blocks, dtype=torch.int64)
        return blocks[index // self.block_size] * self.block_size + index % self.block_size

    def append(
        self,
        tokens: Mapping[Hashable, int | TokenIds],
        *,
        pad_sequences: int | None = None,
        pad_tokens: int | None = None,
    ) -> Step:
        """Make room for the new tokens of a step, and say where each of them goes.

        A request that is not known starts a sequence. Where its token ids are given, the longest
        published prefix of full blocks is shared instead of computed again; at least one token is
        always left to compute. Only the tokens that are left get slots, and ``step.reused`` says
        how many were found.

        Args:
            tokens: For each request how many tokens come next, or their ids (needed to publish
                and to find prefixes; of no use behind tokens without ids). The rows of the step
                are in this order.
            pad_sequences: B of the step; rows behind the requests are padding (no tokens, context
                0). None adds none.
            pad_tokens: T of the step; tokens behind are padding (slot -1). None adds none.

        Returns:
            The step: always the same object, over tensors that are rewritten by the next call.
            ``max_query`` and ``max_context`` are bounds, rounded up so that they rarely change;
            with padding, the latter is what a sequence may hold at most.

        Raises:
            CapacityError: Too many requests or tokens for one step, or a sequence that would hold
                more than ``max_blocks`` blocks.
            OutOfBlocks: More blocks are needed than are free.
            SpecError: Fewer than 1 token for a request, or padding to less than there is.
            DtypeError: Not a mapping of requests to integers or token ids.
            ShapeError: Token ids on more than one axis.
            StaleHandleError: A contiguous layer was grown without this table. Nothing has changed,
                here as in the cases above.
        """
        given = self._check_given(tokens)
        B = len(given)
        if pad_sequences is not None:
            B = check_int("pad_sequences", pad_sequences, minimum=B, maximum=self._max_sequences)
        plans = plan_append(
            self.allocator,
            self._sequences,
            given,
            block_size=self.block_size,
            max_blocks=self.max_blocks,
            window=self.window,
            full_row=self._full_row(),
        )
        T = sum(plan.tokens for plan in plans)
        if T > self.step_tokens:
            raise CapacityError(
                f"the step has {T} new tokens, got room for step_tokens={self.step_tokens}; split "
                f"the prompt over several steps, or build the table with step_tokens={T}"
            )
        if pad_tokens is not None:
            pad_tokens = check_int("pad_tokens", pad_tokens, minimum=T, maximum=self.step_tokens)
        for plan in plans:
            self._commit_old(plan)
        copies = [copy for plan in plans for copy in self._commit_new(plan)]
        if copies:
            sources, targets = zip(*copies, strict=True)
            for layer in self._layers:
                layer.copy_blocks(sources, targets)
        limit = self.max_blocks * self.block_size
        longest = max((plan.state.context for plan in plans), default=0)
        is_padded = pad_sequences is not None or pad_tokens is not None
        return self._buffers.fill(
            {plan.request: plan.state for plan in plans},
            [plan.tokens for plan in plans],
            block_size=self.block_size,
            num_sequences=B,
            num_tokens=T if pad_tokens is None else pad_tokens,
            max_query=_power_of_two(max((plan.tokens for plan in plans), default=1)),
            max_context=limit
            if is_padded
            else min(limit, max(_LEAST_CONTEXT, _power_of_two(longest))),
            reused={plan.request: plan.reused for plan in plans if plan.starts},
        )

    def truncate(self, request: Hashable, length: int) -> None:
        """Take back every token from ``length`` on; whole blocks behind become free.

        Args:
            request: The sequence.
            length: Tokens to keep, counted from its start, evicted ones included.

        Raises:
            UnknownRequest: There is no such sequence.
            SpecError: ``length`` is negative or more than there are.
            RollbackTooDeep: The next query would need tokens that were evicted. Nothing has
                changed, here as in the cases above.
        """
        state = self._find(request)
        length = check_int(f"length of {request!r}", length, minimum=0, maximum=state.length)
        if length == state.length:
            return
        # without a window only what is taken back must be there; with one, what is then seen too
        needed = length if self.window is None else unseen(length, self.window)
        if needed < state.dropped:
            raise RollbackTooDeep(
                f"request {request!r} cannot go back to {length} tokens: that would need tokens "
                f"[{needed}, {state.dropped}) again, which were evicted; keep its length at "
                f"{self._shallowest(state)} or more, or free() it and append its tokens anew"
            )
        held = -(-(length - state.dropped) // self.block_size)
        self.allocator.free(state.blocks[held:], request)
        state.cut(length, held, self.block_size)

    def evict(self, request: Hashable, tokens: int) -> None:
        """Forget the first ``tokens`` tokens of a sequence, as far as whole blocks hold them.

        A block that holds a part of what stays is kept whole, so ``context`` may still count up
        to a block of forgotten tokens: let the window of attention hide them. Positions do not
        change.

        Args:
            request: The sequence.
            tokens: Counted from its start, so the same number twice evicts nothing more.

        Raises:
            UnknownRequest: There is no such sequence.
            SpecError: ``tokens`` is negative or more than there are. Nothing has changed.
        """
        state = self._find(request)
        tokens = check_int(f"tokens of {request!r}", tokens, minimum=0, maximum=state.length)
        self._drop(request, state, max(0, tokens - state.dropped) // self.block_size)

    def fork(self, source: Hashable, target: Hashable) -> None:
        """Start a sequence with everything another one holds, in the same blocks.

        Raises:
            UnknownRequest: There is no sequence ``source``.
            SpecError: There is a sequence ``target`` already.
            DtypeError: ``target`` is not hashable. Nothing has changed, here as in the cases above.
        """
        state = self._find(source)
        self._check_hashable(target)
        if target in self._sequences:
            raise SpecError(
                f"target {target!r} must be a new request, got one of "
                f"{self._sequences[target].length} tokens; free() it first or choose another id"
            )
        self.allocator.share(state.blocks, target)
        self._sequences[target] = state.copy()

    def free(self, request: Hashable) -> None:
        """End a sequence; blocks that nobody else holds become free, its last one first.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        self.allocator.free(self._find(request).blocks, request)
        del self._sequences[request]

    def publish(self, request: Hashable) -> int:
        """Let later prompts find the full blocks of a sequence whose token ids are known.

        Call it once the kernels that write the blocks were launched. Where another block holds
        the same prefix already, that one stays the one that is found.

        Returns:
            Tokens in those blocks that the sequence still holds; 0 for contiguous layers. Where its
            front was evicted, a prompt finds them while the blocks before them can be found.

        Raises:
            UnknownRequest: There is no such sequence.
        """
        state = self._find(request)
        if not self._is_paged:
            return 0
        digests = state.chained(self.block_size)[state.dropped // self.block_size :]
        for block, digest in zip(state.blocks, digests, strict=False):  # its last may not be full
            self.allocator.publish(block, digest)
        return len(digests) * self.block_size

    def lookup(self, ids: TokenIds) -> int:
        """Return how many tokens of a prompt would be reused if a request began with it now.

        Raises:
            DtypeError: Not a list, array or CPU tensor of integers.
            ShapeError: Ids on more than one axis.
        """
        found, _ = find_prefix(self.allocator, token_ids("ids", ids), self.block_size)
        return len(found) * self.block_size

    def ensure_capacity(self, tokens: int) -> bool:
        """Grow all contiguous layers so that each sequence can hold ``tokens``.

        Storage moves, and with it slots: earlier steps no longer hold. See
        ``KVLayer.ensure_capacity``.

        Returns:
            Whether anything moved.

        Raises:
            LayerKindError: The layers are paged.
            FrozenError: A layer is frozen and too small. No layer has changed.
        """
        tokens = check_int("tokens", tokens, minimum=0)
        if self._is_paged:
            raise LayerKindError(
                f"paged layers do not grow, got {self.allocator.blocks} blocks of "
                f"{self.block_size} tokens; allocate them with more blocks"
            )
        # one capacity for all, also where a layer was grown without the table
        target = grown_capacity(max(layer.capacity for layer in self._layers), tokens)
        for index, layer in enumerate(self._layers):
            if layer.frozen and layer.capacity < target:
                raise FrozenError(
                    f"layers[{index}] must not be frozen to grow from {layer.capacity} to {target} "
                    f"tokens; allocate capacity={target} before capturing, or set frozen=False and "
                    "capture again"
                )
        moved = [layer.ensure_capacity(target, exact=True) for layer in self._layers]
        if self._block_size != self._layers[0].block_size:
            self._block_size = self._layers[0].block_size
            if self._given_step_tokens is None:
                self._buffers = self._make_buffers()
        return any(moved)

    def check(self) -> None:
        """Compare the sequences with the allocator, block by block.

        Raises:
            BlockLeak: A block is held by nobody that is known, by too few or too many, or counts
                do not add up; the message names blocks and requests.
        """
        check_sequences(self._sequences, self.allocator, self.block_size)

    def state_dict(self) -> dict[str, Any]:
        """Return sequences, blocks and published prefixes; layers are saved by themselves.

        Raises:
            SnapshotError: A request is neither a string nor an integer.
        """
        rows, ids = to_records(self._sequences)
        meta = {
            "spec": self._spec(),
            "allocator": self.allocator.state_dict()["meta"],
            "sequences": rows,
        }
        return {"meta": meta, "tensors": {"ids": ids}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of a table with the same sizes; load the layers' states as well.

        Raises:
            SnapshotError: Not such a state, one of another table, or one that contradicts itself.
                Nothing has changed.
        """
        meta, tensors = check_state("SequenceTable", state, self._spec())
        blocks: dict[str, Any] = {"meta": meta.get("allocator"), "tensors": {}}
        allocator = BlockAllocator(self.allocator.blocks, reserve_null=self._is_paged)
        allocator.load_state_dict(blocks)
        self._sequences = from_records(
            meta.get("sequences"),
            tensors.get("ids"),
            allocator=allocator,
            block_size=self.block_size,
            max_blocks=self.max_blocks,
        )
        self.allocator.load_state_dict(blocks)

    def _spec(self) -> dict[str, Any]:
        return {
            "kind": "SequenceTable",
            "is_paged": self._is_paged,
            "blocks": self.allocator.blocks,
            "block_size": self.block_size,
            "max_blocks": self.max_blocks,
            "window": self.window,
        }

    def _make_buffers(self) -> StepBuffers:
        return StepBuffers(
            sequences=self._max_sequences,
            max_blocks=self.max_blocks,
            tokens=self.step_tokens,
            device=self._layers[0].device,
            null_block=self._is_paged,
        )

    def _find(self, request: Hashable) -> SequenceState:
        self._check_hashable(request)
        state = self._sequences.get(request)
        if state is None:
            raise UnknownRequest(
                f"request {request!r} must be one of the {len(self._sequences)} that are known, "
                "got another; append() starts one, free() ends it"
            )
        return state

    def _check_hashable(self, request: Hashable) -> None:
        try:
            hash(request)
        except TypeError as error:
            raise DtypeError(
                f"request must be hashable, got {type(request).__name__}; use a str or int"
            ) from error

    def _check_given(self, tokens: object) -> dict[Hashable, tuple[int, Ids | None]]:
        if not isinstance(tokens, Mapping):
            raise DtypeError(
                f"tokens must map requests to new tokens, got {type(tokens).__name__}; pass a dict "
                "such as {'a': 1}"
            )
        if len(tokens) > self._max_sequences:
            raise CapacityError(
                f"the step has {len(tokens)} requests, got room for sequences="
                f"{self._max_sequences}; split it, or build the table with sequences={len(tokens)}"
            )
        for index, layer in enumerate(self._layers):
            if layer.block_size != self.block_size:
                raise StaleHandleError(
                    f"layers[{index}] must hold {self.block_size} tokens a block, got "
                    f"{layer.block_size}; grow contiguous layers with the table's "
                    "ensure_capacity()"
                )
        given: dict[Hashable, tuple[int, Ids | None]] = {}
        for request, new in tokens.items():
            name = f"tokens of {request!r}"
            if isinstance(new, (Sequence, np.ndarray, Tensor)) and not _is_scalar(new):
                ids = token_ids(name, new)
                given[request] = check_int(f"{name} (ids)", len(ids), minimum=1), ids
            else:
                given[request] = check_int(name, new, minimum=1), None
        return given

    def _full_row(self) -> str:
        if not self._is_paged:
            return "grow the layers with ensure_capacity(), or free() the request"
        return (
            "truncate() or evict() it first, or build the table with a larger max_blocks "
            "(blocks_for() tells it)"
        )

    def _shallowest(self, state: SequenceState) -> int:
        seen = 0 if self.window is None else self.window - 1
        return min(state.length, state.dropped + seen)

    def _drop(self, request: Hashable, state: SequenceState, count: int) -> None:
        if count:
            self.allocator.free(state.blocks[:count], request)
            state.drop(count, self.block_size)

    def _commit_old(self, plan: RowPlan) -> None:
        """Give back what left the window and hold what is reused, before anything is allocated."""
        self._drop(plan.request, plan.state, plan.evicts)
        if plan.starts:
            self.allocator.share(plan.state.blocks, plan.request)
            self._sequences[plan.request] = plan.state
        if plan.unpublishes:
            self.allocator.unpublish(plan.state.blocks[-1])

    def _commit_new(self, plan: RowPlan) -> list[tuple[int, int]]:
        """Allocate, and return the copy that has to be made, if any."""
        state, copies = plan.state, []
        fresh = self.allocator.allocate(plan.allocates, plan.request)
        if plan.copies:
            shared, own = state.blocks[-1], fresh.pop(0)
            self.allocator.free([shared], plan.request)
            state.replace_last(own)
            copies.append((shared, own))
        state.hold(fresh)
        state.extend(plan.tokens, plan.ids)
        return copies


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
