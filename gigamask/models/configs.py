"""The sizes of the models: what a `Sam`, a `MAE` or a `GroundingModel` is built from, and those that have a name.

Importable without torch, since recipes hold a spec.

Not here: the models themselves (`model.sam`, `model.mae`, `grounding.model`), reading a size off a checkpoint (`model.weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError
from gigamask.interfaces import ImageEncoder

if TYPE_CHECKING:
    from torch import nn

COLOURS = 6
"""Numbers that tell the colours under a mask: mean and deviation of three."""
PLACES = 8
"""Numbers that tell where a mask lies: its box's centre, width and height, its area's square root and logarithm, the share of its box that it
fills, and the logarithm of its box's width over its height."""


@dataclass(frozen=True)
class ViT(ImageEncoder):
    """SAM's vision transformer; its numbers are those of `SamConfig`."""

    def build(self, model: SamConfig) -> nn.Module:
        from gigamask.models.sam.image_encoder import ImageEncoderViT

        return ImageEncoderViT(model)

    def drop_path_blocks(self, model: SamConfig) -> int:
        return model.depth


@dataclass(frozen=True)
class SamConfig:
    """Every number that decides the model's shapes, its drop path and how it starts."""

    image_size: int = 1024
    """Side in pixels of the square the encoder sees."""
    patch_size: int = 16
    """Side in pixels of one token; divides the input side."""
    embed_dim: int = 768
    """Width of the image encoder."""
    depth: int = 12
    """Blocks of the image encoder."""
    num_heads: int = 12
    """Attention heads of each encoder block; divides the width."""
    window_size: int = 14
    """Side in tokens of the windows that the other blocks attend within."""
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    """Blocks that attend over the whole image."""
    drop_path_rate: float = 0.0
    """Rate at which the last block's residual branches are skipped in training; it grows linearly from 0 at the first block."""
    embedding_dim: int = 256
    """Channels of the image embedding, and width of the decoder."""
    decoder_num_heads: int = 8
    """Attention heads of the decoder; divides half the embedding's channels."""
    decoder_mlp: int = 2048
    """Hidden width of the decoder's MLPs."""
    iou_hidden: int = 256
    """Hidden width of the head that predicts IoU."""
    custom_init: bool = False
    """Start with what a small model must find out anyway: a prompt's place, colours, and masks that follow likeness (`model.start`)."""
    encoder: ImageEncoder = ViT()
    """The image encoder; dim, depth, heads, window, global_blocks and drop_path are SAM's ViT's."""

    def __post_init__(self) -> None:
        _check_counts(
            self,
            "embed_dim",
            "depth",
            "num_heads",
            "window_size",
            "embedding_dim",
            "decoder_num_heads",
            "decoder_mlp",
            "iou_hidden",
        )
        _check_patches(self)
        _check_heads(self, "embed_dim", "num_heads")
        if self.embed_dim % 4:
            raise GigamaskError(
                f"dim {self.embed_dim} is not a multiple of 4, which the position code needs; choose one that is"
            )
        if self.embedding_dim % 8:
            raise GigamaskError(
                f"embedding_dim {self.embedding_dim} is not a multiple of 8, which the mask upscaling needs; choose one that is"
            )
        if (self.embedding_dim // 2) % self.decoder_num_heads:
            raise GigamaskError(
                f"decoder_heads {self.decoder_num_heads} does not divide half of embedding_dim {self.embedding_dim}; choose heads that do"
            )
        if wrong := [block for block in self.global_attn_indexes if not 0 <= block < self.depth]:
            raise GigamaskError(
                f"global_blocks names block {wrong[0]}, but a depth of {self.depth} has blocks 0 to {self.depth - 1}; name one of these"
            )
        if not 0 <= self.drop_path_rate < 1:
            raise GigamaskError(
                f"drop_path is {self.drop_path_rate}; it is a rate and must lie in [0, 1)"
            )

    @property
    def embedding_size(self) -> int:
        """Side of the image embedding in tokens, E."""
        return self.image_size // self.patch_size

    @property
    def mask_size(self) -> int:
        """Side of the low-resolution masks, G: four times the embedding's."""
        return 4 * self.embedding_size


@dataclass(frozen=True)
class MAEConfig:
    """Every number of a masked autoencoder: its shapes, the share that is hidden, and what is to be guessed.

    Defaults are ViT-B's, and of MAE's published pre-training (He et al. 2021, arXiv 2111.06377).
    """

    image_size: int = 224
    """Side in pixels of the square the model sees."""
    patch_size: int = 16
    """Side in pixels of one patch; divides the input side. SAM's is 16."""
    embed_dim: int = 768
    """Width of the encoder."""
    depth: int = 12
    """Blocks of the encoder."""
    num_heads: int = 12
    """Attention heads of each encoder block; divides the width."""
    decoder_dim: int = 512
    """Width of the decoder, which training alone has."""
    decoder_depth: int = 8
    """Blocks of the decoder."""
    decoder_num_heads: int = 16
    """Attention heads of each decoder block; divides the decoder's width."""
    mask_ratio: float = 0.75
    """Share of an image's patches that are hidden."""
    normalize_pixels: bool = True
    """Guess a patch's pixels with its own mean taken away and over its own deviation, which makes the better encoder."""

    def __post_init__(self) -> None:
        _check_counts(
            self,
            "embed_dim",
            "depth",
            "num_heads",
            "decoder_dim",
            "decoder_depth",
            "decoder_num_heads",
        )
        _check_patches(self)
        for width, heads in (("embed_dim", "num_heads"), ("decoder_dim", "decoder_num_heads")):
            _check_heads(self, width, heads)
            if getattr(self, width) % 4:
                raise GigamaskError(
                    f"{width} {getattr(self, width)} is not a multiple of 4, which the positions need; choose one that is"
                )
        if not 0 < self.mask_ratio < 1:
            raise GigamaskError(
                f"mask_share is {self.mask_ratio}; it is a share and must lie in (0, 1)"
            )
        if not 0 < self.visible < self.patches:
            raise GigamaskError(
                f"mask_share {self.mask_ratio} of {self.patches} patches leaves {self.visible} visible; choose one that hides some, not all"
            )

    @property
    def embedding_size(self) -> int:
        """Patches along a side of the image."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Patches of an image, P."""
        return self.embedding_size**2

    @property
    def visible(self) -> int:
        """Patches of an image that the encoder sees."""
        return self.patches - round(self.patches * self.mask_ratio)


@dataclass(frozen=True)
class GroundingModelConfig:
    """Every number that decides the relevance network's shapes, and so what it wants to know of each mask, in this order: the image embedding's mean
    under it; the mean and the deviation of red, green and blue under it; where it lies; its outline, within its box."""

    embedding_dim: int = 256
    """Channels of the segmenter's image embedding."""
    text_dim: int = 384
    """Width of the text encoder's token features."""
    dim: int = 128
    """Width of the network."""
    layers: int = 3
    """How often masks read the text and each other."""
    heads: int = 4
    """Attention heads; divides the width."""
    crop_side: int = 16
    """Side of the grid that a mask's outline is given on."""

    def __post_init__(self) -> None:
        _check_counts(
            self, "embedding_dim", "text_dim", "dim", "layers", "heads", "crop_side"
        )
        _check_heads(self, "dim", "heads")

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """How many numbers each part of a mask's description has."""
        return self.embedding_dim, COLOURS, PLACES, self.crop_side**2


def _check_counts(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise GigamaskError(
                f"{name} is {getattr(config, name)}; it counts something and must be at least 1"
            )


def _check_patches(config: SamConfig | MAEConfig) -> None:
    _check_counts(config, "image_size", "patch_size")
    if config.image_size % config.patch_size:
        near = max(
            config.patch_size, round(config.image_size / config.patch_size) * config.patch_size
        )
        raise GigamaskError(
            f"input_side {config.image_size} is not a multiple of patch {config.patch_size}; the nearest that is: {near}"
        )


def _check_heads(config: object, width: str, heads: str) -> None:
    if getattr(config, width) % getattr(config, heads):
        raise GigamaskError(
            f"{width} {getattr(config, width)} is not a multiple of {heads} {getattr(config, heads)}; choose {heads} that divide it"
        )


def vit_b() -> SamConfig:
    """Returns SAM's ViT-B: 93.7 M parameters."""
    return SamConfig()


def vit_l() -> SamConfig:
    """Returns SAM's ViT-L: 312.3 M parameters."""
    return SamConfig(embed_dim=1024, depth=24, num_heads=16, global_attn_indexes=(5, 11, 17, 23))


def vit_h() -> SamConfig:
    """Returns SAM's ViT-H: 641.1 M parameters."""
    return SamConfig(embed_dim=1280, depth=32, num_heads=16, global_attn_indexes=(7, 15, 23, 31))


def tiny() -> SamConfig:
    """Returns a size that learns on two CPU cores in minutes: 128 px, 0.7 M parameters.

    Patch 8 and two decoder heads because clicks did not help with patch 16, and four heads of eight channels learned a little less.
    """
    return SamConfig(
        image_size=128,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=3,
        window_size=8,
        global_attn_indexes=(1, 3),
        embedding_dim=64,
        decoder_num_heads=2,
        decoder_mlp=256,
        iou_hidden=64,
        custom_init=True,
    )


def mae_vit_b() -> MAEConfig:
    """Returns MAE's ViT-B: an encoder of 85.8 M parameters, and a decoder of 26.1 M that is left behind."""
    return MAEConfig()


def mae_vit_l() -> MAEConfig:
    """Returns MAE's ViT-L: an encoder of 303.3 M parameters, and a decoder of 26.2 M."""
    return MAEConfig(embed_dim=1024, depth=24, num_heads=16)


def mae_vit_h() -> MAEConfig:
    """Returns ViT-H, an encoder of 630.9 M parameters, at patch 16 as SAM's; MAE's published one has patch 14."""
    return MAEConfig(embed_dim=1280, depth=32, num_heads=16)


def mae_tiny() -> MAEConfig:
    """Returns the size that an encoder of `tiny()` starts from: 128 px at patch 8."""
    return MAEConfig(
        image_size=128,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=3,
        decoder_dim=64,
        decoder_depth=2,
        decoder_num_heads=2,
    )
