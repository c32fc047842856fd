"""Storage formats of cached keys and values, and the sizes of one model layer's cache."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from kv_core.checks import check_int
from kv_core.errors import DtypeError, SpecError


class KVFormat(Enum):
    """How the elements of a cache are stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric codes, and one FP32 scale for each token of each head

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of a stored element; of a code, where the format is quantised."""
        return _DTYPES[self]

    @property
    def is_quantized(self) -> bool:
        """Whether a row is stored as codes with a scale."""
        return self is KVFormat.INT8

    @classmethod
    def of(cls, dtype: torch.dtype) -> "KVFormat":
        """Return the format whose elements are ``dtype``.

        Raises:
            DtypeError: No format stores this dtype.
        """
        for fmt, stored in _DTYPES.items():
            if stored == dtype:
                return fmt
        known = ", ".join(f"{stored} ({fmt.name})" for fmt, stored in _DTYPES.items())
        raise DtypeError(
            f"dtype must be one of {known}, got {dtype!r}; convert the tensor to one of these"
        )


_DTYPES = {
    KVFormat.FP32: torch.float32,
    KVFormat.FP16: torch.float16,
    KVFormat.BF16: torch.bfloat16,
    KVFormat.INT8: torch.int8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Sizes and storage formats of one model layer's keys and values.

    Give ``format`` for both, or ``k_format`` and ``v_format``, which default to it. Once built all
    three are set; ``format`` is None where keys and values differ.

    Attributes:
        kv_heads: H, the number of key/value heads, not of query heads.
        head_dim: D, elements of one key and of one value.
        block_size: N, tokens of a block of a paged layer. A contiguous layer has one block for
            each sequence, of its own capacity, and does not use it.
        format: How keys and values are stored.
        k_format: How keys are stored.
        v_format: How values are stored.

    Raises:
        SpecError: A size is below 1, or no format was given.
        DtypeError: A size is not an integer, or a format not a ``KVFormat``.
    """

    kv_heads: int
    head_dim: int
    block_size: int = 16
    format: KVFormat | None = None
    k_format: KVFormat = None  # type: ignore[assignment]  # never None once built
    v_format: KVFormat = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check everything and fill in the formats."""
        for name in ("kv_heads", "head_dim", "block_size"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum=1))
        for name in ("format", "k_format", "v_format"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, KVFormat):
                raise DtypeError(
                    f"{name} must be a KVFormat, got {given!r}; for example KVFormat.INT8"
                )
        for name in ("k_format", "v_format"):
            if getattr(self, name) is None:
                if self.format is None:
                    raise SpecError(
                        f"{name} is not set; pass format= for keys and values, or k_format= and "
                        "v_format="
                    )
                object.__setattr__(self, name, self.format)
        same = self.k_format if self.k_format is self.v_format else None
        object.__setattr__(self, "format", same)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer: key and value of every head, with scales."""
        return self.kv_heads * sum(
            self.head_dim * fmt.dtype.itemsize + (4 if fmt.is_quantized else 0)
            for fmt in (self.k_format, self.v_format)
        )

    def nbytes(self, tokens: int) -> int:
        """Return the bytes a layer takes that is allocated for ``tokens``, before allocating it.

        Args:
            tokens: ``blocks * block_size`` for a paged layer, ``sequences * capacity`` for a
                contiguous one.
        """
        return self.bytes_per_token * check_int("tokens", tokens, minimum=0)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON has it, for snapshots."""
        return {
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "k_format": self.k_format.name,
            "v_format": self.v_format.name,
        }
