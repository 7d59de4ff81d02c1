"""`--model.rectangular`, from training to export, as a user types it."""

import json
from pathlib import Path

import pytest

from gigamask.models.sam.sam import Sam
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import CONSTANT_LR, records, same


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rectangular") / "run"
    words = f"train {LITTLE} --data {scenes} --out {folder} --model.rectangular --steps 4"
    invoke(words, *CONSTANT_LR)
    return folder


@pytest.mark.long
def test_it_resumes_and_does_not_depend_on_micro_batches(run, scenes, tmp_path):
    words = " ".join([f"train {LITTLE} --data {scenes}", *CONSTANT_LR])
    parts, ones, square = (tmp_path / name for name in ("parts", "ones", "square"))
    invoke(words, f"--out {parts} --model.rectangular --steps 2")
    invoke(f"train --resume {parts} --steps 4")
    assert same(run, parts)
    invoke(words, f"--out {ones} --model.rectangular --steps 4 --micro-batch-size 1")
    invoke(words, f"--out {square} --steps 4")
    losses = {folder: [line["loss"] for line in records(folder)] for folder in (run, ones, square)}
    assert losses[ones] == pytest.approx(losses[run], rel=1e-4)
    assert losses[square] != pytest.approx(losses[run], rel=1e-4)


@pytest.mark.long
def test_weights_keep_it_and_what_cannot_do_it_says_so(run, scenes, tmp_path, capsys):
    told, weights = tmp_path / "told.json", tmp_path / "model.safetensors"
    invoke(f"export {run} --to safetensors --out {weights}")
    assert Sam.from_pretrained(weights).config.rectangular
    scores = []
    for source in (run, weights):
        invoke(f"evaluate {source} --data {scenes} --max-images 2 --json {told}")
        scores.append(json.loads(told.read_text())["clicks"])
    assert scores[0] == scores[1]
    capsys.readouterr()
    for form, name in (("official", "out.pth"), ("huggingface", "hf"), ("onnx", "onnx")):
        out = tmp_path / name
        line = refusal(capsys, f"export {run} --to {form} --out {out}")
        assert "--model.rectangular" in line
        assert not out.exists()
    for flag in ("--parallel fsdp", "--compile"):
        out = tmp_path / "refused"
        words = f"train {LITTLE} --data {scenes} --out {out} --model.rectangular {flag}"
        assert flag.split()[0] in refusal(capsys, words)
        assert not out.exists()
