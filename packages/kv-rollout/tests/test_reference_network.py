"""The reference network: its sizes, its positions, and that passes equal one packed forward."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kv_core import LayerKV, SnapshotError, SpecError
from kv_kernels.testing import assert_within_budget, largest_error
from kv_rollout import (
    ChunkRollout,
    ClipGeometry,
    Segments,
    TokenRole,
    Visibility,
    ar_chunk_ranges,
    chunk_mrope_ids,
    control_chunk_ranges,
    frame_segments,
    run_rollout,
    segment_mask,
    text_segments,
)
from kv_rollout.reference import NetworkConfig, ReferenceModel, ReferenceNetwork
from kv_rollout.reference import model as model_module
from kv_rollout.reference.network import Piece, rotary_frequencies, rotate, rotation, velocity
from kv_rollout.sampling import PhiloxNoise, chunk_noise
from safetensors import safe_open
from torch import Tensor

SMALL = NetworkConfig(width=24, layers=2, heads=2, head_dim=12, hidden=16, patch=2, prompts=3)
CLIP = ClipGeometry(
    num_views=2, frames_per_view=6, patch_h=2, patch_w=3, frames_per_chunk=2, condition_frames=1
)
SIGMAS = {(1, 3): 1.0, (3, 5): 0.7, (5, 6): 0.3}


def small_network(seed: int = 0) -> ReferenceNetwork:
    """Make a network in which nothing is zero, so that nothing can hide."""
    torch.manual_seed(seed)
    made = ReferenceNetwork(SMALL)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.requires_grad_(False)


def clip_tokens(seed: int = 1) -> dict[TokenRole, Tensor]:
    """Draw tokens ``[1, V, T, X, width]`` for every role."""
    dice = torch.Generator().manual_seed(seed)
    g = CLIP
    widths = {TokenRole.CONTROL: 4, TokenRole.GIVEN: 12, TokenRole.CLEAN: 12, TokenRole.CURRENT: 12}
    shape = (1, g.num_views, g.frames_per_view, g.spatial_tokens)
    return {role: torch.randn(*shape, w, generator=dice) for role, w in widths.items()}


def clip_spans() -> list[tuple[TokenRole, int, int]]:
    """List what a rollout of the clip passes over, in its order."""
    spans = [(TokenRole.GIVEN, 0, 1)]
    controls = control_chunk_ranges(CLIP)
    for chunk in ar_chunk_ranges(CLIP):
        while controls and controls[0][0] < chunk[1]:
            spans.append((TokenRole.CONTROL, *controls.pop(0)))
        spans.append((TokenRole.CURRENT, *chunk))
        if chunk[1] < CLIP.frames_per_view:
            spans.append((TokenRole.CLEAN, *chunk))
    return spans


def piece(
    span: tuple[TokenRole, int, int],
    tokens: dict[TokenRole, Tensor],
    sigmas: dict[tuple[int, int], float] = SIGMAS,
) -> Piece:
    """Cut one pass's tokens out of a clip's; a noisy one already is at its noise level."""
    role, start, end = span
    sigma = sigmas[start, end] if role is TokenRole.CURRENT else 0.0
    places = chunk_mrope_ids(
        CLIP, chunk_start=start, chunk_frames=end - start, fps=30.0, temporal_offset=15001.0
    )
    return Piece(
        role, tokens[role][:, :, start:end].flatten(1, 3), torch.tensor(sigma * 1000), places
    )


def text_of(net: ReferenceNetwork) -> list[LayerKV]:
    return net.encode_text(torch.tensor([[0]]), torch.zeros(3, 1))


def attend_dense(q: Tensor, pairs: list[LayerKV], mask: Tensor) -> Tensor:
    k, v = (torch.cat([pair[i] for pair in pairs], dim=2) for i in (0, 1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def packed_forward(
    net: ReferenceNetwork,
    tokens: dict[TokenRole, Tensor],
    sigmas: dict[tuple[int, int], float] = SIGMAS,
) -> list[Tensor]:
    """Estimate every chunk's clean tokens in one masked forward over the whole clip."""
    spans = clip_spans()
    stream = Segments.concat([frame_segments(CLIP, *span, noisy=False) for span in spans])
    keys = Segments.concat([text_segments(1), stream])
    mask = segment_mask(stream, keys, Visibility(), block_size=128, device="cpu").dense()
    text = text_of(net)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_dense(q, [text[layer], LayerKV(k, v)], mask)

    return net.denoise([piece(span, tokens, sigmas) for span in spans], attend)


