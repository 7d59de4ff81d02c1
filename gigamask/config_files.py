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
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
import yaml

from gigamask import files, recipes, registry
from gigamask.errors import GigamaskError
from gigamask.launch import with_launchers
from gigamask.parser import parse
from gigamask.serialization import read_yaml
from gigamask.suggestions import suggest_flag
from gigamask.training.config import TrainConfig, check_resume, flatten_config, limit_warmup

Command = TypeVar("Command")
CONFIG, CHECKPOINTS, LOCK = "config.yaml", "checkpoints", "lock"
LOGS = (".log", ".txt", ".out", ".err", ".sh", ".yaml", ".yml", ".md")
"""Ends of the names of files that a user may put into a run folder before the training starts."""
CHECKSUM = "# written by gigamask; crc32 of the lines below: "
ALIASES = {
    "lr": ("optimizer.lr",),
    "num-workers": ("loader.workers",),
    "lora": ("lora.rank",),
    "classes": ("model.class-names",),
    "window": ("model.pixels.window",),
    "percentiles": ("model.pixels.percentiles",),
    "in-channels": ("model.pixels.channels",),
}
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
    kinds = set(registry.kinds()) & {leaf.name for leaf in fields(kind)}
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
    keep_warmup: tyro.conf.Suppress[bool] = False
    """whether the warm-up of the learning rate was set, or belongs to a saved run"""

    @property
    def limited(self) -> TrainConfig:
        """The configuration, with a shorter warm-up if it has fewer steps than its recipe."""
        full_steps = 0 if self.keep_warmup else recipes.make(self.run.recipe).steps
        return limit_warmup(self.run, full_steps)


@dataclass(frozen=True)
class TrainFlags(RunFlags):
    """Train this recipe, all at once or in stages."""

    strict: bool = False
    """with --images or --masks: end with exit code 2 before training if any of them is left out"""
    stages: str | None = None
    """stages to train one after the other, each in its own folder in --out: mae,decoder,joint or a
    subset"""
    mae_steps: int | None = None
    """steps of the stage mae; default: those of the MAE recipe for this encoder"""
    decoder_steps: int | None = None
    """steps of the stage decoder; default: 5/90 of --steps"""
    fit: str | None = None
    """memory of the GPU, or of the process on a CPU, such as 8GB: the plan chooses micro-batch,
    masks per chunk, activation checkpointing, and adapters or a frozen encoder, so that it fits"""


def parse_train(arguments: Sequence[str], command: str = "train") -> TrainFlags:
    """Parse the arguments of a command that trains.

    Args:
        arguments: `RECIPE` or `--resume RUN`, and flags.
        command: "train", "pretrain", "distill" or "ground train".

    Returns:
        The flags; with `--resume`, they default to the values in the run folder.

    Raises:
        GigamaskError: An argument is invalid, the folder is not a run folder, or the recipe is for
            another command.
    """
    kinds = [with_launchers(kind, "training") for kind in (TrainFlags, RunFlags)]
    rest, folder = list(arguments), ""
    resuming = rest[:1] == ["--resume"]
    if resuming:
        if len(rest) < 2:
            raise GigamaskError(f"--resume needs a run folder; see 'gigamask {command} --help'")
        folder = rest[1]
        saved, prog = load_config(folder, trust=True), f"gigamask {command} --resume {folder}"
        if os.path.abspath(saved.out) != os.path.abspath(folder):  # moved or copied since
            saved = replace(saved, out=folder)
        rest = rest[2:]
    elif rest and not rest[0].startswith("-"):
        saved, prog = recipes.make(rest[0]), f"gigamask {command} {rest[0]}"
        saved, rest = replace(saved, recipe=rest[0]), rest[1:]
    else:
        known = ", ".join(recipes.names(command))
        raise GigamaskError(
            f"{command} needs a recipe ({known}, or file.py:function) or --resume RUN as its first "
            f"argument; see 'gigamask {command} --help'"
        )
    if saved.command != command:
        raise GigamaskError(
            f"recipe {saved.recipe} is for 'gigamask {saved.command}', not 'gigamask {command}'"
        )
    flags = _parse(rest, saved, prog, kinds[command != "train"])
    given = [word for path in config_paths(rest) for word in flags_of(read_config(path), saved)]
    is_set = any(word.startswith("--schedule.warmup") for word in [*rest, *given])
    flags = replace(flags, keep_warmup=resuming or is_set)
    if flags.epochs is not None:
        if any(word.partition("=")[0] == "--steps" for word in rest):
            raise GigamaskError("--epochs and --steps cannot be combined; give one of them")
        if not 0 < flags.epochs < math.inf:
            raise GigamaskError(f"--epochs must be > 0 and finite (got {flags.epochs})")
    if not isinstance(flags, TrainFlags):
        return kinds[0](**{leaf.name: getattr(flags, leaf.name) for leaf in fields(flags)})
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
        known = ", ".join(recipes.names())
        raise GigamaskError(
            f"{command} needs a recipe ({known}, or file.py:function) as its first argument; "
            f"see 'gigamask {command} --help'"
        )
    config = replace(recipes.make(arguments[0]), recipe=arguments[0])
    return _parse(arguments[1:], config, f"gigamask {command} {arguments[0]}", kind)


