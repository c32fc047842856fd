"""The INT8 codec, code for code."""

import math
from fractions import Fraction

import pytest
import torch
from kv_core import DtypeError, ShapeError, SpecError, dequantize_int8, quantize_int8

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quantize(*row: float) -> tuple[list[int], float]:
    codes, scale = quantize_int8(torch.tensor(row, dtype=torch.float32))
    return codes.tolist(), scale.item()


def test_c01_key_and_value_have_scales_of_their_own() -> None:
    k, v = torch.tensor([0.02, -0.013, 0.001]), torch.tensor([30.0, -7.0, 0.5])
    codes, scale = quantize_int8(torch.stack([k, v]))
    decoded = dequantize_int8(codes, scale)
    assert (decoded[0] - k).abs().max() <= 7.9e-5
    assert scale.tolist() == [
        (torch.tensor(0.02) / torch.tensor(127.0)).item(),
        (torch.tensor(30.0) / torch.tensor(127.0)).item(),
    ]
    assert not torch.round(k / scale[1]).any()  # what one scale for both would have stored


def test_c02_halves_round_to_even() -> None:
    assert quantize(127, 0.5, 1.5, 2.5, -0.5, -1.5) == ([127, 0, 2, 2, 0, -2], 1.0)


def test_c03_zero_tiny_and_huge_rows() -> None:
    assert quantize(0, 0, 0) == ([0, 0, 0], 0.0)
    codes, scale = quantize(1e-6, -5e-7, 0, 0)
    assert codes == [127, -64, 0, 0] and f"{scale:.3e}" == "7.874e-09"
    assert quantize(300, 1, -1, 0.4)[0] == [127, 0, 0, 0]
    codes, scale = quantize(9e6, -9e6, 4.5e6)
    assert codes == [127, -127, 64] and math.isfinite(scale)
    largest = torch.finfo(torch.float32).max
    codes, scale = quantize(largest, -largest, 0)
    assert codes == [127, -127, 0] and math.isfinite(scale)


def test_a_row_below_the_smallest_magnitude_is_zero() -> None:
    tiny = 2.0**-120
    assert quantize(tiny, -tiny / 2)[0] == [127, -64]
    below = torch.tensor(tiny).nextafter(torch.tensor(0.0)).item()
    assert quantize(below, 0) == ([0, 0], 0.0)
    assert quantize(1e-45, 0) == ([0, 0], 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_visible_and_alone(bad: float) -> None:
    codes, scale = quantize_int8(torch.tensor([[1.0, bad, -3.0], [1.0, 2.0, 4.0]]))
    assert codes.tolist() == [[0, 0, 0], [32, 64, 127]]
    assert scale[0].isnan() and scale[1] == torch.tensor(4.0) / torch.tensor(127.0)
    assert dequantize_int8(codes, scale)[0].isnan().all()


def test_checked_names_the_row_that_is_not_finite() -> None:
    x = torch.ones(2, 3, 4)
    quantize_int8(x, checked=True)
    x[1, 2, 0] = math.nan
    with pytest.raises(SpecError, match=r"x must be finite, got NaN or infinity in row \(1, 2\)"):
        quantize_int8(x, checked=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_follow_the_definition_in_exact_arithmetic(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(40, 16, generator=generator) * torch.logspace(-9, 4, 40)[:, None]).to(dtype)
    codes, scale = quantize_int8(x)

    def nearest_fp32(value: Fraction) -> Fraction:
        return Fraction(torch.tensor(float(value), dtype=torch.float64).float().item())

    for row, row_codes, row_scale in zip(
        x.double().tolist(), codes.tolist(), scale.tolist(), strict=True
    ):
        amax = Fraction(max(map(abs, row)))
        if amax == 0:
            assert row_scale == 0 and not any(row_codes)
            continue
        # a quotient of two FP32 numbers rounded to FP64 first still rounds to the right FP32
        assert Fraction(row_scale) == nearest_fp32(amax / 127)
        inverse = nearest_fp32(127 / amax)
        wanted = [round(nearest_fp32(Fraction(e) * inverse)) for e in row]
        assert row_codes == [max(-127, min(127, code)) for code in wanted]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_errs_at_most_half_a_step(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 33, 80, generator=generator).to(dtype)
    codes, scale = quantize_int8(x)
    error = (codes.double() * scale[..., None].double() - x.double()).abs()
    # a half, and what rounding scale and inverse to FP32 can move a code of magnitude 127
    budget = 0.5 + 127 * 4 * torch.finfo(torch.float32).eps
    assert (error <= scale[..., None].double() * budget).all()
    assert codes.abs().max() == 127


def test_any_strides_give_the_same_codes() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
    codes, scale = quantize_int8(x)
    turned, turned_scale = quantize_int8(x.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(codes, turned) and torch.equal(scale, turned_scale)


def test_no_rows_are_no_trouble_but_no_elements_are() -> None:
    codes, scale = quantize_int8(torch.zeros(2, 0, 4))
    assert codes.shape == (2, 0, 4) and scale.shape == (2, 0)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    for shape in [(), (2, 0)]:
        with pytest.raises(ShapeError, match=r"x must be \[\.\.\., D\] with D >= 1"):
            quantize_int8(torch.zeros(shape))


def test_the_default_dtype_does_not_leak_in() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert quantize_int8(torch.ones(2, 2).float())[1].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_decoding_checks_its_arguments() -> None:
    codes, scale = quantize_int8(torch.ones(2, 3))
    assert dequantize_int8(codes, scale, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(DtypeError, match=r"codes must be torch\.int8, got torch\.float32"):
        dequantize_int8(codes.float(), scale)
    with pytest.raises(DtypeError, match=r"scale must be torch\.float32, got torch\.float16"):
        dequantize_int8(codes, scale.half())
    with pytest.raises(ShapeError, match=r"scale must be \[N0\] with N0=2, got N0=1"):
        dequantize_int8(codes, scale[:1])
    with pytest.raises(DtypeError, match=r"dtype must be a floating dtype, got torch\.int8"):
        dequantize_int8(codes, scale, torch.int8)
    with pytest.raises(DtypeError, match=r"x must be a floating tensor.*torch\.int8"):
        quantize_int8(codes)
