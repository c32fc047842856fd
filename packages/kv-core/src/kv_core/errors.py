"""The errors of the three packages: one root, and one kind for each thing that can go wrong."""


class KVError(Exception):
    """Root of every error that the packages raise on purpose."""


class SpecError(KVError, ValueError):
    """A size, name, option or combination of them is not possible."""


class ShapeError(KVError, ValueError):
    """A tensor has another rank or other sizes than the place it is meant for."""


class AliasError(KVError, ValueError):
    """Two places that are written share memory, or cannot be shown not to."""


class LayerKindError(KVError, ValueError):
    """A layer was asked for a part that its kind does not have."""


class DtypeError(KVError, TypeError):
    """A value has the wrong type, or a tensor the wrong dtype, layout or device."""


class UnknownRequest(KVError, KeyError):
    """A request id that is not being served."""

    def __str__(self) -> str:
        """Return the message as it is; ``KeyError`` would quote it."""
        return Exception.__str__(self)


class CapacityError(KVError, RuntimeError):
    """Something does not fit; the message says what is needed and what there is."""


class OutOfBlocks(CapacityError):
    """A pool has fewer free blocks than a step needs."""


class OutOfSlots(CapacityError):
    """A pool has no free slot for one more sequence."""


class RingTooSmall(CapacityError):
    """A ring cannot hold a window together with the tokens of one step."""


class StaleHandleError(KVError, RuntimeError):
    """A handle or mask was used after the state it describes had moved on."""


class FrozenError(KVError, RuntimeError):
    """State was to be replaced or moved while something relies on it."""


class DoubleFree(KVError, RuntimeError):
    """A block was freed that is not in use."""


class BlockLeak(KVError, RuntimeError):
    """A block is held by an owner that is gone, or the counts of a pool do not add up."""


class SharedBlockError(KVError, RuntimeError):
    """A block that several sequences share was about to be written."""


class RollbackTooDeep(KVError, RuntimeError):
    """Tokens were to be restored that eviction has already overwritten."""


class RolloutStateError(KVError, RuntimeError):
    """A rollout was asked for something that it has stopped, finished or evicted."""


class SnapshotError(KVError, RuntimeError):
    """A state cannot be saved or loaded, or belongs to something else."""


class NoKernelError(KVError, NotImplementedError):
    """No row of the kernel table runs the request; the message lists every row and why not."""
