"""Evaluation during training: clicks and boxes on a few fixed images, and two warning signs.

Besides the scores of `evaluation.clicks`:

- "wrong image": the score of one click when the model sees another image. A model that scores
  equally well without the image draws blobs around its prompts; small models trained from scratch
  do so for a long time (docs/log.md).
- "points with a mask": the fraction of a point grid's points with a mask that passes the thresholds
  of SAM's automatic masks. At 0, segmenting everything finds nothing.

A few fixed masks, from fine to coarse, are drawn with the annotation and the predictions for 1 and
3 clicks and the box. The settings are `evaluation.click_evaluation.ClickEvaluation`.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.distributed.precision import PrecisionName, autocast, choose_precision
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World, check_stop
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.evaluation import figures
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore, score_group
from gigamask.evaluation.embedded_images import (
    EmbeddedImage,
    embed_image,
    embed_images,
    scored_masks,
    scored_rows,
)
from gigamask.evaluation.score_names import EXPLAINED, by_prompt
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import calculate_stability_score
from gigamask.interfaces import EvaluationResult
from gigamask.models.promptable import PromptableModel
from gigamask.pixels import RGB, PixelConfig
from gigamask.progress import say, track
from gigamask.rng import make_rng

CLICKS = (1, 3, 5)
ONE_CLICK = (1,)
POINTS_PER_SIDE = 8
"""Points along each side of the grid; SAM's automatic masks use 32."""
AUTOMATIC = AutomaticMaskConfig()
"""Default thresholds of automatic masks."""
DRAWN_MASKS = 4
"""Number of masks that are drawn, each from another image."""
DRAWN_CLICKS = (1, 3)
BLIND_FRACTION = 0.95
"""A model ignores the image if it loses less than 5 % of its score on another image."""


@dataclass(frozen=True)
class RankResult:
    """Result of one process."""

    scores: list[MaskScore] = field(default_factory=list)
    blind: list[MaskScore] = field(default_factory=list)
    """scores of one click with the embedding of another image"""
    automatic: list[float] = field(default_factory=list)
    """fraction of points with a passing mask, by image"""
    skipped: list[str] = field(default_factory=list)
    """errors of images that cannot be read"""
    drawn: list[np.ndarray] = field(default_factory=list, compare=False)
    """rows of the figure"""


