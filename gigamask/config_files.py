"""From words on the command line and files to runs, and to verbs that hold a part of one.

A configuration file is turned into the same flags and put in front of the user's own, so there is one parser and the last word wins.

Not here: the parser itself (`parser`), the verbs (`verbs`), which word names which part (`names`), what a run is (`train.run`).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from gigamask import recipes, registry
from gigamask.errors import GigamaskError
from gigamask.parser import parse
from gigamask.training.config import TrainConfig, check_resume, flatten_config

Verb = TypeVar("Verb")
CONFIG = "config.yaml"
ALIASES = {"lr": ("optimizer.lr",), "num-workers": ("loader.workers",)}
"""Short names of flags, each with the flags that it may mean: the one that the run has."""


def parse_verb(kind: Any, argv: Sequence[str], prog: str) -> Any:
    """Returns the verb that `argv` describes; a part among its fields, such as a sampler, is chosen by name, and its own fields are flags, too."""
    held = registry.COMPONENTS.keys() & {each.name for each in fields(kind)}
    chosen, words = registry.split_component_flags(argv, held)
    parts = {part: registry.make_component(part, name) for part, name in chosen.items()}
    if parts:
        narrowed = [(part, type(value), field(default=value)) for part, value in parts.items()]
        kind = make_dataclass(
            kind.__name__, narrowed, bases=(kind,), frozen=True, namespace={"__doc__": kind.__doc__}
        )
    return parse(kind, words, prog)


@dataclass(frozen=True)
class RunFlags:
    """The flags of a training: those of the run, and how it is put together."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    epochs: float | None = None
    """length of the training in epochs of its data instead of --steps; may be a fraction"""
    config: tuple[str, ...] = ()
    """YAML files of flags, taken before those on the command line"""
    allow_data_change: bool = False
    """resume although the data or its order have changed"""
    print_config: bool = False
    """print the whole configuration and leave"""
    json: str | None = None
    """file for what was printed, as data"""
    profile: int | None = None
    """updates to profile, behind the first three; what they took is written to the folder profile of --out (docs/profile.md)"""


@dataclass(frozen=True)
class TrainFlags(RunFlags):
    """The flags of a training: those of the run, how it is put together, and the stages it is split into."""

    stages: str | None = None
    """stages to train one after the other, each in its folder below --out: mae,decoder,joint or some of them"""
    mae_steps: int | None = None
    """updates of the stage mae; by default those of the recipe that pre-trains such an encoder"""
    decoder_steps: int | None = None
    """updates of the stage decoder; by default 5/90 of --steps"""

    @property
    def stage_steps(self) -> dict[str, int]:
        """The lengths that are given of stages, by stage."""
        given = {"mae": self.mae_steps, "decoder": self.decoder_steps}
        return {stage: steps for stage, steps in given.items() if steps is not None}


def parse_train(argv: Sequence[str], verb: str = "train") -> TrainFlags:
    """Returns the flags of `train RECIPE ...`, or of `train --resume RUN ...`, whose run starts from what that folder holds; `pretrain` is alike."""
    words = list(argv)
    if words and words[0] == "--resume":
        if len(words) < 2:
            raise GigamaskError(f"--resume wants a run folder; see 'gigamask {verb} --help'")
        saved, prog = load_config(words[1]), f"gigamask {verb} --resume {words[1]}"
        if os.path.abspath(saved.out) != os.path.abspath(
            words[1]
        ):  # moved since, copied, or seen from another folder
            saved = replace(saved, out=words[1])
        words = words[2:]
    elif words and not words[0].startswith("-"):
        saved, prog = recipes.make(words[0]), f"gigamask {verb} {words[0]}"
        saved, words = replace(saved, recipe=words[0]), words[1:]
    else:
        names_known = ", ".join(recipe.__name__ for recipe in recipes.OF_VERB[verb])
        raise GigamaskError(
            f"{verb} wants a recipe first ({names_known}, or file.py:function), or --resume RUN; see 'gigamask {verb} --help'"
        )
    flags = _parse_words(words, saved, prog, TrainFlags if verb == "train" else RunFlags)
    if flags.epochs is not None:
        if any(word.partition("=")[0] == "--steps" for word in words):
            raise GigamaskError(
                "--epochs and --steps both set the length of the training; give one of them"
            )
        if not 0 < flags.epochs < math.inf:
            raise GigamaskError(f"--epochs is {flags.epochs}, it must be above 0")
    if not isinstance(flags, TrainFlags):
        return TrainFlags(**{each.name: getattr(flags, each.name) for each in fields(flags)})
    if argv[0] == "--resume" and flags.stages is not None:
        raise GigamaskError(
            f"--stages with --resume: {argv[1]} is one run; give the command that began the stages again, or leave out --stages"
        )
    return flags


