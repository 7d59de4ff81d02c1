"""Average precision and recall against pycocotools, on random masks and edge cases."""

import numpy as np
import pytest
from pycocotools import mask as codes
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gigamask.evaluation import boundary
from gigamask.evaluation.coco_ap import PROPOSALS, CocoProtocol, ImageDetections, coco_metrics
from gigamask.masks.boundary import inner_band
from gigamask.masks.rle import RLEMasks

# pycocotools 2.0 decodes through an old array protocol, which numpy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIZES = ("small", "medium", "large")


def as_coco(images: list[ImageDetections], found: bool, by_class: bool) -> COCO:
    """A data set as a person who writes COCO's json by hand would make it."""
    annotations = []
    for number, image in enumerate(images):
        masks, classes = (
            (image.detections, image.detection_classes)
            if found
            else (image.truth, image.truth_classes)
        )
        areas = masks.to_dense().sum((1, 2))
        for i, counts in enumerate(masks.to_coco()):
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": int(classes[i]) if by_class and classes is not None else 1,
                "segmentation": {"size": list(masks.size), "counts": counts},
                "area": float(areas[i]),
                "iscrowd": 0,
            }
            if found:
                annotation["score"] = float(image.scores[i])
            elif image.crowd is not None:
                annotation["iscrowd"] = int(image.crowd[i])
            if not found and image.truth_areas is not None:
                annotation["area"] = float(image.truth_areas[i])
            annotations.append(annotation)
    data = COCO()
    data.dataset = {
        "images": [
            {"id": number, "height": image.truth.size[0], "width": image.truth.size[1]}
            for number, image in enumerate(images)
        ],
        "annotations": annotations,
        "categories": [{"id": each} for each in range(10)],
    }
    data.createIndex()
    return data


def judged(images: list[ImageDetections], protocol: CocoProtocol) -> COCOeval:
    """pycocotools' evaluation of images, without its curves."""
    judge = COCOeval(
        *(as_coco(images, found, protocol.by_class) for found in (False, True)), "segm"
    )
    judge.params.maxDets = list(protocol.max_found)
    judge.params.useCats = int(protocol.by_class)
    judge.evaluate()
    return judge


def statistics(judge: COCOeval, **groups: list[int]) -> dict[str, float | None]:
    """Return what the curves of an evaluation say, of groups of categories too."""
    judge.accumulate()
    precision, recall = judge.eval["precision"], judge.eval["recall"]
    most = judge.params.maxDets
    arrays = {
        "AP": precision[..., 0, -1],
        "AP50": precision[0, ..., 0, -1],
        "AP75": precision[5, ..., 0, -1],
    }
    arrays |= {f"AP {name}": precision[..., area, -1] for area, name in enumerate(SIZES, 1)}
    arrays |= {f"AP {name}": precision[:, :, group, 0, -1] for name, group in groups.items()}
    arrays |= {f"AR@{k}": recall[..., 0, place] for place, k in enumerate(most)}
    arrays |= {f"AR@{most[-1]} {name}": recall[..., area, -1] for area, name in enumerate(SIZES, 1)}
    return {
        name: np.mean(array[array > -1]) if (array > -1).any() else None
        for name, array in arrays.items()
    }


def agree(result: dict, expected: dict[str, float | None]) -> None:
    assert [name for name in result if name[:2] in ("AP", "AR")] == list(expected)
    for name, value in expected.items():
        assert result[name] == (value if value is None else pytest.approx(value, abs=1e-12)), name


def compare(images: list[ImageDetections], protocol: CocoProtocol | None = None) -> dict:
    protocol = protocol or CocoProtocol()
    result = coco_metrics(images, protocol)
    agree(result, statistics(judged(images, protocol)))
    return result


def test_each_class():
    """Of four classes, of which one is found alone, and one has crowds."""
    images = [scene(np.random.default_rng(seed), 9, 14) for seed in range(5)]
    judge = judged(images, CocoProtocol())
    judge.accumulate()
    curves = judge.eval["precision"][:, :, :, 0, -1]
    assert judge.params.catIds == list(range(10))
    expected = {
        number: {"AP": pytest.approx(curve.mean()), "AP50": pytest.approx(curve[0].mean())}
        for number, curve in enumerate(np.moveaxis(curves, 2, 0))
        if (curve > -1).any()
    }
    assert coco_metrics(images)["by_class"] == expected
    assert list(expected) == [0, 1, 2]
    assert "by_class" not in coco_metrics(images, PROPOSALS)


