"""The window of the newest frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_core import DtypeError, ShapeError, SnapshotError, SpecError, TokenWindow, load, save
from torch import Tensor


def window(**options: Any) -> TokenWindow:
    sizes = {"batch": 2, "num_views": 3, "frames": 5, "spatial": 4, "width": 2}
    return TokenWindow(**{**sizes, "device": "cpu", "dtype": torch.float32, **options})


def frames(start: int, end: int) -> Tensor:
    """Frames ``[start, end)`` whose every number tells where it belongs."""
    B, V, F, X, W = 2, 3, end - start, 4, 2
    frame = torch.arange(start, end, dtype=torch.float32).view(1, 1, F, 1, 1)
    place = torch.arange(B * V * X * W, dtype=torch.float32).view(B, V, 1, X, W)
    return frame * 100 + place


def test_reads_are_right_across_every_wrap() -> None:
    held = window()
    end = 0
    for count in (1, 4, 3, 5, 2, 5, 1, 1):
        held.append(end, end + count, frames(end, end + count))
        end += count
        assert (held.start, held.end) == (max(0, end - 5), end)
        for start in range(held.start, end):
            for stop in range(start + 1, end + 1):
                assert torch.equal(held.read(start, stop), frames(start, stop))


def test_a_read_is_a_copy() -> None:
    held = window()
    held.append(0, 3, frames(0, 3))
    held.read(0, 3).fill_(7)
    held.read(1, 2).fill_(7)
    assert torch.equal(held.read(0, 3), frames(0, 3))


def test_what_is_appended_is_a_copy_and_needs_no_strides() -> None:
    held, wide = window(), frames(0, 3).permute(4, 3, 2, 1, 0).contiguous()
    held.append(0, 3, wide.permute(4, 3, 2, 1, 0))
    wide.fill_(7)
    assert torch.equal(held.read(0, 3), frames(0, 3))


def test_frames_that_require_grad_leave_no_graph() -> None:
    held = window()
    held.append(0, 2, frames(0, 2).requires_grad_() * 1)
    assert not held.read(0, 2).requires_grad


def test_a_window_made_in_inference_mode_works_outside() -> None:
    with torch.inference_mode():
        held = window()
        held.append(0, 1, frames(0, 1))
    held.append(1, 2, frames(1, 2))
    assert torch.equal(held.read(0, 2), frames(0, 2))


BAD_APPENDS: dict[str, tuple[tuple[Any, Any, Any], type[Exception], str]] = {
    "gap": ((7, 8, frames(7, 8)), SpecError, r"in order from frame 6, got frames \[7, 8\)"),
    "again": ((5, 6, frames(5, 6)), SpecError, r"in order from frame 6, got frames \[5, 6\)"),
    "none": ((6, 6, frames(6, 6)), SpecError, "between 1 and 5 frames .* at once, got 0"),
    "backwards": ((6, 5, frames(6, 7)), SpecError, "between 1 and 5 frames .* at once, got -1"),
    "too many": ((6, 12, frames(6, 12)), SpecError, "between 1 and 5 frames .* at once, got 6"),
    "shape": ((6, 8, frames(6, 9)), ShapeError, "tokens must be .* with F=2, got F=3; F is the"),
    "views": ((6, 7, frames(6, 7)[:, :2]), ShapeError, "tokens must be .* with V=3, got V=2"),
    "rank": ((6, 7, frames(6, 7)[0]), ShapeError, r"tokens must be \[B, V, F, X, W\], got 4 axes"),
    "dtype": ((6, 7, frames(6, 7).half()), DtypeError, r"tokens must be torch\.float32, got torch"),
    "device": ((6, 7, frames(6, 7).to("meta")), DtypeError, "tokens must be on cpu, got meta"),
    "float": ((6.0, 7, frames(6, 7)), DtypeError, "start frame must be an integer, got 6.0"),
    "list": ((6, 7, [1]), DtypeError, "tokens must be a torch.Tensor"),
}


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_APPENDS.values(), ids=BAD_APPENDS)
def test_a_refused_append_changes_nothing(
    arguments: tuple, kind: type[Exception], words: str
) -> None:
    held = window()
    held.append(0, 5, frames(0, 5))
    held.append(5, 6, frames(5, 6))
    with pytest.raises(kind, match=words):
        held.append(*arguments)
    assert (held.start, held.end) == (1, 6) and torch.equal(held.read(1, 6), frames(1, 6))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (
            (0, 3),
            r"must still be held .*\[0, 3\) of a window that holds frames \[2, 7\); read from",
        ),
        ((-1, 3), r"must still be held .*\[-1, 3\)"),
        (
            (5, 8),
            r"must have been appended .*\[5, 8\) .* holds frames \[2, 7\); append up to frame 8",
        ),
        ((4, 4), r"at least 1 frame must be read, got frames \[4, 4\)"),
        ((5, 4), "at least 1 frame must be read"),
    ],
)
def test_a_read_outside_of_the_window_names_what_is_held(span: tuple[int, int], words: str) -> None:
    held = window()
    held.append(0, 5, frames(0, 5))
    held.append(5, 7, frames(5, 7))
    with pytest.raises(SpecError, match=words):
        held.read(*span)


def test_reset_keeps_the_storage() -> None:
    held = window()
    held.append(0, 5, frames(0, 5))
    address, nbytes = held._ring.data_ptr(), held.nbytes
    held.reset()
    assert (held.start, held.end, held.capacity) == (0, 0, 5)
    with pytest.raises(SpecError, match=r"holds frames \[0, 0\)"):
        held.read(0, 1)
    held.append(0, 2, frames(0, 2) + 1)
    assert torch.equal(held.read(0, 2), frames(0, 2) + 1)
    assert held._ring.data_ptr() == address and held.nbytes == nbytes == 2 * 3 * 5 * 4 * 2 * 4


@pytest.mark.parametrize("name", ["batch", "num_views", "frames", "spatial", "width"])
def test_sizes_are_positive_integers(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} must be at least 1, got 0"):
        window(**{name: 0})
    for bad in (2.0, True):
        with pytest.raises(DtypeError, match=f"{name} must be an integer, got {bad}"):
            window(**{name: bad})
    window(**{name: np.int64(1)})


def test_settings_are_printed_and_unknown_ones_refused() -> None:
    held = window(dtype=torch.bfloat16)
    held.append(0, 2, frames(0, 2).bfloat16())
    assert repr(held) == (
        "TokenWindow(batch=2, num_views=3, frames=5, spatial=4, width=2, dtype=torch.bfloat16, "
        "holds [0, 2))"
    )
    with pytest.raises(TypeError, match="size"):
        window(size=3)
    with pytest.raises(DtypeError, match=r"dtype must be a floating dtype, got torch\.int64"):
        window(dtype=torch.int64)
    assert TokenWindow(
        num_views=1, frames=1, spatial=1, width=1, device="cpu", dtype=torch.float32
    ).read.__doc__


@pytest.mark.parametrize("end", [0, 3, 5, 13])
def test_a_state_continues_bit_for_bit(end: int, tmp_path: Path) -> None:
    held, twin = window(), window()
    for frame in range(end):
        held.append(frame, frame + 1, frames(frame, frame + 1))
    twin.append(0, 4, frames(0, 4) * 3)
    address = twin._ring.data_ptr()
    save(tmp_path / "window", held.state_dict())
    twin.load_state_dict(load(tmp_path / "window"))
    assert (twin.start, twin.end) == (held.start, held.end)
    assert twin._ring.data_ptr() == address
    for w in (held, twin):
        w.append(end, end + 2, frames(end, end + 2))
    assert torch.equal(held.read(held.start, held.end), twin.read(held.start, held.end))


def test_a_state_that_does_not_fit_is_refused() -> None:
    held = window()
    held.append(0, 4, frames(0, 4))
    state = held.state_dict()
    with pytest.raises(SnapshotError, match="another TokenWindow: frames is 6 here and 5 in the"):
        window(frames=6).load_state_dict(state)
    cut = {"meta": state["meta"], "tensors": {"frames": state["tensors"]["frames"][:, :, 1:]}}
    with pytest.raises(SnapshotError, match=r"'frames' of the state must be \[2, 3, 4, 4, 2\]"):
        held.load_state_dict(cut)
    for end in (-1, 2.0, True, None):
        odd = {"meta": {**state["meta"], "end": end}, "tensors": state["tensors"]}
        with pytest.raises(SnapshotError, match="end in the state must be a number of frames"):
            held.load_state_dict(odd)
    with pytest.raises(SnapshotError, match="got none; load a state"):
        held.load_state_dict({"meta": state["meta"], "tensors": {}})
    assert torch.equal(held.read(0, 4), frames(0, 4)) and held.end == 4
