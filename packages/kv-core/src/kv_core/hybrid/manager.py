"""Slots, blocks and steps of a hybrid cache: the only place where anything is allocated."""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from kv_core.append_plan import find_prefix
from kv_core.checks import check_int
from kv_core.errors import (
    CapacityError,
    FrozenError,
    RingTooSmall,
    RollbackTooDeep,
    ShapeError,
    SharedBlockError,
    SnapshotError,
    SpecError,
    StaleHandleError,
    UnknownRequest,
)
from kv_core.hybrid.handle import LayerCacheHandle
from kv_core.hybrid.open_step import OpenRun, OpenStep
from kv_core.hybrid.ops import HybridOps
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.records import RequestRecord, find_runs
from kv_core.hybrid.reference import TorchOps
from kv_core.hybrid.requests import RequestTable, listed
from kv_core.hybrid.saved import load_manager, save_manager
from kv_core.hybrid.snapshots import HybridSnapshot, LayerStates, PrefixHit, PrefixStates
from kv_core.hybrid.spec import HybridSpec
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.stats import HybridStats
from kv_core.hybrid.step import HybridStepBuffers, Run, table_width
from kv_core.prefixes import TokenIds, chain, token_ids

Handles = LayerCacheHandle | Sequence[LayerCacheHandle]

_STEP_TOKENS = 8192


