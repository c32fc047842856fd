"""What the operations of a hybrid cache check of their arguments."""

import torch
from kv_core.errors import DtypeError

IDS = (torch.int32, torch.int64)


def check_view(name: str, view: object, wanted: type, call: str) -> None:
    """Check that a view is of the right kind.

    Raises:
        DtypeError: It is not.
    """
    if not isinstance(view, wanted):
        raise DtypeError(
            f"{name} must be {'an' if wanted.__name__[0] in 'AI' else 'a'} {wanted.__name__}, got "
            f"{type(view).__name__}; take it from handle.{call}()"
        )
