"""Key/value cache data structures, storage formats and validation for autoregressive generation."""

from kv_core.arena import (
    KVSegmentLayout,
    allocate_kv_arena,
    stage_current_kv_,
    validate_kv_arena_segments,
)
from kv_core.checks import check_disjoint, check_int, check_tensor, overlaps
from kv_core.codecs.int8 import dequantize_int8, quantize_int8
from kv_core.errors import (
    AliasError,
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
from kv_core.snapshot import load, save, spec_hash
from kv_core.spec import KVFormat
from kv_core.token_window import TokenWindow

__all__ = [
    "AliasError",
    "CapacityError",
    "DoubleFree",
    "DtypeError",
    "FixedSlotKVCache",
    "FrozenError",
    "KVError",
    "KVFormat",
    "KVSegmentLayout",
    "LayerKV",
    "LayerKindError",
    "NoKernelError",
    "OutOfBlocks",
    "OutOfSlots",
    "QuantizedLayerKV",
    "RingTooSmall",
    "RollbackTooDeep",
    "RolloutStateError",
    "ShapeError",
    "SharedBlockError",
    "SlotRegion",
    "SnapshotError",
    "SpecError",
    "StaleHandleError",
    "TokenWindow",
    "UnknownRequest",
    "allocate_kv_arena",
    "check_disjoint",
    "check_int",
    "check_tensor",
    "dequantize_int8",
    "load",
    "overlaps",
    "quantize_int8",
    "save",
    "spec_hash",
    "stage_current_kv_",
    "validate_kv_arena_segments",
]
