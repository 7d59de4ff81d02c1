"""Number of clicks (NoC) to an IoU, and the mean IoU after each click.

RITM's protocol (Sofiiuk et al. 2021, arXiv 2102.06583): the first click is the center of the
object, each further one the center of the largest error, and the previous mask is passed back. A
mask that does not reach the IoU within 20 clicks counts as 20, and is a failure. Pixels that a
benchmark ignores belong to no error and count in no IoU.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from gigamask.evaluation import figures
from gigamask.evaluation.clicks import ClickProtocol, ClickResult
from gigamask.evaluation.embedded_images import ImageSource
from gigamask.models.promptable import PromptableModel

MOST_CLICKS = 20
WORST = 10
"""Masks that are drawn."""
IOUS = (0.85, 0.9, 0.95)
"""IoUs to reach."""


EVERY_CLICK = ClickProtocol(clicks=tuple(range(1, MOST_CLICKS + 1)))
ANSWERS = {
    "confident": EVERY_CLICK,
    "first_token": replace(
        EVERY_CLICK,
        multimask="never",
        answer="the single-mask output (the first mask token) for every prompt",
        oracle="as after one click",
        box="the exact box of the mask, one mask",
    ),
    "best_of_three": replace(
        EVERY_CLICK,
        chosen_by_truth=True,
        answer="of the three masks for a first click or a box, that with the highest IoU, which no "
        "user knows; the single-mask output from the second prompt on",
    ),
}
"""Protocols by the mask that counts as the answer: that of SAM's predictor, that of models with one
mask, such as RITM's, and of EdgeSAM's scores, and the best that three masks offer."""


def iou_curves(result: ClickResult) -> Float[np.ndarray, "n k"]:
    """Return the IoU of each mask after each number of clicks, from 1."""
    clicks = range(1, max(result.protocol.clicks) + 1)
    curves = [[score.clicks[count] for count in clicks] for score in result.scores]
    return np.array(curves, np.float64).reshape(-1, len(clicks))


def number_of_clicks(
    curves: Float[np.ndarray, "n k"], iou: float
) -> tuple[Int64[np.ndarray, "n"], Bool[np.ndarray, "n"]]:
    """Return each mask's number of clicks to an IoU, and which masks reach it.

    Args:
        curves: IoU of each mask after each number of clicks.
        iou: IoU to reach.

    Returns:
        The numbers of clicks, k for masks that do not reach the IoU; and True for those that do.
    """
    reaches = curves >= iou
    reached = np.any(reaches, axis=1)
    return np.where(reached, reaches.argmax(1) + 1, curves.shape[1]), reached


def iou_summary(result: ClickResult) -> dict[str, Any]:
    """Return means and curves of the IoU, as `gigamask benchmark --json` writes them."""
    curves = iou_curves(result)
    return {
        "images": result.images,
        "masks": len(curves),
        "mIoU": {str(i + 1): float(mean) for i, mean in enumerate(curves.mean(0))},
        "oracle": float(np.mean([score.oracle for score in result.scores])),
        "box": float(np.mean([score.box for score in result.scores])),
        "seconds_per_prompt": _seconds_per_prompt(result),
        "protocol": asdict(result.protocol),
        "curves": dict(zip(_names(result), curves.round(4).tolist(), strict=True)),
    }


def noc_summary(result: ClickResult) -> dict[str, Any]:
    """Return `iou_summary` with the numbers of clicks, and the masks that fail."""
    curves, names, failed = iou_curves(result), _names(result), {}
    means = {}
    for iou in IOUS:
        clicks, reached = number_of_clicks(curves, iou)
        percent = round(100 * iou)
        means[f"NoC@{percent}"] = float(clicks.mean())
        failed[str(percent)] = [names[i] for i in np.flatnonzero(~reached)]
    failures = {percent: len(masks) for percent, masks in failed.items()}
    return means | {"failures": failures, "failed": failed} | iou_summary(result)


def instance_summary(result: ClickResult) -> dict[str, Any]:
    """Return the mean IoU by clicks, and of boxes by size; the clicks need not be consecutive."""
    summary = result.summary()
    return {
        "images": result.images,
        "masks": summary["masks"],
        "mIoU": summary["clicks"],
        "oracle": summary["oracle"],
        "box": summary["box"],
        **{f"box {size}": means["box"] for size, means in summary["size"].items()},
        "seconds_per_prompt": _seconds_per_prompt(result),
        "protocol": summary["protocol"],
    }


def _seconds_per_prompt(result: ClickResult) -> float:
    """Return the mean time of a click or box, with its simulation and score."""
    return result.prompting_s / (len(result.scores) * (max(result.protocol.clicks) + 1))


def _names(result: ClickResult) -> list[str]:
    """Return the name of each mask, with its image's row if images have the same name."""
    images = {score.row: score.name for score in result.scores}
    is_unique = len(set(images.values())) == len(images)
    return [
        f"{score.name}:{score.mask_index}" + (f" of row {score.row}" * (not is_unique))
        for score in result.scores
    ]


def write_worst(
    model: PromptableModel, images: ImageSource, result: ClickResult, folder: Path
) -> Path:
    """Draw the masks that need most clicks to an IoU of 0.9, then those of lowest mean IoU.

    Args:
        model: Model that predicts the masks again.
        images: Index of the images, or the images.
        result: Scores of the masks.
        folder: Folder for `worst_clicks.png`.

    Returns:
        The file.
    """
    curves = iou_curves(result)
    order = np.lexsort([curves.mean(1), -number_of_clicks(curves, IOUS[1])[0]])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "worst_clicks.png"
    worst = [result.scores[i] for i in order[:WORST]]
    rows = figures.draw_rows(model, images, worst, result.protocol)
    figures.write_png(path, figures.stack_rows(rows))
    return path


def worst_lines(summary: dict[str, Any], count: int = 5) -> Sequence[str]:
    """Return a line for each of the failures at an IoU of 0.9 with the lowest best IoU.

    Args:
        summary: Return value of `noc_summary`.
        count: Most lines.
    """
    best = {name: max(summary["curves"][name]) for name in summary["failed"]["90"]}
    return [
        f"  {name}: IoU at best {best[name]:.3f} in {MOST_CLICKS} clicks"
        for name in sorted(best, key=best.__getitem__)[:count]
    ]
