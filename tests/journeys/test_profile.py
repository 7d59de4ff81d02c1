"""A profile of a training as a user asks for it: what is written and said, and that nothing else
changes.
"""

import gzip
import json
from pathlib import Path

import pytest

from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import PRETRAIN, lines, same

TRAIN = f"train {LITTLE} --batch-size 1 --micro-batch-size 1 --loader.max-masks 2"
FILES = ["profile.md", "trace.json.gz"]
PARTS = (
    "load wait,encode,rounds,backward,encoder backward,all_reduce,optimizer,save,everything else"
).split(",")


def ranges(run: Path) -> set[str]:
    """Returns what parts of which steps the trace of a run holds."""
    trace = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"]]
    return {name[10:] for name in names if name.startswith("gigamask: ")}


def parts(run: Path) -> list[str]:
    """Returns the parts of a step that the report of a run lists."""
    report = (run / "profile" / "profile.md").read_text().split("operators:")[0]
    return [
        line.split(" | ")[0].removeprefix("| ")
        for line in report.splitlines()
        if line.endswith(" |")
    ][1:]


@pytest.fixture(scope="module")
def plain(scenes, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    invoke(TRAIN, f"--data {scenes} --out {out} --steps 5")
    return out


@pytest.mark.long
def test_a_profile_is_written_while_training_goes_on_to_the_same_weights(
    scenes, plain, tmp_path, capsys
):
    out = tmp_path / "run"
    invoke(TRAIN, f"--data {scenes} --out {out} --steps 5 --profile 1")
    said = capsys.readouterr().err.splitlines()
    told = f"profiled step 4; in {out / 'profile'}: profile.md, trace.json.gz (for "
    (at,) = (number for number, line in enumerate(said) if line.startswith(told))
    assert said[at + 1].startswith("step 5/5")
    assert sorted(path.name for path in (out / "profile").iterdir()) == FILES
    assert ranges(out) == {"step 4", *PARTS} - {"optimizer", "everything else"}
    assert parts(out) == PARTS
    assert same(out, plain)
    names = [sorted(path.name for path in run.iterdir()) for run in (out, plain)]
    assert [name for name in names[0] if name != "profile"] == names[1]


@pytest.mark.long
def test_mining_and_evaluation_have_their_own_profile_ranges(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    words = f"--mining ohem --evaluation.data {scenes} --evaluation.images 2 --steps 4 --profile 1"
    invoke(TRAIN, f"--data {scenes} --out {out}", words)
    assert "2 of 2 images are training data of" in capsys.readouterr().out
    assert {"mining", "mining / encode", "mining / rounds", "evaluation"} < set(parts(out))


@pytest.mark.long
def test_a_run_that_is_over_has_nothing_to_profile(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resume = "train --resume runs/mine --profile 5"
    invoke(TRAIN, f"--data {scenes} --out runs/mine --profile 5 --steps 4")
    assert "step 4, not 5" in capsys.readouterr().err
    invoke(resume, "--steps 6")
    assert "step 6, not 5" in capsys.readouterr().err
    assert "step 6" in ranges(Path("runs/mine"))
    invoke(resume, "--steps 6")
    assert "--profile 5" in capsys.readouterr().out
    invoke(PRETRAIN, f"--data {scenes} --out runs/mae --profile 5 --steps 5")
    assert {"step 4", "step 5"} < ranges(Path("runs/mae"))
    assert parts(Path("runs/mae")) == ["load wait", "forward", *PARTS[3:]]


@pytest.mark.parametrize(
    "value, line",
    [
        ("0", "gigamask: --profile must be at least 1 (got 0)"),
        ("few", "gigamask: --profile must be a whole number (got 'few'); see "),
    ],
)
@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_how_many_steps_must_be_a_number_from_one_on(scenes, tmp_path, capsys, verb, value, line):
    recipe = {"train": LITTLE, "pretrain": "mae_tiny"}[verb]
    words = f"{verb} {recipe} --data {scenes} --out {tmp_path}/run --profile {value}"
    assert refusal(capsys, words).startswith(line)
    assert not (tmp_path / "run").exists()


def test_leaks_are_looked_for_in_every_training(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "gigamask.profiling.leaks.Leaks.observe",
        lambda leaks, done, over: (
            [("memory leak: it grows", {"leak": "x"})] if done == 2 and not over else []
        ),
    )
    invoke(TRAIN, f"--data {scenes} --out {tmp_path}/run --steps 3")
    assert capsys.readouterr().err.count("memory leak: it grows\n") == 1
    assert [line for line in lines(tmp_path / "run") if "leak" in line] == [
        {"step": 2, "leak": "x"}
    ]
