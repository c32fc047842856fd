"""Storage formats of cached keys and values."""

from enum import Enum

import torch

from kv_core.errors import DtypeError


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
