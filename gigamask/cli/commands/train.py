"""`gigamask train`, `gigamask pretrain`, and the commands of plugins that train."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import Any

from gigamask import config_files, recipes, registry
from gigamask.config_files import TrainFlags
from gigamask.errors import GigamaskError, check_range, counted
from gigamask.launch import is_elsewhere, launched
from gigamask.parser import check_writable
from gigamask.signals import discard_if_closed
from gigamask.training.config import TrainConfig, differences
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.train import (
    choose_micro_batch_size,
    is_over_under_torchrun,
    open_world,
    resolve_all,
    steps_for_epochs,
    time_limit,
    train_in_world,
)


def run(command: str, arguments: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Run a training command, stage by stage.

    Args:
        command: "train", "pretrain", or one of a plugin, such as "distill".
        arguments: The arguments after the command.

    Returns:
        The file to write the result to, or None, and the result; its "step" is less than its
        "steps" after an interrupt, "unscored" is true if that ended the evaluation, and "time_over"
        if, under torchrun, the minutes of `--max-minutes` were over in some process.

    Raises:
        GigamaskError: The arguments, the data or the folder cannot be used.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(overview(command))
        return None, {}
    flags = config_files.parse_train(arguments, command)
    is_over = time_limit(flags.max_minutes)
    check_writable("--json", flags.json)
    check_range("--profile", flags.profile, 1)
    if not flags.print_config:
        from gigamask.workflows.own_data import use_own_data

        report = print if is_first_process() else lambda line: None
        flags = replace(flags, run=use_own_data(flags.run, report, flags.strict))
    if flags.fit is not None and not is_elsewhere(flags):
        flags = fitted(flags, flags.fit)
    configs = stages_of(flags)
    if flags.print_config and flags.epochs is None:
        announce_own_code(arguments)
        return print_configs([flags.limited] if flags.stages is None else configs)
    changes = resolve_all(configs, flags.allow_data_change)
    announce_own_code(arguments)
    with launched(flags, command, arguments, configs[-1].out) as here:
        if here is None:
            return None, {}
    words = [*command.split(), *arguments]
    with open_world(flags.run, words, os.environ, is_over, flags.epochs) as world:
        if flags.epochs is not None or flags.run.is_finding_classes:
            # The main process builds the index if there is none; the others read it.
            verbose = world.is_main and not flags.print_config
            flags = world.main_first(partial(use_index, flags, verbose))
            configs = stages_of(flags)
            changes = resolve_all(configs, flags.allow_data_change)
            if flags.print_config:
                return print_configs([flags.limited] if flags.stages is None else configs)
        if world.is_main and not configs[-1].has_checkpoint:
            print(warmup_note(flags.run, flags.limited), end="", flush=True)
        for number, config in enumerate(configs):
            started = [later.out for later in configs[number + 1 :] if later.has_checkpoint]
            if len(configs) > 1 and world.is_main:
                what = f"{counted(config.steps, 'step')} in {config.out}"
                what = f"done, {started[0]} has started" if started else what
                discard_if_closed(sys.stdout)
                print(f"stage {number + 1} of {len(configs)}: {what}", flush=True)
            if started:
                continue
            config = choose_micro_batch_size(config, world)
            state = train_in_world(
                config, changes[number], world, flags.allow_data_change, flags.profile
            )
            if state.step < config.steps or state.stopping:
                break
        time_over = state.stopping and is_over_under_torchrun(world, is_over)
    result = {"run": config.out, "step": state.step, "steps": config.steps}
    result |= {"samples": state.cursor.samples} | ({"unscored": True} if state.unscored else {})
    remaining = configs[number + 1 :]
    if state.step == config.steps and remaining:  # interrupted at the last step of a stage
        result = {"run": remaining[0].out, "step": 0, "steps": remaining[0].steps, "samples": 0}
    result |= {"time_over": True} if time_over and is_interrupted(result) else {}
    if world.is_main:
        discard_if_closed(sys.stdout)  # the exit code still says that it is saved
        print(summary(result, len(configs) > 1, config))
    return flags.json if world.is_main else None, result


def fitted(flags: TrainFlags, memory: str) -> TrainFlags:
    """Return the flags with a training that fits into memory, and print what was chosen.

    Args:
        flags: The flags.
        memory: The memory, as in `--fit`.
    """
    from gigamask.distributed.precision import choose_device
    from gigamask.profiling.gpus import Cluster
    from gigamask.workflows.fit import fit
    from gigamask.workflows.plan import Hardware
    from gigamask.workflows.train import count_processes

    config = flags.run
    if flags.stages is not None or not isinstance(config, SamTrainConfig):
        raise GigamaskError(f"--fit {memory} is for one training of a SAM; leave --stages out")
    device = choose_device(config.device)
    processes = int(os.environ.get("WORLD_SIZE") or count_processes(config, device, os.environ))
    hardware = Hardware(cluster=Cluster(1, processes))
    chosen, line = fit(replace(config, device=device.type), memory, hardware)
    if is_first_process():
        print(line, file=sys.stderr if flags.print_config else sys.stdout, flush=True)
    return replace(flags, run=replace(chosen, device=config.device))


def is_first_process() -> bool:
    """Return whether this is the process that prints, before the processes have joined."""
    return os.environ.get("RANK", "0") == "0"


def announce_own_code(arguments: Sequence[str]) -> None:
    """Print which code that is not built in a resumed run folder names."""
    if arguments[0] != "--resume" or not is_first_process():
        return
    folder = arguments[1]
    with suppress(GigamaskError):  # reading it again raises the error with advice
        if own := config_files.own_code(config_files.read_run_config(folder)):
            names = ", ".join(f"{flag} {name}" for flag, name in own.items())
            print(f"{folder} imports code that is not built in: {names}", file=sys.stderr)


def stages_of(flags: TrainFlags) -> list[TrainConfig]:
    """Return the configuration of each stage; a single one if the flags set no stages."""
    steps = {"mae": flags.mae_steps, "decoder": flags.decoder_steps}
    if flags.stages is None and all(each is None for each in steps.values()):
        return flags.limited.phases()
    from gigamask.workflows.stages import make_stages

    return make_stages(flags.limited, flags.stages, steps)


def print_configs(configs: Sequence[TrainConfig]) -> tuple[None, dict[str, Any]]:
    """Print the configurations as YAML documents."""
    print("---\n".join(config_files.config_yaml(config) for config in configs), end="")
    return None, {}


def use_index(flags: TrainFlags, verbose: bool = True) -> TrainFlags:
    """Return the flags with `--epochs` converted to steps, and `--classes auto` to names.

    Args:
        flags: The flags.
        verbose: Whether to print the number of steps and the classes.
    """
    from gigamask.workflows.own_data import find_classes

    flags = replace(flags, run=find_classes(flags.run, verbose))
    if (epochs := flags.epochs) is None:
        return flags
    steps, samples = steps_for_epochs(flags.run, epochs)
    if verbose:
        size = f"{counted(samples, 'sample')} per epoch, batch size {flags.run.batch_size:,}"
        print(f"--epochs {epochs:g}: {counted(steps, 'step')} ({size})", flush=True)
    return replace(flags, run=replace(flags.run, steps=steps), epochs=None)


def warmup_note(config: TrainConfig, limited: TrainConfig) -> str:
    """Return a line about each value that the number of steps changes.

    Args:
        config: The configuration as the flags state it.
        limited: The same with a limited warm-up.
    """
    return "".join(
        f"--steps {config.steps} is less than the recipe's: --{name} {now} in place of {before}; "
        "set it to choose another\n"
        for name, (before, now) in differences(config, limited).items()
    )


def summary(result: dict[str, Any], staged: bool, config: TrainConfig) -> str:
    """Return the text printed at the end, with the next command.

    Args:
        result: The result of `run`.
        staged: Whether the training has stages.
        config: The stage trained last.
    """
    out, step, steps = result["run"], result["step"], result["steps"]
    if is_interrupted(result):
        command = f"gigamask {config.command} --resume {quote(out)}"
        act = "run the same command to continue" if staged else f"continue with: {command}"
        return f"{out}: interrupted and saved at step {step} of {steps}; {act}"
    following = config.next_step.format(out=quote(config.out))
    if getattr(config, "val_split", 0):  # it is evaluated on what it held out
        following = following.partition(" --data")[0]
    if held_out := getattr(config.evaluation, "data", ()):
        following = following.replace("HELD_OUT_TARS", " ".join(map(quote, held_out)))
    own = config_files.own_code(config_files.read_run_config(out))
    if " evaluate " in following and any(flag.startswith("model") for flag in own):
        following += " --trust"
    done = f"{counted(step, 'step')}, {counted(result['samples'], 'sample')}"
    return f"{out}: {done}\nnext: {following}"


def is_interrupted(result: dict[str, Any]) -> bool:
    """Return whether steps or an evaluation remain, by the result of `run`."""
    return result["step"] < result["steps"] or "unscored" in result


def overview(command: str) -> str:
    """Return the text of a command's `--help` without a recipe."""
    first = recipes.find(recipes.names(command)[0])()
    available = registry.components_of(first)
    components = "\n".join(f"  --{kind:20} {', '.join(registry.names(kind))}" for kind in available)
    required = f" {first.required}" * bool(first.required)
    usage = [
        f"usage: gigamask {command} RECIPE{required} --data PATH... --out RUN "
        "[--section.field value ...]",
        f"       gigamask {command} --resume RUN",
    ]
    if command == "train":
        from gigamask.workflows.stages import STAGES

        usage.append(f"       gigamask train RECIPE --stages {','.join(STAGES)} ...")
    return "\n".join(usage) + (
        f"\n\nrecipes:\n{recipes.format_recipes(command)}\n"
        "  file.py:function  your own: a function that returns a TrainConfig\n\n"
        "components, by name or your own class (file.py:Class, package.module:Class):\n"
        f"{components}\n\n"
        f"'gigamask {command} RECIPE --help' lists all flags with their values."
    )
