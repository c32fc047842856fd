"""Key/value cache operations with a dispatch table, each with a plain-torch reference."""

from kv_kernels.masks import SegmentMask, check_block_size
from kv_kernels.ops.append import append
from kv_kernels.ops.gather import gather
from kv_kernels.ops.hybrid import HybridKernels, hybrid_ops
from kv_kernels.ops.hybrid_attention import hybrid_attention
from kv_kernels.ops.indexer_topk import indexer_topk
from kv_kernels.ops.paged_decode_attention import paged_decode_attention
from kv_kernels.ops.paged_write import paged_write
from kv_kernels.ops.slot_attention import slot_attention
from kv_kernels.ops.split_qkv_norm_rope import split_qkv_norm_rope
from kv_kernels.registry import ROWS, Query, Row, explain, find

__all__ = [
    "ROWS",
    "HybridKernels",
    "Query",
    "Row",
    "SegmentMask",
    "append",
    "check_block_size",
    "explain",
    "find",
    "gather",
    "hybrid_attention",
    "hybrid_ops",
    "indexer_topk",
    "paged_decode_attention",
    "paged_write",
    "slot_attention",
    "split_qkv_norm_rope",
]
