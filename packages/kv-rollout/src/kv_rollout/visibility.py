"""The one statement of who may see whom; every mask is made from it."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from kv_core.checks import check_int
from kv_core.errors import SpecError
from kv_kernels.masks import SegmentMask, check_block_size, mask_key

from kv_rollout.geometry import check_number, check_positive
from kv_rollout.segments import IntArray, Segments, TokenRole

AttentionPattern = Literal["causal", "current_control"]
AttentionScope = Literal["all_views", "same_view", "decomposed"]

BoolArray = npt.NDArray[np.bool_]

# Seconds by which a time window may miss a whole frame and still hold it.
_WINDOW_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """What a rollout may choose about who sees whom.

    Attributes:
        pattern: ``"causal"``: target frames see the controls of their own view up to their own
            step. ``"current_control"``: only those of their own step.
        scope: What target frames see of the targets of other views. ``"all_views"``: what they see
            of their own. ``"same_view"``: nothing. ``"decomposed"``: the same frame only, or with
            ``window_frames`` also so many frames before it.
        window_frames: How far back other views are seen, in frames; only with ``"decomposed"``.

    Raises:
        SpecError: A name is not one of these, or the window does not go with the scope.
        DtypeError: The window is not an integer.
    """

    pattern: AttentionPattern = "causal"
    scope: AttentionScope = "all_views"
    window_frames: int | None = None

    def __post_init__(self) -> None:
        """Check the names and the window."""
        _check_name("attention pattern", self.pattern, get_args(AttentionPattern))
        _check_name("attention scope", self.scope, get_args(AttentionScope))
        if self.window_frames is not None:
            _check_window_scope(self.scope)
            frames = check_int("window_frames", self.window_frames, minimum=0)
            object.__setattr__(self, "window_frames", frames)

    @classmethod
    def from_seconds(
        cls,
        pattern: AttentionPattern,
        scope: AttentionScope,
        window_seconds: float | None,
        seconds_per_frame: float,
    ) -> "Visibility":
        """Make a visibility with a window given in seconds, which holds whole frames.

        A window that misses a whole number of frames by no more than 0.0001 s counts as that.

        Raises:
            SpecError: As the class; or the window is negative or not finite.
            DtypeError: The window is not a number.
        """
        chosen = cls(pattern=pattern, scope=scope)  # names first: a typo is the likelier mistake
        if window_seconds is None:
            return chosen
        _check_window_scope(scope)
        seconds = check_number("the time window", window_seconds)
        if seconds < 0:
            raise SpecError(f"the time window must be at least 0 seconds, got {seconds:g}")
        per_frame = check_positive("seconds_per_frame", seconds_per_frame)
        # a quotient past what FP64 and int64 hold is longer than any clip
        frames = math.floor(min((seconds + _WINDOW_SLACK) / per_frame, 2.0**62))
        return cls(pattern=pattern, scope=scope, window_frames=frames)


def _check_name(what: str, name: object, legal: tuple[str, ...]) -> None:
    if not isinstance(name, str) or name not in legal:
        raise SpecError(f"{what} must be one of {', '.join(legal)}, got {name!r}")


def _check_window_scope(scope: str) -> None:
    if scope != "decomposed":
        raise SpecError(
            f"a time window goes with attention scope 'decomposed' only, got {scope!r}; leave the "
            "window out or change the scope"
        )


# --- the truth table


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Query segments as a column and key segments as a row, so that comparing them is a matrix."""

    q: Segments
    k: Segments
    rows: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    chosen: Visibility

    def of(self, name: str) -> tuple[IntArray, IntArray]:
        q, k = getattr(self.q, name)[self.rows], getattr(self.k, name)[self.columns]
        return q[:, None], k[None, :]


Rule = Callable[[_Pairs], BoolArray]


def _own(pairs: _Pairs) -> BoolArray:
    q, k = pairs.of("view")
    return q == k


def _caption(pairs: _Pairs) -> BoolArray:
    _, k = pairs.of("view")
    return (k < 0) | _own(pairs)


def _same_frame(pairs: _Pairs) -> BoolArray:
    q, k = pairs.of("frame")
    return q == k


def _near(pairs: _Pairs) -> BoolArray:
    """Whether the scope lets targets of the key's view be seen at all."""
    own = _own(pairs)
    if pairs.chosen.scope == "same_view":
        return own
    if pairs.chosen.scope == "all_views":
        return np.ones_like(own)
    q, k = pairs.of("frame")
    window = pairs.chosen.window_frames or 0
    return own | ((k <= q) & (q - k <= window))


def _up_to_step(pairs: _Pairs) -> BoolArray:
    q, k = pairs.of("step")
    return k <= q


def _before_step(pairs: _Pairs) -> BoolArray:
    q, k = pairs.of("step")
    return k < q


def _same_step(pairs: _Pairs) -> BoolArray:
    q, k = pairs.of("step")
    return k == q


def _own_so_far(pairs: _Pairs) -> BoolArray:
    return _own(pairs) & _up_to_step(pairs)


def _own_instant(pairs: _Pairs) -> BoolArray:
    return _own(pairs) & _same_frame(pairs)


def _control(pairs: _Pairs) -> BoolArray:
    is_causal = pairs.chosen.pattern == "causal"
    return _own(pairs) & (_up_to_step(pairs) if is_causal else _same_step(pairs))


def _flagged(pairs: _Pairs) -> BoolArray:
    return pairs.k.noisy[pairs.columns] & _near(pairs)


def _chunk(pairs: _Pairs) -> BoolArray:
    return _near(pairs) & _same_step(pairs)


def _past(pairs: _Pairs) -> BoolArray:
    return _near(pairs) & _before_step(pairs)


