"""A signal interrupts a run, and a second training in its folder is refused."""

import json
import os
import signal

import pytest

from gigamask.cli.main import INTERRUPTED, main
from gigamask.training import checkpoint
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys.runs import same, started


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_a_second_training_is_refused(scenes, tmp_path, capsys, number):
    """Terminals and batch systems signal the loader's processes too."""
    out = tmp_path / "run"
    command = f"train {LITTLE} --data {scenes} --out {out} --loader.workers 1"
    command += " --steps 100000 --save-every 100000"
    with started(command, out) as process:
        assert "another process" in refusal(capsys, command)
        os.killpg(process.pid, number)
        said, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, errors
    assert errors.count(f"{signal.Signals(number).name}: finishing this step") == 1
    assert "continue with: gigamask train --resume" in said
    step = int(checkpoint.newest(out).name.removeprefix("step_"))
    assert 0 < step < 100000
    invoke(f"train --resume {out} --steps {step + 1}")


STOPPED = """
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from gigamask.distributed.world import check_stop
from gigamask.interfaces import EvaluationResult, Evaluator


@dataclass(frozen=True)
class Stopped(Evaluator):
    def open(self, config, world):
        def evaluate(model):
            begun = Path(config.out) / "begun"
            if not begun.exists():
                begun.touch()
                os.kill(os.getpid(), signal.SIGTERM)
                check_stop(world)
            return EvaluationResult({"any": 0.5}, "any")

        return evaluate
"""


def test_a_signal_ends_the_last_evaluation_which_a_resume_does(scenes, tmp_path, capsys):
    own, out = tmp_path / "stopped.py", tmp_path / "run"
    own.write_text(STOPPED)
    command = f"train {LITTLE} --data {scenes} --out {out} --steps 1 --evaluation {own}:Stopped"
    assert main(command.split()) == INTERRUPTED
    said = capsys.readouterr()
    assert "saved at step 1 of 1; continue with: gigamask train --resume" in said.out
    assert "evaluated at" not in said.err
    invoke(f"train --resume {out}")
    assert "evaluated at step 1" in capsys.readouterr().err
    assert (out / "checkpoints" / "best").is_symlink()


@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)],
)
def test_pieces_of_minutes_give_the_bits_of_one_piece(scenes, tmp_path, capsys, processes):
    """Each piece makes at least one step, and all processes end it at the same one."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    command = f"train {LITTLE} --data {scenes} --steps 3 --processes {processes} --out"
    invoke(command, f"{whole}")
    for step in (1, 2):
        assert exit_code(command, f"{pieces} --max-minutes 0") == INTERRUPTED
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.endswith(
            f"saved at step {step} of 3; continue with: gigamask train --resume {pieces}"
        )
    invoke(f"train --resume {pieces} --max-minutes 60")
    assert same(whole, pieces)


@pytest.mark.parametrize("minutes, code", [("0", 0), ("60", INTERRUPTED)])
def test_under_torchrun_the_end_of_the_time_is_no_failure(
    scenes, tmp_path, monkeypatch, minutes, code
):
    """But a stop signal is, so that other machines wait for the one that was taken back."""
    own, told = tmp_path / "stopped.py", tmp_path / "told.json"
    own.write_text(STOPPED)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    command = f"train {LITTLE} --data {scenes} --out {tmp_path}/run --steps 2 --json {told}"
    command += f" --evaluation {own}:Stopped --evaluation.interval 1 --max-minutes {minutes}"
    assert exit_code(command) == code
    assert json.loads(told.read_bytes()).get("time_over", False) == (code == 0)


def test_minutes_that_are_none_are_refused(scenes, tmp_path, capsys):
    command = f"train {LITTLE} --data {scenes} --out {tmp_path} --max-minutes"
    for minutes in ("-1", "nan"):
        message = f"--max-minutes must be at least 0 (got {float(minutes)})"
        assert message in refusal(capsys, command, minutes)
