"""An oracle of masked attention over text, chunk and memory, and awkward tensors for it."""

from collections.abc import Sequence

import numpy as np
import torch
from kv_core.codecs.int8 import quantize_int8
from kv_core.fixed_slot import LayerKV, QuantizedLayerKV
from torch import Tensor

from kv_kernels.masks import SegmentMask

LAYOUTS = ("contiguous", "transposed", "sliced")


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend in FP64 on the CPU, with every score in memory.

    Args:
        q: ``[B, Hq, N, D]`` in any floating dtype.
        k: ``[B, H, S, D]``; Hq is a multiple of H.
        v: ``[B, H, S, Dv]``.
        visible: bool ``[N, S]``, True where a query sees a key. What a query does not see never
            reaches it, not even as NaN; a value that is not finite and seen makes it NaN.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        softcap: If positive, scaled scores become ``softcap * tanh(score / softcap)``.
        dtype: What is computed in; FP32 gives a plain result to take a budget from.

    Returns:
        ``[B, Hq, N, Dv]`` and the log-sum-exp of the scores ``[B, Hq, N]``, both in ``dtype``. A
        query that sees nothing has 0 and minus infinity.
    """
    q, k, v = (x.detach().cpu().to(dtype) for x in (q, k, v))
    visible = visible.cpu()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    out = weights @ v.nan_to_num(0.0, 0.0, 0.0)
    sees_poison = visible.to(dtype) @ (~v.isfinite()).to(dtype) > 0
    return out.masked_fill(sees_poison, torch.nan), lse


def slot_attention_oracle(
    q: Tensor,
    chunk: LayerKV,
    mask: SegmentMask,
    *,
    text: LayerKV | None = None,
    memory: LayerKV | QuantizedLayerKV | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what ``slot_attention`` should, in FP64: output and log-sum-exp."""
    pairs = [exact_values(part) for part in (text, chunk, memory) if part is not None]
    k, v = (torch.cat(side, 2) for side in zip(*pairs, strict=True))
    return attention_oracle(q, k, v, mask.dense(), scale=scale)


def exact_values(layer: LayerKV | QuantizedLayerKV) -> tuple[Tensor, Tensor]:
    """Return keys and values as FP64 on the CPU; codes times scale is exact there."""
    if isinstance(layer, QuantizedLayerKV):
        k, v, k_scale, v_scale = (x.cpu().double() for x in layer)
        return k * k_scale[..., None], v * v_scale[..., None]
    return layer.k.cpu().double(), layer.v.cpu().double()


def random_tensor(
    shape: Sequence[int],
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "transposed",
) -> Tensor:
    """Draw a normal tensor ``[B, H, T, D]`` that lies in memory as real ones do.

    Args:
        shape: The four sizes.
        generator: A CPU generator, so that the numbers are the same on every device.
        dtype: Floating dtype.
        device: Where the tensor goes.
        layout: "contiguous", "transposed" (a view of ``[B, T, H, D]``, as projections leave it) or
            "sliced" (a part of a larger buffer on every axis).
    """
    B, H, T, D = shape
    values = torch.randn(B, H, T, D, generator=generator).to(dtype)
    if layout == "contiguous":
        return values.to(device)
    if layout == "transposed":
        return values.transpose(1, 2).contiguous().to(device).transpose(1, 2)
    if layout != "sliced":
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    # powers of two beside the tensor, so that its rows stay aligned
    buffer = torch.zeros(B + 1, H + 1, T + 3, D + 16, dtype=dtype, device=device)
    view = buffer[1:, :H, 2 : T + 2, :D]
    view.copy_(values)
    return view


def random_layer(
    shape: Sequence[int],
    v_dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "transposed",
) -> LayerKV:
    """Draw keys of ``shape`` ``[B, H, T, D]`` and values ``[B, H, T, Dv]``."""
    k, v = (
        random_tensor(size, generator=generator, dtype=dtype, device=device, layout=layout)
        for size in (shape, (*shape[:3], v_dim))
    )
    return LayerKV(k, v)


def quantized(layer: LayerKV) -> QuantizedLayerKV:
    """Quantise keys and values to INT8 codes and scales."""
    (k, k_scale), (v, v_scale) = (quantize_int8(side) for side in layer)
    return QuantizedLayerKV(k, v, k_scale, v_scale)


def random_mask(
    q_len: int,
    kv_len: int,
    *,
    generator: torch.Generator,
    segments: tuple[int, int] = (4, 6),
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
    empty_queries: bool = False,
) -> SegmentMask:
    """Draw a mask of random segments, about half of whose pairs are visible.

    Args:
        q_len: Queries N.
        kv_len: Keys S.
        generator: A CPU generator.
        segments: How many segments of queries and of keys there are.
        block_size: Tokens of a mask block.
        device: Where the mask goes.
        empty_queries: Let the first segment of queries see nothing; the others see something.
    """
    table = torch.rand(segments, generator=generator) < 0.5
    table[:, -1] = True
    table[0, -1] &= not empty_queries
    table[0] &= not empty_queries
    return SegmentMask.build(
        table.numpy(),
        _random_lengths(q_len, segments[0], generator),
        _random_lengths(kv_len, segments[1], generator),
        block_size=block_size,
        device=device,
    )


def _random_lengths(total: int, count: int, generator: torch.Generator) -> np.ndarray:
    """Cut ``total`` into ``count`` lengths, each at least 1."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])
    return edges.diff().numpy()
