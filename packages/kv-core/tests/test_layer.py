"""KVLayer: what is stored where, paged and contiguous, in every format and layout."""

from typing import Any

import pytest
import torch
from kv_core import (
    AliasError,
    DtypeError,
    FrozenError,
    KVError,
    KVFormat,
    KVLayer,
    KVSpec,
    LayerKindError,
    ShapeError,
    SnapshotError,
    SpecError,
    dequantize_int8,
    load,
    quantize_int8,
    save,
)
from kv_core.paged import context_slots, read_rows, write_rows
from torch import Tensor

MIXED = {"k_format": KVFormat.FP16, "v_format": KVFormat.INT8}
FORMATS: dict[str, dict[str, KVFormat]] = {
    **{fmt.name: {"format": fmt} for fmt in KVFormat},
    "K16V8": MIXED,
    "K8V16": {"k_format": KVFormat.INT8, "v_format": KVFormat.FP16},
}
each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
each_layout = pytest.mark.parametrize("layout", ["NHD", "HND"])
each_kind = pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "contiguous"])


def spec(**formats: Any) -> KVSpec:
    return KVSpec(kv_heads=2, head_dim=6, block_size=4, **(formats or {"format": KVFormat.INT8}))


def layer(is_paged: bool = True, layout: Any = "NHD", **formats: Any) -> KVLayer:
    """Three blocks of four tokens, filled with what must not be read."""
    if is_paged:
        made = KVLayer.paged(spec(**formats), blocks=3, layout=layout)
    else:
        made = KVLayer.contiguous(spec(**formats), sequences=3, capacity=4, layout=layout)
    poison(made)
    return made


def poison(made: KVLayer) -> None:
    for tensor in made.tensors().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 127)


def rows(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, 2, 6, generator=g).to(dtype)
    return k, v


def as_stored(x: Tensor, fmt: KVFormat) -> Tensor:
    return dequantize_int8(*quantize_int8(x)) if fmt.is_quantized else x.to(fmt.dtype)


