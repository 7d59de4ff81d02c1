"""Average precision and recall of scored masks by the COCO protocol: its twelve numbers, and AR@1000 of proposals.

Enters each image's truth and the masks found in it, as runs, with a score for each; leaves the statistics by name, fractions of 1. Matching and
the curves are faster-coco-eval's, whose numbers are pycocotools' own; here is only what hands it our masks and names its answers.

Not here: where masks come from (`predict`), IoU after clicks (`interactive`), scores of boundaries (`boundary_scores`).
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
    """What the statistics depend on besides the masks; written beside every result.

    The defaults are COCO's; `PROPOSALS` is how the SAM paper scores proposals (section 7.3, on LVIS v1).
    """

    max_found: tuple[int, ...] = (1, 10, 100)
    """how many masks of the highest score count in each image (of each class, where classes are told apart); the last is that of AP and of areas"""
    by_class: bool = True
    """match masks of one class only, and take the mean over classes; else a mask may match any truth"""
    boundaries: bool = False
    """in the place of the masks' IoU the least of it and their Boundary IoU, bands 2 % of the diagonal wide: boundary AP (Cheng et al. 2021)"""
    iou: str = "mean over the thresholds 0.50, 0.55 ... 0.95"
    precision: str = "interpolated at the recalls 0.00, 0.01 ... 1.00"
    areas_px: str = "small up to 32 x 32, medium up to 96 x 96, large above; pixels of the stored image, of the truth's stated area where it has one"
    crowds: str = "may be matched any number of times, by the share of the found mask they cover; neither right nor wrong"
    ties: str = "masks of equal score keep their order"

    def __post_init__(self) -> None:
        if not self.max_found or list(self.max_found) != sorted(
            {max(each, 1) for each in self.max_found}
        ):
            raise GigamaskError(
                f"Protocol.max_found is {self.max_found}, it must be whole numbers from 1 that increase; give others"
            )


PROPOSALS = CocoProtocol(max_found=(1000,), by_class=False)
"""Class-agnostic recall of 1,000 masks an image: AR@1000."""


@dataclass(frozen=True, eq=False)
class ImageDetections:
    """One image's truth and the masks found in it.

    `crowd` marks the truth that stands for many objects at once; none does where it is left out. Classes are any whole numbers; where a protocol
    tells them apart and they are left out, all masks are of one class. `truth_areas` are for data that states areas other than those of its
    masks, as COCO's polygons do.
    """

    truth: RLEMasks
    found: RLEMasks
    scores: Float[np.ndarray, "_"]
    crowd: Bool[np.ndarray, "_"] | None = None
    truth_classes: Int[np.ndarray, "_"] | None = None
    found_classes: Int[np.ndarray, "_"] | None = None
    truth_areas: Float[np.ndarray, "_"] | Int[np.ndarray, "_"] | None = None

    def __post_init__(self) -> None:
        if self.truth.size != self.found.size:
            raise GigamaskError(
                f"truth of size {self.truth.size}, found masks of size {self.found.size}; bring both to the stored image's size"
            )
        for name, values, masks in (
            ("scores", self.scores, self.found),
            ("found_classes", self.found_classes, self.found),
            ("crowd", self.crowd, self.truth),
            ("truth_classes", self.truth_classes, self.truth),
            ("truth_areas", self.truth_areas, self.truth),
        ):
            if values is not None and len(values) != len(masks):
                raise GigamaskError(
                    f"{len(values)} {name} for {len(masks)} masks; give one for each"
                )
        if not np.isfinite(self.scores).all():
            place = int((~np.isfinite(self.scores)).argmax())
            raise GigamaskError(
                f"the score of found mask {place} is {self.scores[place]}, it must be finite; leave this mask out"
            )