@dataclass(frozen=True)
class ClickScorer:
    """Scores a fixed subset of held-out images, divided among the processes."""

    index: Index
    rows: tuple[int, ...]
    filters: MaskFilters
    best_by: str
    world: World = field(default_factory=World)
    precision: PrecisionName = "auto"
    pixels: PixelConfig = RGB

    @classmethod
    def open(
        cls,
        data: Sequence[str],
        folder: str,
        images: int,
        min_predicted_iou: float | None,
        best_by: str,
        world: World | None = None,
        precision: PrecisionName = "auto",
        pixels: PixelConfig = RGB,
    ) -> "ClickScorer":
        """Open the data to evaluate on.

        Args:
            data: Tars, folders of tars, globs, or an index.
            folder: Folder in which tars without an index are indexed, once.
            images: Number of images, drawn among those with a mask.
            min_predicted_iou: Only masks with at least this predicted_iou.
            best_by: Score that selects the best checkpoint.
            world: Processes that evaluate together.
            precision: Number format of the model; auto is bf16 on a GPU and fp32 on a CPU.
            pixels: Channels and window of the model.

        Returns:
            The scorer.

        Raises:
            GigamaskError: No image has a mask that passes the filters, or none can be read.
        """
        index = indexes.open_or_build(data, folder)
        filters = MaskFilters(max_area=None, min_predicted_iou=min_predicted_iou)
        order = make_rng(0, "evaluation").permutation(len(index)).tolist()
        rows = tuple(sorted(islice(scored_rows(index, order, filters), images)))
        if not rows:
            advice = "pass annotated images"
            if index.manifest.masks:
                advice = "loosen --evaluation.min-predicted-iou"
            raise GigamaskError(
                f"--evaluation.data: none of {len(index)} images has a mask to evaluate; {advice}"
            )
        scorer = cls(index, rows, filters, best_by, world or World(), precision, pixels)
        scorer.check_readable()
        masks = sum(len(scored_masks(index, row, filters)) for row in rows)
        say(
            f"  scores: of {counted(len(rows), 'image')} with {counted(masks, 'mask')}; {EXPLAINED}"
        )
        return scorer

    def check_readable(self) -> None:
        """Check before training that at least one image can be read.

        Raises:
            GigamaskError: None can be read.
        """
        dataset, reasons = Sa1bDataset(self.index, pixels=self.pixels), []
        for row in self.rows:
            try:
                dataset[row]
                return
            except CorruptSampleError as error:
                reasons.append(str(error))
        raise _unreadable(reasons)

    @profile_range("evaluation")
    def run(self, model: PromptableModel) -> EvaluationResult:
        """Return the scores in [0, 1] and the warnings.

        Raises:
            GigamaskError: No image can be read.
            EvaluationStoppedError: A stop signal has arrived.
        """
        device = model.device
        precision = choose_precision(self.precision, device)
        with torch.inference_mode(), autocast(precision, device):
            result = self._evaluate(model)
        if precision != "fp32":  # scores of different precisions are not compared
            result = replace(result, subject=f"{result.subject}, {precision}")
        return result

    def _evaluate(self, model: PromptableModel) -> EvaluationResult:
        """Evaluate this process's share and combine the results of all processes."""
        parts = self.world.gather(self._evaluate_part(model))
        automatic = [share for part in parts for share in part.automatic]
        skipped = [reason for part in parts for reason in part.skipped]
        blind = [score for part in parts for score in part.blind]
        if not automatic:
            raise _unreadable(skipped)
        mask_scores = [score for part in parts for score in part.scores]
        protocol = ClickProtocol(clicks=CLICKS)
        summary = ClickResult(protocol, len(automatic), mask_scores).summary()
        scores = by_prompt(summary)
        if "class_accuracy" in summary:
            scores["class accuracy"] = summary["class_accuracy"]["1"]
        if blind:  # a single image has no other
            scores["wrong image"] = float(np.mean([score.clicks[1] for score in blind]))
        scores["points with a mask"] = float(np.mean(automatic))
        warnings = list(score_warnings(scores))
        if skipped:
            warnings.append(
                f"{len(skipped)} of {len(self.rows)} images cannot be read: {skipped[0]}"
            )
        subject = f"{self.best_by} on rows {self.rows} of {self.index.digest}, {self.filters}"
        drawn = [row for part in parts for row in part.drawn]
        picture = figures.stack_rows(drawn) if drawn else None
        of = f"{counted(len(mask_scores), 'mask')} on {counted(len(automatic), 'image')}"
        errors = by_prompt(summary.get("standard_error", {}))
        return EvaluationResult(scores, self.best_by, tuple(warnings), subject, picture, of, errors)

    def _evaluate_part(self, model: PromptableModel) -> RankResult:
        """Evaluate this process's share of the images.

        Each image's prompts are also decoded with the embedding of the previous image (the first
        with that of the last), so that two embeddings are in memory.
        """
        result = RankResult()
        part = self.world.local_range(len(self.rows))
        previous = self._previous(model, part.start) if part else None
        rows = self.rows[part.start : part.stop]
        shown = track(rows, "evaluate")
        most_rows = -(-len(self.rows) // self.world.size)
        for row, image in embed_images(model, self.index, shown, batch_size=1):
            check_stop(self.world)
            if isinstance(image, CorruptSampleError):
                result.skipped.append(str(image))
                continue
            result.scores.extend(self._score(model, image, row, CLICKS))
            result.automatic.append(_passing_fraction(model, image))
            result.drawn.extend(self._draw(model, image, row, result.scores))
            if previous and previous[0] != row:
                result.blind.extend(
                    self._score(model, replace(image, embedding=previous[1]), row, ONE_CLICK)
                )
            previous = row, image.embedding
        for _ in range(most_rows - len(rows)):  # the others have as many images more
            check_stop(self.world)
        return result

    def _draw(
        self, model: PromptableModel, image: EmbeddedImage, row: int, scores: Sequence[MaskScore]
    ) -> Iterator[np.ndarray]:
        """Yield a row of panels if a mask of the image is drawn.

        The first drawn image shows a small mask, the last a large one.
        """
        positions = np.linspace(0, len(self.rows) - 1, DRAWN_MASKS)
        drawn_rows = sorted({self.rows[int(position)] for position in positions})
        if row in drawn_rows:
            by_area = sorted(
                (score for score in scores if score.row == row),
                key=lambda score: (score.area_px, score.mask_index),
            )
            share = (drawn_rows.index(row) + 0.5) / len(drawn_rows)
            chosen = by_area[int(share * len(by_area))]
            yield figures.draw_row(model, image, chosen, ClickProtocol(clicks=DRAWN_CLICKS))

    def _previous(self, model: PromptableModel, position: int) -> tuple[int, Tensor] | None:
        """Return row and embedding of the readable image before a position in `rows`.

        The last precedes the first; None if no other image can be read.
        """
        dataset = Sa1bDataset(self.index, pixels=self.pixels)
        for row in (*self.rows[:position][::-1], *self.rows[:position:-1]):
            with suppress(CorruptSampleError):
                return row, embed_image(model, dataset, row).embedding
        return None

    def _score(
        self, model: PromptableModel, image: EmbeddedImage, row: int, clicks: tuple[int, ...]
    ) -> list[MaskScore]:
        """Return the scores of an image's masks."""
        groups = image.groups(scored_masks(self.index, row, self.filters))
        return [
            score
            for group in groups
            for score in score_group(model, image, row, group, ClickProtocol(clicks=clicks))
        ]


def _unreadable(reasons: Sequence[str]) -> GigamaskError:
    """Return the error that no image can be read."""
    return GigamaskError(
        f"--evaluation.data: none of the {len(reasons)} images to evaluate can be read, the first: "
        f"{reasons[0]}"
    )


def score_warnings(scores: dict[str, float]) -> Iterator[str]:
    """Yield a line for each sign of trouble in the scores."""
    if scores["5 clicks"] <= scores["3 clicks"]:
        yield (
            "more clicks do not help: 5 score no better than 3; train with more rounds "
            "(--prompts.clicks), or longer"
        )
    if scores.get("wrong image", 0.0) > BLIND_FRACTION * scores["1 click"]:
        yield (
            "one click scores as well on a wrong image, so the model ignores the image "
            "(docs/log.md: 'Small models that ignore the image')"
        )
    if not scores["points with a mask"]:
        yield (
            "no automatic mask passes the default thresholds of predicted IoU and stability: "
            "segmenting everything would find nothing"
        )


def _passing_fraction(model: PromptableModel, image: EmbeddedImage) -> float:
    """Return the fraction of the grid's points with a mask that passes the thresholds."""
    decode, passing = image.decoder(model), 0
    least_iou, least_stability = AUTOMATIC.thresholds(model.config.decoder)
    for prompts in image.point_grid_prompts(POINTS_PER_SIDE):
        prediction = decode(prompts)
        iou = prediction.iou_predictions
        logits = prediction.logits.flatten(0, 1)
        stability = calculate_stability_score(logits, AUTOMATIC.stability_score_offset)
        stable = stability.view_as(iou) >= least_stability
        passing += int(((iou > least_iou) & stable).any(1).sum())
    return passing / POINTS_PER_SIDE**2
