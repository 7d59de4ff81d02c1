"""`gigamask train`, `pretrain` and `ground train`: from words to trainings, one run or the stages of one, and what is said of them.

Not here: the loop (`train.loop`), flags (`arguments`), recipes (`recipes`).
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gigamask import config_files, recipes, registry
from gigamask.data.file_lock import exclusive_lock
from gigamask.errors import GigamaskError
from gigamask.parser import check_writable
from gigamask.recipes.mae import pretraining_for
from gigamask.training.config import TrainConfig, check_at_least
from gigamask.training.sam_config import SamTrainConfig

if TYPE_CHECKING:
    import torch

    from gigamask.distributed.world import World
    from gigamask.training.logging import Observer
    from gigamask.training.state import TrainState

STAGES = ("mae", "decoder", "joint")
PRETRAINED = ("patch_embed", "pos_embed", "blocks")
"""What of an image encoder a masked autoencoder has."""
DECODER_SHARE = 5 / 90
"""The decoder's warm-up takes 5 epochs where joint training takes 90 in the mixed-prompts recipe; the same share of any other."""
WARMUP_SHARE = 0.1
"""Of a stage before the last, what the learning rate's warm-up takes at most: a recipe's own is meant for the recipe's own length."""


def run_command(verb: str, words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Runs one of the verbs that train, such as `gigamask train`; returns where to write what was done, and that.

    "step" in it is below "steps" where a training was told to stop.
    """
    if words and words[0] in ("-h", "--help"):
        print(overview(verb))
        return None, {}
    flags = config_files.parse_train(words, verb)
    check_writable("--json", flags.json)
    check_at_least(1, **({} if flags.profile is None else {"profile": flags.profile}))
    if flags.run.verb != verb:
        raise GigamaskError(
            f"recipe {flags.run.recipe} is no recipe of 'gigamask {verb}'; give it to 'gigamask {flags.run.verb}'"
        )
    runs = runs_of(flags)
    if flags.print_config and flags.epochs is None:
        return _print_configs(runs)
    from gigamask.distributed.precision import choose_device
    from gigamask.distributed.world import destroy_world, init_world

    settled = [config_files.resolve_resume(run, flags.allow_data_change) for run in runs]
    for number, run in enumerate(runs):  # else a last stage would fail days later
        if not run.has_checkpoint:
            run.look_ahead([before.out for before in runs[:number]])
    world = init_world(os.environ, choose_device(flags.run.device), flags.run.timeout_s)
    try:
        if flags.epochs is not None:
            # The first process builds the index, if there is none; the others read it.
            runs = runs_of(
                world.in_turn(lambda: with_steps(flags, world.is_main and not flags.print_config))
            )
            settled = [config_files.resolve_resume(run, flags.allow_data_change) for run in runs]
            if flags.print_config:
                return _print_configs(runs)
        for number, (run, changed) in enumerate(settled):
            later = [each.out for each in runs[number + 1 :] if each.has_checkpoint]
            if len(runs) > 1 and world.is_main:
                what = (
                    f"is over, {later[0]} has begun" if later else f"{run.steps} steps in {run.out}"
                )
                print(f"stage {number + 1} of {len(runs)}: {what}", flush=True)
            if later:
                continue
            state = train_one(run, changed, world, flags.allow_data_change, flags.profile)
            if state.step < run.steps or state.stopping:
                break
    finally:
        destroy_world(world)
    done = {"run": run.out, "step": state.step, "samples": state.cursor.samples, "steps": run.steps}
    if state.step == run.steps and (
        left := runs[number + 1 :]
    ):  # told to stop by the last update of a stage
        done = {"run": left[0].out, "step": 0, "samples": 0, "steps": left[0].steps}
    if world.is_main:
        print(summary(done, flags.stages is not None, run))
    return flags.json if world.is_main else None, done


def _print_configs(runs: Sequence[TrainConfig]) -> tuple[None, dict[str, Any]]:
    print("---\n".join(config_files.config_yaml(run) for run in runs), end="")
    return None, {}


def runs_of(flags: config_files.TrainFlags) -> list[TrainConfig]:
    """Return the run that the flags describe, or the runs of its stages."""
    staged = flags.stages is not None or flags.stage_steps
    return stages(flags) if staged else [flags.run]


def with_steps(flags: config_files.TrainFlags, verbose: bool = True) -> config_files.TrainFlags:
    """Return the flags with `--epochs` turned into steps, from the size of the indexed data.

    Args:
        flags: the flags of a training, with `epochs`.
        verbose: whether to print the number of steps.
    """
    from gigamask.training.train_data import TrainData, open_index

    run, epochs = flags.run, flags.epochs or 0.0
    samples = TrainData(run, open_index(run)).samples_per_epoch
    steps = max(1, math.ceil(epochs * samples / run.batch_size))
    if verbose:
        size = f"{samples:,} samples an epoch, batch size {run.batch_size:,}"
        print(f"--epochs {epochs:g}: {steps:,} steps ({size})", flush=True)
    return replace(flags, run=replace(run, steps=steps), epochs=None)


def summary(done: dict[str, Any], staged: bool, run: TrainConfig) -> str:
    """Returns what is printed at the end, with what to do next.

    Args:
        done: what `main` returns.
        staged: whether the run is one of several stages.
        run: the last run that was trained.
    """
    if done["step"] < done["steps"]:
        act = (
            "the same command goes on"
            if staged
            else f"continue with: gigamask {run.verb} --resume {quote(done['run'])}"
        )
        return f"{done['run']}: stopped and saved at step {done['step']} of {done['steps']}; {act}"
    return f"{done['run']}: {done['step']} steps, {done['samples']} samples\nnext: {run.next_step.format(out=quote(run.out))}"


def train_one(
    run: TrainConfig,
    changed: dict[str, tuple[Any, Any]],
    world: World,
    other_order: bool,
    profile: int | None = None,
) -> TrainState:
    """Trains one run and looks for leaks of memory; `changed` is what differs from the configuration in its folder, `profile` steps to profile."""
    from gigamask.profiling.leaks import Leaks
    from gigamask.profiling.profiler import Profile
    from gigamask.training.trainer import train

    def begun() -> None:
        for name, (before, now) in changed.items():
            print(f"--{name} was {before} and is {now} from here on", flush=True)
        config_files.save_config(run)

    left: list[int] = []

    def meters(done: int, device: torch.device) -> list[Observer]:
        left.append(run.steps - done)
        found: list[Observer] = (
            [Leaks(run.log_every, run.steps, device).look] if world.is_main else []
        )
        if profile is not None:
            rank = world.rank if world.size > 1 else None
            found.append(
                Profile(Path(run.out) / "profile", profile, done, run.steps, device, rank).look
            )
        return found

    try:
        state = train(run, world, other_order, begun, meters)
    except GigamaskError:
        if world.is_main:
            remove_empty_run(run.out)
        raise
    if profile is not None and world.is_main and not left:
        print(
            f"--profile {profile}: no step of {run.out} is left to profile; give more --steps, or another --out",
            flush=True,
        )
    return state


def remove_empty_run(out: str) -> None:
    """Removes the folder of a run that was refused, where it holds nothing but the lock and the index to evaluate on."""
    path, ours = Path(out) / "lock", {"lock", "evaluation"}
    with suppress(GigamaskError, OSError):
        if ours >= set(os.listdir(out)):
            with exclusive_lock(path, out):  # not while another process begins there
                if ours >= set(os.listdir(out)):
                    shutil.rmtree(out)


def stages(flags: config_files.TrainFlags) -> list[TrainConfig]:
    """Returns the runs of the stages that are asked for, each in a folder of its own below `--out` and starting from the one before it.

    `mae` pre-trains the encoder; `decoder` trains all that was not, on what was and is frozen; `joint` trains everything and is the recipe itself.
    """
    check_at_least(1, **{f"{stage}_steps": steps for stage, steps in flags.stage_steps.items()})
    if flags.stages is None:
        stage = next(iter(flags.stage_steps))
        raise GigamaskError(
            f"--{stage}-steps is the length of the stage {stage}, but no stages are asked for; give --stages {','.join(STAGES)}"
        )
    run, asked = flags.run, tuple(each.strip() for each in flags.stages.split(","))
    if not isinstance(run, SamTrainConfig):
        raise GigamaskError(f"--stages trains a SAM, recipe {run.recipe} does not; leave it out")
    if unknown := [each for each in asked if each not in STAGES]:
        raise GigamaskError(
            f"--stages names {unknown[0]!r}, known are {', '.join(STAGES)}; give some of them, in that order"
        )
    if list(asked) != [each for each in STAGES if each in asked]:
        raise GigamaskError(
            f"--stages is {flags.stages}, they come in the order {', '.join(STAGES)}; give each at most once"
        )
    if unasked := [each for each in flags.stage_steps if each not in asked]:
        raise GigamaskError(
            f"--{unasked[0]}-steps is the length of the stage {unasked[0]}, but --stages is {flags.stages}; leave one out, or put it there"
        )
    if asked[0] == "mae" and run.init:
        raise GigamaskError(
            f"--init {run.init} would not be used: the stage mae starts anew, the others from it; leave out mae, or --init"
        )
    if asked[0] == "decoder" and not run.init:
        raise GigamaskError(
            "--stages decoder trains on an encoder that stays as it is, but there are no weights for one; give --init, or put mae before it"
        )
    folders = {stage: str(Path(run.out) / stage) for stage in asked}
    inits = {
        "mae": None,
        "decoder": f"mae:{folders['mae']}" if "mae" in folders else run.init,
        "joint": folders.get("decoder", f"mae:{folders['mae']}" if "mae" in folders else run.init),
    }
    # A masked autoencoder has no neck, so that one still has to be learned.
    trained = (
        tuple(f"image_encoder.{part}" for part in PRETRAINED)
        if str(inits["decoder"]).startswith("mae:")
        else ("image_encoder",)
    )
    decoder_steps = flags.decoder_steps or max(1, round(run.steps * DECODER_SHARE))
    made: dict[str, TrainConfig] = {
        "mae": pretraining_for(run, flags.mae_steps),
        "decoder": replace(
            run, freeze=tuple(dict.fromkeys([*run.freeze, *trained])), steps=decoder_steps
        ),
    }
    made = {
        stage: replace(each, schedule=each.schedule.shortened(int(each.steps * WARMUP_SHARE)))
        for stage, each in made.items()
    }
    made["joint"] = run
    return [replace(made[stage], out=folders[stage], init=inits[stage]) for stage in asked]


def overview(verb: str) -> str:
    """Returns what a verb's `--help` prints: the forms and the recipes."""
    known = recipes.OF_VERB[verb]
    parts = "\n".join(
        f"  --{part:16} {', '.join(kinds)}"
        for part, (_, kinds) in registry.COMPONENTS.items()
        if part in registry.components_of(known[0]())
    )
    staged = (
        "" if verb != "train" else f"       gigamask train RECIPE --stages {','.join(STAGES)} ...\n"
    )
    return (
        f"usage: gigamask {verb} RECIPE --data PATH... --out RUN [--section.leaf value ...]\n       gigamask {verb} --resume RUN\n{staged}\n"
        f"recipes:\n{recipes.listed(known)}\n  file.py:function  your own, a function that returns a Run\n\n"
        f"parts, each by a name, as file.py:Class or package.module:Class:\n{parts}\n\n"
        f"'gigamask {verb} RECIPE --help' lists every flag and its value there."
    )