class KVCacheManager:
    """Serves requests from one hybrid cache: slots for their state, blocks for their entries.

    A step begins with ``acquire``, which allocates all it needs and returns a handle for each
    layer, and ends with ``commit`` or ``abort``. Everything else happens between steps, or to
    requests that are not in the open one. Every call changes all that it names or, when it raises,
    nothing.

    Args:
        spec: Layers, sizes and formats.
        slots: Requests that can be served at once.
        blocks: Blocks of the pool, the null block 0 included, which is never handed out.
        device: Where everything lives.
        ops: What computes; by default kv-core's plain torch.
        max_tokens: Most tokens of a step, padding included.
        max_requests: Most requests of a step, padding included; by default ``slots``.
        max_len: Most tokens of a request; by default all that the blocks hold.
        prefix_states: Most states of published prefixes to keep beside the pools.

    Raises:
        SpecError: A size is out of range.
        DtypeError: A size is not an integer.
    """

    def __init__(
        self,
        spec: HybridSpec,
        *,
        slots: int,
        blocks: int,
        device: torch.device | str = "cpu",
        ops: HybridOps | None = None,
        max_tokens: int = _STEP_TOKENS,
        max_requests: int | None = None,
        max_len: int | None = None,
        prefix_states: int = 16,
    ) -> None:
        """Allocate everything."""
        self.spec = spec
        slots = check_int("slots", slots, minimum=1)
        blocks = check_int("blocks", blocks, minimum=2)  # the null block and one to hand out
        if max_requests is None:
            max_requests = slots
        if max_len is None:
            max_len = (blocks - 1) * spec.block_tokens
        self.max_len = check_int("max_len", max_len, minimum=1)
        self._buffers = HybridStepBuffers(
            spec,
            slots=slots,
            blocks=blocks,
            max_requests=check_int("max_requests", max_requests, minimum=1),
            max_tokens=check_int("max_tokens", max_tokens, minimum=1),
            max_blocks=table_width(spec, self.max_len) if spec.kinds else 1,
            device=device,
        )
        layers = range(spec.layers)
        self.states = [StateCachePool(spec, layer, slots, device) for layer in layers]
        self.pools = [
            PagedKVPool(spec, layer, blocks, device) if spec.kind(layer) else None
            for layer in layers
        ]
        self.ops = TorchOps() if ops is None else ops
        self._table = RequestTable(spec, self.states, slots, blocks)
        self._prefixes = PrefixStates(check_int("prefix_states", prefix_states, minimum=0))
        self._snapshots: dict[HybridSnapshot, None] = {}
        self._open = OpenStep(self.device)
        self._handles = [
            LayerCacheHandle(layer, state, pool, self.ops, self._open)
            for layer, (state, pool) in enumerate(zip(self.states, self.pools, strict=True))
        ]

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self.states[0].positions.device

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Requests that have a slot, the oldest first."""
        return tuple(self._table.records)

    def length(self, request: Hashable) -> int:
        """Return the committed tokens of a request: the position that its next one has.

        Raises:
            UnknownRequest: There is no such request.
        """
        return self._table.find(request).length

    def blocks(self, request: Hashable) -> tuple[int, ...]:
        """Return the block ids of a request in order.

        Raises:
            UnknownRequest: There is no such request.
        """
        return tuple(self._table.find(request).blocks)

    def __repr__(self) -> str:
        """Return sizes and what is in use."""
        allocator = self._table.allocator
        return (
            f"KVCacheManager(layers={self.spec.layers}, "
            f"slots={len(self._table.records)}/{self._table.slots}, "
            f"blocks={allocator.num_used}/{allocator.blocks}, device={self.device})"
        )

    # --- steps

    def acquire(
        self,
        request_ids: Sequence[Hashable],
        positions: Sequence[int],
        *,
        speculative: bool | Collection[Hashable] = False,
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
    ) -> list[LayerCacheHandle]:
        """Open a step: give new requests a slot, allocate blocks, fill the index tensors.

        Args:
            request_ids: ``[T]`` the request of each token; the tokens of a request lie next to
                each other. An unknown request starts here, at position 0.
            positions: ``[T]`` position of each token, going on where its request stopped.
            speculative: Whether tokens may be taken back with ``commit(accepted=…)``: True, or the
                requests for which this is so. Longer runs than the rings allow are refused then.
            pad_tokens: T with padding, so that shapes and addresses repeat in a CUDA graph.
            pad_requests: B with padding.

        Returns:
            One handle for each layer, the same objects every time.

        Raises:
            SpecError: A step is open; no token; a negative position, gap, repeat, or one that does
                not go on from the committed length or ends past ``max_len``; a request in two
                places.
            ShapeError: Unequal lengths.
            DtypeError: Not lists on the host, or a position that is not an integer.
            CapacityError: More tokens or requests than a step has room for.
            OutOfSlots: Fewer slots are free than new requests come.
            OutOfBlocks: Fewer blocks are free than the step needs.
            RingTooSmall: A speculative run is longer than ``spec.max_draft``. Nothing has changed,
                here as in all cases above.
        """
        if self._open.is_open:
            raise SpecError(
                f"a step must be closed before the next, got an open one of {len(self._open.runs)} "
                "requests; commit() or abort() it"
            )
        table = self._table
        found = find_runs(request_ids, positions)
        T, B = self._padded(len(request_ids), len(found), pad_tokens, pad_requests)
        drafts = (
            speculative if isinstance(speculative, Collection) else found if speculative else ()
        )
        for request, (start, count) in found.items():
            self._check_run(request, start, count)
            if request in drafts and count > self.spec.max_draft:
                raise RingTooSmall(
                    f"request {request!r} has a speculative run of {count} tokens, got rings for "
                    f"{self.spec.max_draft}; build the spec with for_draft({count})"
                )
        new = [request for request in found if request not in table.records]
        table.check_slots(new)
        wanted = {
            request: table.missing(request, start + count)
            for request, (start, count) in found.items()
        }
        table.check_blocks(sum(wanted.values()), f"a step of {len(found)} requests")

        for request in new:
            table.records[request] = RequestRecord(table.free_slots.pop())
        table.empty(new)
        open_runs: dict[Hashable, OpenRun] = {}
        filled: list[Run] = []
        for request, (start, count) in found.items():
            record = table.records[request]
            open_runs[request] = OpenRun(start, count, request in new, len(record.blocks))
            record.blocks += table.allocator.allocate(wanted[request], request)
            filled.append(Run(record.slot, start, count, record.blocks, record.stored))
        self._drop_lost_states()
        step = self._buffers.fill(filled, num_requests=B, num_tokens=T)
        self._open.begin(step, open_runs)
        return list(self._handles)

    def commit(self, handles: Handles, accepted: Mapping[Hashable, int] | None = None) -> None:
        """Close the step: its tokens are part of their requests from now on.

        Args:
            handles: What ``acquire`` returned, or one of them.
            accepted: How many tokens of a run to keep, by request; the others are taken back. A
                request that is not named keeps all.

        Raises:
            StaleHandleError: No step is open, or the handles are not this manager's.
            UnknownRequest: ``accepted`` names a request that is not in the step.
            SpecError: More tokens than the run has, or a negative number.
            RollbackTooDeep: The rings no longer hold what the shortened request needs. The step
                stays open, here as in all cases above.
        """
        self._check_handles(handles)
        table, runs = self._table, self._open.runs
        accepted = {} if accepted is None else accepted
        for request in accepted:
            if request not in runs:
                raise UnknownRequest(
                    f"accepted must name requests of the step, got {request!r}; they are "
                    f"{listed(runs)}"
                )
        kept: dict[Hashable, int] = {}
        for request, run in runs.items():
            given = accepted.get(request, run.count)
            kept[request] = check_int(f"accepted[{request!r}]", given, minimum=0, maximum=run.count)
            if kept[request] < run.count and self._open.holds(request):
                written = max(table.records[request].written, run.start + run.count)
                table.check_depth(request, written, run.start + kept[request])
        live = self._open.live()
        for request, run in live.items():
            record = table.records[request]
            record.written = max(record.written, run.start + run.count)
            record.length = run.start + kept[request]
            table.trim_to_length(request)
        table.forget([request for request, run in live.items() if kept[request] < run.count])
        self._open.end()

    def abort(self, handles: Handles) -> None:
        """Close the step as if it had not begun: slots and blocks that it took are returned.

        Where rings were written already, what they lost has to be spare, as for a rollback.

        Args:
            handles: What ``acquire`` returned, or one of them.

        Raises:
            StaleHandleError: No step is open, or the handles are not this manager's.
            RollbackTooDeep: Rings were written, and a request needs rows that are gone. The step
                stays open: commit it, or free the request first.
        """
        self._check_handles(handles)
        table, live = self._table, self._open.live()
        old = {request: run for request, run in live.items() if not run.is_new}
        reach = {
            request: max(table.records[request].written, run.start + run.count)
            for request, run in old.items()
            if self._open.was_written
        }
        for request, written in reach.items():
            table.check_depth(request, written, old[request].start)
        for request, run in live.items():
            if run.is_new:
                table.release(request)
            else:
                table.trim(request, run.held)
        for request, written in reach.items():
            table.records[request].written = written
        table.forget(reach)
        self._open.end()

    # --- requests between steps

    def rollback(self, request: Hashable, length: int) -> None:
        """Take back every token from ``length`` on; blocks behind become free.

        Args:
            request: The request.
            length: Tokens to keep.

        Raises:
            UnknownRequest: There is no such request.
            FrozenError: It is in the open step.
            SpecError: ``length`` is negative or more than there are.
            RollbackTooDeep: The rings no longer hold what its next token needs.
            SharedBlockError: It would go on in the middle of a block that others hold too. Nothing
                has changed, here as in all cases above.
        """
        record, table = self._find_idle(request), self._table
        length = check_int(f"length of {request!r}", length, minimum=0, maximum=record.length)
        if length == record.length:
            return
        if length < record.floor:
            raise RollbackTooDeep(
                f"request {request!r} can go back to {record.floor} tokens, where it was started "
                f"from a prefix, got {length}; free() it and run its tokens anew"
            )
        table.check_depth(request, record.written, length)
        whole, rest = divmod(length, self.spec.block_tokens)
        if rest and self.spec.kinds:
            block = record.blocks[whole]
            others = [owner for owner in table.allocator.owners(block) if owner != request]
            if others:
                raise SharedBlockError(
                    f"request {request!r} must keep the blocks that it shares whole, got length "
                    f"{length} inside block {block}, which {listed(others)} also hold(s); go back "
                    f"to {whole * self.spec.block_tokens}, or fork() it at {length}"
                )
            table.allocator.unpublish(block)
            self._drop_lost_states()
        record.length = length  # never below floor, so never below stored
        table.trim_to_length(request)
        table.forget([request])

    def free(self, request: Hashable) -> None:
        """End a request: its slot and the blocks that nobody else holds become free.

        In an open step its handles and views are stale from now on; the step still has to be
        closed, for the other requests. No memory is cleared.

        Raises:
            UnknownRequest: There is no such request.
        """
        self._table.find(request)
        self._table.release(request)
        self._open.drop(request)

    def fork(self, source: Hashable, target: Hashable, length: int | None = None) -> None:
        """Start a request with the first tokens of another.

        Whole blocks are shared, one that is only begun is copied, and so is the state.

        Args:
            source: The request to start from.
            target: The new request.
            length: Tokens to take over; by default all.

        Raises:
            UnknownRequest: There is no request ``source``.
            FrozenError: It is in the open step.
            SpecError: ``target`` exists, or ``length`` is below 1 or more than there are; or the
                source still rebuilds its state.
            RollbackTooDeep: The rings no longer hold what the next token after ``length`` needs.
            OutOfSlots: No slot is free.
            OutOfBlocks: No block is free for the copy. Nothing has changed, here as in all cases
                above.
        """
        record, table = self._find_idle(source), self._table
        table.check_new(target)
        self._check_whole(source, record)
        length = check_int(
            f"length of {source!r} to fork",
            record.length if length is None else length,
            minimum=1,
            maximum=record.length,
        )
        if length < record.floor:
            raise RollbackTooDeep(
                f"request {source!r} can be forked from {record.floor} tokens on, where it was "
                f"started from a prefix, got {length}; fork what it was started from"
            )
        table.check_depth(source, record.written, length)
        table.check_slots([target])
        whole, rest = divmod(length, self.spec.block_tokens)
        copies = 1 if rest and self.spec.kinds else 0
        table.check_blocks(copies, f"the copy of a block for {target!r}")
        shared = record.blocks[:whole]
        table.allocator.share(shared, target)
        fresh = table.allocator.allocate(copies, target)
        self._drop_lost_states()
        forked = dataclasses.replace(
            record, slot=table.free_slots.pop(), length=length, blocks=shared + fresh
        )
        table.records[target] = forked
        for state, pool in zip(self.states, self.pools, strict=True):
            state.copy_slot(record.slot, forked.slot)
            if pool is not None and fresh:
                pool.copy_block(record.blocks[whole], fresh[0])
        table.forget([target])

    def snapshot(self, request: Hashable, length: int | None = None) -> HybridSnapshot:
        """Set a request aside as it was at the end of a block, blocks held and state copied.

        Args:
            request: The request; it goes on as before.
            length: A multiple of ``spec.block_tokens``; by default the largest that it has.

        Raises:
            UnknownRequest: There is no such request.
            FrozenError: It is in the open step.
            SpecError: Not a block's end, or the request still rebuilds its state.
            RollbackTooDeep: The rings no longer hold the state at that length: let a step of the
                request end there. Nothing has changed, here as in all cases above.
        """
        record = self._find_idle(request)
        self._check_whole(request, record)
        size = self.spec.block_tokens
        if length is None:
            length = record.length // size * size
        length = check_int(
            f"length of {request!r} to set aside", length, minimum=1, maximum=record.length
        )
        if length % size:
            raise SpecError(
                f"length of {request!r} to set aside must be a multiple of block_tokens={size}, "
                f"got {length}; use {length // size * size} or {-(-length // size) * size}"
            )
        if not self._table.has_state(record, length):
            raise RollbackTooDeep(
                f"the state of request {request!r} at {length} tokens must be in its rings, got "
                f"one of {record.written} tokens; end a step at {length} and take it then"
            )
        blocks = record.blocks[: length // size]
        taken = HybridSnapshot(length, tuple(blocks), self._capture(record, length))
        self._table.allocator.share(blocks, taken)
        self._snapshots[taken] = None
        return taken

    def restore(self, request: Hashable, snapshot: HybridSnapshot) -> None:
        """Start a request from a snapshot; the blocks are shared, not copied.

        Raises:
            SpecError: The request exists.
            StaleHandleError: The snapshot was released, or is another manager's.
            OutOfSlots: No slot is free. Nothing has changed, here as in all cases above.
        """
        self._table.check_new(request)
        self._check_held(snapshot)
        self._table.check_slots([request])
        self._start(request, snapshot.blocks, snapshot.length, snapshot.layers)

    def release(self, snapshot: HybridSnapshot) -> None:
        """Let go of a snapshot; blocks that nobody else holds become free.

        Raises:
            StaleHandleError: The snapshot was released, or is another manager's.
        """
        self._check_held(snapshot)
        self._table.allocator.free(snapshot.blocks, snapshot)
        del self._snapshots[snapshot]
        snapshot.is_held = False

    # --- prefixes

    def publish(self, request: Hashable, ids: TokenIds) -> int:
        """Let later prompts find the full blocks of a request, and the state after the last.

        The state can be kept only while the rings hold it, so let a step end where the last full
        block does; without it the blocks are found, but their tokens have to be replayed.

        Args:
            request: The request.
            ids: Its token ids from the start, at least those in full blocks.

        Returns:
            Tokens from which a prompt can go on at once: the end of the last full block, or 0.

        Raises:
            UnknownRequest: There is no such request.
            FrozenError: It is in the open step.
            SpecError: The request still rebuilds its state.
            ShapeError: Fewer ids than its full blocks have tokens.
            DtypeError: Not integers on the host. Nothing has changed, here as in all cases above.
        """
        record, size = self._find_idle(request), self.spec.block_tokens
        self._check_whole(request, record)
        known = token_ids("ids", ids)
        length = record.length // size * size if self.spec.kinds else 0
        if len(known) < length:
            raise ShapeError(
                f"ids of {request!r} must be at least the {length} tokens of its full blocks, got "
                f"{len(known)}; pass all its token ids from the start"
            )
        digests = list(chain(known[:length], size))
        for block, digest in zip(record.blocks, digests, strict=False):
            self._table.allocator.publish(block, digest)
        if not digests or not self._table.has_state(record, length):
            return 0
        if digests[-1] not in self._prefixes:
            self._prefixes.put(digests[-1], self._capture(record, length))
        return length if digests[-1] in self._prefixes else 0

    def lookup(self, ids: TokenIds, *, replay: bool = False) -> PrefixHit:
        """Return how much of a prompt is there, and where a request for it could begin.

        At least one token of the prompt is left to run.

        Args:
            ids: Token ids of the prompt.
            replay: Whether to take a longer prefix whose state is gone, and run the last
                ``spec.replay_tokens`` of it again.

        Raises:
            DtypeError: Not integers on the host.
            ShapeError: Ids on more than one axis.
        """
        return self._hit(ids, replay)[0]

    def reuse(self, request: Hashable, ids: TokenIds, *, replay: bool = False) -> PrefixHit:
        """Start a request from what is there of its prompt; see ``lookup``.

        A miss starts nothing: ``acquire`` it from position 0.

        Returns:
            The hit; the first token to run has position ``hit.start``.

        Raises:
            SpecError: The request exists.
            DtypeError: Not integers on the host.
            ShapeError: Ids on more than one axis.
            OutOfSlots: No slot is free. Nothing has changed, here as in all cases above.
        """
        table = self._table
        table.check_new(request)
        hit, blocks, digests = self._hit(ids, replay)
        if not hit.tokens:
            return hit
        table.check_slots([request])
        used = hit.tokens // self.spec.block_tokens
        if not hit.replay:
            layers = self._prefixes.take(digests[used - 1])
            self._start(request, blocks[:used], hit.tokens, layers)
            return hit
        table.allocator.share(blocks[:used], request)
        record = RequestRecord(table.free_slots.pop(), hit.start, list(blocks[:used]))
        record.floor = record.stored = hit.tokens
        record.first = record.written = hit.start
        table.records[request] = record
        table.empty([request])
        return hit

    # --- reports and states

    def stats(self) -> HybridStats:
        """Return what is allocated and what is in use; state and entries apart."""
        table = self._table
        parts = self.spec.nbytes(slots=table.slots, blocks=table.allocator.blocks)
        state = sum(parts[part] for part in ("ring", "ring positions", "tail"))
        records = table.records.values()
        return HybridStats(
            slots=table.slots,
            used_slots=len(records),
            blocks=table.allocator.blocks,
            used_blocks=table.allocator.num_used,
            capacity=(table.allocator.blocks - 1) * self.spec.block_tokens,
            length=sum(record.length for record in records),
            valid=sum(map(table.valid, records)),
            state_bytes=state,
            paged_bytes=sum(parts.values()) - state,
            parts=parts,
            prefix_states=len(self._prefixes),
            prefix_bytes=self._prefixes.nbytes,
        )

    def check(self) -> None:
        """Compare requests and snapshots with the allocator.

        Raises:
            BlockLeak: A block is held by somebody who is gone, or counts do not add up.
        """
        self._table.allocator.check([*self._table.records, *self._snapshots])

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything: storage, requests, blocks and states of prefixes.

        Raises:
            FrozenError: A step is open.
            SnapshotError: A snapshot is held, or a request is neither a string nor an integer.
        """
        self._check_closed("saved")
        if self._snapshots:
            raise SnapshotError(
                f"no snapshot may be held while the cache is saved, got {len(self._snapshots)}; "
                "release() them, or publish() the prefixes instead"
            )
        return save_manager(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a cache with the same spec and sizes; storage does not move.

        Raises:
            FrozenError: A step is open.
            SnapshotError: Not such a state, or one that contradicts itself; or a snapshot is held
                here. Nothing has changed.
        """
        self._check_closed("loaded")
        if self._snapshots:
            raise SnapshotError(
                f"no snapshot may be held while a state is loaded, got {len(self._snapshots)}; "
                "release() them first"
            )
        load_manager(self, state)

    # --- inside

    def _padded(
        self, tokens: int, requests: int, pad_tokens: int | None, pad_requests: int | None
    ) -> tuple[int, int]:
        T = tokens if pad_tokens is None else check_int("pad_tokens", pad_tokens, minimum=tokens)
        B = requests
        if pad_requests is not None:
            B = check_int("pad_requests", pad_requests, minimum=requests)
        if not T or not B:
            raise SpecError(
                f"a step must have at least 1 token and 1 request, got {T} and {B}; pad it to run "
                "without any"
            )
        room = self._buffers
        for name, got, limit in (
            ("tokens", T, room.max_tokens),
            ("requests", B, room.max_requests),
        ):
            if got > limit:
                raise CapacityError(
                    f"the step has {got} {name}, got room for max_{name}={limit}; split it, or "
                    f"build the manager with max_{name}={got}"
                )
        return T, B

    def _check_run(self, request: Hashable, start: int, count: int) -> None:
        record = self._table.records.get(request)
        expected = 0 if record is None else record.length
        if start != expected:
            raise SpecError(
                f"the first position of request {request!r} must be {expected}, its committed "
                f"length, got {start}; positions go on where the last step stopped"
            )
        if start + count > self.max_len:
            raise SpecError(
                f"positions of request {request!r} must be below max_len={self.max_len}, got "
                f"{start + count - 1}; build the manager with a larger max_len"
            )

    def _check_handles(self, handles: Handles) -> None:
        given = [handles] if isinstance(handles, LayerCacheHandle) else list(handles or ())
        ours = all(any(handle is known for known in self._handles) for handle in given)
        if not self._open.is_open or not given or not ours:
            got = "others" if self._open.is_open else "some although no step is open"
            raise StaleHandleError(
                f"handles must be those of the open step, got {got}; close each step once, with "
                "what acquire() returned"
            )

    def _check_whole(self, request: Hashable, record: RequestRecord) -> None:
        if record.replays:
            raise SpecError(
                f"request {request!r} must have its state, got {record.length} of "
                f"{record.stored} tokens replayed; run the others first"
            )

    def _check_held(self, snapshot: HybridSnapshot) -> None:
        if snapshot not in self._snapshots:
            raise StaleHandleError(
                f"the snapshot must be held by this manager, got {snapshot!r}; use one that "
                "snapshot() of it returned and that was not released"
            )

    def _check_closed(self, what: str) -> None:
        if self._open.is_open:
            raise FrozenError(
                f"no step may be open while the cache is {what}, got one of {len(self._open.runs)} "
                "requests; commit() or abort() it"
            )

    def _find_idle(self, request: Hashable) -> RequestRecord:
        record = self._table.find(request)
        if self._open.holds(request):
            raise FrozenError(
                f"request {request!r} must not be in the open step, got "
                f"{self._open.runs[request].count} tokens of it there; commit() or abort() it first"
            )
        return record

    def _capture(self, record: RequestRecord, length: int) -> LayerStates:
        return [state.capture(record.slot, length) for state in self.states]

    def _start(
        self, request: Hashable, blocks: Sequence[int], length: int, layers: LayerStates
    ) -> None:
        table = self._table
        table.allocator.share(blocks, request)
        record = RequestRecord(table.free_slots.pop(), length, list(blocks))
        record.floor = record.stored = record.written = length
        record.first = max(0, length - self.spec.window + 1)
        table.records[request] = record
        for state, captured in zip(self.states, layers, strict=True):
            state.restore(record.slot, length, captured)

    def _hit(self, ids: TokenIds, replay: bool) -> tuple[PrefixHit, list[int], list[bytes]]:
        size = self.spec.block_tokens
        blocks, digests = find_prefix(self._table.allocator, token_ids("ids", ids), size)
        found = len(blocks) * size
        with_state = [at + 1 for at, digest in enumerate(digests) if digest in self._prefixes]
        state = max(with_state, default=0) * size
        start = found - self.spec.replay_tokens
        parts = {"entries": found, "state": state}
        if replay and start > state:
            return PrefixHit(tokens=found, start=start, parts=parts), blocks, digests
        return PrefixHit(tokens=state, start=state, parts=parts), blocks, digests

    def _drop_lost_states(self) -> None:
        """Forget states of blocks that were handed out again."""
        for digest in self._prefixes.digests():
            if self._table.allocator.lookup(digest) is None:
                self._prefixes.drop(digest)
