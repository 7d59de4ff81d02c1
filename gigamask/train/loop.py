"""The loop: carries a run from wherever its folder says it stopped to its last step.

Not here: what a step does (`train.step`), where batches come from (`train.feed`), what is saved (`train.checkpoint`).
"""

import signal
from contextlib import contextmanager
from pathlib import Path

from gigamask.data import lock
from gigamask.parallel.precision import choose_device, choose_precision
from gigamask.train import checkpoint
from gigamask.train.feed import feed, open_index
from gigamask.train.guard import Guard
from gigamask.train.run import Run
from gigamask.train.state import TrainState
from gigamask.train.step import step
from gigamask.train.tasks import SamTask
from gigamask.train.watch import Watch


def train(run: Run) -> TrainState:
    """Trains until `run.steps` or until told to stop (SIGINT, SIGTERM), saves, and returns the state."""
    device = choose_device(run.check().device)
    busy = f"{run.out}: another process is training there; wait for it, or give another --out"
    with lock.hold(Path(run.out) / "lock", busy), stop_signal() as told_to_stop:
        state = checkpoint.resume(run, device) or TrainState.begin(run, device, checkpoint.locate(run.init) if run.init else None)
        if state.step >= run.steps:
            return state
        task = SamTask(run.policy, run.objective, run.masks_at_once, choose_precision(run.precision, device))
        state.model.train()
        with Watch(run, state.step, device) as watch:
            guard = Guard(run, watch)
            for batches in watch.waiting(feed(run, open_index(run), state.cursor, pin=device.type == "cuda")):
                rate = run.optimizer.lr * run.schedule.factor(state.step, run.steps)
                record = step(task, state, [batch.to(device) for batch in batches], rate, run.optimizer.clip_norm)
                state.advance(batches[-1].cursor)
                watch.record(state.step, sum(len(batch.names) for batch in batches), record)
                guard.check(state.step, batches, skipped=bool(record["skipped"]))
                leaving = state.step == run.steps or told_to_stop()
                if leaving or state.step % run.save_every == 0:
                    checkpoint.save(state, run)
                if leaving:
                    break
    return state


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
