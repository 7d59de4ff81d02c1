"""Parameters of `SamAutomaticMaskGenerator` that are flags; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.errors import GigamaskError, check_range

if TYPE_CHECKING:
    from gigamask.models.configs import Decoder

MIN_TILE_PX = 32
"""Smallest side of a tile in pixels."""
MAX_OFFSET = 1e6
"""Far above any logit; larger offsets would overflow."""


@dataclass(frozen=True, kw_only=True)
class AutomaticMaskConfig:
    """Point grid, crops and filters of automatic masks; names and defaults are SAM's.

    The two thresholds are by default those of the model's decoder: SAM's are too strict for models
    that are less certain.
    """

    needs_flags: ClassVar = {
        "crop_nms_thresh": "crop-n-layers or tile or min-mask-region-area",
        "crop_overlap_ratio": "crop-n-layers",
        "crop_n_points_downscale_factor": "crop-n-layers",
    }

    points_per_side: int | None = 32
    """points along each side of the image; None with point_grids"""
    points_per_batch: int = 64
    """points per pass of the mask decoder; affects speed and memory only"""
    pred_iou_thresh: float | None = None
    """keep masks with a predicted IoU above this; 0 keeps all; default: 0.88 for SAM's decoder, 0.4
    for the decoder of compact"""
    stability_score_thresh: float | None = None
    """keep masks with at least this stability score, the IoU between their logits thresholded high
    and low; 0 keeps all; default: 0.95 for SAM's decoder, 0.4 for the decoder of compact"""
    stability_score_offset: float = 1.0
    """distance of the stability score's two thresholds from the mask threshold, in logits"""
    box_nms_thresh: float = 0.7
    """box IoU above which only the best mask of a crop is kept"""
    crop_n_layers: int = 0
    """layers of crops besides the whole image; layer i has 2^i crops along each side"""
    crop_nms_thresh: float = 0.7
    """box IoU above which only the mask of the smaller crop is kept"""
    crop_overlap_ratio: float = 512 / 1500
    """overlap of the crops of layer 1 as a fraction of the short side; halves with each layer"""
    crop_n_points_downscale_factor: int = 1
    """points_per_side is divided by this to the power of the layer"""
    min_mask_region_area: int = 0
    """area in pixels below which holes are filled and islands removed; 0 disables"""
    tile: int | None = None
    """side in pixels of the tiles in which larger images are processed, each with its own points;
    default: the image is processed as a whole"""
    halo: int | None = None
    """overlap of neighboring tiles in pixels, at most half of a tile; default: an eighth of it"""

    def __post_init__(self) -> None:
        minima = {
            "points_per_side": 1,
            "points_per_batch": 1,
            "crop_n_layers": 0,
            "crop_n_points_downscale_factor": 1,
            "min_mask_region_area": 0,
        }
        for name, minimum in minima.items():
            check_range(name, getattr(self, name), minimum)
        for name in (
            *("pred_iou_thresh", "stability_score_thresh"),
            *("box_nms_thresh", "crop_nms_thresh"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                self.refuse(f"{name} must be an IoU in [0, 1] (got {value})")
        check_range("stability_score_offset", self.stability_score_offset, 0, MAX_OFFSET)
        if not 0 <= self.crop_overlap_ratio < 1:
            raise GigamaskError(
                f"crop_overlap_ratio must be in [0, 1) (got {self.crop_overlap_ratio})"
            )
        if self.points_per_side is not None and self.points_in_layer(self.crop_n_layers) < 1:
            raise GigamaskError(
                f"crop_n_points_downscale_factor {self.crop_n_points_downscale_factor} leaves no "
                f"point in crop layer {self.crop_n_layers} of points_per_side "
                f"{self.points_per_side}: lower it"
            )

        check_tiles(self.tile, self.halo)
        if self.tile and self.crop_n_layers:
            raise GigamaskError(
                f"crop_n_layers {self.crop_n_layers} cannot be combined with tile {self.tile}: "
                "leave one of them out"
            )

    def refuse(self, message: str) -> None:
        """Raise an error about a parameter."""
        raise GigamaskError(message)

    def thresholds(self, decoder: Decoder) -> tuple[float, float]:
        """Return the thresholds of predicted IoU and stability for the masks of a decoder."""
        iou, stability = self.pred_iou_thresh, self.stability_score_thresh
        return (
            decoder.pred_iou_thresh if iou is None else iou,
            decoder.stability_score_thresh if stability is None else stability,
        )

    def points_in_layer(self, layer: int) -> int:
        """Return the number of points along a side of a crop; layer 0 is the whole image."""
        return int((self.points_per_side or 0) / self.crop_n_points_downscale_factor**layer)


def check_tiles(tile: int | None, halo: int | None) -> int:
    """Check the side of tiles, and return their overlap.

    Args:
        tile: Side of a tile in pixels; None: there are no tiles.
        halo: Overlap of neighboring tiles in pixels; None: an eighth of a tile.

    Raises:
        GigamaskError: A tile is too small, the halo is more than half of it, or there is no tile.
    """
    if tile is None:
        if halo is not None:
            raise GigamaskError(f"halo {halo} is the overlap of tiles: set their side, too")
        return 0
    check_range("tile", tile, MIN_TILE_PX)
    halo = tile // 8 if halo is None else halo
    check_range(f"halo of tile {tile}", halo, 0, tile // 2)
    return halo
