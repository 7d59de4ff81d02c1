"""`gigamask ablate`: what it writes, resumes and refuses."""

import re
import shutil
from pathlib import Path

import pytest

from gigamask.cli.main import INTERRUPTED
from gigamask.errors import GigamaskError
from gigamask.plugins.ablate import ablation, budget
from gigamask.serialization import read_json
from gigamask.synthetic import scenes as synthetic
from gigamask.training import trainer
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys.scores import alike

RESUMED = {"seconds": None, "cpu_minutes": None}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    synthetic.write(folder, 2, seed=9)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "orders.yaml"
    path.write_text("plain: []\nlanes: {sampler: streamed, sampler.lanes: 2}\n")
    return path


@pytest.fixture(scope="module")
def command(table, scenes, held_out) -> str:
    return f"ablate {table} --recipe {LITTLE} --data {scenes} --test {held_out} --max-images 1"


@pytest.fixture(scope="module")
def done(command, tmp_path_factory) -> Path:
    """The folder of two variants with two seeds, two steps each."""
    out = tmp_path_factory.mktemp("done") / "out"
    invoke(command, f"--out {out} --seeds 2 --steps 2 --json {out.parent}/said.json")
    return out


def told(folder: Path) -> dict[str, dict]:
    """Returns what each training's scores are."""
    return {
        str(path.relative_to(folder).parent): read_json(path)
        for path in folder.glob("*/*/evaluation.json")
    }


@pytest.mark.long
def test_a_table_is_trained_and_scored(done):
    markdown = (done / "ablation.md").read_text()
    found = read_json(done / "ablation.json")
    rows = [line.split()[1] for line in markdown.splitlines() if line.startswith("| ")]
    assert rows == ["variant", "plain", "lanes"]
    assert read_json(done.parent / "said.json") == found
    assert (found["steps"], found["seeds"]) == (2, 2)
    assert (found["data"]["images"], found["test"]["images"]) == (12, 1)
    masks = {each["masks"] for each in told(done).values()}
    assert masks == {found["test"]["masks"]}
    assert f"Evaluated on 1 image with {found['test']['masks']} masks (" in markdown
    assert found["variants"]["lanes"]["flags"] == "--sampler streamed --sampler.lanes 2".split()
    scores = told(done)
    assert scores.keys() == {"plain/seed_0", "plain/seed_1", "lanes/seed_0", "lanes/seed_1"}
    # Each variant and each seed is another training.
    assert len({each["box"] for each in scores.values()}) == 4
    for variant, each in found["variants"].items():
        ones = [scores[f"{variant}/seed_{seed}"]["clicks"]["1"] for seed in (0, 1)]
        assert each["mean"]["1 click"] == pytest.approx(sum(ones) / 2)
        assert each["spread"]["1 click"] == pytest.approx(abs(ones[0] - ones[1]) / 2**0.5)
        assert all(0 < training["seconds"] < 600 for training in each["trainings"])


@pytest.mark.long
def test_what_is_done_is_not_done_again(command, done, capsys):
    again = f"{command} --out {done} --seeds 2 --steps 2"
    before = told(done)
    capsys.readouterr()
    invoke(again)
    printed = capsys.readouterr().out
    assert printed.partition("\n")[2].startswith((done / "ablation.md").read_text())
    assert printed.endswith(f"next: gigamask report {done}\n")
    (done / "lanes" / "seed_1" / "evaluation.json").unlink()
    invoke(again)
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith("steps")] == [
        "lanes, seed 1: 2 steps"
    ]
    assert alike(told(done), before | {"lanes/seed_1": before["lanes/seed_1"] | RESUMED})


@pytest.mark.long
def test_a_stopped_training_goes_on_and_ends_where_it_would_have(
    command, table, tmp_path, monkeypatch, capsys
):
    """The first call is stopped at the second of four steps."""
    (tmp_path / "one.json").write_text('{"plain": []}')
    first = f"{command.replace(str(table), f'{tmp_path}/one.json')} --seeds 1"
    invoke(first, f"--out {tmp_path}/whole")

    class Stopping(trainer.MetricsLogger):
        def log_step(self, step, images, record):
            super().log_step(step, images, record)
            if step == 2:
                trainer.signal.raise_signal(trainer.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "MetricsLogger", Stopping)
        assert exit_code(first, f"--out {tmp_path}/out") == INTERRUPTED
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"gigamask: .*/out/plain/seed_0: interrupted and saved at step [23] of 4; .*",
        said,
    )
    assert told(tmp_path / "out") == {}
    invoke(first, f"--out {tmp_path}/out")
    assert alike(
        told(tmp_path / "out")["plain/seed_0"],
        told(tmp_path / "whole")["plain/seed_0"] | RESUMED,
    )


@pytest.mark.long
def test_trainings_side_by_side_are_the_same(command, done, tmp_path):
    out = tmp_path / "beside"
    invoke(command, f"--out {out} --seeds 1 --steps 2 --parallel-runs 2")
    ours, theirs = told(out), told(done)
    assert alike(
        {name: each["clicks"] for name, each in ours.items()},
        {name: theirs[name]["clicks"] for name in ("plain/seed_0", "lanes/seed_0")},
    )
    assert "step 2/2" in (out / "plain" / "seed_0" / "log.txt").read_text()


