"""The memory of one running clip: a network brings its layers, everything else is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from kv_core import (
    DtypeError,
    FixedSlotKVCache,
    LayerKV,
    QuantizedLayerKV,
    RolloutStateError,
    ShapeError,
    SlotRegion,
    SnapshotError,
    SpecError,
    allocate_kv_arena,
    check_tensor,
    stage_current_kv_,
)
from kv_kernels import SegmentMask, slot_attention
from torch import Tensor

from kv_rollout.geometry import FrameRange, ar_chunk_range
from kv_rollout.memory import MemoryLayout, build_memory_layout, pass_segments
from kv_rollout.model import Attend, ControlSource, SlotNetwork
from kv_rollout.segments import TokenRole
from kv_rollout.setup import RolloutSetup
from kv_rollout.visibility import MaskCache


class SlotState:
    """Run a `SlotNetwork` over a fixed-slot memory of controls, given frames and history.

    The memory of a layer is ``[control slots | given frames | history slots]``. Slots hold a chunk
    each and are reused in turn, so shapes and addresses never change. A floating memory lies behind
    the prompt and the current chunk in one buffer, which attention reads without a copy; an INT8
    memory stands apart as codes and scales.

    Args:
        network: The layers. They keep no state of their own.
        setup: What the rollout decided.
        controls: Where control tokens come from.
        device: Where the memory lives.
        dtype: Of the prompt's and the current chunk's keys and values, and of a floating memory.

    Raises:
        SpecError: The memory format is floating and not the one of ``dtype``.
        ShapeError, DtypeError: The network's prompt is not what it says of itself.
    """

    def __init__(
        self,
        network: SlotNetwork,
        setup: RolloutSetup,
        controls: ControlSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if not setup.memory_format.is_quantized and setup.memory_format.dtype != dtype:
            raise SpecError(
                f"memory_format {setup.memory_format.name} does not fit a model in {dtype}: "
                "use INT8, or leave it out to keep the model's own"
            )
        self._network = network
        self._setup = setup
        self._controls = controls
        self._device = device
        self._dtype = dtype
        self._masks = MaskCache(setup.visibility, block_size=setup.mask_block_size, device=device)
        self._text_segments = setup.text_segments()
        self._layout = build_memory_layout(
            setup.geometry,
            control=(None,) * setup.memory.control_slots,
            history=(None,) * setup.memory.history_slots,
            given=False,
        )
        self._reach = 0  # controls of the frames below it are, or were, in memory
        self._controls_written = 0
        self._history_written = 0
        with torch.no_grad():
            self._allocate(network.encode_text(setup.text_ids, setup.text_positions(device)))

    def _allocate(self, text: list[LayerKV]) -> None:
        """Make one buffer per layer and K/V, and the cache over its memory part."""
        network, setup, geometry = self._network, self._setup, self._setup.geometry
        B, H, n = setup.batch_size, network.kv_heads, setup.text_ids.shape[1]
        if len(text) != network.num_layers:
            raise ShapeError(
                f"encode_text must return keys and values of L={network.num_layers} layers, "
                f"got {len(text)}"
            )
        for layer, pair in enumerate(text):
            for name, part, width in (
                ("keys", pair[0], network.k_dim),
                ("values", pair[1], network.v_dim),
            ):
                check_tensor(
                    f"the prompt's {name} of layer {layer}", part, "B H T D",
                    {"B": B, "H": H, "T": n, "D": width}, dtype=self._dtype, device=self._device,
                )  # fmt: skip
        given = geometry.condition_frames
        chunk = setup.chunk_tokens
        regions = []
        start = 0
        for name, slots, slot_tokens in (
            ("control", setup.memory.control_slots, chunk),
            ("given", int(given > 0), given * geometry.tokens_per_frame),
            ("history", setup.memory.history_slots, chunk),
        ):
            regions.append(SlotRegion(name, start, slots, slot_tokens, extends_length=True))
            start = regions[-1].end
        empty = [LayerKV(k[:, :, :0], v[:, :, :0]) for k, v in text]
        quantized = setup.memory_format.is_quantized
        arenas = [
            allocate_kv_arena(
                pair, none, current_tokens=chunk, memory_tokens=0 if quantized else start
            )
            for pair, none in zip(text, empty, strict=True)
        ]
        self._arenas = [LayerKV(*arena) for arena, _ in arenas]
        self._arena_layout = arenas[0][1]
        memory_start = self._arena_layout.memory_start
        self._text = [LayerKV(k[:, :, :n], v[:, :, :n]) for k, v in self._arenas]
        self._current = [
            LayerKV(k[:, :, n:memory_start], v[:, :, n:memory_start]) for k, v in self._arenas
        ]
        storage = [LayerKV(k[:, :, memory_start:], v[:, :, memory_start:]) for k, v in self._arenas]
        self._cache = FixedSlotKVCache(
            empty,
            capacity=start,
            regions=regions,
            storage=None if quantized else storage,
            format=setup.memory_format,
        )
        self._memory: list[LayerKV | QuantizedLayerKV] = self._cache.buffers()

    @property
    def memory_layout(self) -> MemoryLayout:
        """What memory holds now, slot by slot."""
        return self._layout

    @property
    def cache(self) -> FixedSlotKVCache:
        """The memory itself, for inspection."""
        return self._cache

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt, the current chunk, the memory and the masks kept for reuse."""
        arena = sum(part.nbytes for pair in self._arenas for part in pair)
        separate = self._cache.nbytes if self._cache.format.is_quantized else 0
        return arena + separate + self._masks.nbytes

    def prefill(self, tokens: Tensor, positions: Tensor, *, mask: SegmentMask) -> None:
        """Remember the given frames; see `RolloutState.prefill`."""
        self._check_mask(mask)
        written = self._run(tokens.to(self._dtype), TokenRole.GIVEN, self._zero(), positions, mask)
        self._cache.write("given", written, 0)
        self._layout = self._layout.with_given()

    def top_up_control(self, needed_end: int) -> None:
        """Remember controls until those of frame ``needed_end - 1`` are there, chunk by chunk."""
        geometry = self._setup.geometry
        while self._reach < needed_end:
            frames = ar_chunk_range(geometry, self._reach)
            if frames is None:
                raise RolloutStateError(
                    f"controls up to frame {needed_end} were asked for, "
                    f"but the clip has {geometry.frames_per_view} frames"
                )
            start, end = frames
            query, keys = pass_segments(
                geometry, self._text_segments, self._layout, kind="control", start=start, end=end
            )
            mask = self._masks.get(query, keys, self._layout.version)
            positions = self._setup.positions(start, end, self._device)
            tokens = self._control_tokens(start, end)
            written = self._run(tokens, TokenRole.CONTROL, self._zero(), positions, mask)
            slot = self._cache.write("control", written, self._controls_written)
            self._controls_written += 1
            self._layout = self._layout.with_control(slot, frames)
            self._reach = end

    def predict_velocity(
        self, latent: Tensor, timestep: Tensor, positions: Tensor, *, mask: SegmentMask
    ) -> Tensor:
        """Return the velocity of noisy tokens; see `RolloutState.predict_velocity`."""
        self._check_mask(mask)
        velocity = self._network(
            latent.to(self._dtype),
            role=TokenRole.CURRENT,
            timestep=timestep,
            positions=positions,
            attend=self._attend(mask, staged=True, kept=None),
        )
        if velocity.shape != latent.shape:
            raise ShapeError(
                f"the network must return a velocity of shape {list(latent.shape)}, "
                f"got {list(velocity.shape)}"
            )
        return velocity.float()

    def commit(
        self, denoised: Tensor, positions: Tensor, *, mask: SegmentMask, frames: FrameRange
    ) -> None:
        """Remember finished tokens as the newest history; see `RolloutState.commit`."""
        self._check_mask(mask)
        written = self._run(
            denoised.to(self._dtype), TokenRole.CLEAN, self._zero(), positions, mask
        )
        slot = self._cache.write("history", written, self._history_written)
        self._history_written += 1
        self._layout = self._layout.with_history(slot, frames)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Undo, on any exception inside the block, whatever the block changed."""
        before = self._position()
        try:
            with self._cache.transaction():
                yield
        except BaseException:
            (
                self._layout,
                self._reach,
                self._controls_written,
                self._history_written,
            ) = before
            raise

    def rebind(self, setup: RolloutSetup, controls: ControlSource) -> None:
        """Go on with a longer clip of the same memory; see `RolloutState.rebind`."""
        if setup.memory != self._setup.memory:
            raise RolloutStateError("the longer clip needs another memory than this one")
        self._setup, self._controls = setup, controls
        self._layout = replace(self._layout, geometry=setup.geometry)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"meta": JSON values, "tensors": name to tensor}``, all copies."""
        cache = self._cache.state_dict()
        tensors = {f"cache.{name}": tensor for name, tensor in cache["tensors"].items()}
        for layer, (k, v) in enumerate(self._text):
            tensors[f"text.{layer}.k"], tensors[f"text.{layer}.v"] = k.clone(), v.clone()
        meta = {
            "cache": cache["meta"],
            "control": self._layout.control,
            "history": self._layout.history,
            "given": self._layout.given,
            "reach": self._reach,
            "controls_written": self._controls_written,
            "history_written": self._history_written,
        }
        return {"meta": meta, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or refuse it and change nothing.

        Raises:
            SnapshotError: It was made by a memory of another shape.
        """
        meta, tensors = state["meta"], state["tensors"]
        try:
            layout = build_memory_layout(
                self._setup.geometry,
                control=tuple(_range(frames) for frames in meta["control"]),
                history=tuple(_range(frames) for frames in meta["history"]),
                given=meta["given"],
            )
            counters = meta["reach"], meta["controls_written"], meta["history_written"]
            text = [
                (tensors[f"text.{layer}.k"], tensors[f"text.{layer}.v"])
                for layer in range(len(self._text))
            ]
            cache = {
                "meta": meta["cache"],
                "tensors": {
                    name.removeprefix("cache."): tensor
                    for name, tensor in tensors.items()
                    if name.startswith("cache.")
                },
            }
        except KeyError as error:
            raise SnapshotError(f"the snapshot has no {error.args[0]!r}") from error
        for mine, saved in zip(self._text, text, strict=True):
            for a, b in zip(mine, saved, strict=True):
                if a.shape != b.shape or a.dtype != b.dtype:
                    raise SnapshotError(
                        f"the snapshot's prompt is {list(b.shape)} in {b.dtype}, "
                        f"this rollout's is {list(a.shape)} in {a.dtype}"
                    )
        self._cache.load_state_dict(cache)
        for mine, saved in zip(self._text, text, strict=True):
            for a, b in zip(mine, saved, strict=True):
                a.copy_(b)
        self._layout = replace(layout, version=self._layout.version + 1)
        self._reach, self._controls_written, self._history_written = counters

    def _position(self) -> tuple[MemoryLayout, int, int, int]:
        return self._layout, self._reach, self._controls_written, self._history_written

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._device)

    def _check_mask(self, mask: SegmentMask) -> None:
        if mask.version != self._layout.version:
            raise RolloutStateError(
                f"the mask was made for memory version {mask.version}, but memory is at version "
                f"{self._layout.version}; make it again from memory_layout"
            )

    def _control_tokens(self, start: int, end: int) -> Tensor:
        """Ask the source for one range of frames; ``[B, N, Wc]`` in the model's dtype."""
        geometry = self._setup.geometry
        tokens = self._controls.tokens(start, end)
        sizes = {
            "B": self._setup.batch_size,
            "V": geometry.num_views,
            "F": end - start,
            "X": geometry.spatial_tokens,
            "W": self._setup.control_width,
        }
        check_tensor(f"controls of frames {start} to {end}", tokens, "B V F X W", sizes)
        if not tokens.is_floating_point():
            raise DtypeError(
                f"controls of frames {start} to {end} must be floating, got {tokens.dtype}"
            )
        return tokens.to(self._device, self._dtype).flatten(1, 3)

    def _run(
        self,
        tokens: Tensor,
        role: TokenRole,
        timestep: Tensor,
        positions: Tensor,
        mask: SegmentMask,
    ) -> list[LayerKV]:
        """Run one pass and return the keys and values that its layers made."""
        kept: dict[int, LayerKV] = {}
        attend = self._attend(mask, staged=role is not TokenRole.GIVEN, kept=kept)
        self._network(tokens, role=role, timestep=timestep, positions=positions, attend=attend)
        missing = [layer for layer in range(self._network.num_layers) if layer not in kept]
        if missing:
            raise RolloutStateError(f"the network never attended in layers {missing}")
        return [kept[layer] for layer in range(self._network.num_layers)]

    def _attend(
        self, mask: SegmentMask, *, staged: bool, kept: dict[int, LayerKV] | None
    ) -> Attend:
        """Make the function that the network's layers call in one pass.

        ``staged`` passes lay their keys and values in the current segment and see the memory; the
        pass over given frames sees no memory and may be longer than a chunk, so it does neither.
        """

        network, B = self._network, self._setup.batch_size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for name, part, width in (("k", k, network.k_dim), ("v", v, network.v_dim)):
                sizes = {"B": B, "H": network.kv_heads, "N": mask.q_len, "D": width}
                check_tensor(f"{name} of layer {layer}", part, "B H N D", sizes, dtype=self._dtype)
            if kept is not None:
                kept[layer] = LayerKV(k, v)
            if not staged:
                return slot_attention(
                    q, LayerKV(k, v), mask, text=self._text[layer], backend=self._setup.backend
                )
            self._stage(layer, k, v)
            return slot_attention(
                q,
                self._current[layer],
                mask,
                text=self._text[layer],
                memory=self._memory[layer],
                backend=self._setup.backend,
            )

        return attend

    def _stage(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Lay a pass's keys and values in the current segment, zeros behind a short chunk."""
        tokens = k.shape[2]
        if tokens == self._arena_layout.current_tokens:
            stage_current_kv_(self._arenas[layer], LayerKV(k, v), self._arena_layout)
            return
        for mine, fresh in zip(self._current[layer], (k, v), strict=True):
            mine[:, :, :tokens] = fresh
            mine[:, :, tokens:] = 0


def _range(frames: object) -> FrameRange | None:
    return None if frames is None else (int(frames[0]), int(frames[1]))  # type: ignore[index]
