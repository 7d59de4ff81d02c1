"""Metrics of a grounding query, and baselines that do not look at the image.

With target masks: `top_1`, the best mask is a target, ignoring the score of "no mask fits";
`top_3`, one of the best three masks is a target; `iou` of the best mask with its best target;
`pointing`, the centre of the best mask is in a target; `refused`, "no mask fits" scores best;
`set_f1`, the F1 score of the set of masks above "no mask fits". Without targets: `absent`, "no mask
fits" scores best. For all queries: `answered`, the best score is that of a target, or of "no mask
fits" without targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from gigamask.data.index import Index
from gigamask.errors import GigamaskError
from gigamask.masks.boundary import farthest_point
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.grounding.data import QueryDataset

METRICS = ("top_1", "top_3", "iou", "pointing", "refused", "set_f1", "absent", "answered")
TOP_K = 3


@dataclass(frozen=True, eq=False)
class ImageMasks:
    """The masks of an image and how they overlap.

    Attributes:
        masks: The masks, m.
        iou: Pairwise IoU.
        contains_point: At [i, j], whether the pixel of mask i farthest from its border is in mask
            j.
    """

    masks: RLEMasks
    iou: Float64[np.ndarray, "m m"]
    contains_point: Bool[np.ndarray, "m m"]

    @classmethod
    def from_masks(cls, masks: RLEMasks) -> "ImageMasks":
        """Compute the overlaps of masks."""
        dense = masks.to_dense()
        points = [farthest_point(mask)[:2] for mask in dense]
        contains = np.array([dense[:, y, x] for x, y in points], bool).reshape(
            len(dense), len(dense)
        )
        return cls(masks, masks.iou(masks), contains)


def query_metrics(
    scores: Float64[np.ndarray, "m1"], targets: Sequence[int], image: ImageMasks
) -> dict[str, float]:
    """Compute the metrics of one query; if scores are tied, the first mask is the best.

    Args:
        scores: Scores of the image's masks, then that of "no mask fits".
        targets: Numbers of the target masks.
        image: The image's masks.

    Returns:
        Those of `METRICS` that apply, in [0, 1].
    """
    order = np.argsort(-scores[:-1], kind="stable")
    is_target = np.isin(np.arange(len(scores) - 1), targets)
    refused = not len(order) or scores[-1] >= scores[order[0]]
    if not len(targets):
        return {"absent": float(refused), "answered": float(refused)}
    best, selected = order[0], scores[:-1] > scores[-1]
    return {
        "top_1": float(is_target[best]),
        "top_3": float(is_target[order[:TOP_K]].any()),
        "iou": float(image.iou[best][is_target].max()),
        "pointing": float(image.contains_point[best][is_target].any()),
        "refused": float(refused),
        "set_f1": 2 * float((selected & is_target).sum()) / float(selected.sum() + is_target.sum()),
        "answered": float(is_target[best] and not refused),
    }


def chance_metrics(targets: Sequence[int], image: ImageMasks) -> dict[str, float]:
    """Compute the expected metrics of a random ranking, which refuses only images without masks.

    Args:
        targets: Numbers of the target masks.
        image: The image's masks.

    Returns:
        Those of `METRICS` that apply, without `set_f1`.
    """
    masks, count = len(image.masks), len(targets)
    if not count:
        return {"absent": float(not masks), "answered": float(not masks)}
    best_iou = image.iou[:, list(targets)].max(1)
    hits = image.contains_point[:, list(targets)].any(1)
    drawn = min(TOP_K, masks)
    return {
        "top_1": count / masks,
        "top_3": 1 - comb(masks - count, drawn) / comb(masks, drawn),
        "iou": best_iou.mean(),
        "pointing": hits.mean(),
        "refused": 0.0,
        "answered": count / masks,
    }


def mean_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the number of queries and the mean of each metric, None if no query has it."""
    means: dict[str, Any] = {"queries": len(metrics)}
    for name in METRICS:
        values = [query[name] for query in metrics if name in query]
        means[name] = float(np.mean(values)) if values else None
    return means


@dataclass(frozen=True, eq=False)
class PositionPrior:
    """Baseline that uses only the position and size of each text's targets in training.

    Attributes:
        means: Mean position and size of the targets of each text.
        mean: Mean over all texts, used for new ones.
        std: Standard deviation over all texts.
        absent_fraction: Fraction of each text's queries without targets.
    """

    means: dict[str, Float64[np.ndarray, "3"]]
    mean: Float64[np.ndarray, "3"]
    std: Float64[np.ndarray, "3"]
    absent_fraction: dict[str, float]

    @classmethod
    def fit(cls, dataset: QueryDataset, index: Index) -> "PositionPrior":
        """Fit the prior to training queries.

        Args:
            dataset: The queries.
            index: Index of their images.

        Returns:
            The prior.

        Raises:
            GigamaskError: No query has a target.
        """
        positions: dict[str, list[np.ndarray]] = {}
        absent: dict[str, list[bool]] = {}
        for query, row in zip(dataset.queries, dataset.rows.tolist(), strict=True):
            absent.setdefault(query.text, []).append(not query.mask_indices)
            targets = mask_positions(index, row)[list(query.mask_indices)]
            positions.setdefault(query.text, []).extend(targets)
        every = np.array([row for rows in positions.values() for row in rows]).reshape(-1, 3)
        if not len(every):
            raise GigamaskError(
                "no training query has a target mask, so the prior cannot be fitted"
            )
        means = {text: np.mean(rows, 0) for text, rows in positions.items() if rows}
        shares = {text: float(np.mean(flags)) for text, flags in absent.items()}
        return cls(means, every.mean(0), every.std(0) + 1e-6, shares)

    def scores(self, text: str, index: Index, row: int) -> Float64[np.ndarray, "m1"]:
        """Score the masks of an image for a text.

        Args:
            text: The text.
            index: Index of the image.
            row: Its row.

        Returns:
            Scores of the masks by position and size, then that of "no mask fits".
        """
        mean = self.means.get(text, self.mean)
        distance = np.square((mask_positions(index, row) - mean) / self.std).sum(1)
        refuses = self.absent_fraction.get(text, 0.0) > 0.5
        return np.append(-distance, np.inf if refuses else -np.inf)


def mask_positions(index: Index, row: int) -> Float64[np.ndarray, "m 3"]:
    """Return the position and size of an image's masks.

    Args:
        index: Index of the image.
        row: Its row.

    Returns:
        Centre x and y relative to the image, and the scaled logarithm of the area share.
    """
    rows = index.mask_rows(row)
    height, width = (int(index.images[name][row]) for name in ("height", "width"))
    boxes = np.asarray(index.masks["box"][rows], np.float64).reshape(-1, 4)
    areas = np.asarray(index.masks["area"][rows], np.float64)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 / (width, height)
    return np.column_stack([centres, np.log(np.maximum(areas, 1) / (height * width)) / 4])