def pass_by_pass(net: ReferenceNetwork, tokens: dict[TokenRole, Tensor]) -> list[Tensor]:
    """Return every chunk's velocity, one `SlotNetwork` call after the other over growing lists."""
    memory = [(text_segments(1), text_of(net))]
    found = []
    for span in clip_spans():
        mine = frame_segments(CLIP, *span, noisy=False)
        keys = Segments.concat([mine, *(segments for segments, _ in memory)])
        mask = segment_mask(mine, keys, Visibility(), block_size=128, device="cpu").dense()
        fresh: list[LayerKV] = []

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask=mask, fresh=fresh
        ) -> Tensor:
            fresh.append(LayerKV(k, v))
            return attend_dense(q, [fresh[layer], *(pairs[layer] for _, pairs in memory)], mask)

        role, values, timestep, places = piece(span, tokens)
        flow = net(values, role=role, timestep=timestep, positions=places, attend=attend)
        if role is TokenRole.CURRENT:
            found.append(flow)
        else:
            memory.append((mine, fresh))
    return found


def as_velocity(clean: list[Tensor], tokens: dict[TokenRole, Tensor]) -> list[Tensor]:
    pieces = [piece(span, tokens) for span in clip_spans() if span[0] is TokenRole.CURRENT]
    return [velocity(p.tokens, c, p.timestep) for p, c in zip(pieces, clean, strict=True)]


def test_passes_equal_one_packed_forward():
    net, tokens = small_network(), clip_tokens()
    mine = torch.cat(pass_by_pass(net, tokens), dim=1)
    packed = torch.cat(as_velocity(packed_forward(net, tokens), tokens), dim=1)
    assert mine.shape == (1, 2 * 5 * 6, 12)
    torch.testing.assert_close(mine, packed, rtol=0, atol=1e-5)


def test_rounding_of_the_passes_is_that_of_the_packed_forward():
    net, tokens = small_network(), clip_tokens()
    mine, packed = (
        torch.cat(found, dim=1)
        for found in (pass_by_pass(net, tokens), as_velocity(packed_forward(net, tokens), tokens))
    )
    wide = {role: values.double() for role, values in tokens.items()}
    exact = torch.cat(as_velocity(packed_forward(net.double(), wide), wide), dim=1)
    assert_within_budget(mine, packed, exact)


def test_a_later_frame_cannot_change_an_earlier_chunk():
    net, tokens = small_network(), clip_tokens()
    changed = {role: values.clone() for role, values in tokens.items()}
    for role in (TokenRole.CONTROL, TokenRole.CLEAN, TokenRole.CURRENT):
        changed[role][:, :, 3:] += 1
    before, after = packed_forward(net, tokens), packed_forward(net, changed)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("role", [TokenRole.CONTROL, TokenRole.GIVEN, TokenRole.CLEAN])
def test_every_earlier_token_can_change_a_later_chunk(role: TokenRole):
    net, tokens = small_network(), clip_tokens()
    changed = {**tokens, role: tokens[role].clone()}
    changed[role][:, :, 0 if role is TokenRole.GIVEN else 1] += 1
    before, after = packed_forward(net, tokens), packed_forward(net, changed)
    assert not torch.equal(after[2], before[2])


def test_only_a_noisy_pass_returns_a_velocity():
    net, tokens = small_network(), clip_tokens()
    for role in (TokenRole.CONTROL, TokenRole.GIVEN, TokenRole.CLEAN):
        values, places = piece((role, 0, 1), tokens)[1::2]
        flow = net(
            values,
            role=role,
            timestep=torch.zeros(()),
            positions=places,
            attend=lambda layer, q, k, v: F.scaled_dot_product_attention(q, k, v),
        )
        assert flow.shape == (1, 12, 12)
        assert not flow.any()


