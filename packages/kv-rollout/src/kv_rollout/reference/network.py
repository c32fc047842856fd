"""The reference network: a small multi-view flow-matching transformer on patches of pixels.

One set of layers serves two ways of running it. A rollout runs it pass by pass (`__call__`, the
`SlotNetwork` protocol). Training, and the test that a rollout equals one masked forward, run every
role of a whole clip at once (`denoise` over several `Piece`s). Both are the same code: a pass is a
stream of one piece.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from kv_core import LayerKV, SpecError
from torch import Tensor, nn

from kv_rollout.model import Attend
from kv_rollout.sampling import TIMESTEPS
from kv_rollout.segments import TokenRole

# Luma and two opponent colours, orthonormal: noise that is white in RGB stays white.
_OPPONENT = (
    (3**-0.5, 3**-0.5, 3**-0.5),
    (2**-0.5, 0.0, -(2**-0.5)),
    (-(6**-0.5), 2 * 6**-0.5, -(6**-0.5)),
)
_COLOUR_GAIN = 3.0  # colours vary less than luma; finished tokens show them to the layers louder
_LEAST_SIGMA = 0.05  # below it a velocity would magnify the rounding of the clean estimate
_ROLES = len(TokenRole) - 1  # padding has no embedding
_MODULATIONS = 6  # shift, scale and gate, for attention and for the MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes of the network; the defaults are those of the weights that ship."""

    width: int = 256
    layers: int = 6
    heads: int = 4
    head_dim: int = 64
    hidden: int = 512
    patch: int = 8
    control_width: int = 4
    prompts: int = 4
    time_features: int = 64
    time_hidden: int = 128

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 6:
            raise SpecError(
                f"head_dim must be even and at least 6, to turn pairs of channels with time, row "
                f"and column, got {self.head_dim}"
            )

    @property
    def token_width(self) -> int:
        """Values of one patch: rows, columns, and the three of RGB."""
        return self.patch * self.patch * 3


class Piece(NamedTuple):
    """A run of tokens of one role and one noise level in a packed stream."""

    role: TokenRole
    tokens: Tensor  # [B, n, W], or [B, n, Wc] for controls
    timestep: Tensor  # [B] or 0-dim FP32, sigma * 1000
    positions: Tensor  # [3, n]


class Rotation(NamedTuple):
    """Cosines and sines ``[N, D / 2]`` in FP32, by which queries and keys are turned."""

    cos: Tensor
    sin: Tensor


