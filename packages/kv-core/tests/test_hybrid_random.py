"""Random histories of the hybrid cache, each request compared with one that ran alone."""

import math
from typing import Any

import torch
from hybrid_oracle import Stack, digest, fill, history, tiny_fp8
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_core import (
    HybridSnapshot,
    HybridSpec,
    KVCacheManager,
    KVError,
    OutOfBlocks,
    OutOfSlots,
    RollbackTooDeep,
    SharedBlockError,
)
from torch import Tensor

REQUESTS = st.sampled_from("abcd")
WORDS = st.sampled_from(["red", "green", "blue"])
SPECS = (
    tiny_fp8(ratios=(0, 4, 16)),
    tiny_fp8(ratios=(4, 16)).for_draft(4),
    tiny_fp8(ratios=(4, 0), layout="flashmla_v4").for_draft(7),
)
LONGEST = 70  # tokens of a request


class HybridMachine(RuleBasedStateMachine):
    """Requests whose tokens are words; what is expected of each depends on its words alone."""

    def __init__(self) -> None:
        """Hold nothing until a spec was drawn."""
        super().__init__()
        self.words: dict[str, list[str]] = {}
        self.outs: dict[str, list[Tensor]] = {}
        self.taken: list[tuple[HybridSnapshot, list[str], list[Tensor]]] = []

    @initialize(spec=st.sampled_from(SPECS), garbage=st.sampled_from([math.nan, 3e4]))
    def build(self, spec: HybridSpec, garbage: float) -> None:
        """Start with an empty cache in garbage."""
        self.stack = Stack(spec, heads=1, index_heads=2)
        self.cache = KVCacheManager(spec, slots=3, blocks=10, max_tokens=128)
        fill(self.cache, garbage)

    def run(self, new: dict[str, list[str]], **options: Any) -> Tensor | None:
        """Acquire and run new words; None, with nothing changed, where they do not fit."""
        starts = {request: len(self.words.get(request, [])) for request in new}
        ids = [request for request, words in new.items() for _ in words]
        positions = [starts[r] + i for r, words in new.items() for i in range(len(words))]
        before = digest(self.cache)
        try:
            self.handles = self.cache.acquire(ids, positions, **options)
        except (OutOfBlocks, OutOfSlots):
            assert digest(self.cache) == before
            return None
        flat = [word for words in new.values() for word in words]
        x = [self.stack.embed(word, [p]) for word, p in zip(flat, positions, strict=True)]
        return self.stack.step(self.handles, torch.cat(x), positions)

    @rule(data=st.data(), requests=st.lists(REQUESTS, min_size=1, max_size=3, unique=True))
    def step(self, data: st.DataObject, requests: list[str]) -> None:
        """Add words to some requests; of drafts, keep a part."""
        new = {}
        for request in requests:
            room = LONGEST - len(self.words.get(request, []))
            new[request] = data.draw(st.lists(WORDS, min_size=1, max_size=24))[:room]
        new = {request: words for request, words in new.items() if words}
        if not new:
            return
        limit = self.cache.spec.max_draft
        drafts = {r for r, words in new.items() if len(words) <= limit and r in self.words}
        out = self.run(new, speculative=drafts)
        if out is None:
            return
        kept = {request: data.draw(st.integers(1, len(new[request]))) for request in drafts}
        self.cache.commit(self.handles, accepted=kept)
        parts = out.split([len(words) for words in new.values()])
        for (request, words), rows in zip(new.items(), parts, strict=True):
            count = kept.get(request, len(words))
            self.words.setdefault(request, []).extend(words[:count])
            self.outs.setdefault(request, []).extend(rows[:count])

    @rule(request=REQUESTS, count=st.integers(1, 9), runs=st.booleans())
    def abort(self, request: str, count: int, runs: bool) -> None:
        """Give up on a step, before or after it ran."""
        words = ["lost"] * count
        if runs and request in self.words:
            words = words[:1]  # of longer runs the smallest ring cannot be rid again
        starts = len(self.words.get(request, []))
        try:
            if runs:
                if self.run({request: words}) is None:
                    return
            else:
                positions = range(starts, starts + len(words))
                self.handles = self.cache.acquire([request] * len(words), positions)
        except (OutOfBlocks, OutOfSlots):
            return
        try:
            self.cache.abort(self.handles)
        except RollbackTooDeep:  # the room behind was used up by drafts that were not kept
            self.cache.free(request)
            self.cache.abort(self.handles)
            self.forget(request)

    @rule(request=REQUESTS, count=st.integers(1, 8))
    def rollback(self, request: str, count: int) -> None:
        """Take words back, or be told why not."""
        length = len(self.words.get(request, [])) - count
        if length < 0:
            return
        before = digest(self.cache)
        try:
            self.cache.rollback(request, length)
        except (RollbackTooDeep, SharedBlockError):
            assert digest(self.cache) == before
            return
        del self.words[request][length:], self.outs[request][length:]

    @rule(source=REQUESTS, fresh=REQUESTS, fewer=st.integers(0, 3))
    def fork(self, source: str, fresh: str, fewer: int) -> None:
        """Start one request from another."""
        length = len(self.words.get(source, [])) - fewer
        if length < 1 or fresh in self.words:
            return
        before = digest(self.cache)
        try:
            self.cache.fork(source, fresh, length)
        except (RollbackTooDeep, OutOfBlocks, OutOfSlots):
            assert digest(self.cache) == before
            return
        self.words[fresh] = self.words[source][:length]
        self.outs[fresh] = self.outs[source][:length]

    @rule(request=REQUESTS)
    def free(self, request: str) -> None:
        """End a request."""
        if request in self.words:
            self.cache.free(request)
            self.forget(request)

    def forget(self, request: str) -> None:
        """Expect nothing of a request any more."""
        self.words.pop(request, None)
        self.outs.pop(request, None)

    @rule(request=REQUESTS)
    def set_aside(self, request: str) -> None:
        """Take a snapshot where there is one to take."""
        try:
            taken = self.cache.snapshot(request)
        except KVError:
            return
        n = taken.length
        self.taken.append((taken, self.words[request][:n], self.outs[request][:n]))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), request=REQUESTS, releases=st.booleans())
    def bring_back(self, data: st.DataObject, request: str, releases: bool) -> None:
        """Restore a snapshot or release it."""
        index = data.draw(st.integers(0, len(self.taken) - 1))
        taken, words, outs = self.taken[index]
        if releases:
            self.cache.release(taken)
            del self.taken[index]
        elif request not in self.words and len(self.words) < 3:
            self.cache.restore(request, taken)
            self.words[request], self.outs[request] = list(words), list(outs)

    @rule(request=REQUESTS, fresh=REQUESTS)
    def publish(self, request: str, fresh: str) -> None:
        """Publish what a request has, and start another from it."""
        words = self.words.get(request)
        if not words:
            return
        ids = {"red": 1, "green": 2, "blue": 3}
        prompt = [ids[word] for word in words]
        self.cache.publish(request, prompt)
        if fresh in self.words or len(self.words) == 3:
            return
        hit = self.cache.reuse(fresh, [*prompt, 0])
        assert hit.tokens <= len(words) and not hit.replay
        if hit.tokens:
            self.words[fresh] = words[: hit.tokens]
            self.outs[fresh] = self.outs[request][: hit.tokens]

    @invariant()
    def adds_up(self) -> None:
        """Blocks, slots and lengths agree."""
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert set(self.cache.requests) == set(self.words)
        for request, words in self.words.items():
            assert self.cache.length(request) == len(words)
            assert len(self.cache.blocks(request)) == -(-len(words) // 16)

    def teardown(self) -> None:
        """Compare every request with one that ran alone, in one step."""
        for request, words in self.words.items():
            if not words:
                continue
            alone = KVCacheManager(self.cache.spec, slots=1, blocks=8)
            x = [self.stack.embed(word, [p]) for p, word in enumerate(words)]
            handles = alone.acquire(["x"] * len(words), range(len(words)))
            expected = self.stack.step(handles, torch.cat(x), range(len(words)))
            alone.commit(handles)
            assert torch.equal(torch.stack(self.outs[request]), expected)
            assert history(self.cache, request) == history(alone, "x")


HybridMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestHybridMachine = HybridMachine.TestCase