def coco_ap(images: Iterable[ImageDetections], protocol: CocoProtocol | None = None) -> dict:
    """Returns the number of images and masks, the statistics by name, and the protocol.

    The statistics are `AP`, `AP50`, `AP75`, `AP small`, `AP medium`, `AP large`, `AR@k` for each k of `max_found`, and `AR@k small`, `AR@k medium`
    and `AR@k large` for the last. One is None where there is no truth to find, where pycocotools says -1. Crowds are not counted in `truth`.
    """
    protocol = protocol or CocoProtocol()
    truth, found, count = _tables(images, protocol)
    counts = {
        "images": count,
        "truth": sum(not each["iscrowd"] for each in truth["annotations"]),
        "found": len(found["annotations"]),
    }
    if not truth["annotations"]:
        return {**counts, **dict.fromkeys(_places(protocol)), "protocol": asdict(protocol)}
    judge = COCOeval_faster(
        COCO(truth),
        COCO(found),
        "boundary" if protocol.boundaries else "segm",
        boundary_cpu_count=1,
    )
    judge.params.maxDets = list(protocol.max_found)
    judge.evaluate()
    judge.accumulate()
    curves = {"AP": judge.eval["precision"], "AR": judge.eval["recall"]}
    means = {name: _mean(curves[name[:2]][place]) for name, place in _places(protocol).items()}
    return {**counts, **means, "protocol": asdict(protocol)}


def _tables(images: Iterable[ImageDetections], protocol: CocoProtocol) -> tuple[dict, dict, int]:
    """Returns truth and found masks as COCO's data sets, and how many images there are; ids count from 1, since 0 says "unmatched" there."""
    sizes, truths, founds = [], [], []
    for number, image in enumerate(images, 1):
        height, width = image.truth.size
        sizes.append({"id": number, "height": height, "width": width})
        told_apart = protocol.by_class
        crowd = np.zeros(len(image.truth), bool) if image.crowd is None else image.crowd
        truth_marks = {"iscrowd": crowd.astype(int)}
        if image.truth_areas is not None:
            truth_marks["area"] = image.truth_areas
        truths += _records(
            number,
            image.truth,
            image.truth_classes if told_apart else None,
            truth_marks,
            len(truths),
        )
        found_marks = {"score": image.scores.astype(np.float64)}
        founds += _records(
            number,
            image.found,
            image.found_classes if told_apart else None,
            found_marks,
            len(founds),
        )
    classes = sorted({each["category_id"] for each in truths + founds})
    shared = {"images": sizes, "categories": [{"id": each, "name": str(each)} for each in classes]}
    return {**shared, "annotations": truths}, {**shared, "annotations": founds}, len(sizes)


def _records(
    image: int,
    masks: RLEMasks,
    classes: np.ndarray | None,
    marks: dict[str, np.ndarray],
    before: int,
) -> list[dict]:
    """Returns masks as COCO's annotations, with what `marks` holds for each; `before` is how many annotations have an id already."""
    columns = {
        "image_id": [image] * len(masks),
        "category_id": [1] * len(masks) if classes is None else classes.tolist(),
        "area": masks.areas().tolist(),
        **{name: values.tolist() for name, values in marks.items()},
        "id": range(before + 1, before + 1 + len(masks)),
        "segmentation": [{"size": list(masks.size), "counts": text} for text in masks.to_coco()],
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _places(protocol: CocoProtocol) -> dict[str, tuple]:
    """Returns where each statistic stands: [IoU, recall, class, area, how many] of the precisions, and the same without recall of the recalls."""
    every, last = slice(None), len(protocol.max_found) - 1
    areas = {"small": 1, "medium": 2, "large": 3}
    places: dict[str, tuple] = {
        f"AP{name}": (iou, every, every, 0, last)
        for name, iou in {"": every, "50": 0, "75": 5}.items()
    }
    places |= {f"AP {name}": (every, every, every, area, last) for name, area in areas.items()}
    places |= {f"AR@{k}": (every, every, 0, place) for place, k in enumerate(protocol.max_found)}
    return places | {
        f"AR@{protocol.max_found[last]} {name}": (every, every, area, last)
        for name, area in areas.items()
    }


def _mean(values: np.ndarray) -> float | None:
    """Returns the mean over what is there: -1 stands for a class or an area without truth."""
    there = values[values > -1]
    return float(np.mean(there)) if there.size else None


def table(result: dict) -> str:
    """Returns the statistics as two columns, in per cent."""
    names: Sequence[str] = [name for name in result if name[:2] in ("AP", "AR")]
    head = f"{result['found']:,} masks found, {result['truth']:,} to find, on {result['images']:,} images; %"
    return "\n".join(
        [
            head,
            *(
                f"{name:16}" + ("     -" if result[name] is None else f"{100 * result[name]:6.1f}")
                for name in names
            ),
        ]
    )
