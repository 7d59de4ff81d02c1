"""How everything in an image is segmented: the numbers of the reference code's `SamAutomaticMaskGenerator`, under its names.

Importable without torch, since the command line makes flags of them.

Not here: what is done with them (`predict.automatic`).
"""

from dataclasses import dataclass, fields

from gigamask.errors import GigamaskError


@dataclass(frozen=True, kw_only=True)
class AutomaticMaskConfig:
    """A grid of points is asked over the image, and over crops of it; what is good and no repetition stays."""

    points_per_side: int | None = 32
    """points along each side of the image: its square is asked. None where grids are given"""
    points_per_batch: int = 64
    """points asked at once; a matter of speed and memory alone"""
    pred_iou_thresh: float = 0.88
    """a mask's predicted IoU must be above this; 0 lets all pass"""
    stability_score_thresh: float = 0.95
    """the IoU of the mask cut above and below the usual threshold must be at least this; 0 lets all pass"""
    stability_score_offset: float = 1.0
    """how far above and below, in logits"""
    box_nms_thresh: float = 0.7
    """of masks from one crop whose boxes have a greater IoU the best stays"""
    crop_n_layers: int = 0
    """layers of crops besides the whole image: layer i has 2 to the power i of them along each side"""
    crop_nms_thresh: float = 0.7
    """of masks from different crops whose boxes have a greater IoU that of the smaller crop stays"""
    crop_overlap_ratio: float = 512 / 1500
    """how far crops of the first layer overlap, as a share of the image's short side; half of it in the next, and so on"""
    crop_n_points_downscale_factor: int = 1
    """points along a side are divided by this to the power of the layer"""
    min_mask_region_area: int = 0
    """holes and islands of a mask with fewer pixels are filled and removed; 0 leaves them"""

    def __post_init__(self) -> None:
        least = {
            "points_per_side": 1,
            "points_per_batch": 1,
            "crop_n_layers": 0,
            "crop_n_points_downscale_factor": 1,
            "min_mask_region_area": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise GigamaskError(
                    f"{name} is {value}; it counts something and must be at least {limit}"
                )
        for name in ("box_nms_thresh", "crop_nms_thresh"):
            if not 0 <= getattr(self, name) <= 1:
                raise GigamaskError(
                    f"{name} is {getattr(self, name)}; it is an IoU and must lie in [0, 1]"
                )
        if not 0 <= self.crop_overlap_ratio < 1:
            raise GigamaskError(
                f"crop_overlap_ratio is {self.crop_overlap_ratio}; it is a share and must lie in [0, 1)"
            )
        if self.points_per_side is not None and self.points_in(self.crop_n_layers) < 1:
            last = f"{self.points_per_side} points along a side, divided by {self.crop_n_points_downscale_factor} in each of {self.crop_n_layers} layers"
            raise GigamaskError(
                f"{last}, leave none for the last; lower crop_n_points_downscale_factor"
            )

    def points_in(self, layer: int) -> int:
        """Returns how many points lie along a side of a crop in that layer, 0 being the whole image."""
        return int((self.points_per_side or 0) / self.crop_n_points_downscale_factor**layer)

    def told(self) -> dict:
        """Returns the numbers by name, as they are written beside what was made with them."""
        return {each.name: getattr(self, each.name) for each in fields(AutomaticMaskConfig)}
