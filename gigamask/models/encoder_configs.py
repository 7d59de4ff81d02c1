"""Configurations of the built-in image encoders, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gigamask.errors import GigamaskError, check_counts, check_range
from gigamask.interfaces import ImageEncoder

if TYPE_CHECKING:
    from torch import nn


def _build_vit(model: Any, sizes: Any, **options: Any) -> nn.Module:
    """Return a vision transformer.

    Args:
        model: Configuration of the model.
        sizes: What states width, depth and heads.
        options: Further arguments of `ImageEncoderViT`.
    """
    from gigamask.models.sam.image_encoder import ImageEncoderViT

    return ImageEncoderViT(
        img_size=model.image_size,
        patch_size=model.patch_size,
        embed_dim=sizes.embed_dim,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        out_chans=model.embedding_dim,
        drop_path_rate=model.drop_path_rate,
        in_chans=model.in_channels,
        **options,
    )


@dataclass(frozen=True)
class ViT(ImageEncoder):
    """SAM's vision transformer, sized by `SamConfig`."""

    initializes_itself: ClassVar[bool] = False
    encodes_rectangles: ClassVar[bool] = True

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        return _build_vit(
            model,
            model,
            window_size=model.window_size,
            global_attn_indexes=model.global_attn_indexes,
        )

    def plain_vit(self, model: Any) -> tuple[Any, str]:
        """Return the model's sizes, and what sets them."""
        return model, "--model"

    def custom_init(self, encoder: Any) -> None:
        """Change initial weights for a small model."""
        encoder.init_color_passthrough()

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
    initializes_itself: ClassVar[bool] = False
    encodes_rectangles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(self, "embed_dim", "depth", "num_heads")
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
        check_multiple(self, "embed_dim", 4, "the position embedding")

    def build(self, model: Any) -> nn.Module:
        """Build the image encoder of a SAM."""
        blocks = range(self.depth)
        return _build_vit(model, self, global_attn_indexes=blocks, use_rel_pos=False)

    def plain_vit(self, model: Any) -> tuple[Any, str]:
        """Return the encoder's sizes, and what sets them."""
        return self, "--model.encoder"

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
    initializes_itself: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    decoder: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        check_counts(self, "width", "fine_width")
        check_multiple(self, "width", 4, "the likeness to what is prompted")
        if any(width < 8 or width % 8 for width in self.widths):
            raise GigamaskError(
                f"ConvPyramid.widths must be positive multiples of 8 (got {self.widths})"
            )
        for depth in self.depths:
            check_range("ConvPyramid.depths", depth, 0)

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
