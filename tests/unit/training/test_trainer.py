"""Signals while a training runs, and results that are read late."""

import ctypes
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask.distributed.precision import LossScaler
from gigamask.samplers.loss_history import LossHistory
from gigamask.signals import STOP_SIGNALS
from gigamask.training import checkpoint, opening, step, trainer
from gigamask.training.async_checkpoint import AsyncCheckpointer
from gigamask.training.optim import MuonAdamW, WarmupCosine
from gigamask.training.state import TrainState
from gigamask.training.train_data import open_index
from gigamask.training.trainer import stop_signals_collected
from tests.errors import error_line
from tests.journeys.runs import same
from tests.laws.test_training import run_in
from tests.little import little


@pytest.mark.slow
def test_what_is_odd_about_a_training_is_said(tmp_path, scenes, monkeypatch):
    run = run_in(tmp_path, scenes, steps=2, schedule=WarmupCosine(warmup_steps=3))
    state, index = TrainState.initialize(run, torch.device("cpu")), open_index(run)
    *others, last = opening.lines(run, state, index, 12, 1)
    assert last.startswith("  warm-up: 3 steps, more than --steps")
    run = replace(run, steps=3)
    enough = [*opening.lines(run, state, index, 12, 1)]
    assert enough[1:] == others[1:]
    assert [*opening.lines(run, state, index, 12, run.batch_size + 3)][-1].startswith(
        "  3 processes have no sample in any step"
    )
    assert enough[1].endswith("; weights are random")
    monkeypatch.setattr(type(state.model), "pretrained_names", ("image_encoder.backbone.",))
    trained = [*opening.lines(run, state, index, 12, 1)]
    assert trained[1].endswith("; weights are random but the encoder's")


class Pipe:
    """Standard error that can be waited for."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def write(self, text: str) -> None:
        os.write(self.writer, text.encode())

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_acknowledged_while_a_step_takes_long(monkeypatch, number):
    """The step is a call that returns only once the line is printed; no handler runs meanwhile."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    handler, letter = signal.getsignal(number), ctypes.create_string_buffer(1)
    late = threading.Timer(60, pipe.write, ("late",))
    late.start()
    received = []
    with stop_signals_collected(received):
        signal.siginterrupt(number, False)
        assert not received
        threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
        ctypes.CDLL(None).read(pipe.reader, letter, 1)
        late.cancel()
        assert received == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == handler
    line = letter.value + os.read(pipe.reader, 200)
    assert line.startswith(signal.Signals(number).name.encode() + b": finishing this step")
    assert line.count(b"\n") == 1


def test_processes_that_were_forked_meanwhile_do_not_hold_up_the_end():
    """As loader workers are, which an exception within a step keeps alive."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with stop_signals_collected([]):
        worker.start()
    assert worker.is_alive()
    worker.kill()
    worker.join()


def test_other_processes_print_nothing(capfd):
    received = []
    with stop_signals_collected(received, verbose=False):
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert capfd.readouterr().err == ""


def test_in_another_thread_signals_are_left_alone():
    handler, found = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with stop_signals_collected([]):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [handler]


RECORDED = ("step", "loss", "iou", "lr", "grad_norm", "skipped", "epoch", "skipped_step")


def records(run: Path) -> list[dict]:
    """What the log of a run says of each step, without times."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {name: line[name] for name in RECORDED if name in line}
        for line in lines
        if "started" not in line
    ]


@pytest.mark.long
def test_results_that_are_read_a_step_late_change_nothing(tmp_path, scenes, monkeypatch):
    """As on a GPU; the second of seven steps is skipped, and the third and sixth are saved."""
    accumulate, calls = step.accumulate, []

    def spoil(task, model, batch, *given) -> None:
        accumulate(task, model, batch, *given)
        calls.append(batch.names)
        if len(calls) == 3:
            next(model.parameters()).grad.fill_(math.nan)

    monkeypatch.setattr(step, "accumulate", spoil)
    options = {"steps": 7, "save_every": 3, "log_every": 1, "optimizer": MuonAdamW()}
    runs = [run_in(tmp_path / name, scenes, **options) for name in ("at once", "late")]
    trainer.train(runs[0])
    calls.clear()
    monkeypatch.setattr(trainer, "_lag", lambda *given: 1)
    trainer.train(runs[1])
    at_once, late = (records(Path(run.out)) for run in runs)
    assert at_once == late
    assert [record["skipped"] for record in late if "skipped" in record] == [0, 1, 0, 0, 0, 0, 0]
    assert same(*(Path(run.out) for run in runs))


@pytest.mark.slow
def test_a_training_stops_where_a_late_result_says_so(tmp_path, scenes, monkeypatch):
    """The request of the third step is known once the fourth is launched; the fourth is saved."""
    launched, launch = [], trainer._launch

    def stop(config, task, state, batches, world, device, requests) -> trainer._Launched:
        launched.append(state.step + 1)
        requests = (len(launched) == 3, requests[1])
        return launch(config, task, state, batches, world, device, requests)

    monkeypatch.setattr(trainer, "_launch", stop)
    monkeypatch.setattr(trainer, "_lag", lambda *given: 1)
    config = run_in(tmp_path / "run", scenes, steps=7, log_every=1)
    state = trainer.train(config)
    assert (state.step, state.stopping, launched) == (4, True, [1, 2, 3, 4])
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]
    assert checkpoint.newest(tmp_path / "run").name == "step_00000004"
    assert trainer.train(config).step == 7


@pytest.mark.parametrize("rate", [math.nan, -0.5])
def test_a_rate_below_0_or_no_number_stops_before_it_ruins_the_weights(
    tmp_path, scenes, monkeypatch, rate
):
    monkeypatch.setattr(WarmupCosine, "factor", lambda *_: rate)
    with error_line(r"^the learning rate of step 1 is (nan|-0.0005): --schedule"):
        trainer.train(run_in(tmp_path / "run", scenes, steps=1))


def test_modes_that_a_program_has_set_change_nothing(tmp_path, scenes):
    plain, other = (run_in(tmp_path / name, scenes, steps=2) for name in ("plain", "other"))
    trainer.train(plain)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
            trainer.train(other)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(tmp_path / "plain", tmp_path / "other")


@pytest.mark.slow
def test_an_error_that_is_kept_leaves_no_process(tmp_path, scenes, monkeypatch):
    """Python waits at its end for processes of the loader, which ignore SIGTERM."""

    def fail(self, state) -> None:
        raise OSError("full")

    monkeypatch.setattr(AsyncCheckpointer, "finish", fail)
    run = run_in(tmp_path / "run", scenes, steps=1)
    run = replace(run, loader=replace(run.loader, workers=1))
    with pytest.raises(OSError, match="full") as kept:
        trainer.train(run)
    assert not multiprocessing.active_children(), kept


def test_a_step_is_late_only_where_the_next_one_does_not_need_its_result():
    config = replace(little(), data=("x",))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    state = TrainState.initialize(config, cpu)
    assert (trainer._lag(cuda, state), trainer._lag(cpu, state)) == (1, 0)
    assert trainer._lag(cuda, replace(state, scale=LossScaler())) == 0
    assert trainer._lag(cuda, replace(state, loss_history=LossHistory.empty("a", 2, 0.9))) == 0
