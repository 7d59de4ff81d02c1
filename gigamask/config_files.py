"""Training configurations from flags and YAML files, and `config.yaml` in run folders.

A file is converted to flags that precede those of the command line, so that one parser handles both
and the last value wins.
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
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from gigamask import files, recipes, registry
from gigamask.errors import GigamaskError
from gigamask.parser import parse
from gigamask.training.config import TrainConfig, check_resume, flatten_config

Command = TypeVar("Command")
CONFIG = "config.yaml"
ALIASES = {"lr": ("optimizer.lr",), "num-workers": ("loader.workers",)}
"""Short names of flags, each with the flags it may stand for; a configuration has at most one."""


def parse_command(kind: Any, arguments: Sequence[str], prog: str) -> Any:
    """Parse a command whose components, such as a sampler, are chosen by name and have flags.

    Args:
        kind: The dataclass of the command; fields named after a kind of component hold it.
        arguments: The arguments after the command.
        prog: The command as typed, for help and errors.

    Returns:
        The command with its components.

    Raises:
        GigamaskError: An argument is invalid.
    """
    kinds = registry.COMPONENTS.keys() & {leaf.name for leaf in fields(kind)}
    names, others = registry.split_component_flags(arguments, kinds)
    components = {name: registry.make_component(name, value) for name, value in names.items()}
    if components:
        narrowed = [(name, type(value), field(default=value)) for name, value in components.items()]
        namespace = {"__doc__": kind.__doc__}
        kind = make_dataclass(
            kind.__name__, narrowed, bases=(kind,), frozen=True, namespace=namespace
        )
    return parse(kind, others, prog)


@dataclass(frozen=True)
class RunFlags:
    """Train this recipe."""

    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    epochs: float | None = None
    """length of training in epochs instead of --steps; may be a fraction"""
    config: tuple[str, ...] = ()
    """YAML files of flags; the command line overrides them"""
    allow_data_change: bool = False
    """resume even if the data or their order have changed"""
    print_config: bool = False
    """print the whole configuration and exit"""
    json: str | None = None
    """write the results to this JSON file"""
    profile: int | None = None
    """number of steps to profile after 3 warm-up steps; results go to OUT/profile
    (docs/profile.md)"""


@dataclass(frozen=True)
class TrainFlags(RunFlags):
    """Train this recipe, all at once or in stages."""

    stages: str | None = None
    """stages to train one after the other, each in its own folder in --out: mae,decoder,joint or a
    subset"""
    mae_steps: int | None = None
    """steps of the stage mae; default: those of the MAE recipe for this encoder"""
    decoder_steps: int | None = None
    """steps of the stage decoder; default: 5/90 of --steps"""


def parse_train(arguments: Sequence[str], command: str = "train") -> TrainFlags:
    """Parse the arguments of a command that trains.

    Args:
        arguments: `RECIPE` or `--resume RUN`, and flags.
        command: "train", "pretrain" or "ground train".

    Returns:
        The flags; with `--resume`, they default to the values in the run folder.

    Raises:
        GigamaskError: An argument is invalid, or the folder is not a run folder.
    """
    rest, folder = list(arguments), ""
    resuming = rest[:1] == ["--resume"]
    if resuming:
        if len(rest) < 2:
            raise GigamaskError(f"--resume needs a run folder; see 'gigamask {command} --help'")
        folder = rest[1]
        saved, prog = load_config(folder), f"gigamask {command} --resume {folder}"
        if os.path.abspath(saved.out) != os.path.abspath(folder):  # moved or copied since
            saved = replace(saved, out=folder)
        rest = rest[2:]
    elif rest and not rest[0].startswith("-"):
        saved, prog = recipes.make(rest[0]), f"gigamask {command} {rest[0]}"
        saved, rest = replace(saved, recipe=rest[0]), rest[1:]
    else:
        known = ", ".join(recipe.__name__ for recipe in recipes.BY_COMMAND[command])
        raise GigamaskError(
            f"{command} needs a recipe ({known}, or file.py:function) or --resume RUN as its first "
            f"argument; see 'gigamask {command} --help'"
        )
    flags = _parse(rest, saved, prog, TrainFlags if command == "train" else RunFlags)
    if flags.epochs is not None:
        if any(word.partition("=")[0] == "--steps" for word in rest):
            raise GigamaskError("--epochs and --steps cannot be combined; give one of them")
        if not 0 < flags.epochs < math.inf:
            raise GigamaskError(f"--epochs must be > 0 and finite (got {flags.epochs})")
    if not isinstance(flags, TrainFlags):
        return TrainFlags(**{leaf.name: getattr(flags, leaf.name) for leaf in fields(flags)})
    if resuming and flags.stages is not None:
        raise GigamaskError(
            f"--stages cannot be combined with --resume {folder}, which is one run; run the "
            "command that started the stages again, or leave out --stages"
        )
    return flags


def parse_recipe(arguments: Sequence[str], command: str, kind: type[Command]) -> Command:
    """Parse a command that takes a recipe and the flags of its training.

    Args:
        arguments: `RECIPE` and flags.
        command: The command, such as "plan".
        kind: The dataclass of the command; its first field holds the configuration.

    Raises:
        GigamaskError: An argument is invalid.
    """
    if not arguments or arguments[0].startswith("-"):
        known = ", ".join(recipe.__name__ for recipe in recipes.BUILT_IN)
        raise GigamaskError(
            f"{command} needs a recipe ({known}, or file.py:function) as its first argument; "
            f"see 'gigamask {command} --help'"
        )
    config = replace(recipes.make(arguments[0]), recipe=arguments[0])
    return _parse(arguments[1:], config, f"gigamask {command} {arguments[0]}", kind)


def _parse(arguments: Sequence[str], default: TrainConfig, prog: str, kind: Any) -> Any:
    """Parse flags and the files that `--config` names among them."""
    names, others = registry.split_component_flags(arguments)
    files = [read_config(path) for path in config_paths(others)]
    return _parse_with_files(files, names, others, default, prog, kind)


def _parse_with_files(
    files: Sequence[dict[str, Any]],
    names: dict[str, str],
    arguments: list[str],
    default: TrainConfig,
    prog: str,
    kind: Any = RunFlags,
) -> Any:
    """Parse files and then flags, after selecting the components that they name."""
    in_files = {
        name: value
        for content in files
        for name, value in content.items()
        if name in registry.COMPONENTS
    }
    config = registry.select_components(registry.select_components(default, in_files), names)
    # The fields in a file belong to its own component, not to one that a flag selects instead.
    replaced = tuple(
        f"{name}." for name in names if name in in_files and in_files[name] != names[name]
    )
    flags = [
        flag
        for content in files
        for flag in flags_of(
            {name: content[name] for name in content if not name.startswith(replaced)}, config
        )
    ]
    aliases = aliases_of(config)
    return parse(
        kind,
        expand_aliases(flags + arguments, aliases),
        prog,
        kind(config),
        extra_flags=[f"--{name}" for name in (*aliases, *registry.components_of(config))],
    )


def aliases_of(config: TrainConfig) -> dict[str, str]:
    """Return the short names of a configuration's flags, each with its flag."""
    known = flatten_config(config)
    return {alias: flag for alias, flags in ALIASES.items() for flag in flags if flag in known}


