"""Interactive segmentation: mean IoU after 1, 2, 3, 5 and 9 clicks, oracle, and box.

The protocol is that of the SAM paper, section 7.1 and appendix D.1; fields of `ClickProtocol`
settle what it leaves open. The first click is the point of the mask farthest from its boundary, and
each further click the point of the error region farthest from that region's boundary. The predicted
mask is the one with the highest predicted IoU, thresholded at 0, at the size of the stored image.
"""

import csv
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import granularity
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.evaluation import boundary, calibration
from gigamask.evaluation.embedded_images import (
    BATCH_SIZE,
    CropOptions,
    EmbeddedImage,
    ImageSource,
    embed_images,
    scored_rows,
)
from gigamask.evaluation.score_names import BOXES_AND_ORACLE, by_prompt
from gigamask.interfaces import GRANULARITIES
from gigamask.losses.iou import mask_iou
from gigamask.models.prompt_decoder import refined
from gigamask.models.promptable import PromptableModel, evaluated
from gigamask.prompts.boxes import add_box_noise
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks, UniformClicks
from gigamask.records import ImageAnnotation
from gigamask.rng import make_rng
from gigamask.types import Prediction, PromptRound, Prompts, RandomInputs, Targets

ImageCallback = Callable[[PromptableModel, EmbeddedImage, np.ndarray], None]
"""Called with the model, an image, and the indices of its evaluated masks."""


@dataclass(frozen=True)
class ClickProtocol(CropOptions):
    """Settings that the scores depend on besides the weights; saved with every result."""

    clicks: tuple[int, ...] = (1, 2, 3, 5, 9)
    """numbers of clicks after which the mean IoU is computed"""
    feed_mask: bool = True
    """pass the logits of the last prediction with each further click (the paper does not say)"""
    first_click: str = "point farthest from the mask's boundary"
    next_click: str = (
        "point farthest from the boundary of the error region; false negatives and false "
        "positives separately, the larger distance wins; no point twice"
    )
    multimask: Literal["first", "always", "never"] = "first"
    """predict three masks for a first click and for a box, for every click, or never"""
    uniform: bool = False
    """draw all clicks from the mask, uniformly, instead of correcting the prediction"""
    annotated_box: bool = False
    """take the box that the annotation states, if it does"""
    chosen_by_truth: bool = False
    """choose among three masks by their actual IoU, which no user knows"""
    answer: str = (
        "the mask with the highest predicted IoU; the single-mask output from the second prompt on"
    )
    oracle: str = "best of the three masks after one click"
    box: str = "the exact box of the mask, three masks"
    refine: bool = False
    """decode each box and each first click once more, with the masks that it got"""
    box_noise: float = 0.0
    """also score a loose box of each mask: standard deviation of the noise on each side, relative
    to its width or height; always the same for a mask, and without a limit in pixels, so that all
    models get the same boxes"""
    point_convention: str = (
        "pixel of the stored image, counted from 0, times the scale; the prompt encoder adds 0.5, "
        "as in SAM's repository"
    )
    boundaries: bool = False
    """also score boundaries, with `evaluation.boundary`"""
    resolution: str = "stored image size, logits upsampled bilinearly, threshold 0"
    mean: str = "over all masks of all images"

    def rounds(
        self,
        decode: Callable[[Prompts], Prediction],
        targets: Targets,
        row: int,
        mask_indices: Sequence[int] | np.ndarray,
        clicks: int | None = None,
    ) -> Iterator[PromptRound]:
        """Click, and return the round after each click; the answer is at its `best_index`.

        Args:
            decode: Predicts masks from prompts.
            targets: The masks to click in.
            row: Row of their image.
            mask_indices: Their indices in the image, which with its row key random clicks.
            clicks: Number of clicks; None: the largest of the protocol.
        """
        clicks, random_inputs = clicks or max(self.clicks), None
        schedule = CenterClicks(clicks, self.feed_mask, self.multimask)
        if self.uniform:
            schedule = UniformClicks(clicks)
            # The same for any number of clicks, so that figures show those that were scored.
            generators = [make_rng(0, "evaluation clicks", row, int(i)) for i in mask_indices]
            drawn = [each.random((max(self.clicks), 2), np.float32) for each in generators]
            uniforms, none = torch.from_numpy(np.stack(drawn)), torch.zeros(len(drawn))
            noise = none.new_zeros(len(drawn), 4), none.new_zeros(1, 0, 2)
            random_inputs = RandomInputs(none, uniforms.to(targets.masks.device), *noise)
        return run_rounds(self._answering(decode, targets), targets, schedule, random_inputs, 0.0)

    def box_round(self, model: PromptableModel, image: EmbeddedImage, of: Targets) -> PromptRound:
        """Return the round of the box; the answer is at its `best_index`.

        Args:
            model: Model that answers.
            image: The image.
            of: The masks in the boxes.
        """
        decode = self._answering(image.decoder(model, self, not self.chosen_by_truth), of)
        return next(run_rounds(decode, of, BoxPrompt(self.multimask != "never")))

    def loosened(
        self, targets: Targets, row: int, mask_indices: Sequence[int] | np.ndarray
    ) -> Targets:
        """Return targets with noise on their boxes.

        Args:
            targets: The masks in the boxes.
            row: Row of their image.
            mask_indices: Their indices in the image, which with its row key the noise.
        """
        generators = [make_rng(0, "evaluation boxes", row, int(i)) for i in mask_indices]
        noise = torch.from_numpy(np.stack([each.standard_normal(4) for each in generators]))
        of_all = noise.to(targets.boxes_input), self.box_noise, math.inf, targets.extent
        boxes = add_box_noise(targets.boxes_input, targets.scale_xy, *of_all)
        return replace(targets, boxes_input=boxes)

    def _answering(
        self, decode: Callable[[Prompts], Prediction], targets: Targets
    ) -> Callable[[Prompts], Prediction]:
        """Return the decoder, its first answers refined, rated by actual IoU if that chooses."""

        def answer(prompts: Prompts) -> Prediction:
            found = decode(prompts)
            if self.refine and prompts.masks is None:
                found = refined(decode, prompts, found)
            if self.chosen_by_truth:
                ious = mask_iou(found.logits, targets.masks, targets.valid)
                found = replace(found, iou_predictions=ious)
            return found

        return answer


