"""Generate a clip chunk after chunk, every view side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from kv_core import KVFormat, RolloutStateError, SpecError, TokenWindow, check_int
from kv_core.snapshot import load, save
from kv_kernels import SegmentMask
from kv_kernels.ops.slot_attention.flex import compiles
from torch import Tensor

from kv_rollout import options, snapshots
from kv_rollout.geometry import ClipGeometry, FrameRange, ar_chunk_plan, ar_chunk_range
from kv_rollout.latents import unpatchify
from kv_rollout.memory import pass_segments
from kv_rollout.model import ControlSource, RolloutModel, RolloutState
from kv_rollout.sampling import (
    TIMESTEPS,
    FlowSampler,
    NoiseSource,
    PhiloxNoise,
    Sampler,
    SampleType,
    chunk_noise,
    noise_keys,
)
from kv_rollout.segments import Segments
from kv_rollout.setup import RolloutSetup
from kv_rollout.trace import ChunkTrace, PhaseClock, Rollout
from kv_rollout.visibility import AttentionPattern, AttentionScope, MaskCache
from kv_rollout.warmup import count_warmup_chunks

GuidanceScale = float | Callable[[int], float]
OnChunk = Callable[["ChunkRollout", ChunkTrace, Tensor], None]


@dataclass(slots=True, eq=False)
class _Branch:
    """One prompt's memory and masks; guidance has a second one."""

    setup: RolloutSetup
    state: RolloutState
    text: Segments
    masks: MaskCache

    def mask(self, kind: Literal["noisy", "clean", "given"], start: int, end: int) -> SegmentMask:
        layout = self.state.memory_layout
        query, keys = pass_segments(
            self.setup.geometry, self.text, layout, kind=kind, start=start, end=end
        )
        return self.masks.get(query, keys, layout.version)


