"""What the tests of this package share: a compiler cache of their own, and calls to make."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_core.fixed_slot import LayerKV
from kv_kernels import slot_attention
from kv_kernels.ops.slot_attention.inputs import check_inputs
from kv_kernels.registry import Query, Row
from kv_kernels.testing import (
    assert_within_budget,
    quantized,
    random_layer,
    random_mask,
    random_tensor,
    slot_attention_oracle,
)

# precompiled headers take longer than the few kernels here gain, and hundreds of megabytes
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kv-kernels-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

NO_GPU = "no CUDA device on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


class Call:
    """Arguments of one call of slot_attention, drawn at random."""

    def __init__(
        self,
        seed: int = 0,
        *,
        batch: int = 2,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (32, 48),
        queries: int = 37,
        text: int | None = 5,
        chunk: int = 50,
        memory: int | None = 90,
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
        joined: bool = False,
        layout: str = "transposed",
        device: str = "cpu",
        **mask: Any,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        place: dict[str, Any] = {"dtype": dtype, "device": device, "generator": g}
        lengths = {"text": text, "chunk": chunk, "memory": memory}
        keys = sum(length or 0 for length in lengths.values())
        self.q = random_tensor((batch, heads[0], queries, dims[0]), layout="transposed", **place)
        whole = random_layer((batch, heads[1], keys, dims[0]), dims[1], layout=layout, **place)
        parts: dict[str, Any] = {}
        start = 0
        for name, length in lengths.items():
            if length is not None:
                stop = start + length
                part = LayerKV(whole.k[:, :, start:stop], whole.v[:, :, start:stop])
                parts[name] = part if joined else LayerKV(part.k.clone(), part.v.clone())
                start = stop
        self.chunk: LayerKV = parts.pop("chunk")
        if int8:
            parts["memory"] = quantized(parts["memory"])
        self.parts = parts
        mask = {"block_size": 16, "device": device, "generator": g, **mask}
        self.mask = random_mask(queries, keys, **mask)

    def run(self, backend: str | None = None, **options: Any) -> Any:
        return slot_attention(
            self.q, self.chunk, self.mask, backend=backend, **self.parts, **options
        )

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        return slot_attention_oracle(self.q, self.chunk, self.mask, **self.parts)

    def check(self, backend: str | None) -> None:
        """Compare one row with the oracle, within what the torch row errs."""
        assert_within_budget(self.run(backend), self.run("torch"), self.oracle()[0])

    def query(self, lse: bool = False) -> Query:
        """What the call asks of a row."""
        text, memory = self.parts.get("text"), self.parts.get("memory")
        inputs = check_inputs(self.q, self.chunk, self.mask, text, memory, None)
        return Query(
            op="slot_attention",
            k_format=inputs.format,
            v_format=inputs.format,
            device=self.q.device.type,
            capability=torch.cuda.get_device_capability() if self.q.is_cuda else None,
            dtype=self.q.dtype,
            k_dim=self.q.shape[3],
            v_dim=self.chunk.v.shape[3],
            group=self.q.shape[1] // self.chunk.k.shape[1],
            block_size=self.mask.block_size,
            lse=lse,
        )

    def op_args(self, backend: str, *, lse: bool = False, lists: bool = False) -> tuple[Any, ...]:
        """Return the flat arguments of the registered op."""
        memory = self.parts.get("memory") or (None, None)
        memory = (*memory, *(None,) * (4 - len(memory)))
        mask, blocks = self.mask, []
        if lists:
            b = mask.block_mask()
            blocks = [
                b.kv_num_blocks, b.kv_indices, b.full_kv_num_blocks, b.full_kv_indices
            ]  # fmt: skip
        kv_format = self.query().k_format.name
        return (
            self.q, *self.parts.get("text", (None, None)), *self.chunk, *memory,
            mask.table, mask.q_segment, mask.kv_segment, blocks, list(mask.block_size),
            self.q.shape[3] ** -0.5, kv_format, kv_format, backend, lse,
        )  # fmt: skip


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """Return the class that draws arguments."""
    return Call


@pytest.fixture
def skip_if_rejected() -> Callable[[Row, Query], None]:
    """Return a function that skips a test, with the row's own reason."""

    def skip(row: Row, query: Query) -> None:
        if reason := row.rejects(query):
            pytest.skip(f"{row.backend} {reason}")

    return skip