EFFICIENTVIT_SAM = ClickProtocol(
    clicks=(1, 3, 5),
    feed_mask=False,
    multimask="always",
    annotated_box=True,
    answer="the mask with the highest predicted IoU of three",
    box="of benchmarks the annotated box (x, y, width, height), else the exact one; three masks",
)
"""As EfficientViT-SAM's code (eval_efficientvit_sam_model.py in mit-han-lab/efficientvit), which
also scores crowds."""

EFFICIENT_SAM = ClickProtocol(
    clicks=(1, 3),
    feed_mask=False,
    multimask="always",
    uniform=True,
    first_click="uniform in the mask",
    next_click="uniform in the mask, whatever was predicted",
    answer="the mask with the highest predicted IoU of three",
)
"""As the text of EfficientSAM (Xiong et al. 2023, section 4.3, table 4); its code is not public."""

PROTOCOLS = {
    "gigamask": ClickProtocol(),
    "efficient_sam": EFFICIENT_SAM,
    "efficientvit_sam": EFFICIENTVIT_SAM,
}


FEW_MASKS = 100
"""Means of fewer masks are stated with their standard error."""
SIZES = {"small": 32**2, "medium": 96**2, "large": math.inf}
"""COCO's sizes, each with its largest area in pixels."""


@dataclass(frozen=True)
class MaskScore:
    """Scores of one mask."""

    row: int
    """row of its image in the index"""
    mask_index: int
    """its index among the masks of the image"""
    area_fraction: float
    """its area as a fraction of the image's"""
    clicks: dict[int, float]
    """IoU by number of clicks"""
    oracle: float
    """highest IoU of the three masks after one click"""
    box: float
    """IoU for the box"""
    area_px: int | float = 0
    """its area in pixels: the stated one, if the annotation states one"""
    predicted: dict[int, float] = field(default_factory=dict)
    """predicted IoU by number of clicks"""
    boundary_iou: dict[int, float] = field(default_factory=dict)
    """Boundary IoU by number of clicks, if boundaries are scored"""
    boundary_f: dict[int, float] = field(default_factory=dict)
    """boundary F by number of clicks, if boundaries are scored"""
    name: str = ""
    """name of its image"""
    class_hits: dict[str, bool] = field(default_factory=dict)
    """whether its class is the likeliest by number of clicks, and for the box, if it has one"""
    loose_box: float | None = None
    """IoU for the loose box, if the protocol has one"""

    @property
    def granularity(self) -> str:
        """Name of the mask's granularity, one of `GRANULARITIES`."""
        return GRANULARITIES[granularity(np.array([self.area_fraction]))[0]]

    @property
    def size(self) -> str:
        """Name of the mask's size, one of `SIZES`."""
        return next(name for name, most in SIZES.items() if self.area_px <= most)