def rotary_frequencies(head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the axis (0 time, 1 row, 2 column) and the frequency of every pair of channels.

    Rows and columns count patches, and neighbours have to be told apart sharply: their fastest pair
    turns by almost half a circle per patch. Time reaches from the next frame to the bands of other
    views some hundred positions away.

    Args:
        head_dim: D.

    Returns:
        int64 ``[D / 2]`` and FP64 ``[D / 2]`` in radians per unit of position.
    """
    pairs = head_dim // 2
    rows = pairs * 5 // 16
    counts = (pairs - 2 * rows, rows, rows)
    limits = ((2.2, 0.02), (2.9, 0.15), (2.9, 0.15))
    axes, frequencies = [], []
    for axis, (count, (fast, slow)) in enumerate(zip(counts, limits, strict=True)):
        axes += [axis] * count
        steps = torch.linspace(0, 1, count, dtype=torch.float64)
        frequencies.append(fast * (slow / fast) ** steps)
    return torch.tensor(axes), torch.cat(frequencies)


def rotation(positions: Tensor, head_dim: int) -> Rotation:
    """Turn positions into cosines and sines; angles are FP64, for positions lie near 15000.

    Args:
        positions: ``[3, N]`` in time, row and column.
        head_dim: D.
    """
    axes, frequencies = rotary_frequencies(head_dim)
    axes, frequencies = axes.to(positions.device), frequencies.to(positions.device)
    angles = positions.double()[axes].T * frequencies  # [N, D / 2]
    return Rotation(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn channel pairs ``(i, i + D / 2)`` of ``x`` ``[B, H, N, D]``, in FP32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat(
        (first * turn.cos - second * turn.sin, first * turn.sin + second * turn.cos), dim=-1
    )


class _Projection(nn.Module):
    """Queries, keys and values of one layer."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.q_gain = nn.Parameter(torch.full((config.head_dim,), 1.4))
        self.k_gain = nn.Parameter(torch.full((config.head_dim,), 1.4))
        nn.init.normal_(self.qkv.weight, std=0.5 * config.width**-0.5)
        nn.init.zeros_(self.qkv.bias)
        with torch.no_grad():
            # Some heads begin by looking at their own place, which is where controls are found:
            # equal constant queries and keys match where their rotations agree.
            bias = self.qkv.bias.view(3, config.heads, config.head_dim)[:2]
            pairs = config.head_dim // 2
            axes, _ = rotary_frequencies(config.head_dim)
            for head in range(config.heads):
                kind = head % 4
                if kind in (0, 2):
                    bias[:, head, :pairs] = 1.0 if kind == 0 else 0.5
                elif kind == 1:
                    bias[:, head, :pairs] = (axes > 0).float()

    def forward(
        self, x: Tensor, modulation: Tensor, turn: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v ``[B, H, N, D]`` of ``x`` ``[B, groups, n, width]``."""
        shift, scale = modulation[:, :, 0:1], modulation[:, :, 1:2]
        h = F.rms_norm(x, x.shape[-1:]) * (1 + scale) + shift
        B, N = x.shape[0], x.shape[1] * x.shape[2]
        qkv = self.qkv(h).view(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        size = (self.head_dim,)
        q = rotate(F.rms_norm(q.float(), size) * self.q_gain, turn)
        k = rotate(F.rms_norm(k.float(), size) * self.k_gain, turn)
        return q.to(v.dtype), k.to(v.dtype), v.contiguous()


class _Mixer(nn.Module):
    """What one layer does with what its attention found: output projection and MLP."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_dim
        self.out = nn.Linear(inner, config.width, bias=False)
        self.up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        for linear in (self.out, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.5 * linear.in_features**-0.5)

    def forward(self, x: Tensor, attended: Tensor, modulation: Tensor) -> Tensor:
        """Return ``x`` ``[B, groups, n, width]`` with ``attended`` ``[B, H, N, D]`` mixed in."""
        gate, shift, scale, mlp_gate = modulation[:, :, 2:].split(1, dim=2)
        x = x + (1 + gate) * self.out(attended.transpose(1, 2).reshape(*x.shape[:3], -1))
        h = F.rms_norm(x, x.shape[-1:]) * (1 + scale) + shift
        value, opened = self.up(h).chunk(2, dim=-1)
        return x + (1 + mlp_gate) * self.down(value * F.silu(opened))


class _Layer(nn.Module):
    """One layer; its modulation is the shared one of the noise level plus its role's."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.roles = nn.Parameter(torch.zeros(_ROLES, _MODULATIONS, config.width))
        self.project = _Projection(config)
        self.mix = _Mixer(config)


class ReferenceNetwork(nn.Module):
    """Predict clean pixels of noisy tokens from controls, given frames and finished frames.

    Tokens are RGB patches in [-1, 1], channel fastest. Inside, every pixel is turned into luma and
    two opponent colours. The network estimates the clean token and reports the velocity that leads
    there, ``(noisy - clean) / sigma``.

    Args:
        config: Sizes.
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        self.num_layers = config.layers
        self.kv_heads = config.heads
        self.k_dim = self.v_dim = config.head_dim
        width, W = config.width, config.token_width
        self.embed_control = nn.Linear(config.control_width, width, bias=False)
        self.embed_finished = nn.Linear(W, width, bias=False)
        self.embed_noisy = nn.Linear(W, width, bias=False)
        nn.init.normal_(self.embed_control.weight, std=0.5)
        nn.init.normal_(self.embed_finished.weight, std=W**-0.5)
        nn.init.normal_(self.embed_noisy.weight, std=W**-0.5)
        self.roles = nn.Parameter(torch.randn(_ROLES, width) * 0.5)
        self.prompts = nn.Parameter(torch.randn(config.prompts, width) * 0.5)
        self.time_in = nn.Linear(config.time_features, config.time_hidden)
        self.time_out = nn.Linear(config.time_hidden, (_MODULATIONS + 2) * width)
        nn.init.zeros_(self.time_out.weight)
        nn.init.zeros_(self.time_out.bias)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.head = nn.Linear(width, W)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        opponent = torch.tensor(_OPPONENT)
        gain = torch.tensor((1.0, _COLOUR_GAIN, _COLOUR_GAIN))
        self.register_buffer("opponent", opponent, persistent=False)
        self.register_buffer("loud_opponent", gain[:, None] * opponent, persistent=False)
        self.opponent: Tensor
        self.loud_opponent: Tensor

    @property
    def blocks(self) -> list[_Layer]:
        """The layers, in order."""
        return cast(list[_Layer], list(self.layers))

    def encode_text(self, text_ids: Tensor, positions: Tensor) -> list[LayerKV]:
        """Return every layer's keys and values of the prompt; see `SlotNetwork.encode_text`.

        Ids are rows of the table of prompts, and are not checked here; id 0 is the null prompt.
        """
        # A prompt looks at nothing, so no layer changes it.
        x = (self.prompts[text_ids] + self.roles[TokenRole.TEXT])[:, None]
        turn = rotation(positions, self.k_dim)
        shared = self._time(text_ids.new_zeros(1, dtype=torch.float32))[:, None, :_MODULATIONS]
        pairs = []
        for layer in self.blocks:
            _, k, v = layer.project(x, shared + layer.roles[TokenRole.TEXT], turn)
            pairs.append(LayerKV(k, v))
        return pairs

    def forward(
        self,
        tokens: Tensor,
        *,
        role: TokenRole,
        timestep: Tensor,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Run one pass; see `SlotNetwork`. Unless the role is ``CURRENT``, the result is zero."""
        clean = self.denoise([Piece(role, tokens, timestep, positions)], attend)
        if not clean:
            return tokens.new_zeros(*tokens.shape[:2], self.config.token_width)
        return velocity(tokens, clean[0], timestep)

    def denoise(self, pieces: Sequence[Piece], attend: Attend) -> list[Tensor]:
        """Estimate the clean tokens of every ``CURRENT`` piece of a packed stream.

        Args:
            pieces: The stream, in the order in which ``attend`` knows its tokens.
            attend: Attention of the stream over itself, and over the prompt, layer by layer.

        Returns:
            ``[B, n, W]`` for each ``CURRENT`` piece, in order.
        """
        lengths = [piece.tokens.shape[1] for piece in pieces]
        x = torch.cat([self._embed(piece) for piece in pieces], dim=1)
        turn = rotation(torch.cat([piece.positions for piece in pieces], dim=1), self.k_dim)
        B, N, width = x.shape
        shared = torch.stack(
            [self._time(piece.timestep.reshape(-1).expand(B)) for piece in pieces], dim=1
        )
        roles = torch.tensor([int(piece.role) for piece in pieces], device=x.device)
        # Noise levels are broadcast over groups of tokens that never straddle two pieces.
        size = math.gcd(*lengths)
        groups = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n // size)])
        groups = groups.to(x.device)
        x = x.view(B, N // size, size, width)
        for index, layer in enumerate(self.blocks):
            modulation = shared[:, :, :_MODULATIONS] + layer.roles[roles]
            modulation = modulation[:, groups]
            q, k, v = layer.project(x, modulation, turn)
            x = layer.mix(x, attend(index, q, k, v), modulation)
        x = x.view(B, N, width)
        clean, start = [], 0
        for i, (piece, n) in enumerate(zip(pieces, lengths, strict=True)):
            if piece.role is TokenRole.CURRENT:
                clean.append(self._decode(x[:, start : start + n], shared[:, i : i + 1]))
            start += n
        return clean

    def _embed(self, piece: Piece) -> Tensor:
        """Return ``[B, n, width]`` of one piece."""
        role, tokens = piece.role, piece.tokens
        if role is TokenRole.CONTROL:
            x = self.embed_control(tokens)
        elif role is TokenRole.CURRENT:
            x = self.embed_noisy(_recolour(tokens, self.opponent))
        else:
            x = self.embed_finished(_recolour(tokens, self.loud_opponent))
        return x + self.roles[role]

    def _decode(self, x: Tensor, shared: Tensor) -> Tensor:
        """Return clean RGB tokens ``[B, n, W]``."""
        shift, scale = shared[:, :, -2], shared[:, :, -1]
        pixels = self.head(F.rms_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        return _recolour(pixels, self.opponent.T)

    def _time(self, timestep: Tensor) -> Tensor:
        """Return what a noise level ``[B]`` adds to all layers and the head, ``[B, 8, width]``."""
        count = self.config.time_features // 2
        turns = torch.logspace(-2, 4, count, base=2, device=timestep.device)
        angles = (timestep / TIMESTEPS)[:, None] * (2 * math.pi * turns)
        features = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.time_in.weight.dtype)
        hidden = F.silu(self.time_in(features))
        return self.time_out(hidden).unflatten(-1, (-1, self.config.width))


def _recolour(tokens: Tensor, matrix: Tensor) -> Tensor:
    """Apply ``matrix`` ``[3, 3]`` to every pixel of tokens ``[B, n, W]``."""
    return (tokens.unflatten(-1, (-1, 3)) @ matrix.T.to(tokens.dtype)).flatten(-2)


def velocity(noisy: Tensor, clean: Tensor, timestep: Tensor) -> Tensor:
    """Return the velocity from ``clean`` to noise at ``noisy``, in the dtype of ``noisy``."""
    sigma = (timestep / TIMESTEPS).clamp(min=_LEAST_SIGMA)
    return ((noisy.float() - clean.float()) / sigma).to(noisy.dtype)
