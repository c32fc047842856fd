"""The kinds of errors and what else they can be caught as."""

import kv_core
import pytest

KINDS = {
    "SpecError": ValueError,
    "ShapeError": ValueError,
    "AliasError": ValueError,
    "LayerKindError": ValueError,
    "DtypeError": TypeError,
    "UnknownRequest": KeyError,
    "CapacityError": RuntimeError,
    "OutOfBlocks": kv_core.CapacityError,
    "OutOfSlots": kv_core.CapacityError,
    "RingTooSmall": kv_core.CapacityError,
    "StaleHandleError": RuntimeError,
    "FrozenError": RuntimeError,
    "DoubleFree": RuntimeError,
    "BlockLeak": RuntimeError,
    "SharedBlockError": RuntimeError,
    "RollbackTooDeep": RuntimeError,
    "RolloutStateError": RuntimeError,
    "SnapshotError": RuntimeError,
    "NoKernelError": NotImplementedError,
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_a_kv_error_and_a_builtin_one(name: str) -> None:
    kind = getattr(kv_core, name)
    assert issubclass(kind, kv_core.KVError) and issubclass(kind, KINDS[name])
    assert str(kind("as it is: 'x'")) == "as it is: 'x'"


def test_the_table_of_kinds_is_complete() -> None:
    found = {
        name
        for name in dir(kv_core.errors)
        if isinstance(getattr(kv_core.errors, name), type) and name != "KVError"
    }
    assert found == set(KINDS)
