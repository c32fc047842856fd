"""Key/value cache operations with a dispatch table, each with a plain-torch reference."""

from kv_kernels.masks import SegmentMask, check_block_size
from kv_kernels.ops.slot_attention import slot_attention
from kv_kernels.registry import ROWS, Query, Row, explain, find

__all__ = [
    "ROWS",
    "Query",
    "Row",
    "SegmentMask",
    "check_block_size",
    "explain",
    "find",
    "slot_attention",
]
