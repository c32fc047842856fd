"""The oracle and the budgets that other tests stand on."""

import math

import pytest
import torch
from kv_core.fixed_slot import LayerKV
from kv_core.spec import KVFormat, KVSpec
from kv_kernels.testing import (
    LAYOUTS,
    STORAGES,
    assert_within_budget,
    attention_oracle,
    error_budget,
    exact_values,
    largest_error,
    make_layer,
    make_step,
    paged_attention_oracle,
    quantized,
    random_layer,
    random_mask,
    random_paged,
    random_tensor,
    split_qkv_norm_rope_oracle,
    storage_bytes,
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


def test_the_paged_oracle_agrees_with_attention_worked_out_by_hand() -> None:
    """Keys 1, 0 and 9 in blocks of two; a window of one; a cap; a token of padding."""
    layer = make_layer(KVSpec(kv_heads=1, head_dim=1, block_size=2, format=KVFormat.FP32), 3)
    layer.k[2, :, 0, 0], layer.v[2, :, 0, 0] = torch.tensor([[1.0, 0.0], [10.0, 20.0]])
    layer.k[0, 0], layer.v[0, 0] = 9.0, 90.0
    step = make_step([[2, 0]], [3], [2], 2, pad_tokens=1)
    q = torch.tensor([2.0, 0.0, 5.0])[:, None, None]
    e = math.exp(1.0)
    out, lse = paged_attention_oracle(q, layer, step, scale=0.5)
    assert out.flatten().tolist() == pytest.approx([(10 * e + 20) / (e + 1), 40.0, 0.0], rel=1e-14)
    assert lse.flatten().tolist() == pytest.approx([math.log(e + 1), math.log(3), -math.inf])
    out, _ = paged_attention_oracle(q, layer, step, scale=0.5, window_left=1)
    assert out.flatten().tolist() == pytest.approx([(10 * e + 20) / (e + 1), 55.0, 0.0], rel=1e-14)
    e = math.exp(0.1 * math.tanh(1.0 / 0.1))
    out, _ = paged_attention_oracle(q, layer, step, scale=0.5, softcap=0.1)
    assert out[0].item() == pytest.approx((10 * e + 20) / (e + 1), rel=1e-14)


def test_the_oracle_of_norm_and_rope_agrees_with_what_is_worked_out_by_hand() -> None:
    """Case D03, and a norm before the rotation."""
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0] * 3])
    turn = torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    sizes = {"kv_heads": 1, "head_dim": 4}
    weight = torch.tensor([1.0, 1.0, 2.0, 1.0])
    for style, wanted in (("half", [-3, -4, 1, 2]), ("interleaved", [-2, 1, -4, 3])):
        q, k, v = split_qkv_norm_rope_oracle(
            qkv, weight, None, *turn, **sizes, rope=style, eps=22.5
        )
        assert k.flatten().tolist() == wanted and v.flatten().tolist() == [1, 2, 3, 4]
        # the mean of the squares is 7.5, so the norm divides by the root of 30
        scaled = [x * (2 if abs(x) == 3 else 1) / math.sqrt(30) for x in wanted]
        assert q.flatten().tolist() == pytest.approx(scaled, rel=1e-14)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("fmt", [KVFormat.BF16, KVFormat.INT8], ids=lambda fmt: fmt.name)
def test_a_random_layer_holds_garbage_wherever_nothing_is_stored(
    storage: str, fmt: KVFormat
) -> None:
    spec = KVSpec(kv_heads=2, head_dim=8, block_size=4, format=fmt)
    layer, step = random_paged(
        spec, [6, 0, 3], [1, 0, 3], generator=torch.Generator().manual_seed(0), storage=storage
    )
    k, _ = layer.read(torch.arange(layer.capacity))
    stored = k.isfinite().all(-1).all(-1)
    assert stored.sum() == 9 and bool(stored[step.slots].all())
    assert k.isnan().sum() == (layer.capacity - 9) * 16
    assert step.null_block and not stored[:4].any()
    assert len(storage_bytes(layer)) == len(layer.tensors())


def test_a_storage_or_layout_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="storage must be one of NHD, HND, packed, padded"):
        make_layer(KVSpec(kv_heads=1, head_dim=1, format=KVFormat.FP32), 1, storage="NDH")
