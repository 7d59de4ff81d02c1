"""What is looked at while a model trains: the scores of `evaluate` on a fixed few images, and two signs of trouble that the loss does not show.

- "blind": the score of one click when the model is shown another picture. A model whose clicks score as well without the picture draws blobs around
  its prompts; small models trained from scratch stay there for long (docs/measurements.md).
- "automatic": the share of a grid's points whose mask would pass the thresholds of SAM's automatic masks. At 0, "segment everything" comes out empty.

A few masks, always the same, from fine to coarse, are drawn: the truth, the answers to 1 and 3 clicks, and to the box.

Settings: `evaluate.click_evaluation`.

Not here: the scores themselves (`evaluate.interactive`), which checkpoint is kept (`train.checkpoint`).
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
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.evaluation import figures
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore, score_group
from gigamask.evaluation.embedded_images import (
    EmbeddedImage,
    embed_image,
    embed_images,
    scored_masks,
)
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import stability
from gigamask.interfaces import EvaluationResult
from gigamask.models.sam.sam import Sam
from gigamask.rng import make_rng

CLICKS = (1, 3, 5)
ONE_CLICK = (1,)
POINTS_A_SIDE = 8
"""Of the grid of points; SAM's automatic masks take 32."""
LEAST_IOU, LEAST_STABILITY, OFFSET = (
    AutomaticMaskConfig().pred_iou_thresh,
    AutomaticMaskConfig().stability_score_thresh,
    AutomaticMaskConfig().stability_score_offset,
)
"""SAM's thresholds of automatic masks: predicted IoU, and the IoU of the mask cut `OFFSET` above and below 0."""
DRAWN = 4
"""Masks that are drawn, each of another image."""
DRAWN_CLICKS = (1, 3)
BLIND_SHARE = 0.95
"""A model is called blind when another picture costs it less than 5 % of its score."""


