"""What every operation on a layer checks of its arguments."""

from kv_core.checks import check_tensor
from kv_core.errors import DtypeError, ShapeError
from kv_core.layer import KVLayer
from kv_core.step import Step
from torch import Tensor

from kv_kernels.library import check_activations


def check_step(layer: object, step: object) -> None:
    """Check that a step can be run on a layer; values are not read.

    Raises:
        DtypeError: Not a ``KVLayer`` and a ``Step``, or on different devices.
        ShapeError: A layer without a single token, or a table without a column.
    """
    if not isinstance(layer, KVLayer):
        raise DtypeError(
            f"layer must be a KVLayer, got {type(layer).__name__}; make one with KVLayer.paged, "
            "or wrap tensors of your own with KVLayer.adopt"
        )
    if not isinstance(step, Step):
        raise DtypeError(
            f"step must be a Step, got {type(step).__name__}; take one from SequenceTable.append, "
            "or build it from your tensors"
        )
    if not layer.num_blocks or not layer.block_size:
        raise ShapeError(
            "layer must hold at least one token, got "
            f"P={layer.num_blocks} blocks of N={layer.block_size}; allocate blocks and block_size "
            "of at least 1"
        )
    if not step.block_table.shape[1]:
        raise ShapeError(
            "block_table must be [B, M] with M >= 1, got M=0; give each sequence a column for "
            "every block it may use"
        )
    if step.slots.device != layer.device:
        raise DtypeError(
            f"step must be on {layer.device} as the layer is, got {step.slots.device}; build the "
            f"table with device='{layer.device}'"
        )


def check_rows(name: str, rows: object, heads: str, layer: KVLayer, step: Step) -> None:
    """Check ``[T, heads, D]`` activations of the tokens of a step.

    Raises:
        DtypeError: Not a tensor in FP32, FP16 or BF16 on the layer's device.
        ShapeError: Another number of tokens than the step has, or other heads than the layer.
    """
    sizes = {"T": step.num_tokens, "D": layer.head_dim, "H": layer.kv_heads}
    check_tensor(
        name, rows, f"T {heads} D", sizes, device=layer.device,
        hint="T is the tokens of the step with its padding, the rest is the layer's",
    )  # fmt: skip
    assert isinstance(rows, Tensor)
    check_activations(name, rows)


def check_groups(name: str, query_heads: int, kv_heads: int) -> None:
    """Check that each key/value head serves as many query heads.

    Raises:
        ShapeError: It does not.
    """
    if query_heads < 1 or query_heads % kv_heads:
        raise ShapeError(
            f"{name} must have a multiple of the H={kv_heads} key/value heads, got "
            f"Hq={query_heads}; every key/value head serves as many query heads"
        )
