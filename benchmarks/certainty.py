"""Certainties of proposals: which score of a mask says best whether a person would accept it.

Masks are proposed as by *Let it annotate the rest* on images of annotated data, by the given
weights and by models trained a few steps from them on the first images, as *Train* does. A proposal
is good if its IoU with an annotated mask is above .75. Each score also decides which of overlapping
proposals stays, as on the page, so that each has proposals of its own.

Four Markdown tables: the AUROC of each score for good proposals, the share of good ones in the
fifth with the highest scores, how many of those above a threshold are good, and how many are good
at each certainty that the page states.

Run: python -m benchmarks.certainty cells bsds_val [--weights starter] [--steps 0 12 24]
     [--images 24] [--points-per-side 16]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import gigamask
from gigamask import files
from gigamask.data import tar
from gigamask.data.dataset import Sa1bDataset
from gigamask.datatools.export_formats import COCO, SHARDS
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.interfaces import NoEvaluation
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.sam import Sam
from gigamask.plugins.serve.proposals import MIN_PREDICTED_IOU, without_overlaps
from gigamask.plugins.serve.training_round import RoundSettings, make_config
from gigamask.training.checkpoint import load_model
from gigamask.workflows.open_data import open_or_build_temporary
from gigamask.workflows.train import train

GOOD_IOU = 0.75
TOP_SHARE = 0.2
THRESHOLD = 0.9
"""The one that the page begins with."""
TRAIN_IMAGES = 4
BANDS = (0.0, 0.6, 0.7, 0.8, 0.9, 1.01)
"""Certainties of the last table."""

Scores = np.ndarray
Certainty = Callable[[Scores, Scores], Scores]
Annotated = tuple[MaskProposals, RLEMasks]


def ranks(scores: Scores) -> Scores:
    """Return the share of scores below each; equal ones count half."""
    ordered = np.sort(scores)
    both = np.searchsorted(ordered, scores) + np.searchsorted(ordered, scores, "right")
    return both / (2 * len(scores))


CERTAINTIES: dict[str, Certainty] = {
    "smaller": np.minimum,
    "predicted IoU": lambda iou, stability: iou,
    "stability": lambda iou, stability: stability,
    "product": lambda iou, stability: iou * stability,
    "mean": lambda iou, stability: (iou + stability) / 2,
    "mean of ranks": lambda iou, stability: (ranks(iou) + ranks(stability)) / 2,
}


def trained(weights: str, data: Sa1bDataset, steps: int) -> Sam:
    """Return the weights after some steps of the page's training on the first images."""
    if not steps:
        return gigamask.load_model(weights)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shards = folder / "train" / SHARDS
        shards.mkdir(parents=True)
        found = [data.read(row) for row in range(TRAIN_IMAGES)]
        members = [
            (f"{each.name.rpartition(':')[2]}.{suffix}", payload)
            for each in found
            for suffix, payload in (("jpg", each.jpg), ("json", each.json or b""))
        ]
        tar.write(shards / "0.tar", members)
        files.write_text(folder / "train" / COCO, '{"categories": [{"name": "object"}]}')
        settings = RoundSettings(weights, 1.0, "cpu", "", steps)
        train(make_config(folder, settings).with_(evaluation=NoEvaluation()))
        return load_model(str(folder / "run"), "cpu")


def propose(model: Sam, data: Sa1bDataset, images: int, points_per_side: int) -> list[Annotated]:
    """Return for each image the masks that the page would find, and the annotated ones."""
    least = max(model.config.decoder.pred_iou_thresh, MIN_PREDICTED_IOU)
    generator = SamAutomaticMaskGenerator(
        model, points_per_side=points_per_side, pred_iou_thresh=least
    )
    found = []
    for row in range(TRAIN_IMAGES, min(TRAIN_IMAGES + images, len(data))):
        pixels, annotation = data[row]
        found.append((generator.generate_proposals(pixels), annotation.masks))
    return found


def judge(images: Sequence[Annotated], certainty: Certainty) -> tuple[Scores, np.ndarray]:
    """Return the score of each proposal that overlaps no better one, and whether it is good."""
    iou, stability = (
        np.concatenate([getattr(each, name) for each, _ in images])
        for name in ("predicted_iou", "stability_score")
    )
    split = np.cumsum([len(each) for each, _ in images])[:-1]
    kept, good = [], []
    for (proposals, truth), scores in zip(
        images, np.split(certainty(iou, stability), split), strict=True
    ):
        # Both scores are the one that is judged, so that the page orders by it.
        scored = replace(proposals, predicted_iou=scores, stability_score=scores)
        left = without_overlaps(scored)
        kept.append(left.predicted_iou)
        good.append(truth.iou(left.masks).max(0, initial=0) > GOOD_IOU)
    return np.concatenate(kept), np.concatenate(good)


def auroc(scores: Scores, good: np.ndarray) -> float:
    """Return the share of pairs of a good and another proposal in which the good one is higher."""
    others = np.sort(scores[~good])
    below, upto = (np.searchsorted(others, scores[good], side) for side in ("left", "right"))
    return float((below + upto).mean() / (2 * len(others)))


def cells(judged: Sequence[tuple[Scores, np.ndarray]]) -> list[list[str]]:
    """Return a row of each of the tables, a cell for each certainty."""
    rows: list[list[str]] = [[], [], []]
    for scores, good in judged:
        best = np.argsort(-scores, kind="stable")[: round(TOP_SHARE * len(scores))]
        above = good[scores >= THRESHOLD]
        rows[0].append(f"{auroc(scores, good):.2f}")
        rows[1].append(f"{good[best].mean():.0%}")
        rows[2].append(f"{above.sum()} of {len(above)}")
    return rows


def bands(scores: Scores, good: np.ndarray) -> list[str]:
    """Return how many of the proposals in each band of certainty are good."""
    found = np.digitize(scores, BANDS) - 1
    return [f"{good[found == i].sum()} of {(found == i).sum()}" for i in range(len(BANDS) - 1)]


def main() -> None:
    """Print the four tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="+", help="a tar, a folder of tars or an index each")
    parser.add_argument("--weights", default="starter")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 12, 24])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--points-per-side", type=int, default=16, help="the page has 32")
    told = parser.parse_args()
    torch.set_num_threads(1)
    tables: list[list[str]] = [[], [], [], []]
    for path in told.data:
        with open_or_build_temporary(path) as index:
            data = Sa1bDataset(index)
            for steps in told.steps:
                model = trained(told.weights, data, steps)
                images = propose(model, data, told.images, told.points_per_side)
                judged = [judge(images, each) for each in CERTAINTIES.values()]
                good = judged[0][1]
                head = [Path(path).name, str(steps), str(len(good)), f"{good.mean():.0%}"]
                of_page = judged[list(CERTAINTIES).index("mean")]
                rows = [*cells(judged), bands(*of_page)]
                for table, row in zip(tables, rows, strict=True):
                    table.append(f"| {' | '.join([*head, *row])} |")
    titles = (
        f"AUROC for an IoU above {GOOD_IOU}",
        f"Good ones of the {TOP_SHARE:.0%} that are most certain",
        f"Good ones of those of at least {THRESHOLD}",
        "Good ones at each certainty of the page",
    )
    bounds = [f"{low} to {high:.1f}" for low, high in pairwise(BANDS)]
    for title, table, names in zip(titles, tables, [CERTAINTIES] * 3 + [bounds], strict=True):
        columns = ["data", "steps", "proposals", "good", *names]
        print(f"\n{title}:\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        print(*table, sep="\n")


if __name__ == "__main__":
    main()
