"""The image encoder RepViT (Wang et al. 2023, arXiv 2307.09283), with layer norms.

RepViT has batch norms, whose statistics depend on the other images of a batch. Layer norms over the
channels of each pixel keep training exact: its result depends neither on micro-batches, processes
nor resuming. The branches that RepViT merges with its depthwise convolutions after training are
left out, since without batch norms they add nothing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.interfaces import ImageEncoderModule
from gigamask.models.layers import LayerNorm2d, smoothing_layers

SQUEEZE = 4
"""Channels for each channel in the middle of squeeze and excitation."""


class StemConv2d(nn.Conv2d):
    """A convolution whose biases begin random, too, as torch's do.

    With biases of 0, padding would be 0 in all layers, and each layer norm of zeros multiplies the
    gradient by 1,000.
    """

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return uniform numbers up to the inverse root of the inputs of a pixel.

        Args:
            name: Its name in the module.
            shape: Its shape.
            generator: Its random generator.
        """
        return (2 * torch.rand(shape, generator=generator) - 1) / self.weight[0].numel() ** 0.5


class SqueezeExcite(nn.Module):
    """Scales each channel by a function of the means of all (Hu et al. 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // SQUEEZE, 1)
        self.expand = nn.Conv2d(channels // SQUEEZE, channels, 1)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        """Return the scaled map."""
        mean = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(mean))))


class RepViTBlock(nn.Module):
    """A depthwise convolution mixes neighbors, then two layers mix channels.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the result.
        stride: 2 halves the resolution; with 1, there are as many outputs as inputs.
        squeeze: Whether the depthwise convolution is followed by squeeze and excitation.
        drop_rate: Probability of skipping the block, unless it halves the resolution.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, squeeze: bool, drop_rate: float
    ) -> None:
        super().__init__()
        self.halves, self.drop_rate = stride == 2, drop_rate
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False)
        self.norm1 = LayerNorm2d(inputs)
        self.squeeze = SqueezeExcite(inputs) if squeeze else nn.Identity()
        self.project = nn.Conv2d(inputs, outputs, 1) if self.halves else nn.Identity()
        self.norm2 = LayerNorm2d(outputs)
        self.pointwise1 = nn.Conv2d(outputs, 2 * outputs, 1)
        self.pointwise2 = nn.Conv2d(2 * outputs, outputs, 1)

    def forward(
        self, x: Float[Tensor, "B C h w"], uniforms: Float[Tensor, "B"] | None
    ) -> Float[Tensor, "B D h2 w2"]:
        """Return the map after the block.

        Args:
            x: Input map.
            uniforms: Uniform numbers that decide which images skip the block (Huang et al. 2016);
                None in evaluation.
        """
        mixed = self.norm1(self.depthwise(x))
        mixed = self.project(self.squeeze(mixed if self.halves else x + mixed))
        y = mixed + self.pointwise2(F.gelu(self.pointwise1(self.norm2(mixed))))
        if uniforms is None or not self.drop_rate or self.halves:
            return y
        scale = (uniforms >= self.drop_rate) / (1 - self.drop_rate)
        kept = scale.to(y, non_blocking=True)
        return x + (y - x) * kept[:, None, None, None]


class RepViTEncoder(nn.Module, ImageEncoderModule):
    """Four stages at strides 4 to 32, and a neck that joins the last two like EdgeSAM's.

    Args:
        widths: Channels of each stage.
        depths: Blocks of each stage, besides those that halve the resolution.
        sizes: Side of the input, and stride of the embedding, in pixels.
        out_chans: Channels of the embedding.
        drop_path_rate: Drop path rate of the last block, increasing linearly from 0.
        in_chans: Channels of the input.

    Raises:
        GigamaskError: The stride is none of 8, 16 and 32, or does not fit the input.
    """

    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        sizes: tuple[int, int],
        out_chans: int,
        drop_path_rate: float = 0.0,
        in_chans: int = 3,
    ) -> None:
        super().__init__()
        image_size, patch_size = sizes
        if patch_size not in (8, 16, 32) or image_size % 32:
            raise GigamaskError(
                "--model.encoder repvit needs --model.patch-size 8, 16 or 32 and a "
                f"--model.image-size that is a multiple of 32 (got {patch_size} and {image_size})"
            )
        first = widths[0]
        self.stem = nn.Sequential(
            StemConv2d(in_chans, first // 2, 3, 2, padding=1),
            LayerNorm2d(first // 2),
            nn.GELU(),
            StemConv2d(first // 2, first, 3, 2, padding=1),
            LayerNorm2d(first),
        )
        count = sum(depths) + len(depths) - 1
        rates = iter(drop_path_rate * index / max(1, count - 1) for index in range(count))
        self.blocks, self._ends = nn.ModuleList(), []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                self.blocks.append(RepViTBlock(widths[stage - 1], width, 2, False, next(rates)))
            for index in range(depth):
                squeeze = index % 2 == 0 and index < depth - 1
                self.blocks.append(RepViTBlock(width, width, 1, squeeze, next(rates)))
            self._ends.append(len(self.blocks))
        self._joined = range((patch_size // 8).bit_length(), len(widths))
        self.laterals = nn.ModuleList(
            nn.Conv2d(widths[stage], out_chans, 1, bias=False) for stage in self._joined
        )
        self.neck = nn.Sequential(*smoothing_layers(out_chans))

    def forward(
        self, pixels: Float[Tensor, "B N S S"], drop_path: Float[Tensor, "B L 2"] | None = None
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding; see `ImageEncoderModule`.

        Args:
            pixels: Normalized pixels, zero in the padding.
            drop_path: Uniform numbers that decide which blocks are skipped; None in evaluation.
        """
        x, maps = self.stem(pixels), []
        for index, block in enumerate(self.blocks):
            x = block(x, None if drop_path is None else drop_path[:, index, 0])
            if index + 1 in self._ends:
                maps.append(x)
        finest, *coarser = (
            lateral(maps[stage]) for lateral, stage in zip(self.laterals, self._joined, strict=True)
        )
        for each in coarser:
            size = finest.shape[2:]
            finest = finest + F.interpolate(each, size, mode="bilinear", align_corners=False)
        return self.neck(finest)