def test_velocity_leads_back_to_the_clean_estimate():
    dice = torch.Generator().manual_seed(2)
    noisy, clean = (torch.randn(1, 5, 12, generator=dice) for _ in range(2))
    for sigma in (1.0, 0.5, 0.05):
        back = noisy - sigma * velocity(noisy, clean, torch.tensor(sigma * 1000))
        spread = float((noisy - clean).abs().max() + clean.abs().max())
        assert largest_error(back, clean.double()) <= 4 * torch.finfo(torch.float32).eps * spread
    assert velocity(noisy, clean, torch.tensor(0.0)).isfinite().all()


@pytest.mark.parametrize("shift", [(1.0, 0.0, 0.0), (15001.0, 0.0, 0.0), (0.0, 3.0, 5.0)])
def test_scores_depend_on_differences_of_positions(shift: tuple[float, float, float]):
    dice = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 2, 40, 64, generator=dice) for _ in range(2))
    places = torch.stack([torch.arange(40.0) * 0.5, torch.arange(40.0) % 6, torch.arange(40.0) % 8])
    moved = places + torch.tensor(shift)[:, None]
    scores = [rotate(q, rotation(p, 64)) @ rotate(k, rotation(p, 64)).mT for p in (places, moved)]
    axes, frequencies = rotary_frequencies(64)
    apart = (places.double()[:, :, None] - places.double()[:, None])[axes]
    turn = torch.polar(torch.ones_like(apart), apart * frequencies[:, None, None])
    first, second = (torch.complex(*x.double().chunk(2, dim=-1)) for x in (q, k))
    exact = torch.einsum("bhnp,bhmp,pnm->bhnm", first, second.conj(), turn).real
    for score in scores:
        assert_within_budget(score, scores[0], exact)


def test_equal_queries_and_keys_match_best_at_their_own_place():
    g = ClipGeometry(
        num_views=4, frames_per_view=24, patch_h=6, patch_w=8, frames_per_chunk=4,
        position_stride=32,
    )  # fmt: skip
    places = chunk_mrope_ids(g, chunk_start=0, chunk_frames=24, fps=30.0, temporal_offset=15001.0)
    turn = rotation(places, 64)
    constant = torch.cat([torch.ones(32), torch.zeros(32)]).expand(1, 1, places.shape[1], 64)
    turned = rotate(constant, turn)[0, 0]
    for index in (0, 777, places.shape[1] - 1):
        scores = turned @ turned[index]
        runners_up = scores.clone()
        runners_up[index] = -math.inf
        assert scores.argmax() == index
        # a head whose gains are as they begin gives its own place at least e times any other's
        assert (scores[index] - runners_up.max()) * 1.4**2 * 64 / 32 / 8 > 1


def test_prompts_are_keys_and_values_of_every_layer():
    net = small_network()
    ids = torch.tensor([[0, 2], [2, 0]])
    places = torch.arange(2.0).expand(3, -1)
    pairs = net.encode_text(ids, places)
    assert len(pairs) == SMALL.layers
    for layer, (k, v) in enumerate(pairs):
        assert k.shape == v.shape == (2, SMALL.heads, 2, SMALL.head_dim)
        torch.testing.assert_close(v[0], v[1].flip(1), rtol=0, atol=0)  # a value has no place
        alone, still = (
            net.encode_text(torch.tensor([[2]]), torch.full((3, 1), place))[layer].k
            for place in (1.0, 0.0)
        )
        budget = 8 * torch.finfo(torch.float32).eps * float(alone.abs().max())
        turned = rotate(still, rotation(torch.ones(3, 1), SMALL.head_dim))
        torch.testing.assert_close(k[:1, :, 1:], alone, rtol=0, atol=budget)
        torch.testing.assert_close(turned, alone, rtol=0, atol=budget)
    assert not torch.equal(pairs[0].v, pairs[1].v)


def test_noise_stays_white_in_opponent_colours():
    opponent = small_network().opponent.double()
    torch.testing.assert_close(
        opponent @ opponent.T, torch.eye(3).double(), rtol=0, atol=torch.finfo(torch.float32).eps
    )