def _parse(arguments: Sequence[str], default: TrainConfig, prog: str, kind: Any) -> Any:
    """Parse flags and the files that `--config` names among them."""
    names, others = registry.split_component_flags(arguments)
    files = [(path, read_config(path)) for path in config_paths(others)]
    return _parse_with_files(files, names, others, default, prog, kind)


def _parse_with_files(
    files: Sequence[tuple[str, dict[str, Any]]],
    names: dict[str, str],
    arguments: list[str],
    default: TrainConfig,
    prog: str,
    kind: Any = RunFlags,
) -> Any:
    """Parse files and then flags, after selecting the components that they name.

    Errors in a file name it.
    """
    chosen: dict[str, tuple[Any, str]] = {}
    contents: list[dict[str, Any]] = []
    for path, content in [*files, ("", names)]:
        own = {flag: (content[flag], path) for flag in content if flag in registry.kinds()}
        # The fields of a component belong to it alone, not to one that replaces it.
        replaced = tuple(
            f"{flag}." for flag in own if flag in chosen and own[flag][0] != chosen[flag][0]
        )
        contents = [
            {flag: value for flag, value in earlier.items() if not flag.startswith(replaced)}
            for earlier in contents
        ]
        contents.append(content)
        chosen |= own
    config = default
    for flag, (name, path) in chosen.items():
        with _naming(path):
            if not isinstance(name, str):
                raise GigamaskError(f"--{flag} needs one name (got {name})")
            config = registry.select_components(config, {flag: name})
    aliases = aliases_of(config)
    extra_flags = [f"--{name}" for name in (*aliases, *registry.components_of(config))]
    from_files = []
    for (path, _), content in zip(files, contents, strict=False):
        with _naming(path):
            _check_known(content, config, kind)
        from_files.append(expand_aliases(flags_of(content, config), aliases))
    flags = [flag for words in from_files for flag in words]
    try:
        words = flags + yaml_values(expand_aliases(arguments, aliases), config, kind)
        return parse(kind, words, prog, kind(config), extra_flags)
    except GigamaskError:
        for (path, _), words in zip(files, from_files, strict=True):
            with _naming(path):
                parse(kind, words, prog, kind(config), extra_flags)
        raise


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Begin the errors about the contents of a file with its path; flags have none."""
    try:
        yield
    except GigamaskError as error:
        raise GigamaskError(f"{path}: {error}" if path else str(error)) from None


def _check_known(content: dict[str, Any], config: TrainConfig, kind: Any) -> None:
    """Raise `GigamaskError` if a file has a key that is not a flag, such as `help`."""
    known = {*flatten_config(config), *aliases_of(config), *registry.kinds()}
    known |= {leaf.name.replace("_", "-") for leaf in fields(kind)}
    for name in content.keys() - known:
        near = suggest_flag(f"--{name}", {f"--{flag}" for flag in known}, ())
        raise GigamaskError(
            f"unknown flag --{name}" + (f"; perhaps you meant {near}" if near else "")
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


def yaml_values(arguments: Sequence[str], config: TrainConfig, kind: Any) -> list[str]:
    """Replace values as config.yaml writes them, such as null, true and [], by those of flags.

    Args:
        arguments: Flags and their values.
        config: The configuration that they change.
        kind: The dataclass of the command.
    """
    known, types = flatten_config(config), {**types_of(config), **types_of(kind)}
    words: list[str] = []
    for argument in arguments:
        given, equals, value = argument.partition("=")
        is_flag = given.startswith("--")
        if not is_flag and words and words[-1].startswith("--") and "=" not in words[-1]:
            given, value = words.pop(), argument
        elif not (is_flag and equals):
            words.append(argument)
            continue
        name = given[2:].replace("_", "-")
        if isinstance(known.get(name), bool) and value in ("true", "false"):
            negated = re.sub(r"([^.]+)$", r"no-\1", name)
            words.append(f"--{name if value == 'true' else negated}")
        elif "None" in types.get(name, "") and value.lower() in ("null", "none"):
            words += [given, "None"]
        elif isinstance(known.get(name), tuple) and value == "[]":
            words.append(given)
        else:
            words += [argument] if equals and is_flag else [given, argument]
    return words


def types_of(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the types of a configuration's fields by flag name without dashes, as text.

    Args:
        config: A dataclass, or an object of one, whose sections are included.
        prefix: Prepended to each name.
    """
    types: dict[str, str] = {}
    for leaf in fields(config):
        name, value = prefix + leaf.name.replace("_", "-"), getattr(config, leaf.name, None)
        is_section = is_dataclass(value) and not isinstance(value, type)
        types |= types_of(value, name + ".") if is_section else {name: str(leaf.type)}
    return types


