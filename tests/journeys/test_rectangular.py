"""`--model.rectangular`, from training to export, as a user types it."""

import json
from pathlib import Path

import pytest

from gigamask.cli.main import main
from gigamask.models.sam.sam import Sam
from tests.journeys.runs import CONSTANT_LR, records, same

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"


def train(*words: object) -> int:
    return main(["train", *map(str, words)])


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rectangular") / "run"
    words = [LITTLE, "--data", scenes, "--out", folder, "--model.rectangular", *CONSTANT_LR]
    assert train(*words, "--steps", 4) == 0
    return folder


@pytest.mark.long
def test_it_resumes_and_does_not_depend_on_micro_batches(run, scenes, tmp_path):
    words = [LITTLE, "--data", scenes, *CONSTANT_LR]
    parts, ones, square = (tmp_path / name for name in ("parts", "ones", "square"))
    assert train(*words, "--out", parts, "--model.rectangular", "--steps", 2) == 0
    assert train("--resume", parts, "--steps", 4) == 0
    assert same(run, parts)
    assert (
        train(*words, "--out", ones, "--model.rectangular", "--steps", 4, "--micro-batch-size", 1)
        == 0
    )
    assert train(*words, "--out", square, "--steps", 4) == 0
    losses = {folder: [line["loss"] for line in records(folder)] for folder in (run, ones, square)}
    assert losses[ones] == pytest.approx(losses[run], rel=1e-4)
    assert losses[square] != pytest.approx(losses[run], rel=1e-4)


@pytest.mark.long
def test_weights_keep_it_and_what_cannot_do_it_says_so(run, scenes, tmp_path, capsys):
    told, weights = tmp_path / "told.json", tmp_path / "model.safetensors"
    assert main(f"export {run} --to safetensors --out {weights}".split()) == 0
    assert Sam.from_pretrained(weights).config.rectangular
    scores = []
    for source in (run, weights):
        words = f"--data {scenes} --max-images 2 --json {told}".split()
        assert main(["evaluate", str(source), *words]) == 0
        scores.append(json.loads(told.read_text())["clicks"])
    assert scores[0] == scores[1]
    capsys.readouterr()
    for form, name in (("official", "out.pth"), ("huggingface", "hf"), ("onnx", "onnx")):
        out = tmp_path / name
        assert main(["export", str(run), "--to", form, "--out", str(out)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "--model.rectangular" in line
        assert not out.exists()
    for flags in (["--parallel", "fsdp"], ["--compile"]):
        out = tmp_path / "refused"
        words = [LITTLE, "--data", scenes, "--out", out, "--model.rectangular", *flags]
        assert train(*words) == 2
        assert flags[0] in capsys.readouterr().err
        assert not out.exists()
