"""Scores of automatic masks against annotated masks: recall, fraction that passes, best IoU.

Proposals are generated and ranked as for AR@1000 in the SAM paper (section 7.3, appendix D.3): no
filters, box NMS at an IoU of 0.9, ranked by the mean of predicted IoU and stability.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from gigamask.distributed.precision import PrecisionName
from gigamask.distributed.world import World
from gigamask.evaluation import coco_ap
from gigamask.evaluation.embedded_images import EmbeddedImage
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.models.sam.sam import Sam


def proposal_config(points_per_side: int) -> AutomaticMaskConfig:
    """Return the paper's settings for proposals; the paper uses 64 points per side."""
    return AutomaticMaskConfig(
        points_per_side=points_per_side,
        pred_iou_thresh=0.0,
        stability_score_thresh=0.0,
        box_nms_thresh=0.9,
    )


@dataclass(frozen=True)
class ProposalRecall:
    """Recall of automatic masks, image by image."""

    settings: AutomaticMaskConfig
    detections: list[coco_ap.ImageDetections] = field(default_factory=list)
    """annotated and generated masks of each image"""
    best_ious: list[float] = field(default_factory=list)
    """highest IoU of a generated mask with each annotated mask"""
    passing: list[np.ndarray] = field(default_factory=list)
    """whether each generated mask passes the default thresholds of the model's decoder"""
    precision: PrecisionName = "auto"
    """number format of the model"""

    def update(self, model: Sam, image: EmbeddedImage, mask_indices: np.ndarray) -> None:
        """Generate the masks of one image and add their scores.

        Args:
            model: Model that generates the masks.
            image: The image.
            mask_indices: Indices of the annotated masks to find.
        """
        generator = SamAutomaticMaskGenerator(
            model, precision=self.precision, **vars(self.settings)
        )
        proposals = generator.generate_proposals(image.pixels)
        truth = image.annotation.masks[mask_indices]
        least_iou, least_stability = AutomaticMaskConfig().thresholds(model.config.decoder)
        self.passing.append(
            (proposals.predicted_iou > least_iou) & (proposals.stability_score >= least_stability)
        )
        self.best_ious.extend(truth.iou(proposals.masks).max(1, initial=0).tolist())
        stability = np.nan_to_num(proposals.stability_score)
        scores = (proposals.predicted_iou.astype(np.float64) + stability) / 2
        self.detections.append(coco_ap.ImageDetections(truth, proposals.masks, scores))

    @staticmethod
    def concatenate(parts: "Sequence[ProposalRecall]") -> "ProposalRecall":
        """Return the images of all parts in order."""
        return ProposalRecall(
            parts[0].settings,
            [image for part in parts for image in part.detections],
            [iou for part in parts for iou in part.best_ious],
            [image for part in parts for image in part.passing],
        )

    def gather(self, world: World) -> "ProposalRecall":
        """Return the images of all processes."""
        return ProposalRecall.concatenate(world.gather(self))

    def summary(self) -> dict:
        """Return recall, masks per image, fraction that passes and mean best IoU, for JSON."""
        statistics = coco_ap.coco_metrics(self.detections, coco_ap.PROPOSALS)
        passing = np.concatenate(self.passing) if self.passing else np.zeros(0, bool)
        return statistics | {
            "masks_an_image": len(passing) / len(self.detections) if self.detections else None,
            "passing": float(passing.mean()) if len(passing) else None,
            "best_iou": float(np.mean(self.best_ious)) if self.best_ious else None,
            "settings": asdict(self.settings),
        }


def table(summary: dict) -> str:
    """Format a summary as lines of text."""
    if not summary["images"]:
        return "automatic masks: no image to evaluate"
    passing, best = (f"{100 * (summary[name] or 0.0):.1f} %" for name in ("passing", "best_iou"))
    points = summary["settings"]["points_per_side"]
    return "\n".join(
        [
            f"automatic masks: {summary['masks_an_image']:.1f} per image from {points} points per "
            f"side, {passing} pass the default thresholds; mean best IoU {best} per annotated mask",
            coco_ap.table(summary),
        ]
    )
