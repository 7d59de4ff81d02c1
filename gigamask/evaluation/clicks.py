"""Interactive segmentation: mean IoU after 1, 2, 3, 5 and 9 clicks, with the best of three masks, and for a box.

Enters a model and an index; leaves one record for each mask and their means, over all masks and by granularity. Protocol (SAM paper, section 7.1
and appendix D.1; details it leaves open are in `Protocol`): the first click is the point of the mask farthest from its boundary, each further one
the point of the error region farthest from that region's boundary; the answer is the mask of the highest predicted IoU, thresholded at 0, at the size
of the stored image.

Not here: the clicks (`prompts.policy.CenterClicks`), reading and embedding (`scenes`), pictures (`pictures`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import granularity
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.evaluation import boundary, calibration
from gigamask.evaluation.embedded_images import AT_ONCE, EmbeddedImage, embed_images, scored_masks
from gigamask.interfaces import GRANULARITIES
from gigamask.losses.iou import actual_iou
from gigamask.models.sam.sam import Sam
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks
from gigamask.types import PromptRound

OnImage = Callable[[Sam, EmbeddedImage, np.ndarray], None]
"""What else is done with an image and the numbers of its masks."""


@dataclass(frozen=True)
class ClickProtocol:
    """What a score depends on besides the weights; written beside every result."""

    clicks: tuple[int, ...] = (1, 2, 3, 5, 9)
    """numbers of clicks at which the mean IoU is taken"""
    feed_mask: bool = True
    """feed the previous answer's logits back with each further click (the paper does not say)"""
    first_click: str = "point farthest from the mask's boundary"
    next_click: str = "point farthest from the boundary of the error region; misses and false alarms apart, the deeper one wins; none twice"
    answer: str = (
        "the mask of the highest predicted IoU; the single-mask output from the second prompt on"
    )
    oracle: str = "best of the three masks after one click"
    box: str = "the exact box of the mask, three masks"
    boundaries: bool = False
    """score the answers' boundaries, too, as `boundary_scores` does"""
    resolution: str = "stored image size, logits upsampled bilinearly, threshold 0"
    mean: str = "over all masks of all images"


SIZES = {"small": 32**2, "medium": 96**2, "large": math.inf}
"""COCO's sizes, and the most pixels that a mask of each has."""


@dataclass(frozen=True)
class MaskScore:
    """One mask's scores: its image's row in the index, its number among that image's annotations, its share of the image's area, IoU by number of
    clicks, oracle and box IoU; its pixels, by number of clicks the IoU that the model gave its answer, and, where asked, what its boundary scores.
    """

    row: int
    number: int
    area_share: float
    clicks: dict[int, float]
    oracle: float
    box: float
    area_px: int = 0
    predicted: dict[int, float] = field(default_factory=dict)
    boundary_iou: dict[int, float] = field(default_factory=dict)
    boundary_f: dict[int, float] = field(default_factory=dict)

    @property
    def granularity(self) -> str:
        """Which of `GRANULARITIES` the mask is."""
        return GRANULARITIES[granularity(np.array([self.area_share]))[0]]

    @property
    def size(self) -> str:
        """Which of `SIZES` the mask is."""
        return next(name for name, most in SIZES.items() if self.area_px <= most)


@dataclass(frozen=True)
class ClickResult:
    """All masks' scores, and the images that could not be read."""

    protocol: ClickProtocol
    images: int
    scores: list[MaskScore]
    rejected: list[str] = field(default_factory=list)

    @staticmethod
    def joined(parts: "Sequence[ClickResult]") -> "ClickResult":
        """Returns all parts' in order."""
        scores, rejected = (
            [each for part in parts for each in getattr(part, name)]
            for name in ("scores", "rejected")
        )
        return ClickResult(parts[0].protocol, sum(part.images for part in parts), scores, rejected)

    def summary(self) -> dict:
        """Returns the means, as `gigamask evaluate --json` writes them; those of a granularity without masks are None."""
        if not self.scores:
            raise GigamaskError(
                "no mask to evaluate: no image has one that passes the filters; loosen --min-predicted-iou"
            )
        return {
            "images": self.images,
            **self._means(self.scores),
            "granularity": {
                name: self._means([score for score in self.scores if score.granularity == name])
                for name in GRANULARITIES
            },
            "size": {
                name: self._means([score for score in self.scores if score.size == name])
                for name in SIZES
            },
            "calibration": self._calibration(),
            "protocol": asdict(self.protocol)
            | {
                "boundary": asdict(boundary.BoundaryProtocol())
                if self.protocol.boundaries
                else None
            },
        }

    def _means(self, scores: list[MaskScore]) -> dict:
        return {
            "masks": len(scores),
            "clicks": {
                str(n): _mean([score.clicks[n] for score in scores]) for n in self.protocol.clicks
            },
            "oracle": _mean([score.oracle for score in scores]),
            "box": _mean([score.box for score in scores]),
            **(self._boundaries(scores) if self.protocol.boundaries else {}),
        }

    def _boundaries(self, scores: list[MaskScore]) -> dict:
        names, clicks = ("boundary_iou", "boundary_f"), self.protocol.clicks
        return {
            name: {str(n): _mean([getattr(score, name)[n] for score in scores]) for n in clicks}
            for name in names
        }

    def _calibration(self) -> dict:
        """Returns how far the IoU predicted for the answer to the first click can be taken at its word."""
        first = [score for score in self.scores if 1 in score.predicted]
        predicted, actual = (
            np.array([each[1] for each in column])
            for column in ([s.predicted for s in first], [s.clicks for s in first])
        )
        return calibration.calibrate(predicted, actual).summary()


