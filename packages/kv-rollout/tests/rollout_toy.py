"""A tiny random network with every feature that a rollout must carry through, and its model."""

import torch
from kv_core import LayerKV
from kv_rollout import ClipGeometry, RolloutSetup, SlotState, TokenRole
from torch import Tensor

HEADS, KV_HEADS, K_DIM, V_DIM, WIDTH = 4, 2, 16, 32, 24
TOKEN_WIDTH, CONTROL_WIDTH = 12, 5
# radians per unit of time, row and column, one column per pair of channels
FREQUENCIES = torch.zeros(3, K_DIM // 2)
FREQUENCIES[0, :4] = torch.tensor([0.9, 0.31, 0.1, 0.013])
FREQUENCIES[1, 4:6] = torch.tensor([0.7, 0.2])
FREQUENCIES[2, 6:] = torch.tensor([0.5, 0.1])


class ToyNetwork:
    """Two layers, grouped queries, keys and values of different width, rotation on three axes."""

    num_layers, kv_heads, k_dim, v_dim = 2, KV_HEADS, K_DIM, V_DIM

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=draw) / rows**0.5).to(dtype)

        self.embed = {role: weight(TOKEN_WIDTH, WIDTH) for role in TokenRole}
        self.embed[TokenRole.CONTROL] = weight(CONTROL_WIDTH, WIDTH)
        self.role = weight(len(TokenRole), WIDTH)
        self.words = weight(16, WIDTH)
        self.time = weight(1, WIDTH)
        self.qkv = [weight(WIDTH, HEADS * K_DIM + KV_HEADS * (K_DIM + V_DIM)) for _ in range(2)]
        self.out = [weight(HEADS * V_DIM, WIDTH) for _ in range(2)]
        self.head = weight(WIDTH, TOKEN_WIDTH)

    def encode_text(self, text_ids: Tensor, positions: Tensor) -> list[LayerKV]:
        hidden = self.words[text_ids]
        return [LayerKV(*self.split(hidden, layer, positions)[1:]) for layer in range(2)]

    def __call__(self, tokens, *, role, timestep, positions, attend) -> Tensor:
        return self.layers(self.tokens(tokens, role, timestep), positions, attend)

    def tokens(self, tokens: Tensor, role: TokenRole, timestep: Tensor) -> Tensor:
        embedded = tokens @ self.embed[role] + self.role[int(role)]
        return embedded + (timestep / 1000).to(tokens.dtype) * self.time[0]

    def layers(self, hidden: Tensor, positions: Tensor, attend) -> Tensor:
        for layer in range(2):
            attended = attend(layer, *self.split(hidden, layer, positions))
            hidden = hidden + torch.tanh(attended.transpose(1, 2).flatten(2) @ self.out[layer])
        return hidden @ self.head

    def split(self, hidden: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, ...]:
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        sizes = (HEADS * K_DIM, KV_HEADS * K_DIM, KV_HEADS * V_DIM)
        q, k, v = (normed @ self.qkv[layer]).split(sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, K_DIM)).transpose(1, 2) for x in (q, k))
        v = v.unflatten(-1, (-1, V_DIM)).transpose(1, 2)
        return rotate(q, positions), rotate(k, positions), v


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions.double().T @ FREQUENCIES.to(positions.device).double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class ToyModel:
    """The network with what a rollout asks of a model; ``calls`` records every pass."""

    device = torch.device("cpu")
    token_width, control_width = TOKEN_WIDTH, CONTROL_WIDTH
    latent_channels, latent_patch_size = 3, 2
    default_schedule = (1.0, 0.6, 0.3)
    default_sample_type = "ode"
    default_text_ids = torch.tensor([3, 1])
    position_limit = None
    model_id = "toy"

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.network = ToyNetwork(seed, dtype)
        self.calls: list[dict] = []
        self.fail_at: int | None = None

    def prepare_rollout(self, setup: RolloutSetup, controls) -> SlotState:
        return SlotState(_Recorded(self), setup, controls, device=self.device, dtype=self.dtype)


class _Recorded:
    def __init__(self, model: ToyModel) -> None:
        self._model = model
        for name in ("num_layers", "kv_heads", "k_dim", "v_dim", "encode_text"):
            setattr(self, name, getattr(model.network, name))

    def __call__(self, tokens, *, role, timestep, positions, attend) -> Tensor:
        model = self._model
        call = {"role": role, "tokens": tokens, "timestep": float(timestep), "kv": []}
        model.calls.append(call)

        def recorded(layer, q, k, v):
            if model.fail_at == len(model.calls) and layer == 1:
                raise RuntimeError("the network broke")
            out = attend(layer, q, k, v)
            call["kv"].append((k, v))
            return out

        call["velocity"] = model.network(
            tokens, role=role, timestep=timestep, positions=positions, attend=recorded
        )
        return call["velocity"]


def toy_geometry(frames: int = 9, *, given: int = 1, views: int = 2, **more) -> ClipGeometry:
    more = {"patch_h": 1, "patch_w": 3, "frames_per_chunk": 4} | more
    return ClipGeometry(num_views=views, frames_per_view=frames, condition_frames=given, **more)


def toy_inputs(geometry: ClipGeometry, *, batch: int = 1, seed: int = 7) -> dict:
    draw = torch.Generator().manual_seed(seed)
    V, T, X, K = (
        geometry.num_views,
        geometry.frames_per_view,
        geometry.spatial_tokens,
        geometry.condition_frames,
    )
    inputs = {"controls": torch.randn(batch, V, T, X, CONTROL_WIDTH, generator=draw)}
    if K:
        inputs["condition_tokens"] = torch.randn(batch, V, K, X, TOKEN_WIDTH, generator=draw)
    return inputs