def expand_aliases(arguments: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Replace short names of flags.

    Args:
        arguments: Flags and their values.
        aliases: Short names and the flags they stand for, without dashes.
    """
    expanded = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        alias = name.removeprefix("--").replace("_", "-")
        known = name.startswith("--") and alias in aliases
        expanded.append(f"--{aliases[alias]}{equals}{value}" if known else argument)
    return expanded


def check_run_folder(config: TrainConfig, allow_data_change: bool) -> dict[str, tuple[Any, Any]]:
    """Check a configuration, and whether it can continue the run in its folder.

    Args:
        config: The configuration.
        allow_data_change: Accept changes of the data or their order.

    Returns:
        The fields that differ from the saved configuration, with saved and new value; empty without
        a checkpoint.

    Raises:
        GigamaskError: A value is invalid, or the run cannot be continued.
    """
    config.check()
    if not config.has_checkpoint:
        return {}
    return check_resume(load_config(config.out), config, allow_data_change)


def config_paths(arguments: Sequence[str]) -> list[str]:
    """Return the values of `--config` among the arguments."""
    paths = []
    for i, argument in enumerate(arguments):
        if argument.startswith("--config="):
            paths.append(argument.split("=", 1)[1])
        elif argument == "--config":
            values = arguments[i + 1 :]
            paths += takewhile(lambda value: not value.startswith("--"), values)
    return paths


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of flags.

    Args:
        path: The file; sections may be nested or dotted.

    Returns:
        Values as text, or lists of texts, by flag name without dashes.

    Raises:
        GigamaskError: The file cannot be read or is not a mapping.
    """
    try:
        # BaseLoader keeps numbers as text, so that 1e-4 is parsed as on the command line.
        content = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); pass a YAML file of flags"
        ) from None
    except yaml.YAMLError as error:
        raise GigamaskError(
            f"{path}: not valid YAML ({' '.join(str(error).split())}); "
            "see a run's config.yaml for an example"
        ) from None
    if not isinstance(content, dict):
        raise GigamaskError(
            f"{path}: has no 'flag: value' lines; see a run's config.yaml for an example"
        )
    return _flatten(content)


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name.replace("_", "-")] = value
    return flat


