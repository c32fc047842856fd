"""One model layer's keys and values, paged or contiguous, in any storage format."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kv_core.checks import check_disjoint, check_int, check_owned, check_tensor
from kv_core.errors import DtypeError, FrozenError, LayerKindError, SnapshotError, SpecError
from kv_core.paged import read_rows, write_rows
from kv_core.snapshot import check_state
from kv_core.spec import KVSpec
from kv_core.step import check_ids

Layout = Literal["NHD", "HND"]

_DEFAULT_LAYOUT: Layout = "NHD"
_GROWTH = 1.5
_GROWTH_UNIT = 64  # tokens
_FIELDS = ("k", "v", "k_scale", "v_scale")


class KVLayer:
    """Storage of one model layer, addressed by slot: ``block * block_size + offset``.

    A paged layer is a pool of blocks that sequences share. A contiguous layer has one block for
    each sequence, as long as the capacity of a sequence; everything else about it is the same.
    Construct with ``paged``, ``contiguous`` or ``adopt``. Memory is cleared once, eagerly, and
    moves only in ``ensure_capacity``.

    Attributes:
        spec: Sizes and formats.
        is_paged: Whether sequences share the blocks.
        k: ``[P, N, H, D]`` keys, or INT8 codes. Any strides.
        v: ``[P, N, H, D]`` values, or INT8 codes.
        k_scale: ``[P, N, H]`` FP32 scale of each key, or None where keys are not quantised.
            Physically ``[P, H, N]``, so that the scales of one head of a block lie together.
        v_scale: The same for values.
        frozen: Set it while a CUDA graph relies on the addresses; growth is refused meanwhile.
    """

    def __init__(
        self,
        spec: KVSpec,
        k: Tensor,
        v: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        *,
        is_paged: bool,
    ) -> None:
        """Take tensors as they are; see ``adopt`` for storage of your own."""
        self.spec = spec
        self.is_paged = is_paged
        self.k, self.v, self.k_scale, self.v_scale = k, v, k_scale, v_scale
        self.frozen = False

    @classmethod
    def paged(
        cls,
        spec: KVSpec,
        *,
        blocks: int,
        device: torch.device | str = "cpu",
        layout: Layout = _DEFAULT_LAYOUT,
    ) -> Self:
        """Allocate a pool of ``blocks`` blocks of ``spec.block_size`` tokens, cleared.

        Args:
            spec: Sizes and formats; ``spec.nbytes(blocks * spec.block_size)`` is what this takes.
            blocks: P, among them the null block 0 that a ``BlockAllocator`` reserves.
            device: Where the storage lives.
            layout: Physical order inside a block: tokens outside ("NHD") or heads ("HND").

        Raises:
            SpecError: ``blocks`` is below 1, or there is no such layout.
        """
        blocks = check_int("blocks", blocks, minimum=1)
        tensors = _allocate(spec, blocks, spec.block_size, device, layout)
        return cls(spec, *tensors, is_paged=True)

    @classmethod
    def contiguous(
        cls,
        spec: KVSpec,
        *,
        sequences: int,
        capacity: int,
        device: torch.device | str = "cpu",
        layout: Layout = _DEFAULT_LAYOUT,
    ) -> Self:
        """Allocate one block of ``capacity`` tokens for each sequence, cleared.

        Args:
            spec: Sizes and formats; its ``block_size`` is not used.
            sequences: P, blocks of the layer.
            capacity: N, tokens that a sequence can hold until ``ensure_capacity``.
            device: Where the storage lives.
            layout: Physical order inside a block: tokens outside ("NHD") or heads ("HND").

        Raises:
            SpecError: A size is below 1, or there is no such layout.
        """
        sequences = check_int("sequences", sequences, minimum=1)
        capacity = check_int("capacity", capacity, minimum=1)
        tensors = _allocate(spec, sequences, capacity, device, layout)
        return cls(spec, *tensors, is_paged=False)

    @classmethod
    def adopt(
        cls,
        spec: KVSpec,
        k: Tensor,
        v: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        *,
        is_paged: bool = True,
    ) -> Self:
        """Use storage of the caller's: slices of a larger buffer, permuted or padded, all may be.

        Nothing is cleared: whoever made the storage has defined its bytes. Rows that no sequence
        holds may be anything, NaN among them.

        Args:
            spec: Sizes and formats.
            k: ``[P, N, H, D]``; N is ``spec.block_size`` where the layer is paged.
            v: Like ``k``.
            k_scale: ``[P, N, H]`` FP32, none of them negative, where keys are INT8; else None.
            v_scale: The same for values.
            is_paged: Whether sequences share the blocks.

        Raises:
            ShapeError: A tensor has other sizes than the spec and ``k``.
            DtypeError: A tensor has the wrong dtype or device, or scales are missing or too many.
            SpecError: A tensor requires grad or was made in inference mode.
            AliasError: Two of the tensors share memory, or one overlaps itself.
        """
        check_tensor("k", k, "P N H D", {})
        sizes = {"P": k.shape[0], "H": spec.kv_heads, "D": spec.head_dim}
        sizes["N"] = spec.block_size if is_paged else k.shape[1]
        named: list[tuple[str, Tensor]] = []
        for name, tensor, fmt in (("k", k, spec.k_format), ("v", v, spec.v_format)):
            check_tensor(name, tensor, "P N H D", sizes, dtype=fmt.dtype, device=k.device)
            named.append((name, tensor))
        for name, scale, fmt in (
            ("k_scale", k_scale, spec.k_format),
            ("v_scale", v_scale, spec.v_format),
        ):
            if not fmt.is_quantized:
                if scale is not None:
                    raise DtypeError(
                        f"{name} must be None for {fmt.name}, got a tensor; leave it out"
                    )
                continue
            check_tensor(name, scale, "P N H", sizes, dtype=torch.float32, device=k.device)
            assert scale is not None
            named.append((name, scale))
        for name, tensor in named:
            check_owned(name, tensor)
        check_disjoint(named)
        return cls(spec, k, v, k_scale, v_scale, is_paged=is_paged)

    @property
    def block_size(self) -> int:
        """N, tokens of a block; of a contiguous layer its capacity."""
        return self.k.shape[1]

    @property
    def num_blocks(self) -> int:
        """P, blocks of the pool, or sequences of a contiguous layer."""
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens allocated: for each sequence if contiguous, in the whole pool if paged."""
        return self.num_blocks * self.block_size if self.is_paged else self.block_size

    @property
    def kv_heads(self) -> int:
        """H, key/value heads."""
        return self.spec.kv_heads

    @property
    def head_dim(self) -> int:
        """D, elements of a key or value."""
        return self.spec.head_dim

    @property
    def device(self) -> torch.device:
        """Where the storage lives."""
        return self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return every storage tensor by name: what is moved, copied or saved, moves together."""
        found = {name: getattr(self, name) for name in _FIELDS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def __repr__(self) -> str:
        """Return kind, sizes, formats and bytes."""
        kind = "paged" if self.is_paged else "contiguous"
        return (
            f"KVLayer({kind}, P={self.num_blocks}, N={self.block_size}, H={self.kv_heads}, "
            f"D={self.head_dim}, k={self.spec.k_format.name}, v={self.spec.v_format.name}, "
            f"nbytes={self.nbytes}, device={self.device})"
        )

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store keys and values by slot, quantised where the format asks for it.

        Args:
            k: ``[T, H, D]`` floating.
            v: Like ``k``.
            slots: ``[T]`` INT32 or INT64; one outside ``[0, P * N)`` stores nothing.

        Raises:
            ShapeError: Other sizes than the layer's, or unequal numbers of tokens.
            DtypeError: Not floating, not integer slots, or on another device. In either case
                nothing was written.
        """
        check_tensor("slots", slots, "T", {}, device=self.device)
        check_ids("slots", slots)
        sizes = {"T": slots.shape[0], "H": self.kv_heads, "D": self.head_dim}
        for name, rows in (("k", k), ("v", v)):
            check_tensor(name, rows, "T H D", sizes, device=self.device)
            if not rows.is_floating_point():
                raise DtypeError(
                    f"{name} must be floating, got {rows.dtype}; pass activations, the layer "
                    "quantises them itself"
                )
        write_rows(self.k, self.k_scale, k, slots)
        write_rows(self.v, self.v_scale, v, slots)

    def read(self, slots: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values by slot, dequantised.

        Args:
            slots: ``[...]`` INT32 or INT64; one outside ``[0, P * N)`` reads as zeros.
            dtype: Of the result; by default as stored, or FP32 where that is INT8.

        Returns:
            Keys and values ``[..., H, D]``.

        Raises:
            DtypeError: ``slots`` are not integers.
        """
        check_ids("slots", slots)
        return (
            read_rows(self.k, self.k_scale, slots, dtype),
            read_rows(self.v, self.v_scale, slots, dtype),
        )

    @torch.no_grad()
    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks, codes and scales, as if all at once: ``[0, 1]`` to ``[1, 0]`` swaps.

        Raises:
            SpecError: An id outside the pool, unequal numbers of ids, or a target twice. Nothing
                was copied.
        """
        sources, targets = self._block_ids("source", source), self._block_ids("target", target)
        if len(sources) != len(targets) or len(set(targets)) != len(targets):
            raise SpecError(
                f"target must be as many different blocks as source, got {len(targets)} for "
                f"{len(sources)} ({targets}); name every block that is written once"
            )
        if sources:
            here, there = self._index(sources), self._index(targets)
            for tensor in self.tensors().values():
                tensor[there] = tensor[here]

    @torch.no_grad()
    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Clear whole blocks, codes and scales.

        Raises:
            SpecError: An id outside the pool. Nothing was cleared.
        """
        ids = self._block_ids("blocks", blocks)
        if ids:
            at = self._index(ids)
            for tensor in self.tensors().values():
                tensor[at] = 0

    def _block_ids(self, name: str, ids: Sequence[int]) -> list[int]:
        last = self.num_blocks - 1
        return [check_int(f"{name}[{i}]", at, minimum=0, maximum=last) for i, at in enumerate(ids)]

    def _index(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids).to(self.device, non_blocking=True)

    @torch.no_grad()
    def ensure_capacity(self, tokens: int, *, exact: bool = False) -> bool:
        """Grow a contiguous layer so that each sequence can hold ``tokens``.

        Grows by half at least, to a multiple of 64, so that a sequence that grows token by token
        is copied rarely. The storage moves: slots of an earlier step, and graphs that were
        captured, no longer hold. The copy is ordered on the current stream.

        Args:
            tokens: What a sequence has to hold.
            exact: Grow to ``tokens`` and no further.

        Returns:
            Whether the storage moved.

        Raises:
            LayerKindError: The layer is paged and has more blocks to give instead.
            FrozenError: The layer is frozen and too small. Nothing has changed.
        """
        tokens = check_int("tokens", tokens, minimum=0)
        if self.is_paged:
            raise LayerKindError(
                f"a paged layer does not grow (it has {self.num_blocks} blocks of "
                f"{self.block_size} tokens); allocate it with more blocks"
            )
        if tokens <= self.capacity:
            return False
        if self.frozen:
            raise FrozenError(
                f"the layer holds {self.capacity} tokens a sequence and is frozen, so it cannot "
                f"grow to {tokens}; allocate capacity={tokens} before capturing, or set "
                "frozen=False and capture again"
            )
        capacity = tokens if exact else grown_capacity(self.capacity, tokens)
        layout: Layout = "HND" if self.k.stride(2) > self.k.stride(1) else "NHD"
        grown = _allocate(self.spec, self.num_blocks, capacity, self.device, layout)
        for name, tensor in zip(_FIELDS, grown, strict=True):
            if tensor is not None:
                tensor[:, : self.capacity].copy_(getattr(self, name))
        self.k, self.v, self.k_scale, self.v_scale = grown
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the storage with everything needed to check it when it is loaded."""
        tensors = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }
        return {"meta": {"spec": self._state_spec()}, "tensors": tensors}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state into this layer's storage, which does not move.

        Raises:
            SnapshotError: Not a state of a layer of this spec, kind and size. Nothing was copied.
        """
        _, tensors = check_state("KVLayer", state, self._state_spec())
        ours = self.tensors()
        for name, tensor in ours.items():
            got = tensors.get(name)
            if got is None or got.shape != tensor.shape or got.dtype != tensor.dtype:
                found = "none" if got is None else f"{list(got.shape)} {got.dtype}"
                raise SnapshotError(
                    f"tensor {name!r} of the state must be {list(tensor.shape)} {tensor.dtype}, "
                    f"got {found}; load a state that was not edited"
                )
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])

    def _state_spec(self) -> dict[str, Any]:
        return {
            **self.spec.to_json(),
            "is_paged": self.is_paged,
            "blocks": self.num_blocks,
            "block_size": self.block_size,
        }


def grown_capacity(capacity: int, tokens: int) -> int:
    """Return what a capacity grows to so that it is at least ``tokens``."""
    if tokens <= capacity:
        return capacity
    wanted = max(tokens, math.ceil(capacity * _GROWTH))
    return -(-wanted // _GROWTH_UNIT) * _GROWTH_UNIT


def _allocate(
    spec: KVSpec, blocks: int, block_size: int, device: torch.device | str, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return keys, values and scales of zeros, in their logical shapes."""
    if layout not in ("NHD", "HND"):
        raise SpecError(f'layout must be "NHD" or "HND", got {layout!r}')
    formats = (spec.k_format, spec.v_format)
    inner = (block_size, spec.kv_heads) if layout == "NHD" else (spec.kv_heads, block_size)
    shape = (blocks, *inner, spec.head_dim)
    # also where the caller is in inference mode: its tensors could never be written outside
    with torch.inference_mode(False):
        pairs = [torch.zeros(shape, dtype=fmt.dtype, device=device) for fmt in formats]
        scales = [
            torch.zeros(blocks, spec.kv_heads, block_size, device=device).transpose(1, 2)
            if fmt.is_quantized
            else None
            for fmt in formats
        ]
    if layout == "HND":
        pairs = [pair.transpose(1, 2) for pair in pairs]
    return pairs[0], pairs[1], scales[0], scales[1]