def parse_recipe(argv: Sequence[str], verb: str, kind: type[Verb]) -> Verb:
    """Returns a verb about a run, of `VERB RECIPE ...` with the flags that `train` takes, too; its first field is the run."""
    if not argv or argv[0].startswith("-"):
        known = ", ".join(recipe.__name__ for recipe in recipes.BUILT_IN)
        raise GigamaskError(
            f"{verb} wants a recipe first ({known}, or file.py:function); see 'gigamask {verb} --help'"
        )
    return _parse_words(
        argv[1:], replace(recipes.make(argv[0]), recipe=argv[0]), f"gigamask {verb} {argv[0]}", kind
    )


def _parse_words(words: Sequence[str], default: TrainConfig, prog: str, kind: Any) -> Any:
    """Returns what `_parse_run` does of the words, the files of flags that they name before them."""
    chosen, left = registry.split_component_flags(words)
    return _parse_run(
        [read_config(path) for path in config_files(left)], chosen, left, default, prog, kind
    )


def _parse_run(
    files: Sequence[dict[str, Any]],
    chosen: dict[str, str],
    words: list[str],
    default: TrainConfig,
    prog: str,
    kind: Any = RunFlags,
) -> Any:
    """Returns the flags, or what else holds a run first, that files and then words make of `default`; first of all they choose its parts."""
    in_files = {
        part: name
        for content in files
        for part, name in content.items()
        if part in registry.COMPONENTS
    }
    run = registry.select_components(registry.select_components(default, in_files), chosen)
    replaced = tuple(
        f"{part}." for part in chosen if part in in_files and in_files[part] != chosen[part]
    )
    flags = [
        flag
        for content in files
        for flag in flags_of(
            {name: content[name] for name in content if not name.startswith(replaced)}, run
        )
    ]
    aliases = aliases_of(run)
    return parse(
        kind,
        expand_aliases(flags + words, aliases),
        prog,
        kind(run),
        extra_flags=[f"--{name}" for name in (*aliases, *registry.components_of(run))],
    )


def aliases_of(run: TrainConfig) -> dict[str, str]:
    """Return the short names of the run's flags, each with its flag."""
    known = flatten_config(run)
    found = {alias: [flag for flag in flags if flag in known] for alias, flags in ALIASES.items()}
    return {alias: flags[0] for alias, flags in found.items() if flags}


def expand_aliases(words: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return the words with each short name of a flag replaced by the flag.

    Args:
        words: flags and their values.
        aliases: short names and the flags that they mean, without dashes.
    """
    expanded = []
    for word in words:
        name, equals, value = word.partition("=")
        alias = name.removeprefix("--").replace("_", "-")
        known = name.startswith("--") and alias in aliases
        expanded.append(f"--{aliases[alias]}{equals}{value}" if known else word)
    return expanded


def resolve_resume(
    run: TrainConfig, other_order: bool
) -> tuple[TrainConfig, dict[str, tuple[Any, Any]]]:
    """Returns the run to train and how it differs from the one whose checkpoints are in its folder; raises `GigamaskError` where it cannot go on so."""
    run.check()
    if not run.has_checkpoint:
        return run, {}
    return run, check_resume(load_config(run.out), run, other_order)


def config_files(words: Sequence[str]) -> list[str]:
    """Returns the values of `--config` among the words."""
    files = []
    for i, word in enumerate(words):
        if word.startswith("--config="):
            files.append(word.split("=", 1)[1])
        elif word == "--config":
            for value in words[i + 1 :]:
                if value.startswith("--"):
                    break
                files.append(value)
    return files


def read_config(path: str) -> dict[str, Any]:
    """Returns a YAML file's leaves as `{"section.leaf": value}`; sections may be nested or dotted."""
    try:
        # Numbers stay the text they are (BaseLoader), so 1e-4 is parsed by the same rule as on the command line.
        content = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); name a YAML file of flags"
        ) from None
    except yaml.YAMLError as error:
        raise GigamaskError(
            f"{path}: is no YAML ({' '.join(str(error).split())}); see docs for an example, or a run's config.yaml"
        ) from None
    if not isinstance(content, dict):
        raise GigamaskError(f"{path}: holds no 'flag: value' lines; see a run's config.yaml")
    return _flat(content)


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}".replace("_", "-"): value}
        )
    return flat


