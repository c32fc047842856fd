"""Which layers can store the same tokens in the same blocks."""

from collections.abc import Sequence

from kv_core.errors import DtypeError, LayerKindError, SpecError
from kv_core.layer import KVLayer


def check_group(layers: Sequence[KVLayer]) -> tuple[KVLayer, ...]:
    """Return the layers if one table can serve them all; their formats may differ.

    Raises:
        SpecError: None at all, or layers of different sizes or devices.
        LayerKindError: Paged and contiguous ones together.
        DtypeError: Something that is not a ``KVLayer``.
    """
    checked = tuple(layers)
    if not checked:
        raise SpecError("layers must be at least 1 KVLayer, got none; pass those of the model")
    for index, layer in enumerate(checked):
        if not isinstance(layer, KVLayer):
            raise DtypeError(
                f"layers[{index}] must be a KVLayer, got {type(layer).__name__}; make it with "
                "KVLayer.paged or KVLayer.contiguous"
            )
        wanted, got = ("paged" if x.is_paged else "contiguous" for x in (checked[0], layer))
        if wanted != got:
            raise LayerKindError(
                f"layers[{index}] must be {wanted} as layers[0] is, got {got}; give each kind a "
                "table of its own"
            )
        for name in ("num_blocks", "block_size", "device"):
            wanted, got = getattr(checked[0], name), getattr(layer, name)
            if wanted != got:
                raise SpecError(
                    f"layers[{index}] must have {name}={wanted} as layers[0] has, got {got}; give "
                    "layers of other sizes a table of their own"
                )
    return checked
