"""Oracles of the paged operations, and layers, tables and steps as awkward as real ones."""

from collections.abc import Sequence

import torch
from kv_core.layer import KVLayer
from kv_core.spec import KVSpec
from kv_core.step import Step
from torch import Tensor

from kv_kernels.testing.slots import attention_oracle

STORAGES = ("NHD", "HND", "packed", "padded")

_FILLERS = (-1, 2**31 - 1, 0)  # what stands in a table where nobody may look


def make_layer(
    spec: KVSpec,
    blocks: int,
    *,
    storage: str = "NHD",
    capacity: int | None = None,
    garbage: bool = True,
    device: torch.device | str = "cpu",
) -> KVLayer:
    """Make a layer over storage that lies in memory in one of several ways.

    Args:
        spec: Sizes and formats.
        blocks: P.
        storage: "NHD", "HND", "packed" (keys and values are halves of one row, head by head) or
            "padded" (a part of a larger buffer on every axis).
        capacity: Make a contiguous layer of this many tokens for each of ``blocks`` sequences.
        garbage: Fill everything, also what lies between rows, with NaN; codes with 127.
        device: Where the storage lives.
    """
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}")
    shape = (blocks, capacity or spec.block_size, spec.kv_heads, spec.head_dim)
    formats = (spec.k_format, spec.v_format)
    fill = [127 if fmt.is_quantized else torch.nan for fmt in formats] if garbage else [0, 0]
    buffers = [
        _buffer(storage, shape, x, fmt.dtype, device) for x, fmt in zip(fill, formats, strict=True)
    ]
    if storage == "packed" and spec.k_format is spec.v_format:
        buffers[1] = buffers[0]
    k, v = (_cut(storage, shape, buffer, side) for side, buffer in enumerate(buffers))
    P, N, H, _ = shape
    scales = [
        torch.full((P + 1, H + 1, N + 3), torch.nan if garbage else 0.0, device=device)[1:, :H, :N]
        for _ in formats
    ]
    k_scale, v_scale = (
        scale.transpose(1, 2) if fmt.is_quantized else None
        for scale, fmt in zip(scales, formats, strict=True)
    )
    return KVLayer.adopt(spec, k, v, k_scale, v_scale, is_paged=capacity is None)