def flags_of(content: dict[str, Any], default: TrainConfig) -> list[str]:
    """Returns leaves as flags; those that say what `default` says anyway are left out."""
    known = flatten_config(default)
    flags: list[str] = []
    for name, value in content.items():
        if (
            name == "recipe"
            or name in registry.COMPONENTS
            or (name in known and to_yaml_text(known[name]) == value)
        ):
            continue
        if isinstance(known.get(name), bool) and value in ("true", "false"):
            flags.append(
                f"--{name}" if value == "true" else "--" + re.sub(r"([^.]+)$", r"no-\1", name)
            )
        else:
            flags += [
                f"--{name}",
                *(
                    value
                    if isinstance(value, list)
                    else ["None" if value in ("null", "") else value]
                ),
            ]
    return flags


def to_yaml_text(value: Any) -> Any:
    """Returns a leaf as the text that YAML gives back for it."""
    if isinstance(value, (tuple, list)):
        return [to_yaml_text(each) for each in value]
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def config_yaml(run: TrainConfig) -> str:
    """Returns the whole configuration as YAML, one flag a line."""
    return yaml.safe_dump(config_as_text(run), sort_keys=False)


def config_as_text(run: TrainConfig) -> dict[str, Any]:
    """Returns the whole configuration, flags by name, as the text that stands in its file."""
    return registry.component_names(run) | {
        name: to_yaml_text(value) for name, value in flatten_config(run).items()
    }


def recipe_config(name: str) -> dict[str, Any] | None:
    """Returns the configuration that a recipe has by itself, flags by name, as text; None where it cannot be read here."""
    try:
        return config_as_text(recipes.make(name))
    except GigamaskError:
        return None


def save_config(run: TrainConfig) -> None:
    """Writes the resolved configuration to `run.out/config.yaml`, and who wrote it (arguments, versions, git revision) to `origin.jsonl`."""
    Path(run.out).mkdir(parents=True, exist_ok=True)
    (Path(run.out) / CONFIG).write_text(config_yaml(run))
    versions = {name: metadata.version(name) for name in ("gigamask", "torch", "numpy")}
    with open(Path(run.out) / "origin.jsonl", "a") as file:
        file.write(json.dumps({"argv": sys.argv, **versions, "git": revision()}) + "\n")


def revision() -> str | None:
    """Returns the git revision of this source tree, or None outside one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def load_config(folder: str) -> TrainConfig:
    """Returns the run whose configuration a folder holds; equal to the one that was saved."""
    path = Path(folder) / CONFIG
    if not path.exists():
        stages = [
            str(each.parent)
            for each in sorted(Path(folder).glob(f"*/{CONFIG}"), key=os.path.getmtime)
        ]
        act = (
            f"name one of those in it ({', '.join(stages)})"
            if stages
            else f"name a run folder, or begin one there with RECIPE --out {folder}"
        )
        raise GigamaskError(f"{folder}: holds no {CONFIG}, so there is no run to resume; {act}")
    content = read_config(str(path))
    default = replace(recipes.make(content.get("recipe", "")), recipe=content["recipe"])
    return _parse_run([content], {}, [], default, str(path)).run


def config_of_weights(path: str) -> TrainConfig | None:
    """Returns the run in whose folder weights lie: the folder itself, one of its checkpoints, or a file of one; None for other weights."""
    above = [Path(path), *Path(path).parents][:4]
    return next((load_config(str(folder)) for folder in above if (folder / CONFIG).is_file()), None)
