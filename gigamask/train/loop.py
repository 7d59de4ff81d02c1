"""The loop: carries a run from wherever its folder says it stopped to its last step.

Not here: what a step does (`train.step`), where batches come from (`train.feed`), what is saved (`train.checkpoint`).
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from gigamask.data import lock
from gigamask.parallel.precision import choose_device
from gigamask.parallel.world import World
from gigamask.seams import Evaluator
from gigamask.train import checkpoint
from gigamask.train.feed import Feed, described, keep_data, open_index, refuse_other_data
from gigamask.train.guard import Guard
from gigamask.train.run import Run
from gigamask.train.state import TrainState
from gigamask.train.step import step
from gigamask.train.watch import Meter, Watch


def train(
    run: Run,
    world: World | None = None,
    other_order: bool = False,
    begun: Callable[[], object] = lambda: None,
    watching: Callable[[], Evaluator | None] = lambda: None,
    meters: Callable[[int, torch.device], Sequence[Meter]] = lambda done, device: (),
) -> TrainState:
    """Trains until `run.steps` or until some process is told to stop (SIGINT, SIGTERM), saves, and returns the state.

    `other_order` lets a run go on whose data have changed. The first process calls `watching` once the run folder is its own, for what evaluates the
    model in between, and `begun` when all is ready; it alone evaluates. Every process calls `meters` with the updates done, where some are left.
    """
    world, device = world or World(), choose_device(run.check().device)
    run.sampler.check(run.batch, world.size, world.nodes)
    with ExitStack() as kept:
        told_to_stop = kept.enter_context(stop_signal())
        # The first process goes ahead: tars that have no index are indexed once.
        state, feed, evaluator = world.in_turn(lambda: prepare(run, device, other_order, kept if world.first else None, watching))
        if world.first:
            begun()
        if feed is None:
            return state
        task = run.task(device)
        state.model.train()
        with Watch(run, state.step, device, world.first, meters(state.step, device)) as watch:
            guard = Guard(run, watch)
            for batches in watch.waiting(feed.batches(world, pin=device.type == "cuda")):
                rate, start = run.optimizer.lr * run.schedule.factor(state.step, run.steps), state.cursor.samples
                done = step(task, state, [batch.to(device) for batch in batches], run.batch, rate, run.optimizer.clip_norm, world, told_to_stop())
                state.advance(batches[-1].cursor)
                feed.note(start, done.losses)
                watch.record(state.step, run.batch, done.record)
                guard.check(state.step, batches, done.skipped)
                state.stopping = done.stopping
                last = state.step == run.steps
                due = evaluator is not None and (last or (state.step % evaluator.every == 0 and not state.stopping))
                if world.first and (last or state.stopping or due or state.step % run.save_every == 0):
                    saved = checkpoint.save(state, run)
                    if evaluator and due:  # behind the save: nothing that befalls an evaluation costs a step
                        verdict = evaluator.run(state.model)
                        checkpoint.rate(saved, watch.judge(state.step, verdict), verdict.subject, run.keep)
                if last or state.stopping:
                    break
        world.wait()  # whoever leaves first would let another training begin
    return state


def prepare(
    run: Run, device: torch.device, other_order: bool, holding: ExitStack | None, watching: Callable[[], Evaluator | None]
) -> tuple[TrainState, Feed | None, Evaluator | None]:
    """Returns where a run stands, what is left to train on, and what evaluates it.

    `holding`, which the first process has, is given the lock that keeps other trainings out of the run's folder.
    """
    if holding is not None:
        busy = f"{run.out}: another process is training there; wait for it, or give another --out"
        holding.enter_context(lock.hold(Path(run.out) / "lock", busy))
    state = checkpoint.resume(run, device) or TrainState.begin(run, device, checkpoint.locate(run.init) if run.init else None)
    if state.step >= run.steps:
        return state, None, None
    evaluator = watching() if holding is not None else None
    index = open_index(run)
    data = described(run, index)
    if not other_order:
        refuse_other_data(run, data)
    feed = Feed(run, index, state.cursor, state.book, data)
    state.book = feed.book
    if holding is not None:
        keep_data(run, data)
    return state, feed, evaluator


@contextmanager
def stop_signal():
    """Turns SIGINT and SIGTERM into a question the loop asks after each step; a second SIGINT interrupts at once."""
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
