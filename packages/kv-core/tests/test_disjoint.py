"""Which tensors may be written together."""

import itertools
import random

import pytest
import torch
from kv_core import AliasError, check_disjoint, overlaps
from torch import Tensor


def by_bytes(a: Tensor, b: Tensor) -> bool:
    """Decide by listing every byte address of both."""

    def addresses(tensor: Tensor) -> set[int]:
        item = tensor.element_size()
        offsets = torch.arange(tensor.storage_offset(), tensor.storage_offset() + 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
        return {o * item + byte for o in offsets.tolist() for byte in range(item)}

    return bool(addresses(a) & addresses(b))


def test_overlap_agrees_with_listing_every_byte() -> None:
    draw = random.Random(0)
    parent = torch.zeros(512, dtype=torch.uint8)
    seen = {True: 0, False: 0}
    for _ in range(400):
        views = []
        for _ in range(2):
            base = parent.view(draw.choice([torch.uint8, torch.int16, torch.float32]))
            shape = [draw.randint(1, 4) for _ in range(3)]
            stride = [draw.randint(0, 9) for _ in range(3)]
            room = base.numel() - sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            views.append(base.as_strided(shape, stride, draw.randrange(min(room, 40))))
        answer = by_bytes(*views)
        assert overlaps(*views) == answer
        seen[answer] += 1
    assert min(seen.values()) > 50


def test_sibling_slices_of_one_parent_are_disjoint() -> None:
    parent = torch.zeros(2, 3, 12, 8)
    for axis in range(4):
        first, second = parent.tensor_split(2, dim=axis)
        check_disjoint([("first", first), ("second", second)])
        grown = parent.narrow(axis, 0, first.shape[axis] + 1)
        with pytest.raises(AliasError, match=r"first and second share memory.*own slice"):
            check_disjoint([("first", grown), ("second", second)])


def test_even_and_odd_columns_are_disjoint() -> None:
    parent = torch.zeros(6, 8)
    check_disjoint([("even", parent[:, ::2]), ("odd", parent[:, 1::2])])


def test_one_array_seen_through_two_storages_is_found() -> None:
    array = torch.zeros(8).numpy()
    a, b = torch.from_numpy(array), torch.from_numpy(array[4:])
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    with pytest.raises(AliasError, match="a and b share memory"):
        check_disjoint([("a", a), ("b", b)])


def test_any_two_of_many_are_compared() -> None:
    parent = torch.zeros(40)
    parts = [(f"part {i}", parent[4 * i : 4 * i + 4]) for i in range(10)]
    check_disjoint(parts)
    for first, second in itertools.combinations(range(10), 2):
        clash = [*parts[:second], (f"part {second}", parts[first][1][1:3]), *parts[second + 1 :]]
        with pytest.raises(AliasError, match=f"part {first} and part {second} share memory"):
            check_disjoint(clash)


def test_a_wide_span_does_not_hide_a_later_pair() -> None:
    parent = torch.zeros(100)
    wide, a, b = parent[::99], parent[10:20], parent[15:25]
    with pytest.raises(AliasError, match="a and b"):
        check_disjoint([("wide", wide), ("a", a), ("b", b)])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(1, 2).expand(3, 2), "expanded, axis 0 has size 3 and stride 0"),
        (torch.zeros(8).as_strided((4, 3), (1, 1)), "axis 1 has stride 1|axis 0 has stride 1"),
        (torch.zeros(8).as_strided((3, 3), (2, 1)), "axis 0 has stride 2.*over 3 elements"),
    ],
)
def test_a_tensor_that_overlaps_itself_is_refused(tensor: Tensor, words: str) -> None:
    with pytest.raises(AliasError, match=f"mine and mine share memory.*({words})"):
        check_disjoint([("mine", tensor)])


def test_sizes_of_one_and_empty_tensors_hold_no_memory_twice() -> None:
    x = torch.zeros(4)
    check_disjoint([("one", torch.zeros(1, 2).expand(1, 2)), ("none", x[:0].expand(0))])
    check_disjoint([("x", x), ("empty", x[2:2])])
    assert not overlaps(x, x[2:2])


def test_devices_without_addresses_go_by_storage() -> None:
    x, y = torch.zeros(8, device="meta"), torch.zeros(8, device="meta")
    assert overlaps(x, x) and overlaps(x[:5], x[4:])
    assert not overlaps(x, y) and not overlaps(x[:4], x[4:])
    assert not overlaps(x, torch.zeros(8))


def test_what_cannot_be_decided_counts_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_core.disjoint._MAX_WORK", 1)
    parent = torch.zeros(60_000)
    a = parent.as_strided((6, 7, 8), (3001, 401, 53))
    b = parent.as_strided((6, 7, 8), (3011, 421, 59), 1)
    assert overlaps(a, b)
    with pytest.raises(AliasError, match="a and b cannot be shown to be disjoint"):
        check_disjoint([("a", a), ("b", b)])
