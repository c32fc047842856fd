"""Key/value cache data structures, storage formats and validation for autoregressive generation."""

from kv_core.arena import (
    KVSegmentLayout,
    allocate_kv_arena,
    stage_current_kv_,
    validate_kv_arena_segments,
)
from kv_core.blocks import BlockAllocator
from kv_core.checks import check_disjoint, check_int, check_tensor, overlaps
from kv_core.codecs.fp4 import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
)
from kv_core.codecs.fp8 import dequantize_fp8, quantize_fp8
from kv_core.codecs.int8 import dequantize_int8, quantize_int8
from kv_core.errors import (
    AliasError,
    BlockLeak,
    CapacityError,
    DoubleFree,
    DtypeError,
    FrozenError,
    KVError,
    LayerKindError,
    NoKernelError,
    OutOfBlocks,
    OutOfSlots,
    RingTooSmall,
    RollbackTooDeep,
    RolloutStateError,
    ShapeError,
    SharedBlockError,
    SnapshotError,
    SpecError,
    StaleHandleError,
    UnknownRequest,
)
from kv_core.fixed_slot import FixedSlotKVCache, LayerKV, QuantizedLayerKV, SlotRegion
from kv_core.hybrid.handle import LayerCacheHandle
from kv_core.hybrid.keys import KeyFormat, KeyTensors
from kv_core.hybrid.manager import KVCacheManager
from kv_core.hybrid.ops import HybridOps
from kv_core.hybrid.paged_pool import PagedKVPool
from kv_core.hybrid.reference import TorchOps
from kv_core.hybrid.rows import RowFormat, RowTensors
from kv_core.hybrid.snapshots import HybridSnapshot, PrefixHit
from kv_core.hybrid.spec import Compression, HybridSpec
from kv_core.hybrid.state_pool import StateCachePool
from kv_core.hybrid.stats import HybridStats
from kv_core.hybrid.step import HybridStep, KindStep
from kv_core.hybrid.views import ClassicalView, IndexerView, SWAView
from kv_core.layer import KVLayer
from kv_core.sequences import SequenceTable
from kv_core.snapshot import load, save, spec_hash
from kv_core.spec import KVFormat, KVSpec
from kv_core.step import Step
from kv_core.token_window import TokenWindow

__all__ = [
    "AliasError",
    "BlockAllocator",
    "BlockLeak",
    "CapacityError",
    "ClassicalView",
    "Compression",
    "DoubleFree",
    "DtypeError",
    "FixedSlotKVCache",
    "FrozenError",
    "HybridOps",
    "HybridSnapshot",
    "HybridSpec",
    "HybridStats",
    "HybridStep",
    "IndexerView",
    "KVCacheManager",
    "KVError",
    "KVFormat",
    "KVLayer",
    "KVSegmentLayout",
    "KVSpec",
    "KeyFormat",
    "KeyTensors",
    "KindStep",
    "LayerCacheHandle",
    "LayerKV",
    "LayerKindError",
    "NoKernelError",
    "OutOfBlocks",
    "OutOfSlots",
    "PagedKVPool",
    "PrefixHit",
    "QuantizedLayerKV",
    "RingTooSmall",
    "RollbackTooDeep",
    "RolloutStateError",
    "RowFormat",
    "RowTensors",
    "SWAView",
    "SequenceTable",
    "ShapeError",
    "SharedBlockError",
    "SlotRegion",
    "SnapshotError",
    "SpecError",
    "StaleHandleError",
    "StateCachePool",
    "Step",
    "TokenWindow",
    "TorchOps",
    "UnknownRequest",
    "allocate_kv_arena",
    "check_disjoint",
    "check_int",
    "check_tensor",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "load",
    "overlaps",
    "quantize_fp8",
    "quantize_int8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "save",
    "spec_hash",
    "stage_current_kv_",
    "validate_kv_arena_segments",
]
