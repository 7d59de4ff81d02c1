"""Sizes of the grounding model, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from gigamask.errors import check_counts
from gigamask.models.configs import ModelConfig
from gigamask.models.encoder_configs import check_multiple

COLOR_FEATURES = 6
"""Number of color features of a mask: mean and standard deviation of red, green and blue."""
GEOMETRY_FEATURES = 8
"""Number of geometry features of a mask: center, width and height of its box, square root and
logarithm of its area, fraction of the box that it fills, and logarithm of the box's width over its
height."""


@dataclass(frozen=True)
class GroundingModelConfig(ModelConfig):
    """Sizes of the grounding model.

    A mask's features are, in this order: mean image embedding under the mask, mean and standard
    deviation of its colors, its geometry, and its outline within its box.
    """

    embedding_dim: int = 256
    """channels of the segmenter's image embedding"""
    text_dim: int = 384
    """width of the text encoder's token features"""
    dim: int = 128
    """width of the model"""
    layers: int = 3
    """number of layers in which masks attend to the text and to each other"""
    heads: int = 4
    """attention heads; must divide dim"""
    crop_side: int = 16
    """side of the grid that represents a mask's outline within its box"""
    model = "gigamask.plugins.grounding.model:GroundingModel"

    def __post_init__(self) -> None:
        check_counts(self, "embedding_dim", "text_dim", "dim", "layers", "heads", "crop_side")
        check_multiple(self, "dim", self.heads, "heads")

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Number of features of each kind: embedding, color, geometry, outline."""
        return self.embedding_dim, COLOR_FEATURES, GEOMETRY_FEATURES, self.crop_side**2

    def use_instead(self, weights: str) -> str:
        """Say what to do where a SAM's weights are needed."""
        return (
            f"{weights}: a grounding model, which predicts no masks; use the SAM it was trained "
            f"on, or run: gigamask ask {weights}"
        )
