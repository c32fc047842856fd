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
    "DoubleFree",
    "DtypeError",
    "FixedSlotKVCache",
    "FrozenError",
    "KVError",
    "KVFormat",
    "KVLayer",
    "KVSegmentLayout",
    "KVSpec",
    "LayerKV",
    "LayerKindError",
    "NoKernelError",
    "OutOfBlocks",
    "OutOfSlots",
    "QuantizedLayerKV",
    "RingTooSmall",
    "RollbackTooDeep",
    "RolloutStateError",
    "SequenceTable",
    "ShapeError",
    "SharedBlockError",
    "SlotRegion",
    "SnapshotError",
    "SpecError",
    "StaleHandleError",
    "Step",
    "TokenWindow",
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