def _past_and_chunk(pairs: _Pairs) -> BoolArray:
    return _near(pairs) & _up_to_step(pairs)


# Who sees whom: query role, key role, and where. What is not listed is never seen, and all but
# padding is seen inside its own sample only.
_T = TokenRole
_RULES: dict[tuple[TokenRole, TokenRole], Rule] = {
    (_T.CONTROL, _T.TEXT): _caption,
    (_T.CONTROL, _T.CONTROL): _own_so_far,
    (_T.GIVEN, _T.TEXT): _caption,
    (_T.GIVEN, _T.GIVEN): _own_instant,
    (_T.GIVEN, _T.CURRENT): _flagged,
    (_T.GIVEN, _T.CLEAN): _flagged,
    (_T.CURRENT, _T.TEXT): _caption,
    (_T.CURRENT, _T.CONTROL): _control,
    (_T.CURRENT, _T.GIVEN): _own_so_far,
    (_T.CURRENT, _T.CURRENT): _chunk,
    (_T.CURRENT, _T.CLEAN): _past,
    (_T.CLEAN, _T.TEXT): _caption,
    (_T.CLEAN, _T.CONTROL): _control,
    (_T.CLEAN, _T.GIVEN): _own_so_far,
    (_T.CLEAN, _T.CLEAN): _past_and_chunk,
}


def segment_table(q: Segments, kv: Segments, visibility: Visibility) -> BoolArray:
    """Say which segments of keys each segment of queries sees.

    ======= ================= ================== ================ ============ ============
    query   text              control            given            current      clean
    ======= ================= ================== ================ ============ ============
    control shared, own view  own view, so far   no               no           no
    given   shared, own view  no                 own view, frame  flagged      flagged
    current shared, own view  own view, pattern  own view, so far same step    earlier steps
    clean   shared, own view  own view, pattern  own view, so far no           steps so far
    ======= ================= ================== ================ ============ ============

    "So far" is up to the query's own step. The last two columns hold for views that the scope lets
    through; "flagged" are keys marked ``noisy``. Text sees nothing. Padding sees padding, of any
    sample, and nothing else does; everything else sees its own sample only.

    Args:
        q: The queries, nq segments.
        kv: The keys, nk segments.
        visibility: What the rollout chose.

    Returns:
        bool ``[nq, nk]``, True where attention is allowed.
    """
    table = np.zeros((len(q), len(kv)), np.bool_)
    for q_role in np.unique(q.role).tolist():
        rows = np.flatnonzero(q.role == q_role)
        for k_role in np.unique(kv.role).tolist():
            columns = np.flatnonzero(kv.role == k_role)
            if q_role == k_role == TokenRole.PADDING:
                table[np.ix_(rows, columns)] = True
            elif (q_role, k_role) in _RULES:
                pairs = _Pairs(q, kv, rows, columns, visibility)
                q_sample, k_sample = pairs.of("sample")
                seen = _RULES[TokenRole(q_role), TokenRole(k_role)](pairs)
                table[np.ix_(rows, columns)] = seen & (q_sample == k_sample)
    return table


# --- masks


def segment_mask(
    q: Segments,
    kv: Segments,
    visibility: Visibility,
    *,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
    version: int = 0,
) -> SegmentMask:
    """Return the mask of the queries ``q`` over the keys ``kv``.

    Args:
        q: The queries.
        kv: The keys, in the order in which attention gets them.
        visibility: What the rollout chose.
        block_size: Tokens of a block of the mask, a number or ``(queries, keys)``.
        device: Where the mask lives.
        version: Kept with the mask; see `SegmentMask`.

    Raises:
        SpecError, DtypeError: The block size is not one.
    """
    table = segment_table(q, kv, visibility)
    return SegmentMask.build(
        table, q.length, kv.length, block_size=block_size, device=device, version=version
    )


class MaskCache:
    """Masks of one rollout, kept for as long as layouts repeat.

    Two passes whose segments see each other in the same way share one mask, whatever frames they
    are about, so that a bounded memory needs no new mask once its slots have gone round.

    Args:
        visibility: What the rollout chose.
        block_size: Tokens of a block of the mask, a number or ``(queries, keys)``.
        device: Where masks live.
        limit: Masks kept at most; the one not used for longest goes first.

    Attributes:
        built: How many masks were made so far.
        reused: How many were asked for and found.

    Raises:
        SpecError, DtypeError: The block size or the limit is not one.
    """

    def __init__(
        self,
        visibility: Visibility,
        *,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
        limit: int = 64,
    ) -> None:
        self._visibility = visibility
        self._block_size = check_block_size(block_size)
        self._device = torch.device(device)
        self._limit = check_int("limit", limit, minimum=1)
        self._masks: OrderedDict[bytes, SegmentMask] = OrderedDict()
        self.built = 0
        self.reused = 0

    def get(self, q: Segments, kv: Segments, version: int) -> SegmentMask:
        """Return the mask of ``q`` over ``kv``, stamped with ``version``."""
        table = segment_table(q, kv, self._visibility)
        key = mask_key(table, q.length, kv.length, self._block_size, self._device)
        mask = self._masks.get(key)
        if mask is None:
            mask = SegmentMask.build(
                table, q.length, kv.length, block_size=self._block_size, device=self._device
            )
            self._masks[key] = mask
            self.built += 1
            if len(self._masks) > self._limit:
                self._masks.popitem(last=False)
        else:
            self._masks.move_to_end(key)
            self.reused += 1
        return mask.stamped(version)

    @property
    def nbytes(self) -> int:
        """Bytes of all masks that are kept."""
        return sum(mask.nbytes for mask in self._masks.values())
