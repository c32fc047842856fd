"""FP8, MXFP4 and NVFP4 codecs: every code, border, tie and byte that can be stored."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from kv_core import (
    DtypeError,
    ShapeError,
    SpecError,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
)
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_rows(width: int, rows: int = 50, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=g).mul(6).exp2()
    return torch.randn(rows, width, generator=g) * spread


def nearest(value: float, grid: list[float]) -> float:
    """Round to the nearest of a grid; where two are as near, to the one with an even index."""
    best = min(abs(value - g) for g in grid)
    near = [i for i, g in enumerate(grid) if abs(value - g) == best]
    return grid[next((i for i in near if i % 2 == 0), near[0])]


def e4m3_grid() -> list[float]:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes.double().tolist()


# --- FP8


def test_fp8_codes_are_the_nearest_with_a_scale_that_is_rounded_up() -> None:
    x = random_rows(128)
    codes, scale = quantize_fp8(x)
    assert (codes.shape, codes.dtype) == ((50, 128), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((50, 2), torch.uint8)
    grid = e4m3_grid()
    x = x.bfloat16().double()
    for row, half in itertools.product(range(50), range(2)):
        group = x[row, 64 * half : 64 * half + 64]
        step = 2.0 ** math.ceil(math.log2(max(group.abs().max().item(), 1e-4) / 448))
        assert scale[row, half].item() == math.log2(step) + 127
        found = codes[row, 64 * half : 64 * half + 64].double()
        wanted = [math.copysign(nearest(abs(v) / step, grid), v) for v in group.tolist()]
        assert found.tolist() == wanted


@pytest.mark.parametrize("power", range(-12, 100, 7))
def test_fp8_scales_of_exact_powers_and_their_neighbours(power: int) -> None:
    for largest, exponent in ((448.0, power), (450.0, power + 1), (446.0, power), (256.0, power)):
        codes, scale = quantize_fp8(torch.full((64,), largest * 2.0**power))
        assert scale.item() == exponent + 127
        assert codes.float().isfinite().all() and codes.float().max() <= 448


def test_c14_a_group_just_over_448_does_not_overflow() -> None:
    x = torch.zeros(64)
    x[0], x[1] = 450.0, 225.0
    codes, scale = quantize_fp8(x)
    back = dequantize_fp8(codes, scale)
    assert scale.item() == 128 and back[0] == 448.0 and back.isfinite().all()


def test_c15_a_zero_group_decodes_to_zero_with_a_finite_scale() -> None:
    codes, scale = quantize_fp8(torch.zeros(3, 128))
    assert (scale == 105).all() and not codes.view(torch.uint8).any()
    assert torch.equal(dequantize_fp8(codes, scale), torch.zeros(3, 128))


def test_fp8_poison_stays_in_its_channel() -> None:
    x = torch.ones(2, 128)
    x[0, 3], x[0, 70], x[0, 71] = torch.nan, torch.inf, -torch.inf
    back = dequantize_fp8(*quantize_fp8(x))
    assert torch.equal(back.isnan(), ~x.isfinite())
    assert (back[x.isfinite()] == 1).all()
    with pytest.raises(SpecError, match=r"x must be finite, got NaN or infinity at \(0, 3\)"):
        quantize_fp8(x, checked=True)


def test_fp8_error_on_normal_data_is_what_the_format_allows() -> None:
    x = torch.randn(500, 448, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    back = dequantize_fp8(*quantize_fp8(x))
    assert 0.02 < ((back - x).norm() / x.norm()).item() < 0.03


def test_every_scale_byte_has_a_reading() -> None:
    codes = torch.full((256, 64), 1.0).to(torch.float8_e4m3fn)
    back = dequantize_fp8(codes, torch.arange(256, dtype=torch.uint8)[:, None])[:, 0].double()
    assert torch.equal(back[:255], torch.arange(-127, 128).double().exp2()[:255])
    assert back[255].isnan()


# --- FP4


def test_mxfp4_codes_are_the_nearest_with_ties_to_even() -> None:
    x = random_rows(64)
    codes, scale = quantize_mxfp4(x)
    assert (codes.shape, scale.shape) == ((50, 32), (50, 2))
    x, back = x.bfloat16().double(), dequantize_mxfp4(codes, scale).double()
    for row, half in itertools.product(range(50), range(2)):
        part = slice(32 * half, 32 * half + 32)
        step = 2.0 ** math.ceil(math.log2(x[row, part].abs().max().item() / 6))
        assert scale[row, half].item() == math.log2(step) + 127
        wanted = [
            math.copysign(nearest(abs(v) / step, E2M1) * step, v) for v in x[row, part].tolist()
        ]
        assert back[row, part].tolist() == wanted


def test_e2m1_ties_go_to_the_even_code_and_zero_has_no_sign() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.zeros(32)
    x[:7], x[7:14], x[14] = torch.tensor(ties), -torch.tensor(ties), 6.0
    codes, scale = quantize_mxfp4(x)
    assert scale.item() == 127
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten().tolist()
    assert nibbles[:15] == [0, 2, 2, 4, 4, 6, 6, 0, 10, 10, 12, 12, 14, 14, 7]
    assert 8 not in nibbles  # the code of minus zero


def test_the_even_channel_is_the_low_nibble() -> None:
    x = torch.zeros(32)
    x[0], x[1] = 6.0, 1.0
    assert quantize_mxfp4(x)[0][0].item() == 0x27


def test_mxfp4_of_zeros_and_of_what_is_not_finite() -> None:
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 40] = torch.nan, torch.inf
    codes, scale = quantize_mxfp4(x)
    assert scale.tolist() == [[1, 1], [255, 1], [1, 255]]
    assert not codes.any()
    back = dequantize_mxfp4(codes, scale)
    assert back.isnan().sum() == 64 and not back[0].any()


@pytest.mark.parametrize("total", [1.0, 0.37])
def test_nvfp4_codes_are_the_nearest_under_their_two_scales(total: float) -> None:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize_nvfp4(x, total)
    assert (codes.shape, scale.shape, scale.dtype) == ((40, 16), (40, 2), torch.float8_e4m3fn)
    x, back = x.bfloat16().float(), dequantize_nvfp4(codes, scale, total)
    unit = (scale.float() * torch.tensor(total)).repeat_interleave(16, 1)
    found = (back / unit).double()
    wanted = [[math.copysign(nearest(abs(v), E2M1), v) for v in row] for row in (x / unit).tolist()]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=0)
    exact = (x.abs().view(40, 2, 16).amax(-1) / (torch.tensor(total) * 6)).to(torch.float8_e4m3fn)
    assert torch.equal(exact.view(torch.uint8), scale.view(torch.uint8))


def test_nvfp4_scales_stay_in_their_range() -> None:
    x = torch.zeros(3, 16)
    x[1], x[2, 0] = 1e6, torch.nan
    codes, scale = quantize_nvfp4(x)
    assert scale.float()[:2].flatten().tolist() == [2.0**-9, 448.0]
    assert scale.float()[2].isnan().all()
    back = dequantize_nvfp4(codes, scale)
    assert not back[0].any() and (back[1] == 6 * 448).all() and back[2].isnan().all()


def test_fp4_errors_on_normal_data_are_what_the_formats_allow() -> None:
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    mx, nv = dequantize_mxfp4(*quantize_mxfp4(x)), dequantize_nvfp4(*quantize_nvfp4(x))
    assert 0.10 < ((mx - x).norm() / x.norm()).item() < 0.12
    assert 0.08 < ((nv - x).norm() / x.norm()).item() < 0.10


# --- both


@pytest.mark.parametrize(
    ("quantize", "group"), [(quantize_fp8, 64), (quantize_mxfp4, 32), (quantize_nvfp4, 16)]
)
def test_wrong_input_is_refused(quantize: Any, group: int) -> None:
    with pytest.raises(DtypeError, match="x must be a floating tensor"):
        quantize(torch.zeros(2, group, dtype=torch.int8))
    with pytest.raises(ShapeError, match=f"with D a multiple of {group}, got"):
        quantize(torch.zeros(2, group + 1))
    with pytest.raises(ShapeError, match=f"with D a multiple of {group}, got"):
        quantize(torch.zeros(2, 0))
    half = quantize(torch.ones(2, 3, group, dtype=torch.float16))
    full = quantize(torch.ones(2, 3, group))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(half, full, strict=True)
    )


def test_codes_and_scales_have_to_fit() -> None:
    codes, scale = quantize_fp8(torch.ones(2, 128))
    with pytest.raises(ShapeError, match=r"scale must be .N0, D/64. with D/64=2, got D/64=1"):
        dequantize_fp8(codes, scale[:, :1])
    with pytest.raises(DtypeError, match=r"codes must be torch.float8_e4m3fn"):
        dequantize_fp8(codes.float(), scale)
    with pytest.raises(ShapeError, match="codes must hold a multiple of 64 channels, got 100"):
        dequantize_fp8(codes[:, :100], scale)
    codes, scale = quantize_mxfp4(torch.ones(2, 64))
    with pytest.raises(ShapeError, match="codes must hold a multiple of 32 channels, got 62"):
        dequantize_mxfp4(codes[:, :31], scale)


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_mxfp4, quantize_nvfp4])
def test_what_is_only_finite_before_it_is_rounded_is_refused(quantize: Any) -> None:
    with pytest.raises(SpecError, match=r"x must be finite, got NaN or infinity at \(0, 0\)"):
        quantize(torch.full((1, 64), 3.4e38), checked=True)


def test_a_group_has_at_least_one_channel() -> None:
    with pytest.raises(SpecError, match="group must be at least 1, got 0"):
        quantize_fp8(torch.ones(1, 64), group=0)


def test_results_are_floating_and_the_global_scale_is_positive() -> None:
    x = torch.ones(2, 64)
    stored = quantize_fp8(x), quantize_mxfp4(x), quantize_nvfp4(x)
    decode = dequantize_fp8, dequantize_mxfp4, partial(dequantize_nvfp4, global_scale=1.0)
    for (codes, scale), call in zip(stored, decode, strict=True):
        with pytest.raises(DtypeError, match=r"floating dtype, got torch.int32; for example"):
            call(codes, scale, dtype=torch.int32)
    for total in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SpecError, match=rf"global_scale must be positive .*, got {total}; use"):
            quantize_nvfp4(x, total)