def snapshot(made: KVLayer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


def assert_same(made: KVLayer, before: dict[str, Tensor]) -> None:
    for name, tensor in made.tensors().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


# --- spec


def test_bytes_are_known_before_anything_is_allocated() -> None:
    for formats in FORMATS.values():
        paged = KVLayer.paged(spec(**formats), blocks=5)
        assert paged.nbytes == spec(**formats).nbytes(5 * 4)
        contiguous = KVLayer.contiguous(spec(**formats), sequences=3, capacity=7)
        assert contiguous.nbytes == spec(**formats).nbytes(3 * 7)
    assert KVSpec(kv_heads=8, head_dim=128, format=KVFormat.INT8).bytes_per_token == 2 * 8 * 132
    assert KVSpec(kv_heads=8, head_dim=128, format=KVFormat.BF16).bytes_per_token == 2 * 8 * 256
    assert KVSpec(kv_heads=8, head_dim=128, **MIXED).bytes_per_token == 8 * (256 + 132)


def test_formats_default_to_one_and_may_differ() -> None:
    same = KVSpec(kv_heads=1, head_dim=4, format=KVFormat.INT8)
    assert (same.k_format, same.v_format) == (KVFormat.INT8, KVFormat.INT8)
    overruled = KVSpec(kv_heads=1, head_dim=4, format=KVFormat.FP16, v_format=KVFormat.INT8)
    assert overruled == KVSpec(kv_heads=1, head_dim=4, **MIXED)
    assert overruled.format is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"kv_heads": 0}, SpecError, "kv_heads must be at least 1, got 0"),
        ({"block_size": 0}, SpecError, "block_size must be at least 1, got 0"),
        ({"head_dim": 64.0}, DtypeError, "head_dim must be an integer, got 64.0"),
        ({"format": "int8"}, DtypeError, "format must be a KVFormat, got 'int8'"),
        ({"v_format": torch.int8}, DtypeError, "v_format must be a KVFormat, got torch.int8"),
        ({"format": None}, SpecError, "k_format is not set; pass format= for keys and values"),
    ],
)
def test_impossible_specs_are_refused(given: Any, error: type[KVError], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        KVSpec(**{"kv_heads": 1, "head_dim": 4, "format": KVFormat.FP16} | given)


# --- write and read


@each_kind
@each_layout
@each_format
def test_what_is_written_is_read_and_nothing_else_changes(
    formats: Any, layout: Any, is_paged: bool
) -> None:
    made = layer(is_paged, layout, **formats)
    before = snapshot(made)
    slots = [11, 3, 4, 0]
    k, v = rows(4)
    made.write(k, v, torch.tensor(slots))
    read_k, read_v = made.read(torch.tensor(slots))
    torch.testing.assert_close(read_k, as_stored(k, made.spec.k_format), rtol=0, atol=0)
    torch.testing.assert_close(read_v, as_stored(v, made.spec.v_format), rtol=0, atol=0)
    for name, tensor in made.tensors().items():
        for slot in set(range(12)) - set(slots):
            kept, was = tensor[slot // 4, slot % 4], before[name][slot // 4, slot % 4]
            torch.testing.assert_close(kept, was, rtol=0, atol=0, equal_nan=True)


@each_format
def test_b01_slots_outside_the_pool_store_nothing(formats: Any) -> None:
    made = layer(**formats)
    before = snapshot(made)
    made.write(*rows(5), torch.tensor([-1, -2, 12, 13, -1]))
    assert_same(made, before)
    k, v = rows(2)
    made.write(k, v, torch.tensor([1, -1], dtype=torch.int32))
    changed = [
        slot
        for slot in range(12)
        if not torch.equal(made.k[slot // 4, slot % 4], before["k"][slot // 4, slot % 4])
        and not made.k[slot // 4, slot % 4].isnan().all()
    ]
    assert changed == [1]
    torch.testing.assert_close(
        made.read(torch.tensor([1]))[0], as_stored(k[:1], made.spec.k_format), rtol=0, atol=0
    )


def test_padding_before_the_first_live_token_writes_what_that_token_writes() -> None:
    made = layer(format=KVFormat.FP32)
    k, v = rows(3)
    k[0] = torch.nan  # a padding lane may hold anything
    made.write(k, v, torch.tensor([-1, 5, -1]))
    torch.testing.assert_close(made.read(torch.tensor([5]))[0], k[1:2], rtol=0, atol=0)


def test_reading_a_slot_outside_the_pool_gives_zeros() -> None:
    k, v = layer().read(torch.tensor([[-1, 12], [99, -7]]))
    assert k.shape == v.shape == (2, 2, 2, 6)
    assert not k.any() and not v.any()


def test_no_tokens_are_no_change() -> None:
    made = layer()
    before = snapshot(made)
    made.write(*rows(0), torch.zeros(0, dtype=torch.int64))
    assert_same(made, before)
    assert made.read(torch.zeros(0, dtype=torch.int64))[0].shape == (0, 2, 6)


def test_c01_keys_and_values_have_scales_of_their_own() -> None:
    made = layer()
    k, v = rows(1)
    k, v = k / k.abs().amax() * 0.02, v / v.abs().amax() * 30
    made.write(k, v, torch.tensor([0]))
    assert (made.read(torch.tensor([0]))[0] - k).abs().max() <= 7.9e-5


def test_scales_start_at_zero_and_lie_by_head() -> None:
    made = KVLayer.paged(spec(), blocks=3)
    assert made.k_scale is not None and not made.k_scale.any()
    assert made.k_scale.shape == (3, 4, 2) and made.k_scale.stride() == (8, 1, 4)


def test_activations_in_half_precision_are_quantised_as_they_are() -> None:
    made = layer()
    k, v = rows(2, dtype=torch.bfloat16)
    made.write(k, v, torch.tensor([0, 1]))
    codes, scale = quantize_int8(k)
    assert torch.equal(made.k[0, :2], codes)
    assert made.k_scale is not None and torch.equal(made.k_scale[0, :2], scale)


# --- blocks


@each_layout
@each_format
def test_c05_a_copied_block_takes_its_scales_along(formats: Any, layout: Any) -> None:
    made = layer(layout=layout, **formats)
    k, v = rows(4)
    made.write(k, v, torch.arange(4, 8))
    made.copy_blocks([1], [2])
    for here, there in zip(
        made.read(torch.arange(4, 8)), made.read(torch.arange(8, 12)), strict=True
    ):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_c05_blocks_can_swap() -> None:
    made = layer()
    k, v = rows(8)
    made.write(k, v, torch.arange(8))
    first, second = made.read(torch.arange(4)), made.read(torch.arange(4, 8))
    made.copy_blocks([0, 1], [1, 0])
    assert all(map(torch.equal, made.read(torch.arange(4)), second))
    assert all(map(torch.equal, made.read(torch.arange(4, 8)), first))


def test_cleared_blocks_read_as_zeros_and_others_stay() -> None:
    made = layer()
    made.write(*rows(12), torch.arange(12))
    kept = made.read(torch.arange(4, 8))
    made.zero_blocks([0, 2])
    assert not made.read(torch.tensor([0, 3, 8, 11]))[1].any()
    assert all(map(torch.equal, made.read(torch.arange(4, 8)), kept))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([0], [3], r"target\[0\] must be between 0 and 2, got 3"),
        ([-1], [0], r"source\[0\] must be between 0 and 2, got -1"),
        ([0, 1], [2, 2], "target must be as many different blocks as source"),
        ([0, 1], [2], "target must be as many different blocks as source, got 1 for 2"),
    ],
)
def test_impossible_copies_change_nothing(source: Any, target: Any, message: str) -> None:
    made = layer()
    before = snapshot(made)
    with pytest.raises(SpecError, match=message):
        made.copy_blocks(source, target)
    assert_same(made, before)


# --- growth


@each_layout
@each_format
def test_a_contiguous_layer_grows_by_half_to_a_multiple_of_64(formats: Any, layout: Any) -> None:
    made = KVLayer.contiguous(spec(**formats), sequences=2, capacity=100, layout=layout)
    k, v = rows(200)
    made.write(k, v, torch.arange(200))
    order = made.k.stride(1) > made.k.stride(2)
    before = made.read(torch.arange(200))
    assert not made.ensure_capacity(100)
    assert made.ensure_capacity(101)
    assert made.capacity == made.block_size == 192
    assert made.nbytes == spec(**formats).nbytes(2 * 192)
    assert (made.k.stride(1) > made.k.stride(2)) == order
    slots = torch.cat([torch.arange(100), torch.arange(192, 292)])
    assert all(map(torch.equal, made.read(slots), before))
    b14_new = torch.cat([torch.arange(100, 192), torch.arange(292, 384)])
    assert not made.read(b14_new)[0].any()
    assert made.ensure_capacity(1000) and made.capacity == 1024


def test_growth_is_refused_while_frozen_and_for_pages() -> None:
    made = KVLayer.contiguous(spec(), sequences=2, capacity=8)
    addresses = {name: t.data_ptr() for name, t in made.tensors().items()}
    made.frozen = True
    assert not made.ensure_capacity(8)
    with pytest.raises(FrozenError, match="holds 8 tokens a sequence and is frozen"):
        made.ensure_capacity(9)
    with pytest.raises(LayerKindError, match="a paged layer does not grow"):
        layer().ensure_capacity(9)
    assert {name: t.data_ptr() for name, t in made.tensors().items()} == addresses


# --- storage of the caller


def test_d01_halves_of_one_packed_buffer_are_a_layer() -> None:
    packed = torch.full((3, 2, 4, 12), 9.0)  # [P, H, N, K and V]
    k, v = packed.transpose(1, 2).split(6, -1)
    made = KVLayer.adopt(spec(format=KVFormat.FP32), k, v)
    new_k, new_v = rows(1)
    made.write(new_k, new_v, torch.tensor([5]))
    torch.testing.assert_close(packed[1, :, 1], torch.cat([new_k, new_v], -1)[0])
    packed[1, :, 1] = 9.0
    assert (packed == 9.0).all()


@pytest.mark.parametrize(
    "fault", ["shape", "dtype", "scale", "no scale", "alias", "expanded", "grad"]
)
def test_storage_that_does_not_fit_is_refused(fault: str) -> None:
    k, v = torch.zeros(2, 3, 4, 2, 6)
    scale = torch.zeros(3, 4, 2)
    formats: Any = {"format": KVFormat.FP32}
    given: list[Any] = [k, v]
    wanted: tuple[type[KVError], str] = (ShapeError, "v must be")
    if fault == "shape":
        given[1] = v[:, :3]
    elif fault == "dtype":
        given[1], wanted = v.half(), (DtypeError, "v must be torch.float32, got torch.float16")
    elif fault == "scale":
        given, wanted = [k, v, scale], (DtypeError, "k_scale must be None for FP32")
    elif fault == "no scale":
        formats = {}
        given, wanted = [k.to(torch.int8), v.to(torch.int8), scale], (DtypeError, "v_scale must be")
    elif fault == "alias":
        given, wanted = [k, k], (AliasError, "k and v share memory")
    elif fault == "expanded":
        wide = k[:1].expand(3, 4, 2, 6)
        given, wanted = [wide, v], (AliasError, "k and k share memory")
    else:
        given[0], wanted = k.clone().requires_grad_(), (SpecError, "k must not require grad")
    with pytest.raises(wanted[0], match=wanted[1]):
        KVLayer.adopt(spec(**formats), *given)


def test_an_adopted_layer_may_be_contiguous() -> None:
    k, v = torch.zeros(2, 3, 9, 2, 6)
    made = KVLayer.adopt(spec(format=KVFormat.FP32), k, v, is_paged=False)
    assert (made.capacity, made.num_blocks, made.is_paged) == (9, 3, False)


# --- wrong calls


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(3, 2, 6)}, ShapeError, "k must be .T, H, D. with T=2, got T=3"),
        ({"v": torch.zeros(2, 3, 6)}, ShapeError, "v must be .T, H, D. with H=2, got H=3"),
        ({"v": torch.zeros(2, 12)}, ShapeError, "v must be .T, H, D., got 2 axes"),
        ({"k": torch.zeros(2, 2, 6).to(torch.int8)}, DtypeError, "k must be floating"),
        ({"slots": torch.zeros(2)}, DtypeError, "slots must be torch.int32 or torch.int64"),
        ({"slots": [0, 1]}, DtypeError, "slots must be a torch.Tensor"),
        ({"v": torch.zeros(2, 2, 6, device="meta")}, DtypeError, "v must be on cpu, got meta"),
    ],
)
def test_a_refused_write_changes_nothing(change: Any, error: type[KVError], message: str) -> None:
    made = layer()
    before = snapshot(made)
    good = {"k": torch.zeros(2, 2, 6), "v": torch.zeros(2, 2, 6), "slots": torch.tensor([0, 1])}
    with pytest.raises(error, match=message):
        made.write(**good | change)
    assert_same(made, before)