def flags_of(content: dict[str, Any], default: TrainConfig) -> list[str]:
    """Return the contents of a file as flags.

    Args:
        content: Values by flag name, as `read_config` returns them.
        default: Configuration whose values are left out.
    """
    known = flatten_config(default)
    flags: list[str] = []
    for name, value in content.items():
        if name == "recipe" or name in registry.COMPONENTS:
            continue
        if name in known and to_yaml_text(known[name]) == value:
            continue
        if isinstance(known.get(name), bool) and value in ("true", "false"):
            negated = re.sub(r"([^.]+)$", r"no-\1", name)
            flags.append(f"--{name if value == 'true' else negated}")
        else:
            text = "None" if value in ("null", "") else value
            flags += [f"--{name}", *(value if isinstance(value, list) else [text])]
    return flags


def to_yaml_text(value: Any) -> Any:
    """Return a value as text, or a list of texts, in the form in which YAML reads it back."""
    if isinstance(value, (tuple, list)):
        return [to_yaml_text(item) for item in value]
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def config_yaml(config: TrainConfig) -> str:
    """Return the whole configuration as YAML, one flag per line."""
    return yaml.safe_dump(config_as_text(config), sort_keys=False)


def config_as_text(config: TrainConfig) -> dict[str, Any]:
    """Return the values of the whole configuration by flag, as text."""
    values = {name: to_yaml_text(value) for name, value in flatten_config(config).items()}
    return registry.component_names(config) | values


def recipe_config(name: str) -> dict[str, Any] | None:
    """Return a recipe's configuration by flag, as text; None if the recipe cannot be imported."""
    try:
        return config_as_text(recipes.make(name))
    except GigamaskError:
        return None


def save_config(config: TrainConfig) -> None:
    """Write `config.yaml` to the run folder, and append argv, versions and git revision to
    `origin.jsonl`.
    """
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / CONFIG, config_yaml(config))
    versions = {name: metadata.version(name) for name in ("gigamask", "torch", "numpy")}
    with open(folder / "origin.jsonl", "a") as file:
        file.write(json.dumps({"argv": sys.argv, **versions, "git": git_revision()}) + "\n")


def git_revision() -> str | None:
    """Return the git revision of this source tree, or None outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    folder = Path(__file__).parent
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def load_config(folder: str) -> TrainConfig:
    """Return the configuration saved in a run folder.

    Args:
        folder: The run folder.

    Raises:
        GigamaskError: The folder has no `config.yaml`, or it cannot be read.
    """
    path = Path(folder) / CONFIG
    if not path.exists():
        stages = sorted(Path(folder).glob(f"*/{CONFIG}"), key=os.path.getmtime)
        act = f"pass a run folder, or start a run there with RECIPE --out {folder}"
        if stages:
            act = f"pass one of its runs: {', '.join(str(stage.parent) for stage in stages)}"
        raise GigamaskError(f"{folder}: not a run folder (no {CONFIG}); {act}")
    content = read_config(str(path))
    default = replace(recipes.make(content.get("recipe", "")), recipe=content["recipe"])
    return _parse_with_files([content], {}, [], default, str(path)).run


def config_of_weights(path: str) -> TrainConfig | None:
    """Return the configuration of the run that weights belong to.

    Args:
        path: A run folder, one of its checkpoints, or a file in one.

    Returns:
        The configuration; None for weights that are not in a run folder.
    """
    folders = [Path(path), *Path(path).parents][:4]
    return next(
        (load_config(str(folder)) for folder in folders if (folder / CONFIG).is_file()), None
    )
