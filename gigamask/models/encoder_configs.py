"""Configurations of the built-in image encoders, importable without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gigamask.errors import GigamaskError
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD, ImageEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class ViT(ImageEncoder):
    """SAM's vision transformer, sized by `SamConfig`."""

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.models.sam.image_encoder import ImageEncoderViT

        return ImageEncoderViT(
            img_size=model.image_size,
            patch_size=model.patch_size,
            embed_dim=model.embed_dim,
            depth=model.depth,
            num_heads=model.num_heads,
            out_chans=model.embedding_dim,
            window_size=model.window_size,
            global_attn_indexes=model.global_attn_indexes,
            drop_path_rate=model.drop_path_rate,
            in_chans=model.in_channels,
        )

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks."""
        return model.depth


@dataclass(frozen=True)
class ViTTiny(ImageEncoder):
    """A plain vision transformer, as small as that of EfficientSAM-Ti.

    All blocks attend over the whole image, without relative positions (Xiong et al. 2023, arXiv
    2312.00863).
    """

    embed_dim: int = 192
    """width of the image encoder"""
    depth: int = 12
    """number of blocks"""
    num_heads: int = 3
    """attention heads per block; must divide embed_dim"""

    def __post_init__(self) -> None:
        check_counts(self, "embed_dim", "depth", "num_heads")
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
        check_multiple(self, "embed_dim", 4, "the position embedding")

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.models.sam.image_encoder import ImageEncoderViT

        return ImageEncoderViT(
            img_size=model.image_size,
            patch_size=model.patch_size,
            embed_dim=self.embed_dim,
            depth=self.depth,
            num_heads=self.num_heads,
            out_chans=model.embedding_dim,
            global_attn_indexes=range(self.depth),
            drop_path_rate=model.drop_path_rate,
            use_rel_pos=False,
            in_chans=model.in_channels,
        )

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks."""
        return self.depth

    def max_width(self, model: Any) -> int:
        """Return the width."""
        return self.embed_dim


@dataclass(frozen=True)
class ViTSmall(ViTTiny):
    """A plain vision transformer, as small as that of EfficientSAM-S; see `ViTTiny`."""

    embed_dim: int = 384
    """width of the image encoder"""
    num_heads: int = 6
    """attention heads per block; must divide embed_dim"""


