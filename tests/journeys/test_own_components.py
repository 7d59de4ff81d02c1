"""A user's own class for every interface, by file, module or entry point: train, resume, plan."""

import sys
from functools import partial
from pathlib import Path

import pytest

from gigamask.config_files import config_of_weights, load_config
from gigamask.serialization import flatten_yaml, read_yaml
from gigamask.training.checkpoint import load_model
from tests import own_components
from tests.commands import invoke, refusal
from tests.journeys.runs import lines, records, same

FILE = Path(own_components.__file__)
ENTRY_POINTS = {
    f"{part}.mine": f"tests.own_components:{kind.__name__}"
    for part, kind in own_components.PARTS.items()
} | {
    "recipe.narrow": "tests.own_components:narrow",
    "recipe.distilled": "tests.own_components:Distilled",
    "sampler.broken": "tests.own_components:Missing",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that offers the components, as pip would leave it."""
    info = tmp_path / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in ENTRY_POINTS.items()]
    (info / "entry_points.txt").write_text("\n".join(["[gigamask.components]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(info.parent))


def used(prefix: str) -> set[str]:
    """Return the components of a module that were used since the last call."""
    module = sys.modules["own_components" if prefix == "file" else "tests.own_components"]
    found = set(module.USED)
    module.USED.clear()
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", ["file", "module", "entry point"])
def test_every_custom_component_trains_and_resumes(how, scenes, tmp_path, installed):
    prefix = {"file": f"{FILE}:", "module": "tests.own_components:", "entry point": ""}[how]
    own_components.USED.clear()  # other tests of this process use them, too
    sys.modules.pop("own_components", None)
    recipe = f"{prefix}narrow"
    parts = own_components.PARTS.items()
    words = [f"--{part} {prefix}{kind.__name__ if prefix else 'mine'}" for part, kind in parts]
    words.append(f"--data {scenes} --activation-checkpointing 1")
    words.append("--freeze image_encoder.colours --evaluation.scale 2 --steps")
    run, whole = tmp_path / "run", tmp_path / "whole"
    invoke(f"train {recipe}", *words, f"2 --out {run}")
    assert used(how) == set(own_components.PARTS)
    invoke(f"train --resume {run} --steps 4")
    invoke(f"train {recipe}", *words, f"4 --out {whole}")
    assert same(run, whole)
    saved = flatten_yaml(read_yaml(run / "config.yaml"), "")
    named = f"{FILE}:" if how == "file" else "tests.own_components:"
    assert {part: named + kind.__name__ for part, kind in parts}.items() <= saved.items()
    assert load_config(str(run), trust=True).evaluation.scale == 2
    assert [line["step"] for line in lines(run) if "size" in line.get("evaluation", {})] == [2, 4]
    assert {"focal", "squared", "iou_head"} <= records(run)[-1].keys()
    assert "dice" not in records(run)[-1]
    assert [each["lr"] for each in records(run)] == [0.01 * 0.5**step for step in range(4)]


@pytest.mark.long
def test_custom_encoder_is_loaded_from_its_run(scenes, tmp_path, capsys):
    run = tmp_path / "run"
    words = f"--model.encoder {FILE}:Pooled --data {scenes} --steps 1"
    invoke(f"train {FILE}:narrow", words, f"--freeze image_encoder --out {run}")
    evaluate = f"evaluate {run} --data {scenes} --max-images 1"
    invoke(evaluate, "--trust")
    model = load_model(str(run), "cpu", partial(config_of_weights, trust=True))
    assert type(model.image_encoder).__name__ == "PooledEncoder"
    capsys.readouterr()
    invoke(f"plan {FILE}:narrow --model.encoder {FILE}:Pooled --optimizer {FILE}:SGD")
    assert "does not" not in capsys.readouterr().err
    frozen = f"--freeze image_encoder.blocks --out {tmp_path}/other"
    line = refusal(capsys, f"train {FILE}:narrow", words, frozen)
    assert "--freeze image_encoder.blocks: " in line


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", [f"{FILE}:Distilled", "tests.own_components:Distilled", "distilled"]
)
def test_custom_task_trains_and_resumes(recipe, scenes, tmp_path, installed, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = f"train {recipe} --data {scenes} --schedule.milestones 1"
    invoke(command, f"--out {run} --steps 2")
    assert f"next: gigamask evaluate {run}" in capsys.readouterr().out
    invoke(f"train --resume {run} --steps 4")
    invoke(command, f"--out {whole} --steps 4")
    assert same(run, whole)
    distances = [each["distance"] for each in records(run)]
    assert len(distances) == 4
    assert distances[-1] < distances[0]
    invoke(f"plan {recipe}")
    words = f"{recipe} --data {scenes} --out {tmp_path}/not"
    assert "is for 'gigamask train'" in refusal(capsys, f"pretrain {words}")
    assert "--stages" in refusal(capsys, f"train {words} --stages decoder --init {run}")


@pytest.mark.parametrize(
    "words, told",
    [
        ("--sampler broken", "Missing"),
        ("--sampler tests.nothing:Backwards", "tests.nothing"),
        ("--optimizer tests.own_components:Backwards", "gigamask.interfaces.Optimizer"),
        (
            "--activation-checkpointing 2 --model.encoder tests.own_components:Blockless",
            "--activation-checkpointing 2",
        ),
    ],
)
def test_missing_component_is_a_one_line_error(
    words, told, tmp_path, installed, scenes, capsys, monkeypatch
):
    monkeypatch.setattr(own_components, "Blockless", BLOCKLESS, raising=False)
    assert told in refusal(capsys, "train narrow", words, f"--data {scenes} --out {tmp_path}/run")


class Blockless(own_components.Pooled):
    """Names no blocks."""

    def blocks(self, encoder):
        return []


BLOCKLESS = Blockless
