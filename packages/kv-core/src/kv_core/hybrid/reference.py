"""Ring, tail, compression and flush in plain torch: what every kernel has to equal.

No function here waits for the device, and no shape depends on values.
"""

import torch
from torch import Tensor

from kv_core.hybrid.keys import KeyTensors, encode_keys
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.rows import RowTensors
from kv_core.hybrid.spec import Which
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.step import HybridStep
from kv_core.paged import scatter_rows


class TorchOps:
    """The operations of a hybrid cache in plain torch; see ``HybridOps`` for what each does."""

    def append_swa(self, state: StateCachePool, step: HybridStep, rows: Tensor) -> None:
        """Store the newest rows of each run in the rings, with their positions."""
        encoded = state.spec.encode(rows)
        append_swa(state.ring, state.positions, encoded, step.positions, step.ring_slot)

    def append_tail(
        self, state: StateCachePool, which: Which, step: HybridStep, value: Tensor, score: Tensor
    ) -> None:
        """Store the newest values and gates of each run in a tail."""
        assert state.kind is not None
        append_tail(state.tails[which], value, score, step.kinds[state.kind.ratio].tail_slot)

    def compress(
        self,
        state: StateCachePool,
        which: Which,
        step: HybridStep,
        value: Tensor,
        score: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Return the entry that each closing token makes, zeros for the other tokens."""
        assert state.kind is not None
        kind = state.kind
        return compress(
            state.tails[which],
            value,
            score,
            weight,
            eps,
            cos,
            sin,
            closing=step.kinds[kind.ratio].closing,
            request_ids=step.request_ids,
            positions=step.positions,
            request_slots=step.request_slots,
            seq_start=step.seq_start,
            ratio=kind.ratio,
            overlap=kind.overlap,
        )

    def flush_compression(
        self, paged: PagedKVPool, slots: Tensor, entries: Tensor, keys: Tensor | None
    ) -> None:
        """Store entries and keys in the pool, by slot."""
        flush_rows(paged.entries, paged.spec.encode(entries), slots)
        if keys is not None:
            assert paged.keys is not None
            encoded = encode_keys(keys, paged.spec.key_format, paged.key_global_scale)
            flush_rows(paged.keys, encoded, slots)


def append_swa(
    ring: RowTensors, held: Tensor, rows: RowTensors, positions: Tensor, ring_slot: Tensor
) -> None:
    """Store encoded rows ``[T, ...]`` by ``ring_slot``, and their positions in ``held``."""
    scatter_rows([*ring.present(), held], [*rows.present(), positions], ring_slot)


def flush_rows(pool: RowTensors | KeyTensors, rows: RowTensors | KeyTensors, slots: Tensor) -> None:
    """Store encoded entries or keys ``[n, ...]`` in the blocks of ``pool`` by ``slots``."""
    scatter_rows(pool.present(), rows.present(), slots)


@torch.no_grad()
def append_tail(tail: Tensor, value: Tensor, score: Tensor, tail_slot: Tensor) -> None:
    """Store ``[value, score]`` of each token as FP32.

    Args:
        tail: ``[slots, tail, 2, W]`` FP32; written.
        value: ``[T, W]`` floating.
        score: ``[T, W]`` floating, the gate with its bias.
        tail_slot: ``[T]`` rows; -1 stores nothing.
    """
    scatter_rows([tail], [torch.stack([value.float(), score.float()], 1)], tail_slot)


@torch.no_grad()
def compress(
    tail: Tensor,
    value: Tensor,
    score: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    closing: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    request_slots: Tensor,
    seq_start: Tensor,
    ratio: int,
    overlap: bool,
) -> Tensor:
    """Pool the window that each closing token ends, normalise and rotate it; all in FP32.

    Channel by channel, the softmax of the scores weights the values of the window's tokens. With
    overlap the window before takes part with the first half of its channels, and the window itself
    with the second; the window before the first does not exist. Then RMSNorm, and interleaved RoPE
    on the last channels at the position of the window's first token. The method is that of
    DeepSeek-V4 (arXiv 2606.19348, section 2.3).

    Args:
        tail: ``[slots, tail, 2, c * D]`` FP32 value and score of earlier tokens; c is 2 with
            overlap, else 1.
        value: ``[T, c * D]`` of this step's tokens.
        score: ``[T, c * D]`` gate with bias.
        weight: ``[D]`` of the norm.
        eps: Of the norm.
        cos: ``[positions, R / 2]``; a position past its end gives NaN.
        sin: Like ``cos``.
        closing: ``[C]`` tokens that close a window, then -1.
        request_ids: ``[T]`` request of each token.
        positions: ``[T]`` position of each token.
        request_slots: ``[B]`` slot of each request.
        seq_start: ``[B]`` position of each request's first token in this step.
        ratio: Tokens for each entry.
        overlap: Whether two windows are pooled.

    Returns:
        ``[T, D]`` FP32, zeros for tokens that close nothing.
    """
    T, D = value.shape[0], weight.shape[0]
    token = closing.clamp(min=0).long()
    request = request_ids[token].clamp(min=0).long()
    position = positions[token].long()
    slot = request_slots[request].clamp(min=0).long()

    def gather(first: int, last: int, channels: slice) -> tuple[Tensor, Tensor]:
        """Return value and score of the tokens ``first`` to ``last`` behind the closing one."""
        behind = torch.arange(first, last - 1, -1, device=value.device)
        at = position[:, None] - behind
        in_step = (at >= seq_start[request][:, None])[..., None]
        row, ring = (token[:, None] - behind).clamp(min=0), at % tail.shape[1]
        old = tail[slot[:, None], ring][..., channels]
        exists = (at >= 0)[..., None]
        values = torch.where(in_step, value[row][..., channels].float(), old[..., 0, :])
        scores = torch.where(in_step, score[row][..., channels].float(), old[..., 1, :])
        return values.masked_fill(~exists, 0.0), scores.masked_fill(~exists, -torch.inf)

    parts = [gather(ratio - 1, 0, slice(-D, None))]
    if overlap:
        parts.insert(0, gather(2 * ratio - 1, ratio, slice(D)))
    values, scores = (torch.cat(both, 1) for both in zip(*parts, strict=True))
    pooled = (values * scores.softmax(1)).sum(1)
    normed = pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps) * weight.float()
    entries = rotate(normed, cos, sin, position // ratio * ratio)
    # tokens that close nothing are sent to a row behind the result
    out = value.new_zeros(T + 1, D, dtype=torch.float32)
    out[torch.where(closing < 0, T, token)] = entries
    return out[:T]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
    """Apply interleaved RoPE to the last channels of ``x``.

    Args:
        x: ``[C, D]`` FP32.
        cos: ``[positions, R / 2]``.
        sin: Like ``cos``.
        position: ``[C]``; one that the tables do not have gives NaN.

    Returns:
        ``[C, D]`` FP32.
    """
    inside = (position >= 0) & (position < cos.shape[0])
    at = torch.where(inside, position, 0)
    R = 2 * cos.shape[1]
    c, s = (table[at].float().masked_fill(~inside[:, None], torch.nan) for table in (cos, sin))
    even, odd = x[:, x.shape[1] - R :: 2], x[:, x.shape[1] - R + 1 :: 2]
    turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(1)
    return torch.cat([x[:, : x.shape[1] - R], turned], 1)
