"""The oracle of a rollout: one masked forward over the whole clip, and plain attention in FP64."""

import torch
from kv_rollout import ChunkRollout, TokenRole, clip_segments, segment_table, text_segments
from kv_rollout.positions import caption_mrope_ids, clip_mrope_ids
from rollout_toy import ToyNetwork
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Plain attention in FP64, grouped queries, zeros for a query that sees nothing."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ k.mT) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).to(q.dtype)


def whole_clip(
    network: ToyNetwork,
    rollout: ChunkRollout,
    calls: list,
    inputs: dict,
    step: int,
    text_ids: Tensor,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run clean, given, control and noisy tokens of every frame in one masked forward.

    The noisy tokens are those of pass ``step`` of every chunk, the clean ones what the rollout
    returned. Everything runs on the CPU in the dtype of ``network``.

    Returns:
        Velocities ``[B, V, T - K, X, W]``, and every layer's keys and values.
    """
    geometry, dtype = rollout.geometry, network.head.dtype
    K, T = geometry.condition_frames, geometry.frames_per_view
    captions = rollout._branches[0].setup.view_text_tokens
    text = text_segments(text_ids.shape[-1], view_text_tokens=captions)
    segments = clip_segments(geometry, text)
    setup = rollout._branches[0].setup
    table = segment_table(segments, segments, setup.visibility)
    mask = torch.from_numpy(table).repeat_interleave(torch.from_numpy(segments.length), 0)
    mask = mask.repeat_interleave(torch.from_numpy(segments.length), 1)
    n = text_ids.shape[-1]
    passes = [call for call in calls if call["role"] is TokenRole.CURRENT]
    chunks = [passes[i + step] for i in range(0, len(passes), rollout._sampler.passes)]
    V, X = geometry.num_views, geometry.spatial_tokens
    noisy = torch.cat([c["tokens"].unflatten(1, (V, -1, X)) for c in chunks], 2)
    zero, time = torch.zeros(()), torch.tensor(chunks[0]["timestep"])
    clean = rollout.result().tokens.cpu()
    given, clean = clean[:, :, :K], clean[:, :, K:]
    hidden = [
        network.tokens(tokens.cpu().to(dtype).flatten(1, 3), role, when)
        for tokens, role, when in (
            (inputs["controls"].to(rollout.result().tokens.dtype), TokenRole.CONTROL, zero),
            (given, TokenRole.GIVEN, zero),
            (clean, TokenRole.CLEAN, zero),
            (noisy, TokenRole.CURRENT, time),
        )
    ]
    where = clip_mrope_ids(
        geometry, fps=setup.fps, temporal_offset=setup.temporal_offset,
        view_offsets=setup.view_offsets,
    )  # fmt: skip
    where = where.unflatten(1, (V, T, X))
    parts = [where, where[:, :, :K], where[:, :, K:], where[:, :, K:]]
    positions = torch.cat([part.flatten(1) for part in parts], 1)
    places = caption_mrope_ids(captions or (n,))[0].float()
    words = network.encode_text(text_ids.expand(clean.shape[0], -1), places)
    kept = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        k, v = torch.cat([words[layer].k, k], 2), torch.cat([words[layer].v, v], 2)
        return masked_attention(q, k, v, mask[n:])

    velocity = network.layers(torch.cat(hidden, 1), positions, attend)
    frames = V * X * (T - K)
    return velocity[:, -frames:].unflatten(1, (V, T - K, X)), kept