@dataclass(frozen=True)
class RankResult:
    """What one process finds: the masks' scores, those on another picture, each image's share of automatic masks, what cannot be
    read, and drawn masks."""

    seen: list[MaskScore] = field(default_factory=list)
    blind: list[MaskScore] = field(default_factory=list)
    automatic: list[float] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    drawn: list[np.ndarray] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class ClickScorer:
    """Scores of a fixed subset of held-out images, of which each process looks at its part."""

    index: Index
    rows: tuple[int, ...]
    filters: MaskFilters
    best_by: str
    world: World = field(default_factory=World)

    @classmethod
    def of(
        cls, asked: ClickEvaluation, out: str, world: World | None = None
    ) -> "ClickScorer | None":
        """Open the data to evaluate on.

        Args:
            asked: the settings.
            out: the run folder; tars without an index are indexed there, once.
            world: the processes that evaluate together.

        Returns:
            The evaluation; None where the settings name no data.
        """
        if not asked.data:
            return None
        index = indexes.open_or_build(asked.data, f"{out}/evaluation")
        filters = MaskFilters(max_area=None, min_predicted_iou=asked.min_predicted_iou)
        order = make_rng(0, "evaluation").permutation(len(index)).tolist()
        usable = islice(
            (row for row in order if len(scored_masks(index, row, filters))), asked.images
        )
        found = cls(index, tuple(sorted(usable)), filters, asked.best_by, world or World())
        if not found.rows:
            act = (
                "loosen --evaluation.min-predicted-iou"
                if index.manifest.masks
                else "give annotated images"
            )
            raise GigamaskError(
                f"--evaluation.data: none of {len(index)} images has a mask to evaluate; {act}"
            )
        found.try_reading()
        return found

    def try_reading(self) -> None:
        """Raises `GigamaskError` when none of the images can be read, which would else show in the midst of training."""
        dataset, told = Sa1bDataset(self.index), []
        for row in self.rows:
            try:
                dataset[row]
                return
            except CorruptSampleError as bad:
                told.append(str(bad))
        raise _unreadable(told)

    @profile_range("evaluation")
    def run(self, model: Sam) -> EvaluationResult:
        """Returns the scores as shares of 1, and what should worry; raises `GigamaskError` when no image can be read."""
        training = model.training
        model.eval()
        with torch.inference_mode():
            verdict = self._look(model)
        model.train(training)
        return verdict

    def _look(self, model: Sam) -> EvaluationResult:
        """Returns what all processes have found together."""
        parts = self.world.gather(self._part(model))
        automatic, left_out = (
            [each for part in parts for each in part.automatic],
            [each for part in parts for each in part.left_out],
        )
        blind = [score for part in parts for score in part.blind]
        if not automatic:
            raise _unreadable(left_out)
        summary = ClickResult(
            ClickProtocol(clicks=CLICKS),
            len(automatic),
            [score for part in parts for score in part.seen],
        ).summary()
        scores = {f"{n} click{'s' if n > 1 else ''}": summary["clicks"][str(n)] for n in CLICKS}
        scores |= {"oracle": summary["oracle"], "box": summary["box"]}
        if blind:  # a single image has no other
            scores["blind"] = float(np.mean([score.clicks[1] for score in blind]))
        scores["automatic"] = float(np.mean(automatic))
        unread = (
            [f"{len(left_out)} of {len(self.rows)} images cannot be read: {left_out[0]}"]
            if left_out
            else []
        )
        subject = f"{self.best_by} on rows {self.rows} of {self.index.digest}, {self.filters}"
        drawn = [row for part in parts for row in part.drawn]
        return EvaluationResult(
            scores,
            self.best_by,
            (*score_warnings(scores), *unread),
            subject,
            figures.sheet(drawn) if drawn else None,
        )

    def _part(self, model: Sam) -> "RankResult":
        """Looks at this process's part of the images, each held against the one before it, the first against the last; two are in memory."""
        found = RankResult()
        part = self.world.part(len(self.rows))
        before = self._before(model, part.start) if part else None
        for row, scene in embed_images(
            model, self.index, self.rows[part.start : part.stop], at_once=1
        ):
            if isinstance(scene, CorruptSampleError):
                found.left_out.append(str(scene))
                continue
            found.seen.extend(self._score(model, scene, row, CLICKS))
            found.automatic.append(_automatic(model, scene))
            found.drawn.extend(self._draw(model, scene, row, found.seen))
            if before and before[0] != row:
                found.blind.extend(
                    self._score(model, replace(scene, embedding=before[1]), row, ONE_CLICK)
                )
            before = row, scene.embedding
        return found

    def _draw(
        self, model: Sam, scene: EmbeddedImage, row: int, seen: Sequence[MaskScore]
    ) -> Iterator[np.ndarray]:
        """Yields a mask of the image as a row of panels, if the image is one that is drawn: of the first a small mask, of the last a large one."""
        rows = sorted(
            {self.rows[int(place)] for place in np.linspace(0, len(self.rows) - 1, DRAWN)}
        )
        if row in rows:
            by_area = sorted(
                (score for score in seen if score.row == row),
                key=lambda score: (score.area_px, score.number),
            )
            chosen = by_area[int((rows.index(row) + 0.5) / len(rows) * len(by_area))]
            yield figures.draw_row(model, scene, chosen, ClickProtocol(clicks=DRAWN_CLICKS))

    def _before(self, model: Sam, place: int) -> tuple[int, Tensor] | None:
        """Returns row and embedding of the image before the one at `place`, and before the first the last; None where no other can be read."""
        dataset = Sa1bDataset(self.index)
        for row in (*self.rows[:place][::-1], *self.rows[:place:-1]):
            with suppress(CorruptSampleError):
                return row, embed_image(model, dataset, row).embedding
        return None

    def _score(
        self, model: Sam, scene: EmbeddedImage, row: int, clicks: tuple[int, ...]
    ) -> list[MaskScore]:
        """Returns the scores of an image's masks."""
        groups = scene.groups(scored_masks(self.index, row, self.filters))
        return [
            score
            for group in groups
            for score in score_group(model, scene, row, group, ClickProtocol(clicks=clicks))
        ]


def _unreadable(told: Sequence[str]) -> GigamaskError:
    """Returns what is said when no image can be read."""
    return GigamaskError(
        f"--evaluation.data: none of the {len(told)} images that are evaluated can be read, the first: {told[0]}"
    )


def score_warnings(scores: dict[str, float]) -> Iterator[str]:
    """Yields a line for each sign of trouble in the scores."""
    if scores["5 clicks"] <= scores["3 clicks"]:
        yield "more clicks do not help: 5 score no better than 3; play more rounds (--prompts.clicks), or train longer"
    if scores.get("blind", 0.0) > BLIND_SHARE * scores["1 click"]:
        yield "blind: one click scores as well on another picture, the model does not look at this one (docs/measurements.md: 'What made tiny look')"
    if not scores["automatic"]:
        yield f"no automatic mask passes predicted IoU {LEAST_IOU} and stability {LEAST_STABILITY}: segmenting everything would come out empty"


def _automatic(model: Sam, scene: EmbeddedImage) -> float:
    """Returns the share of the grid's points of which one of three masks passes the thresholds."""
    decode, passing = scene.decoder(model), 0
    for prompts in scene.mask_size(POINTS_A_SIDE):
        answer = decode(prompts)
        stable = stability(answer.logits.flatten(0, 1), OFFSET).view_as(answer.iou_predictions)
        passing += int(
            ((answer.iou_predictions > LEAST_IOU) & (stable >= LEAST_STABILITY)).any(1).sum()
        )
    return passing / POINTS_A_SIDE**2
