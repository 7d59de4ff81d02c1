"""COCO's and LVIS's average precision and recall of scored masks, and AR@1000 of proposals.

faster-coco-eval computes the matches and curves; its numbers equal those of pycocotools.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from jaxtyping import Bool, Float, Int, Int64

from gigamask.errors import GigamaskError, counted
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
    federated: bool = False
    """count a mask only where its class was looked for: among the image's annotated masks or its
    `negative_classes`; ignore one without a match where not all of its class are annotated; and
    take the best masks of each image over all classes (LVIS)"""
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

LVIS = CocoProtocol(max_found=(300,), federated=True)
"""LVIS's statistics (Gupta et al. 2019, appendix A, and the package lvis)."""

FREQUENCIES = {"r": "rare", "c": "common", "f": "frequent"}
"""LVIS's groups of classes, by the number of training images: 1 to 10, to 100, above."""
PAIRS = 2**21
"""Pairs of an image and a class that are evaluated at a time, a few hundred bytes each."""


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
    negative_classes: tuple[int, ...] = ()
    """classes that the image is known not to show"""
    not_exhaustive_classes: tuple[int, ...] = ()
    """classes of which not every object is annotated"""

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


def coco_metrics(
    images: Iterable[ImageDetections],
    protocol: CocoProtocol | None = None,
    frequencies: Mapping[int, str] | None = None,
) -> dict:
    """Compute COCO's statistics.

    They are `AP`, `AP50`, `AP75`, `AP small`, `AP medium`, `AP large`, `AP rare`, `AP common` and
    `AP frequent` if the frequencies are known, `AR@k` for each k of `max_found`, and `AR@k small`,
    `AR@k medium` and `AR@k large` for the last k.

    Args:
        images: Masks of each image.
        protocol: How they are scored; the default is COCO's.
        frequencies: One of `FREQUENCIES` for each class.

    Returns:
        The numbers of images and masks (`truth` without crowds), the statistics in [0, 1], and the
        protocol. A statistic is None if there is nothing to find; pycocotools returns -1. If masks
        are matched within classes, `by_class` has AP and AP50 of each class to find.
    """
    protocol = protocol or CocoProtocol()
    truth, detections, count = _datasets(images, protocol)
    counts = {
        "images": count,
        "truth": sum(not record["iscrowd"] for record in truth["annotations"]),
        "found": len(detections["annotations"]),
    }
    classes = [category["id"] for category in truth["categories"]]
    of_class = [frequencies.get(each) for each in classes] if frequencies else []
    slices = _slices(protocol, of_class)
    if not truth["annotations"]:
        return {**counts, **dict.fromkeys(slices), "protocol": asdict(protocol)}
    curves = _curves(truth, detections, protocol)
    means = {name: _mean(curves[name[:2]][where]) for name, where in slices.items()}
    by_class = {"by_class": _by_class(curves["AP"], classes)} if protocol.by_class else {}
    return {**counts, **means, **by_class, "protocol": asdict(protocol)}