@dataclass(frozen=True)
class ClickResult:
    """Scores of all masks, and the errors of images that could not be read."""

    protocol: ClickProtocol
    images: int
    scores: list[MaskScore]
    skipped: list[str] = field(default_factory=list)
    prompting_s: float = 0.0
    """seconds of all prompts and scores, after the images are embedded"""

    @staticmethod
    def concatenate(parts: "Sequence[ClickResult]") -> "ClickResult":
        """Return the scores of all parts in order."""
        return ClickResult(
            parts[0].protocol,
            sum(part.images for part in parts),
            [score for part in parts for score in part.scores],
            [reason for part in parts for reason in part.skipped],
            sum(part.prompting_s for part in parts),
        )

    def summary(self) -> dict:
        """Return the means, as `gigamask evaluate --json` writes them; None if no mask is scored.

        Raises:
            GigamaskError: There is no mask to evaluate.
        """
        if not self.scores:
            unread = f"; images left out: {len(self.skipped)}, " if self.skipped else ""
            raise GigamaskError(
                "no mask to evaluate: no image has a mask that passes the filters; "
                "choose images with masks, or loosen --min-predicted-iou"
                f"{unread}{'; '.join(self.skipped[:1])}"
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
            **self._class_accuracy(),
            "protocol": asdict(self.protocol)
            | {
                "boundary": asdict(boundary.BoundaryProtocol())
                if self.protocol.boundaries
                else None
            },
        }

    def csv(self) -> str:
        """Return the scores of each mask as CSV, such as `clicks_1`, its IoU after one click."""
        rows: list[dict[str, Any]] = [{} for _ in self.scores]
        for row, score in zip(rows, self.scores, strict=True):
            for name, value in vars(score).items():
                by_prompt = value if isinstance(value, dict) else {"": value}
                row.update((f"{name}_{at}".rstrip("_"), one) for at, one in by_prompt.items())
        file = io.StringIO()
        writer = csv.DictWriter(file, {name: None for row in rows for name in row}, "")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def _means(self, scores: list[MaskScore]) -> dict:
        few = 1 < len(scores) < FEW_MASKS
        return {
            "masks": len(scores),
            **self._each(scores, _mean),
            **({"standard_error": self._each(scores, _standard_error)} if few else {}),
            **(self._boundaries(scores) if self.protocol.boundaries else {}),
        }

    def _each(self, scores: list[MaskScore], reduce: Callable[[list[Any]], Any]) -> dict:
        """Return the IoUs of the masks for each prompt, reduced to one number."""
        loose = self.protocol.box_noise
        names = [name for name in BOXES_AND_ORACLE if loose or name != "loose_box"]
        return {
            "clicks": {
                str(n): reduce([score.clicks[n] for score in scores]) for n in self.protocol.clicks
            },
            **{name: reduce([getattr(score, name) for score in scores]) for name in names},
        }

    def _boundaries(self, scores: list[MaskScore]) -> dict:
        names, clicks = ("boundary_iou", "boundary_f"), self.protocol.clicks
        return {
            name: {str(n): _mean([getattr(score, name)[n] for score in scores]) for n in clicks}
            for name in names
        }

    def _class_accuracy(self) -> dict:
        """Return the fraction of masks whose class is the likeliest; empty without classes."""
        hits = [score.class_hits for score in self.scores if score.class_hits]
        if not hits:
            return {}
        means = {name: _mean([float(each[name]) for each in hits]) for name in hits[0]}
        return {"class_accuracy": {"masks": len(hits), **means}}

    def _calibration(self) -> dict:
        """Return the calibration of the IoU predicted after the first click."""
        scores = [score for score in self.scores if 1 in score.predicted]
        predicted = np.array([score.predicted[1] for score in scores])
        actual = np.array([score.clicks[1] for score in scores])
        return calibration.calibrate(predicted, actual).summary()


def evaluate_clicks(
    model: PromptableModel,
    images: ImageSource,
    filters: MaskFilters,
    protocol: ClickProtocol | None = None,
    rows: Iterable[int] | None = None,
    batch_size: int = BATCH_SIZE,
    callbacks: Sequence[ImageCallback] = (),
) -> ClickResult:
    """Score clicks and boxes for every mask that passes the filters.

    Args:
        model: Model to evaluate; its training mode is restored.
        images: Index of the images, or the images.
        filters: Filters that masks must pass.
        protocol: How the masks are scored.
        rows: Rows of the images; None means all.
        batch_size: Images per pass of the encoder; changes scores only by rounding.
        callbacks: Called for each image that has a mask to evaluate, and, if the model has classes,
            for each image without annotated masks, in which all that is found is wrong.

    Returns:
        The scores of all masks, by image.
    """
    protocols = [protocol or ClickProtocol()]
    [result] = evaluate_protocols(model, images, filters, protocols, rows, batch_size, callbacks)
    return result


