"""One launch of a Triton kernel, as a value: run here, or compiled for a GPU that is not here."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    """A kernel with its grid, its arguments in order, and its constants and compiler options.

    The first argument is a tensor, and says on which device the kernel runs.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Run it on the current stream of its device."""
        device = self.arguments[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.kernel[self.grid](*self.arguments, **self.options)
        else:
            self.kernel[self.grid](*self.arguments, **self.options)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """Return FP8 as bytes, for older devices have no such type; others as they are."""
    if tensor is None or tensor.dtype != torch.float8_e4m3fn:
        return tensor
    return tensor.view(torch.uint8)


def has_fp8(capability: tuple[int, int] | None) -> bool:
    """Whether a device of this compute capability, None for the interpreter, converts FP8."""
    return capability is not None and capability >= (8, 9)


def strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Return the first strides of a tensor, zeros where there is none."""
    return (0,) * axes if tensor is None else tensor.stride()[:axes]


def dense_ids(ids: Tensor) -> Tensor:
    """Return ids whose last axis lies in one piece; copies only where it does not."""
    return ids if ids.stride(-1) == 1 else ids.contiguous()


def row_tile(rows: int, heads: int, block_d: int) -> tuple[int, int, int]:
    """Choose how many tokens and heads one program moves.

    Args:
        rows: How many rows of D elements there are in all.
        heads: A number of heads that has to come out in whole groups.
        block_d: D, padded.

    Returns:
        Tokens and heads of a tile, and warps. A thread moves 16 elements either way: in one warp
        where there is little to do, in four where there is much.
    """
    warps = 1 if rows < 4096 else 4
    height = max(1, 512 * warps // block_d)
    group = min(math.gcd(heads, height), height)  # height is a power of two, so this one is too
    return height // group, group, warps
