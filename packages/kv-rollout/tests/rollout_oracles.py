"""Who sees whom, decided token by token and in seconds; shares no code with the package."""

from typing import NamedTuple

import torch
from kv_rollout import ClipGeometry, Segments, Visibility
from torch import Tensor


class Token(NamedTuple):
    sample: int
    role: int
    view: int
    frame: int
    noisy: bool


def tokens_of(segments: Segments) -> list[Token]:
    """Every token of a stream; its step is left out, so that the oracle counts it itself."""
    found = []
    for i in range(len(segments)):
        token = Token(
            int(segments.sample[i]),
            int(segments.role[i]),
            int(segments.view[i]),
            int(segments.frame[i]),
            bool(segments.noisy[i]),
        )
        found += [token] * int(segments.length[i])
    return found


def chunk_number(frame: int, frames_per_chunk: int) -> int:
    """The step of a frame, by walking the clip from its start."""
    step, first_of_next = 0, 1
    while frame >= first_of_next:
        step, first_of_next = step + 1, first_of_next + frames_per_chunk
    return step


class TokenOracle:
    """The rules, one pair of tokens at a time.

    ``window_seconds`` is what the user passed; the package compares whole frames instead.
    """

    def __init__(
        self, geometry: ClipGeometry, pattern: str, scope: str, window_seconds: float | None
    ) -> None:
        self.frames_per_chunk = geometry.frames_per_chunk
        self.seconds = geometry.seconds_per_frame
        self.pattern, self.scope, self.window = pattern, scope, window_seconds

    def visibility(self) -> Visibility:
        return Visibility.from_seconds(self.pattern, self.scope, self.window, self.seconds)

    def mask(self, q: Segments, kv: Segments) -> Tensor:
        keys = tokens_of(kv)
        rows = [[self.sees(query, key) for key in keys] for query in tokens_of(q)]
        return torch.tensor(rows, dtype=torch.bool).reshape(q.tokens, kv.tokens)

    def sees(self, q: Token, k: Token) -> bool:
        padding, text, control, given, current, clean = range(-1, 5)
        if padding in (q.role, k.role):
            return q.role == k.role
        if q.sample != k.sample or q.role == text:
            return False
        if k.role == text:
            return k.view in (-1, q.view)
        if q.role == control:
            return k.role == control and k.view == q.view and self.step(k) <= self.step(q)
        if q.role == given:
            if k.noisy and k.role != control:
                return self.is_near(q, k)
            return k.role == given and (k.view, k.frame) == (q.view, q.frame)
        assert q.role in (current, clean)
        if k.role == control:
            if k.view != q.view:
                return False
            if self.pattern == "current_control":
                return self.step(k) == self.step(q)
            return self.step(k) <= self.step(q)
        if k.role == given:
            return k.view == q.view and self.step(k) <= self.step(q)
        if not self.is_near(q, k):
            return False
        if k.role == current:
            return q.role == current and self.step(k) == self.step(q)
        if q.role == current:
            return self.step(k) < self.step(q)
        return self.step(k) <= self.step(q)

    def step(self, token: Token) -> int:
        return chunk_number(token.frame, self.frames_per_chunk)

    def is_near(self, q: Token, k: Token) -> bool:
        if q.view == k.view or self.scope == "all_views":
            return True
        if self.scope == "same_view":
            return False
        if self.window is None:
            return q.frame == k.frame
        ago = (q.frame - k.frame) * self.seconds
        return -1e-4 <= ago <= self.window + 1e-4
