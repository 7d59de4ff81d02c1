"""Configurations of SAM 2.1's image models, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from gigamask.errors import GigamaskError, check_counts, check_range
from gigamask.interfaces import ImageEncoder
from gigamask.models.configs import Decoder, SamConfig
from gigamask.models.encoder_configs import check_multiple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


@dataclass(frozen=True)
class Hiera(ImageEncoder):
    """The encoder of SAM 2: Hiera with a feature pyramid (`hiera`).

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
    initializes_itself: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_counts(self, "embed_dim", "num_heads", "position_size", "depths", "window_sizes")
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
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
        from gigamask.plugins.sam2.hiera import HieraEncoder, HieraSizes

        sizes = (model.image_size, model.patch_size)
        hiera = HieraSizes(**vars(self))
        return HieraEncoder(
            hiera, sizes, model.embedding_dim, model.drop_path_rate, model.in_channels
        )

    def blocks(self, encoder: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of Hiera, from input to output."""
        from gigamask.plugins.sam2.hiera import HieraEncoder

        return list(cast(HieraEncoder, encoder).trunk.blocks)

    def drop_path_blocks(self, model: Any) -> int:
        """Return the number of blocks."""
        return sum(self.depths)

    def max_width(self, model: Any) -> int:
        """Return the channels of the widest stage."""
        return 8 * self.embed_dim


@dataclass(frozen=True)
class Sam2Decoder(Decoder):
    """SAM 2's mask decoder for images, sized by `SamConfig` (`mask_decoder`)."""

    dynamic_multimask: bool = True
    """in evaluation, replace a single mask that is not stable by the best of three"""
    stability_delta: float = 0.05
    """shift of the threshold by which the stability of a single mask is measured, in logits"""
    stability_threshold: float = 0.98
    """smallest IoU of the masks at both thresholds for a single mask to be stable"""
    pred_iou_thresh: ClassVar[float] = 0.8
    """threshold of the predicted IoU of automatic masks; SAM 2's"""
    model: ClassVar[str] = "gigamask.plugins.sam2.model:Sam2"
    family: ClassVar[str] = "gigamask.plugins.sam2.family:SAM2"
    stretches: ClassVar[bool] = True
    trains_embedding: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("Sam2Decoder.stability_delta", self.stability_delta, 0)
        check_range("Sam2Decoder.stability_threshold", self.stability_threshold, 0, 1)

    def check(self, model: SamConfig) -> None:
        """Check that the rest of a model fits the decoder."""
        if not isinstance(model.encoder, Hiera):
            raise GigamaskError(
                f"the decoder sam2 needs --model.encoder hiera (got {model.encoder_name}); use "
                "--model.decoder sam"
            )

    def embedding_channels(self, model: SamConfig) -> int:
        """Return the channels of the encoder and of the finer features."""
        return model.encoder.channels(model) + 3 * model.embedding_dim

    def unpublished(self, model: SamConfig) -> str:
        """Return "": other libraries load SAM 2's image model."""
        return ""


def _with_encoder(encoder: Hiera) -> SamConfig:
    return SamConfig(stretch=True, encoder=encoder, decoder=Sam2Decoder())


def sam2_tiny() -> SamConfig:
    """Return the configuration of SAM 2.1 tiny for images: 31.4 M parameters."""
    return _with_encoder(Hiera())


def sam2_small() -> SamConfig:
    """Return the configuration of SAM 2.1 small for images: 38.5 M parameters."""
    encoder = Hiera(depths=(1, 2, 11, 2), global_attn_indexes=(7, 10, 13))
    return _with_encoder(encoder)


def sam2_base_plus() -> SamConfig:
    """Return the configuration of SAM 2.1 base plus for images: 73.3 M parameters."""
    encoder = Hiera(
        embed_dim=112,
        num_heads=2,
        depths=(2, 3, 16, 3),
        global_attn_indexes=(12, 16, 20),
        position_size=14,
    )
    return _with_encoder(encoder)


def sam2_large() -> SamConfig:
    """Return the configuration of SAM 2.1 large for images: 216.9 M parameters."""
    encoder = Hiera(
        embed_dim=144,
        num_heads=2,
        depths=(2, 6, 36, 4),
        global_attn_indexes=(23, 33, 43),
        window_sizes=(8, 4, 16, 8),
    )
    return _with_encoder(encoder)
