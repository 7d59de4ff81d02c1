"""The loop: carries a run from wherever its folder says it stopped to its last step.

Not here: what a step does (`train.step`), where batches come from (`train.feed`), what is saved (`train.checkpoint`).
"""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gigamask.data.file_lock import exclusive_lock
from gigamask.distributed.precision import choose_device
from gigamask.distributed.world import World
from gigamask.interfaces import EvaluationResult
from gigamask.training import checkpoint
from gigamask.training.async_checkpoint import AsyncCheckpointer
from gigamask.training.config import TrainConfig
from gigamask.training.health_checks import HealthChecks
from gigamask.training.logging import MetricsLogger, Observer
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.train_data import (
    TrainData,
    check_same_data,
    describe_data,
    open_index,
    save_data_record,
)

STACKS_AT = 0.9
"""Processes write where they stand when so much of the time is over that they wait for one that hangs."""


def train(
    run: TrainConfig,
    world: World | None = None,
    other_order: bool = False,
    begun: Callable[[], object] = lambda: None,
    meters: Callable[[int, torch.device], Sequence[Observer]] = lambda done, device: (),
) -> TrainState:
    """Trains until `run.steps` or until some process is told to stop (SIGINT, SIGTERM), saves, and returns the state.

    Args:
        run: the whole configuration.
        world: the processes that train together; None: this one alone.
        other_order: let a run go on whose data have changed.
        begun: called by the first process when all is ready.
        meters: called by each process with the updates done and the device, where updates are left.
    """
    world, device = world or World(), choose_device(run.check().device)
    run.sampler.check(run.batch_size, world.size, world.nodes)
    with ExitStack() as kept:
        told_to_stop = kept.enter_context(stop_signal())
        state, feed, evaluate = world.in_turn(
            lambda: prepare(run, world, device, other_order, kept if world.is_main else None)
        )
        if world.is_main:
            begun()
        if feed is None:
            return state
        state.shard(run, world)
        task = run.task(device)
        state.model.train()
        with (
            MetricsLogger(
                run, state.step, device, world.is_main, meters(state.step, device)
            ) as watch,
            AsyncCheckpointer(run, watch.log, world) as saver,
            world.watched(STACKS_AT * run.timeout_s) as watched,
        ):
            guard = HealthChecks(run, watch)
            watch.begin(world.size)
            watched(True)
            for batches in watch.waiting(feed.batches(world, pin=device.type == "cuda")):
                rate, start = (
                    run.optimizer.lr * run.schedule.factor(state.step, run.steps),
                    state.cursor.samples,
                )
                asked = told_to_stop(), saver.overdue
                done = step(
                    task,
                    state,
                    [batch.to(device) for batch in batches],
                    run.batch_size,
                    rate,
                    run.optimizer.grad_clip,
                    world,
                    asked,
                )
                state.advance(batches[-1].cursor)
                feed.note(start, done.losses)
                watch.record(state.step, run.batch_size, done.record)
                guard.check(state.step, batches, done.skipped and not done.overflow)
                state.stopping, retry = done.asked
                last = state.step == run.steps
                due = evaluate is not None and (
                    last or (state.step % run.evaluation.interval == 0 and not state.stopping)
                )
                if last or state.stopping or due or state.step % run.save_every == 0 or retry:
                    saver.save(state)
                if (
                    evaluate and due
                ):  # behind the save: nothing that befalls an evaluation costs a step
                    watched(False)
                    verdict = evaluate(state.full_model())
                    if world.is_main:
                        saver.record_score(
                            watch.log_evaluation(state.step, verdict), verdict.subject
                        )
                if last or state.stopping:
                    saver.finish(state)
                    break
                watched(True)
        world.barrier()  # whoever leaves first would let another training begin
    return state


def prepare(
    run: TrainConfig,
    world: World,
    device: torch.device,
    other_order: bool,
    holding: ExitStack | None,
) -> tuple[TrainState, TrainData | None, Callable[[Any], EvaluationResult] | None]:
    """Returns where a run stands, what is left to train on, and what evaluates it.

    The first process goes ahead, so that tars without an index are indexed once.

    `holding`, which the first process has, is given the lock that keeps other trainings out of the run's folder.
    """
    if holding is not None:
        busy = f"{run.out}: another process is training there; wait for it, or give another --out"
        holding.enter_context(exclusive_lock(Path(run.out) / "lock", busy))
    state = checkpoint.resume(run, device) or TrainState.initialize(
        run, device, checkpoint.locate(run.init) if run.init else None
    )
    if state.step >= run.steps:
        return state, None, None
    evaluate = run.evaluation.open(run, world)
    index = open_index(run)
    data = describe_data(run, index)
    if not other_order:
        check_same_data(run, data)
    feed = TrainData(run, index, state.cursor, state.loss_history, data)
    state.loss_history = feed.loss_history
    if holding is not None:
        save_data_record(run, data)
    return state, feed, evaluate


@contextmanager
def stop_signal():
    """Turns SIGINT and SIGTERM into a question the loop asks after each step; a second SIGINT interrupts at once.

    Outside the main thread, where Python cannot handle signals, nothing asks to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []

    def note(number: int, frame) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
