"""What is looked at while a model trains: the scores of `evaluate` on a fixed few images, and two signs of trouble that the loss does not show.

- "blind": the score of one click when the model is shown another picture. A model whose clicks score as well without the picture draws blobs around
  its prompts; small models trained from scratch stay there for long (docs/measurements.md).
- "automatic": the share of a grid's points whose mask would pass the thresholds of SAM's automatic masks. At 0, "segment everything" comes out empty.

Enters: a `Segmentation` run. Leaves: a value that the training loop asks every so many updates.

Not here: the scores themselves (`evaluate.interactive`), which checkpoint is kept (`train.checkpoint`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gigamask.contracts import Prompts
from gigamask.data import index as indexes
from gigamask.data.choose import Filters
from gigamask.data.index import Index
from gigamask.data.shards import Shards
from gigamask.draws import draw
from gigamask.evaluate.interactive import MaskScore, Protocol, Result, Scene, look, score_group, scored
from gigamask.faults import BadSample, Fault
from gigamask.model.sam import Sam
from gigamask.seams import Evaluator, Verdict
from gigamask.train.segmentation import Segmentation

CLICKS = (1, 3, 5)
POINTS_A_SIDE = 8
"""Of the grid of points; SAM's automatic masks take 32."""
LEAST_IOU, LEAST_STABILITY, OFFSET = 0.88, 0.95, 1.0
"""SAM's thresholds of automatic masks (`automatic_mask_generator.py`): predicted IoU, and the IoU of the mask cut `OFFSET` above and below 0."""
BLIND_SHARE = 0.95
"""A model is called blind when another picture costs it less than 5 % of its score."""


@dataclass(frozen=True)
class Progress(Evaluator):
    """Scores of a fixed subset of held-out images."""

    index: Index
    rows: tuple[int, ...]
    filters: Filters
    best_by: str

    @classmethod
    def of(cls, run: Segmentation) -> "Progress | None":
        """Returns the evaluator of a run, None where it has no data to evaluate on; tars without an index are indexed once, into the run folder."""
        asked = run.evaluation
        if not asked.data:
            return None
        index = indexes.open_or_build(asked.data, f"{run.out}/evaluation")
        filters = Filters(max_area=None, min_predicted_iou=asked.min_predicted_iou)
        usable = np.array([row for row in range(len(index)) if len(scored(index, row, filters))], np.int64)
        if not len(usable):
            raise Fault(f"--evaluation.data: none of {len(index)} images has a mask to evaluate; loosen --evaluation.min-predicted-iou")
        taken = draw(0, "evaluation").permutation(usable)[: asked.images]
        return cls(asked.every, index, tuple(sorted(taken.tolist())), filters, asked.best_by)

    def run(self, model: Sam) -> Verdict:
        """Returns the scores as shares of 1, and what should worry."""
        training = model.training
        model.eval()
        with torch.inference_mode():
            found = [each for scene, other, row in self._scenes(model) for each in self._look(model, scene, other, row)]
            automatic = [_automatic(model, scene) for scene, _, _ in self._scenes(model)]
        model.train(training)
        summary = Result(Protocol(clicks=CLICKS), len(automatic), [score for score, _ in found]).summary()
        scores = {f"{n} click{'s' if n > 1 else ''}": summary["clicks"][str(n)] for n in CLICKS}
        scores |= {"oracle": summary["oracle"], "box": summary["box"]}
        scores |= {"blind": float(np.mean([blind for _, blind in found])), "automatic": float(np.mean(automatic))}
        return Verdict(scores, self.best_by, tuple(worries(scores)))

    def _scenes(self, model: Sam) -> Iterator[tuple[Scene, Scene, int]]:
        """Yields each image that can be read and the one before it, of the first the last."""
        shards = Shards(self.index.shard_paths)
        scenes = []
        for row in self.rows:
            try:
                scenes.append((look(model, self.index, shards, row), row))
            except BadSample:
                continue
        for place, (scene, row) in enumerate(scenes):
            yield scene, scenes[place - 1][0], row

    def _look(self, model: Sam, scene: Scene, other: Scene, row: int) -> Iterator[tuple[MaskScore, float]]:
        """Yields each mask's scores, and its score after one click on the other picture."""
        for group in scene.groups(scored(self.index, row, self.filters)):
            seen = score_group(model, scene, row, group, Protocol(clicks=CLICKS))
            blind = score_group(model, replace(scene, embedding=other.embedding), row, group, Protocol(clicks=(1,)))
            yield from zip(seen, (score.clicks[1] for score in blind), strict=True)


def worries(scores: dict[str, float]) -> Iterator[str]:
    """Yields a line for each sign of trouble in the scores."""
    if scores["5 clicks"] <= scores["3 clicks"]:
        yield "more clicks do not help: 5 score no better than 3; play more rounds (--policy.clicks), or train longer"
    if scores["blind"] > BLIND_SHARE * scores["1 click"]:
        yield "blind: one click scores as well on another picture, the model does not look at this one; see 'What made tiny look' in the docs"
    if not scores["automatic"]:
        yield f"no automatic mask passes predicted IoU {LEAST_IOU} and stability {LEAST_STABILITY}: segmenting everything would come out empty"


def _automatic(model: Sam, scene: Scene) -> float:
    """Returns the share of the grid's points of which one of three masks passes the thresholds."""
    height, width = scene.frame.resized
    steps = (torch.arange(POINTS_A_SIDE) + 0.5) / POINTS_A_SIDE
    points = torch.cartesian_prod(steps * width, steps * height).to(scene.embedding) - 0.5
    labels = torch.tensor([1, -1], device=points.device).expand(len(points), 2)
    prompts = Prompts(torch.stack([points, torch.zeros_like(points)], 1), labels, None, several=True)
    answer = scene.decoder(model)(prompts)
    passing = (answer.iou > LEAST_IOU) & (_stability(answer.logits) > LEAST_STABILITY)
    return float(passing.any(1).float().mean())


def _stability(logits: Tensor) -> Tensor:
    """Returns the IoU of each mask thresholded above 0 and below."""
    inner, outer = (logits > OFFSET).sum((2, 3)), (logits > -OFFSET).sum((2, 3))
    return inner / outer.clamp(min=1)
