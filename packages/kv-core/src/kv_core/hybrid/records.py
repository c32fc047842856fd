"""What the host knows of one request, and the runs that a step's tokens form."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kv_core.checks import check_int
from kv_core.errors import DtypeError, ShapeError, SpecError


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        slot: Its slot in the state pools.
        length: Tokens that were committed.
        blocks: Its block ids in order.
        floor: Shortest length it can be rolled back to: state before it was never here.
        stored: Tokens at the front whose entries are in place; ``length`` is below it only while
            the state of a prefix is rebuilt.
        written: Longest it ever was, tokens that were taken back included: they have overwritten
            rows of the rings, and going back does not undo that.
        first: Position of the first row that its ring ever had.
    """

    slot: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    floor: int = 0
    stored: int = 0
    written: int = 0
    first: int = 0

    @property
    def replays(self) -> bool:
        """Whether tokens whose entries are in place still have to run for their state."""
        return self.length < self.stored


def find_runs(
    request_ids: Sequence[Hashable], positions: Sequence[int]
) -> dict[Hashable, tuple[int, int]]:
    """Return start and count of each request's tokens, in order.

    Args:
        request_ids: ``[T]``, the tokens of a request next to each other.
        positions: ``[T]``, rising by one inside a request.

    Raises:
        DtypeError: Not sequences on the host, an id that is not hashable, or a position that is
            not an integer.
        ShapeError: Unequal lengths.
        SpecError: A request in two places, or positions with a gap or repeat.
    """
    for name, given in (("request_ids", request_ids), ("positions", positions)):
        if isinstance(given, (Tensor, str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
            raise DtypeError(
                f"{name} must be a list with one item for each token, got {type(given).__name__}; "
                "keep them on the host, for blocks are allocated from them"
            )
    if len(request_ids) != len(positions):
        raise ShapeError(
            f"positions must have one item for each of the {len(request_ids)} request_ids, got "
            f"{len(positions)}; name the request of every token"
        )
    runs: dict[Hashable, tuple[int, int]] = {}
    last: Hashable = None
    for index, (request, position) in enumerate(zip(request_ids, positions, strict=True)):
        check_hashable(request)
        at = check_int(f"positions[{index}] of request {request!r}", position, minimum=0)
        if runs and request == last:
            start, count = runs[request]
            if at != start + count:
                raise SpecError(
                    f"positions[{index}] of request {request!r} must be {start + count}, one after "
                    f"the token before, got {at}; leave no gap and repeat nothing"
                )
            runs[request] = start, count + 1
        elif request in runs:
            raise SpecError(
                f"the tokens of request {request!r} must be next to each other, got more at index "
                f"{index} after those of {last!r}; sort the step by request"
            )
        else:
            runs[request] = at, 1
        last = request
    return runs


def check_hashable(request: Hashable) -> None:
    """Check that a request id can be looked up.

    Raises:
        DtypeError: It is not hashable.
    """
    try:
        hash(request)
    except TypeError as error:
        raise DtypeError(
            f"request must be hashable, got {type(request).__name__}; use a str or int"
        ) from error
