"""Tile sizes for flex on CUDA: a tile has to divide the mask block and fit in shared memory."""

import functools
from typing import Any

import torch

MIN_TILE = 16  # a side of a matrix product in Triton is at least this
MAX_HEAD = 256

_TUNED_HEADS = (64, 128, 256)  # head sizes for which torch ships tuned tiles
_SHARED_KB = {(8, 0): 160, (8, 7): 160, (9, 0): 224, (10, 0): 224}  # KB for one program
_SHARED_KB_OTHERS = 96


@functools.cache
def tile_options(
    capability: tuple[int, int],
    dtype: torch.dtype,
    k_dim: int,
    v_dim: int,
    block_size: tuple[int, int],
) -> tuple[tuple[str, Any], ...]:
    """Return flex kernel options for one format, head size and mask block.

    torch's own choice stands where it is tuned and divides every block. It does not adapt to small
    blocks, and does not know of values wider than keys.
    """
    # exact products for FP32 whatever torch.set_float32_matmul_precision says; no split over keys,
    # whose tile grows with the number of queries and then no longer divides the block
    options: dict[str, Any] = {"FLOAT32_PRECISION": "'ieee'", "BACKEND": "TRITON"}
    divisors = [size & -size for size in block_size]  # largest powers of two
    is_tuned = k_dim in _TUNED_HEADS and v_dim <= k_dim and min(divisors) >= 128
    if dtype == torch.float32 or not is_tuned:
        m, n = _tile(capability, dtype.itemsize, k_dim, v_dim, divisors)
        warps = 8 if m * max(k_dim, v_dim) > 64 * 128 else 4
        options |= {"BLOCK_M": m, "BLOCK_N": n, "num_stages": 2, "num_warps": warps}
    return tuple(options.items())


def _tile(
    capability: tuple[int, int], itemsize: int, k_dim: int, v_dim: int, divisors: list[int]
) -> tuple[int, int]:
    # Triton pads head sizes to powers of two
    k_dim, v_dim = (1 << (size - 1).bit_length() for size in (k_dim, v_dim))
    widest = max(k_dim, v_dim) * itemsize
    # exact FP32 products take no tensor cores: a taller tile spills registers, and is 3 to 30 times
    # slower on an H200
    tallest = 32 if itemsize == 4 else 128 if widest <= 256 else 64 if widest <= 512 else 32
    m = min(divisors[0], tallest)
    n = min(divisors[1], 64 if widest <= 512 else 32)
    room = 1024 * _SHARED_KB.get(capability, _SHARED_KB_OTHERS)
    while itemsize * (m * k_dim + 2 * n * (k_dim + v_dim)) > room and max(m, n) > MIN_TILE:
        m, n = (m // 2, n) if m > n else (m, n // 2)
    return m, n
