"""The memory of a running clip: layouts, stale masks, networks that break their word."""

import pytest
import torch
from kv_core import DtypeError, KVFormat, RolloutStateError, ShapeError, SpecError
from kv_rollout import ChunkRollout, SlotState, plan_memory
from rollout_toy import V_DIM, ToyModel, ToyNetwork, toy_geometry, toy_inputs


def rollout_with(network: object, **options) -> ChunkRollout:
    class Model(ToyModel):
        def prepare_rollout(self, setup, controls):
            return SlotState(network, setup, controls, device=self.device, dtype=self.dtype)

    geometry = toy_geometry(options.pop("frames", 9))
    return ChunkRollout(Model(), geometry=geometry, **toy_inputs(geometry) | options)


class Bent(ToyNetwork):
    """The toy network with one promise broken."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def encode_text(self, text_ids, positions):
        text = super().encode_text(text_ids, positions)
        return text[:1] if self.how == "text layers" else text

    def __call__(self, tokens, *, role, timestep, positions, attend):
        def bent(layer, q, k, v):
            if self.how == "skips a layer" and layer == 1:
                return torch.zeros(*q.shape[:3], V_DIM)
            if self.how == "wide keys":
                k = torch.cat([k, k], -1)
            if self.how == "double values":
                v = v.double()
            if self.how == "few keys":
                k, v = k[:, :, 1:], v[:, :, 1:]
            return attend(layer, q, k, v)

        out = super().__call__(
            tokens, role=role, timestep=timestep, positions=positions, attend=bent
        )
        return out[..., 1:] if self.how == "narrow velocity" else out


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("text layers", ShapeError, "L=2 layers, got 1"),
        ("skips a layer", RolloutStateError, r"never attended in layers \[1\]"),
        ("wide keys", ShapeError, "k of layer 0 must be .* D=16, got D=32"),
        ("double values", DtypeError, "v of layer 0"),
        ("few keys", ShapeError, "N=6, got N=5"),
        ("narrow velocity", ShapeError, r"velocity of shape \[1, 24, 12\], got \[1, 24, 11\]"),
    ],
)
def test_a_network_that_breaks_its_word_is_named(how: str, error: type, words: str):
    with pytest.raises(error, match=words):
        rollout_with(Bent(how)).step()


def test_a_stale_mask_is_refused():
    rollout = rollout_with(ToyNetwork())
    (branch,) = rollout._branches
    branch.state.top_up_control(5)
    mask = branch.mask("clean", 1, 5)
    tokens = torch.zeros(1, 24, 12)
    positions = branch.setup.positions(1, 5, torch.device("cpu"))
    branch.state.commit(tokens, positions, mask=mask, frames=(1, 5))
    with pytest.raises(RolloutStateError, match="memory version"):
        branch.state.commit(tokens, positions, mask=mask, frames=(5, 9))


def test_the_layout_and_the_cache_count_the_same_valid_rows():
    rollout = rollout_with(ToyNetwork(), frames=27, history_frames=8)
    while not rollout.is_finished:
        rollout.step()
        (state,) = rollout.states
        frame = rollout.geometry.tokens_per_frame
        for region, held in (
            ("control", state.memory_layout.control),
            ("history", state.memory_layout.history),
        ):
            frames = tuple(frame * (r[1] - r[0]) if r else 0 for r in held)
            assert state.cache.valid(region) == frames
        assert state.memory_layout.valid_tokens == state.cache.valid_tokens
        for k, v in state.cache.buffers():
            zero = ~(k.any(-1) | v.any(-1))[0, 0]
            assert int(zero.sum()) == state.memory_layout.padding_tokens


def test_a_floating_memory_lies_in_the_buffer_that_attention_reads():
    rollout = rollout_with(ToyNetwork())
    (state,) = rollout.states
    for arena, memory in zip(state._arenas, state.cache.buffers(), strict=True):
        for whole, part in zip(arena, memory, strict=True):
            assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    held = sum(part.nbytes for pair in state._arenas for part in pair)
    assert state.nbytes == held + state._masks.nbytes


def test_an_int8_memory_is_smaller_than_half():
    floating, int8 = (
        rollout_with(ToyNetwork(), frames=65, history_frames=48, memory_format=format_)
        for format_ in (None, KVFormat.INT8)
    )
    # widths 16 and 32 with one FP32 scale each: 56 bytes where FP32 takes 192
    assert int8.states[0].cache.nbytes * 192 == floating.states[0].cache.nbytes * 56


def test_control_frames_beyond_the_clip_are_refused():
    rollout = rollout_with(ToyNetwork())
    with pytest.raises(RolloutStateError, match="the clip has 9 frames"):
        rollout.states[0].top_up_control(10)


def test_a_floating_format_other_than_the_models_is_refused():
    rollout = rollout_with(ToyNetwork())
    setup = rollout._branches[0].setup
    with pytest.raises(SpecError, match="memory_format FP32 does not fit"):
        SlotState(
            ToyNetwork(dtype=torch.bfloat16), setup, None,
            device=torch.device("cpu"), dtype=torch.bfloat16,
        )  # fmt: skip


PLANS = [
    # frames, chunk, given, history -> history slots, control slots or None for the whole track
    (17, 4, 1, None, 3, None),
    (17, 4, 1, 4, 1, 3),
    (17, 4, 1, 5, 2, 4),
    (17, 4, 1, 8, 2, 4),
    (17, 4, 2, 4, 1, 3),
    (9, 4, 0, 4, 1, 2),
    (41, 4, 5, 8, 2, 5),
    (3, 4, 0, 2, 1, None),
]


@pytest.mark.parametrize(("frames", "chunk", "given", "history", "slots", "control"), PLANS)
def test_memory_is_planned_in_whole_slots(frames, chunk, given, history, slots, control):
    geometry = toy_geometry(frames, given=given, frames_per_chunk=chunk)
    plan = plan_memory(geometry, history)
    assert plan.history_slots == slots
    assert plan.streaming == (control is not None)
    if control is not None:
        assert plan.control_slots == control