def check_run_out(config: TrainConfig) -> None:
    """Check that the run folder is new or a run, and not where the user keeps something else.

    Args:
        config: The configuration, with its data as the user gave them.

    Raises:
        GigamaskError: It is a folder of the data, or holds other files than logs.
    """
    out = Path(config.out)
    if any((out / name).exists() for name in (CONFIG, LOCK)):
        return
    own = [getattr(config, name, None) for name in ("images", "masks")]
    evaluation = getattr(config.evaluation, "data", ())
    for path in [*config.data, *evaluation, *(path for path in own if path)]:
        if os.path.realpath(path) == os.path.realpath(out):
            raise GigamaskError(
                f"--out {out}: is a folder that the training reads, and would be written into; "
                "give a new folder, such as --out runs/mine"
            )
    files.check_out(out, "a run folder", may_stay)


def may_stay(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry may stay in a folder of runs: a folder, or a log of the user's."""
    return entry.is_dir() or entry.name.startswith(".") or entry.name.endswith(LOGS)


def check_run_folder(config: TrainConfig, allow_data_change: bool) -> dict[str, tuple[Any, Any]]:
    """Check a configuration, and whether it can continue the run in its folder.

    Args:
        config: The configuration.
        allow_data_change: Accept changes of the data or their order.

    Returns:
        The fields that differ from the saved configuration, with saved and new value; empty without
        a checkpoint, or with a warning if the saved configuration is damaged.

    Raises:
        GigamaskError: A value is invalid, or the run cannot be continued.
    """
    config.check()
    saved = config_to_resume(config)
    if saved is None:
        return {}
    if config.micro_batch_size is None:  # the run keeps the one it began with
        config = replace(config, micro_batch_size=saved.micro_batch_size)
    return check_resume(saved, config, allow_data_change)


def config_to_resume(config: TrainConfig) -> TrainConfig | None:
    """Return the configuration that a run with checkpoints began with.

    Args:
        config: The configuration to train.

    Returns:
        The saved configuration; None without a checkpoint, or with a warning if it is damaged.
    """
    if not config.has_checkpoint or read_saved(config.out) is None:
        return None
    return load_config(config.out, trust=True)


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
        GigamaskError: The file cannot be read or is not a mapping of flags and their values.
    """
    content = read_yaml(path)
    with _naming(path):
        return _flatten(content)


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
            continue
        words = value if isinstance(value, list) else [value]
        # A word that starts with a dash would be parsed as another flag.
        if wrong := [w for w in words if not isinstance(w, str) or re.match(r"-[^\d.]", w)]:
            raise GigamaskError(f"{name} must be a value or a list of values (got {wrong[0]!r})")
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
        if name == "recipe" or name in registry.kinds():
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


def recipe_config(name: Any, trust: bool = False) -> dict[str, Any] | None:
    """Return the configuration of a run's recipe by flag, as text.

    Args:
        name: The recipe, as the run folder names it.
        trust: Whether to run a recipe that is not built in.

    Returns:
        The configuration; None if the recipe cannot be read or is not trusted.
    """
    if not isinstance(name, str) or (not trust and own_code({"recipe": name})):
        return None
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
    text = config_yaml(config)
    files.write_text(folder / CONFIG, f"{CHECKSUM}{zlib.crc32(text.encode()):08x}\n{text}")
    versions = {name: metadata.version(name) for name in ("gigamask", "torch", "numpy")}
    with open(folder / "origin.jsonl", "ab+") as file:
        is_partial = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        line = json.dumps({"argv": sys.argv, **versions, "git": git_revision()})
        file.write(b"\n" * bool(is_partial) + line.encode() + b"\n")


def git_revision() -> str | None:
    """Return the git revision of this source tree, or None outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    folder = Path(__file__).parent
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def own_code(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe and the components that are not built in, by flag.

    Args:
        content: A configuration, as `read_config` returns it.
    """
    built_in = {kind: registry.names(kind) for kind in registry.kinds()}
    built_in["recipe"] = recipes.names()
    return {flag: name for flag, name in content.items() if name not in built_in.get(flag, [name])}


def read_saved(folder: str) -> dict[str, Any] | None:
    """Return the configuration saved in a folder that a training command is given again.

    Args:
        folder: The run folder.

    Returns:
        Values as `read_config` returns them; None, with a warning, if they cannot be read: the
        command states the whole configuration.
    """
    try:
        return read_run_config(folder)
    except GigamaskError as error:
        warnings.warn(f"{error}; it is written again from this command", stacklevel=2)
        return None


def read_run_config(folder: str) -> dict[str, Any]:
    """Read the `config.yaml` of a run folder; `GigamaskError` if it is missing or damaged."""
    path = Path(folder) / CONFIG
    content = read_config(str(path))
    if not isinstance(content.get("recipe"), str):
        raise GigamaskError(f"{path}: names no recipe")
    first, _, text = path.read_bytes().partition(b"\n")
    written = first.decode(errors="replace").removeprefix(CHECKSUM)
    if len(written) == 8 and written != f"{zlib.crc32(text):08x}":
        warnings.warn(f"{path}: was edited or damaged; check its values", stacklevel=2)
    return content


def load_config(folder: str, trust: bool = False) -> TrainConfig:
    """Return the configuration saved in a run folder.

    Args:
        folder: The run folder.
        trust: Whether to import a recipe or components that are not built in.

    Raises:
        GigamaskError: The folder has no `config.yaml`, it cannot be read, or it names code that is
            not built in and not trusted.
    """
    path = Path(folder) / CONFIG
    if not path.exists():
        stages = sorted(Path(folder).glob(f"*/{CONFIG}"), key=os.path.getmtime)
        act = f"pass a run folder, or start a run there with RECIPE --out {folder}"
        if (above := run_folder_of(f"{folder}/step")) is not None:
            act = f"pass {above}"
        if stages:
            act = f"pass one of its runs: {', '.join(str(stage.parent) for stage in stages)}"
        what = (
            f"not a run folder (no {CONFIG})"
            if path.parent.exists()
            else f"no such folder{files.relative_to(folder)}"
        )
        raise GigamaskError(f"{folder}: {what}; {act}")
    try:
        content = read_run_config(folder)
    except GigamaskError as error:
        raise GigamaskError(
            f"{error}; give the command that started the run again, which writes it, or restore it"
        ) from None
    if not trust and (own := own_code(content)):
        flag, name = next(iter(own.items()))
        raise GigamaskError(
            f"{path}: {flag} is {name}, which is not built in; if you trust its code, run it with "
            "--trust (in Python: trust=True)"
        )
    with _naming(str(path)):
        default = replace(recipes.make(content["recipe"]), recipe=content["recipe"])
    prog = f"gigamask {default.command} {default.recipe}"
    return _parse_with_files([(str(path), content)], {}, [], default, prog).run


def run_folder_of(path: str) -> Path | None:
    """Return the run folder that weights belong to.

    Args:
        path: A run folder, one of its checkpoints, or a file in one.

    Returns:
        The folder; None for weights that are not in a run folder.
    """
    above = [each.parent for each in Path(path).absolute().parents[:2] if each.name == CHECKPOINTS]
    return next((folder for folder in (Path(path), *above) if (folder / CONFIG).is_file()), None)


def config_of_weights(path: str, trust: bool = False) -> TrainConfig | None:
    """Return the configuration of the run that weights belong to.

    Args:
        path: A run folder, one of its checkpoints, or a file in one.
        trust: Whether to import components that are not built in.

    Returns:
        The configuration; None for weights that are not in a run folder.
    """
    folder = run_folder_of(path)
    return None if folder is None else load_config(str(folder), trust)