def _buffer(
    storage: str,
    shape: tuple[int, int, int, int],
    fill: float,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    P, N, H, D = shape
    size = {
        "NHD": (P, N, H, D),
        "HND": (P, H, N, D),
        "packed": (P, H, N, 2 * D),
        # a power of two beside the row, so that rows stay aligned
        "padded": (P + 1, N + 3, H + 1, D + 16),
    }[storage]
    return torch.full(size, fill, dtype=dtype, device=device)


def _cut(storage: str, shape: tuple[int, int, int, int], buffer: Tensor, side: int) -> Tensor:
    """Return keys (side 0) or values (side 1) as ``[P, N, H, D]`` views of a buffer."""
    _, N, H, D = shape
    if storage == "padded":
        return buffer[1:, 1 : N + 1, :H, :D]
    if storage == "packed":
        return buffer[..., side * D : (side + 1) * D].transpose(1, 2)
    return buffer.transpose(1, 2) if storage == "HND" else buffer


def make_step(
    tables: Sequence[Sequence[int]],
    contexts: Sequence[int],
    queries: Sequence[int],
    block_size: int,
    *,
    pad_tokens: int = 0,
    columns: int = 1,
    null_block: bool = False,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Step:
    """Build the step that stores and attends the last ``queries`` of each sequence's tokens.

    Args:
        tables: Block ids of each sequence, as many as it needs.
        contexts: Tokens of each sequence, the new ones included.
        queries: New tokens of each sequence.
        block_size: N.
        pad_tokens: Rows behind the last token, which store nothing.
        columns: Columns of the table that nobody may look at.
        null_block: Whether block 0 is reserved.
        dtype: Of the ids.
        device: Where the tensors go.
    """
    slots: list[int] = []
    positions: list[int] = []
    edges = [0]
    for blocks, context, count in zip(tables, contexts, queries, strict=True):
        tokens = range(context - count, context)
        slots += [blocks[t // block_size] * block_size + t % block_size for t in tokens]
        positions += tokens
        edges.append(edges[-1] + count)
    width = max(map(len, tables), default=0) + columns
    rows = [
        [*blocks, *(_FILLERS[i % len(_FILLERS)] for i in range(width - len(blocks)))]
        for blocks in tables
    ]

    def ids(values: object, of: torch.dtype = dtype) -> Tensor:
        return torch.tensor(values, dtype=of, device=device)

    return Step(
        slots=ids(slots + [-1] * pad_tokens, torch.int64),
        positions=ids(positions + [0] * pad_tokens, torch.int64),
        cu_seqlens=ids(edges, torch.int32),
        block_table=ids(rows).reshape(len(rows), width),
        context_lens=ids(list(contexts)),
        max_query=max(queries, default=0),
        max_context=max(contexts, default=0),
        null_block=null_block,
    )


def fill_layer(layer: KVLayer, step: Step, *, generator: torch.Generator) -> None:
    """Store random tokens wherever ``step`` says that a sequence has stored one."""
    for row, length in zip(step.block_table.tolist(), step.context_lens.tolist(), strict=True):
        N = layer.block_size
        slots = torch.tensor([row[t // N] * N + t % N for t in range(length)], dtype=torch.int64)
        k, v = (
            torch.randn(length, layer.kv_heads, layer.head_dim, generator=generator).to(
                layer.device
            )
            for _ in range(2)
        )
        layer.write(k, v, slots.to(layer.device))


def random_paged(
    spec: KVSpec,
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    generator: torch.Generator,
    storage: str = "NHD",
    capacity: int | None = None,
    pad_tokens: int = 0,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> tuple[KVLayer, Step]:
    """Make a layer full of garbage, a shuffled table, and random tokens where it points.

    Args:
        spec: Sizes and formats.
        contexts: Tokens of each sequence, all of them stored.
        queries: How many of them are new.
        generator: A CPU generator, so that the numbers are the same on every device.
        storage: See ``make_layer``.
        capacity: Make a contiguous layer, with this many tokens for each sequence.
        pad_tokens: Rows of the step behind its last token.
        dtype: Of the ids.
        device: Where everything goes.
    """
    N = capacity or spec.block_size
    needed = [-(-context // N) for context in contexts]
    P = sum(needed) + 2 if capacity is None else len(contexts)
    # block 0 stays free where blocks are shared: it is the one for padding
    free = torch.randperm(P - 1 if capacity is None else P, generator=generator).tolist()
    ids = [block + 1 for block in free] if capacity is None else free
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    layer = make_layer(spec, P, storage=storage, capacity=capacity, device=device)
    step = make_step(
        tables, contexts, queries, N, pad_tokens=pad_tokens, null_block=capacity is None,
        dtype=dtype, device=device,
    )  # fmt: skip
    fill_layer(layer, step, generator=generator)
    return layer, step


def storage_bytes(layer: KVLayer) -> list[Tensor]:
    """Return a copy of every byte of the layer's storage, also of those between its rows."""
    found = []
    for tensor in layer.tensors().values():
        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        found.append(everything.set_(tensor.untyped_storage()).clone())
    return found


def paged_attention_oracle(
    q: Tensor,
    layer: KVLayer,
    step: Step,
    *,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return what ``paged_decode_attention`` should, sequence by sequence on the CPU.

    Args:
        q: ``[T, Hq, D]``.
        layer: Read at the tokens that are stored, and nowhere else.
        step: Tables and lengths.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window_left: Tokens before its own that a query sees, -1 for all.
        softcap: Bound of the scores, 0 for none.
        dtype: What is computed in; FP32 gives a plain result to take a budget from.

    Returns:
        ``[T, Hq, D]`` and the log-sum-exp ``[T, Hq]``, both in ``dtype``.
    """
    T, Hq, D = q.shape
    N = layer.block_size
    k, v = (_exact(x, s) for x, s in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)))
    rows, edges = step.block_table.tolist(), step.cu_seqlens.tolist()
    out = torch.zeros(T, Hq, D, dtype=dtype)
    lse = torch.full((T, Hq), -torch.inf, dtype=dtype)
    for b, context in enumerate(step.context_lens.tolist()):
        new = slice(edges[b], edges[b + 1])
        own = torch.arange(context - new.stop + new.start, context)[:, None]
        at = torch.arange(context)
        visible = at <= own
        if window_left >= 0:
            visible &= at >= own - window_left
        block = torch.tensor([rows[b][i // N] for i in range(context)], dtype=torch.int64)
        slots = (block.to(k.device), (at % N).to(k.device))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[new], k[slots], v[slots]))
        part, part_lse = attention_oracle(
            queries, keys, values, visible, scale=scale, softcap=softcap, dtype=dtype
        )
        out[new], lse[new] = part[0].transpose(0, 1), part_lse[0].T
    return out, lse


def _exact(stored: Tensor, scale: Tensor | None) -> Tensor:
    return stored.double() if scale is None else stored.double() * scale.double()[..., None]


def split_qkv_norm_rope_oracle(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    *,
    kv_heads: int,
    head_dim: int,
    rope: str,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``split_qkv_norm_rope`` should, on the CPU, rotating complex numbers.

    Args:
        qkv: ``[T, (Hq + 2H) * D]``.
        q_norm: ``[D]`` or None.
        k_norm: ``[D]`` or None.
        cos: ``[max_pos, R/2]``, None with ``rope="none"``.
        sin: Like ``cos``.
        positions: ``[T]`` rows of the tables; None where row t is token t's.
        kv_heads: H.
        head_dim: D.
        rope: "none", "half" or "interleaved".
        eps: Of the norm.
        dtype: What is computed in; FP32 gives a plain result to take a budget from.

    Returns:
        ``[T, Hq, D]``, ``[T, H, D]`` and ``[T, H, D]`` in ``dtype``.
    """
    T, D = qkv.shape[0], head_dim
    x = qkv.cpu().to(dtype).reshape(T, -1, D)
    q, k, v = x[:, : -2 * kv_heads], x[:, -2 * kv_heads : -kv_heads], x[:, -kv_heads:]
    turned = []
    for side, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            mean = side.square().sum(-1, keepdim=True) / D
            side = side / (mean + eps).sqrt() * weight.cpu().to(dtype)
        if cos is not None and sin is not None:
            angles = torch.complex(*(table.cpu().to(dtype) for table in (cos, sin)))
            side = _rotated(side, angles if positions is None else angles[positions.cpu()], rope)
        turned.append(side)
    return turned[0], turned[1], v


def _rotated(x: Tensor, angles: Tensor, rope: str) -> Tensor:
    """Multiply pairs of the first R elements, as complex numbers, by ``[T, R/2]`` angles."""
    R = 2 * angles.shape[1]
    real, imaginary = (
        (slice(0, R // 2), slice(R // 2, R)) if rope == "half" else (slice(0, R, 2), slice(1, R, 2))
    )
    pairs = torch.complex(x[..., real].contiguous(), x[..., imaginary].contiguous())
    pairs = pairs * angles[:, None]
    y = x.clone()
    y[..., real], y[..., imaginary] = pairs.real, pairs.imag
    return y
