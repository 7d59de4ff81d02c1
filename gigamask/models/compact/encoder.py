"""A convolutional image encoder with a feature pyramid (Lin et al. 2017).

Group normalization takes its statistics from the pixels of the image alone, so an embedding depends
neither on the padding nor on the other images of a batch, and has no state besides the weights. On
a CPU each image is encoded without its padding; elsewhere, padding is set to 0 after each layer,
which gives the same values.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from gigamask.masks.devices import is_readable

STRIDES = (2, 4, 8, 16)
FeatureMap = Float[Tensor, "B C h w"]
Valid = Float[Tensor, "B 1 h w"]


class MaskedGroupNorm(nn.GroupNorm):
    """Group norm over the valid pixels of each image, eight channels to a group."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels // 8, channels)

    def forward(self, input: FeatureMap, valid: Valid | None = None) -> FeatureMap:
        """Return the normalized map.

        Args:
            input: The map.
            valid: 1 at valid pixels, else 0; None: all are valid.
        """
        if valid is None:
            return super().forward(input)
        groups = input.unflatten(1, (self.num_groups, -1))
        count = valid.sum((2, 3)).clamp(min=1)[:, :, None, None, None] * groups.shape[2]
        inside = valid[:, :, None]
        mean = (groups * inside).sum((2, 3, 4), keepdim=True) / count
        centered = (groups - mean) * inside
        variance = centered.square().sum((2, 3, 4), keepdim=True) / count
        normal = (centered * (variance + self.eps).rsqrt()).flatten(1, 2)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


