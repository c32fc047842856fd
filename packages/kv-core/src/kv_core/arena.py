"""Keys and values of one layer as [static | current | memory] in one buffer each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_core.checks import check_int, check_tensor, overlaps
from kv_core.errors import AliasError, SpecError
from kv_core.slot_storage import LayerKV, flatten


@dataclass(frozen=True, slots=True)
class KVSegmentLayout:
    """How many tokens each segment of an arena holds.

    Args:
        static_tokens: Tokens at the front that never change, such as a caption's.
        current_tokens: Tokens of the chunk in flight, at least 1.
        memory_tokens: Tokens at the back, such as a ``FixedSlotKVCache`` keeps.

    Raises:
        SpecError: A number out of range.
        DtypeError: A number that is not an integer.
    """

    static_tokens: int
    current_tokens: int
    memory_tokens: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in ("static_tokens", "current_tokens", "memory_tokens"):
            least = 1 if field == "current_tokens" else 0
            number = check_int(field, getattr(self, field), minimum=least)
            object.__setattr__(self, field, number)

    @property
    def current_start(self) -> int:
        """Position of the first current token."""
        return self.static_tokens

    @property
    def memory_start(self) -> int:
        """Position of the first memory token."""
        return self.static_tokens + self.current_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole arena."""
        return self.memory_start + self.memory_tokens


def allocate_kv_arena(
    static: LayerKV | tuple[Tensor, Tensor],
    memory: LayerKV | tuple[Tensor, Tensor],
    *,
    current_tokens: int,
    memory_tokens: int,
) -> tuple[LayerKV, KVSegmentLayout]:
    """Allocate an arena of zeros and copy the static and the first memory tokens into it.

    Args:
        static: Key and value, ``[B, H, T, Dk]`` and ``[B, H, T, Dv]``, T >= 0.
        memory: Key and value for the front of the memory segment, at most ``memory_tokens`` long.
        current_tokens: Tokens of the current segment, at least 1.
        memory_tokens: Tokens of the memory segment.

    Returns:
        Key and value ``[B, H, T, D]`` over all segments, contiguous, each in an allocation of its
        own; and the layout. The slices ``[:, :, layout.memory_start:]`` of both can be a layer of
        the ``storage=`` of a ``FixedSlotKVCache``, whose writes then appear in the arena.

    Raises:
        ShapeError: Tensors that differ in batch, heads or width, or key and value in tokens.
        DtypeError: Tensors that differ in dtype or device.
        SpecError: More memory than ``memory_tokens``, or a number out of range.
    """
    static, memory = _pair("static", static), _pair("memory", memory)
    check_tensor("key of static", static.k, "B H T D", {})
    layout = KVSegmentLayout(static.k.shape[2], current_tokens, memory_tokens)
    _check_pair("static", static, static, layout.static_tokens)
    check_tensor("key of memory", memory.k, "B H T D", {})
    held = memory.k.shape[2]
    _check_pair("memory", memory, static, held)
    if held > layout.memory_tokens:
        raise SpecError(
            f"memory_tokens must be at least the {held} tokens of memory, got "
            f"{layout.memory_tokens}; pass memory_tokens={held} or more"
        )
    with torch.inference_mode(False), torch.no_grad():
        arena = LayerKV(*(_segments(x, y, layout) for x, y in zip(static, memory, strict=True)))
    return arena, layout


def _segments(static: Tensor, memory: Tensor, layout: KVSegmentLayout) -> Tensor:
    B, H, _, D = static.shape
    whole = torch.zeros((B, H, layout.total_tokens, D), dtype=static.dtype, device=static.device)
    whole[:, :, : layout.static_tokens].copy_(static)
    whole[:, :, layout.memory_start : layout.memory_start + memory.shape[2]].copy_(memory)
    return whole


