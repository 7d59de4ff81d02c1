"""Published scores on the benchmarks of `gigamask benchmark`, each with its source.

Every number was read in its source. Papers differ in what they train on and in which mask counts as
the answer (`evaluation.noc.ANSWERS`), so that a point or a tenth of a click means little.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

RITM = "Sofiiuk et al. 2021 (RITM), arXiv 2102.06583, README of the repository"
MFP_SBD = "Lee et al. 2024 (MFP), arXiv 2404.18448, table 2"
MFP_COCO_LVIS = "Lee et al. 2024 (MFP), arXiv 2404.18448, table 3"
FOCAL_CLICK = "Chen et al. 2022 (FocalClick), README of alibaba/ClickSEG"
FOC_SAM = "Huang et al. 2024 (FocSAM), arXiv 2405.18706, table 1"
EDGE_SAM = "Zhou et al. 2023 (EdgeSAM), arXiv 2312.06660, tables 2 and 3: first mask token"
MEASUREMENTS = "docs/measurements.md, on masks with predicted_iou of at least 0.75"
SBD, COCO_LVIS, SA1B = "SBD", "COCO+LVIS", "SA-1B"


@dataclass(frozen=True)
class PublishedRow:
    """Scores of one model on one benchmark."""

    benchmark: str
    model: str
    trained_on: str
    source: str
    scores: Mapping[str, float] = field(hash=False)
    """by metric: "NoC@85", "NoC@90", "NoC@95", in clicks; "1 click", "box", ... mean IoU of 1"""


def rows(benchmark: str) -> list[PublishedRow]:
    """Return the published scores on a benchmark."""
    return [row for row in ROWS if row.benchmark == benchmark]


def _clicks(
    model: str, trained_on: str, source: str, **noc: tuple[float | None, ...]
) -> Iterator[PublishedRow]:
    """Yield a row for each benchmark from NoC@85, NoC@90 and NoC@95; None is not published."""
    for benchmark, values in noc.items():
        named = zip(("NoC@85", "NoC@90", "NoC@95"), values, strict=False)
        scores = {name: value for name, value in named if value is not None}
        yield PublishedRow(benchmark, model, trained_on, source, scores)


def _iou(
    model: str, trained_on: str, source: str, benchmark: str, **percent: float
) -> PublishedRow:
    """Return a row of mean IoU; the names of the metrics have underscores for spaces."""
    names = {"one_click": "1 click", "two_clicks": "2 clicks", "three_clicks": "3 clicks"}
    scores = {names.get(name, name): value / 100 for name, value in percent.items()}
    return PublishedRow(benchmark, model, trained_on, source, scores)


ROWS = (
    *_clicks(
        *("RITM HRNet-18", SBD, MFP_SBD),
        grabcut=(1.76, 2.04, 3.66),
        berkeley=(1.87, 3.22, 8.35),
        sbd=(3.39, 5.43, 11.65),
        davis=(4.94, 6.71, 13.87),
    ),
    *_clicks("RITM HRNet-18", SBD, RITM, pascalvoc=(2.51,), coco_mval=(None, 4.39)),
    *_clicks(
        *("FocalClick SegFormer-B0", SBD, MFP_SBD),
        grabcut=(1.66, 1.90),
        berkeley=(None, 3.14),
        sbd=(4.34, 6.51),
        davis=(5.02, 7.06),
    ),
    *_clicks(
        *("SimpleClick ViT-B", SBD, MFP_SBD),
        grabcut=(1.40, 1.54, 2.16),
        berkeley=(1.44, 2.46, 6.70),
        sbd=(3.28, 5.24, 11.24),
        davis=(4.10, 5.48, 12.24),
    ),
    *_clicks(
        *("MFP ViT-B", SBD, MFP_SBD),
        grabcut=(1.38, 1.48, 1.92),
        berkeley=(1.39, 2.17, 6.18),
        sbd=(3.21, 5.24, 11.20),
        davis=(3.92, 5.32, 11.27),
    ),
    *_clicks(
        *("RITM HRNet-32", COCO_LVIS, MFP_COCO_LVIS),
        grabcut=(1.46, 1.56, 2.48),
        berkeley=(1.43, 2.10, 5.41),
        sbd=(3.59, 5.71, 12.00),
        davis=(4.11, 5.34, 11.51),
    ),
    *_clicks("RITM HRNet-32", COCO_LVIS, RITM, pascalvoc=(2.57,), coco_mval=(None, 2.97)),
    *_clicks(
        *("FocalClick SegFormer-B3", COCO_LVIS, FOCAL_CLICK),
        grabcut=(1.44, 1.50),
        berkeley=(1.55, 1.92),
        sbd=(3.53, 5.59),
        davis=(3.61, 4.90),
        pascalvoc=(2.46, 2.88),
        coco_mval=(2.32, 3.12),
    ),
    *_clicks(
        *("SimpleClick ViT-B", COCO_LVIS, MFP_COCO_LVIS),
        grabcut=(1.38, 1.48, 1.80),
        berkeley=(1.36, 1.97, 5.05),
        sbd=(3.43, 5.62, 11.92),
        davis=(3.66, 5.06, 10.04),
    ),
    *_clicks(
        *("SimpleClick ViT-H", COCO_LVIS, FOC_SAM),
        grabcut=(None, 1.50),
        berkeley=(None, 1.75),
        sbd=(None, 4.70),
        davis=(None, 4.78),
    ),
    *_clicks(
        *("MFP ViT-B", COCO_LVIS, MFP_COCO_LVIS),
        grabcut=(1.34, 1.42, 1.70),
        berkeley=(1.35, 1.90, 4.68),
        sbd=(3.26, 5.34, 11.65),
        davis=(3.37, 4.81, 9.23),
    ),
    *_clicks(
        *("SAM ViT-H", SA1B, FOC_SAM),
        grabcut=(None, 1.88),
        berkeley=(None, 2.09),
        sbd=(None, 7.62),
        davis=(None, 5.19),
    ),
    _iou(
        *("SAM ViT-H", SA1B, EDGE_SAM, "sa1k"),
        one_click=76.5,
        two_clicks=83.4,
        three_clicks=85.1,
        box=86.7,
    ),
    _iou(
        *("MobileSAM", "1 % of SA-1B", EDGE_SAM, "sa1k"),
        one_click=64.6,
        two_clicks=73.4,
        three_clicks=76.2,
        box=82.0,
    ),
    _iou(
        *("EdgeSAM", "1 % of SA-1B", EDGE_SAM, "sa1k"),
        one_click=67.5,
        two_clicks=76.1,
        three_clicks=79.0,
        box=83.0,
    ),
    _iou(
        *("EdgeSAM, embeddings only", "1 % of SA-1B", f"{EDGE_SAM}, and 5 (a)", "sa1k"),
        one_click=64.6,
        two_clicks=73.3,
        three_clicks=76.2,
        box=82.0,
    ),
    _iou("the box itself", "nothing", MEASUREMENTS, "bsds", box=56.7),
    _iou("an ellipse in the box", "nothing", MEASUREMENTS, "bsds", box=59.3),
    _iou(
        "the best fixed disc; of three",
        "nothing",
        MEASUREMENTS,
        "bsds",
        one_click=25.9,
        oracle=40.7,
    ),
    _iou(
        *("Felzenszwalb's region; of three", "nothing", MEASUREMENTS, "bsds"),
        one_click=43.4,
        oracle=54.9,
    ),
    _iou("a second person, asked nothing", "-", MEASUREMENTS, "bsds", oracle=86.3),
)
"""All rows. SAM's ViT-B and ViT-L have no published number of clicks that we could read with its
protocol."""