def evaluate_clicks(
    model: Sam,
    index: Index,
    filters: MaskFilters,
    protocol: ClickProtocol | None = None,
    rows: Iterable[int] | None = None,
    at_once: int = AT_ONCE,
    also: Sequence[OnImage] = (),
) -> ClickResult:
    """Scores every mask that passes the filters on the images `rows` of the index, all by default; `also` are shown each image that has such a mask.

    How many images are embedded `at_once` changes scores by rounding alone.
    """
    protocol = protocol or ClickProtocol()
    was_training = model.training
    model.eval()
    found = ClickResult(protocol, 0, [], [])
    asked = (
        row
        for row in (range(len(index)) if rows is None else rows)
        if len(scored_masks(index, row, filters))
    )
    with torch.inference_mode():
        for row, scene in embed_images(model, index, asked, at_once):
            if isinstance(scene, CorruptSampleError):
                found.rejected.append(str(scene))
                continue
            numbers = scored_masks(index, row, filters)
            found.scores.extend(
                score
                for group in scene.groups(numbers)
                for score in score_group(model, scene, row, group, protocol)
            )
            for each in also:
                each(model, scene, numbers)
            found = replace(found, images=found.images + 1)
    model.train(was_training)
    return found


def score_group(
    model: Sam, scene: EmbeddedImage, row: int, numbers: np.ndarray, protocol: ClickProtocol
) -> list[MaskScore]:
    """Plays the clicks and the box for some masks of one image."""
    truth, decode = scene.truth(numbers), scene.decoder(model)
    height, width = scene.transform.original
    by_clicks: dict[int, list[float]] = {}
    oracle: list[float] = []
    predicted: dict[int, list[float]] = {}
    edges: dict[int, tuple[list[float], list[float]]] = {}
    for played in run_rounds(
        decode, truth, CenterClicks(max(protocol.clicks), protocol.feed_mask), None, 0.0
    ):
        every = actual_iou(played.prediction.logits, truth.masks, truth.valid)
        if played.index == 0:
            oracle = every.amax(1).tolist()
        by_clicks[played.index + 1] = _of_chosen(every, played)
        predicted[played.index + 1] = _of_chosen(played.prediction.iou_predictions, played)
        if protocol.boundaries and played.index + 1 in protocol.clicks:
            masks = played.pred_mask.cpu().numpy(), truth.masks.cpu().numpy()
            edges[played.index + 1] = (
                boundary.boundary_iou(*masks).tolist(),
                boundary.boundary_f(*masks).tolist(),
            )
    (boxed,) = run_rounds(scene.decoder(model, best_only=True), truth, BoxPrompt(), None, 0.0)
    box = actual_iou(boxed.prediction.logits, truth.masks, truth.valid)[:, 0].tolist()
    areas = scene.entry.masks[numbers].areas().tolist()
    return [
        MaskScore(
            row,
            int(number),
            areas[i] / (height * width),
            {n: by_clicks[n][i] for n in protocol.clicks},
            oracle[i],
            box[i],
            areas[i],
            {n: predicted[n][i] for n in protocol.clicks},
            {n: ious[i] for n, (ious, _) in edges.items()},
            {n: scores[i] for n, (_, scores) in edges.items()},
        )
        for i, number in enumerate(numbers)
    ]


def _of_chosen(every: Tensor, played: PromptRound) -> list[float]:
    return every.gather(1, played.best_index[:, None])[:, 0].tolist()


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def table(summary: dict) -> str:
    """Returns a summary as a table in per cent: a row for all masks, and one for each granularity and size that has any; then boundaries."""
    rows = {"all": summary}
    for breakdown, words in (
        ("granularity", {}),
        ("size", {"small": "to 32 px", "medium": "to 96 px", "large": "above"}),
    ):
        rows |= {
            words.get(name, name): each
            for name, each in summary[breakdown].items()
            if each["masks"]
        }
    names = [f"{n} click{'s' if n != '1' else ''}" for n in summary["clicks"]] + [
        "oracle",
        "box",
        "masks",
    ]
    lines = [
        f"mIoU, % of {summary['masks']} masks on {summary['images']} images",
        " " * 9 + "".join(f"{name:>10}" for name in names),
    ]
    for name, each in rows.items():
        values = [*each["clicks"].values(), each["oracle"], each["box"]]
        lines.append(
            f"{name:9}"
            + "".join(f"{100 * value:10.1f}" for value in values)
            + f"{each['masks']:10,}"
        )
    for name, title in (("boundary_iou", "Boundary IoU"), ("boundary_f", "boundary F")):
        if name in summary:
            lines.append(
                f"{title}, %:"
                + "".join(f"  {value * 100:.1f} ({n})" for n, value in summary[name].items())
                + "  (clicks)"
            )
    error, correlation = (
        summary["calibration"][name] for name in ("expected_error", "correlation")
    )
    if error is not None:
        told = "" if correlation is None else f", correlation {correlation:.2f}"
        lines.append(
            f"predicted IoU after one click: {100 * error:.1f} % off in the mean of ten bins{told}"
        )
    return "\n".join(lines)