def shapes(random: np.random.Generator, count: int, size: tuple[int, int]) -> np.ndarray:
    """Rectangles and ellipses of all of COCO's areas, some empty."""
    masks = np.zeros((count, *size), bool)
    y, x = np.mgrid[: size[0], : size[1]]
    for mask in masks:
        centre, half = random.uniform(0, size), random.uniform(0, 1) ** 2 * np.array(size) / 1.5
        away = np.abs(y - centre[0]) / max(half[0], 0.1), np.abs(x - centre[1]) / max(half[1], 0.1)
        mask[:] = (
            np.maximum(*away) < 1 if random.random() < 0.5 else away[0] ** 2 + away[1] ** 2 < 1
        )
    return masks


def jitter(random: np.random.Generator, masks: np.ndarray) -> np.ndarray:
    """The masks, each moved by some pixels, so that IoU falls anywhere."""
    return np.array(
        [np.roll(mask, random.integers(-6, 7, 2), (0, 1)) for mask in masks], bool
    ).reshape(masks.shape)


def image_of(truth: np.ndarray, found: np.ndarray, scores: np.ndarray, **more) -> ImageDetections:
    return ImageDetections(RLEMasks.from_dense(truth), RLEMasks.from_dense(found), scores, **more)


def scene(
    random: np.random.Generator, truths: int, founds: int, levels: int = 20
) -> ImageDetections:
    """Return an image whose predicted masks are the ground truth moved, copied and made up.

    They have `levels` different scores, so that ties abound.
    """
    size = tuple(map(int, random.integers(40, 160, 2)))
    truth = shapes(random, truths, size)
    made = [jitter(random, truth[random.integers(0, truths, founds)])] if truths else []
    found = np.concatenate([*made, shapes(random, founds, size)])[
        random.permutation(founds * (1 + len(made)))[:founds]
    ]
    return image_of(
        truth,
        found.reshape(founds, *size),
        random.integers(0, levels, founds) / levels,
        crowd=random.random(truths) < 0.2,
        truth_classes=random.integers(0, 3, truths),
        detection_classes=random.integers(0, 4, founds),
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "protocol",
    [CocoProtocol(), CocoProtocol(by_class=False), PROPOSALS, CocoProtocol((3, 5))],
    ids=["coco", "agnostic", "1000", "few"],
)
def test_random_images(seed, protocol):
    random = np.random.default_rng(seed)
    images = [
        scene(
            random,
            int(random.integers(0, 9)),
            int(random.integers(0, 25)),
            levels=int(random.choice([1, 3, 1000])),
        )
        for _ in range(12)
    ]
    result = compare(images, protocol)
    assert 0 < result["AP"] < 1


def test_more_masks_than_count():
    """Of 1,100 masks those beyond 100 or 1,000 do not count, whatever their scores tie with."""
    random = np.random.default_rng(1)
    images = [scene(random, 5, 1100, levels) for levels in (1, 2, 10_000)]
    result = compare(images, CocoProtocol((100, 1000), by_class=False))
    assert result["AR@100"] < result["AR@1000"] == compare(images, PROPOSALS)["AR@1000"]
    assert result["found"] == 3300


def test_images_without_truth_or_masks():
    random = np.random.default_rng(2)
    nothing, only_truth, only_found = scene(random, 0, 0), scene(random, 5, 0), scene(random, 0, 5)
    full = scene(random, 6, 9)
    for images in (
        [nothing],
        [only_truth],
        [only_found],
        [nothing, only_truth, only_found],
        [full, nothing, only_found, only_truth, full],
        [],
    ):
        for protocol in (CocoProtocol(), PROPOSALS):
            result = compare(images, protocol)
            assert result["images"] == len(images)
    assert coco_metrics([only_truth])["AP"] == 0
    assert coco_metrics([only_found])["AP"] is None


def test_identical_masks():
    """Each annotated mask is matched once if there are copies of it, of the predicted, or both."""
    random = np.random.default_rng(3)
    one = shapes(random, 1, (80, 90))
    for truths, founds in ((1, 7), (7, 1), (4, 4)):
        for scores in (np.full(founds, 0.5), np.linspace(1, 0, founds)):
            compare([image_of(one.repeat(truths, 0), one.repeat(founds, 0), scores)])


