"""A profile of a training as a user asks for it: what is written and said, and that nothing else
changes.
"""

import gzip
import json
from pathlib import Path

import pytest

from gigamask.cli.main import main
from tests.journeys.runs import same

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
SIZE = {
    "image-size": 64,
    "patch-size": 8,
    "embed-dim": 16,
    "depth": 2,
    "num-heads": 2,
    "decoder-dim": 16,
    "decoder-depth": 1,
    "decoder-num-heads": 2,
}
SMALL = [word for name, value in SIZE.items() for word in (f"--model.{name}", str(value))]
SHORT = [
    *SMALL,
    *("--batch-size 3 --micro-batch-size 2 --loader.workers 0 --device cpu --log-every 1").split(),
]
FILES = ["profile.md", "trace.json.gz"]


def train(*words: object) -> int:
    return main(
        [
            *(f"train {LITTLE} --batch-size 1 --micro-batch-size 1 --loader.max-masks 2").split(),
            *map(str, words),
        ]
    )


def ranges(run: Path) -> set[str]:
    """Returns what parts of which steps the trace of a run holds."""
    events = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))[
        "traceEvents"
    ]
    return {
        event["name"].removeprefix("gigamask: ")
        for event in events
        if event["name"].startswith("gigamask: ")
    }


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
    assert train("--data", scenes, "--out", out, "--steps", 5) == 0
    return out


@pytest.mark.long
def test_a_profile_is_written_while_training_goes_on_to_the_same_weights(
    scenes, plain, tmp_path, capsys
):
    out = tmp_path / "run"
    assert train("--data", scenes, "--out", out, "--steps", 5, "--profile", 1) == 0
    said = capsys.readouterr().err.splitlines()
    (at,) = (
        number
        for number, line in enumerate(said)
        if line.startswith(
            f"profiled step 4; in {out / 'profile'}: profile.md, trace.json.gz (for "
        )
    )
    assert said[at + 1].startswith("step 5/5")
    assert sorted(path.name for path in (out / "profile").iterdir()) == FILES
    assert ranges(out) == {
        "step 4",
        "load wait",
        "encode",
        "rounds",
        "backward",
        "encoder backward",
        "all_reduce",
        "save",
    }
    assert parts(out) == [
        *(
            "load wait",
            "encode",
            "rounds",
            "backward",
            "encoder backward",
            "all_reduce",
            "optimizer",
            "save",
        ),
        "everything else",
    ]
    assert same(out, plain)
    names = [sorted(path.name for path in run.iterdir()) for run in (out, plain)]
    assert [name for name in names[0] if name != "profile"] == names[1]


@pytest.mark.long
def test_mining_and_evaluation_have_their_own_profile_ranges(scenes, tmp_path):
    out = tmp_path / "run"
    words = [
        "--mining",
        "ohem",
        "--evaluation.data",
        scenes,
        "--evaluation.images",
        2,
        "--steps",
        4,
        "--profile",
        1,
    ]
    assert train("--data", scenes, "--out", out, *words) == 0
    assert {"mining", "mining / encode", "mining / rounds", "evaluation"} < set(parts(out))


@pytest.mark.long
def test_a_run_that_is_over_has_nothing_to_profile(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resume = "train --resume runs/mine --profile 5".split()
    assert train("--data", scenes, "--out", "runs/mine", "--profile", 5, "--steps", 4) == 0
    assert "step 4, not 5" in capsys.readouterr().err
    assert main([*resume, "--steps", "6"]) == 0
    assert "step 6, not 5" in capsys.readouterr().err
    assert "step 6" in ranges(Path("runs/mine"))
    assert main([*resume, "--steps", "6"]) == 0
    assert "--profile 5" in capsys.readouterr().out
    assert (
        main(
            [
                "pretrain",
                "mae_tiny",
                *SHORT,
                *f"--data {scenes} --out runs/mae --profile 5 --steps 5".split(),
            ]
        )
        == 0
    )
    assert {"step 4", "step 5"} < ranges(Path("runs/mae"))
    assert parts(Path("runs/mae")) == [
        "load wait",
        "forward",
        "backward",
        "encoder backward",
        "all_reduce",
        "optimizer",
        "save",
        "everything else",
    ]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("0", "gigamask: --profile must be at least 1 (got 0)\n"),
        ("-3", "gigamask: --profile must be at least 1 (got -3)\n"),
        ("few", "gigamask: --profile must be a whole number (got 'few'); see "),
    ],
)
@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_how_many_steps_must_be_a_number_from_one_on(scenes, tmp_path, capsys, verb, value, line):
    recipe = {"train": LITTLE, "pretrain": "mae_tiny"}[verb]
    assert (
        main(
            [
                verb,
                recipe,
                *f"--data {scenes} --out {tmp_path}/run --profile".split(),
                value,
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_leaks_are_looked_for_in_every_training(scenes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "gigamask.profiling.leaks.Leaks.observe",
        lambda leaks, done, over: (
            [("memory leak: it grows", {"leak": "x"})] if done == 2 and not over else []
        ),
    )
    assert train("--data", scenes, "--out", tmp_path / "run", "--steps", 3) == 0
    assert capsys.readouterr().err.count("memory leak: it grows\n") == 1
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line for line in lines if "leak" in line] == [{"step": 2, "leak": "x"}]
