"""What runs on a GPU gives the CPU's numbers, mixes no tensors of both, and waits for the GPU once
a step, on a GPU that is not there (`tests/absent_gpu.py`)."""

import json
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import gigamask
from gigamask import recipes
from gigamask.cli.main import main
from gigamask.models.init import build_model
from gigamask.prompts.schedule import InteractiveSchedule
from tests.absent_gpu import DeviceError, absent_gpu
from tests.little import (
    little,
    little_classes,
    little_compact,
    little_compact_student,
    little_dense,
    little_sam2,
)
from tests.plugins.grounding import asked

pytestmark = pytest.mark.long


class Data(NamedTuple):
    """The folders of the fixtures of these names."""

    scenes: Path
    described: Path


def losses(folder: Path) -> list[float]:
    """Return the losses of all steps of the runs in a folder."""
    records = [
        json.loads(line)
        for path in sorted(folder.rglob("metrics.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [each["loss"] for each in records if "loss" in each]


def train(recipe, data: Data, folder: Path, device: str, **changes: Any) -> list[float]:
    config = replace(recipe(), steps=2, batch_size=2, save_every=2, data=(str(data.scenes),))
    config = replace(config, out=str(folder), device=device, precision="fp32")
    gigamask.train(replace(config, **changes))
    return losses(folder)


def train_clicking_centers(data: Data, folder: Path, device: str) -> list[float]:
    prompts = InteractiveSchedule(clicks=2, mask_only_rounds=False, center_click_prob=0.5)
    return train(little_classes, data, folder, device, prompts=prompts)


def distill(data: Data, folder: Path, device: str) -> list[float]:
    teacher = folder.with_name(f"{folder.name}.safetensors")
    gigamask.save_model(build_model(little_compact().model, 1), teacher)
    config = replace(little_compact_student(), data=(str(data.scenes),), device=device)
    gigamask.distill(
        config.with_(
            out=str(folder), teacher=str(teacher), features__steps=1, steps=1, precision="fp32"
        )
    )
    return losses(folder)


def pretrain(data: Data, folder: Path, device: str) -> list[float]:
    config = recipes.mae_tiny().with_(data=str(data.scenes), out=str(folder), steps=1)
    config = config.with_(batch_size=2, micro_batch_size=2, loader__workers=0)
    gigamask.pretrain(config.with_(device=device, precision="fp32"))
    return losses(folder)


def ground(data: Data, folder: Path, device: str) -> list[float]:
    words = ["ground", "train", asked.RECIPE, *asked.flags(data.described, folder)]
    assert main([*words, "--steps", "1", "--precision", "fp32", "--device", device]) == 0
    return losses(folder)


def evaluate(data: Data, folder: Path, device: str) -> list[float]:
    model = build_model(little_compact().model, 0)
    scores = gigamask.evaluate(model, data.scenes, device=device, precision="fp32", max_images=2)
    return [*scores["clicks"].values(), scores["box"], scores["oracle"]]


def generate_masks(data: Data, folder: Path, device: str) -> list[float]:
    model = build_model(little_compact().model, 0).to(device)
    generator = gigamask.SamAutomaticMaskGenerator(
        model, 4, pred_iou_thresh=0.0, stability_score_thresh=0.0, precision="fp32"
    )
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    masks = generator.generate(image)
    return [float(each[key]) for each in masks for key in ("area", "predicted_iou")]


COPYING = """state checkpoint distill_config embedding_cache mask_features text_features
text_models""".split()
"""Modules that copy to and from the GPU besides the steps: models, what is saved, features."""
CASES = {
    "sam": partial(train, little),
    "sam, fp16": partial(train, little, precision="fp16"),
    "compact, central clicks": train_clicking_centers,
    "compact, bf16": partial(train, little_compact, precision="bf16"),
    "all options": partial(train, little_dense),
    "sam 2": partial(train, little_sam2, freeze=()),
    "distill": distill,
    "pretrain": pretrain,
    "ground": ground,
    "evaluate": evaluate,
    "masks": generate_masks,
}


def run_all(scenes: str, described: str, out: str) -> None:
    """Write what each case returned, or its error, and where it waited to results.json."""
    data, folder, results = Data(Path(scenes), Path(described)), Path(out), {}
    with absent_gpu() as gpu:
        for name, case in CASES.items():
            try:
                gpu.waits.clear()
                results[name] = {"numbers": case(data, folder / name, "cuda")}
                results[name]["waits"] = dict(Counter(gpu.waits))
            except Exception:
                results[name] = {"error": traceback.format_exc()}
        try:
            torch.zeros(2, device="cuda") + torch.zeros(2)
        except DeviceError:
            results["mixed"] = "refused"
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(scenes, described, tmp_path_factory):
    folder = tmp_path_factory.mktemp("absent")
    code = "import sys; from tests.device.test_absent_gpu import run_all; run_all(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, scenes, described, folder], check=True)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_its_numbers_are_those_of_the_cpu(results, scenes, described, tmp_path, name):
    found = results[name]
    assert "error" not in found, found["error"]
    expected = CASES[name](Data(scenes, described), tmp_path, "cpu")
    assert expected
    assert found["numbers"] == pytest.approx(expected, rel=0.05 if "16" in name else 1e-4)


@pytest.mark.parametrize("name", [each for each in CASES if each not in ("evaluate", "masks")])
def test_a_step_waits_once(results, name):
    """For its packed results."""
    waits = Counter()
    for line, count in results[name]["waits"].items():
        waits[line.partition(":")[0]] += count
    for module in COPYING:
        del waits[module]
    assert waits == {"step": len(results[name]["numbers"])}


def test_tensors_of_both_are_refused(results):
    assert results["mixed"] == "refused"
