"""Random histories of a cache against a plain model that keeps rows in lists."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_core import FixedSlotKVCache, KVError, KVFormat, QuantizedLayerKV, SlotRegion
from torch import Tensor

B, H, SLOT = 1, 2, 3
Row = tuple[bytes, ...]  # the bytes of one stored row: elements, or codes and scale


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def quantized(row: Tensor) -> Row:
    """Quantise ``[B, H, D]`` by the definition, with numpy."""
    x = row.float().numpy()
    amax = np.abs(x).max(-1)
    finite = np.isfinite(x).all(-1)
    live = finite & (amax >= 2.0**-120)
    safe = np.where(live, amax, 1).astype(np.float32)
    steps = np.where(live[..., None], x, 0) * (np.float32(127) / safe)[..., None]
    scale = np.where(live, safe / np.float32(127), np.where(finite, 0, np.nan))
    codes = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    return codes.tobytes(), scale.astype(np.float32).tobytes()


class Cache(RuleBasedStateMachine):
    """One cache, and per buffer a list with the bytes of each row, None where it must be zero."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        self.random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        self.dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        self.int8 = draw(st.booleans())
        self.count = draw(st.integers(1, 3))
        self.widths = draw(st.sampled_from([(4, 4), (4, 2), (2, 4)]))
        self.prefill_tokens = draw(st.integers(0, 7))
        controls = draw(st.integers(0, self.prefill_tokens // SLOT))
        start = draw(st.integers(max(controls * SLOT, self.prefill_tokens - 2), 8))
        slots = draw(st.integers(1, 3))
        late = start + slots * SLOT
        self.regions = [
            SlotRegion("control", 0, controls, SLOT),
            SlotRegion("history", start, slots, SLOT, extends_length=True),
            SlotRegion("sink", late, 1, 2, extends_length=True),
        ]
        self.capacity = late + 2 + draw(st.integers(0, 2))
        storage = draw(st.sampled_from([None, "separate", "columns", "token major"]))
        self.cache = self.make(self.storage(storage) if storage else None)
        self.addresses = [t.data_ptr() for t in self.flat()]

    def make(self, storage: Any) -> FixedSlotKVCache:
        self.last_prefill = self.draw(self.prefill_tokens)
        cache = FixedSlotKVCache(
            self.last_prefill,
            capacity=self.capacity,
            regions=self.regions,
            storage=storage,
            format=KVFormat.INT8 if self.int8 else None,
        )
        self.begin(self.last_prefill)
        return cache

    def storage(self, layout: str) -> list[Any]:
        """Dirty buffers in one of several layouts."""
        stored = torch.int8 if self.int8 else self.dtype
        wanted = [(w, stored) for _ in range(self.count) for w in self.widths]
        wanted += [(1, torch.float32)] * (2 * self.count if self.int8 else 0)
        if layout == "columns":
            wide: dict[torch.dtype, int] = {}
            spans = []
            for width, dtype in wanted:
                spans.append((dtype, wide.get(dtype, 0), width))
                wide[dtype] = wide.get(dtype, 0) + width
            shape = (B, H, self.capacity)
            parents = {d: torch.full((*shape, n), 77.0).to(d) for d, n in wide.items()}
            flat = [parents[d][..., at : at + width] for d, at, width in spans]
        elif layout == "token major":
            flat = [
                torch.full((B, self.capacity, H, w), 77.0).to(d).transpose(1, 2) for w, d in wanted
            ]
        else:
            flat = [torch.full((B, H, self.capacity, w), 77.0).to(d) for w, d in wanted]
        pairs = list(zip(flat[: 2 * self.count : 2], flat[1 : 2 * self.count : 2], strict=True))
        if not self.int8:
            return pairs
        scales = [t[..., 0] for t in flat[2 * self.count :]]
        both = zip(scales[::2], scales[1::2], strict=True)
        return [QuantizedLayerKV(*pair, *scale) for pair, scale in zip(pairs, both, strict=True)]

    def draw(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Random layers, with zero rows and rows that are not finite among them."""
        result = []
        for _ in range(self.count):
            pair = []
            for width in self.widths:
                x = torch.randn(B, H, tokens, width, generator=self.random)
                kind = torch.randint(0, 12, (B, H, tokens), generator=self.random)
                x[kind == 0] = 0
                x[kind == 1] *= 1e-30
                x[..., 0][kind == 2] = float("nan")
                x[..., 1][kind == 3] = float("inf")
                pair.append(x.to(self.dtype))
            result.append((pair[0], pair[1]))
        return result

    def flat(self) -> list[Tensor]:
        return [t for layer in self.cache.buffers() for t in layer]

    # the model

    def begin(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.rows: list[list[Row | None]] = [[None] * self.capacity for _ in range(2 * self.count)]
        self.written = {r.name: [0] * r.slots for r in self.regions}
        for region in self.regions:
            for position in range(region.start, min(region.end, self.prefill_tokens)):
                self.written[region.name][(position - region.start) // region.slot_tokens] += 1
        self.newest = {r.name: -1 for r in self.regions}
        self.visible = self.prefill_tokens
        self.place(layers, 0, self.prefill_tokens)

    def place(self, layers: list[tuple[Tensor, Tensor]], start: int, end: int) -> None:
        for rows, source in zip(self.rows, [t for pair in layers for t in pair], strict=True):
            rows[start:end] = [None] * (end - start)
            for t in range(source.shape[2]):
                row = source[:, :, t]
                rows[start + t] = quantized(row) if self.int8 else (raw(row),)

    def record(self, name: str, layers: list[tuple[Tensor, Tensor]], chunk_id: int) -> int:
        region = next(r for r in self.regions if r.name == name)
        slot = chunk_id % region.slots
        start = region.start + slot * region.slot_tokens
        self.place(layers, start, start + region.slot_tokens)
        self.newest[name] = chunk_id
        self.written[name][slot] = layers[0][0].shape[2]
        if region.extends_length:
            self.visible = max(self.visible, start + region.slot_tokens)
        return slot

    def remember(self) -> tuple[Any, ...]:
        written = {name: list(rows) for name, rows in self.written.items()}
        return [list(rows) for rows in self.rows], written, dict(self.newest), self.visible

    def pick(self, data: st.DataObject) -> tuple[SlotRegion, int, int]:
        region = data.draw(st.sampled_from([r for r in self.regions if r.slots]))
        newest = self.newest[region.name]
        chunk_id = data.draw(st.sampled_from([newest + 1, newest + 1, max(newest, 0)]))
        return region, chunk_id, data.draw(st.integers(1, region.slot_tokens))

    # what can happen

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        region, chunk_id, tokens = self.pick(data)
        chunk = self.draw(tokens)
        slot = self.cache.write(region.name, chunk, chunk_id)
        assert slot == self.record(region.name, chunk, chunk_id)

    def inside(self, data: st.DataObject, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Sources that are views of the buffers: of any layer and side of the right width."""
        buffers = [t for layer in self.cache.buffers() for t in layer]
        layers = []
        for _ in range(self.count):
            pair = []
            for width in self.widths:
                source = data.draw(st.sampled_from([t for t in buffers if t.shape[3] >= width]))
                column = data.draw(st.integers(0, source.shape[3] - width))
                how = data.draw(st.sampled_from(["run", "run", "one token", "strided"]))
                step = 2 if how == "strided" and self.capacity >= 2 * tokens else 1
                at = data.draw(st.integers(0, self.capacity - step * tokens))
                view = source[:, :, at : at + step * tokens : step, column : column + width]
                if how == "one token" and tokens:
                    view = view[:, :, :1].expand(B, H, tokens, width)
                pair.append(view)
            layers.append((pair[0], pair[1]))
        return layers

    @precondition(lambda self: not self.int8)
    @rule(data=st.data())
    def write_from_inside(self, data: st.DataObject) -> None:
        region, chunk_id, tokens = self.pick(data)
        chunk = self.inside(data, tokens)
        copied = [(k.clone(), v.clone()) for k, v in chunk]
        self.cache.write(region.name, chunk, chunk_id)
        self.record(region.name, copied, chunk_id)

    @precondition(lambda self: not self.int8)
    @rule(data=st.data())
    def reset_from_inside(self, data: st.DataObject) -> None:
        prefill = self.inside(data, self.prefill_tokens)
        copied = [(k.clone(), v.clone()) for k, v in prefill]
        self.cache.reset(prefill)
        self.begin(copied)

    @rule()
    def reset(self) -> None:
        prefill = self.draw(self.prefill_tokens)
        self.cache.reset(prefill)
        self.begin(prefill)

    @rule(data=st.data(), fails=st.booleans(), count=st.integers(1, 4))
    def transaction(self, data: st.DataObject, fails: bool, count: int) -> None:
        before = self.remember()
        try:
            with self.cache.transaction():
                for _ in range(count):
                    self.write(data)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            self.rows, self.written, self.newest, self.visible = before

    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        region, chunk_id, tokens = self.pick(data)
        good = self.draw(tokens)
        k, v = good[-1]
        bad: list[tuple[Any, Any, Any]] = [
            (region.name, good, chunk_id + 2),
            (region.name, good, self.newest[region.name] - 1),
            (region.name, self.draw(region.slot_tokens + 1), chunk_id),
            (region.name, self.draw(0), chunk_id),
            (region.name, good[:-1], chunk_id),
            (region.name, [*good[:-1], (k, v[..., 1:])], chunk_id),
            (region.name, [*good[:-1], (k[:, 1:], v)], chunk_id),
            (region.name, [*good[:-1], (k, v.double())], chunk_id),
            ("other", good, chunk_id),
        ]
        call: Callable[..., Any] = self.cache.write
        try:
            call(*data.draw(st.sampled_from(bad)))
        except KVError:
            return
        raise AssertionError("a bad call was accepted")

    @rule()
    def move_to_a_twin(self) -> None:
        state, kept = self.cache.state_dict(), self.remember()
        old, self.cache = self.cache, self.make(self.storage("columns"))
        for _ in range(2):
            self.cache.write("sink", self.draw(2), 0)
        self.cache.load_state_dict(state)
        self.rows, self.written, self.newest, self.visible = kept
        assert repr(old).split("storage")[0] == repr(self.cache).split("storage")[0]
        self.addresses = [t.data_ptr() for t in self.flat()]

    @invariant()
    def bytes_counters_and_addresses_are_the_model_s(self) -> None:
        if not hasattr(self, "cache"):
            return
        for index, rows in enumerate(self.rows):
            layer = self.cache.buffers()[index // 2]
            parts = layer[index % 2 :: 2]  # the elements, and the scale if there is one
            for position, row in enumerate(rows):
                stored = tuple(raw(part[:, :, position]) for part in parts)
                assert stored == (row or tuple(bytes(len(s)) for s in stored)), (index, position)
        assert [t.data_ptr() for t in self.flat()] == self.addresses
        assert self.cache.length == self.visible
        assert {r.name: list(self.cache.valid(r.name)) for r in self.regions} == self.written
        assert self.cache.valid_tokens == sum(row is not None for row in self.rows[0])
        shown = {t.shape[2] for layer in self.cache.layers() for t in layer}
        assert shown == {self.visible}


Cache.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomHistories = Cache.TestCase