class ChunkRollout:
    """One clip, or a batch of clips of equal geometry, generated chunk by chunk.

    A chunk is denoised against the prompt, the controls, the given frames and the finished frames
    that memory still holds; then one clean pass commits it to memory. A step either succeeds or
    leaves everything as it was, and what it returns depends only on the arguments below.

    Args:
        model: The network and what is to be known of it.
        geometry: Views, frames, patches and chunk length.
        controls: ``[B, V, T, X, Wc]``, or a `ControlSource`. Cast to the model's dtype and moved to
            its device, chunk by chunk.
        text_ids: Prompt, ``[n]`` or ``[B, n]`` integers; the model's own by default.
        view_text_tokens: Caption length of each view, if every view has its own.
        negative_text_ids: Prompt to steer away from, shaped as ``text_ids``; needs guidance.
        guidance_scale: Classifier-free guidance (Ho and Salimans, 2022): a number, or a function of
            the chunk index. Both branches are committed.
        condition_tokens: Given frames ``[B, V, K, X, W]``, cast once to the model's dtype.
        fps: Frames per second of the clip.
        seed: A number, or one per clip; at most 128 bits.
        schedule: Noise levels; the model's own by default. See `check_schedule`.
        sample_type: ``"ode"`` or ``"sde"``; the model's own by default.
        history_frames: Finished frames that stay visible, rounded up to whole chunks; all by
            default.
        token_frames: Generated frames kept for reading, at least K + C. All by default.
        attention_pattern: ``"causal"``, or ``"current_control"`` to see only this chunk's controls.
        attention_scope: ``"all_views"``, ``"same_view"`` or ``"decomposed"``.
        decomposed_temporal_window_seconds: How far back other views are seen in that last scope.
        view_offsets: Whether each view has its own band of positions in time.
        mask_block_size: Block of the attention mask, a number or ``(query, key)``.
        backend: Row of the attention registry; the first that fits by default.
        memory_format: `KVFormat` of the memory, the model's dtype by default.
        batch_size: Number of clips B.
        sampler: Replaces ``schedule`` and ``sample_type``.
        noise: Where noise comes from; Philox on the host by default.

    Raises:
        SpecError: An option is out of range, or two do not go together.
        ShapeError, DtypeError: A tensor does not fit the geometry or the model.
    """

    def __init__(
        self,
        model: RolloutModel,
        *,
        geometry: ClipGeometry,
        controls: ControlSource | Tensor,
        text_ids: Tensor | None = None,
        view_text_tokens: Sequence[int] | None = None,
        negative_text_ids: Tensor | None = None,
        guidance_scale: GuidanceScale | None = None,
        condition_tokens: Tensor | None = None,
        fps: float = 30.0,
        seed: int | Sequence[int] = 0,
        schedule: Sequence[float] | Tensor | None = None,
        sample_type: SampleType | None = None,
        history_frames: int | None = None,
        token_frames: int | None = None,
        attention_pattern: AttentionPattern = "causal",
        attention_scope: AttentionScope = "all_views",
        decomposed_temporal_window_seconds: float | None = None,
        view_offsets: bool = True,
        mask_block_size: int | tuple[int, int] = 128,
        backend: str | None = None,
        memory_format: KVFormat | None = None,
        batch_size: int = 1,
        sampler: Sampler | None = None,
        noise: NoiseSource | None = None,
    ) -> None:
        setups = options.check_setups(
            model,
            geometry=geometry,
            text_ids=text_ids,
            view_text_tokens=view_text_tokens,
            negative_text_ids=negative_text_ids,
            fps=fps,
            history_frames=history_frames,
            attention_pattern=attention_pattern,
            attention_scope=attention_scope,
            decomposed_temporal_window_seconds=decomposed_temporal_window_seconds,
            view_offsets=view_offsets,
            mask_block_size=mask_block_size,
            backend=backend,
            memory_format=memory_format,
            batch_size=batch_size,
        )
        given = options.check_condition(model, setups[0], condition_tokens)
        keys = noise_keys(seed, batch_size)
        if token_frames is not None:
            check_int("token_frames", token_frames, minimum=1)
        if sampler is None:
            sampler = FlowSampler(
                tuple(model.default_schedule if schedule is None else schedule),
                sample_type or model.default_sample_type,
            )
        elif schedule is not None or sample_type is not None:
            raise SpecError("pass either a sampler, or schedule and sample_type, not both")
        self._build(
            model,
            setups,
            controls=options.check_controls(model, setups[0], controls),
            guidance_scale=options.check_guidance(guidance_scale, branches=len(setups)),
            keys=keys,
            token_frames=token_frames,
            sampler=sampler,
            noise=noise or PhiloxNoise(),
        )
        if given is not None:
            self._prefill(given)

    def _build(
        self,
        model: RolloutModel,
        setups: Sequence[RolloutSetup],
        *,
        controls: ControlSource,
        guidance_scale: GuidanceScale,
        keys: tuple[tuple[int, int], ...],
        token_frames: int | None,
        sampler: Sampler,
        noise: NoiseSource,
    ) -> None:
        """Allocate everything, with nothing generated and nothing given yet."""
        geometry = setups[0].geometry
        self._model, self._controls, self._guidance = model, controls, guidance_scale
        self._keys, self._token_frames = keys, token_frames
        self._sampler, self._noise = sampler, noise
        self._stopped = False
        self._chunks_done = 0
        with torch.no_grad():
            self._branches = [
                _Branch(
                    setup,
                    model.prepare_rollout(setup, controls),
                    setup.text_segments(),
                    MaskCache(
                        setup.visibility, block_size=setup.mask_block_size, device=model.device
                    ),
                )
                for setup in setups
            ]
        shortest = geometry.condition_frames + geometry.frames_per_chunk
        T = geometry.frames_per_view
        self._window = self._new_window(T if token_frames is None else max(token_frames, shortest))
        self._trace: deque[ChunkTrace] = deque(
            maxlen=-(-self._window.capacity // geometry.frames_per_chunk) + 1
        )
        self._warmup_chunks = count_warmup_chunks(setups[0])

    def _new_window(self, frames: int) -> TokenWindow:
        geometry, model = self.geometry, self._model
        return TokenWindow(
            batch=self._branches[0].setup.batch_size,
            num_views=geometry.num_views,
            frames=frames,
            spatial=geometry.spatial_tokens,
            width=model.token_width,
            device=model.device,
            dtype=model.dtype,
        )

    @torch.no_grad()
    def _prefill(self, given: Tensor) -> None:
        K = self.geometry.condition_frames
        for branch in self._branches:
            branch.state.prefill(
                given.flatten(1, 3),
                branch.setup.positions(0, K, self._model.device),
                mask=branch.mask("given", 0, K),
            )
        self._window.append(0, K, given)

    @property
    def geometry(self) -> ClipGeometry:
        """The clip."""
        return self._branches[0].setup.geometry

    @property
    def chunk_count(self) -> int:
        """Chunks of the whole clip."""
        return ar_chunk_plan(self.geometry).count

    @property
    def chunks_done(self) -> int:
        """Chunks generated so far."""
        return self._chunks_done

    @property
    def next_range(self) -> FrameRange | None:
        """Frames of the next chunk, or None when the clip is finished or was stopped."""
        return None if self._stopped else ar_chunk_range(self.geometry, self._window.end)

    @property
    def is_finished(self) -> bool:
        """Whether every frame of the clip is there."""
        return self._window.end == self.geometry.frames_per_view

    @property
    def retained(self) -> FrameRange:
        """Frames that can still be read."""
        return self._window.start, self._window.end

    @property
    def warmup_chunks(self) -> int:
        """First chunk from which shapes, branches and addresses repeat until the last chunk."""
        return self._warmup_chunks

    @property
    def nbytes(self) -> int:
        """Bytes held for this rollout: memory, masks and generated frames."""
        branches = sum(branch.state.nbytes + branch.masks.nbytes for branch in self._branches)
        return branches + self._window.nbytes

    @property
    def states(self) -> tuple[RolloutState, ...]:
        """The memory of the prompt and, with guidance, of the negative prompt."""
        return tuple(branch.state for branch in self._branches)

    @property
    def trace(self) -> tuple[ChunkTrace, ...]:
        """Records of the newest chunks, as far back as frames are retained."""
        return tuple(self._trace)

    def stop(self) -> None:
        """Generate no more chunks; what is there stays readable."""
        self._stopped = True

    def require_steady(self) -> None:
        """Refuse to go on to a CUDA graph capture before the next chunk does repeated work.

        Raises:
            RolloutStateError: Fewer than `warmup_chunks` chunks are done.
        """
        if self._chunks_done < self._warmup_chunks:
            raise RolloutStateError(
                f"chunk {self._chunks_done} of {self.chunk_count} is not steady yet: shapes and "
                f"memory repeat from chunk {self._warmup_chunks}; run "
                f"{self._warmup_chunks - self._chunks_done} more before capturing"
            )

    @torch.no_grad()
    def step(self) -> tuple[ChunkTrace, Tensor]:
        """Generate the next chunk and, unless it ends the clip, commit it to memory.

        Returns:
            Its record, and a copy of its tokens ``[B, V, frames, X, W]`` in the model's dtype.

        Raises:
            RolloutStateError: The clip is finished or was stopped.
            Exception: Whatever the model, the controls or the noise raised. The rollout is then as
                it was before the call, and calling again gives the same bits.
        """
        start, end = self._require_next()
        clock = PhaseClock(self._model.device)
        masks_before = self._mask_counts()
        compiles_before = compiles()
        last = end == self.geometry.frames_per_view
        clock.mark()
        with ExitStack() as undo:
            for branch in self._branches:
                undo.enter_context(branch.state.transaction())
                branch.state.top_up_control(end)
            layout = self._branches[0].state.memory_layout
            noisy = [branch.mask("noisy", start, end) for branch in self._branches]
            positions = self._positions(start, end)
            clock.mark()
            tokens = self._denoise(start, end, positions, noisy)
            clock.mark()
            if not last:
                self._commit(start, end, positions, tokens)
            clock.mark()
            evicted = self._evicted(layout.history)
            self._window.append(start, end, self._by_view(tokens, end - start))
        self._chunks_done += 1
        built, reused = (
            after - before for after, before in zip(self._mask_counts(), masks_before, strict=True)
        )
        trace = ChunkTrace(
            index=self._chunks_done - 1,
            start=start,
            end=end,
            denoising_passes=self._sampler.passes,
            clean_pass=not last,
            memory_tokens=layout.valid_tokens,
            padding_tokens=layout.padding_tokens,
            nbytes=self.nbytes,
            evicted=evicted,
            masks_built=built,
            masks_reused=reused,
            compiles=compiles() - compiles_before,
            clock=clock,
        )
        self._trace.append(trace)
        return trace, self._window.read(start, end)

    def __iter__(self) -> Iterator[tuple[ChunkTrace, Tensor]]:
        """Step until the clip is finished or stopped."""
        while self.next_range is not None:
            yield self.step()

    def latent_for(self, start: int, end: int) -> Tensor:
        """Return frames ``[start, end)`` as ``[B, V, Ch, end - start, rows, columns]``, a copy.

        Raises:
            RolloutStateError: Some of them are not generated yet, or no longer retained.
            SpecError: The range is empty or leaves the clip.
        """
        self._check_readable(start, end)
        return self._to_latent(self._window.read(start, end))

    def result(self, *, partial: bool = False) -> Rollout:
        """Return the clip.

        Args:
            partial: Return the retained frames, however many, of a clip that is stopped, unfinished
                or longer than ``token_frames``.

        Raises:
            RolloutStateError: The clip is not complete and ``partial`` was not asked for, or no
                frame is there at all.
        """
        start, end = self.retained
        whole = start == 0 and self.is_finished
        if not whole and not partial:
            what = (
                f"only frames {start} to {end} of {self.geometry.frames_per_view} are retained"
                if self.is_finished
                else f"{self._chunks_done} of {self.chunk_count} chunks are done"
            )
            raise RolloutStateError(f"the clip is not complete: {what}; ask for partial=True")
        if end == start:
            raise RolloutStateError("no frame is there yet; call step() first")
        tokens = self._window.read(start, end)
        held = tuple(trace for trace in self._trace if trace.end > start)
        return Rollout(latent=self._to_latent(tokens), tokens=tokens, start=start, trace=held)

    @torch.no_grad()
    def extend(
        self, frames_per_view: int, *, controls: ControlSource | Tensor | None = None
    ) -> None:
        """Make a finished clip longer; its last chunk is committed now.

        The longer clip equals one that was that long from the beginning. So memory has to be
        bounded already, the last chunk has to be a whole one, and every view's band of positions
        has to have room.

        Args:
            frames_per_view: New length T of the clip, in frames.
            controls: Controls of the longer clip; the same source goes on by default.

        Raises:
            RolloutStateError: The clip is not finished, or its memory or last chunk forbids it.
            SpecError: The new length is not longer, or the bands have no room for it.
        """
        old = self.geometry
        longer, setups = options.check_extension(
            [branch.setup for branch in self._branches], frames_per_view
        )
        if not self.is_finished:
            raise RolloutStateError(
                f"only a finished clip can be extended: "
                f"{self._chunks_done} of {self.chunk_count} chunks are done"
            )
        source = self._controls if controls is None else controls
        source = options.check_controls(self._model, setups[0], source)
        window = self._window
        if self._token_frames is None:
            window = self._new_window(longer.frames_per_view)
            window.append(0, old.frames_per_view, self._window.read(0, old.frames_per_view))
        start, end = old.frames_per_view - old.frames_per_chunk, old.frames_per_view
        start = max(start, old.condition_frames)
        tokens = self._window.read(start, end).flatten(1, 3)
        with ExitStack() as undo:
            for branch in self._branches:
                undo.enter_context(branch.state.transaction())
            self._commit(start, end, self._positions(start, end), tokens)
        for branch, setup in zip(self._branches, setups, strict=True):
            branch.state.rebind(setup, source)
            branch.setup = setup
        self._window, self._controls = window, source
        self._trace = deque(self._trace, maxlen=-(-window.capacity // old.frames_per_chunk) + 1)
        self._warmup_chunks = count_warmup_chunks(setups[0])

    def _require_next(self) -> FrameRange:
        frames = self.next_range
        if frames is None:
            why = "was stopped" if self._stopped and not self.is_finished else "is finished"
            raise RolloutStateError(
                f"the clip {why}: {self._chunks_done} of {self.chunk_count} chunks are done, "
                f"frames {self._window.start} to {self._window.end} can be read"
            )
        return frames

    def _positions(self, start: int, end: int) -> list[Tensor]:
        """Positions of a range of frames, for each branch: its prompt comes before them."""
        device = self._model.device
        return [branch.setup.positions(start, end, device) for branch in self._branches]

    def _denoise(
        self, start: int, end: int, positions: list[Tensor], masks: list[SegmentMask]
    ) -> Tensor:
        """Return finished tokens ``[B, N, W]``, rounded to the model's dtype."""
        geometry, model = self.geometry, self._model
        scale = self._guidance(self._chunks_done) if callable(self._guidance) else self._guidance

        def velocity(x: Tensor, sigma: float) -> Tensor:
            timestep = torch.full((), sigma * TIMESTEPS, dtype=torch.float32, device=model.device)
            towards, *away = (
                branch.state.predict_velocity(x, timestep, place, mask=mask)
                for branch, place, mask in zip(self._branches, positions, masks, strict=True)
            )
            return away[0] + scale * (towards - away[0]) if away else towards

        def noise(step: int) -> Tensor:
            return chunk_noise(
                self._noise,
                keys=self._keys,
                views=geometry.num_views,
                start=start,
                end=end,
                step=step,
                shape=(geometry.spatial_tokens, model.token_width),
                device=model.device,
            )

        return self._sampler.sample(velocity, noise).to(model.dtype)

    def _commit(self, start: int, end: int, positions: list[Tensor], tokens: Tensor) -> None:
        """Run the clean pass of every branch and remember it."""
        for branch, place in zip(self._branches, positions, strict=True):
            mask = branch.mask("clean", start, end)
            branch.state.commit(tokens, place, mask=mask, frames=(start, end))

    def _evicted(self, before: Sequence[FrameRange | None]) -> FrameRange | None:
        """Return the frames that history held ``before`` and holds no more."""
        now = self._branches[0].state.memory_layout.history
        return next((held for held in before if held is not None and held not in now), None)

    def _by_view(self, tokens: Tensor, frames: int) -> Tensor:
        geometry = self.geometry
        return tokens.unflatten(1, (geometry.num_views, frames, geometry.spatial_tokens))

    def _to_latent(self, tokens: Tensor) -> Tensor:
        return unpatchify(
            tokens,
            patch_h=self.geometry.patch_h,
            patch_w=self.geometry.patch_w,
            patch=self._model.latent_patch_size,
        )

    def _check_readable(self, start: int, end: int) -> None:
        T = self.geometry.frames_per_view
        if not 0 <= start < end <= T:
            raise SpecError(f"frames {start} to {end} are not a range of a clip of {T} frames")
        if end > self._window.end:
            raise RolloutStateError(
                f"frames {start} to {end} were asked for, but {self._chunks_done} of "
                f"{self.chunk_count} chunks are done, up to frame {self._window.end}"
            )
        if start < self._window.start:
            raise RolloutStateError(
                f"frames {start} to {end} were asked for, but only {self._window.start} to "
                f"{self._window.end} are retained; raise token_frames to keep more"
            )

    def _mask_counts(self) -> tuple[int, int]:
        masks = [branch.masks for branch in self._branches]
        return sum(m.built for m in masks), sum(m.reused for m in masks)

    def _spec(self) -> dict[str, Any]:
        """What a snapshot must have in common with the rollout that loads it."""
        return snapshots.describe(
            model=self._model,
            setup=self._branches[0].setup,
            prompts=[branch.setup.text_ids for branch in self._branches],
            controls=self._controls,
            guidance_scale=self._guidance,
            keys=self._keys,
            token_frames=self._token_frames,
            sampler=self._sampler,
            noise=self._noise,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, as JSON values and copied tensors."""
        window = self._window.state_dict()
        tensors = {f"window.{name}": tensor for name, tensor in window["tensors"].items()}
        branches = []
        for index, branch in enumerate(self._branches):
            state = branch.state.state_dict()
            branches.append(state["meta"])
            tensors |= {f"branch{index}.{n}": tensor for n, tensor in state["tensors"].items()}
            tensors[f"text{index}"] = branch.setup.text_ids.clone()
        meta = {
            "kind": "kv_rollout.ChunkRollout",
            "spec": self._spec(),
            "chunks_done": self._chunks_done,
            "stopped": self._stopped,
            "trace": [trace.as_dict() for trace in self._trace],
            "window": window["meta"],
            "branches": branches,
        }
        return {"meta": meta, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of a rollout with the same arguments.

        Raises:
            SnapshotError: It belongs to another geometry, option, prompt or model; nothing changed.
        """
        snapshots.check_same(snapshots.check_kind(state), self._spec())
        meta, tensors = state["meta"], state["tensors"]
        before = self.state_dict()
        try:
            self._load(meta, tensors)
        except BaseException:
            self._load(before["meta"], before["tensors"])
            raise

    def _load(self, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }

        for index, branch in enumerate(self._branches):
            branch.state.load_state_dict(
                {"meta": meta["branches"][index], "tensors": part(f"branch{index}.")}
            )
        self._window.load_state_dict({"meta": meta["window"], "tensors": part("window.")})
        self._chunks_done, self._stopped = meta["chunks_done"], meta["stopped"]
        self._trace.clear()
        self._trace.extend(ChunkTrace.from_dict(values) for values in meta["trace"])

    def save(self, path: str | Path) -> None:
        """Write a snapshot that `resume` continues bit for bit; the file appears whole or not."""
        save(path, self.state_dict())

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: RolloutModel,
        *,
        controls: ControlSource | Tensor,
        guidance_scale: GuidanceScale | None = None,
        sampler: Sampler | None = None,
        noise: NoiseSource | None = None,
    ) -> "ChunkRollout":
        """Continue a saved rollout.

        Args:
            path: What `save` wrote.
            model: The model that began it.
            controls: The controls that it had.
            guidance_scale: The function that it had, if it was one.
            sampler: The sampler that it had, if it was not a `FlowSampler`.
            noise: The noise that it had, if it was not `PhiloxNoise`.

        Raises:
            SnapshotError: The file is not such a snapshot, or something handed in is not what the
                rollout had; the message names it.
        """
        state = load(path)
        spec = snapshots.check_kind(state)
        snapshots.check_model(spec, model)
        setups = [
            RolloutSetup.from_dict(spec["setup"], state["tensors"][f"text{index}"].to(model.device))
            for index in range(len(state["meta"]["branches"]))
        ]
        rollout = cls.__new__(cls)
        rollout._build(
            model,
            setups,
            controls=options.check_controls(model, setups[0], controls),
            guidance_scale=snapshots.saved_guidance(spec, guidance_scale),
            keys=tuple((seed, sample) for seed, sample in spec["noise_keys"]),
            token_frames=spec["token_frames"],
            sampler=snapshots.saved_sampler(spec, sampler),
            noise=noise or PhiloxNoise(),
        )
        rollout.load_state_dict(state)
        return rollout


def run_rollout(
    model: RolloutModel,
    *,
    geometry: ClipGeometry,
    controls: ControlSource | Tensor,
    on_chunk: OnChunk | None = None,
    **settings: Unpack[options.RolloutOptions],
) -> Rollout:
    """Generate a clip and return it.

    Args:
        model: The network and what is to be known of it.
        geometry: Views, frames, patches and chunk length.
        controls: ``[B, V, T, X, Wc]``, or a `ControlSource`.
        on_chunk: Called after each chunk with the rollout, the chunk's record and its tokens
            ``[B, V, frames, X, W]``. It may call ``rollout.stop()`` or ``rollout.save(path)``.
        **settings: Everything else that `ChunkRollout` takes.

    Returns:
        The clip; with ``token_frames``, or after a stop, the frames that are retained.

    Raises:
        SpecError, ShapeError, DtypeError: As `ChunkRollout`, before the model is touched.
    """
    rollout = ChunkRollout(model, geometry=geometry, controls=controls, **settings)
    for trace, tokens in rollout:
        if on_chunk is not None:
            on_chunk(rollout, trace, tokens)
    return rollout.result(partial=True)
