"""Oracles of the operations on a hybrid cache, and caches as awkward as real ones."""

from collections.abc import Iterable, Sequence

import torch
from kv_core.hybrid.handle import LayerCacheHandle
from kv_core.hybrid.keys import KeyTensors, decode_keys, encode_keys
from kv_core.hybrid.manager import KVCacheManager
from kv_core.hybrid.ops import HybridOps
from kv_core.hybrid.rows import RowTensors
from kv_core.hybrid.spec import HybridSpec
from kv_core.hybrid.views import ClassicalView, IndexerView, SWAView
from torch import Tensor


def fill_garbage(manager: KVCacheManager) -> None:
    """Fill all storage with NaN, and with codes and scales of NaN; positions stay what they are."""
    stores = [state.tensors() for state in manager.states]
    stores += [pool.tensors() for pool in manager.pools if pool is not None]
    for name, tensor in (item for store in stores for item in store.items()):
        if tensor.dtype == torch.uint8:
            tensor.fill_(0xFF)
        elif name != "positions":
            tensor.copy_(torch.full_like(tensor, torch.nan, dtype=torch.float32))


def random_hybrid(
    spec: HybridSpec,
    contexts: Sequence[int],
    new: Sequence[int],
    *,
    generator: torch.Generator,
    ops: HybridOps | None = None,
    pad_tokens: int = 0,
    pad_requests: int = 0,
    max_len: int | None = None,
    spare_blocks: int = 1,
    garbage: bool = True,
    device: torch.device | str = "cpu",
) -> tuple[KVCacheManager, list[LayerCacheHandle]]:
    """Make a cache with random content and open a step whose entries are in place already.

    Request i is called i. Rings and tails hold what came before the step; ``flush_compression`` was
    called with random entries, ``write_swa`` and ``append_tail`` are left to do.

    Args:
        spec: Sizes and formats.
        contexts: Tokens of each request, the new ones included.
        new: How many of them are new; a request without any is not in the step.
        generator: A CPU generator, so that the numbers are the same on every device.
        ops: What stores; by default kv-core's plain torch.
        pad_tokens: Tokens of the step behind the last.
        pad_requests: Requests of the step behind the last.
        max_len: Most tokens of a request, which the table has room for.
        spare_blocks: Blocks beyond those that the contexts need.
        garbage: Fill storage with NaN first.
        device: Where everything goes.
    """
    blocks = sum(spec.blocks_for(context) for context in contexts)
    slots, most = len(contexts) + 1, sum(contexts) + pad_tokens
    manager = KVCacheManager(
        spec, slots=slots, blocks=blocks + 1 + spare_blocks, device=device, ops=ops,
        max_tokens=max(most, 1), max_requests=slots + pad_requests,
        max_len=max_len or max([*contexts, 1]),
    )  # fmt: skip
    if garbage:
        fill_garbage(manager)
    before = [context - count for context, count in zip(contexts, new, strict=True)]
    # in two steps, the second in reverse, so that the blocks of a request do not follow each other
    for first, last, order in (
        ([0] * len(before), [length // 2 for length in before], 1),
        ([length // 2 for length in before], before, -1),
    ):
        spans = list(enumerate(zip(first, last, strict=True)))[::order]
        ids = [i for i, (start, stop) in spans for _ in range(start, stop)]
        if ids:
            positions = [p for _, (start, stop) in spans for p in range(start, stop)]
            handles = manager.acquire(ids, positions)
            for handle in handles:
                _flush_random(handle, generator)
                handle.write_swa(_random_rows(handle, spec.head_dim, generator))
                _append_random_tails(handle, generator)
            manager.commit(handles)
    spans = list(enumerate(zip(before, contexts, strict=True)))
    ids = [i for i, (start, stop) in spans for _ in range(start, stop)]
    positions = [p for _, (start, stop) in spans for p in range(start, stop)]
    handles = manager.acquire(
        ids, positions, pad_tokens=len(ids) + pad_tokens,
        pad_requests=sum(1 for count in new if count) + pad_requests,
    )  # fmt: skip
    for handle in handles:
        _flush_random(handle, generator)
    return manager, handles


def _random_rows(handle: LayerCacheHandle, width: int, generator: torch.Generator) -> Tensor:
    """Draw ``[T, width]``; what padding tokens compute is garbage."""
    step = handle.step
    rows = torch.randn(step.num_tokens, width, generator=generator).to(step.positions.device)
    return rows.masked_fill_((step.positions < 0)[:, None], torch.nan)


def _flush_random(handle: LayerCacheHandle, generator: torch.Generator) -> None:
    if handle.kind is not None:
        entries = _random_rows(handle, handle.spec.head_dim, generator)
        keys = _random_rows(handle, handle.spec.index_dim, generator)
        handle.flush_compression(entries, keys if handle.kind.indexer else None)


def _append_random_tails(handle: LayerCacheHandle, generator: torch.Generator) -> None:
    kind, spec = handle.kind, handle.spec
    if kind is None:
        return
    widths = {"main": spec.head_dim} | ({"index": spec.index_dim} if kind.indexer else {})
    for which, width in widths.items():
        pair = (_random_rows(handle, kind.halves * width, generator) for _ in range(2))
        handle.append_tail(which, *pair)  # type: ignore[arg-type]


def hybrid_attention_oracle(
    q: Tensor,
    kv_new: Tensor,
    swa_view: SWAView,
    classical_view: ClassicalView | None,
    picked: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return what ``hybrid_attention`` should, token by token on the CPU.

    Args:
        q: ``[T, Hq, D]``.
        kv_new: ``[T, D]``.
        swa_view: Read where it holds what a token looks for, and nowhere else.
        classical_view: Read at the entries that tokens see, and nowhere else.
        picked: ``[T, k]`` or None.
        sinks: ``[Hq]`` or None.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        cos: ``[positions, R / 2]`` or None; turned as complex numbers.
        sin: Like ``cos``.
        dtype: What is computed in; FP32 gives a plain result to take a budget from.

    Returns:
        ``[T, Hq, D]`` and the log-sum-exp without the sink ``[T, Hq]``, both in ``dtype``.
    """
    T, Hq, D = q.shape
    spec, new = swa_view.spec, swa_view.spec.roundtrip(kv_new.cpu()).to(dtype)
    out = torch.zeros(T, Hq, D, dtype=dtype)
    lse = torch.full((T, Hq), -torch.inf, dtype=dtype)
    starts, slots, held = (x.cpu() for x in (swa_view.seq_start, swa_view.slots, swa_view.swa_pos))
    owners, positions = swa_view.request_ids.tolist(), swa_view.positions.tolist()
    for t, (b, p) in enumerate(zip(owners, positions, strict=True)):
        if b < 0:
            continue
        rows = []
        for at in range(max(0, p - swa_view.window + 1), p + 1):
            ring = at % held.shape[1]
            if at >= starts[b]:
                rows.append(new[t - (p - at)])
            elif held[slots[b], ring] == at:
                rows.append(_decoded(spec, swa_view.rows, int(slots[b]), ring).to(dtype))
        if classical_view is not None:
            seen = range(int(classical_view.vis[t]))
            chosen = seen if picked is None else [w for w in picked[t].tolist() if w in seen]
            for w in chosen:
                rows.append(_decoded(spec, classical_view.rows, *_place(classical_view, b, w)))
        if rows:
            keys = torch.stack([row.to(dtype) for row in rows])
            scores = q[t].cpu().to(dtype) @ keys.T * (D**-0.5 if scale is None else scale)
            lse[t] = scores.logsumexp(-1)
            if sinks is not None:
                scores = torch.cat([scores, sinks.detach().cpu().to(dtype)[:, None]], 1)
            out[t] = scores.softmax(-1)[:, : len(keys)] @ keys
        if cos is not None and sin is not None and rows:
            angle = torch.complex(*(table[p].cpu().to(dtype) for table in (cos, sin)))
            R = 2 * len(angle)
            pairs = torch.view_as_complex(out[t, :, D - R :].reshape(Hq, -1, 2)) * angle.conj()
            out[t, :, D - R :] = torch.view_as_real(pairs).flatten(1)
    return out, lse


def indexer_scores_oracle(
    view: IndexerView,
    iq: Tensor,
    iweights: Tensor,
    *,
    quantize_query: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the score of each key for each token, token by token on the CPU.

    Args:
        view: Read at the keys that tokens see, and nowhere else.
        iq: ``[T, Hi, I]``.
        iweights: ``[T, Hi]``.
        quantize_query: Whether queries are rounded as keys are.
        dtype: What is computed in; FP32 gives a plain result to take a budget from.

    Returns:
        ``[T, E]`` in ``dtype`` with E the most keys that a token sees; minus infinity for what a
        token does not see.
    """
    queries, total = iq.cpu().float(), view.global_scale
    total = None if total is None else total.cpu()
    if quantize_query:
        queries = decode_keys(encode_keys(queries, view.format, total), view.format, total)
    vis, owners = view.vis.tolist(), view.request_ids.tolist()
    scores = torch.full((len(vis), max([*vis, 0])), -torch.inf, dtype=dtype)
    for t, (b, seen) in enumerate(zip(owners, vis, strict=True)):
        for w in range(seen if b >= 0 else 0):
            block, row = _place(view, b, w)
            one = KeyTensors(*_one(view.stored, block, row))  # type: ignore[arg-type]
            key = decode_keys(one, view.format, total)[0].to(dtype)
            dots = (queries[t].to(dtype) @ key).relu()
            scores[t, w] = iweights[t].cpu().to(dtype) @ dots
    return scores


def topk_oracle(scores: Tensor, vis: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` entries with the highest scores, of equal ones the lower index.

    Args:
        scores: ``[T, E]``.
        vis: ``[T]`` entries that each token sees.
        k: Width of the result.

    Returns:
        ``[T, k]`` INT32 ascending, then -1; and ``[T]`` INT32 counts.
    """
    picked = torch.full((len(scores), k), -1, dtype=torch.int32)
    for t, (row, seen) in enumerate(zip(scores.tolist(), vis.tolist(), strict=True)):
        order = sorted(range(seen), key=lambda w, row=row: (-row[w], w))[:k]  # type: ignore[misc]
        picked[t, : len(order)] = torch.tensor(sorted(order), dtype=torch.int32)
    return picked, (picked >= 0).sum(1, dtype=torch.int32)


def assert_picks(
    picked: Tensor, counts: Tensor, scores: Tensor, vis: Tensor, *, budget: float = 0.0
) -> None:
    """Check that each token picked its highest scores, up to what scores may err.

    Args:
        picked: ``[T, k]`` of ``indexer_topk``.
        counts: ``[T]``.
        scores: ``[T, E]`` of ``indexer_scores_oracle``.
        vis: ``[T]`` entries that each token sees.
        budget: How far a score may be from the oracle's: as far above or below, each.

    Raises:
        AssertionError: A list is not ascending, too short, has what its token does not see, or
            leaves out a score that is higher than one it has.
    """
    k = picked.shape[1]
    rows = zip(picked.tolist(), counts.tolist(), scores.cpu(), vis.tolist(), strict=True)
    for t, (row, count, score, seen) in enumerate(rows):
        chosen, rest = row[:count], row[count:]
        assert count == min(seen, k), f"token {t} sees {seen} entries, got a count of {count}"
        assert chosen == sorted(set(chosen)), (
            f"token {t} must pick in ascending order, got {chosen}"
        )
        assert set(rest) <= {-1}, f"token {t} must have -1 after its {count} picks, got {rest}"
        assert all(0 <= w < seen for w in chosen), f"token {t} sees {seen} entries, got {chosen}"
        others = sorted(set(range(seen)) - set(chosen))
        if chosen and others:
            gap = float(score[others].max() - score[chosen].min())
            assert gap <= 2 * budget, f"token {t} left out a score that is higher by {gap:.3e}"


def _place(view: ClassicalView | IndexerView, b: int, w: int) -> tuple[int, int]:
    N = view.entries_per_block
    return int(view.block_table[b, w // N]), w % N


def _decoded(spec: HybridSpec, rows: RowTensors, outer: int, inner: int) -> Tensor:
    one = RowTensors(*_one(rows, outer, inner))  # type: ignore[arg-type]
    return spec.decode(one)[0]


def _one(stored: Iterable[Tensor | None], outer: int, inner: int) -> list[Tensor | None]:
    return [None if x is None else x[outer, inner][None].cpu() for x in stored]
