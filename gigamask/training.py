"""`gigamask train` and `gigamask pretrain`: from words to trainings, one run or the stages of one, and what is said of them.

Not here: the loop (`train.loop`), flags (`arguments`), recipes (`recipes`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gigamask import arguments, names, recipes
from gigamask.faults import Fault
from gigamask.recipes.mae import pretraining_for
from gigamask.train.pretraining import Pretraining
from gigamask.train.run import Run
from gigamask.train.segmentation import Segmentation

if TYPE_CHECKING:
    from gigamask.parallel.world import World
    from gigamask.train.state import TrainState

STAGES = ("mae", "decoder", "joint")
DECODER_SHARE = 5 / 90
"""The decoder's warm-up takes 5 epochs where joint training takes 90 in the mixed-prompts recipe; the same share of any other."""


def main(verb: str, words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Runs `gigamask train` or `gigamask pretrain`; returns where to write what was done, and that.

    "step" in it is below "steps" where a training was told to stop.
    """
    if words and words[0] in ("-h", "--help"):
        print(overview(verb))
        return None, {}
    flags = arguments.parse_train(words, verb)
    arguments.check_json(flags.json)
    kind = Pretraining if verb == "pretrain" else Segmentation
    if not isinstance(flags.run, kind):
        other = "train" if verb == "pretrain" else "pretrain"
        raise Fault(f"recipe {flags.run.recipe} is no recipe of 'gigamask {verb}'; give it to 'gigamask {other}'")
    runs = [flags.run] if flags.stages is None else stages(flags)
    if flags.print_config:
        print("---\n".join(arguments.text_of(run) for run in runs), end="")
        return None, {}
    from gigamask.parallel.precision import choose_device
    from gigamask.parallel.world import join, leave

    settled = [arguments.settle(run, flags.allow_other_order) for run in runs]
    world = join(os.environ, choose_device(flags.run.device))
    try:
        for number, (run, changed) in enumerate(settled):
            if len(runs) > 1 and world.first:
                print(f"stage {number + 1} of {len(runs)}: {run.steps} steps in {run.out}", flush=True)
            state = train_one(run, changed, world, flags.allow_other_order)
            if state.step < run.steps:
                break
    finally:
        leave(world)
    done = {"run": run.out, "step": state.step, "samples": state.cursor.samples, "steps": run.steps}
    if world.first:
        print(told(done, flags.stages is not None, isinstance(run, Pretraining)))
    return flags.json if world.first else None, done


def told(done: dict[str, Any], staged: bool, encoder_only: bool) -> str:
    """Returns what is said at the end, with what to do next."""
    if done["step"] < done["steps"]:
        verb = "pretrain" if encoder_only else "train"
        act = "the same command goes on" if staged else f"continue with: gigamask {verb} --resume {done['run']}"
        return f"{done['run']}: stopped and saved at step {done['step']} of {done['steps']}; {act}"
    if encoder_only:
        act = f"gigamask train RECIPE --data TARS --init mae:{quote(done['run'])} --out OUT"
    else:
        act = f"gigamask evaluate {quote(done['run'])} --data HELD_OUT_TARS"
    return f"{done['run']}: {done['step']} steps, {done['samples']} samples\nnext: {act}"


def train_one(run: Run, changed: dict[str, tuple[Any, Any]], world: World, other_order: bool) -> TrainState:
    """Trains one run; `changed` is what differs from the configuration in its folder."""
    from gigamask.evaluate.progress import Progress
    from gigamask.train.loop import train

    def begun() -> None:
        for name, (before, now) in changed.items():
            print(f"--{name} was {before} and is {now} from here on", flush=True)
        arguments.save_run(run)

    evaluator = Progress.of(run) if world.first and isinstance(run, Segmentation) else None
    return train(run, world, other_order, begun, evaluator)


def stages(flags: arguments.TrainFlags) -> list[Run]:
    """Returns the runs of the stages that are asked for, each in a folder of its own below `--out` and starting from the one before it.

    `mae` pre-trains the encoder; `decoder` trains all else on the frozen encoder; `joint` trains everything and is the recipe itself.
    """
    run, asked = flags.run, tuple(each.strip() for each in (flags.stages or "").split(","))
    assert isinstance(run, Segmentation)
    if unknown := [each for each in asked if each not in STAGES]:
        raise Fault(f"--stages names {unknown[0]!r}, known are {', '.join(STAGES)}; give some of them, in that order")
    if list(asked) != [each for each in STAGES if each in asked]:
        raise Fault(f"--stages is {flags.stages}, they come in the order {', '.join(STAGES)}; give each at most once")
    if asked[0] == "decoder" and not run.init:
        raise Fault("--stages decoder trains on an encoder that stays as it is, but there are no weights for one; give --init, or put mae before it")
    folders = {stage: str(Path(run.out) / stage) for stage in asked}
    inits = {
        "mae": None,
        "decoder": f"mae:{folders['mae']}" if "mae" in folders else run.init,
        "joint": folders.get("decoder", f"mae:{folders['mae']}" if "mae" in folders else run.init),
    }
    decoder_steps = flags.decoder_steps or max(1, round(run.steps * DECODER_SHARE))
    made: dict[str, Run] = {
        "mae": pretraining_for(run, flags.mae_steps),
        "decoder": replace(run, freeze=(*run.freeze, "image_encoder"), steps=decoder_steps),
        "joint": run,
    }
    return [replace(made[stage], out=folders[stage], init=inits[stage]) for stage in asked]


def overview(verb: str) -> str:
    """Returns what `gigamask train --help` or `gigamask pretrain --help` prints: the forms and the recipes."""
    known: Sequence = recipes.PRETRAININGS if verb == "pretrain" else recipes.SEGMENTATIONS
    rows = "\n".join(f"  {recipe.__name__:13} {(recipe.__doc__ or '').strip().splitlines()[0]}" for recipe in known)
    parts = "\n".join(f"  --{part:16} {', '.join(kinds)}" for part, (_, kinds) in names.SEAMS.items() if part in names.parts_of(known[0]()))
    staged = "" if verb == "pretrain" else f"       gigamask train RECIPE --stages {','.join(STAGES)} ...\n"
    return (
        f"usage: gigamask {verb} RECIPE --data PATH... --out RUN [--section.leaf value ...]\n       gigamask {verb} --resume RUN\n{staged}\n"
        f"recipes:\n{rows}\n  file.py:function  your own, a function that returns a Run\n\n"
        f"parts, each by a name or as file.py:Class:\n{parts}\n\n"
        f"'gigamask {verb} RECIPE --help' lists every flag and its value there."
    )