def evaluate_protocols(
    model: PromptableModel,
    images: ImageSource,
    filters: MaskFilters,
    protocols: Sequence[ClickProtocol],
    rows: Iterable[int] | None = None,
    batch_size: int = BATCH_SIZE,
    callbacks: Sequence[ImageCallback] = (),
    max_masks: int | None = None,
) -> list[ClickResult]:
    """Score the same masks by several protocols; each image is embedded once.

    Args:
        model: As for `evaluate_clicks`.
        images: As for `evaluate_clicks`.
        filters: As for `evaluate_clicks`.
        protocols: How the masks are scored.
        rows: As for `evaluate_clicks`.
        batch_size: As for `evaluate_clicks`.
        callbacks: As for `evaluate_clicks`.
        max_masks: Most masks of an image, drawn at random but always the same; None: all.

    Returns:
        The scores by each protocol.
    """
    results = [ClickResult(protocol, 0, [], []) for protocol in protocols]
    empty = bool(callbacks and model.config.class_names)
    rows = scored_rows(images, range(len(images)) if rows is None else rows, filters, empty)
    with evaluated(model), torch.inference_mode():
        for row, image in embed_images(model, images, rows, batch_size):
            if isinstance(image, CorruptSampleError):
                results[0].skipped.append(str(image))
                continue
            mask_indices = _passing_masks(image.annotation, filters)
            if max_masks is not None and len(mask_indices) > max_masks:
                drawn = make_rng(0, "evaluated masks", row).permutation(mask_indices)
                mask_indices = np.sort(drawn[:max_masks])
            for i, result in enumerate(results):
                start = time.perf_counter()
                for group in image.groups(mask_indices):
                    result.scores.extend(score_group(model, image, row, group, result.protocol))
                elapsed_s = result.prompting_s + time.perf_counter() - start
                images_done = result.images + (len(mask_indices) > 0)
                results[i] = replace(result, images=images_done, prompting_s=elapsed_s)
            for callback in callbacks:
                callback(model, image, mask_indices)
    return results


def _passing_masks(annotation: ImageAnnotation, filters: MaskFilters) -> Int64[np.ndarray, "n"]:
    """Return the indices of masks that pass the filters, but for crowds and empty masks."""
    areas, (height, width) = annotation.masks.areas(), annotation.size
    keep = filters.keep(areas, height * width, annotation.predicted_iou, annotation.stability_score)
    if annotation.instances is not None:
        keep = keep & ~annotation.instances.crowd
    return np.flatnonzero(keep & (areas > 0))


def score_group(
    model: PromptableModel,
    image: EmbeddedImage,
    row: int,
    mask_indices: np.ndarray,
    protocol: ClickProtocol,
) -> list[MaskScore]:
    """Score the clicks and the box for some masks of one image.

    Args:
        model: Model to evaluate.
        image: The image.
        row: The image's row in the index.
        mask_indices: Indices of the masks among those of the image.
        protocol: How the masks are scored.
    """
    targets = image.targets(mask_indices, protocol.annotated_box)
    height, width = image.transform.original
    clicks: dict[int, list[float]] = {}
    oracle: list[float] = []
    predicted: dict[int, list[float]] = {}
    boundaries: dict[int, tuple[list[float], list[float]]] = {}
    classes = image.annotation.classes(model.config.class_names)[mask_indices]
    hits: dict[str, list[bool]] = {}
    for prompt_round in protocol.rounds(image.decoder(model, protocol), targets, row, mask_indices):
        count = prompt_round.index + 1
        ious = mask_iou(prompt_round.prediction.logits, targets.masks, targets.valid)
        if count == 1:
            oracle = ious.amax(1).tolist()
        clicks[count] = _of_best(ious, prompt_round)
        predicted[count] = _of_best(prompt_round.prediction.iou_predictions, prompt_round)
        if count in protocol.clicks:
            hits[str(count)] = _class_hits(prompt_round, classes)
        if protocol.boundaries and count in protocol.clicks:
            masks = prompt_round.pred_mask.cpu().numpy(), targets.masks.cpu().numpy()
            boundaries[count] = (
                boundary.boundary_iou(*masks).tolist(),
                boundary.boundary_f(*masks).tolist(),
            )
    of_box, loose = protocol.box_round(model, image, targets), None
    if protocol.box_noise:
        of_loose = protocol.loosened(targets, row, mask_indices)
        loose = _best_ious(protocol.box_round(model, image, of_loose), targets)
    box, hits["box"] = _best_ious(of_box, targets), _class_hits(of_box, classes)
    areas = image.annotation.areas[mask_indices].tolist()
    return [
        MaskScore(
            row,
            int(mask_index),
            areas[i] / (height * width),
            {count: clicks[count][i] for count in protocol.clicks},
            oracle[i],
            box[i],
            areas[i],
            {count: predicted[count][i] for count in protocol.clicks},
            {count: ious[i] for count, (ious, _) in boundaries.items()},
            {count: scores[i] for count, (_, scores) in boundaries.items()},
            image.annotation.source or image.annotation.name,
            {name: values[i] for name, values in hits.items() if classes[i] >= 0},
            loose[i] if loose else None,
        )
        for i, mask_index in enumerate(mask_indices)
    ]


