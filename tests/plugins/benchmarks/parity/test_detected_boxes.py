"""Mask AP of detected boxes: SAM's predictor called box by box, and pycocotools on what it says."""

import numpy as np
import pytest
from pycocotools import mask as codes
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gigamask.data import image
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.clicks import evaluate_clicks
from gigamask.inference.predictor import SamPredictor
from gigamask.models.init import build_model
from gigamask.plugins.benchmarks import coco_data
from gigamask.plugins.benchmarks.detected_boxes import BoxMasks, BoxProtocol
from gigamask.serialization import read_json
from tests import instances
from tests.little import SPEC
from tests.parity.test_average_precision import statistics

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def model():
    return build_model(SPEC, 0).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("coco")
    instances.write(folder, model)
    return folder


def answer(predictor: SamPredictor, box: np.ndarray, kind: str) -> np.ndarray:
    """The mask of a box, as the named paper or code takes it."""
    if kind == "first_token":
        return predictor.predict(box=box, multimask_output=False)[0][0]
    masks, scores, logits = predictor.predict(box=box)
    best = scores.argmax()
    if kind == "confident":
        return masks[best]
    refined = {"mask_input": logits[best][None], "multimask_output": False}
    return predictor.predict(box=box, **refined)[0][0]


def by_pycocotools(folder, model, kind: str) -> dict[str, float | None]:
    found, predictor = read_json(folder / "boxes.json"), SamPredictor(model)
    for number in {each["image_id"] for each in found}:
        path = folder / "photos" / f"{number}.jpg"
        predictor.set_image(image.decode(path.read_bytes(), ""))
        for each in found:
            if each["image_id"] == number:
                x, y, width, height = each.pop("bbox")
                box = np.array([x, y, x + width, y + height])
                mask = np.asfortranarray(answer(predictor, box, kind).astype(np.uint8))
                each["segmentation"] = codes.encode(mask)
    truth = COCO()
    truth.dataset = read_json(folder / "instances.json")
    del truth.dataset["annotations"][-1]  # a broken one, which pycocotools cannot read
    truth.createIndex()
    judge = COCOeval(truth, truth.loadRes(found), "segm")
    judge.evaluate()
    return statistics(judge)


@pytest.mark.parametrize("kind", ["confident", "first_token", "refined"])
def test_as_pycocotools(folder, model, kind):
    coco = coco_data.read(folder / "instances.json", folder / "photos", folder / "boxes.json")
    masks, filters = BoxMasks(coco, BoxProtocol(kind)), MaskFilters(max_area=None)
    scores = evaluate_clicks(model, coco, filters, callbacks=[masks.update]).summary()
    result, expected = masks.summary(), by_pycocotools(folder, model, kind)
    for name, value in expected.items():
        assert result[name] == (value if value is None else pytest.approx(value, abs=1e-9)), name
    assert 0 < result["AP"] <= result["AP50"] < 1
    assert result["prompts"]["answer"].startswith(kind)
    assert scores["masks"] == 13  # neither the crowd nor the one without a pixel