def stage_current_kv_(
    arena: LayerKV | tuple[Tensor, Tensor],
    current: LayerKV | tuple[Tensor, Tensor],
    layout: KVSegmentLayout,
) -> LayerKV:
    """Overwrite the current segment of ``arena`` in place; the other segments stay as they are.

    Args:
        arena: What ``allocate_kv_arena`` returned.
        current: Key and value, ``[B, H, layout.current_tokens, D]``, not part of the arena.
        layout: The layout returned with the arena.

    Returns:
        The arena.

    Raises:
        ShapeError: Sizes that do not fit; the chunk must fill the segment exactly.
        DtypeError: Another dtype or device.
        SpecError: An arena that is not contiguous.
        AliasError: Key and value of the arena in one allocation, or ``current`` inside of it.
            Nothing has changed, here as in the cases above.
    """
    arena, current = _check_arena(arena, layout), _pair("current", current)
    _check_pair("current", current, arena, layout.current_tokens)
    for word, part in zip(("key", "value"), current, strict=True):
        for whole_word, whole in zip(("key", "value"), arena, strict=True):
            if _allocation(part) == _allocation(whole) or overlaps(part, whole):
                raise AliasError(
                    f"{word} of current and {whole_word} of the arena must not share memory, got "
                    "one allocation for both; pass the projection's own output, or its .clone()"
                )
    with torch.no_grad():
        for whole, part in zip(arena, current, strict=True):
            whole[:, :, layout.current_start : layout.memory_start].copy_(part)
    return arena


def validate_kv_arena_segments(
    arena: LayerKV | tuple[Tensor, Tensor],
    static: LayerKV | tuple[Tensor, Tensor],
    memory: LayerKV | tuple[Tensor, Tensor],
    layout: KVSegmentLayout,
) -> None:
    """Check that ``static`` and ``memory`` are those very ranges of the arena, not copies.

    Raises:
        AliasError: A part lies elsewhere: another allocation, offset or stride.
        ShapeError: A part has other sizes, or the arena does not fit the layout.
        DtypeError: A part has another dtype or device.
        SpecError: An arena that is not contiguous.
    """
    arena = _check_arena(arena, layout)
    spans = (
        ("static", static, 0, layout.static_tokens),
        ("memory", memory, layout.memory_start, layout.memory_tokens),
    )
    for name, given, start, tokens in spans:
        pair = _pair(name, given)
        _check_pair(name, pair, arena, tokens)
        for word, part, whole in zip(("key", "value"), pair, arena, strict=True):
            wanted = whole.narrow(2, start, tokens)
            same = _allocation(part) == _allocation(whole)
            if not same or (
                tokens and (part.data_ptr(), part.stride()) != (wanted.data_ptr(), wanted.stride())
            ):
                raise AliasError(
                    f"{word} of {name} must be tokens [{start}, {start + tokens}) of the arena's "
                    f"{word} itself, got memory elsewhere; pass "
                    f"arena.{word[0]}[:, :, {start}:{start + tokens}]"
                )


def _pair(name: str, pair: LayerKV | tuple[Tensor, Tensor]) -> LayerKV:
    return LayerKV(*flatten(name, [pair], layers=1))


def _check_pair(name: str, pair: LayerKV, like: LayerKV, tokens: int) -> None:
    """Compare both tensors with those of ``like``, except for the number of tokens."""
    B, H = like.k.shape[:2]
    for word, part, other in zip(("key", "value"), pair, like, strict=True):
        sizes = {"B": B, "H": H, "T": tokens}
        if isinstance(other, Tensor) and other.dim() == 4:
            sizes["D"] = other.shape[3]
        check_tensor(
            f"{word} of {name}",
            part,
            "B H T D",
            sizes,
            dtype=like.k.dtype,
            device=like.k.device,
            hint="every segment has one batch, one number of heads and one width",
        )


def _check_arena(arena: LayerKV | tuple[Tensor, Tensor], layout: KVSegmentLayout) -> LayerKV:
    whole = _pair("arena", arena)
    check_tensor("key of the arena", whole.k, "B H T D", {"T": layout.total_tokens})
    _check_pair("the arena", whole, whole, layout.total_tokens)
    for word, part in zip(("key", "value"), whole, strict=True):
        if not part.is_contiguous():
            raise SpecError(
                f"{word} of the arena must be contiguous, got strides {part.stride()}; make it "
                "with allocate_kv_arena"
            )
    if _allocation(whole.k) == _allocation(whole.v):
        raise AliasError(
            "key and value of the arena must be in different allocations, got one for both; make "
            "them with allocate_kv_arena"
        )
    return whole


def _allocation(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage()._cdata
