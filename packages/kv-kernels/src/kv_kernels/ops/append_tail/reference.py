"""What append_tail means: kv-core's scatter by slot."""

from kv_core.hybrid import reference
from torch import Tensor


def run(value: Tensor, score: Tensor, tail_slot: Tensor, tail: Tensor) -> None:
    """Store ``[T, W]`` values and scores in ``tail`` ``[B, tail, 2, W]`` by ``tail_slot`` ``[T]``.

    See ``kv_core.hybrid.reference.append_tail``.
    """
    reference.append_tail(tail, value, score, tail_slot)