def _by_class(precision: np.ndarray, classes: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return AP and AP50 of each class that has annotated masks."""
    every = precision[:, :, :, 0, -1]
    return {
        name: {"AP": float(np.mean(curve)), "AP50": float(np.mean(curve[0]))}
        for name, curve in zip(classes, np.moveaxis(every, 2, 0), strict=True)
        if (curve > -1).any()
    }


def _curves(truth: dict, detections: dict, protocol: CocoProtocol) -> dict[str, np.ndarray]:
    """Return precision and recall, of some classes at a time so that memory is bounded.

    Precision has the axes IoU, recall, class, area, number of masks; recall the same without
    recall.
    """
    evaluation = COCOeval_faster(
        COCO(truth),
        COCO(detections),
        "boundary" if protocol.boundaries else "segm",
        boundary_cpu_count=1,
    )
    evaluation.params.maxDets = list(protocol.max_found)
    classes = [category["id"] for category in truth["categories"]]
    at_once = max(1, PAIRS // len(truth["images"])) if protocol.by_class else len(classes)
    precision, recall = [], []
    for first in range(0, len(classes), at_once):
        group = classes[first : first + at_once]
        members = {*group}
        found = {
            record["image_id"]
            for data in (truth, detections)
            for record in data["annotations"]
            if record["category_id"] in members
        }
        evaluation.params.catIds, evaluation.params.imgIds = group, sorted(found)
        evaluation.evaluate()
        evaluation.accumulate()
        precision.append(evaluation.eval["precision"])
        recall.append(evaluation.eval["recall"])
    return {"AP": np.concatenate(precision, 2), "AR": np.concatenate(recall, 1)}


def _datasets(images: Iterable[ImageDetections], protocol: CocoProtocol) -> tuple[dict, dict, int]:
    """Return annotated and predicted masks as COCO datasets, and the number of images.

    Ids start from 1, since 0 means unmatched.
    """
    sizes, truth, detections = [], [], []
    for number, image in enumerate(images, 1):
        if protocol.federated:
            image = _in_federation(image, protocol.max_found[-1])
        sides = image.truth_classes, image.detection_classes
        if protocol.by_class and (sides[0] is None) != (sides[1] is None):
            raise GigamaskError("pass both truth_classes and detection_classes, or neither")
        height, width = image.truth.size
        sizes.append({"id": number, "height": height, "width": width})
        crowd = np.zeros(len(image.truth), bool) if image.crowd is None else image.crowd
        columns: dict[str, np.ndarray] = {"iscrowd": crowd.astype(int)}
        if image.truth_areas is not None:
            columns["area"] = image.truth_areas
        classes = image.truth_classes if protocol.by_class else None
        truth += _records(number, image.truth, classes, columns, len(truth))
        columns = {"score": image.scores.astype(np.float64)}
        classes = image.detection_classes if protocol.by_class else None
        if protocol.federated and classes is not None:
            # Those with this mark are ignored unless they match.
            columns["lvis_mark"] = np.isin(classes, image.not_exhaustive_classes)
        detections += _records(number, image.detections, classes, columns, len(detections))
    classes = sorted({record["category_id"] for record in truth + detections})
    categories = [{"id": number, "name": str(number)} for number in classes]
    shared = {"images": sizes, "categories": categories}
    return {**shared, "annotations": truth}, {**shared, "annotations": detections}, len(sizes)


def _in_federation(image: ImageDetections, limit: int) -> ImageDetections:
    """Return an image with the masks that count in LVIS; masks without a pixel never do."""
    truth, found = image.truth_classes, image.detection_classes
    if truth is None or found is None:
        raise GigamaskError("LVIS's statistics need truth_classes and detection_classes: pass both")
    areas = image.truth.areas() if image.truth_areas is None else image.truth_areas
    drawn = np.flatnonzero(areas > 0)
    looked_for = {*truth[drawn].tolist(), *image.negative_classes}
    kept = counted_detections(image.scores, found, looked_for, limit)
    kept = kept[image.detections[kept].areas() > 0]
    return replace(
        image,
        truth=image.truth[drawn],
        truth_classes=truth[drawn],
        truth_areas=areas[drawn],
        crowd=None,
        detections=image.detections[kept],
        scores=image.scores[kept],
        detection_classes=found[kept],
    )


def counted_detections(
    scores: Float[np.ndarray, "n"],
    classes: Int[np.ndarray, "n"],
    looked_for: Collection[int],
    limit: int,
) -> Int64[np.ndarray, "k"]:
    """Return the indices of an image's detections that count in LVIS.

    Args:
        scores: Score of each detection.
        classes: Class of each detection.
        looked_for: Classes that the image shows, or is known not to show.
        limit: Number of detections, of any class, that can count.
    """
    best = np.argsort(-scores, kind="stable")[:limit]
    return np.sort(best[np.isin(classes[best], list(looked_for))])


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


def _slices(protocol: CocoProtocol, of_class: Sequence[str | None]) -> dict[str, tuple]:
    """Return the indices of each statistic in the arrays of precision and recall.

    Args:
        protocol: How the masks are scored.
        of_class: Frequency of each class; empty if they are not known.
    """
    every, last = slice(None), len(protocol.max_found) - 1
    areas = {"small": 1, "medium": 2, "large": 3}
    slices: dict[str, tuple] = {
        f"AP{name}": (iou, every, every, 0, last)
        for name, iou in {"": every, "50": 0, "75": 5}.items()
    }
    slices |= {f"AP {name}": (every, every, every, area, last) for name, area in areas.items()}
    for letter, name in FREQUENCIES.items() if of_class else ():
        members = [i for i, frequency in enumerate(of_class) if frequency == letter]
        slices[f"AP {name}"] = (every, every, members, 0, last)
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
    """Format the statistics as two columns."""
    names: Sequence[str] = [name for name in result if name[:2] in ("AP", "AR")]
    head = (
        f"{counted(result['found'], 'mask')} found, {result['truth']:,} to find, on "
        f"{counted(result['images'], 'image')}"
    )
    cells = ("     -" if result[name] is None else f"{result[name]:6.3f}" for name in names)
    return "\n".join([head, *(f"{name:16}{cell}" for name, cell in zip(names, cells, strict=True))])
