"""What X-AnyLabeling and CVAT compute with an export is what the predictor computes."""

import base64
import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import yaml
from onnxruntime import InferenceSession
from PIL import Image

from gigamask.inference.predictor import SamPredictor
from gigamask.models.init import build_model
from gigamask.plugins.annotation_tools.exporters import write_cvat
from gigamask.synthetic.scenes import compose_scene
from gigamask.training.checkpoint import load_model
from tests.commands import invoke, refusal
from tests.little import SPEC


class XAnyLabeling:
    """What X-AnyLabeling does with a model: the sizes are fixed in its code."""

    def __init__(self, description: Path) -> None:
        config = yaml.safe_load(description.read_text())
        assert config["type"] == "segment_anything"
        assert {"name", "display_name"} <= config.keys()
        self.encoder, self.decoder = (
            InferenceSession(str(description.parent / config[f"{part}_model_path"]))
            for part in ("encoder", "decoder")
        )

    def predict(self, image: np.ndarray, points: list, labels: list) -> np.ndarray:
        scale = min(1024 / image.shape[1], 684 / image.shape[0])
        matrix = np.diag([scale, scale])[:, [0, 1]]
        warped = cv2.warpAffine(image, np.hstack([matrix, np.zeros((2, 1))]), (1024, 684))
        name = self.encoder.get_inputs()[0].name
        (embedding,) = self.encoder.run(None, {name: warped.astype(np.float32)})
        masks, _, _ = self.decoder.run(
            None,
            {
                "image_embeddings": embedding,
                "point_coords": np.array([[*points, [0, 0]]], np.float32) * np.float32(scale),
                "point_labels": np.array([[*labels, -1]], np.float32),
                "mask_input": np.zeros((1, 1, 256, 256), np.float32),
                "has_mask_input": np.zeros(1, np.float32),
                "orig_im_size": np.array([684, 1024], np.float32),
            },
        )
        back = np.hstack([np.diag([1 / scale, 1 / scale]), np.zeros((2, 1))])
        return cv2.warpAffine(masks[0][0], back, (image.shape[1], image.shape[0])) > 0


def iou(one: np.ndarray, other: np.ndarray) -> float:
    return float((one & other).sum() / max((one | other).sum(), 1))


def served_by_cvat(folder: Path) -> tuple:
    """Load an exported function, and a context of Nuclio with its model."""
    spec = importlib.util.spec_from_file_location("main", folder / "main.py")
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    context = SimpleNamespace(user_data=SimpleNamespace(), Response=lambda **given: given)
    served.init_context(context)
    return served, context


@pytest.mark.long
def test_cvat_serves_a_model_with_classes(tmp_path):
    model = build_model(replace(SPEC, class_names=("cat", "dog")), 0).eval()
    write_cvat(model, tmp_path / "cvat")
    served, context = served_by_cvat(tmp_path / "cvat")
    image = Image.fromarray(compose_scene(3, 1, (48, 64)).pixels)
    mask = served.segment(context.user_data.model, image, [[30, 20]], [], np.zeros((0, 2)))
    assert (mask.shape, mask.dtype) == ((image.height, image.width), np.uint8)
    predictor, box = SamPredictor(model), np.array([5, 5, 30, 30])
    predictor.set_image(np.array(image))
    single = predictor.predict(box=box, multimask_output=False)[0][0]
    mask = served.segment(context.user_data.model, image, [], [], box.reshape(2, 2))
    assert iou(mask == 255, single) > 0.97


@pytest.mark.long
def test_annotation_tools_predict_as_the_predictor_does(tmp_path, capsys):
    for tool in ("x-anylabeling", "cvat"):
        invoke("export", "starter", "--to", tool, "--out", tmp_path / tool)
    assert "differ by " in capsys.readouterr().out
    scene = compose_scene(3, 1, (171, 256))
    areas = scene.masks.areas()
    x0, y0, x1, y1 = box = scene.masks.boxes()[int(areas.argmax())].tolist()
    middle = [(x0 + x1) / 2, (y0 + y1) / 2]
    predictor = SamPredictor(load_model("starter", device="cpu"))
    predictor.set_image(scene.pixels)
    by_box = predictor.predict(box=np.array(box), multimask_output=False)[0][0]
    three, scores, _ = predictor.predict(np.array([middle]), np.array([1]))
    by_point = three[scores.argmax()]
    tool = XAnyLabeling(tmp_path / "x-anylabeling/x-anylabeling.yaml")
    assert iou(tool.predict(scene.pixels, [[x0, y0], [x1, y1]], [2, 3]), by_box) > 0.9
    assert iou(tool.predict(scene.pixels, [middle], [1]), by_point) > 0.9
    function = yaml.safe_load((tmp_path / "cvat/function.yaml").read_text())
    assert function["metadata"]["annotations"]["type"] == "interactor"
    assert function["spec"]["handler"] == "main:handler"
    served, context = served_by_cvat(tmp_path / "cvat")
    encoded = io.BytesIO()
    Image.fromarray(scene.pixels).save(encoded, "PNG")
    asked = {"image": base64.b64encode(encoded.getvalue()).decode(), "neg_points": []}
    for prompt, expected in (
        ({"pos_points": [middle], "obj_bbox": None}, by_point),
        ({"pos_points": [], "obj_bbox": [[x0, y0], [x1, y1]]}, by_box),
    ):
        answer = served.handler(context, SimpleNamespace(body=asked | prompt))
        body = json.loads(answer["body"])
        assert iou(np.array(body["mask"]) == 255, expected) > 0.97
        assert len(body["points"][0]) == 2


def test_a_name_of_cvat_needs_a_letter(tmp_path, capsys):
    assert "must have a letter or digit" in refusal(
        capsys, "export", "starter", "--to", "cvat", "--out", tmp_path / "__"
    )