def _class_hits(prompt_round: PromptRound, classes: Int64[np.ndarray, "n"]) -> list[bool]:
    """Return whether the likeliest class of each prediction's best mask is the annotated one."""
    logits = prompt_round.prediction.class_logits
    if logits is None:
        return [False] * len(classes)
    best = logits[torch.arange(len(logits), device=logits.device), prompt_round.best_index]
    return (best.argmax(1).cpu().numpy() == classes).tolist()


def _best_ious(prompt_round: PromptRound, targets: Targets) -> list[float]:
    """Return the IoU of each prediction's best mask."""
    ious = mask_iou(prompt_round.prediction.logits, targets.masks, targets.valid)
    return _of_best(ious, prompt_round)


def _of_best(values: Tensor, prompt_round: PromptRound) -> list[float]:
    """Return the value of each prediction's best mask."""
    return values.gather(1, prompt_round.best_index[:, None])[:, 0].tolist()


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if values else None


def _standard_error(values: Sequence[Any]) -> float:
    """Return the standard error of the mean of two values or more."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def _cells(means: dict) -> str:
    return "".join(f"{value:10.3f}" for value in by_prompt(means).values())


def table(summary: dict) -> str:
    """Format a summary as a table of fractions: all masks, granularities, sizes, boundaries."""
    size_names = {"small": "to 32 px", "medium": "to 96 px", "large": "above"}
    rows = {"all": summary}
    for breakdown in ("granularity", "size"):
        for name, means in summary[breakdown].items():
            if means["masks"]:
                rows[size_names[name] if breakdown == "size" else name] = means
    lines = [
        f"mean IoU of {counted(summary['masks'], 'mask')} on {counted(summary['images'], 'image')}",
        " " * 9 + "".join(f"{name:>10}" for name in (*by_prompt(summary), "masks")),
    ]
    few = False
    for name, means in rows.items():
        lines.append(f"{name:9}{_cells(means)}{means['masks']:10,}")
        if "standard_error" in means:
            few = True
            lines.append(f"{'  ±':9}{_cells(means['standard_error'])}")
    if few:
        lines.append(f"±: standard error of the mean, of fewer than {FEW_MASKS} masks")
    if summary["protocol"]["refine"]:
        clicks = "first clicks" if summary["protocol"]["feed_mask"] else "clicks"
        lines.append(f"boxes and {clicks}: refined, decoded once more with the masks they got")
    if noise := summary["protocol"]["box_noise"]:
        lines.append(f"loose boxes: each side moved by noise of {100 * noise:g} % of the box")
    for name, title in (("boundary_iou", "Boundary IoU"), ("boundary_f", "boundary F")):
        if name in summary:
            values = "".join(f"  {value:.3f} ({n})" for n, value in summary[name].items())
            lines.append(f"{title}:{values}  (clicks)")
    if accuracy := summary.get("class_accuracy"):
        values = "".join(f"  {accuracy[name]:.3f} ({name})" for name in (*summary["clicks"], "box"))
        lines.append(f"class accuracy:{values}  (clicks, box; {accuracy['masks']:,} masks)")
    calibrated = summary["calibration"]
    error, correlation = calibrated["expected_error"], calibrated["correlation"]
    if error is not None:
        suffix = "" if correlation is None else f", correlation {correlation:.2f}"
        lines.append(
            f"predicted IoU after one click: off by {error:.3f} on average over ten bins{suffix}"
        )
    return "\n".join(lines)
