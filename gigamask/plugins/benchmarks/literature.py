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
EFFICIENT_SAM = "Xiong et al. 2023 (EfficientSAM), arXiv 2312.00863, tables 4 and 5"
EFFICIENTVIT_SAM = "Zhang et al. 2024 (EfficientViT-SAM), arXiv 2402.05008, tables 2 to 4"
EDGE_SAM_README = "README of chongzhou96/EdgeSAM: first mask token, boxes of ViTDet-H"
ONE_PERCENT, RANDOM = "1 % of SA-1B", "SA-1B; random clicks"
MEASUREMENTS = "docs/measurements/small_models.md, on masks with predicted_iou of at least 0.75"
UNTRAINED = "nothing", MEASUREMENTS, "bsds"
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


def _masks(
    model: str, trained_on: str, source: str, **percent: tuple[float | None, ...]
) -> Iterator[PublishedRow]:
    """Yield a row for each of coco and lvis.

    The values are AP and AP small, medium and large; mean IoU of the annotated box, small, medium
    and large; and mean IoU after 1, 3 and 5 clicks. None is not published.
    """
    names = ("AP", "AP_small", "AP_medium", "AP_large")
    names += ("box", "box_small", "box_medium", "box_large", "one_click", "three_clicks")
    for benchmark, values in percent.items():
        named = zip((*names, "five_clicks"), values, strict=False)
        scores = {name: value for name, value in named if value is not None}
        yield _iou(model, trained_on, source, benchmark, **scores)


def _iou(
    model: str, trained_on: str, source: str, benchmark: str, **percent: float
) -> PublishedRow:
    """Return a row of mean IoU or AP; the names of the metrics have underscores for spaces."""
    names = {"one": "1", "two": "2", "three": "3", "five": "5"}
    scores = {}
    for name, value in percent.items():
        first, *others = name.split("_")
        scores[" ".join([names.get(first, first), *others])] = value / 100
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
        *("MobileSAM", ONE_PERCENT, EDGE_SAM, "sa1k"),
        one_click=64.6,
        two_clicks=73.4,
        three_clicks=76.2,
        box=82.0,
    ),
    _iou(
        *("EdgeSAM", ONE_PERCENT, EDGE_SAM, "sa1k"),
        one_click=67.5,
        two_clicks=76.1,
        three_clicks=79.0,
        box=83.0,
    ),
    _iou(
        *("EdgeSAM, embeddings only", ONE_PERCENT, f"{EDGE_SAM}, and 5 (a)", "sa1k"),
        one_click=64.6,
        two_clicks=73.3,
        three_clicks=76.2,
        box=82.0,
    ),
    *_masks(
        *("SAM ViT-H", SA1B, EFFICIENTVIT_SAM),
        coco=(46.5, 30.8, 51.0, 61.7, 77.4, 72.3, 80.4, 81.8, 58.4, 69.6, 71.4),
        lvis=(44.2, 31.8, 57.1, 65.3, 77.0, 70.6, 87.5, 89.9, 59.2, 66.0, 66.8),
    ),
    *_masks(
        *("MobileSAM", ONE_PERCENT, EFFICIENTVIT_SAM),
        coco=(38.7, 23.7, 42.2, 54.3),
        lvis=(37.0, 24.7, 47.8, 59.1),
    ),
    *_masks(
        *("EdgeSAM", ONE_PERCENT, EFFICIENTVIT_SAM),
        coco=(42.1, 26.6, 46.7, 56.9),
        lvis=(39.8, 28.6, 51.3, 59.3),
    ),
    *_masks(
        *("EfficientSAM-S", SA1B, EFFICIENTVIT_SAM),
        coco=(44.4, 28.4, 48.3, 60.1),
        lvis=(41.5, 29.7, 53.4, 62.2),
    ),
    *_masks(
        *("EfficientViT-SAM-L0", SA1B, EFFICIENTVIT_SAM),
        coco=(45.7, 28.2, 49.5, 63.4),
        lvis=(41.8, 28.8, 53.4, 64.7),
    ),
    *_masks(
        *("EfficientViT-SAM-XL1", SA1B, EFFICIENTVIT_SAM),
        coco=(47.8, 30.5, 51.8, 64.7, 79.9, 75.8, 82.2, 83.8, 59.8, 71.3, 75.3),
        lvis=(44.4, 31.6, 57.0, 66.4, 79.9, 74.4, 88.4, 91.6, 56.6, 67.0, 71.7),
    ),
    *_masks("SAM ViT-H", SA1B, EDGE_SAM_README, coco=(46.1, 33.6, 51.9, 57.7)),
    *_masks("MobileSAM", ONE_PERCENT, EDGE_SAM_README, coco=(39.4, 26.9, 44.4, 52.2)),
    *_masks("EdgeSAM", ONE_PERCENT, EDGE_SAM_README, coco=(42.2, 29.6, 47.6, 53.9)),
    *_masks(
        *("SAM ViT-H", RANDOM, EFFICIENT_SAM),
        coco=(46.5, 30.8, 51.0, 61.7, 78.4, None, None, None, 55.6, 74.1),
        lvis=(44.7, 32.5, 57.6, 65.5, 78.9, None, None, None, 59.8, 75.2),
    ),
    *_masks(
        *("MobileSAM", f"1 % of {RANDOM}", EFFICIENT_SAM),
        coco=(38.7, 23.7, 42.2, 54.3, 74.2, None, None, None, 43.7, 59.7),
        lvis=(34.4, 23.8, 44.9, 53.7, 73.8, None, None, None, 51.0, 54.4),
    ),
    *_masks(
        *("EfficientSAM-Ti", RANDOM, EFFICIENT_SAM),
        coco=(42.3, 26.7, 46.2, 57.4, 75.7, None, None, None, 45.5, 67.2),
        lvis=(39.9, 28.9, 51.0, 59.9, 74.3, None, None, None, 52.7, 66.8),
    ),
    *_masks(
        *("EfficientSAM-S", RANDOM, EFFICIENT_SAM),
        coco=(44.4, 28.4, 48.3, 60.1, 76.9, None, None, None, 50.0, 69.8),
        lvis=(42.3, 30.8, 54.0, 62.3, 75.4, None, None, None, 56.2, 68.7),
    ),
    _iou("the box itself", *UNTRAINED, box=56.7),
    _iou("an ellipse in the box", *UNTRAINED, box=59.3),
    _iou("the best fixed disc; of three", *UNTRAINED, one_click=25.9, oracle=40.7),
    _iou("Felzenszwalb's region; of three", *UNTRAINED, one_click=43.4, oracle=54.9),
    _iou("another person; best of several", *UNTRAINED, one_click=56.0, oracle=86.3, box=85.3),
)
"""All rows. SAM's ViT-B and ViT-L have no published number of clicks that we could read with its
protocol."""
