"""Configurations of the encoders, importable without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from gigamask.errors import GigamaskError, check_counts
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD, ImageEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class RepViT(ImageEncoder):
    """The convolutions of RepViT, the encoder of EdgeSAM, with layer norms (`repvit`).

    The defaults are the widths and depths of RepViT-M1.
    """

    widths: tuple[int, int, int, int] = (48, 96, 192, 384)
    """channels at strides 4, 8, 16 and 32; multiples of 4"""
    depths: tuple[int, int, int, int] = (3, 3, 15, 2)
    """blocks at strides 4, 8, 16 and 32, besides those that halve the resolution"""
    initializes_itself: ClassVar[bool] = False
    shards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if any(width < 4 or width % 4 for width in self.widths):
            raise GigamaskError(
                f"RepViT.widths must be positive multiples of 4 (got {self.widths})"
            )
        check_counts(self, "depths")

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.plugins.encoders.repvit import RepViTEncoder

        return RepViTEncoder(
            self.widths,
            self.depths,
            (model.image_size, model.patch_size),
            model.embedding_dim,
            model.drop_path_rate,
            model.in_channels,
        )

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks."""
        return sum(self.depths) + 3

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest stage."""
        return max(self.widths)


@dataclass(frozen=True)
class HuggingFaceBackbone(ImageEncoder):
    """A backbone of transformers, such as DINOv2, DINOv3, Hiera, Swin or ConvNeXt, with SAM's neck.

    It runs without dropout, and its batch norms keep their statistics (`backbone`).
    """

    backbone: str = ""
    """a folder, or the id of a model of the Hugging Face Hub, downloaded unless it is cached"""
    revision: str | None = None
    """commit, branch or tag of the model on the Hub; default: its main branch"""
    pretrained: bool = True
    """start from the backbone's weights, unless --init is set"""
    architecture: str = ""
    """the backbone's config.json; default: that of the model"""
    pixel_mean: tuple[float, float, float] = PIXEL_MEAN
    """mean of red, green and blue in 0..255; default: the model's"""
    pixel_std: tuple[float, float, float] = PIXEL_STD
    """standard deviation of red, green and blue in 0..255; default: the model's"""
    pretrained_part: ClassVar[str] = "backbone."
    argument: ClassVar[str] = "backbone"
    stated: ClassVar[tuple[str, ...]] = ("architecture",)

    def __post_init__(self) -> None:
        if not self.backbone or self.architecture:
            return
        from gigamask.plugins.encoders.backbone import read_architecture

        stated = read_architecture(self.backbone, self.revision)
        for field, value in zip(("architecture", "pixel_mean", "pixel_std"), stated, strict=True):
            if getattr(self, field) == getattr(type(self), field):  # a given one stays
                object.__setattr__(self, field, value)

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM, with random weights."""
        from gigamask.plugins.encoders.backbone import BackboneEncoder

        return BackboneEncoder(
            self._architecture(model),
            model.image_size,
            model.patch_size,
            model.embedding_dim,
            model.drop_path_rate,
        )

    def load_pretrained(self, encoder: nn.Module) -> None:
        """Load the weights of the backbone, but none into the neck.

        Args:
            encoder: What `build` has returned.
        """
        from gigamask.plugins.encoders.backbone import BackboneEncoder, load_pretrained

        if self.pretrained:
            module = cast(BackboneEncoder, encoder)
            load_pretrained(module, self.backbone, self.revision, self.architecture)

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of the backbone, from input to output."""
        from gigamask.plugins.encoders.backbone import blocks_of

        return blocks_of(encoder)

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks, or 0 without drop path."""
        from gigamask.plugins.encoders.backbone import count_blocks

        return count_blocks(self._architecture(model)) if model.drop_path_rate else 0

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest feature map."""
        from gigamask.plugins.encoders.backbone import feature_shapes

        return max(
            channels
            for channels, _ in feature_shapes(self._architecture(model), model.image_size)[1]
        )

    @property
    def pixel_scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of red, green and blue in 0..255."""
        return self.pixel_mean, self.pixel_std

    @property
    def depth(self) -> int:
        """Number of blocks that the architecture states."""
        values = json.loads(self.architecture or "{}")
        return sum(values.get("depths") or [values.get("num_hidden_layers", 0)])

    def _architecture(self, model: Any) -> str:
        """Return the architecture with the channels of a model's input."""
        if not self.architecture:
            raise GigamaskError(
                "--model.encoder hf needs a backbone: hf:FOLDER, or hf:ID of the Hugging Face Hub, "
                "such as hf:facebook/dinov2-small"
            )
        if model.in_channels == 3:
            return self.architecture
        from gigamask.plugins.encoders.backbone import with_channels

        return with_channels(self.architecture, model.in_channels)
