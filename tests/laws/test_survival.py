"""However often a training is killed, the same command continues it to the same weights."""

import copy
import json
import math
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask import registry
from gigamask.distributed.world import World, check_stop, destroy_world, init_world
from gigamask.interfaces import EvaluationResult, Evaluator
from gigamask.samplers.batch_sampler import SampleSequence, iter_segments
from gigamask.samplers.hard_examples import LossWeighted
from gigamask.samplers.loss_history import LossHistory
from gigamask.training import checkpoint, trainer
from gigamask.training.async_checkpoint import AsyncCheckpointer
from gigamask.training.logging import MetricsLogger
from gigamask.training.train_data import open_index
from gigamask.training.trainer import train
from tests.journeys.runs import lines, newest_step
from tests.laws.test_training import exit_code_of, run_in, same
from tests.ranks import fork

KILLS = 30
MOST_S = 120


@pytest.mark.long
def test_thirty_kills_at_any_moment(tmp_path, scenes, record_property):
    """Also while it loads, saves or prunes: each process dies soon after its first checkpoint."""
    record_property("tried", KILLS)
    steps, chance = 90, random.Random(0)
    parts = {
        "steps": steps,
        "save_every": 1,
        "log_every": 100,
        "batch_size": 1,
        "sampler": LossWeighted(per_epoch=8),
    }
    whole = train(run_in(tmp_path / "whole", scenes, **parts))
    out = tmp_path / "killed"
    run = run_in(out, scenes, **parts)
    context = multiprocessing.get_context(
        "fork"
    )  # so that the thirty need not start Python; torch computes with one thread here
    reached, deadline = [], time.monotonic() + MOST_S
    for _ in range(KILLS):
        process = context.Process(target=train, args=(run,))
        process.start()
        before = newest_step(out)
        while newest_step(out) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (
            "it was to be killed before its end; give it more steps"
        )
        reached.append(newest_step(out))
    assert reached == sorted(reached)
    assert 0 < reached[0] < reached[-1] < steps
    assert same(whole, train(run))
    assert not list((out / "checkpoints").glob(".*.part"))


@dataclass(frozen=True)
class Score(Evaluator):
    """A number that depends on each weight; with a signal to send, only at its second attempt."""

    interval: int = 2
    number: int = 0

    def open(self, config, world):
        def evaluate(model) -> EvaluationResult:
            total = sum(float(each.detach().double().sum()) for each in model.parameters())
            attempt = Path(config.out) / f"attempt {total!r}"
            if self.number and not attempt.exists():
                attempt.touch()
                os.kill(os.getpid(), self.number)
                check_stop(world)
                raise AssertionError
            check_stop(world)
            return EvaluationResult({"any": math.sin(1e6 * total)}, "any")

        return evaluate


@pytest.mark.long
@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_kills_in_every_evaluation_change_neither_scores_nor_the_best(
    tmp_path, scenes, record_property, number, code
):
    steps, interval = 5, 2
    parts = {"steps": steps, "save_every": 3, "keep": 1}
    whole = run_in(tmp_path / "whole", scenes, **parts, evaluation=Score(interval))
    run = run_in(tmp_path / "killed", scenes, **parts, evaluation=Score(interval, number))
    kills = len([2, 4, 5])
    record_property("tried", kills)
    for _ in range(kills):
        assert exit_code_of(train, run) == code
    assert same(train(whole), train(run))
    assert len(evaluations(whole)) == kills
    assert evaluations(whole) == evaluations(run)
    best = [(Path(each.out) / "checkpoints" / "best").readlink() for each in (whole, run)]
    assert best[0] == best[1]
    assert same(train(run), train(whole)), "nothing remains"
    assert evaluations(whole) == evaluations(run)


@pytest.mark.slow
def test_a_limit_of_time_does_not_end_what_a_start_begins_with(tmp_path, scenes):
    """Or a run whose time is short would begin the same evaluation again and again."""
    run = run_in(tmp_path / "run", scenes, steps=4, evaluation=Score(2))
    over = World(stop_requested=lambda: True)
    assert [train(run, over).step for _ in range(4)] == [1, 2, 3, 4]


def evaluations(run) -> list[tuple[int, dict]]:
    recorded = lines(Path(run.out))
    return [(line["step"], line["evaluation"]) for line in recorded if "evaluation" in line]