def test_sizes_and_layouts_are_checked_before_allocating() -> None:
    with pytest.raises(SpecError, match="blocks must be at least 1, got 0"):
        KVLayer.paged(spec(), blocks=0)
    with pytest.raises(SpecError, match="capacity must be at least 1, got 0"):
        KVLayer.contiguous(spec(), sequences=1, capacity=0)
    with pytest.raises(SpecError, match='layout must be "NHD" or "HND", got \'DHN\''):
        KVLayer.paged(spec(), blocks=1, layout="DHN")  # type: ignore[arg-type]


def test_a_layer_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        made = layer()
    made.write(*rows(1), torch.tensor([2]))
    assert made.read(torch.tensor([2]))[0].any()


# --- snapshots


@each_kind
@each_format
def test_a_saved_layer_loads_into_dirty_storage(
    formats: Any, is_paged: bool, tmp_path: Any
) -> None:
    made = layer(is_paged, **formats)
    made.write(*rows(12), torch.arange(12))
    save(tmp_path / "layer", made.state_dict())
    other = layer(is_paged, "HND", **formats)
    addresses = [tensor.data_ptr() for tensor in other.tensors().values()]
    other.load_state_dict(load(tmp_path / "layer"))
    assert_same(other, snapshot(made))
    assert [tensor.data_ptr() for tensor in other.tensors().values()] == addresses