@dataclass(frozen=True)
class RepViT(ImageEncoder):
    """The convolutions of RepViT, the encoder of EdgeSAM, with layer norms (`models.repvit`).

    The defaults are the widths and depths of RepViT-M1.
    """

    widths: tuple[int, int, int, int] = (48, 96, 192, 384)
    """channels at strides 4, 8, 16 and 32; even"""
    depths: tuple[int, int, int, int] = (3, 3, 15, 2)
    """blocks at strides 4, 8, 16 and 32, besides those that halve the resolution"""

    def __post_init__(self) -> None:
        if any(width < 4 or width % 4 for width in self.widths):
            raise GigamaskError(
                f"RepViT.widths must be positive multiples of 4 (got {self.widths})"
            )
        if any(depth < 1 for depth in self.depths):
            raise GigamaskError(f"RepViT.depths must be at least 1 (got {self.depths})")

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.models.repvit import RepViTEncoder

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
class Hiera(ImageEncoder):
    """The encoder of SAM 2: Hiera with a feature pyramid (`models.sam2.hiera`).

    The defaults are the sizes of SAM 2.1 tiny.
    """

    embed_dim: int = 96
    """channels at stride 4, doubled with each halving of the resolution"""
    num_heads: int = 1
    """attention heads at stride 4, doubled likewise; must divide embed_dim"""
    depths: tuple[int, int, int, int] = (1, 2, 7, 2)
    """blocks at strides 4, 8, 16 and 32"""
    global_attn_indexes: tuple[int, ...] = (5, 7, 9)
    """indexes of the blocks with global instead of windowed attention"""
    window_sizes: tuple[int, int, int, int] = (8, 4, 14, 7)
    """side of the attention windows at strides 4, 8, 16 and 32 in tokens"""
    position_size: int = 7
    """side of the grid of position embeddings, which are interpolated"""

    def __post_init__(self) -> None:
        check_counts(self, "embed_dim", "num_heads", "position_size")
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
        for name in ("depths", "window_sizes"):
            if any(value < 1 for value in getattr(self, name)):
                raise GigamaskError(f"Hiera.{name} must be at least 1 (got {getattr(self, name)})")
        if any(side % 2 for side in self.window_sizes[:3]):
            raise GigamaskError(
                "Hiera.window_sizes at strides 4, 8 and 16 must be even, since the resolution is "
                f"halved within windows (got {self.window_sizes})"
            )
        last = sum(self.depths) - 1
        if any(not 0 <= index <= last for index in self.global_attn_indexes):
            raise GigamaskError(
                f"Hiera.global_attn_indexes must be in 0 to {last} for depths {self.depths} (got "
                f"{self.global_attn_indexes})"
            )

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.models.sam2.hiera import HieraEncoder, HieraSizes

        sizes = (model.image_size, model.patch_size)
        hiera = HieraSizes(**vars(self))
        return HieraEncoder(
            hiera, sizes, model.embedding_dim, model.drop_path_rate, model.in_channels
        )

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of Hiera, from input to output."""
        from gigamask.models.sam2.hiera import HieraEncoder

        assert isinstance(encoder, HieraEncoder)
        return list(encoder.trunk.blocks)

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks."""
        return sum(self.depths)

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest stage."""
        return 8 * self.embed_dim


@dataclass(frozen=True)
class ConvPyramid(ImageEncoder):
    """Convolutions at strides 2, 4, 8 and 16 with a feature pyramid, for `WindowDecoder`.

    The embedding has stride 4: whether a token is inside the image, the channels of `width`, and
    those of stride 2, four tokens in each (`models.compact.encoder`).
    """

    widths: tuple[int, int, int, int] = (24, 48, 96, 128)
    """channels at strides 2, 4, 8 and 16; multiples of 8"""
    depths: tuple[int, int, int, int] = (0, 1, 1, 2)
    """residual blocks at strides 2, 4, 8 and 16"""
    width: int = 32
    """channels of the embedding at stride 4; a multiple of 4"""
    fine_width: int = 16
    """channels of the embedding at stride 2"""
    takes_input_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(self, "width", "fine_width")
        check_multiple(self, "width", 4, "the likeness to what is prompted")
        if any(width < 8 or width % 8 for width in self.widths):
            raise GigamaskError(
                f"ConvPyramid.widths must be positive multiples of 8 (got {self.widths})"
            )
        if any(depth < 0 for depth in self.depths):
            raise GigamaskError(f"ConvPyramid.depths must be at least 0 (got {self.depths})")

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        from gigamask.models.compact.encoder import ConvPyramidEncoder

        return ConvPyramidEncoder(
            self.widths, self.depths, self.width, self.fine_width, model.in_channels
        )

    def channels(self, model: Any) -> int:
        """Return the number of channels of the embedding."""
        return 1 + self.width + 4 * self.fine_width

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest stage."""
        return max(self.widths)


@dataclass(frozen=True)
class HuggingFaceBackbone(ImageEncoder):
    """A backbone of transformers, such as DINOv2, DINOv3, Hiera, Swin or ConvNeXt, with SAM's neck.

    It runs without dropout, and its batch norms keep their statistics (`models.backbone`).
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

    def __post_init__(self) -> None:
        if not self.backbone or self.architecture:
            return
        from gigamask.models.backbone import read_architecture

        stated = read_architecture(self.backbone, self.revision)
        for field, value in zip(("architecture", "pixel_mean", "pixel_std"), stated, strict=True):
            object.__setattr__(self, field, value)

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM, with random weights."""
        from gigamask.models.backbone import BackboneEncoder

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
        from gigamask.models.backbone import BackboneEncoder, load_pretrained

        if self.pretrained:
            assert isinstance(encoder, BackboneEncoder)
            load_pretrained(encoder, self.backbone, self.revision, self.architecture)

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of the backbone, from input to output."""
        from gigamask.models.backbone import blocks_of

        return blocks_of(encoder)

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks, or 0 without drop path."""
        from gigamask.models.backbone import count_blocks

        return count_blocks(self._architecture(model)) if model.drop_path_rate else 0

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest feature map."""
        from gigamask.models.backbone import feature_shapes

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
        from gigamask.models.backbone import with_channels

        return with_channels(self.architecture, model.in_channels)


def check_counts(config: object, *names: str) -> None:
    """Check that fields are at least 1.

    Args:
        config: A configuration.
        *names: Names of its fields.

    Raises:
        GigamaskError: A field is smaller.
    """
    for name in names:
        if (value := getattr(config, name)) < 1:
            raise GigamaskError(f"{type(config).__name__}.{name} must be at least 1 (got {value})")


def check_multiple(config: object, name: str, divisor: int, reason: str) -> None:
    """Check that a field is a multiple of a number.

    Args:
        config: A configuration.
        name: Name of its field.
        divisor: The number.
        reason: What requires it, for the error.

    Raises:
        GigamaskError: It is not.
    """
    if (value := getattr(config, name)) % divisor:
        raise GigamaskError(
            f"{type(config).__name__}.{name} must be a multiple of {divisor} for {reason} "
            f"(got {value})"
        )