def test_all_background():
    """Masks without a pixel, annotated and predicted: two empty masks do not overlap."""
    size = (30, 40)
    random = np.random.default_rng(4)
    empty, some = np.zeros((3, *size), bool), shapes(random, 3, size)
    for truth in (empty, some, np.concatenate([empty, some])):
        for found in (empty, some, np.concatenate([some, empty])):
            compare([image_of(truth, found, random.random(len(found)))])


def test_everything_is_crowd():
    image = scene(np.random.default_rng(5), 6, 30)
    crowd = np.ones(6, bool)
    found = ImageDetections(image.truth, image.detections, image.scores, crowd)
    result = compare([found])
    assert result["AP"] is None
    assert result["truth"] == 0
    compare([found, image], PROPOSALS)


def test_thresholds_met_exactly():
    """IoUs of 0.5, 0.55 ... 1 to the pixel, and areas of exactly 32 x 32 and 96 x 96."""
    truth = np.zeros((10, 40, 100), bool)
    truth[:, :32, :32] = True
    found = truth.copy()
    for share, mask in zip(range(50, 100, 5), found, strict=True):
        mask.reshape(40, 100)[:32, :32].flat[:] = False
        mask[:32, :32] = (np.arange(32 * 32) < round(32 * 32 * share / 100)).reshape(32, 32)
    large = np.zeros((2, 40, 300), bool)
    large[0, :36, :256], large[1, :36, :257] = True, True
    for masks, guesses in ((truth, found), (large, large[::-1].copy())):
        images = [
            image_of(mask[None], guess[None], np.ones(1))
            for mask, guess in zip(masks, guesses, strict=True)
        ]
        compare(images)


def test_stated_areas_decide_the_size():
    image = scene(np.random.default_rng(6), 8, 20)
    areas = np.random.default_rng(7).uniform(1, 20_000, 8)
    compare([ImageDetections(image.truth, image.detections, image.scores, truth_areas=areas)])


def test_scores_in_half_and_single_precision():
    image = scene(np.random.default_rng(8), 8, 40, levels=1000)
    for kind in (np.float16, np.float32):
        compare([ImageDetections(image.truth, image.detections, image.scores.astype(kind))])


def test_images_of_many_sizes_and_their_order():
    """Among equal scores the order of images counts, as pycocotools counts it."""
    random = np.random.default_rng(9)
    images = [scene(random, 5, 10, levels=2) for _ in range(20)]
    assert compare(images)["AP"] != compare(images[::-1])["AP"]


class ByBoundaries(COCOeval):
    """pycocotools' evaluation with min(mask IoU, Boundary IoU) in place of mask IoU.

    The bands are those of `evaluation.boundary`; crowds are as before.
    """

    def computeIoU(self, image, category):  # noqa: N802
        ious = super().computeIoU(image, category)
        where = (
            [(image, category)]
            if self.params.useCats
            else [(image, each) for each in self.params.catIds]
        )
        truth, found = (
            [each for place in where for each in masks[place]] for masks in (self._gts, self._dts)
        )
        if not truth or not found:
            return ious
        best = np.argsort([-each["score"] for each in found], kind="mergesort")[
            : self.params.maxDets[-1]
        ]
        drawn, guessed = (
            [band(codes.decode(each["segmentation"])) for each in some]
            for some in (truth, [found[i] for i in best])
        )
        edges = codes.iou(guessed, drawn, [0] * len(drawn))
        solid = [not each["iscrowd"] for each in truth]
        ious[:, solid] = np.minimum(ious, edges)[:, solid]
        return ious


def band(pixels: np.ndarray) -> dict:
    """The code of a mask's band."""
    inside = inner_band(pixels.astype(bool), boundary.BoundaryProtocol().band_px(pixels.shape))
    return codes.encode(np.asfortranarray(inside.astype(np.uint8)))


@pytest.mark.parametrize("by_class", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_boundary_average_precision(seed, by_class, monkeypatch):
    random = np.random.default_rng(seed)
    images = [
        scene(random, int(random.integers(0, 9)), int(random.integers(0, 25)), levels=1000)
        for _ in range(12)
    ]
    by_masks = coco_metrics(images, CocoProtocol(by_class=by_class))["AP"]
    monkeypatch.setitem(globals(), "COCOeval", ByBoundaries)
    assert compare(images, CocoProtocol(by_class=by_class, boundaries=True))["AP"] < by_masks
