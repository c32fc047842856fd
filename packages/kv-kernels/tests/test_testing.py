"""The oracle and the budgets that other tests stand on."""

import math

import pytest
import torch
from kv_core.fixed_slot import LayerKV
from kv_kernels.testing import (
    LAYOUTS,
    assert_within_budget,
    attention_oracle,
    error_budget,
    exact_values,
    largest_error,
    quantized,
    random_layer,
    random_mask,
    random_tensor,
)


def test_the_oracle_agrees_with_attention_worked_out_by_hand() -> None:
    q = torch.tensor([[[[2.0], [0.0], [5.0]]]])
    k = torch.tensor([[[[1.0], [0.0], [9.0]]]])
    v = torch.tensor([[[[10.0], [20.0], [90.0]]]])
    visible = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    out, lse = attention_oracle(q, k, v, visible, scale=0.5)
    e = math.exp(1.0)
    assert out.flatten().tolist() == pytest.approx([(10 * e + 20) / (e + 1), 15.0, 0.0], rel=1e-15)
    assert lse.flatten().tolist() == pytest.approx([math.log(e + 1), math.log(2), -math.inf])


def test_the_oracle_keeps_a_nan_to_the_queries_that_see_it() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    v[0, 0, 3, 5] = torch.inf
    k[0, 1, 2] = torch.nan
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    out, _ = attention_oracle(q, k, v, visible)
    bad = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    bad[0, 0, 3, 5] = True
    bad[0, 1, 2:] = True
    assert torch.equal(out.isnan(), bad)


def test_the_oracle_shares_key_heads_among_query_heads() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    visible = torch.ones(3, 5, dtype=torch.bool)
    out, _ = attention_oracle(q, k, v, visible)
    third, _ = attention_oracle(q[:, 2:3], k[:, 1:], v[:, 1:], visible)
    torch.testing.assert_close(out[:, 2:3], third, rtol=0, atol=0)


def test_a_budget_is_twice_the_error_of_the_reference() -> None:
    oracle = torch.tensor([1.0, 2.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    reference = oracle.float()
    reference[0] += 0.25
    assert error_budget(reference, oracle) == 0.5
    assert error_budget(oracle.float(), oracle) == torch.finfo(torch.float32).eps * 2.0
    close = oracle.float()
    close[1] -= 0.5
    assert_within_budget(close, reference, oracle)
    close[1] -= 0.25
    with pytest.raises(AssertionError, match=r"error 7.500e-01 is over the budget of 5.000e-01"):
        assert_within_budget(close, reference, oracle)


def test_what_is_infinite_or_nan_has_to_be_exactly_that() -> None:
    oracle = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    for wrong in ([0.0, torch.inf], [torch.nan, -torch.inf], [torch.nan, torch.nan]):
        with pytest.raises(AssertionError, match="infinite or NaN"):
            largest_error(torch.tensor(wrong), oracle)
    with pytest.raises(AssertionError):
        assert_within_budget(torch.tensor([torch.nan]), torch.zeros(1), torch.zeros(1).double())


def test_layouts_are_the_same_numbers_in_other_places() -> None:
    drawn = {
        layout: random_tensor(
            (2, 3, 5, 8), generator=torch.Generator().manual_seed(1), layout=layout
        )
        for layout in LAYOUTS
    }
    assert all(torch.equal(x, drawn["contiguous"]) for x in drawn.values())
    assert drawn["contiguous"].is_contiguous()
    assert drawn["transposed"].transpose(1, 2).is_contiguous()
    assert drawn["sliced"].storage_offset() > 0 and not drawn["sliced"].is_contiguous()
    with pytest.raises(ValueError, match="layout must be one of contiguous, transposed, sliced"):
        random_tensor((1, 1, 1, 1), generator=torch.Generator(), layout="upside down")


def test_codes_times_scale_is_what_is_attended() -> None:
    layer = random_layer((1, 2, 3, 8), 4, generator=torch.Generator())
    assert isinstance(layer, LayerKV) and layer.v.shape == (1, 2, 3, 4)
    k, v = exact_values(quantized(layer))
    assert k.dtype == v.dtype == torch.float64
    assert (k - layer.k).abs().max() <= layer.k.abs().amax(-1).max() / 127 / 2 * 1.0001
    assert all(map(torch.equal, exact_values(layer), (layer.k.double(), layer.v.double())))


@pytest.mark.parametrize("empty", [False, True])
def test_a_random_mask_leaves_queries_empty_only_when_asked(empty: bool) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        mask = random_mask(20, 30, generator=generator, empty_queries=empty)
        seen = mask.dense().any(1)
        assert mask.dense().shape == (20, 30)
        assert bool(seen.all()) is not empty and bool(seen[-1])
