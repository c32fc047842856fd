"""The one comparison of tensors and numbers with what is wanted."""

import kv_core
import numpy as np
import pytest
import torch
from kv_core import DtypeError, ShapeError, SpecError, check_int, check_tensor


def test_a_wrong_size_is_named_with_its_axis() -> None:
    with pytest.raises(ShapeError) as caught:
        check_tensor("k", torch.zeros(1, 2, 5, 4), "B H T D", {"H": 3, "D": 4})
    assert str(caught.value) == "k must be [B, H, T, D] with H=3, got H=2"


def test_only_the_wrong_axes_are_listed() -> None:
    with pytest.raises(ShapeError, match=r"with B=2, D=8, got B=1, D=4; pad it$"):
        check_tensor("k", torch.zeros(1, 2, 4), "B H D", {"B": 2, "H": 2, "D": 8}, hint="pad it")


def test_a_repeated_letter_is_one_size() -> None:
    check_tensor("m", torch.zeros(3, 3), "N N", {})
    with pytest.raises(ShapeError, match=r"m must be \[N, N\] with N=3, got N=4"):
        check_tensor("m", torch.zeros(3, 4), "N N", {})


def test_the_device_may_leave_out_its_index() -> None:
    x = torch.zeros(2)
    check_tensor("x", x, "N", {"N": 2}, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(DtypeError, match=r"x must be on meta, got cpu; move it with \.to"):
        check_tensor("x", x, "N", {}, device=torch.device("meta"))


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), np.array(3)])
def test_integers_of_python_and_numpy_are_the_same(value: object) -> None:
    number = check_int("n", value, minimum=3, maximum=3)
    assert number == 3 and type(number) is int


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, [3]])
def test_what_is_not_an_integer_is_refused(value: object) -> None:
    with pytest.raises(DtypeError, match="n must be an integer, got"):
        check_int("n", value)


def test_a_tensor_is_no_integer_because_reading_it_would_wait() -> None:
    with pytest.raises(DtypeError, match="n must be an integer, got Tensor"):
        check_int("n", torch.tensor(3))


def test_a_number_out_of_range_is_an_error_of_the_kind_asked_for() -> None:
    with pytest.raises(SpecError, match="n must be at least 1, got 0"):
        check_int("n", 0, minimum=1)
    with pytest.raises(kv_core.CapacityError, match="n must be between 1 and 4, got 5"):
        check_int("n", 5, minimum=1, maximum=4, error=kv_core.CapacityError)
    with pytest.raises(SpecError, match="n must be at most 4, got 5"):
        check_int("n", 5, maximum=4)


def test_formats_know_their_dtypes() -> None:
    for fmt in kv_core.KVFormat:
        assert kv_core.KVFormat.of(fmt.dtype) is fmt
        assert fmt.is_quantized == (fmt is kv_core.KVFormat.INT8)
    with pytest.raises(DtypeError, match=r"must be one of torch\.float32 \(FP32\).*float64"):
        kv_core.KVFormat.of(torch.float64)
