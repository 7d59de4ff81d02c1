"""The loop: carries a run from wherever its folder says it stopped to its last step.

Not here: what a step does (`train.step`), where batches come from (`train.feed`), what is saved (`train.checkpoint`).
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gigamask.data import lock
from gigamask.data.index import Index
from gigamask.parallel.precision import choose_device, choose_precision
from gigamask.parallel.world import World
from gigamask.train import checkpoint
from gigamask.train.feed import Feed, open_index
from gigamask.train.guard import Guard
from gigamask.train.run import Run
from gigamask.train.state import TrainState
from gigamask.train.step import step
from gigamask.train.tasks import SamTask
from gigamask.train.watch import Watch


def train(run: Run, world: World | None = None) -> TrainState:
    """Trains until `run.steps` or until some process is told to stop (SIGINT, SIGTERM), saves, and returns the state."""
    world = world or World()
    device = choose_device(run.check().device)
    with only_writer(run, world), stop_signal() as told_to_stop:
        state = checkpoint.resume(run, device) or TrainState.begin(run, device, checkpoint.locate(run.init) if run.init else None)
        if state.step >= run.steps:
            return state
        task = SamTask(run.policy, run.objective, run.masks_at_once, choose_precision(run.precision, device))
        state.model.train()
        feed = Feed(run, shared_index(run, world), state.cursor, state.book)
        state.book = feed.book
        with Watch(run, state.step, device, world.first) as watch:
            guard = Guard(run, watch)
            for batches in watch.waiting(feed.batches(world, pin=device.type == "cuda")):
                rate, start = run.optimizer.lr * run.schedule.factor(state.step, run.steps), state.cursor.samples
                done = step(task, state, [batch.to(device) for batch in batches], run.batch, rate, run.optimizer.clip_norm, world, told_to_stop())
                state.advance(batches[-1].cursor)
                feed.note(start, done.losses)
                watch.record(state.step, run.batch, done.record)
                guard.check(state.step, batches, done.skipped)
                leaving = state.step == run.steps or done.stopping
                if world.first and (leaving or state.step % run.save_every == 0):
                    checkpoint.save(state, run)
                if leaving:
                    break
    return state


@contextmanager
def only_writer(run: Run, world: World) -> Iterator[None]:
    """Keeps other trainings out of the run folder; the first process does so for all of this one's."""
    busy = f"{run.out}: another process is training there; wait for it, or give another --out"
    with lock.hold(Path(run.out) / "lock", busy) if world.first else nullcontext():
        yield
        # Whoever leaves first would let others begin.
        world.wait()


def shared_index(run: Run, world: World) -> Index:
    """Returns the index of the run's data, which the first process builds where there is none."""
    if world.first:
        index = open_index(run)
        world.wait()
        return index
    world.wait()
    return open_index(run)


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
