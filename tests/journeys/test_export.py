"""`gigamask export` as a user types it: what it writes is what `evaluate` and `--init` read."""

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
import torch
import yaml
from onnxruntime import InferenceSession
from PIL import Image

from gigamask import SamPredictor, load_model
from gigamask.cli.main import main
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.state_dict import save_weights, to_official
from gigamask.synthetic.scenes import compose_scene
from tests.little import SPEC


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_weights(to_official(build_model(SPEC, 0)), SPEC, path)
    return str(path)


@pytest.mark.parametrize(
    ("to", "out"), [("official", "sam.pth"), ("safetensors", "copy.safetensors")]
)
def test_what_is_exported_is_exported_again(weights, to, out, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert (
        main(["export", weights, "--to", to, "--out", str(tmp_path / out), "--json", str(told)])
        == 0
    )
    assert "read back: " in capsys.readouterr().out
    assert json.loads(told.read_text())["files"] == [str(tmp_path / out)]


@pytest.mark.long
def test_onnx_export_prints_its_difference(weights, tmp_path, capsys):
    assert main(["export", weights, "--to", "onnx", "--out", str(tmp_path / "onnx")]) == 0
    assert "differ by " in capsys.readouterr().out


def test_what_is_wrong_is_one_line(weights, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    for words, message in (
        ([weights, "--to", "tflite", *out], "'tflite'"),
        ([weights, *out], "--to"),
        ([str(tmp_path / "none.pth"), "--to", "official", *out], "none.pth: no such file"),
        ([weights, "--to", "official", *out], "file that ends in .pth"),
        ([weights, "--to", "safetensors", *out, "--precision", "fp16"], "is for --to onnx"),
        ([weights, "--to", "cvat", "--out", str(tmp_path / "__")], "must have a letter or digit"),
        (
            [weights, "--to", "official", "--out", str(tmp_path / "new" / "a.pth")],
            "new does not exist",
        ),
    ):
        assert main(["export", *words]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


def numbers(told: object) -> list[float]:
    """Return all numbers of nested dictionaries and lists."""
    if isinstance(told, dict | list):
        parts = told.values() if isinstance(told, dict) else told
        return [number for part in parts for number in numbers(part)]
    return [float(told)] if isinstance(told, int | float) else []


@pytest.mark.long
def test_everything_exported_scores_as_its_source(scenes, tmp_path, monkeypatch):
    """The heads of `tiny` are not Meta's, and its shapes do not tell."""
    monkeypatch.chdir(tmp_path)
    save_weights(to_official(build_model(tiny(), 0)), tiny(), "source.safetensors")
    scores = {}
    for name, to in (
        ("source.safetensors", None),
        ("a.pth", "official"),
        ("b.safetensors", "safetensors"),
        ("c", "huggingface"),
    ):
        if to:
            assert main(["export", "source.safetensors", "--to", to, "--out", name]) == 0
        words = f"--data {scenes} --max-images 2 --json told.json".split()
        assert main(["evaluate", name, *words]) == 0
        scores[name] = numbers(json.loads((tmp_path / "told.json").read_text()))
    # Addresses in memory decide how a CPU adds, so the last digits vary.
    exact = pytest.approx(scores.pop("source.safetensors"), abs=1e-3)
    assert all(each == exact for each in scores.values())
    eight = replace(tiny(), decoder_num_heads=8)
    save_weights(to_official(build_model(tiny(), 0)), eight, "d.safetensors")
    assert main(["evaluate", "d.safetensors", *words]) == 0
    assert numbers(json.loads((tmp_path / "told.json").read_text())) != exact
    torch.save(dict(torch.load("a.pth")), "bare.pth")
    assert main(f"evaluate bare.pth --data {scenes}".split()) == 2


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


@pytest.mark.long
def test_annotation_tools_predict_as_the_predictor_does(tmp_path, capsys):
    for tool in ("x-anylabeling", "cvat"):
        assert main(["export", "starter", "--to", tool, "--out", str(tmp_path / tool)]) == 0
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
    spec = importlib.util.spec_from_file_location("main", tmp_path / "cvat/main.py")
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    context = SimpleNamespace(user_data=SimpleNamespace(), Response=lambda **given: given)
    served.init_context(context)
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


def test_a_folder_is_sent_to_the_hub_with_its_card(weights, tmp_path, capsys, monkeypatch):
    calls = []

    def create_repo(api, *given, **named):
        calls.append(("create", given, named))

    def upload_folder(api, **named):
        calls.append(
            ("upload", sorted(path.name for path in named["folder_path"].iterdir()), named)
        )
        return "https://hub/us/mine/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload_folder)
    out = tmp_path / "hf"
    words = ["export", weights, *f"--to huggingface --out {out} --license mit".split()]
    assert main([*words, "--push", "us/mine"]) == 0
    assert "https://hub/us/mine/commit/1" in capsys.readouterr().out
    names = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert [call[0] for call in calls] == ["create", "upload"]
    assert calls[0][1:] == (("us/mine",), {"exist_ok": True})
    assert calls[1][1] == names
    assert calls[1][2]["repo_id"] == "us/mine"
    assert "license: mit" in (out / "README.md").read_text()


def test_what_cannot_be_sent_is_one_line(weights, tmp_path, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("401 Unauthorized\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    out = ["--out", str(tmp_path / "hf")]
    for words, message in (
        (["--to", "safetensors", *out, "--push", "us/mine"], "--push us/mine: expected USER/NAME"),
        (["--to", "huggingface", *out, "--push", "mine"], "--push mine: expected USER/NAME"),
        (["--to", "huggingface", *out, "--push", "us/mine"], "not sent (401 Unauthorized)"),
    ):
        assert main(["export", weights, *words]) == 2
        told = [line for line in capsys.readouterr().err.splitlines() if "gigamask:" in line]
        assert len(told) == 1
        assert message in told[0]
