"""The paged operations as registered torch operations: opcheck, one graph, no copy of a pool."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_core.errors import NoKernelError
from kv_core.layer import KVLayer
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_kernels import append, find, gather, paged_decode_attention, paged_write
from kv_kernels.library import call_query
from kv_kernels.testing import make_layer, make_step, random_paged, storage_bytes
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

H, G, D, N, P = 2, 3, 16, 4, 23
CPU = torch.device("cpu")
INT8 = KVSpec(kv_heads=H, head_dim=D, block_size=N, format=KVFormat.INT8)
MIXED = KVSpec(kv_heads=H, head_dim=D, block_size=N, k_format=KVFormat.FP32, v_format=KVFormat.INT8)
ANGLES = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(D / 2))
TABLES = ANGLES.cos(), ANGLES.sin()
NORM = torch.linspace(0.5, 1.5, D)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine can run on the CPU."""
    query = call_query("append", KVFormat.FP32, KVFormat.FP32, CPU, torch.float32, 8, True)
    try:
        find(query, request.param)
    except NoKernelError as error:
        pytest.skip(str(error))
    return request.param


def flat(op: str, layer: KVLayer, step: Step, backend: str) -> tuple[Any, ...]:
    """Return the arguments of a registered operation."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(step.num_tokens, heads, D, generator=g) for heads in (G * H, H, H))
    qkv = torch.cat([q, k, v], 1).flatten(1)
    cache = layer.k, layer.v, layer.k_scale, layer.v_scale
    names = layer.spec.k_format.name, layer.spec.v_format.name, backend
    turn = qkv, NORM, None, *TABLES, step.positions
    tables = step.block_table, step.context_lens
    return {
        "split_qkv_norm_rope": (*turn, H, D, "half", 1e-6, backend),
        "append": (k, v, step.slots, *cache, *names),
        "paged_write": (*turn, step.slots, *cache, "interleaved", 1e-6, *names),
        "paged_decode_attention": (
            q, *cache, *tables, step.cu_seqlens, 4, 16, 0.25, 9, 0.0, 2, *names, True
        ),
        "gather": (*cache, *tables, 9, torch.float32, *names),
    }[op]  # fmt: skip


OPS = ("split_qkv_norm_rope", "append", "paged_write", "paged_decode_attention", "gather")


@pytest.mark.parametrize("spec", [INT8, MIXED], ids=["int8", "mixed"])
@pytest.mark.parametrize("op", OPS)
def test_every_operation_passes_opcheck(op: str, spec: KVSpec, backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    layer, step = random_paged(spec, [5, 0, 9], [2, 0, 1], generator=g, storage="HND")
    for tensor in layer.tensors().values():  # opcheck compares, and NaN is not equal to NaN
        tensor.masked_fill_(tensor != tensor, 0)
    args = flat(op, layer, step, backend)
    torch.library.opcheck(getattr(torch.ops.kv_kernels, op).default, args)


def layer_of_a_model(
    layer: KVLayer, step: Step, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = torch.cat([x, x * 2, x + 1, -x, x * 4], -1).unflatten(1, (5, H, D)).flatten(1)
    q = paged_write(layer, step, qkv, NORM, None, *TABLES, rope="half", backend="torch")
    out = paged_decode_attention(layer, step, q + 1, window_left=9, backend="torch")
    append(layer, step, out[:, :H], out[:, -H:], backend="torch")
    k, v = gather(layer, step, length=12, backend="torch")
    return out * 2, k + 1, v


def decode_step(length: int) -> Step:
    """Two sequences that decode; a third that has not begun."""
    contexts = [length, length + 3, 0]
    tables = [[1, 7, 3, 20, 9, 4, 12][: -(-length // N)], [2, 8, 5, 6, 11, 13, 14, 15]]
    tables = [tables[0], tables[1][: -(-contexts[1] // N)], []]
    step = make_step(tables, contexts, [1, 1, 0], N, pad_tokens=1, columns=8, null_block=True)
    step.block_table = step.block_table[:, :8].contiguous()
    step.max_context = 32
    return step


def rewrite(held: Step, step: Step) -> Step:
    """Put the values of ``step`` into the tensors that a graph knows, as ``SequenceTable`` does."""
    for name in ("slots", "positions", "cu_seqlens", "block_table", "context_lens"):
        getattr(held, name).copy_(getattr(step, name))
    return held


@pytest.mark.parametrize("spec", [INT8, MIXED], ids=["int8", "mixed"])
def test_a_decode_loop_compiles_once_and_equals_eager(spec: KVSpec) -> None:
    """20 steps on two layers in turn (D20), in one graph each, caches compared byte for byte."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer_of_a_model, fullgraph=True, backend=counter)
    layers, twins = ([make_layer(spec, P, garbage=False) for _ in "AB"] for _ in range(2))
    held = decode_step(1)
    with torch.no_grad():
        for i in range(20):
            step = rewrite(held, decode_step(i + 1))
            x = torch.randn(3, 2 * D, generator=torch.Generator().manual_seed(i))
            got = compiled(layers[i % 2], step, x)
            wanted = layer_of_a_model(twins[i % 2], step, x)
            for ours, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for layer, twin in zip(layers, twins, strict=True):
        assert all(map(torch.equal, storage_bytes(layer), storage_bytes(twin)))
    assert counter.frame_count == 1


def test_the_generated_code_neither_makes_nor_copies_a_pool() -> None:
    """Two layers in one graph, through inductor, whose code is searched for large numbers."""
    blocks = 1009
    layers, twins = ([make_layer(INT8, blocks, garbage=False) for _ in "AB"] for _ in range(2))

    def model(layers: list[KVLayer], step: Step, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            qkv = torch.cat([x, x * 2, x + 1], 1)
            q = paged_write(layer, step, qkv, NORM, None, *TABLES, rope="half", backend="torch")
            x = paged_decode_attention(layer, step, q, backend="torch").flatten(1) + x
        return x

    step, x = decode_step(7), torch.randn(3, H * D)
    with torch.no_grad():
        got, codes = run_and_get_code(torch.compile(model, fullgraph=True), layers, step, x)
        wanted = model(twins, step, x)
    torch.testing.assert_close(got, wanted)
    for layer, twin in zip(layers, twins, strict=True):
        assert all(map(torch.equal, storage_bytes(layer), storage_bytes(twin)))
    source = "\n".join(codes)
    assert source.count("torch.ops.kv_kernels.paged_write.default(") == 2
    made = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", source)
    sizes = [math.prod(map(int, re.findall(r"\d+", shape))) for shape in made]
    loops = [int(bound) for bound in re.findall(r"\b(\d+)L\b", source)]
    assert made and loops, "nothing was found at all, which proves nothing"
    assert max(sizes + loops) < blocks * N * H  # the elements of the scales, the smallest storage


def test_compiled_chunks_of_other_lengths_are_right() -> None:
    """A new number of tokens may compile again; it may not give another answer."""
    compiled = torch.compile(layer_of_a_model, fullgraph=True, backend="aot_eager")
    layer, twin = (make_layer(MIXED, P, garbage=False) for _ in range(2))
    done = 0
    for stop in (3, 7, 8, 12):
        step = make_step([[3, 1, 2][: -(-stop // N)]], [stop], [stop - done], N)
        x = torch.randn(stop - done, 2 * D)
        got, wanted = (
            f(side, step, x) for f, side in ((compiled, layer), (layer_of_a_model, twin))
        )
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        done = stop
