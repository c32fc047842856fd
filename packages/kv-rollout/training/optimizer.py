"""Muon for the matrices of the layers, in a few large batched products."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of ``[n, rows, columns]`` towards 1 by Newton-Schulz iteration.

    See Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Momentum whose every step is made orthogonal.

    Args:
        matrices: Parameters, each with the number of equal matrices stacked in its rows.
        momentum: Of the running mean of gradients.
        weight_decay: Decoupled, per unit of learning rate.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[Tensor, int]],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self._groups: dict[tuple[int, int], list[tuple[Tensor, int, int]]] = defaultdict(list)
        for parameter, count in matrices:
            rows, columns = parameter.shape[0] // count, parameter.shape[1]
            for part in range(count):
                self._groups[rows, columns].append((parameter, part * rows, rows))
        self._means: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix by ``rate`` along its orthogonalised momentum."""
        for shape, parts in self._groups.items():
            gradients = torch.stack([p.grad[start : start + n] for p, start, n in parts])
            if shape not in self._means:
                self._means[shape] = torch.zeros_like(gradients)
            mean = self._means[shape]
            mean.lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(mean, self.momentum)).to(gradients.dtype)
            size = max(1.0, shape[0] / shape[1]) ** 0.5
            targets = [p[start : start + n] for p, start, n in parts]
            torch._foreach_mul_(targets, 1 - rate * self.weight_decay)
            torch._foreach_add_(targets, list(update.unbind()), alpha=-rate * size)

    def forget(self) -> None:
        """Drop the momentum."""
        self._means.clear()
