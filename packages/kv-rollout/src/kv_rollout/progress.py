"""What the command says while it generates, and how Ctrl-C asks it to stop."""

import signal
import sys
import time
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Self

from kv_rollout.rollout import ChunkRollout
from kv_rollout.trace import ChunkTrace

_FINISHING = "finishing this chunk, then saving; Ctrl-C again gives the chunk up"


class Interrupts:
    """Take the first Ctrl-C as a wish to stop after this chunk, and the second as an order.

    Attributes:
        signal: The signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


class Progress:
    """Show how far a rollout is: a bar on a terminal, a line per chunk elsewhere.

    Args:
        rollout: What is being generated; ``advance`` is called after each of its chunks.
        interrupts: Whether somebody wants to stop.
    """

    def __init__(self, rollout: ChunkRollout, interrupts: Interrupts) -> None:
        self._rollout, self._interrupts = rollout, interrupts
        self._frames_left = rollout.geometry.frames_per_view - rollout.retained[1]
        self._began = self._latest = time.monotonic()
        self._frames = 0  # made since it began
        self._is_paced = False
        self._shown = ExitStack()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = self._shown.enter_context(_bar(self.pace))
            self._task = self._bar.add_task("", total=self._rollout.chunk_count)
            self._update()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.close()

    def advance(self, trace: ChunkTrace) -> None:
        """Note that a chunk is done."""
        self._latest = time.monotonic()
        self._frames_left -= trace.end - trace.start
        self._frames += trace.end - trace.start
        if self._bar is not None:
            self._update()
        else:
            what = f"chunk {trace.index + 1}/{self._rollout.chunk_count}"
            span = f"frames {trace.start} to {trace.end - 1}"
            print(f"{what}: {span}, {self.pace()}", file=sys.stderr, flush=True)
        if not self._is_paced:  # the first chunk may have compiled something: start the clock anew
            self._is_paced = True
            self._first = (self._latest - self._began) / self._frames
            self._began, self._frames = self._latest, 0

    def pace(self) -> str:
        """Return the rate and the time left in words, or what Ctrl-C led to."""
        if self._interrupts.signal is not None and self._bar is not None:
            return _FINISHING
        if self._frames:
            each = (self._latest - self._began) / self._frames
        elif self._is_paced:
            each = self._first
        else:
            return "first chunk"
        left = max(0.0, each * self._frames_left - (time.monotonic() - self._latest))
        return f"{1 / max(each, 1e-9):.1f} frames/s, {in_words(left)} left"

    def _update(self) -> None:
        done, count = self._rollout.chunks_done, self._rollout.chunk_count
        self._bar.update(self._task, completed=done, description=f"chunk {done}/{count}")


def _bar(pace: Any) -> Any:
    """Return rich's display with a bar, and ``pace()`` beside it, asked for while it is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress import Progress as Display
    from rich.text import Text

    class Pace(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(pace())

    return Display(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), Pace(),
        console=Console(stderr=True),
    )  # fmt: skip


def in_words(seconds: float) -> str:
    """Return a length of time as people say it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
