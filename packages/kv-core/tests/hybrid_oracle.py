"""A toy stack of hybrid layers: cached through handles, and without any cache, query by query.

Attention and top-k belong to kv-kernels; what is here is slow, obvious, and gives the same bits for
a token whatever step it runs in: everything is computed token by token.
"""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_core import (
    ClassicalView,
    Compression,
    HybridSpec,
    IndexerView,
    KeyFormat,
    KVCacheManager,
    LayerCacheHandle,
    RowFormat,
    SWAView,
)
from kv_core.hybrid.keys import KeyTensors, decode_keys, encode_keys
from kv_core.hybrid.rows import RowTensors
from torch import Tensor

EPS = 1e-6
Chunks = Sequence[Sequence[tuple[Hashable, int]]]  # steps of (request, tokens)


def tiny_spec(**options: Any) -> HybridSpec:
    """Window 8, ratio 4 with overlap and indexer, ratio 16 without; rows as computed."""
    ratios = options.pop("ratios", (0, 4, 16, 4))
    kinds = options.pop(
        "kinds", (Compression(ratio=4, overlap=True, indexer=True), Compression(ratio=16))
    )
    settings: dict[str, Any] = {
        "head_dim": 16,
        "rope_dim": 4,
        "window": 8,
        "block_tokens": 16,
        "row_format": RowFormat.FP32,
        "row_group": 4,
        "key_format": KeyFormat.FP32,
        "index_dim": 8,
        "kinds": tuple(kind for kind in kinds if kind.ratio in ratios),
        "ratios": ratios,
    }
    return HybridSpec(**settings | options)


def tiny_fp8(**options: Any) -> HybridSpec:
    """The same sizes with FP8 rows and MXFP4 keys."""
    formats = {"row_format": RowFormat.FP8, "key_format": KeyFormat.MXFP4, "index_dim": 32}
    return tiny_spec(**formats | options)


def by_row(weight: Tensor, x: Tensor) -> Tensor:
    """Return ``x @ weight.T`` row by row: the same bits for a row in any batch."""
    rows = [weight @ row for row in x]
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[0])


