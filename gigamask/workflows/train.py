"""Train a configuration or resume it, and open the resulting `Run`."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gigamask import config_files, recipes
from gigamask.errors import GigamaskError, abridged, check_processes, check_range, counted
from gigamask.models.manifest import list_checkpoints
from gigamask.progress import progress_bar, say
from gigamask.training.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gigamask.data.storage import Paths
    from gigamask.distributed.world import World
    from gigamask.training.logging import Observer
    from gigamask.training.mae_config import MAETrainConfig
    from gigamask.training.state import TrainState


@dataclass(frozen=True)
class Run:
    """A training run on disk.

    Attributes:
        folder: The run folder.
        config: The configuration it was trained with.
        step: Steps trained so far.
        phases_left: Phases of the training that have not begun.
    """

    folder: Path
    config: TrainConfig
    step: int
    phases_left: int = 0
    _absolute: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # programs change their working directory
        object.__setattr__(self, "_absolute", Path(self.folder).absolute())

    @property
    def _place(self) -> Path:
        """The folder, as it was given while the working directory is the same."""
        given = Path(self.folder)
        return given if given.absolute() == self._absolute else self._absolute

    @classmethod
    def open(cls, folder: str | Path, trust: bool = False) -> Run:
        """Open a run folder.

        Args:
            folder: The run folder, as passed in `--out` or `config.out`.
            trust: Whether to import a recipe or components that are not built in.

        Raises:
            GigamaskError: The folder is not a run folder, or contains no checkpoint yet.
        """
        from gigamask.config_files import load_config
        from gigamask.models.manifest import newest

        config = load_config(str(folder), trust)
        checkpoint = newest(Path(folder))
        if checkpoint is None:
            raise GigamaskError(f"{folder}: holds no complete checkpoint yet; train it further")
        return cls(Path(folder), config, int(checkpoint.name.rpartition("_")[2]))

    @property
    def finished(self) -> bool:
        """Whether all steps of the configuration are done, and no phase is left."""
        return self.step >= self.config.steps and not self.phases_left

    @cached_property
    def model(self) -> nn.Module:
        """The model of the newest checkpoint, in evaluation mode, on the configuration's device."""
        from gigamask.distributed.precision import choose_device
        from gigamask.models import state_dict

        tensors, _ = state_dict.read_weights(self._place)
        model = self.config.build()
        state_dict.load_weights(model, tensors, str(self.folder))
        return model.to(choose_device(self.config.device)).eval()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl`, one dictionary per logged step or event.

        Of steps that were trained again after a restart, the later ones.
        """
        events: list[dict[str, Any]] = []
        for line in (self._place / "metrics.jsonl").read_text("utf-8").splitlines():
            with suppress(ValueError):  # a killed process leaves half a line
                event = json.loads(line)
                if "started" in event:
                    events = [each for each in events if each["step"] <= event["step"]]
                events.append(event)
        return events

    def evaluate(self, data: Paths, **options: Any) -> dict[str, Any]:
        """Evaluate the model on annotated images.

        Args:
            data: Tars, folders of tars, globs, URLs, or an index.
            **options: As for `gigamask.evaluate`, such as `max_images=100`.

        Returns:
            The scores, as `gigamask.evaluate` returns them.
        """
        from gigamask.workflows.evaluate import evaluate

        # Whatever the configuration names has been imported already.
        options = {"device": self.config.device, "trust": True} | options
        return evaluate(str(self._place), data, **options)


MAX_PROCESSES = 8
"""Most processes that are started on a CPU unless more are asked for; more are not measured."""
Changes = dict[str, tuple[Any, Any]]
"""Fields that differ from the saved configuration: saved and new value."""


def train(
    config: str | TrainConfig | Callable[[], TrainConfig],
    *,
    allow_data_change: bool = False,
    max_minutes: float | None = None,
    **changes: Any,
) -> Run:
    """Train a configuration phase by phase, or resume it if its folder contains a checkpoint.

    Works in any thread. In the main thread, stop signals (SIGINT, SIGTERM, SIGHUP, SIGUSR1 and
    SIGUSR2) make it save a checkpoint and return. On a CPU, it trains a small model in several
    processes, as `config.processes` says. Under torchrun, call it in every process.

    Args:
        config: Name of a recipe, a recipe, or a configuration, such as `recipes.tiny()`.
        allow_data_change: Resume even if the data or their order have changed.
        max_minutes: Save a checkpoint and return after the step that ends this many minutes from
            now; `run.finished` is false if steps remain, and the same call continues.
        **changes: Values of fields, such as `data="scenes/", out="runs/a"`; see
            `TrainConfig.with_`.

    Returns:
        The run, of the last phase if there are several: its folder, model, metrics, and `evaluate`.

    Raises:
        GigamaskError: The configuration, the data or the folder cannot be used.
    """
    from gigamask.recipes import user_code
    from gigamask.workflows.own_data import use_own_data

    user_code.check_no_import()
    is_over = time_limit(max_minutes)
    phases = use_own_data(recipes.make(config).with_(**changes)).phases()
    changed = resolve_all(phases, allow_data_change)
    for number, phase in enumerate(phases):
        if any(later.has_checkpoint for later in phases[number + 1 :]):
            continue
        left = len(phases) - number - 1
        run, stopped = _train_phase(phase, left, changed[number], allow_data_change, is_over)
        if stopped:
            break
    return run


def _train_phase(
    config: TrainConfig,
    left: int,
    changes: Changes,
    allow_data_change: bool,
    is_over: Callable[[], bool],
) -> tuple[Run, bool]:
    """Train a configuration; return its run, and whether a signal or the time ended it."""
    from gigamask.workflows.own_data import find_classes

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(config_files.config_yaml(config), "utf-8")
        arguments = [*config.command.split(), config.recipe, "--config", str(path)]
        if allow_data_change:
            arguments.append("--allow-data-change")
        with open_world(config, arguments, os.environ, is_over) as world:
            if config.is_finding_classes:
                config = world.main_first(partial(find_classes, config, world.is_main))
                changes = resolve(config, allow_data_change)
            config = choose_micro_batch_size(config, world)
            state = train_in_world(config, changes, world, allow_data_change)
    stopped = state.step < config.steps or state.stopping
    return Run(Path(config.out), config, state.step, left if stopped else 0), stopped


def time_limit(minutes: float | None) -> Callable[[], bool]:
    """Return a function that returns whether a training's time, which begins now, is over.

    Args:
        minutes: Its length; None means without end.

    Raises:
        GigamaskError: It is negative or not a number.
    """
    check_range("--max-minutes", minutes, 0)
    end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= end_s


def is_over_under_torchrun(world: World, is_over: Callable[[], bool]) -> bool:
    """Return whether, under torchrun, the time of any process is over; a collective operation.

    Args:
        world: The processes.
        is_over: Returns whether the time of this one is over.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and any(world.gather(is_over()))


def pretrain(
    config: str | MAETrainConfig, *, allow_data_change: bool = False, **changes: Any
) -> Run:
    """Pre-train an image encoder as a masked autoencoder; otherwise like `train`.

    Args:
        config: Name of a recipe, or a configuration, such as `recipes.mae_tiny()`.
        allow_data_change: Resume even if the data or their order have changed.
        **changes: Values of fields, such as `data="photos/", out="runs/mae"`.

    Returns:
        The run; start a segmenter from it with `init="mae:FOLDER"`.

    Raises:
        GigamaskError: The configuration is not a `MAETrainConfig`, or cannot be used.
    """
    from gigamask.training.mae_config import MAETrainConfig

    made = recipes.make(config)
    if not isinstance(made, MAETrainConfig):
        raise GigamaskError(
            f"pretrain needs a MAETrainConfig, such as recipes.mae_tiny() (got "
            f"{type(made).__name__}); give that to gigamask.train"
        )
    return train(made, allow_data_change=allow_data_change, **changes)


def resolve(
    config: TrainConfig, allow_data_change: bool = False, earlier: tuple[str, ...] = ()
) -> Changes:
    """Check a configuration before it is trained.

    Args:
        config: The configuration.
        allow_data_change: Accept changes of the data or their order.
        earlier: Folders of earlier stages, which need not exist yet.

    Returns:
        The fields that differ from the configuration saved in its folder.

    Raises:
        GigamaskError: A value is invalid, a file is missing, or the run cannot be resumed with it.
    """
    changes = config_files.check_run_folder(config, allow_data_change)
    if not config.has_checkpoint:
        config.check_inputs(earlier)
        config_files.check_used(config)
    return changes


def resolve_all(configs: Sequence[TrainConfig], allow_data_change: bool) -> list[Changes]:
    """Check all stages before the first one starts, since the last might fail days later.

    Args:
        configs: The stages.
        allow_data_change: Accept changes of the data or their order.

    Returns:
        For each stage, the fields that differ from its saved configuration.
    """
    folders = [config.out for config in configs]
    return [
        resolve(config, allow_data_change, tuple(folders[:number]))
        for number, config in enumerate(configs)
    ]


@contextmanager
def open_world(
    config: TrainConfig,
    arguments: Sequence[str],
    environment: MutableMapping[str, str],
    is_over: Callable[[], bool] = lambda: False,
    epochs: float | None = None,
) -> Iterator[World]:
    """Join the processes of torchrun, or start those that train a small model on a CPU.

    Each of these has one thread.

    Args:
        config: The configuration.
        arguments: Arguments of `gigamask` for processes to start.
        environment: Environment variables.
        is_over: Returns whether the training's time is over.
        epochs: Its length, if steps do not state it.

    Yields:
        The processes that train together.

    Raises:
        GigamaskError: The environment or `config.processes` does not fit the device.
    """
    say(opening(config, epochs))
    with progress_bar("load torch"):
        import torch

        from gigamask.distributed.precision import choose_device
        from gigamask.distributed.world import announce, destroy_world, init_world

    device, threads = choose_device(config.device), torch.get_num_threads()
    processes = count_processes(config, device, environment)
    if processes > 1 or (is_small(config, device) and "OMP_NUM_THREADS" not in environment):
        torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        if processes > 1:
            from gigamask.distributed.local_processes import start_world

            started = start_world(arguments, processes, environment, config.timeout_s)
            world = stack.enter_context(started)
        else:
            announce(environment)
            world = init_world(environment, device, config.timeout_s)
            stack.callback(destroy_world, world)
        try:
            yield replace(world, stop_requested=is_over)
        except GigamaskError:
            if world.is_main:
                remove_empty_run(config.out)
            raise


def opening(config: TrainConfig, epochs: float | None = None) -> str:
    """Return a line about a training, of what is known before torch and the data are read.

    Args:
        config: The configuration.
        epochs: Its length, if steps do not state it.
    """
    length = counted(config.steps, "step") if epochs is None else f"{epochs:g} epochs"
    data = " ".join(getattr(config.evaluation, "data", ()))
    if not data and (split := getattr(config, "val_split", 0)):
        data = f"--val-split {split:g} of the images"
    scores = f"evaluated on {data} every {counted(config.evaluation.interval, 'step')}"
    encoder = getattr(getattr(config, "model", None), "encoder", None)
    kept = " but the encoder's" * getattr(encoder, "pretrained", False)
    start = f"from {config.phases()[0].init or f'random weights{kept}'}"
    if config.has_checkpoint:
        start = "resumed"
    return (
        f"{config.command} {config.recipe}, {start}: {length} of "
        f"{config.batch_size} samples from {abridged(config.data)} to {config.out}, "
        f"{scores + ' and at the end' if data else 'without --evaluation.data'}"
    )


def count_processes(
    config: TrainConfig, device: torch.device, environment: Mapping[str, str]
) -> int:
    """Return the number of processes to train with; 1 if torchrun has started them.

    Args:
        config: The configuration.
        device: The device to train on.
        environment: Environment variables.

    Raises:
        GigamaskError: `config.processes` is set for a GPU, without a recipe that the other
            processes can start from, or to more than this machine can use.
    """
    import torch

    if "WORLD_SIZE" in environment:
        return 1
    if config.processes is None:
        is_alone = not is_small(config, device) or "OMP_NUM_THREADS" in environment
        most = 1 if is_alone or not config.recipe else min(torch.get_num_threads(), MAX_PROCESSES)
        return max(count for count in range(1, most + 1) if config.batch_size % count == 0)
    if config.processes > 1 and device.type != "cpu":
        raise GigamaskError(
            f"--processes {config.processes} is for training on a CPU (--device is {device}); "
            "use torchrun to train on several GPUs"
        )
    if config.processes > 1 and not config.recipe:
        raise GigamaskError(
            "processes > 1 needs a configuration that was made from a recipe, such as "
            "recipes.compact().with_(...)"
        )
    check_processes("--processes", config.processes, MAX_PROCESSES)
    return config.processes


def is_small(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a model's operations on a CPU are too short for several threads.

    With two threads they gain a tenth on an idle machine, and wait for each other on a busy one.

    Args:
        config: The configuration.
        device: The device to train on.
    """
    from gigamask.training.sam_config import SMALL_WIDTH

    width = getattr(getattr(config, "model", None), "max_width", None)
    return device.type == "cpu" and (width or SMALL_WIDTH) < SMALL_WIDTH


def choose_micro_batch_size(config: TrainConfig, world: World) -> TrainConfig:
    """Choose the micro-batch size if none is set; a collective operation.

    Args:
        config: The configuration.
        world: The processes that train together.

    Returns:
        The configuration with the size that its run began with, or else with the largest that fits
        in the free memory of each GPU; 1 on a CPU.

    Raises:
        GigamaskError: The device or the saved configuration cannot be used.
    """
    import torch

    from gigamask.distributed.precision import choose_device, choose_precision
    from gigamask.training.config import ImageTrainConfig

    if config.micro_batch_size is not None:
        return config
    device = choose_device(config.device)

    def choose() -> int:
        if saved := config_files.config_to_resume(config):
            return saved.micro_batch_size or 1
        if device.type != "cuda" or not isinstance(config, ImageTrainConfig):
            return 1
        from gigamask.profiling.gpus import Cluster
        from gigamask.workflows.plan import Hardware, largest_micro_batch

        precise = replace(config, precision=choose_precision(config.precision, device))
        hardware = Hardware(cluster=Cluster(world.nodes, world.size // world.nodes))
        size = largest_micro_batch(precise, hardware, free_bytes)
        free_gib = free_bytes / 2**30
        print(f"--micro-batch-size {size}: the most that fits in {free_gib:.1f} GiB", flush=True)
        return size

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    free_bytes = min(world.gather(free))
    chosen = world.run_on_all(lambda: choose() if world.is_main else 1)
    return replace(config, micro_batch_size=world.gather(chosen)[0])


def train_in_world(
    config: TrainConfig,
    changes: Changes,
    world: World,
    allow_data_change: bool = False,
    profile: int | None = None,
) -> TrainState:
    """Train a checked configuration with the processes of `world`.

    Args:
        config: The configuration.
        changes: The result of `resolve`, to be printed.
        world: The processes.
        allow_data_change: Resume even if the data or their order have changed.
        profile: Steps to profile; None profiles nothing.

    Returns:
        The state after the last step, or after an interrupt.
    """
    from gigamask.profiling.leaks import Leaks
    from gigamask.training.trainer import train

    def on_start() -> None:
        for name, (before, now) in changes.items():
            unused = ", without effect: the checkpoint has its weights" * (name == "init")
            print(f"--{name}: changed from {before} to {now}{unused}", flush=True)
        config_files.save_config(config)

    remaining: list[int] = []

    def make_observers(step: int, device: torch.device) -> list[Observer]:
        remaining.append(config.steps - step)
        observers: list[Observer] = []
        if world.is_main:
            observers.append(Leaks(config.log_every, config.steps, device).observe)
        if profile is not None:
            from gigamask.profiling.profiler import Profile

            rank = world.rank if world.size > 1 else None
            folder = Path(config.out) / "profile"
            observers.append(Profile(folder, profile, step, config.steps, device, rank).observe)
        return observers

    try:
        state = train(config, world, allow_data_change, on_start, make_observers)
    except GigamaskError:
        if world.is_main:
            remove_empty_run(config.out)
        raise
    if world.is_main and not remaining and not state.unscored:
        print(finished_note(config, state.step, profile), flush=True)
    return state


def finished_note(config: TrainConfig, step: int, profile: int | None) -> str:
    """Return what to print about a training that had no step left.

    Args:
        config: The configuration.
        step: Steps trained.
        profile: As in `train_in_world`.
    """
    folder, out = list_checkpoints(Path(config.out) / config_files.CHECKPOINTS)[-1], config.out
    more = f"gigamask {config.command} --resume {quote(out)} --steps {step + config.steps}"
    asked = "" if profile is None else f"--profile {profile}: "
    return f"{asked}{out}: the training is finished, in {folder}; for more steps: {more}"


def remove_empty_run(out: str) -> None:
    """Remove the folder of a rejected run if it holds only the lock and indexes."""
    from gigamask.data.index import is_cached_index
    from gigamask.files import exclusive_lock

    def is_empty(folder: Path) -> bool:
        names = [name for name in os.listdir(folder) if not is_cached_index(name)]
        indexes = folder / "evaluation"
        own = {"lock": True, "evaluation": "evaluation" in names and is_empty(indexes)}
        return all(own.get(name, False) for name in names)

    with suppress(GigamaskError, OSError):
        if is_empty(Path(out)):
            with exclusive_lock(Path(out) / "lock", out):  # not while another process starts there
                if is_empty(Path(out)):
                    shutil.rmtree(out)


def steps_for_epochs(config: TrainConfig, epochs: float) -> tuple[int, int]:
    """Return the number of steps in the given epochs, and the samples of one epoch.

    Args:
        config: The configuration; its data are indexed if they have no index.
        epochs: Number of epochs; may be fractional.
    """
    from gigamask.training.train_data import TrainData, open_index

    samples = TrainData(config, open_index(config)).samples_per_epoch
    return max(1, math.ceil(epochs * samples / config.batch_size)), samples
