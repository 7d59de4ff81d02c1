"""Scores of automatic masks against annotated masks: recall, fraction that passes, best IoU.

Proposals are generated and ranked as for AR@1000 in the SAM paper (section 7.3, appendix D.3): no
filters, box NMS at an IoU of 0.9, ranked by the mean of predicted IoU and stability.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from jaxtyping import Int64

from gigamask.distributed.precision import PrecisionName
from gigamask.distributed.world import World
from gigamask.evaluation import coco_ap
from gigamask.evaluation.embedded_images import EmbeddedImage
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.masks.boxes import nms
from gigamask.masks.rle import RLEMasks
from gigamask.models.promptable import PromptableModel

CLASS_NMS = AutomaticMaskConfig().box_nms_thresh
"""Box IoU above which only the best of several classified masks is kept, as in 'segment'."""


def proposal_config(
    points_per_side: int, tile: int | None = None, halo: int | None = None
) -> AutomaticMaskConfig:
    """Return the paper's settings for proposals; the paper uses 64 points per side.

    Args:
        points_per_side: Points along each side of the image, or of each tile.
        tile: Side in pixels of the tiles of larger images; None: whole images, as in the paper.
        halo: Overlap of neighboring tiles in pixels; None: an eighth of a tile.
    """
    return AutomaticMaskConfig(
        points_per_side=points_per_side,
        pred_iou_thresh=0.0,
        stability_score_thresh=0.0,
        box_nms_thresh=0.9,
        tile=tile,
        halo=halo,
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
    classified: list[coco_ap.ImageDetections] = field(default_factory=list)
    """the same with classes, if the model has them, and without duplicates"""
    class_names: list[str] = field(default_factory=list)
    """names of the model's classes, once an image is scored"""

    def update(
        self, model: PromptableModel, image: EmbeddedImage, mask_indices: np.ndarray
    ) -> None:
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
        self.detections.append(coco_ap.ImageDetections(truth, proposals.masks, proposals.certainty))
        if proposals.class_scores is not None:
            self.class_names[:] = model.config.class_names
            classes = image.annotation.classes(model.config.class_names)[mask_indices]
            self.classified.append(classify(proposals, truth, classes))

    @staticmethod
    def concatenate(parts: "Sequence[ProposalRecall]") -> "ProposalRecall":
        """Return the images of all parts in order."""
        return ProposalRecall(
            parts[0].settings,
            [image for part in parts for image in part.detections],
            [iou for part in parts for iou in part.best_ious],
            [image for part in parts for image in part.passing],
            classified=[image for part in parts for image in part.classified],
            class_names=max((part.class_names for part in parts), key=len),
        )

    def gather(self, world: World) -> "ProposalRecall":
        """Return the images of all processes."""
        return ProposalRecall.concatenate(world.gather(self))

    def summary(self) -> dict:
        """Return recall, masks per image, fraction that passes and mean best IoU, for JSON.

        With classes, `classes` has the average precision over them and of each.
        """
        statistics = coco_ap.coco_metrics(self.detections, coco_ap.PROPOSALS)
        passing = np.concatenate(self.passing) if self.passing else np.zeros(0, bool)
        return statistics | {
            "masks_an_image": len(passing) / len(self.detections) if self.detections else None,
            "passing": float(passing.mean()) if len(passing) else None,
            "best_iou": float(np.mean(self.best_ious)) if self.best_ious else None,
            "settings": asdict(self.settings),
            **({"classes": self._class_summary()} if self.classified else {}),
        }

    def _class_summary(self) -> dict:
        """Return COCO's statistics over classes, and those of each class by its name."""
        statistics = coco_ap.coco_metrics(self.classified)
        by_class = statistics.pop("by_class", {})
        return statistics | {
            "by_class": {self.class_names[number]: each for number, each in by_class.items()},
            "score": f"class probability x predicted IoU, after box NMS at {CLASS_NMS}",
        }


def classify(
    proposals: MaskProposals, truth: RLEMasks, classes: Int64[np.ndarray, "n"]
) -> coco_ap.ImageDetections:
    """Return annotated masks that have a class, and generated masks with their likeliest class.

    Of generated masks that overlap, whatever their classes, the one with the highest score is kept.

    Args:
        proposals: Generated masks with class scores.
        truth: Annotated masks.
        classes: Class of each, -1 for none.
    """
    assert proposals.class_scores is not None
    scores = proposals.class_scores.max(1) * np.nan_to_num(proposals.predicted_iou)
    kept = proposals[nms(proposals.boxes, scores, CLASS_NMS)]
    assert kept.class_scores is not None
    return coco_ap.ImageDetections(
        truth[np.flatnonzero(classes >= 0)],
        kept.masks,
        kept.class_scores.max(1) * np.nan_to_num(kept.predicted_iou),
        truth_classes=classes[classes >= 0],
        detection_classes=kept.class_scores.argmax(1),
    )


def table(summary: dict) -> str:
    """Format a summary as lines of text."""
    if not summary["images"]:
        return "automatic masks: no image to evaluate"
    passing, best = (f"{summary[name] or 0.0:.3f}" for name in ("passing", "best_iou"))
    points = summary["settings"]["points_per_side"]
    return "\n".join(
        [
            f"automatic masks: {summary['masks_an_image']:.1f} per image from {points} points per "
            f"side, of which {passing} pass the default thresholds; mean best IoU {best} per "
            "annotated mask",
            coco_ap.table(summary),
            *([class_table(summary["classes"])] if "classes" in summary else []),
        ]
    )


def class_table(summary: dict) -> str:
    """Format the average precision over classes and of each class."""
    rows = [
        f"{name[:30]:32}{scores['AP']:6.3f}{scores['AP50']:8.3f}"
        for name, scores in summary["by_class"].items()
    ]
    return "\n".join(["with classes: " + coco_ap.table(summary), f"{'class':34}AP    AP50", *rows])
