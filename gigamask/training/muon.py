"""Muon (Jordan et al. 2024): updates matrices by their orthogonalized momentum.

A convolution kernel is updated as the matrix of its first dimension by all others.

Equivalent to `torch.optim.Muon`, which always computes in bf16. CPUs without bf16 units emulate it
about fifteen times slower than float32, so this one computes in the gradient's own precision, all
matrices of one shape at once.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

# Coefficients of the quintic iteration and number of iterations (Jordan et al. 2024).
QUINTIC, ITERATIONS = (3.4445, -4.775, 2.0315), 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum.

    The learning rate of a matrix is that of its group times `sqrt(max(1, rows / columns))`.

    Args:
        groups: Parameter groups of matrices and kernels.
        lr: Default learning rate of a group.
        momentum: Default momentum of a group.
    """

    found_inf: Float[Tensor, ""] | None = None
    """If it is 1, the step changes nothing, as for fused optimizers of torch."""
    _step_supports_amp_scaling = True  # by this, torch's optimizers say that they take `found_inf`

    def __init__(self, groups: Iterable[dict], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override] (no closure)
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                matrices = torch.stack(
                    [self._nesterov(p, group["momentum"]).flatten(1) for p in parameters]
                )
                _, rows, columns = matrices.shape
                lr = group["lr"] * max(1.0, rows / columns) ** 0.5
                decay, update = group["lr"] * group["weight_decay"], newton_schulz(matrices)
                if self.found_inf is not None:
                    is_finite = self.found_inf == 0
                    update = torch.where(is_finite, update, 0.0)
                    decay = is_finite.to(update.dtype) * decay
                torch._foreach_mul_(parameters, 1 - decay)
                updates = [each.reshape(shape) for each in update.unbind()]
                torch._foreach_add_(parameters, updates, alpha=-lr)

    def _nesterov(self, parameter: Tensor, momentum: float) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        if self.found_inf is None:
            buffer.lerp_(gradient, 1 - momentum)
        else:
            is_finite = self.found_inf == 0
            buffer.copy_(torch.where(is_finite, buffer.lerp(gradient, 1 - momentum), buffer))
        return gradient.lerp(buffer, momentum)


def newton_schulz(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Orthogonalize matrices approximately by Newton-Schulz iterations.

    Args:
        matrices: Matrices of one shape.

    Returns:
        Matrices with nearly the same singular vectors and singular values of about 0.7 to 1.2.
    """
    linear, cubic, quintic = QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = linear * x + torch.baddbmm(square, square, square, beta=cubic, alpha=quintic) @ x
    return x.mT if is_tall else x
