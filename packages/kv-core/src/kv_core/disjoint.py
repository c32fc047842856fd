"""Which tensors share memory, decided from addresses and strides alone."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from kv_core.errors import AliasError

# Candidates that numpy's exact overlap test may try. Slices of one parent need a handful.
_MAX_WORK = 20_000
# Where data_ptr() is an address; elsewhere only the offset inside one storage means something.
_ADDRESSABLE = ("cpu", "cuda", "xpu")


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors share a byte; True also where that cannot be decided.

    Strides are taken into account: slices of one parent whose byte ranges interleave do not
    overlap. Works on addresses alone, on any device, and never waits for one.
    """
    try:
        return _share(a, b)
    except np.exceptions.TooHardError:
        return True


def check_disjoint(named: Sequence[tuple[str, Tensor]]) -> None:
    """Check that tensors which are going to be written share no byte, and no byte with themselves.

    Args:
        named: Pairs of a name for messages and a tensor of any shape.

    Raises:
        AliasError: Two of them overlap, one overlaps itself, or it cannot be shown that they do
            not. The message names both owners.
    """
    for name, tensor in named:
        _check_self_overlap(name, tensor)
    spans = sorted(
        (str(space), start, stop, index)
        for index, (_, tensor) in enumerate(named)
        if tensor.numel()
        for space, start, stop in [_span(tensor)]
    )
    open_spans: list[tuple[str, int, int]] = []
    for space, start, stop, index in spans:
        open_spans = [s for s in open_spans if s[0] == space and s[1] > start]
        for _, _, other in open_spans:
            _check_pair(named[min(other, index)], named[max(other, index)])
        open_spans.append((space, stop, index))


def _check_pair(first: tuple[str, Tensor], second: tuple[str, Tensor]) -> None:
    (a_name, a), (b_name, b) = first, second
    try:
        if not _share(a, b):
            return
        said = "share memory, so writing one would change the other"
    except np.exceptions.TooHardError:
        said = "cannot be shown to be disjoint: their strides interleave in an irregular way"
    raise AliasError(
        f"{a_name} and {b_name} {said}; give each its own buffer or its own slice of one parent"
    )


def _check_self_overlap(name: str, tensor: Tensor) -> None:
    if not tensor.numel():
        return
    reach = 0
    for stride, size, axis in sorted(
        (stride, size, axis)
        for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if size > 1
    ):
        if stride == 0:
            raise AliasError(
                f"{name} and {name} share memory: it is expanded, axis {axis} has size {size} and "
                "stride 0; pass a tensor in which every element has its own memory, such as "
                ".contiguous() makes"
            )
        if stride <= reach:
            raise AliasError(
                f"{name} and {name} share memory, or cannot be shown not to: axis {axis} has "
                f"stride {stride} while the axes inside it reach over {reach + 1} elements; pass a "
                "tensor in which every element has its own memory"
            )
        reach += (size - 1) * stride


class Footprint:
    """The byte ranges that some tensors span, for telling quickly that another lies outside."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Remember the ranges of ``tensors``, which must not move afterwards."""
        merged: dict[object, list[list[int]]] = {}
        for space, start, stop in sorted(
            (_span(tensor) for tensor in tensors if tensor.numel()),
            key=lambda span: (str(span[0]), span[1]),
        ):
            ranges = merged.setdefault(space, [])
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], stop)
            else:
                ranges.append([start, stop])
        self._starts = {space: [r[0] for r in ranges] for space, ranges in merged.items()}
        self._stops = {space: [r[1] for r in ranges] for space, ranges in merged.items()}

    def touches(self, tensor: Tensor) -> bool:
        """Say whether the byte range of ``tensor`` meets one of the ranges."""
        if not tensor.numel():
            return False
        space, start, stop = _span(tensor)
        if space not in self._starts:
            return False
        before = bisect_right(self._starts[space], stop - 1)
        return before > 0 and self._stops[space][before - 1] > start


def detached_from(
    footprint: Footprint,
    sources: Sequence[Tensor],
    places: Sequence[Tensor],
    written: Sequence[Tensor],
) -> list[Tensor]:
    """Return ``sources`` with each one cloned that shares memory with what is going to be written.

    Args:
        footprint: Ranges that contain every tensor of ``written``.
        sources: Tensors to read.
        places: Where each source is copied to. A source that is exactly its own place stays as it
            is, for copying it changes nothing.
        written: Everything that is going to be written, ``places`` included; disjoint.
    """
    near = [
        at
        for at, (source, place) in enumerate(zip(sources, places, strict=True))
        if footprint.touches(source) and not _same_view(source, place)
    ]
    if not near:
        return list(sources)
    result = list(sources)
    spans = [(*_span(tensor), tensor) for tensor in written if tensor.numel()]
    for at in near:
        space, start, stop = _span(sources[at])
        if any(
            space == other and start < last and first < stop and overlaps(sources[at], tensor)
            for other, first, last, tensor in spans
        ):
            result[at] = sources[at].clone()
    return result


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (
        a.device == b.device
        and a.dtype == b.dtype
        and a.is_neg() == b.is_neg()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and _span(a) == _span(b)
    )


def _span(tensor: Tensor) -> tuple[object, int, int]:
    """Return address space, first byte and one past the last of a tensor that is not empty."""
    item = tensor.element_size()
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    space: object = tensor.device
    if tensor.device.type in _ADDRESSABLE:
        start = tensor.data_ptr()
    else:
        space = (tensor.device, tensor.untyped_storage()._cdata)
        start = int(tensor.storage_offset()) * item
    return space, start, start + (reach + 1) * item


class _Bytes:
    """What numpy needs to place a tensor's elements in memory, which it then never reads."""

    def __init__(self, tensor: Tensor, start: int) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{item}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
            "data": (start, True),
        }


def _share(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    a_space, a_start, a_stop = _span(a)
    b_space, b_start, b_stop = _span(b)
    if a_space != b_space or a_stop <= b_start or b_stop <= a_start:
        return False
    # addresses may be offsets, and numpy takes 0 for "no memory", so move both up by a page
    views = np.asarray(_Bytes(a, a_start + 4096)), np.asarray(_Bytes(b, b_start + 4096))
    return np.shares_memory(*views, max_work=_MAX_WORK)  # type: ignore[arg-type]
