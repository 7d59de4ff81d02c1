"""COCO's average precision and recall of scored masks, and AR@1000 of proposals.

faster-coco-eval computes the matches and curves; its numbers equal those of pycocotools.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from jaxtyping import Bool, Float, Int

from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks


@dataclass(frozen=True)
class CocoProtocol:
    """Settings that the statistics depend on; saved with every result.

    The defaults are COCO's; `PROPOSALS` is how the SAM paper scores proposals (section 7.3, on
    LVIS v1).
    """

    max_found: tuple[int, ...] = (1, 10, 100)
    """numbers of top-scoring masks to count per image (and class); AP and areas use the last"""
    by_class: bool = True
    """match masks within each class and average over classes; otherwise ignore classes"""
    boundaries: bool = False
    """take the smaller of mask IoU and Boundary IoU, with bands of 2 % of the diagonal: boundary AP
    (Cheng et al. 2021)"""
    iou: str = "mean over the thresholds 0.50, 0.55 ... 0.95"
    precision: str = "interpolated at the recalls 0.00, 0.01 ... 1.00"
    areas_px: str = (
        "small up to 32 x 32, medium up to 96 x 96, large above; in pixels of the stored image, "
        "or the annotated area if there is one"
    )
    crowds: str = (
        "may be matched any number of times, by the fraction of the predicted mask they cover; "
        "count neither as right nor as wrong"
    )
    ties: str = "masks of equal score keep their order"

    def __post_init__(self) -> None:
        if not self.max_found or list(self.max_found) != sorted(
            {max(count, 1) for count in self.max_found}
        ):
            raise GigamaskError(
                "CocoProtocol.max_found must be increasing whole numbers from 1 on "
                f"(got {self.max_found})"
            )


PROPOSALS = CocoProtocol(max_found=(1000,), by_class=False)
"""Class-agnostic recall of 1,000 masks per image: AR@1000."""


@dataclass(frozen=True, eq=False)
class ImageDetections:
    """Annotated and predicted masks of one image."""

    truth: RLEMasks
    """annotated masks"""
    detections: RLEMasks
    """predicted masks"""
    scores: Float[np.ndarray, "_"]
    """score of each predicted mask"""
    crowd: Bool[np.ndarray, "_"] | None = None
    """which annotated masks cover a crowd of objects; None means none"""
    truth_classes: Int[np.ndarray, "_"] | None = None
    """class of each annotated mask; None means that all have the same class"""
    detection_classes: Int[np.ndarray, "_"] | None = None
    """class of each predicted mask; None means that all have the same class"""
    truth_areas: Float[np.ndarray, "_"] | Int[np.ndarray, "_"] | None = None
    """areas of the annotated masks if the data state them, as COCO does for its polygons"""

    def __post_init__(self) -> None:
        if self.truth.size != self.detections.size:
            raise GigamaskError(
                f"annotated masks of size {self.truth.size} and predicted masks of size "
                f"{self.detections.size}: resize both to the stored image"
            )
        for name, values, masks in (
            ("scores", self.scores, self.detections),
            ("detection_classes", self.detection_classes, self.detections),
            ("crowd", self.crowd, self.truth),
            ("truth_classes", self.truth_classes, self.truth),
            ("truth_areas", self.truth_areas, self.truth),
        ):
            if values is not None and len(values) != len(masks):
                raise GigamaskError(
                    f"{len(values)} {name} for {len(masks)} masks: pass one for each"
                )
        if not np.isfinite(self.scores).all():
            mask = int((~np.isfinite(self.scores)).argmax())
            raise GigamaskError(
                f"the score of predicted mask {mask} must be finite (got {self.scores[mask]}): "
                "leave this mask out"
            )


def coco_metrics(images: Iterable[ImageDetections], protocol: CocoProtocol | None = None) -> dict:
    """Compute COCO's statistics.

    They are `AP`, `AP50`, `AP75`, `AP small`, `AP medium`, `AP large`, `AR@k` for each k of
    `max_found`, and `AR@k small`, `AR@k medium` and `AR@k large` for the last k.

    Args:
        images: Masks of each image.
        protocol: How they are scored; the default is COCO's.

    Returns:
        The numbers of images and masks (`truth` without crowds), the statistics in [0, 1], and the
        protocol. A statistic is None if there is nothing to find; pycocotools returns -1.
    """
    protocol = protocol or CocoProtocol()
    truth, detections, count = _datasets(images, protocol)
    counts = {
        "images": count,
        "truth": sum(not record["iscrowd"] for record in truth["annotations"]),
        "found": len(detections["annotations"]),
    }
    if not truth["annotations"]:
        return {**counts, **dict.fromkeys(_slices(protocol)), "protocol": asdict(protocol)}
    evaluation = COCOeval_faster(
        COCO(truth),
        COCO(detections),
        "boundary" if protocol.boundaries else "segm",
        boundary_cpu_count=1,
    )
    evaluation.params.maxDets = list(protocol.max_found)
    evaluation.evaluate()
    evaluation.accumulate()
    curves = {"AP": evaluation.eval["precision"], "AR": evaluation.eval["recall"]}
    means = {name: _mean(curves[name[:2]][where]) for name, where in _slices(protocol).items()}
    return {**counts, **means, "protocol": asdict(protocol)}


def _datasets(images: Iterable[ImageDetections], protocol: CocoProtocol) -> tuple[dict, dict, int]:
    """Return annotated and predicted masks as COCO datasets, and the number of images.

    Ids start from 1, since 0 means unmatched.
    """
    sizes, truth, detections = [], [], []
    for number, image in enumerate(images, 1):
        height, width = image.truth.size
        sizes.append({"id": number, "height": height, "width": width})
        crowd = np.zeros(len(image.truth), bool) if image.crowd is None else image.crowd
        columns = {"iscrowd": crowd.astype(int)}
        if image.truth_areas is not None:
            columns["area"] = image.truth_areas
        classes = image.truth_classes if protocol.by_class else None
        truth += _records(number, image.truth, classes, columns, len(truth))
        columns = {"score": image.scores.astype(np.float64)}
        classes = image.detection_classes if protocol.by_class else None
        detections += _records(number, image.detections, classes, columns, len(detections))
    classes = sorted({record["category_id"] for record in truth + detections})
    categories = [{"id": number, "name": str(number)} for number in classes]
    shared = {"images": sizes, "categories": categories}
    return {**shared, "annotations": truth}, {**shared, "annotations": detections}, len(sizes)


def _records(
    image: int,
    masks: RLEMasks,
    classes: np.ndarray | None,
    extra: dict[str, np.ndarray],
    first_id: int,
) -> list[dict]:
    """Return masks as COCO annotations with extra columns, numbered from `first_id` + 1."""
    columns = {
        "image_id": [image] * len(masks),
        "category_id": [1] * len(masks) if classes is None else classes.tolist(),
        "area": masks.areas().tolist(),
        **{name: values.tolist() for name, values in extra.items()},
        "id": range(first_id + 1, first_id + 1 + len(masks)),
        "segmentation": [{"size": list(masks.size), "counts": text} for text in masks.to_coco()],
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _slices(protocol: CocoProtocol) -> dict[str, tuple]:
    """Return the indices of each statistic in the arrays of precision and recall.

    Precision has the axes IoU, recall, class, area, number of masks; recall the same without
    recall.
    """
    every, last = slice(None), len(protocol.max_found) - 1
    areas = {"small": 1, "medium": 2, "large": 3}
    slices: dict[str, tuple] = {
        f"AP{name}": (iou, every, every, 0, last)
        for name, iou in {"": every, "50": 0, "75": 5}.items()
    }
    slices |= {f"AP {name}": (every, every, every, area, last) for name, area in areas.items()}
    slices |= {f"AR@{k}": (every, every, 0, number) for number, k in enumerate(protocol.max_found)}
    return slices | {
        f"AR@{protocol.max_found[last]} {name}": (every, every, area, last)
        for name, area in areas.items()
    }


def _mean(values: np.ndarray) -> float | None:
    """Return the mean without -1, which marks a class or an area without annotated masks."""
    valid = values[values > -1]
    return float(np.mean(valid)) if valid.size else None


def table(result: dict) -> str:
    """Format the statistics as two columns, in percent."""
    names: Sequence[str] = [name for name in result if name[:2] in ("AP", "AR")]
    head = (
        f"{result['found']:,} masks found, {result['truth']:,} to find, on "
        f"{result['images']:,} images; %"
    )
    cells = ("     -" if result[name] is None else f"{100 * result[name]:6.1f}" for name in names)
    return "\n".join([head, *(f"{name:16}{cell}" for name, cell in zip(names, cells, strict=True))])
