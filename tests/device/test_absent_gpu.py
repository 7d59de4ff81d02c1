"""The core on a GPU that is not there (`tests/on_absent_gpu.py`)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gigamask
from gigamask import recipes
from gigamask.masks.transforms import logit_stacks, whole_image
from gigamask.models.init import build_model
from gigamask.prompts.schedule import InteractiveSchedule
from tests.little import COMPACT, SPEC, little, little_classes, little_compact
from tests.on_absent_gpu import Data, check_numbers, check_waits, losses, run_cases

pytestmark = pytest.mark.long
CENTRAL = InteractiveSchedule(clicks=2, mask_only_rounds=False, center_click_prob=0.5)
IMAGE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)


def train(recipe, data: Data, folder: Path, device: str, **changes: Any) -> list[float]:
    config = replace(recipe(), steps=2, batch_size=2, save_every=2, data=(str(data.scenes),))
    config = replace(config, out=str(folder), device=device, precision="fp32")
    gigamask.train(replace(config, **changes))
    return losses(folder)


def pretrain(data: Data, folder: Path, device: str) -> list[float]:
    config = recipes.mae_tiny().with_(data=str(data.scenes), out=str(folder), steps=1)
    config = config.with_(batch_size=2, micro_batch_size=2, loader__workers=0)
    gigamask.pretrain(config.with_(device=device, precision="fp32"))
    return losses(folder)


def evaluate(data: Data, folder: Path, device: str) -> list[float]:
    on = {"device": device, "precision": "fp32", "max_images": 1}
    scores = gigamask.evaluate(build_model(COMPACT, 0), data.scenes, **on)
    return [*scores["clicks"].values(), scores["box"], scores["oracle"]]


def generate_masks(data: Data, folder: Path, device: str, points: int = 4) -> list[float]:
    model = build_model(COMPACT, 0).to(device)
    generator = gigamask.SamAutomaticMaskGenerator(
        model, points, pred_iou_thresh=0.0, stability_score_thresh=0.0, precision="fp32"
    )
    keys = "area", "predicted_iou"
    return [float(each[key]) for each in generator.generate(IMAGE) for key in keys]


def predict(config, data: Data, folder: Path, device: str, **tiles: int) -> list[float]:
    """With points on the device, and masks on the CPU."""
    model = build_model(config, 0).eval().to(device)
    predictor = gigamask.SamPredictor(model, precision="fp32", **tiles)
    predictor.set_image(IMAGE)
    masks, points = torch.eye(model.config.mask_size), torch.full((1, 1, 2), 9.0, device=device)
    found = predictor.predict_torch(points, points[..., 0] > 0, None, masks[None, None])
    found += predictor.predict(box=np.array([5, 5, 40, 40]), refine=1)
    with torch.device(device):  # as a program may set for all tensors
        found += predictor.predict(np.array([[9, 9]]), np.array([1]), np.array([5, 5, 40, 40]))
    return [float(each.sum()) for each in found]


def save(data: Data, folder: Path, device: str) -> list[float]:
    path = folder / "model.safetensors"
    gigamask.save_model(build_model(SPEC, 0).to(device), path)
    return [float(each.sum()) for each in gigamask.load_model(path, "cpu").state_dict().values()]


def enlarge(data: Data, folder: Path, device: str) -> list[float]:
    low = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autocast(low.device.type, torch.bfloat16):
        stacks = [each for _, each, _ in logit_stacks(whole_image((48, 64), 64), low, -1.0)]
    return sorted(value for each in stacks for value in each.amax((1, 2)).tolist())


CASES = {
    "sam": partial(train, little),
    "sam, fp16": partial(train, little, precision="fp16"),
    "compact, central clicks": partial(train, little_classes, prompts=CENTRAL),
    "compact, bf16": partial(train, little_compact, precision="bf16"),
    "pretrain": pretrain,
    "evaluate": evaluate,
    "masks": generate_masks,
    "more masks": partial(generate_masks, points=8),
    "predict": partial(predict, COMPACT),
    "tiles": partial(predict, replace(SPEC, rectangular=True), tile=40),
    "save": save,
    "enlarge": enlarge,
}


ON_MPS = ["evaluate", "masks", "predict", "tiles", "save", "enlarge"]
"""Those for Apple's GPUs, too, which have no float64; they do not train."""


@pytest.fixture(scope="module")
def results(scenes, tmp_path_factory):
    return run_cases(__name__, Data(scenes, scenes), tmp_path_factory.mktemp("absent"))


@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_those_of_the_cpu(results, scenes, tmp_path, name):
    expected = CASES[name](Data(scenes, scenes), tmp_path, "cpu")
    check_numbers(results[name], expected, 0.05 if "16" in name else 1e-4)


def test_apple_s_gpus_need_no_float64(scenes, tmp_path):
    found = run_cases(__name__, Data(scenes, scenes), tmp_path, "mps")
    for name in ON_MPS:
        expected = CASES[name](Data(scenes, scenes), tmp_path / name / "cpu", "cpu")
        check_numbers(found[name], expected, 1e-4)


@pytest.mark.parametrize("name", [*CASES][:5])
def test_a_step_waits_once(results, name):
    check_waits(results[name])


def test_masks_are_resized_and_encoded_together(results):
    """Those of 16 and of 64 points: 48 and 192 masks."""
    few, many = (results[name]["operators"] for name in ("masks", "more masks"))
    assert many - few < 2 * (192 - 48)


def test_tensors_of_both_are_refused(results):
    assert results["mixed"] == "refused"
