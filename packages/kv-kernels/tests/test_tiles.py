"""Tiles for CUDA, as numbers: they divide the mask blocks and fit in shared memory."""

import itertools

import pytest
import torch
from kv_kernels.ops.slot_attention.tiles import MAX_HEAD, MIN_TILE, tile_options

BLOCKS = [16, 32, 48, 64, 96, 128, 256, (64, 128), (128, 64), (16, 256), (144, 80)]
HEADS = [16, 33, 64, 80, 96, 128, 192, 256]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chosen_tiles_divide_every_block_and_fit(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    shared = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) * 1024
    for block, k_dim, v_dim in itertools.product(BLOCKS, HEADS, HEADS):
        sizes = block if isinstance(block, tuple) else (block, block)
        options = dict(tile_options(capability, dtype, k_dim, v_dim, sizes))
        if "BLOCK_M" not in options:
            assert k_dim in (64, 128, 256) and v_dim <= k_dim
            assert sizes[0] % 128 == 0 and sizes[1] % 128 == 0
            continue
        m, n, stages = (options[name] for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
        assert sizes[0] % m == 0 and sizes[1] % n == 0
        assert min(m, n) >= MIN_TILE and m & (m - 1) == 0 and n & (n - 1) == 0
        padded = [1 << (dim - 1).bit_length() for dim in (k_dim, v_dim)]
        assert dtype.itemsize * (m * padded[0] + stages * n * sum(padded)) <= shared


def test_products_of_fp32_are_exact_and_keys_are_never_split() -> None:
    options = dict(tile_options((9, 0), torch.float32, 64, 64, (128, 128)))
    assert options["FLOAT32_PRECISION"] == "'ieee'" and options["BACKEND"] == "TRITON"
    assert options["BLOCK_M"] == 32  # a taller tile would spill


def test_the_choice_of_torch_stands_where_it_is_tuned() -> None:
    options = dict(tile_options((9, 0), torch.bfloat16, 64, 64, (128, 128)))
    assert options == {"FLOAT32_PRECISION": "'ieee'", "BACKEND": "TRITON"}


def test_the_largest_head_fits_everywhere() -> None:
    sizes = (MIN_TILE, MIN_TILE)
    options = dict(tile_options((7, 5), torch.float32, MAX_HEAD, MAX_HEAD, sizes))
    assert (options["BLOCK_M"], options["BLOCK_N"]) == sizes
