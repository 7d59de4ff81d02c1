"""Published experiments that recipes repeat, and what their papers reached."""

from dataclasses import asdict, dataclass
from typing import Any

from gigamask.errors import GigamaskError
from gigamask.plugins.benchmarks import literature


@dataclass(frozen=True)
class Reproduction:
    """A published experiment that a recipe repeats."""

    model: str
    """model of the published rows in `literature`; "" if only a claim is published"""
    trained_on: str
    expected: str
    """what should come out"""
    commands: tuple[str, ...]
    hours: str
    """planned, not measured"""
    deviation: str
    """what another result would mean"""


REPRODUCTIONS = {
    "sbd_vit_b": Reproduction(
        "SimpleClick ViT-B",
        literature.SBD,
        "about SimpleClick's numbers of clicks: the same data, initial weights (MAE ViT-B), input "
        "size (448) and length",
        (
            "convert SBD/inst --images SBD/img --list SBD/train.txt --out sbd_train",
            "train sbd_vit_b --data sbd_train --init mae:mae_pretrain_vit_base.pth --out runs/sbd",
            "benchmark grabcut runs/sbd --data GrabCut --reproduce sbd_vit_b",
        ),
        "0.5 to 2.9 on an H200 (gigamask plan sbd_vit_b --gpu h200, without loading)",
        "up to half a click more is expected, since SAM's prompts meet the image only after its "
        "encoder, and SimpleClick crops to the object. More than a click at NoC@85 points at the "
        "training. More at NoC@90 alone points at outlines: masks are predicted on a grid of 112 "
        "cells",
    ),
    "edge_sam": Reproduction(
        "EdgeSAM",
        "1 % of SA-1B",
        "box and one click of .820 and .646 after the embeddings' phase, .830 and .675 after that "
        "of the prompts",
        (
            "distill edge_sam --teacher sam_vit_h_4b8939.pth --data SA1B_TARS --out runs/edge",
            "benchmark sa1k runs/edge/prompts --data HELD_OUT_TARS --reproduce edge_sam",
        ),
        "6.1 on an H200 for the phase of the prompts, with the teacher at every visit (gigamask "
        "plan edge_sam --gpu h200, at 16.1 % of its peak, without loading)",
        "SA-1K's thousand images are not published, so that another draw of SA-1B differs by some "
        "thousandths. .01 or .02 less is what layer norms without ImageNet's weights may cost. "
        "No gain from the second phase means that its clicks do not correct",
    ),
    "data_curve": Reproduction(
        "",
        "",
        "SAM's paper, section 7.6: 0.1 million images are clearly worse, 1 million (10 %) about as "
        "good as all 11 million; here 0.01 (1 tar), 0.1 (9 tars) and 1 million (90 tars) at equal "
        "updates",
        (
            "train data_curve --data sa_000000.tar --out runs/curve_10k",
            "train data_curve --data 'sa_00000[0-8].tar' --out runs/curve_100k",
            "train data_curve --data 'sa_0000[0-8]?.tar' --out runs/curve_1m",
            "benchmark sa1k runs/curve_1m --data HELD_OUT_TARS --reproduce data_curve",
        ),
        "0.9 to 5.4 each on an H200 (gigamask plan data_curve --gpu h200, without loading)",
        "half a million visits are 45, 5 and half an epoch. If 0.1 million is as good as 1 "
        "million, the model or the length limits, not the data",
    ),
}
"""What recipes reproduce."""


def describe(recipe: str) -> dict[str, Any]:
    """Return what a recipe's paper published, and how to repeat it, as `--json` writes them.

    Raises:
        GigamaskError: No published experiment belongs to the recipe.
    """
    reproduction = find(recipe)
    return {
        "recipe": recipe,
        "published": published(recipe),
        "source": source(recipe),
        **asdict(reproduction),
    }


def find(recipe: str) -> Reproduction:
    """Return the experiment that a recipe reproduces.

    Raises:
        GigamaskError: There is none.
    """
    if recipe not in REPRODUCTIONS:
        raise GigamaskError(
            f"--reproduce {recipe}: no published experiment belongs to it; choose from "
            f"{', '.join(REPRODUCTIONS)}"
        )
    return REPRODUCTIONS[recipe]


def published(recipe: str) -> dict[str, dict[str, float]]:
    """Return the published scores of what a recipe reproduces, by benchmark and metric."""
    reproduction = find(recipe)
    scores: dict[str, dict[str, float]] = {}
    for row in literature.ROWS:
        if (row.model, row.trained_on) == (reproduction.model, reproduction.trained_on):
            scores.setdefault(row.benchmark, {}).update(row.scores)
    return scores


def source(recipe: str) -> str:
    """Return the sources of the published scores."""
    reproduction = find(recipe)
    key = reproduction.model, reproduction.trained_on
    sources = [row.source for row in literature.ROWS if (row.model, row.trained_on) == key]
    return "; ".join(dict.fromkeys(sources))
