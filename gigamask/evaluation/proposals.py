"""Automatic masks held against the truth: how many there are, how many would pass SAM's thresholds, and how much of the truth is among them.

Enters images, one by one; leaves numbers by name. Proposals are made and ranked as the SAM paper does for AR@1000 (section 7.3, appendix D.3): no
filter, boxes thinned out at 0.9, and by the mean of predicted IoU and stability.

Not here: the masks themselves (`predict.automatic`), the statistics (`average_precision`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gigamask.evaluation import coco_ap
from gigamask.evaluation.embedded_images import EmbeddedImage
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.models.sam.sam import Sam

DEFAULTS = AutomaticMaskConfig()


def proposals(points_per_side: int) -> AutomaticMaskConfig:
    """Returns the paper's settings for proposals, which took 64 points a side."""
    return AutomaticMaskConfig(
        points_per_side=points_per_side,
        pred_iou_thresh=0.0,
        stability_score_thresh=0.0,
        box_nms_thresh=0.9,
    )


@dataclass(frozen=True)
class ProposalRecall:
    """Everything that is found in the images it is shown, held against their truth: what is found, the IoU of the best mask found with each of the
    truth, and which masks pass SAM's default thresholds.
    """

    settings: AutomaticMaskConfig
    found: list[coco_ap.ImageDetections] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    passing: list[np.ndarray] = field(default_factory=list)

    def look(self, model: Sam, scene: EmbeddedImage, numbers: np.ndarray) -> None:
        """Segments everything in one image."""
        masks = SamAutomaticMaskGenerator(model=model, **self.settings.told()).find(scene.pixels)
        truth = scene.entry.masks[numbers]
        self.passing.append(
            (masks.predicted_iou > DEFAULTS.pred_iou_thresh)
            & (masks.stability_score >= DEFAULTS.stability_score_thresh)
        )
        self.best.extend(truth.iou(masks.masks).max(1, initial=0).tolist())
        rank = (masks.predicted_iou.astype(np.float64) + np.nan_to_num(masks.stability_score)) / 2
        self.found.append(coco_ap.ImageDetections(truth, masks.masks, rank))

    @staticmethod
    def joined(parts: "Sequence[ProposalRecall]") -> "ProposalRecall":
        """Returns all parts' in order."""
        return ProposalRecall(
            parts[0].settings,
            *(
                [each for part in parts for each in getattr(part, name)]
                for name in ("found", "best", "passing")
            ),
        )

    def summary(self) -> dict:
        """Returns recall and precision of everything found, masks an image, the share that passes, and the mean of the best IoUs."""
        statistics = coco_ap.coco_ap(self.found, coco_ap.PROPOSALS)
        everything = np.concatenate(self.passing) if self.passing else np.zeros(0, bool)
        return statistics | {
            "masks_an_image": len(everything) / len(self.found) if self.found else None,
            "passing": float(everything.mean()) if len(everything) else None,
            "best_iou": float(np.mean(self.best)) if self.best else None,
            "settings": self.settings.told(),
        }


def table(result: dict) -> str:
    """Returns the numbers as lines."""
    if not result["images"]:
        return "automatic masks: no image to look at"
    passing, best = (f"{100 * (result[name] or 0.0):.1f} %" for name in ("passing", "best_iou"))
    asked = f"{result['settings']['points_per_side']} points a side"
    head = f"automatic masks: {result['masks_an_image']:.1f} an image from {asked}, {passing} pass SAM's thresholds"
    return f"{head}; the best one has a mean IoU of {best} with each mask of the truth\n{coco_ap.table(result)}"
