"""Joining the parts of a call: as a view where they touch, in scratch memory where not."""

import threading

import pytest
import torch
from kv_core.codecs.int8 import dequantize_int8, quantize_int8
from kv_kernels.ops.slot_attention import parts
from kv_kernels.ops.slot_attention.parts import Part, empty_output, join


@pytest.fixture(autouse=True)
def _no_scratch() -> None:
    parts.release_scratch()


def _cut(buffer: torch.Tensor, *lengths: int) -> list[torch.Tensor]:
    return list(buffer[:, :, : sum(lengths)].split(lengths, 2))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_slices_behind_each_other_are_a_view(is_transposed: bool) -> None:
    k, v = torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 4)
    if is_transposed:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    pieces = [Part(*pair) for pair in zip(_cut(k, 5, 1, 7), _cut(v, 5, 1, 7), strict=True)]
    joined_k, joined_v = join(pieces, torch.float32)
    assert joined_k.data_ptr() == k.data_ptr() and joined_v.data_ptr() == v.data_ptr()
    assert torch.equal(joined_k, k[:, :, :13]) and torch.equal(joined_v, v[:, :, :13])
    assert parts.scratch_nbytes() == 0


def test_what_only_looks_adjacent_is_copied() -> None:
    k = torch.randn(1, 2, 20, 8)
    a, b, c = _cut(k, 5, 5, 5)
    cases = {
        "wrong order": [b, a],
        "a gap": [a, c],
        "twice the same": [a, a],
        "another buffer": [a, b.clone()],
        "other strides": [a, k[:, :, 5:15:2]],
    }
    for name, tensors in cases.items():
        joined, _ = join([Part(t, t) for t in tensors], torch.float32)
        assert torch.equal(joined, torch.cat(tensors, 2)), name
        assert joined.untyped_storage().data_ptr() != k.untyped_storage().data_ptr(), name


def test_codes_are_dequantised_next_to_floats() -> None:
    text, memory = torch.randn(2, 2, 3, 8).bfloat16(), torch.randn(2, 2, 6, 8)
    codes, scale = quantize_int8(memory)
    k, v = join([Part(text, text), Part(codes, codes, scale, scale)], torch.bfloat16)
    expected = torch.cat([text, dequantize_int8(codes, scale, torch.bfloat16)], 2)
    assert torch.equal(k, expected) and torch.equal(v, expected)


def test_scratch_is_reused_and_grows_to_the_largest_call() -> None:
    long, short = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 2, 4)
    sizes = []
    for tensor in (short, long, short):
        join([Part(tensor, tensor), Part(short, short)], torch.float32)
        sizes.append(parts.scratch_nbytes())
    assert sizes == [2 * 4 * 4 * 4, 2 * 11 * 4 * 4, 2 * 11 * 4 * 4]
    parts.release_scratch()
    assert parts.scratch_nbytes() == 0


def test_threads_do_not_share_scratch() -> None:
    tensor = torch.randn(1, 1, 2, 4)
    pieces = [Part(tensor, tensor), Part(tensor.clone(), tensor.clone())]
    mine, _ = join(pieces, torch.float32)
    seen: list[tuple[int, int]] = []

    def other() -> None:
        before = parts.scratch_nbytes()
        seen.append((before, join(pieces, torch.float32)[0].data_ptr()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0][0] == 0 and seen[0][1] != mine.data_ptr()


def test_an_output_follows_the_axes_of_the_queries() -> None:
    q = torch.empty(2, 5, 3, 8).transpose(1, 2)
    assert empty_output(q, 6).shape == (2, 3, 5, 6)
    assert empty_output(q, 6).transpose(1, 2).is_contiguous()
    assert empty_output(q.contiguous(), 6).is_contiguous()
