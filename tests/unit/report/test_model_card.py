"""The model card says what a run folder knows, and no path of the machine it was made on."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gigamask.export import formats
from gigamask.report import history
from gigamask.report.model_card import write_card
from tests.unit.report.test_history import record, written

CONFIG = """\
recipe: finetune
steps: '40'
batch-size: '4'
init: hf:facebook/sam-vit-base@main
data:
- /data/of/me/a.tar
- b.tar
evaluation.data:
- /data/of/me/held_out.tar
evaluation.images: '7'
optimizer.lr: '0.0003'
lora.rank: '8'
loader.workers: '3'
"""
SCORES = {
    "clicks": {"1": 0.5, "3": 0.625},
    "oracle": None,
    "box": 0.75,
    "masks": 12,
    "images": 3,
    "data": ["/data/of/me/c.tar"],
    "protocol": {"first_click": "center | of it", "clicks": [1, 3]},
}


@pytest.fixture
def run(tmp_path) -> history.History:
    evaluation = {"1 click": 0.4321, "oracle": 0.5, "box": 0.6, "wrong image": 0.1}
    event = {"step": 40, "evaluation": evaluation, "warnings": [], "seconds": 1.0}
    event |= {"of": "9 masks on 7 images", "standard_error": {"1 click": 0.04}}
    folder = written(tmp_path / "run", record(40), event, config=CONFIG)
    return history.read(folder)


def card(tmp_path: Path, *given, to: str = "huggingface", **options) -> tuple[dict, str]:
    """The head and the text of a card."""
    text = write_card(tmp_path, formats.find(to), "us/mine", *given, **options).read_text()
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_what_is_not_known_is_left_out(tmp_path):
    head, body = card(tmp_path, None, None)
    assert head["library_name"] == "transformers"
    assert "license" not in head
    assert "Not stated" in body
    assert "Training" not in body
    assert 'SamModel.from_pretrained("us/mine")' in body


def test_training_scores_and_license(tmp_path, run):
    recipe = dict(run.config) | {"optimizer.lr": "0.00008", "lora.rank": "0"}
    recipe["loader.workers"] = "null"
    head, body = card(tmp_path, run, recipe, step=40, license_name="apache-2.0")
    assert head["license"] == "apache-2.0"
    assert head["base_model"] == "facebook/sam-vit-base"
    assert "Recipe `finetune`, 40 steps of 4 images, on a.tar, b.tar." in body
    assert "started from `hf:facebook/sam-vit-base@main`" in body
    assert "| `--optimizer.lr` | 0.0003 |" in body
    assert "| `--lora.rank` | 8 |" in body
    assert "workers" not in body
    assert "9 masks on 7 images of held_out.tar" in body
    assert "| 1 click | oracle | box |\n| --- | --- | --- |\n" in body
    assert "| 0.432 ± 0.040 | 0.500 | 0.600 |" in body
    assert "/data" not in body


def test_scores_of_another_step_are_left_out(tmp_path, run):
    _, body = card(tmp_path, replace(run, scores=SCORES | {"step": 10}), None, step=20)
    assert "0.432" not in body
    assert "12 masks" not in body
    assert "20 steps of 4 images" in body


def test_the_scores_of_an_evaluation(tmp_path, run):
    run = history.History(run.folder, run.config, scores=SCORES)
    _, body = card(tmp_path, run, None)
    assert "12 masks on 3 images of c.tar" in body
    assert "| 1 click | 3 clicks | oracle | box |" in body
    assert "| 0.500 | 0.625 |  | 0.750 |" in body
    assert "- first_click: center   of it\n- clicks: 1 3\n" in body


def test_how_a_format_is_loaded(tmp_path, run):
    head, body = card(tmp_path, run, None, to="onnx")
    assert "ONNX Runtime" in body
    assert head["library_name"] == "onnx"
