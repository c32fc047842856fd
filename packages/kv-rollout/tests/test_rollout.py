"""What a rollout does chunk by chunk, and what it says of itself."""

import itertools
import math

import pytest
import torch
from kv_core import DtypeError, KVError, KVFormat, RolloutStateError, ShapeError, SpecError
from kv_rollout import (
    ChunkRollout,
    ClipGeometry,
    FlowSampler,
    PhiloxNoise,
    TokenRole,
    run_rollout,
)
from rollout_toy import CONTROL_WIDTH, TOKEN_WIDTH, ToyModel, toy_geometry, toy_inputs

NOISY, CLEAN, CONTROL, GIVEN = (
    TokenRole.CURRENT,
    TokenRole.CLEAN,
    TokenRole.CONTROL,
    TokenRole.GIVEN,
)


def toy_rollout(model: ToyModel | None = None, *, frames: int = 9, given: int = 1, **options):
    geometry = toy_geometry(frames, given=given)
    inputs = toy_inputs(geometry, batch=options.get("batch_size", 1))
    return ChunkRollout(model or ToyModel(), geometry=geometry, **inputs | options)


def passes(model: ToyModel) -> list[tuple[TokenRole, int]]:
    return [(call["role"], call["tokens"].shape[1]) for call in model.calls]


def test_a_clip_is_given_frames_then_controls_denoising_and_one_clean_pass_per_chunk():
    model = ToyModel()
    rollout = toy_rollout(model, frames=10)
    frame = 2 * 3  # views x tokens
    chunk = [(NOISY, 4 * frame)] * 3
    assert passes(model) == [(GIVEN, frame)]
    seen = [(trace.start, trace.end, trace.clean_pass, tokens.shape) for trace, tokens in rollout]
    assert seen == [
        (1, 5, True, (1, 2, 4, 3, TOKEN_WIDTH)),
        (5, 9, True, (1, 2, 4, 3, TOKEN_WIDTH)),
        (9, 10, False, (1, 2, 1, 3, TOKEN_WIDTH)),
    ]
    controls = (CONTROL, 4 * frame)
    assert passes(model)[1:] == [
        (CONTROL, frame), controls, *chunk, (CLEAN, 4 * frame),
        controls, *chunk, (CLEAN, 4 * frame),
        (CONTROL, frame), *[(NOISY, frame)] * 3,
    ]  # fmt: skip
    assert {call["timestep"] for call in model.calls if call["role"] is not NOISY} == {0.0}
    times = [call["timestep"] for call in model.calls if call["role"] is NOISY]
    assert times[:3] == [1000.0, pytest.approx(600), pytest.approx(300)]


def test_the_result_is_every_frame_given_ones_included():
    rollout = toy_rollout()
    chunks = [tokens for _, tokens in rollout]
    result = rollout.result()
    assert result.start == 0 and len(result.trace) == 2
    assert torch.equal(result.tokens[:, :, 1:], torch.cat(chunks, 2))
    assert torch.equal(result.tokens[:, :, :1], toy_inputs(rollout.geometry)["condition_tokens"])
    assert result.latent.shape == (1, 2, 3, 9, 2, 6)
    assert torch.equal(rollout.latent_for(3, 7), result.latent[:, :, :, 3:7])


def test_what_is_committed_is_exactly_what_is_returned():
    """Both are rounded once, to the model's dtype."""
    model = ToyModel(dtype=torch.bfloat16)
    rollout = toy_rollout(model)
    _, tokens = rollout.step()
    (commit,) = [call for call in model.calls if call["role"] is CLEAN]
    assert commit["tokens"].dtype == tokens.dtype == torch.bfloat16
    assert torch.equal(commit["tokens"], tokens.flatten(1, 3))