ALONE = (
    (checkpoint, "record_score"),
    (MetricsLogger, "log_start"),
    (MetricsLogger, "log_evaluation"),
    (AsyncCheckpointer, "wait"),
    (checkpoint.Snapshot, "from_state"),
)


def work_slowly(run, monkeypatch) -> None:
    """Train in this process, in which what the main process does alone takes half a second."""
    world = init_world(os.environ, torch.device("cpu"), 60.0)
    spans, launch, write = [], trainer._launch, checkpoint.write

    def timed(function, slow_s):
        def call(*given, **named):
            begin = time.monotonic()
            time.sleep(slow_s)
            result = function(*given, **named)
            spans.append((begin, time.monotonic()))
            return result

        return call

    monkeypatch.setattr(checkpoint, "write", lambda *given: (time.sleep(0.5), write(*given))[1])
    if world.is_main:
        for owner, name in ALONE:
            slow_s = 0.0 if name == "wait" else 0.5
            monkeypatch.setattr(owner, name, timed(getattr(owner, name), slow_s))
    else:
        monkeypatch.setattr(trainer, "_launch", timed(launch, 0.0))
    train(run, world, on_start=timed(lambda: None, 0.5))
    Path(run.out, f"spans-{world.rank}").write_text(json.dumps(spans))
    destroy_world(world)


@pytest.mark.long
def test_no_process_waits_in_a_step_for_what_the_main_one_does_alone(tmp_path, scenes, monkeypatch):
    """In a step it would give up after --timeout-s, however long a disk or a tracker takes."""
    parts = {"steps": 4, "save_every": 1, "batch_size": 4, "evaluation": Score(2)}
    run = run_in(tmp_path / "run", scenes, **parts)
    fork(2, work_slowly, run, monkeypatch)
    alone, launched = (json.loads(Path(run.out, f"spans-{rank}").read_text()) for rank in (0, 1))
    assert len(launched) == 4
    assert sum(end - begin > 0.4 for begin, end in alone) >= 8
    for begin, _ in launched:
        assert not [span for span in alone if span[0] < begin < span[1]]


def refs_of_steps(run, history: LossHistory | None, ranks: int, begin: int, end: int) -> list:
    """The samples of each step, put together from those of all processes, which record losses."""
    source = run.data_source(open_index(run))
    parts = [source.items, history, source.locate, run.mining.use_sampler_strata]
    sequences = [SampleSequence(run.sampler, *copy.deepcopy(parts)) for _ in range(ranks)]
    steps, segments = (
        [],
        [
            iter_segments(sequence, begin * run.batch_size, run.batch_size, 1, rank, ranks)
            for rank, sequence in enumerate(sequences)
        ],
    )
    while len(steps) < end - begin:
        for plans in zip(*map(next, segments), strict=True):
            shares = [[ref for part in plan.micro_batches for ref in part] for plan in plans]
            steps.append(sorted((ref for share in shares for ref in share), key=lambda ref: ref[4]))
            losses = np.array([math.sin(7 * ref.row) ** 2 for ref in steps[-1]])
            for sequence in sequences:
                sequence.record_losses(plans[0].samples_before, losses)
            if len(steps) == end - begin:
                break
    if history is not None:  # that of the first process, as a checkpoint has it
        vars(history).update(vars(sequences[0]._history))
    return steps


@pytest.mark.parametrize("name", sorted(registry.SAMPLERS))
def test_every_sampler_goes_on_with_other_processes(tmp_path, scenes, name):
    """In the middle of an epoch, with the samples that the processes before would have had."""
    fields = {"ratio": (0, 1, 1)} if name == "multi_level" else {}  # no scene is fine
    sampler = replace(registry.SAMPLERS[name](), **fields)
    run = run_in(tmp_path, scenes, sampler=sampler, batch_size=5)
    decay, count = run.sampler.decay, run.data_source(open_index(run)).items.count

    def history() -> LossHistory | None:
        return None if decay is None else LossHistory.empty("all", count, decay)

    whole = refs_of_steps(run, history(), 1, 0, 9)
    for ranks in ((1, 2, 3), (4, 1, 2)):
        saved, steps = history(), []
        for part, begin in zip(ranks, (0, 1, 4), strict=True):
            steps += refs_of_steps(run, saved, part, begin, {0: 1, 1: 4, 4: 9}[begin])
        assert steps == whole, ranks