def test_a_state_of_another_layer_is_refused() -> None:
    made = layer()
    before = snapshot(made)
    for other, said in (
        (layer(**MIXED), "k_format is 'INT8' here and 'FP16' in the state"),
        (layer(is_paged=False), "is_paged is True here and False in the state"),
        (KVLayer.paged(spec(), blocks=4), "blocks is 3 here and 4 in the state"),
    ):
        with pytest.raises(SnapshotError, match=said):
            made.load_state_dict(other.state_dict())
    edited = layer().state_dict()
    del edited["tensors"]["v_scale"]
    with pytest.raises(SnapshotError, match="tensor 'v_scale' of the state must be"):
        made.load_state_dict(edited)
    assert_same(made, before)


# --- the plain functions


def test_context_slots_never_look_past_the_last_block() -> None:
    table = torch.tensor([[2, -1, 10**6], [0, 1, -5]], dtype=torch.int32)
    found = context_slots(table, torch.tensor([3, 0]), 4, 6)
    assert found.tolist() == [[8, 9, 10, -1, -1, -1], [-1] * 6]
    assert context_slots(table[1:, :2], torch.tensor([99]), 4, 10).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, -1, -1]
    ]


def test_written_rows_may_come_with_any_strides() -> None:
    cache = torch.zeros(2, 4, 2, 6)
    x = torch.randn(6, 2, 5).permute(2, 1, 0)
    write_rows(cache, None, x, torch.tensor([7, 1, 3, 2, 5]))
    assert torch.equal(read_rows(cache, None, torch.tensor([7, 1, 3, 2, 5])), x)


def test_slots_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"slots must be a torch.Tensor of ids, got list"):
        layer().read([0, 1])  # type: ignore[arg-type]
