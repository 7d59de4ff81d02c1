"""The small layers that encoder, prompt encoder and decoder share.

Not here: attention (`model.attention`), the blocks made of these (`model.image_encoder`, `model.two_way`).
"""

import contextlib

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype that matrix products of `tensor` are computed in: autocast's where it is on, else the tensor's own."""
    kind = tensor.device.type
    if (
        tensor.dtype == torch.float32
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    ):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Returns the context in which nothing on the device of `tensor` is cast by autocast, which not every device has."""
    kind = tensor.device.type
    return (
        torch.autocast(kind, enabled=False)
        if torch.amp.is_autocast_available(kind)
        else contextlib.nullcontext()
    )


def layer_norm(x: Float[Tensor, "... C"], norm: nn.LayerNorm) -> Float[Tensor, "... C"]:
    """Applies `norm` in the dtype of `x`, also under autocast, which would widen the result to float32 and with it all that is saved for backward.

    The mean and the variance are summed in float32 inside the kernel either way.
    """
    with no_autocast(x):
        return F.layer_norm(
            x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps
        )


class LayerNorm2d(nn.LayerNorm):
    """Normalises the channels of each pixel of an image; eps 1e-6, as SAM's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class MLPBlock(nn.Module):
    """Two linear layers with an activation between: GELU in the encoder, ReLU in the decoder. As many channels leave as enter, or `out`."""

    def __init__(
        self, dim: int, hidden: int, activation: type[nn.Module], out: int | None = None
    ) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, hidden)
        self.lin2 = nn.Linear(hidden, out or dim)
        self.activation = activation()

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        return self.lin2(self.activation(self.lin1(x)))


class MLP(nn.Module):
    """Three linear layers with ReLU between: the decoder's heads."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out)]
        )

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        first, second, third = self.layers
        return third(F.relu(second(F.relu(first(x)))))
