"""The ledger of recipes: what training with each reached, and what its paper published.

Every built-in recipe has an entry in `RESULTS`. Without a result it is "not run": nobody has
reported a training with it to its end by this code. Whoever runs one adds the result here, and
`python -m docs.recipe_cards` writes it into docs/recipes.md.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gigamask.errors import GigamaskError
from gigamask.evaluation import literature

NOT_RUN = "not run"
CPU = "two cores of an AMD EPYC, no GPU"
Scores = Mapping[str, Mapping[str, float]]
"""Scores by benchmark, or by the data that were scored, and metric."""


@dataclass(frozen=True)
class Result:
    """The best that anybody reported with a recipe."""

    date: str
    hardware: str
    command: str
    """without `gigamask`"""
    scores: Scores = field(hash=False)


@dataclass(frozen=True)
class Reproduction:
    """A published experiment that a recipe repeats."""

    model: str
    """model of the published rows in `evaluation.literature`; "" if only a claim is published"""
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
        "0.4 to 2.9 on an H200 (gigamask plan sbd_vit_b --gpu h200, without loading)",
        "up to half a click more is expected, since SAM's prompts meet the image only after its "
        "encoder, and SimpleClick crops to the object (--zoom does). More than a click at 85 % "
        "points at the training. More at 90 % alone points at outlines: masks are predicted on a "
        "grid of 112 cells",
    ),
    "edge_sam": Reproduction(
        "EdgeSAM",
        "1 % of SA-1B",
        "box and one click of 82.0 and 64.6 after the embeddings' phase, 83.0 and 67.5 after that "
        "of the prompts",
        (
            "distill edge_sam --teacher sam_vit_h_4b8939.pth --data SA1B_TARS --out runs/edge",
            "benchmark sa1k runs/edge/prompts --data HELD_OUT_TARS --reproduce edge_sam",
        ),
        "5.0 on an H200 for the phase of the prompts, with the teacher at every visit (gigamask "
        "plan edge_sam --gpu h200, at 19.6 % of its peak, without loading)",
        "SA-1K's thousand images are not published, so that another draw of SA-1B differs by some "
        "tenths. One or two points less is what layer norms without ImageNet's weights may cost. "
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
        "0.8 to 5.5 each on an H200 (gigamask plan data_curve --gpu h200, without loading)",
        "half a million visits are 45, 5 and half an epoch. If 0.1 million is as good as 1 "
        "million, the model or the length limits, not the data",
    ),
}
"""What recipes reproduce."""

RESULTS: Mapping[str, Result | None] = {
    "tiny": Result(
        "2026-11-23",
        CPU,
        "train tiny --data scenes --out runs/tiny",
        {"60 held-out scenes": {"1 click": 0.545, "3 clicks": 0.683, "9 clicks": 0.748}},
    ),
    "photos": Result(
        "2026-11-23",
        CPU,
        "train photos --data bsds_train coco128 coco_tiny_train --out runs/photos",
        {"bsds": {"1 click": 0.535, "3 clicks": 0.757, "oracle": 0.616, "box": 0.718}},
    ),
    "compact": Result(
        "2026-11-23",
        CPU,
        "train compact --data bsds_train coco128 coco_tiny_train --out runs/compact",
        {"bsds": {"1 click": 0.397, "3 clicks": 0.643, "oracle": 0.497, "box": 0.639}},
    ),
    "sam_vit_b": None,
    "sam_vit_l": None,
    "sam_vit_h": None,
    "mixed_prompts": None,
    "one_gpu": None,
    "finetune": None,
    "finetune_vit_l": None,
    "finetune_vit_h": None,
    "finetune_laptop": None,
    "sam2_tiny": None,
    "sam2_small": None,
    "sam2_base_plus": None,
    "sam2_large": None,
    "efficient_sam": None,
    "sbd_vit_b": None,
    "data_curve": None,
    "mae_tiny": Result(
        "2026-11-21",
        CPU,
        "pretrain mae_tiny --data photos --out runs/mae --steps 1500",
        {"its own 1,700 images": {"loss": 0.44}},
    ),
    "mae_vit_b": None,
    "mae_vit_l": None,
    "mae_vit_h": None,
    "sami_vit_t": None,
    "sami_vit_s": None,
    "compact_student": Result(
        "2026-11-24",
        CPU,
        "distill compact_student --teacher runs/photos --data PHOTOS --out runs/student",
        {"bsds": {"1 click": 0.538, "3 clicks": 0.755, "oracle": 0.613, "box": 0.719}},
    ),
    "edge_sam": None,
    "mobile_sam": None,
    "ground": None,
    "ground_tiny": Result(
        "2026-11-22",
        CPU,
        "ground train ground_tiny --segmenter sam --data asked more --queries asked/queries.jsonl "
        "more/queries.jsonl --out words --text minilm --model.text-dim 384 --nonsense-fraction 0",
        {"150 held-out scenes": {"top 1": 0.93}},
    ),
}
"""The best result reported with each built-in recipe; None: not run. docs/measurements.md and
docs/distill.md have these and others."""


def describe(recipe: str) -> dict[str, Any]:
    """Return what a recipe's paper published and what was reached, as `--json` writes them.

    Raises:
        GigamaskError: No published experiment belongs to the recipe.
    """
    reproduction = find(recipe)
    reached = RESULTS[recipe]
    return {
        "recipe": recipe,
        "published": published(recipe),
        "source": source(recipe),
        **asdict(reproduction),
        "result": NOT_RUN if reached is None else asdict(reached),
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
