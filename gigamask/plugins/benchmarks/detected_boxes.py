"""Mask AP for given boxes: a detector's boxes prompt masks, which take their scores and classes.

This is how SAM and its successors are scored as instance segmenters (Kirillov et al. 2023, section
7.4). They differ in the mask that counts as the answer, which `BoxProtocol` names.
"""

from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from jaxtyping import Float

from gigamask.evaluation import coco_ap
from gigamask.evaluation.coco_ap import ImageDetections
from gigamask.evaluation.embedded_images import EmbeddedImage
from gigamask.masks.devices import widest
from gigamask.masks.rle import RLEMasks
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.benchmarks.coco_data import CocoData
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt
from gigamask.types import Targets

ANSWERS = {
    "confident": "of three masks that with the highest predicted IoU, as EfficientViT-SAM's code",
    "first_token": "the single mask, of the first token, as EdgeSAM's code",
    "refined": "the single mask for the box and the most confident of three masks, as the SAM "
    "paper, appendix D.4",
}


@dataclass(frozen=True)
class BoxProtocol:
    """Settings that the scores of masks of detected boxes depend on; saved with every result."""

    answer: str = "confident"
    """the mask that counts, one of `ANSWERS`"""
    box: str = "x, y, x + width, y + height as detected, times the scale"
    score: str = "that of the detected box"
    resolution: str = "stored image size, logits upsampled bilinearly, threshold 0"


@dataclass(frozen=True)
class BoxMasks:
    """Masks of detected boxes, image by image."""

    data: CocoData
    protocol: BoxProtocol = BoxProtocol()
    images: list[ImageDetections] = field(default_factory=list)
    """annotated and predicted masks of each image"""

    @property
    def ap_protocol(self) -> coco_ap.CocoProtocol:
        """LVIS's protocol if the annotations are LVIS's, otherwise COCO's."""
        return coco_ap.CocoProtocol() if self.data.frequencies is None else coco_ap.LVIS

    def update(
        self, model: PromptableModel, image: EmbeddedImage, mask_indices: np.ndarray
    ) -> None:
        """Predict the masks of the boxes of one image.

        Boxes that cannot count in LVIS are left out: of classes that were not looked for in the
        image, and beyond the best 300.

        Args:
            model: Model that predicts the masks.
            image: The image.
            mask_indices: Not used: all annotated masks of the image are to be found.
        """
        instances = image.annotation.instances
        assert instances is not None  # images of `CocoData` have them
        boxes, known = self.data.detected(instances.image_id), self.data.labels[instances.image_id]
        protocol = self.ap_protocol
        if protocol.federated:
            looked_for = {*instances.category_ids.tolist(), *known.neg_category_ids}
            of_all = boxes.scores, boxes.classes
            counted = coco_ap.counted_detections(*of_all, looked_for, protocol.max_found[-1])
            boxes = boxes[counted]
        self.images.append(
            ImageDetections(
                image.annotation.masks,
                predict_boxes(model, image, boxes.boxes, self.protocol),
                boxes.scores,
                instances.crowd,
                instances.category_ids,
                boxes.classes,
                instances.areas,
                known.neg_category_ids,
                known.not_exhaustive_category_ids,
            )
        )

    def summary(self) -> dict:
        """Return the statistics of `coco_metrics` for JSON, and the protocol of the boxes."""
        frequencies = self.data.frequencies
        result = coco_ap.coco_metrics(self.images, self.ap_protocol, frequencies)
        answer = f"{self.protocol.answer}: {ANSWERS[self.protocol.answer]}"
        return result | {"prompts": asdict(self.protocol) | {"answer": answer}}


def predict_boxes(
    model: PromptableModel,
    image: EmbeddedImage,
    boxes: Float[np.ndarray, "n 4"],
    protocol: BoxProtocol,
) -> RLEMasks:
    """Predict the mask of each box, at the size of the stored image.

    Args:
        model: Model that predicts the masks.
        image: The image.
        boxes: Boxes xyxy in pixels of the stored image.
        protocol: Which mask counts.
    """
    schedule = BoxPrompt(protocol.answer != "first_token", protocol.answer == "refined")
    decode = image.decoder(model, best_only=True)
    device, scale_xy = image.embedding.device, image.transform.scale_xy
    parts = [RLEMasks.from_dense(np.zeros((0, *image.annotation.size), bool))]
    boxes_input = torch.from_numpy(image.transform.boxes_to_input(boxes)).float().to(device)
    kind = widest(boxes_input).dtype
    scales = torch.tensor(scale_xy, dtype=kind, device=device).expand(len(boxes), 2)
    unknown = torch.zeros(len(boxes), 1, 1, dtype=torch.bool, device=device)
    for group in image.groups(np.arange(len(boxes))):
        blank = unknown[group]
        targets = Targets(blank, blank, boxes_input[group], scale_xy, scales[group])
        *_, answer = run_rounds(decode, targets, schedule, None, 0.0)
        parts.append(RLEMasks.from_dense(answer.pred_mask.cpu().numpy()))
    return RLEMasks.concatenate(parts)
