"""Automatic masks held against the truth: how many there are, how many would pass SAM's thresholds, and how much of the truth is among them.

Enters a model and an index; leaves numbers by name. Proposals are made and ranked as the SAM paper does for AR@1000 (section 7.3, appendix D.3): no
filter, boxes thinned out at 0.9, and by the mean of predicted IoU and stability.

Not here: the masks themselves (`predict.automatic`), the statistics (`average_precision`).
"""

from collections.abc import Iterable

import numpy as np
import torch

from gigamask.data.choose import Filters
from gigamask.data.index import Index
from gigamask.data.shards import Shards
from gigamask.evaluate import average_precision
from gigamask.evaluate.interactive import read, scored
from gigamask.faults import BadSample
from gigamask.model.sam import Sam
from gigamask.predict.automatic import AutomaticMasks
from gigamask.predict.settings import Settings

DEFAULTS = Settings()


def proposals(points_per_side: int) -> Settings:
    """Returns the paper's settings for proposals, which took 64 points a side."""
    return Settings(points_per_side=points_per_side, pred_iou_thresh=0.0, stability_score_thresh=0.0, box_nms_thresh=0.9)


def measure(model: Sam, index: Index, filters: Filters, settings: Settings, rows: Iterable[int]) -> dict:
    """Returns recall and precision of everything found on some images, masks an image, the share that passes SAM's default thresholds, and the mean
    over the truth of the IoU of the best mask found. Images that cannot be read, or have no mask that passes the filters, are left out.
    """
    shards, found, best, passing = Shards(index.shard_paths), [], [], []
    was_training = model.training
    generator = AutomaticMasks(model.eval(), **settings.told())
    with torch.inference_mode():
        for row in rows:
            numbers = scored(index, row, filters)
            if not len(numbers):
                continue
            try:
                pixels, entry = read(index, shards, row)
            except BadSample:
                continue
            masks = generator.find(pixels)
            truth = entry.masks[numbers]
            passing.append((masks.predicted_iou > DEFAULTS.pred_iou_thresh) & (masks.stability_score >= DEFAULTS.stability_score_thresh))
            best += truth.iou(masks.masks).max(1, initial=0).tolist()
            rank = (masks.predicted_iou.astype(np.float64) + np.nan_to_num(masks.stability_score)) / 2
            found.append(average_precision.Found(truth, masks.masks, rank))
    model.train(was_training)
    statistics = average_precision.measure(found, average_precision.PROPOSALS)
    everything = np.concatenate(passing) if passing else np.zeros(0, bool)
    return statistics | {
        "masks_an_image": len(everything) / len(found) if found else None,
        "passing": float(everything.mean()) if len(everything) else None,
        "best_iou": float(np.mean(best)) if best else None,
        "settings": settings.told(),
    }


def table(result: dict) -> str:
    """Returns the numbers as lines."""
    if not result["images"]:
        return "automatic masks: no image to look at"
    passing, best = (f"{100 * (result[name] or 0.0):.1f} %" for name in ("passing", "best_iou"))
    asked = f"{result['settings']['points_per_side']} points a side"
    head = f"automatic masks: {result['masks_an_image']:.1f} an image from {asked}, {passing} pass SAM's thresholds"
    return f"{head}; the best one has a mean IoU of {best} with each mask of the truth\n{average_precision.table(result)}"