def test_e15_history_holds_the_keys_of_clean_latents_only():
    """E15: keys are the mean of a pass's input: half values if noisy, whole ones if clean."""

    class Mean(ToyModel):
        def prepare_rollout(self, setup, controls):
            state = super().prepare_rollout(setup, controls)
            state._network = MeanNetwork(state._network)
            return state

    class MeanNetwork:
        num_layers, kv_heads, k_dim, v_dim = 2, 2, 16, 32

        def __init__(self, inner):
            self.encode_text = inner.encode_text

        def __call__(self, tokens, *, role, timestep, positions, attend):
            mean = tokens.mean(-1, keepdim=True)
            k = mean[:, None].expand(-1, 2, -1, 16).contiguous()
            v = mean[:, None].expand(-1, 2, -1, 32).contiguous()
            for layer in range(2):
                attend(layer, k.repeat_interleave(2, 1), k, v)
            return torch.zeros(*tokens.shape[:2], TOKEN_WIDTH)

    class Halves:
        """Chunk n passes through n + 0.5 and ends at n."""

        passes, spec = 2, {}

        def __init__(self):
            self.chunk = 0

        def sample(self, velocity, noise):
            self.chunk += 1
            for _ in range(2):
                velocity(torch.full_like(noise(0), self.chunk + 0.5), 0.5)
            return torch.full_like(noise(0), float(self.chunk))

    rollout = toy_rollout(Mean(), frames=17, sampler=Halves())
    list(rollout)
    (state,) = rollout.states
    region = next(r for r in state.cache.regions if r.name == "history")
    for k, _ in state.cache.buffers():
        history = k[0, 0, region.start : region.end, 0].unflatten(0, (3, 4 * 2 * 3))
        assert history.tolist() == [[1.0] * 24, [2.0] * 24, [3.0] * 24]
    assert state.memory_layout.history == ((1, 5), (5, 9), (9, 13))


def test_the_trace_counts_valid_tokens_apart_from_padding():
    rollout = toy_rollout(frames=13, history_frames=4)
    traces = [trace for trace, _ in rollout]
    frame, slot = 6, 24
    # controls (0,1) and (1,5); the given frame; no history yet
    assert traces[0].memory_tokens == frame + slot + frame
    assert traces[0].memory_tokens + traces[0].padding_tokens == 3 * slot + frame + slot
    assert traces[1].memory_tokens == frame + 2 * slot + frame + slot
    assert traces[2].memory_tokens == 3 * slot + frame + slot
    assert [trace.evicted for trace in traces] == [None, (1, 5), None]
    assert [trace.denoising_passes for trace in traces] == [3, 3, 3]
    assert {trace.nbytes > 0 for trace in traces} == {True}
    assert all(ms >= 0 for trace in traces for ms in trace.phase_ms)
    assert set(traces[0].as_dict()) >= {"prepare_ms", "denoise_ms", "commit_ms", "start", "end"}


def test_equal_arguments_give_equal_bits_and_another_seed_does_not():
    def tokens(**options):
        rollout = toy_rollout(**options)
        list(rollout)
        return rollout.result().tokens

    assert torch.equal(tokens(), tokens())
    assert not torch.equal(tokens()[:, :, 1:], tokens(seed=1)[:, :, 1:])


