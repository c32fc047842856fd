"""What one forward pass needs to know about its sequences: the same for every layer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_core.checks import check_int, check_tensor
from kv_core.errors import DtypeError

_IDS = (torch.int32, torch.int64)


@dataclass(slots=True, eq=False)
class Step:
    """The new tokens of one forward pass, and where they and the tokens before them are stored.

    Tokens of all sequences follow one another, sequence after sequence. ``SequenceTable.append``
    fills one; with tables of your own, build it from your tensors. Ids are INT32 or INT64.

    Attributes:
        slots: ``[T]`` where each token's key and value go: ``block * block_size + offset``. -1
            stores nothing (padding).
        positions: ``[T]`` position of each token in its sequence, for RoPE alone.
        cu_seqlens: ``[B + 1]`` INT32; the new tokens of sequence b are ``cu_seqlens[b]`` up to
            ``cu_seqlens[b + 1]``. Tokens behind the last are padding.
        block_table: ``[B, M]`` block ids of each sequence in order. Entries past
            ``ceil(context_lens / block_size)`` may be anything.
        context_lens: ``[B]`` tokens of each sequence that are stored, this step's included; 0 is
            padding.
        max_query: Upper bound of the new tokens of a sequence.
        max_context: Upper bound of ``context_lens``.
        requests: Request ids by row, without padding; empty where they are not known.
        reused: How many tokens of each new request were found already stored.
        null_block: Whether block 0 is reserved for padding, so that no slot may lie in it.

    Bounds may be larger than what the tensors hold: a captured graph keeps those it was captured
    with.

    Raises:
        DtypeError: Not tensors of the dtypes above on one device.
        ShapeError: Sizes that do not fit each other.
        SpecError: A bound that is negative.
    """

    slots: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    block_table: Tensor
    context_lens: Tensor
    max_query: int
    max_context: int
    requests: tuple[Hashable, ...] = ()
    reused: Mapping[Hashable, int] = field(default_factory=dict)
    null_block: bool = False

    def __post_init__(self) -> None:
        """Check dtypes, devices and sizes; values are not read."""
        check_tensor("block_table", self.block_table, "B M", {})
        B, device = self.block_table.shape[0], self.block_table.device
        check_tensor("slots", self.slots, "T", {}, device=device)
        tokens = {"T": self.slots.shape[0]}
        check_tensor("positions", self.positions, "T", tokens, device=device)
        check_tensor("context_lens", self.context_lens, "B", {"B": B}, device=device)
        check_tensor("cu_seqlens", self.cu_seqlens, "B+1", {"B+1": B + 1}, device=device)
        for name in ("slots", "positions", "cu_seqlens", "block_table", "context_lens"):
            check_ids(name, getattr(self, name))
        self.max_query = check_int("max_query", self.max_query, minimum=0)
        self.max_context = check_int("max_context", self.max_context, minimum=0)

    @property
    def num_tokens(self) -> int:
        """T, rows of this step with padding."""
        return self.slots.shape[0]

    @property
    def num_sequences(self) -> int:
        """B, rows of the table with padding."""
        return self.block_table.shape[0]


def check_ids(name: str, tensor: object) -> None:
    """Check that ids are integers that every kernel takes.

    Raises:
        DtypeError: Not a tensor, or of another dtype than INT32 or INT64.
    """
    if not isinstance(tensor, Tensor):
        raise DtypeError(
            f"{name} must be a torch.Tensor of ids, got {type(tensor).__name__}; convert it with "
            "torch.as_tensor"
        )
    if tensor.dtype not in _IDS:
        raise DtypeError(
            f"{name} must be torch.int32 or torch.int64, got {tensor.dtype}; convert it with "
            ".to(torch.int32)"
        )
