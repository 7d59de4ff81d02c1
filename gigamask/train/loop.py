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
from gigamask.parallel.precision import choose_device
from gigamask.parallel.world import World
from gigamask.seams import Verdict
from gigamask.train import checkpoint
from gigamask.train.feed import Feed, described, keep_data, open_index, refuse_other_data
from gigamask.train.guard import Guard
from gigamask.train.run import Run
from gigamask.train.saver import Saver
from gigamask.train.state import TrainState
from gigamask.train.step import step
from gigamask.train.watch import Meter, Watch

STACKS_AT = 0.9
"""Processes write where they stand when so much of the time is over that they wait for one that hangs."""


def train(
    run: Run,
    world: World | None = None,
    other_order: bool = False,
    begun: Callable[[], object] = lambda: None,
    meters: Callable[[int, torch.device], Sequence[Meter]] = lambda done, device: (),
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
        state, feed, evaluate = world.in_turn(lambda: prepare(run, world, device, other_order, kept if world.first else None))
        if world.first:
            begun()
        if feed is None:
            return state
        state.share_out(run, world)
        task = run.task(device)
        state.model.train()
        with (
            Watch(run, state.step, device, world.first, meters(state.step, device)) as watch,
            Saver(run, watch.tell, world) as saver,
            world.watched(STACKS_AT * run.timeout_s) as watched,
        ):
            guard = Guard(run, watch)
            watch.begin(world.size)
            watched(True)
            for batches in watch.waiting(feed.batches(world, pin=device.type == "cuda")):
                rate, start = run.optimizer.lr * run.schedule.factor(state.step, run.steps), state.cursor.samples
                asked = told_to_stop(), saver.overdue
                done = step(task, state, [batch.to(device) for batch in batches], run.batch_size, rate, run.optimizer.clip_norm, world, asked)
                state.advance(batches[-1].cursor)
                feed.note(start, done.losses)
                watch.record(state.step, run.batch_size, done.record)
                guard.check(state.step, batches, done.skipped and not done.overflow)
                state.stopping, retry = done.asked
                last = state.step == run.steps
                due = evaluate is not None and (last or (state.step % run.evaluation.every == 0 and not state.stopping))
                if last or state.stopping or due or state.step % run.save_every == 0 or retry:
                    saver.save(state)
                if evaluate and due:  # behind the save: nothing that befalls an evaluation costs a step
                    watched(False)
                    verdict = evaluate(state.whole_model())
                    if world.first:
                        saver.rate(watch.judge(state.step, verdict), verdict.subject)
                if last or state.stopping:
                    saver.finish(state)
                    break
                watched(True)
        world.wait()  # whoever leaves first would let another training begin
    return state


def prepare(
    run: Run, world: World, device: torch.device, other_order: bool, holding: ExitStack | None
) -> tuple[TrainState, Feed | None, Callable[[Any], Verdict] | None]:
    """Returns where a run stands, what is left to train on, and what evaluates it.

    The first process goes ahead, so that tars without an index are indexed once.

    `holding`, which the first process has, is given the lock that keeps other trainings out of the run's folder.
    """
    if holding is not None:
        busy = f"{run.out}: another process is training there; wait for it, or give another --out"
        holding.enter_context(exclusive_lock(Path(run.out) / "lock", busy))
    state = checkpoint.resume(run, device) or TrainState.begin(run, device, checkpoint.locate(run.init) if run.init else None)
    if state.step >= run.steps:
        return state, None, None
    evaluate = run.evaluation.open(run, world)
    index = open_index(run)
    data = described(run, index)
    if not other_order:
        refuse_other_data(run, data)
    feed = Feed(run, index, state.cursor, state.book, data)
    state.book = feed.book
    if holding is not None:
        keep_data(run, data)
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