def test_a_clip_of_a_batch_is_the_clip_alone():
    geometry = toy_geometry(9)
    inputs = toy_inputs(geometry, batch=2)
    model = ToyModel()
    both = run_rollout(model, geometry=geometry, batch_size=2, seed=[3, 5], **inputs)
    for clip, seed in enumerate((3, 5)):
        one = {name: tensor[clip : clip + 1] for name, tensor in inputs.items()}
        alone = run_rollout(model, geometry=geometry, seed=seed, **one)
        torch.testing.assert_close(both.tokens[clip], alone.tokens[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch"])
def test_int8_memory_stays_close_and_is_smaller(backend: str):
    geometry = toy_geometry(13)
    inputs = toy_inputs(geometry)
    exact = run_rollout(ToyModel(), geometry=geometry, **inputs).tokens
    rollout = ChunkRollout(
        ToyModel(), geometry=geometry, memory_format=KVFormat.INT8, backend=backend, **inputs
    )
    list(rollout)
    (state,) = rollout.states
    assert state.cache.format is KVFormat.INT8
    error = (rollout.result().tokens - exact).square().mean().sqrt()
    assert 0 < error < 0.02 * exact.std()


def test_guidance_mixes_two_memories_and_commits_both():
    geometry = toy_geometry(9)
    inputs = toy_inputs(geometry)
    away = torch.tensor([5, 6, 7])
    plain = run_rollout(ToyModel(), geometry=geometry, **inputs).tokens
    scales = []

    def scale(chunk: int) -> float:
        scales.append(chunk)
        return 1.0

    model = ToyModel()
    rollout = ChunkRollout(
        model, geometry=geometry, negative_text_ids=away, guidance_scale=scale, **inputs
    )
    list(rollout)
    torch.testing.assert_close(rollout.result().tokens, plain, rtol=0, atol=1e-5)
    assert scales == [0, 1]
    assert len(rollout.states) == 2
    assert len([call for call in model.calls if call["role"] is CLEAN]) == 2
    only_away = run_rollout(ToyModel(), geometry=geometry, text_ids=away, **inputs).tokens
    zero = run_rollout(
        ToyModel(), geometry=geometry, negative_text_ids=away, guidance_scale=0.0, **inputs
    )
    torch.testing.assert_close(zero.tokens, only_away, rtol=0, atol=1e-5)


def test_e20_interleaved_rollouts_of_one_model_do_not_touch_each_other():
    """E20: A alone, B alone, then A0 B0 A1 B1 give the same bits."""
    model = ToyModel()

    def fresh(seed: int) -> ChunkRollout:
        geometry = toy_geometry(9)
        return ChunkRollout(model, geometry=geometry, seed=seed, **toy_inputs(geometry, seed=seed))

    alone = []
    for seed in (1, 2):
        rollout = fresh(seed)
        list(rollout)
        alone.append(rollout.result().tokens)
    a, b = fresh(1), fresh(2)
    for rollout in (a, b, a, b):
        rollout.step()
    assert torch.equal(a.result().tokens, alone[0])
    assert torch.equal(b.result().tokens, alone[1])


def test_e21_stopping_finishing_and_reading_what_is_gone():
    """E21: typed errors that say done and total; finished frames stay readable."""
    rollout = toy_rollout(frames=17, token_frames=6)
    with pytest.raises(RolloutStateError, match="0 of 4 chunks are done"):
        rollout.result()
    for _ in range(2):
        rollout.step()
    rollout.stop()
    assert rollout.next_range is None and not rollout.is_finished
    with pytest.raises(RolloutStateError, match="was stopped: 2 of 4 chunks"):
        rollout.step()
    with pytest.raises(RolloutStateError, match="2 of 4 chunks"):
        rollout.result()
    assert rollout.retained == (3, 9)
    assert rollout.latent_for(3, 9).shape[3] == 6
    with pytest.raises(RolloutStateError, match="only 3 to 9 are retained"):
        rollout.latent_for(2, 5)
    with pytest.raises(RolloutStateError, match="up to frame 9"):
        rollout.latent_for(8, 12)
    for start, end in ((2, 2), (-1, 3), (5, 18)):
        with pytest.raises(SpecError, match="not a range of a clip of 17 frames"):
            rollout.latent_for(start, end)
    partial = rollout.result(partial=True)
    assert (partial.start, partial.tokens.shape[2], len(partial.trace)) == (3, 6, 2)


def test_a_finished_clip_refuses_another_chunk():
    rollout = toy_rollout()
    list(rollout)
    assert rollout.is_finished and rollout.chunks_done == rollout.chunk_count == 2
    with pytest.raises(RolloutStateError, match="is finished: 2 of 2"):
        rollout.step()


def test_on_chunk_gets_the_rollout_and_may_stop_it():
    geometry = toy_geometry(17)
    seen = []

    def on_chunk(rollout, trace, tokens):
        seen.append((trace.index, rollout.chunks_done, tokens.shape[2]))
        if trace.index == 1:
            rollout.stop()

    result = run_rollout(ToyModel(), geometry=geometry, on_chunk=on_chunk, **toy_inputs(geometry))
    assert seen == [(0, 1, 4), (1, 2, 4)]
    assert result.tokens.shape[2] == 9


def test_a_bounded_output_returns_what_is_retained():
    geometry = toy_geometry(17)
    whole = run_rollout(ToyModel(), geometry=geometry, **toy_inputs(geometry))
    part = run_rollout(ToyModel(), geometry=geometry, token_frames=5, **toy_inputs(geometry))
    assert part.start == 12
    assert torch.equal(part.tokens, whole.tokens[:, :, 12:])


@pytest.mark.parametrize("block", [(16, 32), 8, (128, 64), (1, 7)])
def test_mask_block_size_reaches_every_pass_and_changes_nothing(block, monkeypatch):
    import kv_rollout.slot_state as slot_state

    blocks = []
    attend = slot_state.slot_attention

    def spy(q, chunk, mask, **more):
        blocks.append(mask.block_size)
        return attend(q, chunk, mask, **more)

    monkeypatch.setattr(slot_state, "slot_attention", spy)
    rollout = toy_rollout(mask_block_size=block)
    list(rollout)
    expected = toy_rollout()
    list(expected)
    pair = block if isinstance(block, tuple) else (block, block)
    assert set(blocks[: -len(blocks) // 2]) == {pair}
    assert torch.equal(rollout.result().tokens, expected.result().tokens)


def test_masks_of_a_bounded_steady_state_are_reused():
    rollout = toy_rollout(frames=65, history_frames=8)
    traces = [trace for trace, _ in rollout]
    steady = traces[rollout.warmup_chunks + 2 : -1]
    assert sum(trace.masks_built for trace in steady) == 0
    assert {trace.masks_reused for trace in steady} == {2}


def test_e19_warmup_is_counted_and_capturing_earlier_is_refused():
    """E19: a history of three one-frame chunks is steady from chunk 3."""
    geometry = toy_geometry(12, frames_per_chunk=1)
    rollout = ChunkRollout(ToyModel(), geometry=geometry, history_frames=3, **toy_inputs(geometry))
    assert rollout.warmup_chunks == 3
    for chunk in range(3):
        with pytest.raises(RolloutStateError, match=f"chunk {chunk} of 11 is not steady"):
            rollout.require_steady()
        rollout.step()
    rollout.require_steady()


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("history", [1, 4, 9])
def test_e19_shapes_branches_and_addresses_repeat_from_the_warmup_chunk_on(given, history):
    """E19: what happens in each chunk is recorded and compared with what was promised."""
    model = ToyModel()
    rollout = toy_rollout(model, frames=64, given=given, history_frames=history)
    seen = []
    while not rollout.is_finished:
        before = len(model.calls)
        (state,) = rollout.states
        layout = state.memory_layout
        rollout.step()
        work = [(call["role"], call["tokens"].shape) for call in model.calls[before:]]
        pointers = [part.data_ptr() for layer in state.cache.buffers() for part in layer]
        valid = [frames and frames[1] - frames[0] for frames in layout.history]
        seen.append((work, pointers, valid))
    steady = rollout.warmup_chunks
    assert 0 < steady < 10
    assert all(item == seen[steady] for item in seen[steady:-1])
    assert seen[steady - 1] != seen[steady] or given == 1
    shapes = [item[0] for item in seen]
    changes = sum(a != b for a, b in itertools.pairwise(shapes))
    assert changes <= 2


def test_e14_positions_stay_absolute_and_keys_are_rotated_once():
    """E14: a sink frame, a short window, six tokens per frame, frame 1,000."""
    geometry = toy_geometry(1_001, views=1, patch_h=2, frames_per_chunk=1)
    rollout = ChunkRollout(
        ToyModel(), geometry=geometry, history_frames=3, token_frames=2, fps=24.0,
        **toy_inputs(geometry),
    )  # fmt: skip
    (state,) = rollout.states
    (region,) = [region for region in state.cache.regions if region.name == "given"]

    def sink() -> list[torch.Tensor]:
        pairs = state.cache.buffers()
        return [part[:, :, region.start : region.end].clone() for pair in pairs for part in pair]

    first = sink()
    for _ in range(12):
        trace, _ = rollout.step()
    assert trace.evicted == (9, 10) and trace.position_policy == "absolute"
    assert all(torch.equal(a, b) for a, b in zip(first, sink(), strict=True))
    setup = rollout._branches[0].setup
    near, far = (setup.positions(at, at + 1, torch.device("cpu"))[0] for at in (0, 1_000))
    assert (far - near).unique().tolist() == [1_000.0]


def test_memory_that_grows_to_the_end_is_never_steady():
    assert toy_rollout(frames=17).warmup_chunks == 3


GOOD = {"frames": 9, "given": 1}
BAD = {
    "all given": ({"frames": 4, "given": 4}, SpecError, "all 4 frames of the clip are given"),
    "fps": ({"fps": 0}, SpecError, "fps must be a positive number"),
    "fps nan": ({"fps": math.nan}, SpecError, "fps must be"),
    "fps inf": ({"fps": math.inf}, SpecError, "fps must be"),
    "fps bool": ({"fps": True}, SpecError, "fps must be"),
    "scope": ({"attention_scope": "al_views"}, SpecError, "all_views"),
    "pattern": ({"attention_pattern": "casual"}, SpecError, "causal"),
    "window scope": ({"decomposed_temporal_window_seconds": 1.0}, SpecError, "decomposed"),
    "window negative": (
        {"attention_scope": "decomposed", "decomposed_temporal_window_seconds": -1.0},
        SpecError,
        "window",
    ),
    "window nan": (
        {"attention_scope": "decomposed", "decomposed_temporal_window_seconds": math.nan},
        SpecError,
        "window",
    ),
    "block 0": ({"mask_block_size": 0}, SpecError, "block"),
    "block negative": ({"mask_block_size": -4}, SpecError, "block"),
    "block triple": ({"mask_block_size": (4, 4, 4)}, KVError, "block"),
    "block single": ({"mask_block_size": (128,)}, KVError, "block"),
    "block text": ({"mask_block_size": "128"}, KVError, "block"),
    "block bool": ({"mask_block_size": True}, KVError, "block"),
    "history": ({"history_frames": 0}, SpecError, "history_frames"),
    "history float": ({"history_frames": 4.0}, DtypeError, "history_frames"),
    "token frames": ({"token_frames": 0}, SpecError, "token_frames"),
    "batch": ({"batch_size": 0}, SpecError, "batch_size"),
    "seed": ({"seed": -1}, SpecError, "seed"),
    "schedule": ({"schedule": [0.2, 0.9]}, SpecError, "0.9 follows 0.2"),
    "sampler twice": (
        {"sampler": FlowSampler((1.0,)), "schedule": [1.0]},
        SpecError,
        "either a sampler",
    ),
    "sample type": ({"sample_type": "odd"}, SpecError, "ode, sde"),
    "backend": ({"backend": "cudnn"}, SpecError, "torch"),
    "memory": ({"memory_format": KVFormat.FP16}, SpecError, "use FP32 or INT8"),
    "memory text": ({"memory_format": "int8"}, DtypeError, "KVFormat"),
    "no given": ({"condition_tokens": None}, SpecError, "begins with 1 given frames"),
    "given nan": ({"condition_tokens": torch.full((1, 2, 1, 3, 12), math.nan)}, SpecError,
                  "frame 0 of view 0 of clip 0"),
    "given shape": ({"condition_tokens": torch.zeros(1, 2, 1, 3, 11)}, ShapeError, "got W=11"),
    "given views": ({"condition_tokens": torch.zeros(1, 3, 1, 3, 12)}, ShapeError, "V=2, got V=3"),
    "given int": ({"condition_tokens": torch.zeros(1, 2, 1, 3, 12).int()}, DtypeError, "floating"),
    "unwanted given": (
        {"given": 0, "condition_tokens": torch.zeros(1, 2, 1, 3, 12)},
        SpecError,
        "condition_frames=0",
    ),
    "controls short": (
        {"controls": torch.zeros(1, 2, 8, 3, 5)}, ShapeError, "8 frames, but the clip has 9"
    ),
    "controls width": ({"controls": torch.zeros(1, 2, 9, 3, 4)}, ShapeError, "W=5, got W=4"),
    "controls nan": ({"controls": torch.full((1, 2, 9, 3, 5), math.nan)}, SpecError, "controls"),
    "controls flat": ({"controls": torch.zeros(54, 5)}, ShapeError, "B, V, F, X, Wc"),
    "controls int": ({"controls": torch.zeros(1, 2, 9, 3, 5).long()}, DtypeError, "floating"),
    "controls kind": ({"controls": "video.mp4"}, DtypeError, "tokens"),
    "text float": ({"text_ids": torch.zeros(3)}, DtypeError, "text_ids must be an integer"),
    "text rank": ({"text_ids": torch.zeros(1, 1, 3).long()}, ShapeError, "text_ids"),
    "text batch": ({"text_ids": torch.zeros(2, 3).long()}, ShapeError, "B=1, got B=2"),
    "captions count": ({"view_text_tokens": (2,)}, SpecError, "2 of them, got 1"),
    "captions sum": ({"view_text_tokens": (2, 2)}, SpecError, "add up to 4 tokens"),
    "captions empty": ({"view_text_tokens": (2, 0)}, SpecError, "view_text_tokens"),
    "guidance alone": ({"guidance_scale": 2.0}, SpecError, "negative_text_ids"),
    "negative alone": ({"negative_text_ids": torch.arange(2)}, SpecError, "guidance_scale"),
    "guidance nan": (
        {"negative_text_ids": torch.arange(2), "guidance_scale": math.nan}, SpecError, "finite"
    ),
    "geometry": ({"geometry": (2, 9)}, DtypeError, "ClipGeometry"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_refused_before_the_model_is_touched(options, error, words):
    class Untouchable(ToyModel):
        def prepare_rollout(self, setup, controls):
            raise AssertionError("the model was touched")

    options = GOOD | options
    geometry = toy_geometry(options.pop("frames"), given=options.pop("given"))
    arguments = {"geometry": geometry} | toy_inputs(geometry) | options
    with pytest.raises(error, match=words) as caught:
        ChunkRollout(Untouchable(), **arguments)
    assert str(caught.value).count("\n") == 0


def test_unknown_options_are_type_errors():
    with pytest.raises(TypeError, match="histroy_frames"):
        toy_rollout(histroy_frames=4)


def test_positions_beyond_the_models_limit_are_refused_up_front():
    model = ToyModel()
    model.position_limit = 15_010.0
    with pytest.raises(SpecError, match=r"15,?0"):
        toy_rollout(model, frames=17)


def test_a_control_source_is_asked_for_each_range_once_and_its_answer_is_checked():
    geometry = toy_geometry(9)
    inputs = toy_inputs(geometry)
    whole = inputs.pop("controls")

    class Source:
        def __init__(self, width: int = CONTROL_WIDTH):
            self.asked, self.width = [], width

        def tokens(self, start: int, end: int):
            self.asked.append((start, end))
            return whole[:, :, start:end, :, : self.width]

    source = Source()
    result = run_rollout(ToyModel(), geometry=geometry, controls=source, **inputs)
    assert source.asked == [(0, 1), (1, 5), (5, 9)]
    expected = run_rollout(ToyModel(), geometry=geometry, controls=whole, **inputs)
    assert torch.equal(result.tokens, expected.tokens)
    with pytest.raises(ShapeError, match="controls of frames 0 to 1"):
        run_rollout(ToyModel(), geometry=geometry, controls=Source(4), **inputs)


def test_a_custom_noise_source_is_used():
    class Zero(PhiloxNoise):
        def draw(self, *, shape, **where):
            return super().draw(shape=shape, **where) * 0

    model = ToyModel()
    toy_rollout(model, noise=Zero(), schedule=[1.0]).step()
    (noisy,) = [call for call in model.calls if call["role"] is NOISY]
    assert not noisy["tokens"].any()


def test_text2video_begins_with_frame_0_alone_and_its_first_renoise_is_new():
    model = ToyModel()
    rollout = toy_rollout(model, given=0, sample_type="sde", schedule=[1.0, 0.5])
    trace, _ = rollout.step()
    assert (trace.start, trace.end) == (0, 1)
    first, second = (call["tokens"] for call in model.calls if call["role"] is NOISY)
    clean = first - 1.0 * model.calls[-3]["velocity"]
    renoise = (second - 0.5 * clean) / 0.5
    assert not torch.allclose(first, renoise, atol=0.1)


def test_integer_types_of_the_geometry_are_checked():
    with pytest.raises(DtypeError, match="num_views"):
        ClipGeometry(num_views=2.0, frames_per_view=9, patch_h=1, patch_w=3, frames_per_chunk=4)
