"""The training loop: continue a run from its last checkpoint to its last step."""

import gc
import math
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gigamask.distributed.precision import choose_device, float32_products, training_defaults
from gigamask.distributed.world import World, dump_stacks_on_hang, meet
from gigamask.errors import EvaluationStoppedError, GigamaskError
from gigamask.files import exclusive_lock
from gigamask.interfaces import EvaluationResult, Task
from gigamask.models.promptable import evaluated
from gigamask.progress import progress_bar, say
from gigamask.signals import stop_signals_handled
from gigamask.training import checkpoint, opening
from gigamask.training.async_checkpoint import AsyncCheckpointer
from gigamask.training.config import TrainConfig, item_sampler
from gigamask.training.first_step import training_mode
from gigamask.training.health_checks import HealthChecks
from gigamask.training.logging import MetricsLogger, Observer
from gigamask.training.retention import set_aside, sweep
from gigamask.training.state import TrainState
from gigamask.training.step import LaunchedStep, step
from gigamask.training.train_data import (
    TrainData,
    check_same_data,
    describe_data,
    open_index,
    save_data_record,
)
from gigamask.types import BatchProtocol

DUMP_STACKS_AT = 0.9
"""Fraction of the timeout after which a process that waits for another prints its stacks."""


def train(
    config: TrainConfig,
    world: World | None = None,
    allow_data_change: bool = False,
    on_start: Callable[[], object] = lambda: None,
    make_observers: Callable[[int, torch.device], Sequence[Observer]] = lambda step, device: (),
) -> TrainState:
    """Train until `config.steps` or until a process is asked to stop, and save the state.

    Before the first step, these signals have their usual effect. A run that was killed or stopped
    before it had evaluated its last checkpoint does so first.

    Args:
        config: The configuration.
        world: The processes that train together; None means only this one.
        allow_data_change: Continue even if the data have changed.
        on_start: Called in the main process once everything is open, if anything remains to do.
        make_observers: Called in each process with the number of finished steps and the device, if
            steps remain; returns observers of the loop.

    Returns:
        The final state.
    """
    signals: list[int] = []
    begun: list[bool] = []  # until then, no limit of time ends what a killed run had left to do
    world = world or World()
    asked = world.stop_requested
    world = replace(world, stop_requested=lambda: bool(signals) or (bool(begun) and asked()))
    device = choose_device(config.check().device)
    item_sampler(config).check(config.batch_size, world.size, world.nodes)
    with ExitStack() as stack:
        stack.enter_context(training_defaults(device))
        saved = lock_and_resume(config, world, device, stack)
        with progress_bar("read data and weights"):
            state, data, evaluate = world.main_first(
                partial(prepare, config, world, device, allow_data_change, saved)
            )
        if data is None and evaluate is None:
            return state
        if world.is_main:
            on_start()
        stack.enter_context(float32_products(config.tf32))
        stack.enter_context(stop_signals_collected(signals, world.is_main))
        state.shard(config, world)
        observers = make_observers(state.step, device) if data else ()
        with (
            MetricsLogger(config, state.step, device, world.is_main, observers) as logger,
            AsyncCheckpointer(config, logger.log, world, state.resumed) as saver,
            dump_stacks_on_hang(world, DUMP_STACKS_AT * config.timeout_s) as set_clock,
        ):
            logger.log_start(world.size, state.resumed.damaged if state.resumed else ())
            loop = _Loop(config, world, device, state, evaluate, logger, saver)
            if evaluate and is_evaluation_missing(config, state):
                loop.evaluate(evaluate)
            begun.append(True)
            world.barrier()  # the main process alone has written files and opened trackers
            if data is not None and not state.stopping:
                gc.freeze()  # or each full collection visits a million objects of torch, in .3 s
                stack.callback(gc.unfreeze)
                if not gc.isenabled():
                    gc.enable()
                    stack.callback(gc.disable)
                loop.run(data, set_clock)
        world.barrier()  # before the lock is released and another run can start
    return state


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Return whether the state after a step is evaluated, if anything is.

    Args:
        config: The configuration.
        step: Number of finished steps.
    """
    return step >= config.steps or step % config.evaluation.interval == 0


def is_evaluation_missing(config: TrainConfig, state: TrainState) -> bool:
    """Return whether a run was killed before it had evaluated the state that it resumed from.

    Args:
        config: The configuration.
        state: The state.
    """
    is_missing = state.resumed is not None and not state.resumed.is_scored
    return is_missing and is_evaluated(config, state.step)


@dataclass(frozen=True, eq=False)
class _Loop:
    """The training loop of one process.

    Attributes:
        config: The configuration.
        world: The processes that train together.
        device: Device to train on.
        state: The state, which it advances.
        evaluator: Evaluates the model; None if nothing is evaluated.
        logger: Logs steps and evaluations.
        saver: Saves the state.
    """

    config: TrainConfig
    world: World
    device: torch.device
    state: TrainState
    evaluator: Callable[[Any], EvaluationResult] | None
    logger: MetricsLogger
    saver: AsyncCheckpointer

    def run(
        self,
        data: TrainData,
        set_clock: Callable[[bool], None],
    ) -> None:
        """Train until the last step, or until a process is asked to stop.

        Args:
            data: The batches.
            set_clock: Starts or stops the clock of `dump_stacks_on_hang`.
        """
        config, state, saver = self.config, self.state, self.saver
        checks = HealthChecks(config, self.logger, data.samples_per_epoch)
        launched: deque[_Launched] = deque()
        lag = _lag(self.device, state)
        with (
            config.task(self.device).compiled(state.model) as task,
            training_mode(state.model, config.seed, self.world) as of_step,
            # Closed also if an error, which may be kept, ends it: its workers would be waited for.
            closing(data.batches(self.world, pin=self.device.type == "cuda")) as batches_of_steps,
        ):
            set_clock(True)
            for batches in self.logger.time_data(batches_of_steps):
                requests = self.world.stop_requested(), saver.overdue
                with of_step(state.step):
                    launched.append(
                        _launch(config, task, state, batches, self.world, self.device, requests)
                    )
                is_last = state.step == config.steps
                is_due = self.evaluator is not None and is_evaluated(config, state.step)
                is_saved = is_last or is_due or state.step % config.save_every == 0
                while launched and (len(launched) > lag or is_saved or state.stopping):
                    oldest = launched.popleft()
                    is_saved |= _report(oldest, config, state, data, self.logger, checks)
                if is_saved or state.stopping:
                    meet(self.world)
                    set_clock(False)  # all wait for the main process, however slow the disk is
                    saver.save(state)
                if self.evaluator and is_due and (is_last or not state.stopping):
                    self.evaluate(self.evaluator)  # saved before, so that a failure loses no step
                if is_last or state.stopping:
                    saver.finish(state)
                    break
                set_clock(True)

    def evaluate(self, evaluator: Callable[[Any], EvaluationResult]) -> None:
        """Evaluate the state saved last, and record its score; a collective operation.

        A stop signal ends it without a score.

        Args:
            evaluator: Evaluates the model.
        """
        try:
            with (
                self.state.averaged_model() as model,
                evaluated(model),
                training_defaults(self.device),  # which ends what the evaluator has set, too
            ):
                evaluation = evaluator(model)
        except EvaluationStoppedError:
            self.state.stopping = self.state.unscored = True
            return
        if self.world.is_main:
            score = self.logger.log_evaluation(self.state.step, evaluation)
            self.saver.record_score(score, evaluation.subject)
        self.world.barrier()  # the others must not wait within the timeout of the next step


@dataclass(frozen=True, eq=False)
class _Launched:
    """A step of the loop whose result was not read yet.

    Attributes:
        step: Number of the step, from 1.
        start: Number of samples consumed before it.
        batches: Its micro-batches.
        result: Its result.
    """

    step: int
    start: int
    batches: Sequence[BatchProtocol]
    result: LaunchedStep


def _lag(device: torch.device, state: TrainState) -> int:
    """Return how many steps are launched before the result of an earlier one is read.

    On a GPU one, so that it never waits for the host. None if the next step needs the result: the
    loss scale of fp16, or a sampler that learns from losses.
    """
    needs_result = state.scale is not None or state.loss_history is not None
    return int(device.type == "cuda" and not needs_result)


def _launch(
    config: TrainConfig,
    task: Task,
    state: TrainState,
    batches: Sequence[BatchProtocol],
    world: World,
    device: torch.device,
    requests: tuple[bool, ...],
) -> _Launched:
    """Queue one step, and average the weights."""
    lr = config.optimizer.lr * config.schedule.factor(state.step, config.steps)
    if not 0 <= lr < math.inf:
        raise GigamaskError(
            f"the learning rate of step {state.step + 1} is {lr}: --schedule must return numbers "
            "from 0 on"
        )
    result = step(
        task,
        state,
        [batch.to(device) for batch in batches],
        config.batch_size,
        lr,
        config.optimizer.grad_clip,
        world,
        requests,
    )
    state.update_average(config.ema)
    start = state.cursor.samples
    state.advance(batches[-1].cursor)
    return _Launched(state.step, start, batches, result)


def _report(
    launched: _Launched,
    config: TrainConfig,
    state: TrainState,
    data: TrainData,
    logger: MetricsLogger,
    checks: HealthChecks,
) -> bool:
    """Wait for the result of a step, log and check it, and record the losses of its samples.

    Returns:
        Whether a process requests to save the state.
    """
    result = launched.result.result()
    data.record_losses(launched.start, result.losses)
    epoch = launched.batches[-1].cursor.samples / data.samples_per_epoch
    logger.log_step(launched.step, config.batch_size, {"epoch": epoch} | result.record)
    checks.check(launched.step, launched.batches, result.skipped and not result.overflow)
    stopping, is_save_overdue = result.requests
    state.stopping |= stopping
    return is_save_overdue


def lock_and_resume(
    config: TrainConfig, world: World, device: torch.device, stack: ExitStack
) -> TrainState | None:
    """Lock the run folder, and load its newest intact checkpoint; a collective operation.

    Only the main process locks the folder, renames the damaged checkpoints, and reads the intact.

    Args:
        config: The configuration.
        world: The processes that train together.
        device: Device to train on.
        stack: Holds the lock.

    Returns:
        The state; None if the folder has no checkpoint.

    Raises:
        GigamaskError: The folder is in use, all its checkpoints are damaged, or the newest one does
            not fit the configuration.
    """
    out = Path(config.out)
    message = f"{out}: another process is training there; wait for it, or use another --out"

    def find() -> tuple[Path | None, tuple[str, ...]]:
        if not world.is_main:
            return None, ()
        stack.enter_context(exclusive_lock(out / "lock", message))
        sweep(out / "checkpoints")
        damaged: list[Path] = []
        folder = checkpoint.newest(out, damaged)
        for path in damaged:
            set_aside(path, "damaged")
        return folder, tuple(path.name for path in damaged)

    folder, damaged = world.gather(world.run_on_all(find))[0]
    if folder is None:
        return None
    load = partial(checkpoint.load_state, config, device, folder, world, damaged)
    return world.run_on_all(load)


def prepare(
    config: TrainConfig,
    world: World,
    device: torch.device,
    allow_data_change: bool,
    saved: TrainState | None,
) -> tuple[TrainState, TrainData | None, Callable[[Any], EvaluationResult] | None]:
    """Initialize the state of a run, unless it continues, and open its data.

    The main process does so first, so that tars without an index are indexed only once.

    Args:
        config: The configuration.
        world: The processes that train together.
        device: Device to train on.
        allow_data_change: Continue even if the data have changed.
        saved: The state to continue from; None starts anew.

    Returns:
        The state, the data (None if no step remains), and the function that evaluates the model
        during training (None if there is none, or if neither a step nor an evaluation remains).

    Raises:
        GigamaskError: The initial weights do not fit, or the data have changed.
    """
    state = saved or TrainState.initialize(config, device, config.init)
    if config.lora.rank and saved is None and world.is_main:
        checkpoint.write_base(state, config)
    if state.step >= config.steps:
        is_missing = is_evaluation_missing(config, state)
        return state, None, config.evaluation.open(config, world) if is_missing else None
    index = open_index(config)
    evaluate = config.evaluation.open(config, world)
    description = describe_data(config, index)
    if not allow_data_change:
        check_same_data(config, description)
    data = TrainData(config, index, state.cursor, state.loss_history, description)
    state.loss_history = data.loss_history
    if world.is_main:
        save_data_record(config, description)
        data.save_run_files()
        for line in opening.lines(config, state, index, data.samples_per_epoch, world.size):
            say(line)
    return state, data, evaluate


@contextmanager
def stop_signals_collected(received: list[int], verbose: bool = True) -> Iterator[None]:
    """Catch the stop signals; a SIGINT after one of them interrupts at once.

    Args:
        received: Gets the number of each signal that arrives.
        verbose: Whether to print at once that the step will be finished.
    """

    def handle(number: int, handled: frozenset[int]) -> None:
        received.append(number)
        if signal.SIGINT in handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    with (
        stop_signals_handled(handle) as numbers,
        _acknowledged(numbers) if numbers and verbose else nullcontext(),
    ):
        yield


@contextmanager
def _acknowledged(handled: Collection[int]) -> Iterator[None]:
    """Print a line when the first stop signal arrives, from a thread.

    Python calls handlers in the main thread only once a running operation, such as a backward pass,
    has returned.

    Args:
        handled: The stop signals.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def acknowledge() -> None:
        while data := reader.recv(1):
            if data[0] in handled:
                name = signal.Signals(data[0]).name
                line = f"{name}: finishing this step and saving; Ctrl-C again stops at once"
                with suppress(OSError):  # a closed terminal
                    print(line, file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.shutdown(socket.SHUT_WR)  # closing is not enough: loader workers hold copies
        thread.join()
        writer.close()
        reader.close()