def test_default_sizes_fit_the_wheel():
    parameters = sum(p.numel() for p in ReferenceNetwork().parameters())
    assert 3_500_000 < parameters < 4_500_000
    assert parameters * 2 < 9_000_000  # in BF16


def test_odd_head_sizes_are_refused():
    with pytest.raises(SpecError, match="head_dim must be even"):
        NetworkConfig(head_dim=15)


def test_shipped_weights_are_bfloat16_and_small():
    path = Path(model_module.__file__).with_name(model_module.WEIGHTS)
    assert path.stat().st_size <= 9_000_000
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}


def test_the_shipped_model_knows_its_weights_and_keeps_them():
    path = Path(model_module.__file__).with_name(model_module.WEIGHTS)
    model = ReferenceModel.load()
    assert model.model_id == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.dtype == torch.float32
    assert (model.token_width, model.control_width, model.latent_patch_size) == (192, 4, 8)
    assert not any(p.requires_grad for p in model.network.parameters())
    with safe_open(path, framework="pt") as file:
        for name, held in model.network.state_dict().items():
            torch.testing.assert_close(held.bfloat16(), file.get_tensor(name), rtol=0, atol=0)


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path):
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"not weights")
    for path in (junk, tmp_path / "missing.safetensors"):
        with pytest.raises(SnapshotError, match="does not hold weights of the reference model"):
            ReferenceModel.load(path)


def small_model() -> ReferenceModel:
    return ReferenceModel(small_network(), model_id="small")


def rollout_inputs(model: ReferenceModel, clips: int = 1) -> dict[str, object]:
    tokens = clip_tokens()
    return {
        "geometry": CLIP,
        "controls": tokens[TokenRole.CONTROL].expand(clips, -1, -1, -1, -1),
        "condition_tokens": tokens[TokenRole.GIVEN][:, :, :1].expand(clips, -1, -1, -1, -1),
        "schedule": (1.0, 0.5),
        "batch_size": clips,
    }


def test_a_rollout_runs_through_the_public_interface():
    model = small_model()
    first, second = (run_rollout(model, seed=5, **rollout_inputs(model)) for _ in range(2))
    assert first.latent.shape == (1, 2, 3, 6, 4, 6)
    assert torch.equal(first.latent, second.latent)
    assert torch.equal(first.tokens[:, :, :1], clip_tokens()[TokenRole.GIVEN][:, :, :1])
    other = run_rollout(model, seed=6, **rollout_inputs(model))
    assert not torch.equal(first.latent[:, :, :, 1:], other.latent[:, :, :, 1:])


def test_a_rollout_equals_one_packed_forward_over_what_it_made():
    """With one step from noise, every chunk is the network's estimate given the chunks before."""
    model = small_model()
    inputs = rollout_inputs(model) | {"schedule": (1.0,)}
    made = run_rollout(model, seed=7, **inputs).tokens
    tokens = clip_tokens()
    tokens[TokenRole.CLEAN] = made
    for start, end in ar_chunk_ranges(CLIP):
        noise = chunk_noise(
            PhiloxNoise(), keys=[(7, 0)], views=2, start=start, end=end, step=0, shape=(6, 12),
            device=model.device,
        )  # fmt: skip
        tokens[TokenRole.CURRENT][:, :, start:end] = noise.unflatten(1, (2, -1, 6))
    clean = packed_forward(model.network, tokens, sigmas=dict.fromkeys(SIGMAS, 1.0))
    for (start, end), estimate in zip(ar_chunk_ranges(CLIP), clean, strict=True):
        mine = made[:, :, start:end]
        torch.testing.assert_close(mine, estimate.view_as(mine), rtol=0, atol=1e-5)


def test_an_unknown_prompt_is_refused_before_anything_runs():
    model = small_model()
    for ids in ([3], [-1]):
        with pytest.raises(SpecError, match=r"text_ids must lie in \[0, 3\)"):
            ChunkRollout(model, text_ids=torch.tensor(ids), **rollout_inputs(model))