class ConvNorm(nn.Module):
    """A 3 x 3 convolution and a group norm, by default with ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm = MaskedGroupNorm(outputs)
        self.relu = relu

    def forward(
        self, x: FeatureMap, valid: Float[Tensor, "B 1 h2 w2"] | None = None
    ) -> Float[Tensor, "B D h2 w2"]:
        """Return the map, 0 where it is not valid.

        Args:
            x: Input map.
            valid: Valid pixels of the result; None: all are valid.
        """
        x = self.norm(self.conv(x), valid)
        return _times(F.relu(x) if self.relu else x, valid)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a residual connection (He et al. 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels)
        self.second = ConvNorm(channels, channels, relu=False)

    def forward(self, x: FeatureMap, valid: Valid | None = None) -> FeatureMap:
        """Return the map.

        Args:
            x: Input map.
            valid: Valid pixels; None: all are valid.
        """
        return F.relu(x + self.second(self.first(x, valid), valid))


class Stage(nn.Module):
    """Halves the resolution, and adds residual blocks."""

    def __init__(self, inputs: int, outputs: int, depth: int) -> None:
        super().__init__()
        self.down = ConvNorm(inputs, outputs, stride=2)
        self.blocks = nn.ModuleList(ResidualBlock(outputs) for _ in range(depth))

    def forward(
        self, x: FeatureMap, valid: Float[Tensor, "B 1 h2 w2"] | None = None
    ) -> Float[Tensor, "B D h2 w2"]:
        """Return the map at half the resolution.

        Args:
            x: Input map.
            valid: Valid pixels of the result; None: all are valid.
        """
        x = self.down(x, valid)
        for block in self.blocks:
            x = block(x, valid)
        return x


class ConvPyramidEncoder(nn.Module):
    """Stages at strides 2, 4, 8 and 16, joined from coarse to fine.

    Args:
        widths: Channels at each stride.
        depths: Residual blocks at each stride.
        width: Channels of the result at stride 4.
        fine_width: Channels of the result at stride 2.
        in_chans: Channels of the input.

    Attributes:
        compiled_methods: What --compile compiles: all layers at once.
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("encode_valid",)

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        width: int,
        fine_width: int,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        finest = widths[0]
        self.stem = ConvNorm(in_chans, finest, stride=2)
        self.fine = ConvNorm(finest, finest)
        self.fine_blocks = nn.ModuleList(ResidualBlock(finest) for _ in range(depths[0]))
        self.stages = nn.ModuleList(
            Stage(inputs, outputs, depth)
            for inputs, outputs, depth in zip(widths, widths[1:], depths[1:], strict=False)
        )
        self.context = nn.Linear(widths[-1], widths[-1])
        self.lateral = nn.ModuleList(
            nn.Conv2d(coarse, fine, 1) for fine, coarse in pairwise(widths)
        )
        self.joined = nn.ModuleList(ConvNorm(channels, channels) for channels in widths[:-1])
        self.out = nn.Conv2d(widths[1], width, 1)
        self.fine_out = nn.Conv2d(finest, fine_width, 1)

    @property
    def blocks(self) -> list[nn.Module]:
        """The stages, from input to output."""
        return list(self.stages)

    def forward(
        self,
        pixels: Float[Tensor, "B N S S"],
        drop_path: Float[Tensor, "B L 2"] | None,
        input_sizes: Int64[Tensor, "B 2"],
    ) -> Float[Tensor, "B C E E"]:
        """Return the embedding at stride 4.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Not used.
            input_sizes: Height and width of each image without padding, at the top left.

        Returns:
            Whether each token is inside the image, the features of stride 4, and those of stride 2
            with four pixels in each token; 0 in the padding.
        """
        side = pixels.shape[-1]
        if is_readable(pixels):
            embeddings = []
            for image, (height, width) in zip(pixels, input_sizes.tolist(), strict=True):
                cropped = self.encode_valid(image[None, :, :height, :width], None)
                missing = (0, side // 4 - cropped.shape[3], 0, side // 4 - cropped.shape[2])
                embeddings.append(F.pad(cropped, missing))
            return torch.cat(embeddings)
        return self.encode_valid(
            pixels, [_valid(input_sizes, side, stride, pixels.dtype) for stride in STRIDES]
        )

    def encode_valid(
        self, pixels: Float[Tensor, "B N h w"], valid: list[Tensor] | None
    ) -> Float[Tensor, "B C h2 w2"]:
        """Return the embedding of the valid pixels.

        Args:
            pixels: Normalized pixels.
            valid: Valid pixels at each stride; None: all are valid.
        """
        masks: Sequence[Tensor | None] = valid or [None] * len(STRIDES)
        x = self.fine(self.stem(pixels, masks[0]), masks[0])
        for block in self.fine_blocks:
            x = block(x, masks[0])
        maps = [x]
        for stage, mask in zip(self.stages, masks[1:], strict=True):
            maps.append(stage(maps[-1], mask))
        coarse, mask = maps[-1], masks[-1]
        count = coarse[:, :1][0].numel() if mask is None else mask.sum((2, 3))
        coarse = F.relu(coarse + self.context(coarse.sum((2, 3)) / count)[..., None, None])
        for level in (2, 1, 0):
            finer, mask = maps[level], masks[level]
            # Nearest neighbor, so that padding is not mixed in.
            above = F.interpolate(self.lateral[level](coarse), scale_factor=2.0)
            finer = finer + above[..., : finer.shape[2], : finer.shape[3]]
            coarse = maps[level] = self.joined[level](_times(finer, mask), mask)
        fine = _times(self.fine_out(coarse), masks[0])
        out = _times(self.out(maps[1]), masks[1])
        fine = F.pad(fine, (0, fine.shape[3] % 2, 0, fine.shape[2] % 2))
        inside = torch.ones_like(out[:, :1]) if masks[1] is None else masks[1].to(out.dtype)
        return torch.cat([inside, out, F.pixel_unshuffle(fine, 2)], 1)


def _times(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else x * valid


def _valid(input_sizes: Int64[Tensor, "B 2"], side: int, stride: int, dtype: torch.dtype) -> Valid:
    """Return 1 at the pixels of a stride that are inside the image, which is rounded up."""
    index = torch.arange(side // stride, device=input_sizes.device) * stride
    rows, columns = index < input_sizes[:, :1], index < input_sizes[:, 1:]
    return (rows[:, None, :, None] & columns[:, None, None, :]).to(dtype)