@dataclass
class Stack:
    """Attention-only layers with random weights over a spec."""

    spec: HybridSpec
    hidden: int = 16
    heads: int = 2
    index_heads: int = 4
    top_k: int = 3
    seed: int = 0
    weights: list[dict[str, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the weights."""
        g = torch.Generator().manual_seed(self.seed)
        spec = self.spec
        angle = torch.arange(600)[:, None] * torch.logspace(0, -2, spec.rope_dim // 2)
        self.cos, self.sin = angle.cos(), angle.sin()

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g) / self.hidden**0.5

        self.weights = []
        for layer in range(spec.layers):
            kind, D, h = spec.kind(layer), spec.head_dim, self.hidden
            w = {"q": draw(self.heads * D, h), "kv": draw(D, h), "o": draw(h, self.heads * D)}
            w["sinks"] = draw(self.heads)
            for name, width in (("main", D), ("index", spec.index_dim)):
                if kind is None or (name == "index" and not kind.indexer):
                    continue
                w[f"{name}.value"] = draw(kind.halves * width, h)
                w[f"{name}.gate"] = draw(kind.halves * width, h) * 4
                w[f"{name}.bias"] = draw(kind.ratio, kind.halves * width) * 4
                w[f"{name}.norm"] = 1 + draw(width) / 4
            if kind is not None and kind.indexer:
                w["iq"], w["iw"] = (
                    draw(self.index_heads * spec.index_dim, h),
                    draw(self.index_heads, h),
                )
            self.weights.append(w)

    def embed(self, request: Hashable, positions: Sequence[int]) -> Tensor:
        """Return the input of each token, ``[T, hidden]``: a function of request and position."""
        rows = []
        for position in positions:
            seed = hashlib.sha256(f"{request}/{position}".encode()).digest()[:6]
            g = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
            rows.append(torch.randn(self.hidden, generator=g))
        return torch.stack(rows) if rows else torch.zeros(0, self.hidden)

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Rotate the last channels of one row."""
        R = self.spec.rope_dim
        if not R:
            return x
        head, (even, odd) = x[..., :-R], (x[..., -R::2], x[..., -R + 1 :: 2])
        c, s = self.cos[position], self.sin[position]
        turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
        return torch.cat([head, turned], -1)

    def rope_rows(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Rotate each row at its position."""
        rows = [self.rope(row, p) for row, p in zip(x, positions, strict=True)]
        return torch.stack(rows) if rows else x

    def project(self, layer: int, x: Tensor, positions: Sequence[int]) -> dict[str, Tensor]:
        """Return all that a layer makes of its input, token by token."""
        w, spec = self.weights[layer], self.spec
        kind = spec.kind(layer)
        found = {"q": by_row(w["q"], x).view(len(x), self.heads, spec.head_dim)}
        found["kv"] = by_row(w["kv"], x)
        for name in ("q", "kv"):
            found[name] = self.rope_rows(found[name], positions)
        for name in ("main", "index"):
            if f"{name}.value" in w and kind is not None:
                bias = w[f"{name}.bias"][
                    torch.tensor(list(positions), dtype=torch.int64) % kind.ratio
                ]
                found[f"{name}.value"] = by_row(w[f"{name}.value"], x)
                found[f"{name}.score"] = by_row(w[f"{name}.gate"], x) + bias
        if "iq" in w:
            iq = by_row(w["iq"], x).view(len(x), self.index_heads, spec.index_dim)
            found["iq"] = self.rope_rows(iq, positions)
            found["iw"] = by_row(w["iw"], x)
        return found

    def layer(self, handle: LayerCacheHandle, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Run one layer through its handle, in the documented order."""
        made, w = self.project(handle.layer, x, positions), self.weights[handle.layer]
        kind, T = handle.kind, handle.step.num_tokens
        made = {name: padded(rows, T) for name, rows in made.items()}
        classical, picked = None, None
        if kind is not None:
            new = {
                name: handle.compress(
                    name,  # type: ignore[arg-type]
                    made[f"{name}.value"],
                    made[f"{name}.score"],
                    w[f"{name}.norm"],
                    EPS,
                    self.cos,
                    self.sin,
                )
                for name in ("main", "index")
                if f"{name}.value" in made
            }
            handle.flush_compression(new["main"], new.get("index"))
            classical = handle.read_classical_view()
            if kind.indexer:
                view = handle.read_indexer_view()
                picked, _ = indexer_topk(view, made["iq"], made["iw"], self.top_k)
        swa = handle.read_swa_view()
        out = hybrid_attention(made["q"], made["kv"], swa, classical, picked, w["sinks"])
        handle.write_swa(made["kv"])
        for name in ("main", "index"):
            if f"{name}.value" in made:
                handle.append_tail(name, made[f"{name}.value"], made[f"{name}.score"])
        return x + by_row(w["o"], out[: len(x)].flatten(1))

    def step(self, handles: list[LayerCacheHandle], x: Tensor, positions: Sequence[int]) -> Tensor:
        """Run all layers."""
        for handle in handles:
            x = self.layer(handle, x, positions)
        return x

    def run(
        self, manager: KVCacheManager, *step: tuple[Hashable, int], **options: Any
    ) -> dict[Hashable, Tensor]:
        """Acquire, run and commit a step of (request, tokens); return outputs by request."""
        ids, positions = tokens_of(manager, step)
        names = options.pop("names", {})
        accepted = options.pop("accepted", None)
        handles = manager.acquire(ids, positions, **options)
        x = torch.cat(
            [self.embed(names.get(r, r), [p]) for r, p in zip(ids, positions, strict=True)]
            or [torch.zeros(0, self.hidden)]
        )
        out = self.step(handles, x, positions)
        manager.commit(handles, accepted)
        counts = [count for _, count in step]
        return dict(zip([r for r, _ in step], out.split(counts), strict=True))

    def cold(self, request: Hashable, length: int) -> Tensor:
        """Return the outputs ``[length, hidden]`` of a request, from definitions and no cache."""
        x, spec = self.embed(request, range(length)), self.spec
        for layer, w in enumerate(self.weights):
            made, kind = self.project(layer, x, range(length)), spec.kind(layer)
            rows, entries, keys = spec.roundtrip(made["kv"]), [], []
            if kind is not None:
                entries = [self.entry(made, layer, "main", n) for n in range(length // kind.ratio)]
                entries = [spec.roundtrip(entry) for entry in entries]
                if kind.indexer:
                    keys = [
                        self.stored_key(self.entry(made, layer, "index", n))
                        for n in range(length // kind.ratio)
                    ]
            outs = []
            for p in range(length):
                seen = [*rows[max(0, p - spec.window + 1) : p + 1]]
                if kind is not None:
                    vis = list(range((p + 1) // kind.ratio))
                    if kind.indexer:
                        scores = [index_score(made["iq"][p], made["iw"][p], keys[n]) for n in vis]
                        vis = top(scores, self.top_k)
                    seen += [entries[n] for n in vis]
                outs.append(attend(made["q"][p], torch.stack(seen), w["sinks"]))
            x = x + by_row(w["o"], torch.stack(outs).flatten(1))
        return x

    def stored_key(self, key: Tensor) -> Tensor:
        """Return a key as it reads after storing."""
        total = torch.tensor([self.spec.key_global_scale])
        encoded = encode_keys(key[None], self.spec.key_format, total)
        return decode_keys(encoded, self.spec.key_format, total)[0]

    def entry(self, made: Mapping[str, Tensor], layer: int, name: str, n: int) -> Tensor:
        """Return entry or key ``n`` of a layer from all tokens, by definition."""
        kind = self.spec.kind(layer)
        assert kind is not None
        value, score = made[f"{name}.value"], made[f"{name}.score"]
        D, r = value.shape[1] // kind.halves, kind.ratio
        rows = [(t, slice(-D, None)) for t in range(n * r, n * r + r)]
        if kind.overlap and n:
            rows = [(t, slice(0, D)) for t in range((n - 1) * r, n * r)] + rows
        values = torch.stack([value[t, c] for t, c in rows]).double()
        weight = torch.stack([score[t, c] for t, c in rows]).double().softmax(0)
        pooled = (values * weight).sum(0)
        pooled = pooled / (pooled.square().mean() + EPS).sqrt()
        return self.rope((pooled * self.weights[layer][f"{name}.norm"]).float(), n * r)


def tokens_of(
    manager: KVCacheManager, step: Sequence[tuple[Hashable, int]]
) -> tuple[list[Hashable], list[int]]:
    """Return ids and positions of a step's tokens, going on where each request is."""
    ids: list[Hashable] = []
    positions: list[int] = []
    for request, count in step:
        start = manager.length(request) if request in manager.requests else 0
        ids += [request] * count
        positions += range(start, start + count)
    return ids, positions


def padded(rows: Tensor, T: int) -> Tensor:
    """Add rows of NaN up to ``T``: what padding tokens compute is garbage."""
    return torch.cat([rows, rows.new_full((T - len(rows), *rows.shape[1:]), torch.nan)])


def attend(q: Tensor, rows: Tensor, sinks: Tensor) -> Tensor:
    """Return the output ``[heads, D]`` of one query over rows ``[n, D]``, K = V."""
    logits = rows @ q.T / rows.shape[1] ** 0.5  # [n, heads]
    top = torch.maximum(logits.amax(0), sinks)
    weight = (logits - top).exp()
    return (weight.T @ rows) / (weight.sum(0) + (sinks - top).exp())[:, None]


def index_score(iq: Tensor, iw: Tensor, key: Tensor) -> float:
    """Return the score of one key for one query."""
    return float((iw * (iq @ key).relu()).sum())


def top(scores: Sequence[float], k: int) -> list[int]:
    """Return the indices of the k largest scores, ascending; of equal ones the lower index."""
    order = sorted(range(len(scores)), key=lambda n: (-scores[n], n))
    return sorted(order[:k])


def indexer_topk(view: IndexerView, iq: Tensor, iw: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the picked entries ``[T, k]`` with a tail of -1, and how many of them there are."""
    picked = torch.full((len(iq), k), -1)
    for t in range(len(iq)):
        keys = [_key(view, int(view.request_ids[t]), n) for n in range(int(view.vis[t]))]
        found = top([index_score(iq[t], iw[t], key) for key in keys], k)
        picked[t, : len(found)] = torch.tensor(found)
    return picked, (picked >= 0).sum(1)


def hybrid_attention(
    q: Tensor,
    kv_new: Tensor,
    swa: SWAView,
    classical: ClassicalView | None,
    picked: Tensor | None,
    sinks: Tensor,
) -> Tensor:
    """Return ``[T, heads, D]``; padding tokens give 0."""
    out = torch.zeros_like(q)
    new = swa.spec.roundtrip(kv_new)
    for t in range(len(q)):
        b, p = int(swa.request_ids[t]), int(swa.positions[t])
        if b < 0:
            continue
        start, slot, first = int(swa.seq_start[b]), int(swa.slots[b]), int(swa.cu_tokens[b])
        rows = []
        for at in range(max(0, p - swa.window + 1), p + 1):
            if at >= start:
                rows.append(new[first + at - start])
            elif int(swa.swa_pos[slot, at % swa.spec.ring]) == at:
                rows.append(_row(swa.spec, swa.rows, slot, at % swa.spec.ring))
        if classical is not None:
            seen = range(int(classical.vis[t]))
            if picked is not None:
                seen = [int(n) for n in picked[t] if n >= 0]  # type: ignore[assignment]
            for n in seen:
                block, row = _place(classical, b, n)
                rows.append(_row(classical.spec, classical.rows, block, row))
        out[t] = attend(q[t], torch.stack(rows), sinks)
    return out


def _place(view: ClassicalView | IndexerView, b: int, n: int) -> tuple[int, int]:
    block = int(view.block_table[b, n // view.entries_per_block])
    assert block > 0 and n // view.entries_per_block < int(view.block_lens[b])
    return block, n % view.entries_per_block


def _row(spec: HybridSpec, rows: RowTensors, outer: int, inner: int) -> Tensor:
    one = RowTensors(*(None if x is None else x[outer, inner][None] for x in rows))  # type: ignore[arg-type]
    return spec.decode(one)[0]


def _key(view: IndexerView, b: int, n: int) -> Tensor:
    block, row = _place(view, b, n)
    one = KeyTensors(*(None if x is None else x[block, row][None] for x in view.stored))  # type: ignore[arg-type]
    return decode_keys(one, view.format, view.global_scale)[0]


def storage(manager: KVCacheManager) -> Iterator[tuple[str, Tensor]]:
    """Yield every storage tensor of a manager by name."""
    for layer, state in enumerate(manager.states):
        pool = manager.pools[layer]
        for name, tensor in (state.tensors() | (pool.tensors() if pool else {})).items():
            yield f"{layer}.{name}", tensor


def fill(manager: KVCacheManager, value: float) -> None:
    """Fill all memory but the positions with garbage."""
    for name, tensor in storage(manager):
        if name.endswith("positions"):
            continue
        if tensor.dtype == torch.uint8:
            tensor.fill_(0xFF)
        else:
            tensor.copy_(torch.full(tensor.shape, value).to(tensor.dtype))


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(manager: KVCacheManager) -> str:
    """Return a hash of all that a manager holds: memory, requests, blocks and open step."""
    state = hashlib.sha256()
    for name, tensor in storage(manager):
        state.update(name.encode() + raw(tensor))
    table = manager._table
    for part in (table.records, table.free_slots, table.allocator.__dict__, manager._snapshots):
        state.update(repr(part).encode())
    for part in (manager._open.__dict__, manager._prefixes.digests(), manager._prefixes.nbytes):
        state.update(repr(part).encode())
    state.update(raw(manager._buffers._ints))
    return state.hexdigest()


def history(manager: KVCacheManager, request: Hashable) -> dict[str, bytes]:
    """Return the bytes that a request's future depends on: window, tails, entries and keys."""
    spec, record = manager.spec, manager._table.records[request]
    found = {}
    for layer, state in enumerate(manager.states):
        kind, pool = spec.kind(layer), manager.pools[layer]
        window = range(max(0, record.length - spec.window + 1), record.length)
        held = [int(state.positions[record.slot, p % spec.ring]) for p in window]
        assert held == list(window)
        for index, tensor in enumerate(state.ring.present()):
            rows = [raw(tensor[record.slot, p % spec.ring]) for p in window]
            found[f"{layer}.ring.{index}"] = b"".join(rows)
        if kind is None or pool is None:
            continue
        first = max(0, (record.length // kind.ratio - (kind.halves - 1)) * kind.ratio)
        for name, tail in state.tails.items():
            half = tail.shape[-1] // kind.halves
            rows = []
            for p in range(first, record.length):
                # of the window before, only the first half is ever read again
                width = half if p < record.length // kind.ratio * kind.ratio else None
                rows.append(raw(tail[record.slot, p % kind.tail, :, :width]))
            found[f"{layer}.tail.{name}"] = b"".join(rows)
        stored = [*pool.entries.present(), *(pool.keys.present() if pool.keys else [])]
        for index, tensor in enumerate(stored):
            rows = []
            for n in range(record.length // kind.ratio):
                block = record.blocks[n // pool.entries_per_block]
                rows.append(raw(tensor[block, n % pool.entries_per_block]))
            found[f"{layer}.pool.{index}"] = b"".join(rows)
    return found
