"""Layers that the image encoder, the prompt encoder and the mask decoder share."""

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gigamask.masks.devices import no_autocast
from gigamask.models.shared_tensors import linear
from gigamask.rng import make_torch_generator

PLANLESS_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""Backends of attention that take any shape at once; cuDNN's builds a plan for each new shape."""


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for matrix products of `tensor`: autocast's if enabled, else its own."""
    kind = tensor.device.type
    if (
        tensor.dtype == torch.float32
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    ):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def planless_attention(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which attention on a GPU uses only `PLANLESS_BACKENDS`.

    torch prefers cuDNN's attention on GPUs of compute capability 9 and 10. The mask decoder has
    three shapes for each number of tokens, and new ones for each number of masks.

    Args:
        device: Device of the tensors; nothing changes unless it is a GPU.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(list(PLANLESS_BACKENDS))


def embedding(count: int, dim: int) -> nn.Embedding:
    """Return an embedding of normal values.

    Args:
        count: Number of embeddings.
        dim: Width of each.
    """
    return nn.Embedding.from_pretrained(normal(count, dim), freeze=False)


def normal(*shape: int) -> Tensor:
    """Return normal values, as in Meta's classes; a model's initialization or weights replace them.

    On the meta device torch would load its compiler for them, which takes a CPU second and more.

    Args:
        *shape: The shape.
    """
    values = torch.empty(shape)
    return values if values.is_meta else values.normal_()


def layer_norm(x: Float[Tensor, "... C"], norm: nn.LayerNorm) -> Float[Tensor, "... C"]:
    """Apply a layer norm in the dtype of `x`, even under autocast.

    Autocast would return float32 and save float32 for backward. The kernel computes mean and
    variance in float32 either way.

    Args:
        x: Tensor to normalize over its last dimension.
        norm: The layer norm.
    """
    with no_autocast(x):
        return F.layer_norm(
            x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps
        )


class TokenNorm(nn.LayerNorm):
    """Layer norm of image tokens, for `layer_norm`."""


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each pixel, with SAM's eps of 1e-6."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, input: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Return the normalized feature map."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def smoothing_layers(channels: int) -> list[nn.Module]:
    """Return the layers of SAM's neck after its projection: a 3 x 3 convolution between two norms.

    Args:
        channels: Channels of the embedding.
    """
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return [LayerNorm2d(channels), convolution, LayerNorm2d(channels)]


class MLPBlock(nn.Module):
    """Two linear layers with an activation in between; `out` defaults to `dim` channels."""

    def __init__(
        self, dim: int, hidden: int, activation: type[nn.Module], out: int | None = None
    ) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, hidden)
        self.lin2 = nn.Linear(hidden, out or dim)
        self.act = activation()

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return the output of the second layer."""
        return linear(self.lin2, self.act(linear(self.lin1, x)))


class MLP(nn.Module):
    """Three linear layers with ReLUs in between, for the heads of the mask decoder."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out)]
        )

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return the output of the third layer."""
        first, second, third = self.layers
        return linear(third, F.relu(linear(second, F.relu(linear(first, x)))))


def make_class_head(dim: int, hidden: int, classes: Sequence[str]) -> MLP | None:
    """Return the head that classifies a mask by its token; None if there are no classes.

    Args:
        dim: Width of the token.
        hidden: Hidden width.
        classes: Names of the classes.
    """
    return MLP(dim, hidden, len(classes)) if classes else None


class PatchEmbed(nn.Module):
    """Projection of image patches to tokens."""

    def __init__(self, patch: int, dim: int, in_chans: int = 3) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)

    def forward(self, pixels: Float[Tensor, "B N H W"]) -> Float[Tensor, "B h w C"]:
        """Return a token for each patch."""
        return self.proj(pixels).permute(0, 2, 3, 1)


def inflate_channels(value: Tensor, own: Tensor) -> Tensor:
    """Return the kernel of a first convolution for another number of channels than RGB's three.

    Each channel has the mean of the three kernels, times 3 / C, so that a gray image in all
    channels gives what it gave. The scale is that of timm's `adapt_input_conv`, which repeats the
    three kernels instead of their mean.

    Args:
        value: The kernel to convert; returned unchanged unless only its channels differ.
        own: The kernel that it is to fit.
    """
    if own.dim() != 4 or own.shape[1] == 3:
        return value
    channels = own.shape[1]
    if value.shape != (len(own), 3, *own.shape[2:]):
        return value
    return value.mean(1, keepdim=True).expand(-1, channels, -1, -1) * (3 / channels)


def orthonormal(rows: int, columns: int, seed: int, name: str) -> Float[Tensor, "{rows} {columns}"]:
    """Return a matrix of orthonormal rows.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        seed: Random seed of the run.
        name: Name of the matrix.
    """
    return nn.init.orthogonal_(
        torch.empty(rows, columns), generator=make_torch_generator(seed, f"weights {name}")
    )
