"""How far a floating result may be from an FP64 oracle: no tolerance is a constant."""

import torch
from torch import Tensor


def largest_error(actual: Tensor, oracle: Tensor) -> float:
    """Return the largest distance from ``oracle`` where that is finite.

    Raises:
        AssertionError: Where the oracle is infinite or NaN, ``actual`` is something else.
    """
    actual = actual.cpu().double()
    special = ~oracle.isfinite()
    torch.testing.assert_close(
        actual[special], oracle[special], rtol=0, atol=0, equal_nan=True, msg="infinite or NaN"
    )
    errors = (actual - oracle)[~special].abs()
    return errors.max().item() if errors.numel() else 0.0


def error_budget(reference: Tensor, oracle: Tensor) -> float:
    """Return how far a kernel may be from ``oracle``: twice as far as ``reference`` is.

    A reference that happens to be exact counts as half a rounding of its largest value away.
    """
    largest = oracle[oracle.isfinite()].abs().max().item() if oracle.isfinite().any() else 0.0
    rounding = torch.finfo(reference.dtype).eps / 2 * largest
    return 2 * max(largest_error(reference, oracle), rounding)


def assert_within_budget(actual: Tensor, reference: Tensor, oracle: Tensor) -> None:
    """Check that ``actual`` errs at most twice as much as ``reference`` against ``oracle``.

    Raises:
        AssertionError: It errs more, or differs where the oracle is infinite or NaN.
    """
    error, budget = largest_error(actual, oracle), error_budget(reference, oracle)
    assert error <= budget, f"largest error {error:.3e} is over the budget of {budget:.3e}"