@pytest.mark.long
def test_a_failed_training_does_not_keep_the_others(command, tmp_path, monkeypatch, capsys):
    train, once = ablation.train, f"{command} --out {tmp_path}/out --seeds 1 --steps 1"

    def failing(run, **given):
        if "plain" in run.out:
            raise GigamaskError("the loss is not finite")
        return train(run, **given)

    with monkeypatch.context() as patch:
        patch.setattr(ablation, "train", failing)
        assert exit_code(once) == 2
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("gigamask: 1 of 2 runs failed")
    assert "plain, seed 0: the loss is not finite" in line
    assert "failed: plain, seed 0" in said.out
    assert told(tmp_path / "out").keys() == {"lanes/seed_0"}
    invoke(once)
    assert told(tmp_path / "out").keys() == {"lanes/seed_0", "plain/seed_0"}


@pytest.mark.long
def test_another_training_in_the_folder_is_refused(command, done, tmp_path, capsys):
    out, other = tmp_path / "out", tmp_path / "other"
    shutil.copytree(done, out)
    synthetic.write(other, 2, seed=2)
    once = f"{command} --out {out} --seeds 1 --steps"
    cases = {
        f"{once} 3": "plain/seed_0: was trained with --steps 2, not 3",
        f"{once} 2 --data {other}": "was trained on other data than these 2 images",
    }
    for words, message in cases.items():
        capsys.readouterr()
        assert exit_code(words) == 2
        said = capsys.readouterr()
        assert said.out.count("\n") == 1  # what the command is about to do
        assert message in said.err
    # With other test data it is the same training: it is scored anew.
    invoke(f"{once} 2 --test {other}")
    assert read_json(out / "ablation.json")["test"]["paths"] == [str(other)]


def test_bad_input_is_one_line_before_any_training(command, table, tmp_path, capsys):
    (tmp_path / "odd.yaml").write_text("good: []\nbad: [--sampler.lanes, '2']\n")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").touch()
    command = f"{command} --out {tmp_path}/out --seeds 2"
    wrong = {
        command.replace(str(table), "loses"): "no table or file 'loses'",
        command.replace(str(table), f"{tmp_path}/odd.yaml"): "variant bad: ",
        f"{command} --out {tmp_path}/photos": "but holds 1.jpg",
        f"{command} --steps 1 --cpu-minutes 1": "--steps and --cpu-minutes are both given",
        f"{command} --min-predicted-iou 5": "--min-predicted-iou must be between 0 and 1 (got 5.0)",
        f"{command} --data no": "no: no such path",
        re.sub(r"--test \S+", "--test []", command): "--test is required",
    }
    for words, message in wrong.items():
        assert exit_code(words) == 2, words
        said = capsys.readouterr()
        assert len(said.err.strip().splitlines()) == 1, said.err
        assert message in said.err
        assert said.out.count("\n") == 1  # what the command is about to do
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_variants_train_for_equal_cpu_minutes(command, table, tmp_path, monkeypatch, capsys):
    """A variant whose steps cost about twice the CPU time has about half of them."""
    (tmp_path / "two.yaml").write_text("plain: []\ndouble: {batch-size: 9}\n")
    out = tmp_path / "out"
    monkeypatch.setattr(budget, "STEPS", budget.WARM_UP_STEPS + 5)
    words = command.replace(str(table), f"{tmp_path}/two.yaml")
    words += f" --out {out} --seeds 1 --cpu-minutes 0.01"
    invoke(words)
    told = capsys.readouterr().out
    found = read_json(out / "ablation.json")
    measured = read_json(out / "cpu_seconds.json")
    assert found["cpu_minutes"] == 0.01
    for name in ("plain", "double"):
        step_cpu_s = measured[name]["step_cpu_s"]
        assert f"{name}: {step_cpu_s:.3f} CPU s per step" in told
        assert found["steps"][name] == max(1, round(0.6 / step_cpu_s))
        [training] = found["variants"][name]["trainings"]
        assert training["steps"] == found["steps"][name]
        assert 0 < training["cpu_minutes"] < 1
    assert found["steps"]["double"] < found["steps"]["plain"]
    text = (out / "ablation.md").read_text()
    assert "0.01 CPU minutes, one seed" in text
    [head] = [line for line in text.splitlines() if line.startswith("| variant")]
    assert [cell.strip() for cell in head.split("|")[1:4]] == ["variant", "steps", "CPU minutes"]
    # What was measured stays, so that the same command has nothing left to do.
    monkeypatch.setattr(ablation, "train", None)
    invoke(words)
    assert capsys.readouterr().out.partition("\n")[2].startswith(text)
    assert read_json(out / "cpu_seconds.json") == measured
    # A variant that is another is measured anew, and its folder has another run.
    (tmp_path / "two.yaml").write_text("plain: []\ndouble: {batch-size: 12}\n")
    assert exit_code(words) == 2
    said = capsys.readouterr()
    assert "\ndouble: " in said.out
    assert "plain: " not in said.out
    assert "double/seed_0: was trained with --" in said.err


def test_cpu_minutes_are_for_a_cpu(command, tmp_path, monkeypatch, capsys):
    device = budget.torch.device("cuda")
    monkeypatch.setattr(budget, "choose_device", lambda name: device)
    assert "use --steps" in refusal(capsys, command, f"--out {tmp_path}/out --cpu-minutes 1")
