"""A user's own class for every interface, by file, module or entry point: train, resume, plan."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from gigamask.cli.main import main
from gigamask.config_files import config_of_weights, load_config
from gigamask.serialization import flatten_yaml, read_yaml
from gigamask.training.checkpoint import load_model
from tests import own_components
from tests.journeys.runs import records, same

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
    words = [
        word
        for part, kind in own_components.PARTS.items()
        for word in (f"--{part}", f"{prefix}{kind.__name__}" if prefix else "mine")
    ]
    words += (
        f"--data {scenes} --activation-checkpointing 1 --freeze "
        "image_encoder.colours --evaluation.scale 2 --steps"
    ).split()
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert main(["train", recipe, *words, "2", "--out", str(run)]) == 0
    assert used(how) == set(own_components.PARTS)
    assert main(f"train --resume {run} --steps 4".split()) == 0
    assert main(["train", recipe, *words, "4", "--out", str(whole)]) == 0
    assert same(run, whole)
    saved = flatten_yaml(read_yaml(run / "config.yaml"), "")
    named = f"{FILE}:" if how == "file" else "tests.own_components:"
    assert {part: saved[part] for part in own_components.PARTS} == {
        part: named + kind.__name__ for part, kind in own_components.PARTS.items()
    }
    assert load_config(str(run), trust=True).evaluation.scale == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "size" in line.get("evaluation", {})] == [2, 4]
    assert {"focal", "squared", "iou_head"} <= records(run)[-1].keys()
    assert "dice" not in records(run)[-1]
    assert [each["lr"] for each in records(run)] == [0.01 * 0.5**step for step in range(4)]


@pytest.mark.long
def test_custom_encoder_is_loaded_from_its_run(scenes, tmp_path, capsys):
    run = tmp_path / "run"
    words = f"--model.encoder {FILE}:Pooled --data {scenes} --steps 1".split()
    assert (
        main(["train", f"{FILE}:narrow", *words, "--freeze", "image_encoder", "--out", str(run)])
        == 0
    )
    evaluate = f"evaluate {run} --data {scenes} --max-images 1".split()
    assert main([*evaluate, "--trust"]) == 0
    model = load_model(str(run), "cpu", partial(config_of_weights, trust=True))
    assert type(model.image_encoder).__name__ == "PooledEncoder"
    capsys.readouterr()
    assert (
        main((f"plan {FILE}:narrow --model.encoder {FILE}:Pooled --optimizer {FILE}:SGD").split())
        == 0
    )
    assert "does not" not in capsys.readouterr().err
    assert (
        main(
            [
                "train",
                f"{FILE}:narrow",
                *words,
                "--freeze",
                "image_encoder.blocks",
                "--out",
                str(tmp_path / "other"),
            ]
        )
        == 2
    )
    assert "--freeze image_encoder.blocks: " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", [f"{FILE}:Distilled", "tests.own_components:Distilled", "distilled"]
)
def test_custom_task_trains_and_resumes(recipe, scenes, tmp_path, installed, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = ["train", recipe, "--data", str(scenes), "--schedule.milestones", "1"]
    assert main([*command, "--out", str(run), "--steps", "2"]) == 0
    assert f"next: gigamask evaluate {run}" in capsys.readouterr().out
    assert main(f"train --resume {run} --steps 4".split()) == 0
    assert main([*command, "--out", str(whole), "--steps", "4"]) == 0
    assert same(run, whole)
    distances = [each["distance"] for each in records(run)]
    assert len(distances) == 4
    assert distances[-1] < distances[0]
    assert main(["plan", recipe]) == 0
    assert main(["pretrain", recipe, "--data", str(scenes), "--out", str(tmp_path / "not")]) == 2
    assert "is for 'gigamask train'" in capsys.readouterr().err
    assert (
        main(
            [
                "train",
                recipe,
                *(f"--data {scenes} --stages decoder --init {run} --out {tmp_path}/not").split(),
            ]
        )
        == 2
    )
    assert "--stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sampler", "broken"], "Missing"),
        (["--sampler", "tests.nothing:Backwards"], "tests.nothing"),
        (["--sampler", "tests.own_components:Nothing"], "Nothing"),
        (["--optimizer", "tests.own_components:Backwards"], "gigamask.interfaces.Optimizer"),
        (["--sampler", "other"], "mine"),
        (
            ("--activation-checkpointing 2 --model.encoder tests.own_components:Blockless").split(),
            "--activation-checkpointing 2",
        ),
    ],
)
def test_missing_component_is_a_one_line_error(
    words, told, tmp_path, installed, scenes, capsys, monkeypatch
):
    monkeypatch.setattr(own_components, "Blockless", BLOCKLESS, raising=False)
    assert (
        main(["train", "narrow", *words, "--data", str(scenes), "--out", str(tmp_path / "run")])
        == 2
    )
    assert told in capsys.readouterr().err


class Blockless(own_components.Pooled):
    """Names no blocks."""

    def blocks(self, encoder):
        return []


BLOCKLESS = Blockless
