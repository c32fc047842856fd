"""The hybrid operations as registered torch operations: opcheck, and a layer in one graph."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_core import Compression, HybridSpec, KeyFormat, KVCacheManager, LayerCacheHandle, RowFormat
from kv_kernels import find, hybrid_attention, hybrid_ops, indexer_topk
from kv_kernels.library import call_query
from kv_kernels.registry import ROWS, NoKernelError, load
from kv_kernels.testing import random_hybrid
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map_only

HQ, D, WIDTH = 2, 16, 32
CPU = torch.device("cpu")
FORMATS: dict[str, dict[str, Any]] = {
    "FP32": {"row_format": RowFormat.FP32, "key_format": KeyFormat.FP32},
    "FP8-MXFP4": {"row_format": RowFormat.FP8, "key_format": KeyFormat.MXFP4},
    "BF16-NVFP4": {"row_format": RowFormat.BF16, "key_format": KeyFormat.NVFP4},
}
ANGLES = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1]))
TABLES = ANGLES.cos(), ANGLES.sin()


def spec_of(**changes: Any) -> HybridSpec:
    kinds = (Compression(ratio=4, overlap=True, indexer=True),)
    return HybridSpec(
        ratios=(4,), kinds=kinds, head_dim=D, rope_dim=4, window=8, block_tokens=16, row_group=4,
        index_dim=WIDTH, **changes,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine can run on the CPU."""
    fmt = RowFormat.FP32
    query = call_query("append_swa", fmt, fmt, CPU, torch.float32, D, True)
    try:
        find(query, request.param)
    except NoKernelError as error:
        pytest.skip(str(error))
    return str(request.param)


def flat(op: str, manager: KVCacheManager, handle: LayerCacheHandle, backend: str) -> Any:
    """Return the arguments of a registered operation."""
    g = torch.Generator().manual_seed(0)
    step, spec = handle.step, manager.spec
    kind, state, pool = step.kinds[4], manager.states[0], manager.pools[0]
    assert pool is not None and pool.keys is not None
    T = step.num_tokens

    def draw(*shape: int) -> Tensor:
        return torch.randn(T, *shape, generator=g)

    row, key = spec.row_format.name, spec.key_format.name
    where = step.request_ids, step.positions
    picked = torch.where(kind.vis[:, None] > 1, torch.tensor([0, 1]), -1).int()
    return {
        "append_swa": (
            draw(D), step.positions, step.ring_slot, *state.ring, state.positions, row, 4, backend
        ),
        "append_tail": (draw(2 * D), draw(2 * D), kind.tail_slot, state.tails["main"], backend),
        "compress": (
            draw(2 * D), draw(2 * D), state.tails["main"], torch.ones(D), *TABLES, kind.closing,
            *where, step.request_slots, step.seq_start, 1e-6, 4, True, backend,
        ),
        "flush_compression": (
            draw(D), draw(WIDTH), kind.entry_slot, *pool.entries, *pool.keys,
            pool.key_global_scale, row, key, 4, backend,
        ),
        "indexer_topk": (
            draw(3, WIDTH), draw(3), *pool.keys, pool.key_global_scale, step.block_table, kind.vis,
            step.request_ids, 3, True, key, backend,
        ),
        "hybrid_attention": (
            draw(HQ, D), draw(D), torch.zeros(HQ), *state.ring, state.positions,
            step.request_slots, step.seq_start, *where, *pool.entries, step.block_table, kind.vis,
            picked, *TABLES, 0.25, 8, row, 4, backend, True,
        ),
    }[op]  # fmt: skip


OPS = (
    "append_swa",
    "append_tail",
    "compress",
    "flush_compression",
    "indexer_topk",
    "hybrid_attention",
)


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_every_operation_passes_opcheck(op: str, formats: Any, backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    # opcheck compares, and NaN is not equal to NaN
    manager, handles = random_hybrid(
        spec_of(**formats), [21, 9], [5, 1], generator=g, pad_tokens=1, garbage=False
    )
    args = flat(op, manager, handles[0], backend)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # the schema check compares with allclose, which FP8 does not have
    if not any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in args):
        checks.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.kv_kernels, op).default, args, test_utils=checks)


def layer_of_a_model(handle: LayerCacheHandle, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run one layer in the documented order on activations made from ``x`` ``[T, 32]``."""
    wide = torch.cat([x, -x], 1)
    main, index = (x, x.cos()), (wide, wide.sin())
    entries = handle.compress("main", *main, torch.ones(D), 1e-6, *TABLES)
    keys = handle.compress("index", *index, torch.ones(WIDTH), 1e-6, *TABLES)
    handle.flush_compression(entries, keys)
    queries = torch.stack([x, x * 2, 1 - x], 1)
    picked, counts = indexer_topk(handle.read_indexer_view(), queries, x[:, :3], k=3)
    classical = handle.read_classical_view()
    out = hybrid_attention(
        x.unflatten(1, (HQ, D)), x[:, :D], handle.read_swa_view(), classical, picked,
        torch.zeros(HQ), cos=TABLES[0], sin=TABLES[1],
    )  # fmt: skip
    handle.write_swa(x[:, :D])
    handle.append_tail("main", *main)
    handle.append_tail("index", *index)
    return out + 1, counts


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_a_layer_compiles_to_one_graph_and_equals_eager(formats: Any) -> None:
    """20 decode steps across windows and blocks; caches compared byte for byte."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer_of_a_model, fullgraph=True, backend=counter)
    managers = [
        KVCacheManager(spec_of(**formats), slots=3, blocks=6, ops=hybrid_ops) for _ in range(2)
    ]
    g = torch.Generator().manual_seed(0)
    for step in range(20):
        x = torch.randn(3, 2 * D, generator=g)
        outs = []
        for run, manager in zip((compiled, layer_of_a_model), managers, strict=True):
            (handle,) = manager.acquire(["a", "b"], [step, step], pad_tokens=3, pad_requests=3)
            with torch.no_grad():
                outs.append(run(handle, x))
            manager.commit(handle)
        for ours, theirs in zip(*outs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for ours, theirs in zip(*(m.states[0].tensors().values() for m in managers), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    # numbers that count steps become variables when they change for the first time
    assert counter.frame_count <= 2


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("op", OPS)
def test_torch_rows_never_wait_for_a_device(op: str, formats: Any) -> None:
    """On tensors of a device that has no values, so that whoever reads one is found out."""
    g = torch.Generator().manual_seed(0)
    manager, handles = random_hybrid(spec_of(**formats), [21, 9], [5, 1], generator=g)
    args = flat(op, manager, handles[0], "torch")
    captured: dict[str, Any] = {}
    module = importlib.import_module(f"kv_kernels.ops.{op}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find", lambda query, backend: lambda *row: captured.update(row=row))
        with contextlib.suppress(TypeError):  # it returned nothing to unpack
            module._run(*args)
    row = captured["row"]
    run = load(next(r.target for r in ROWS if (r.op, r.backend) == (op, "torch")))
    found = run(*tree_map_only(Tensor, lambda x: x.to("meta"), row))
    assert all(x.is_meta for x in tree_leaves(found) if isinstance(x, Tensor))
