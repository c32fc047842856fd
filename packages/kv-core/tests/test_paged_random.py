"""B10: random operations on table, allocator and INT8 layers against lists of plain values."""

import hashlib
import pickle
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core import (
    CapacityError,
    KVError,
    KVFormat,
    KVLayer,
    KVSpec,
    OutOfBlocks,
    RollbackTooDeep,
    SequenceTable,
    SpecError,
    UnknownRequest,
)
from torch import Tensor

H, D = 2, 4
ROWS = 4096  # plain values that are written, again and again
Given = dict[str, int | list[int]]


class Block:
    """What one used or findable block holds: rows of the plain values, by number."""

    def __init__(self, rows: list[int], owner: str) -> None:
        self.rows, self.owners, self.key = rows, {owner}, None


class Sequence:
    """One sequence of the model."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.ids: list[int] = []
        self.length = self.dropped = 0

    def rows(self) -> list[int]:
        rows, left = [], self.length - self.dropped
        for block in self.blocks:
            rows += block.rows[:left]
            left -= len(block.rows[:left])
        assert not left
        return rows


class Model:
    """The same table over dictionaries of lists; blocks that nobody can find are only counted."""

    def __init__(self, blocks: int, N: int, M: int, window: int | None, step_tokens: int) -> None:
        self.total, self.N, self.M, self.window = blocks - 1, N, M, window
        self.step_tokens = step_tokens
        self.plain, self.cached = blocks - 1, []  # free: a number, and blocks, oldest first
        self.found: dict[tuple[int, ...], Block] = {}
        self.sequences: dict[str, Sequence] = {}

    @property
    def free_blocks(self) -> int:
        return self.plain + len(self.cached)

    def sequence(self, request: str) -> Sequence:
        if request not in self.sequences:
            raise UnknownRequest
        return self.sequences[request]

    def unseen(self, length: int) -> int:
        return max(0, length - self.window + 1) if self.window else 0

    def release(self, block: Block, owner: str) -> None:
        block.owners.remove(owner)
        if not block.owners:
            if block.key:
                self.cached.append(block)
            else:
                self.plain += 1

    def release_all(self, blocks: list[Block], owner: str) -> None:
        for block in reversed(blocks):
            self.release(block, owner)

    def take(self, rows: list[int], owner: str) -> Block:
        if self.plain:
            self.plain -= 1
        elif self.cached:
            del self.found[self.cached.pop(0).key]
        else:
            raise OutOfBlocks
        return Block(rows, owner)

    def prefix(self, ids: list[int]) -> list[Block]:
        blocks = []
        while (end := (len(blocks) + 1) * self.N) < len(ids) and tuple(ids[:end]) in self.found:
            blocks.append(self.found[tuple(ids[:end])])
        return blocks

    def append(self, given: Given, rows: list[int]) -> dict[str, tuple[int, list[int]]]:
        """Return for each request what is reused and the rows that are to be written."""
        for new in given.values():
            if (new if isinstance(new, int) else len(new)) < 1:
                raise SpecError
        for request in given:
            if request in self.sequences:
                self.evict(request, self.unseen(self.sequences[request].length))
        work, result = [], {}
        for request, new in given.items():
            ids = None if isinstance(new, int) else list(new)
            count = new if isinstance(new, int) else len(new)
            reused = 0
            sequence = self.sequences.get(request)
            if sequence is None:
                sequence = self.sequences[request] = Sequence()
                blocks = self.prefix(ids or [])
                skip = min(self.unseen(len(blocks) * self.N) // self.N, len(blocks))
                if len(blocks) - skip <= self.M:
                    reused = sequence.length = len(blocks) * self.N
                    sequence.dropped, sequence.blocks = skip * self.N, blocks[skip:]
                    for block in sequence.blocks:
                        if not block.owners:
                            self.cached.remove(block)
                        block.owners.add(request)
                    sequence.ids, ids, count = (
                        (ids or [])[:reused],
                        (ids or [])[reused:],
                        count - reused,
                    )
            context = sequence.length - sequence.dropped
            if -(-(context + count) // self.N) > self.M:
                raise CapacityError
            partial, copied = context % self.N, None
            if partial:
                last = sequence.blocks[-1]
                if len(last.owners) > 1:
                    self.release(last, request)
                    copied = sequence.blocks.pop().rows[:partial]
                else:
                    if last.key:
                        del self.found[last.key]
                        last.key = None
                    del last.rows[partial:]
            work.append((request, sequence, copied, count))
            written, rows = rows[:count], rows[count:]
            result[request] = (reused, written)
            if not isinstance(new, int) and len(sequence.ids) == sequence.length:
                sequence.ids += ids or []
            sequence.length += count
        for request, sequence, copied, _ in work:
            if copied is not None:
                sequence.blocks.append(self.take(copied, request))
            for row in result[request][1]:
                if not sequence.blocks or len(sequence.blocks[-1].rows) == self.N:
                    sequence.blocks.append(self.take([], request))
                sequence.blocks[-1].rows.append(row)
        if sum(count for *_, count in work) > self.step_tokens:
            raise CapacityError
        return result

    def fork(self, source: str, target: str) -> None:
        old = self.sequence(source)
        if target in self.sequences:
            raise SpecError
        twin = self.sequences[target] = Sequence()
        twin.blocks, twin.ids = list(old.blocks), list(old.ids)
        twin.length, twin.dropped = old.length, old.dropped
        for block in twin.blocks:
            block.owners.add(target)

    def free(self, request: str) -> None:
        self.release_all(self.sequence(request).blocks, request)
        del self.sequences[request]

    def truncate(self, request: str, length: int) -> None:
        sequence = self.sequence(request)
        if not 0 <= length <= sequence.length:
            raise SpecError
        if length == sequence.length:
            return
        if (self.unseen(length) if self.window else length) < sequence.dropped:
            raise RollbackTooDeep
        kept = -(-(length - sequence.dropped) // self.N)
        self.release_all(sequence.blocks[kept:], request)
        del sequence.blocks[kept:]
        del sequence.ids[length:]
        sequence.length = length

    def evict(self, request: str, tokens: int) -> None:
        sequence = self.sequence(request)
        if not 0 <= tokens <= sequence.length:
            raise SpecError
        gone = max(0, tokens - sequence.dropped) // self.N
        self.release_all(sequence.blocks[:gone], request)
        del sequence.blocks[:gone]
        sequence.dropped += gone * self.N

    def publish(self, request: str) -> int:
        sequence, published = self.sequence(request), 0
        for index, block in enumerate(sequence.blocks):
            end = sequence.dropped + (index + 1) * self.N
            if end <= len(sequence.ids):
                key = tuple(sequence.ids[:end])
                if self.found.setdefault(key, block) is block:
                    block.key = key
                published += self.N
        return published

    def lookup(self, ids: list[int]) -> int:
        return len(self.prefix(ids)) * self.N


class Both:
    """A table over two INT8 layers and the model, each told the same."""

    def __init__(self, blocks: int, N: int, M: int, window: int | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plain = torch.randn(ROWS, 2, H, D, generator=generator)
        self.plain *= 10.0 ** torch.randint(-3, 4, (ROWS, 2, H, 1), generator=generator)
        self.plain[::31] = 0
        self.next_row, self.operations, self.size = 0, 0, (blocks, N, M, window)
        self.model = Model(blocks, N, M, window, step_tokens=2 * M * N - 1)
        self.table = self.make_table()
        self.kinds: Counter[str] = Counter()
        self.trace = hashlib.sha256()

    def make_table(self) -> SequenceTable:
        blocks, N, M, window = self.size
        layers = []
        for v_format in (KVFormat.INT8, KVFormat.FP32):
            spec = KVSpec(
                kv_heads=H, head_dim=D, block_size=N, k_format=KVFormat.INT8, v_format=v_format
            )
            layer = KVLayer.paged(spec, blocks=blocks)
            for tensor in layer.tensors().values():  # whatever was never written must not be read
                tensor.fill_(127 if tensor.dtype == torch.int8 else torch.nan)
            layers.append(layer)
        step_tokens = self.model.step_tokens
        return SequenceTable(
            layers, sequences=4, max_blocks=M, window=window, step_tokens=step_tokens
        )

    def do(self, name: str, *args: Any) -> None:
        """Call both, compare results or errors, write what was appended, and compare it all."""
        self.operations += 1
        expected: Any
        before = pickle.dumps(self.model.__dict__)
        state, step = self.table.state_dict(), None
        try:
            more = ()
            if name == "append":
                rows = [(self.next_row + i) % ROWS for i in range(200)]
                more = (rows,)
            expected = getattr(self.model, name)(*args, *more)
        except KVError as error:
            expected = type(error)
            self.model.__dict__.update(pickle.loads(before))
        try:
            if name == "append":
                pads = {"pad_sequences": 4} if self.operations % 3 else {}
                actual = step = self.table.append(args[0], **pads)
            else:
                actual = getattr(self.table, name)(*args)
        except KVError as error:
            actual = type(error)
            after = self.table.state_dict()
            assert after["meta"] == state["meta"]
            assert torch.equal(after["tensors"]["ids"], state["tensors"]["ids"])
        if step is None:
            assert actual == expected, (name, args)
        else:
            assert isinstance(expected, dict), (name, args, expected)
            self.write(step, expected)
        outcome = expected.__name__ if isinstance(expected, type) else "done"
        self.kinds[f"{name} {outcome}"] += 1
        if step is not None and any(reused for reused, _ in expected.values()):
            self.kinds["append reused"] += 1
        self.compare()
        slots = [self.table.slots_of(request).tolist() for request in self.table.requests]
        self.trace.update(repr((name, args, outcome, slots)).encode())

    def write(self, step: Any, expected: dict[str, tuple[int, list[int]]]) -> None:
        rows = [row for _, written in expected.values() for row in written]
        self.next_row = (self.next_row + len(rows)) % ROWS
        assert step.requests == tuple(expected) and step.num_tokens == len(rows)
        assert {r: n for r, n in step.reused.items() if n} == {
            request: reused for request, (reused, _) in expected.items() if reused
        }
        pool, N = self.table.allocator, self.table.block_size
        assert step.slots.unique().numel() == len(rows)
        for slot in step.slots.tolist():
            assert pool.count(slot // N) == 1 and not pool.is_published(slot // N)
        ends = step.cu_seqlens.tolist()
        for b, (request, (_, written)) in enumerate(expected.items()):
            length = self.table.length(request)
            positions = step.positions[ends[b] : ends[b + 1]].tolist()
            assert positions == list(range(length - len(written), length))
            assert step.context_lens[b] == self.table.context(request) <= step.max_context
            blocks = self.table.blocks_of(request)
            assert step.block_table[b].tolist()[: len(blocks)] == blocks
            assert len(written) <= step.max_query
        assert not step.context_lens[len(expected) :].any()
        for layer in self.table.layers:
            layer.write(self.plain[rows, 0], self.plain[rows, 1], step.slots)

    def compare(self) -> None:
        table, model = self.table, self.model
        table.check()
        pool = table.allocator
        assert table.requests == tuple(model.sequences)
        used = {id(b) for sequence in model.sequences.values() for b in sequence.blocks}
        assert (pool.num_used, pool.num_free) == (len(used), model.free_blocks)
        assert len(used) + model.free_blocks == model.total == pool.blocks - 1
        assert sum(map(pool.is_published, range(pool.blocks))) == len(model.found)
        rows, slots = [], []
        for request, sequence in model.sequences.items():
            assert table.length(request) == sequence.length
            blocks = table.blocks_of(request)
            assert list(map(pool.count, blocks)) == [len(b.owners) for b in sequence.blocks]
            rows += sequence.rows()
            slots.append(table.slots_of(request))
        if not rows:
            return
        plain = self.plain[rows]
        for layer in table.layers:
            k, v = layer.read(torch.cat(slots))
            self.close(k, plain[:, 0])
            if layer.spec.v_format is KVFormat.INT8:
                self.close(v, plain[:, 1])
            else:
                assert torch.equal(v, plain[:, 1])

    def close(self, stored: Tensor, plain: Tensor) -> None:
        half = plain.abs().amax(-1, keepdim=True) / 127 / 2
        assert ((stored - plain).abs() <= half * (1 + 2.0**-16)).all()

    def reload(self) -> None:
        """Go on with a table and layers that were dirty before they took over the state."""
        old, self.table = self.table, self.make_table()
        self.table.append({"other": 1})
        self.table.load_state_dict(old.state_dict())
        for layer, twin in zip(old.layers, self.table.layers, strict=True):
            twin.load_state_dict(layer.state_dict())
        assert repr(old) == repr(self.table)
        self.operations += 1
        self.kinds["reload"] += 1
        self.compare()


SIZES = [(7, 2, 4, None), (8, 3, 5, None), (9, 4, 6, 6), (8, 2, 7, 3), (7, 4, 3, None)]
NAMES = "abcdef"


def prompt(choose: random.Random, longest: int) -> list[int]:
    """Token ids that often begin as others do."""
    base = choose.choice([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 9, 9, 9, 9, 5, 5]])
    ids = base[: choose.randint(longest // 2, longest)]
    return ids + [choose.randint(0, 2)] * choose.choice([0, 0, 1, 2])


def walk(both: Both, choose: random.Random, operations: int) -> None:
    """Do random operations."""
    _, N, M, _ = both.size
    while both.operations < operations:
        table = both.table
        known = list(table.requests)
        request = choose.choice(known * 2 + list(NAMES))
        gives_back = 1 if table.num_free_blocks > 2 else 3
        length = table.length(request) if request in known else 3
        kind = choose.choices(
            ["append", "fork", "truncate", "free", "publish", "lookup", "evict", "reload"],
            [40, 6, 10 * gives_back, 12 * gives_back, 4, 6, 6 * gives_back, 0.5],
        )[0]
        if kind == "append":
            names = choose.sample(NAMES, choose.choice([1, 1, 2, 3]))
            longest = choose.choice([2, N + 1, 2 * N + 1, 2 * N + 1, M * N + 1])
            given = {
                name: prompt(choose, longest)
                if choose.random() < 0.75
                else choose.randint(choose.random() > 0.05, longest)
                for name in [request, *(n for n in names if n != request)][: len(names)]
            }
            both.do("append", given)
            for name in choose.choice([[], list(given)]):
                both.do("publish", name)
        elif kind == "fork":
            both.do("fork", request, choose.choice(NAMES))
        elif kind == "truncate":
            back = choose.choice([1, 2, N, length, length + 1, -1])
            both.do("truncate", request, length - back)
        elif kind == "evict":
            both.do("evict", request, choose.randint(-1, length + 1))
        elif kind == "lookup":
            both.do("lookup", prompt(choose, 99))
        elif kind == "reload":
            both.reload()
        else:
            both.do(kind, request)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_b10_10000_operations_agree_with_lists_of_plain_values(size: Any) -> None:
    both = Both(*size, seed=SIZES.index(size))
    walk(both, random.Random(SIZES.index(size)), 10_000 // len(SIZES))
    assert both.operations >= 10_000 // len(SIZES)
    seen = set(both.kinds)
    wanted = {"append done", "append OutOfBlocks", "append CapacityError", "append reused"}
    wanted |= {
        f"{name} done" for name in ("fork", "truncate", "free", "publish", "lookup", "evict")
    }
    wanted |= {"truncate SpecError", "truncate RollbackTooDeep", "fork UnknownRequest", "reload"}
    assert wanted <= seen, wanted - seen
    for request in both.table.requests:
        both.table.free(request)
    assert both.table.num_used_blocks == 0 and both.table.num_free_blocks == size[0] - 1


def test_b10_same_seed_same_trace() -> None:
    traces = []
    for seed in (5, 5, 6):
        both = Both(*SIZES[1], seed=0)
        walk(both, random.Random(seed), 300)
        traces.append(both.trace.hexdigest())
    assert traces[0] == traces[1] != traces[2]


requests = st.sampled_from(NAMES)
ids = st.builds(
    lambda head, tail: [1, 2, 3, 4, 5, 6, 7, 8][:head] + tail,
    st.integers(0, 8),
    st.lists(st.integers(0, 2), max_size=4),
)


class Paged(RuleBasedStateMachine):
    """The same comparison, with operations that hypothesis chooses and makes smaller."""

    @initialize(size=st.sampled_from(SIZES))
    def build(self, size: tuple[int, int, int, int | None]) -> None:
        self.both = Both(*size, seed=0)

    @rule(given=st.dictionaries(requests, st.integers(0, 9) | ids, max_size=3))
    def append(self, given: Given) -> None:
        self.both.do("append", given)

    @rule(source=requests, twin=requests)  # hypothesis wants the name "target" for itself
    def fork(self, source: str, twin: str) -> None:
        self.both.do("fork", source, twin)

    @rule(request=requests, length=st.integers(-1, 12))
    def truncate(self, request: str, length: int) -> None:
        self.both.do("truncate", request, length)

    @rule(request=requests, tokens=st.integers(-1, 12))
    def evict(self, request: str, tokens: int) -> None:
        self.both.do("evict", request, tokens)

    @rule(request=requests)
    def free(self, request: str) -> None:
        self.both.do("free", request)

    @rule(request=requests)
    def publish(self, request: str) -> None:
        self.both.do("publish", request)

    @rule(prompt=ids)
    def lookup(self, prompt: list[int]) -> None:
        self.both.do("lookup", prompt)

    @rule()
    def reload(self) -> None:
        self.both.reload()

    @invariant()
    def both_agree(self) -> None:
        if hasattr(self, "both"):
            self.both.compare()


Paged.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestPaged = Paged.TestCase
