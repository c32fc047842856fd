"""The step between acquire and commit: its tensors, its runs, and what was done in it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from kv_core.errors import StaleHandleError
from kv_core.hybrid.step import HybridStep


@dataclass(slots=True)
class OpenRun:
    """The tokens of one request in the open step.

    Attributes:
        start: Length before the step.
        count: Tokens of the step.
        is_new: Whether the request began with this step.
        held: Blocks that it had before.
    """

    start: int
    count: int
    is_new: bool
    held: int


class OpenStep:
    """What handles ask: is there a step, and what was overwritten in it already.

    Args:
        device: Where the storage lives.

    Attributes:
        runs: The runs of the open step by request, those of freed requests included.
        freed: Requests of the open step that were freed meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without a step."""
        self._device = device
        self._step: HybridStep | None = None
        self._writes: set[tuple[int, str]] = set()
        self._was_captured = False
        self._generation = 0
        self.runs: dict[Hashable, OpenRun] = {}
        self.freed: list[Hashable] = []

    @property
    def is_open(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    @property
    def was_written(self) -> bool:
        """Whether rings may have been overwritten in the open step."""
        # a graph that was captured may have been replayed: the host would not know
        return bool(self._writes) or self._was_captured

    def begin(self, step: HybridStep, runs: dict[Hashable, OpenRun]) -> None:
        """Open a step."""
        self._step, self.runs = step, runs
        self._generation += 1

    def end(self) -> None:
        """Close the step; what was lent is stale from now on."""
        self._step, self.runs, self.freed, self._writes = None, {}, [], set()
        self._generation += 1

    def drop(self, request: Hashable) -> None:
        """Note that a request was freed; if it is in the step, what was lent is stale."""
        if request in self.runs and request not in self.freed:
            self.freed.append(request)
            self._generation += 1

    def holds(self, request: Hashable) -> bool:
        """Whether a live request is in the open step."""
        return request in self.runs and request not in self.freed

    def live(self) -> dict[Hashable, OpenRun]:
        """Return the runs of requests that were not freed."""
        return {request: run for request, run in self.runs.items() if request not in self.freed}

    def current(self) -> HybridStep:
        """Return the index tensors of the open step.

        Raises:
            StaleHandleError: No step is open, or one of its requests was freed.
        """
        if self._step is None:
            raise StaleHandleError(
                "a step must be open to use a handle, got one after commit() or abort(); "
                "acquire() the next step first"
            )
        if self.freed:
            raise StaleHandleError(
                f"requests of the open step must be live to use a handle, got {self.freed[0]!r}, "
                "which was freed; commit() or abort() the step"
            )
        return self._step

    def lease(self) -> Callable[[], None]:
        """Return a check that raises StaleHandleError once the open step is over."""
        lent = self._generation

        def check() -> None:
            if self._generation != lent:
                raise StaleHandleError(
                    f"a view must be read in the step it was made in, {lent}, got "
                    f"{self._generation}; ask the handle for a new one"
                )

        return check

    def longest_run(self) -> int:
        """Return the most tokens that a request with earlier ones has in the open step."""
        return max((run.count for run in self.runs.values() if run.start), default=0)

    def note_write(self, layer: int, part: str) -> None:
        """Remember that a ring or tail was overwritten in the open step."""
        self._writes.add((layer, part))
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._was_captured = True

    def wrote(self, layer: int, part: str) -> bool:
        """Whether a ring or tail was overwritten in the open step."""
        return (layer, part) in self._writes
