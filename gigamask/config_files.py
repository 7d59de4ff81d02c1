"""Training configurations from flags and YAML files, and `config.yaml` in run folders.

A file and the flags of the command line state the same leaves, as text: what they state is merged,
the last value winning, and read once into the dataclasses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml

from gigamask import files, parser, recipes, registry
from gigamask.errors import GigamaskError, check_positive
from gigamask.files import expand_home
from gigamask.launch import with_launchers
from gigamask.parser import FLAT, HIDDEN, Given, Words
from gigamask.serialization import CLASS, decode_yaml, flatten_yaml, read_yaml
from gigamask.training.config import (
    TrainConfig,
    check_resume,
    differences,
    limit_warmup,
    scale_rates,
)

Command = TypeVar("Command")
CONFIG, CHECKPOINTS, LOCK = "config.yaml", "checkpoints", "lock"
LOGS = (".log", ".txt", ".out", ".err", ".sh", ".yaml", ".yml", ".md")
"""Ends of the names of files that a user may put into a run folder before the training starts."""
CHECKSUM = "# written by gigamask; crc32 of the lines below: "
ALIASES = {
    "lr": "optimizer.lr",
    "num-workers": "loader.workers",
    "lora": "lora.rank",
    "classes": "model.class-names",
    "window": "model.pixels.window",
    "percentiles": "model.pixels.percentiles",
    "in-channels": "model.pixels.channels",
}
"""Short names of flags."""
FIRST = (
    *("data", "out", "images", "masks", "init", "steps", "epochs", "batch-size", "optimizer.lr"),
    "resume",
)
"""The flags that `--help` of a recipe begins with."""


def parse_command(kind: type[Command], arguments: Sequence[str], prog: str) -> Command:
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
    kinds = {*kind.__annotations__} & {*registry.kinds()}
    names, words = _take(parser.split(arguments), kinds)
    components = {name: registry.make_component(name, value) for name, value in names.items()}
    return parser.parse_words(kind, words, prog, components)[0]


def _take(words: Sequence[Words], kinds: Collection[str]) -> tuple[dict[str, str], list[Words]]:
    """Return the components that flags choose by kind, and the other flags."""
    names = {flag: (values or [""])[0] for flag, values in words if flag in kinds}
    rest = [("", values[1:]) if flag in kinds else (flag, values) for flag, values in words]
    return names, rest


@dataclass(frozen=True)
class RunFlags:
    """Train this recipe."""

    run: Annotated[TrainConfig, FLAT]
    epochs: float | None = None
    """length of training in epochs instead of --steps; may be a fraction"""
    resume: str | None = None
    """run folder to continue, in place of RECIPE: gigamask train --resume RUN"""
    config: tuple[str, ...] = ()
    """YAML files of flags, whose sections may be nested; the command line overrides them"""
    allow_data_change: bool = False
    """resume even if the data or their order have changed"""
    max_minutes: float | None = None
    """save and stop, with exit code 75 if steps remain, after the step that ends this many minutes
    from the start of the command; run it again to continue"""
    print_config: bool = False
    """print the whole configuration and exit"""
    json: str | None = None
    """write the results to this JSON file"""
    profile: int | None = None
    """number of steps to profile after 3 warm-up steps; results go to OUT/profile
    (docs/profile.md)"""
    keep_warmup: Annotated[bool, HIDDEN] = False
    """whether the warm-up of the learning rate was set, or belongs to a saved run"""

    @property
    def limited(self) -> TrainConfig:
        """The configuration, with a shorter warm-up if it has fewer steps than its recipe."""
        full_steps = 0 if self.keep_warmup else recipes.make(self.run.recipe).steps
        return limit_warmup(self.run, full_steps)


@dataclass(frozen=True)
class StageFlags:
    """Stages to train one after the other."""

    heading: ClassVar[str] = "stages"
    needs_flags: ClassVar = {"mae_steps": "stages", "decoder_steps": "stages"}

    stages: str | None = None
    """stages to train one after the other, each in its own folder in --out: mae,decoder,joint or a
    subset"""
    mae_steps: int | None = None
    """steps of the stage mae; default: those of the MAE recipe for this encoder"""
    decoder_steps: int | None = None
    """steps of the stage decoder; default: 5/90 of --steps"""


@dataclass(frozen=True)
class TrainFlags(StageFlags, RunFlags):
    """Train this recipe, all at once or in stages."""

    strict: bool = False
    """with --images or --masks: end with exit code 2 before training if any of them is left out"""
    fit: str | None = None
    """memory such as 8GB, of the GPU, or of the tensors on a CPU, where Python and torch need half
    a gigabyte more: the plan chooses micro-batch, masks per chunk, activation checkpointing, and
    adapters or a frozen encoder, so that it fits"""


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
    else:
        saved, prog = _recipe(rest, command, recipes.names(command), " or --resume RUN")
        rest = rest[1:]
    if saved.command != command:
        raise GigamaskError(
            f"recipe {saved.recipe} is for 'gigamask {saved.command}', not 'gigamask {command}'"
        )
    flags, given = _parse(rest, saved, prog, kinds[command != "train"])
    if flags.resume is not None:
        raise GigamaskError(
            f"--resume takes the place of the recipe: gigamask {command} --resume {flags.resume}"
        )
    if resuming and os.path.abspath(flags.run.out) != os.path.abspath(folder):
        raise GigamaskError(
            f"--resume {folder} continues in that folder, so leave out --out {flags.run.out}; or "
            f"copy the folder, or begin anew from its weights with --init {folder}"
        )
    flags = replace(flags, run=scale_rates(flags.run, saved, given))
    is_set = any(name.startswith("schedule.warmup") for name in given)
    flags = replace(flags, keep_warmup=resuming or is_set)
    if flags.epochs is not None:
        if "steps" in given and not given["steps"].file:
            raise GigamaskError("--epochs and --steps cannot be combined; give one of them")
        check_positive("--epochs", flags.epochs)
    if not isinstance(flags, TrainFlags):
        return kinds[0](**parser.values_of(flags))
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
        kind: The dataclass of the command; its field `run_planned` holds the configuration.

    Raises:
        GigamaskError: An argument is invalid.
    """
    config, prog = _recipe(arguments, command, recipes.names())
    return _parse(arguments[1:], config, prog, kind, "run_planned")[0]


def _recipe(
    arguments: Sequence[str], command: str, names: Sequence[str], other: str = ""
) -> tuple[TrainConfig, str]:
    """Return the configuration of the recipe that the first argument names, and what was typed."""
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        advised = ", such as compact for photographs of your own" * ("compact" in names)
        raise GigamaskError(
            f"{command} needs a recipe{advised} ({', '.join(names)}, or file.py:function){other} "
            f"as its first argument; see 'gigamask {command} --help'"
        )
    name = arguments[0]
    return replace(recipes.make(name), recipe=name), f"gigamask {command} {name}"


def _parse(
    arguments: Sequence[str],
    config: TrainConfig,
    prog: str,
    kind: type[Command],
    holder: str = "run",
    contents: Sequence[tuple[str, dict[str, Any]]] = (),
) -> tuple[Command, dict[str, Given]]:
    """Return the command of flags and of the files that `--config` names, and what they state.

    Args:
        arguments: The flags.
        config: The configuration that they change.
        prog: The command as typed, for help and errors.
        kind: The dataclass of the command; its field `holder` holds the configuration.
        holder: That field.
        contents: Files that were read already, and what `read_config` returned.
    """
    names, words = _take(parser.split(arguments), registry.kinds())
    if "recipe" in dict(words):
        raise GigamaskError(f"--recipe is no flag: it is the first argument; see '{prog} --help'")
    paths = [path for flag, values in words if flag == "config" for path in values or ["--config"]]
    words = [each for each in words if each[0] != "config"]  # which may be given twice
    files = [*contents, *((path, read_config(path)) for path in paths)]
    config, stated = _choose([*files, ("", names)], config)
    aliases = ALIASES | {kind: kind for kind in registry.components_of(config)}
    return parser.parse_words(kind, words, prog, {holder: config}, stated, aliases, FIRST)


def _choose(
    contents: Sequence[tuple[str, dict[str, Any]]], config: TrainConfig
) -> tuple[TrainConfig, dict[str, Given]]:
    """Merge files and component flags; return the configuration with their components, and the
    values of its other leaves."""
    given: dict[str, Given] = {}
    kinds = registry.kinds()
    for path, content in contents:
        for flag in content.keys() & kinds & given.keys():
            # The fields of a component belong to it alone, not to one that replaces it.
            if given[flag].text != content[flag]:
                given = {
                    name: value for name, value in given.items() if not name.startswith(f"{flag}.")
                }
        stated = {name: Given(text, path) for name, text in content.items() if name != "recipe"}
        # Of a flag's two names, the one that is given last counts.
        given = {name: given[name] for name in given if name not in stated} | stated
    for flag in [name for name in given if name in kinds]:
        chosen = given.pop(flag)
        with _naming(chosen.file):
            if not isinstance(chosen.text, str):
                raise GigamaskError(f"--{flag} needs one name (got {chosen.text})")
            config = registry.select_components(config, {flag: chosen.text})
    return config, given


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Begin the errors about the contents of a file with its path; flags have none."""
    try:
        yield
    except GigamaskError as error:
        raise GigamaskError(f"{path}: {error}" if path else str(error)) from None


def check_run_out(config: TrainConfig) -> None:
    """Check that the run folder is new or a run, and not where the user keeps something else.

    Args:
        config: The configuration, with its data as the user gave them.

    Raises:
        GigamaskError: It is a folder of the data, or holds other files than logs, or a
            configuration that no run wrote.
    """
    out = Path(config.out)
    saved = out / CONFIG
    is_new = not config.has_checkpoint and saved.is_file()
    if is_new and not saved.read_bytes().startswith(CHECKSUM.encode()):
        raise GigamaskError(
            f"{saved}: would be replaced, but no run wrote it; rename it, or give another --out"
        )
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


def check_used(config: TrainConfig) -> None:
    """Check that each value in which a training differs from its recipe has an effect.

    Args:
        config: The training.

    Raises:
        GigamaskError: A value has none.
    """
    try:
        recipe = recipes.make(config.recipe or type(config)())
    except GigamaskError:  # the user's own, which is elsewhere now
        return
    changed = differences(recipe, config)
    for flag, why in config.unused.items():
        if flag in changed:
            _, value = changed[flag]
            raise GigamaskError(
                f"--{flag} {str(value).strip('(,)')}: has no effect, since {why}; leave it out, or "
                "change that"
            )


def may_stay(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry may stay in a folder of runs: a folder, or a log of the user's."""
    return entry.is_dir() or entry.name.endswith(LOGS)


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


def read_config(path: str) -> dict[str, Any]:
    """Read a YAML file of flags, as `serialization.flatten_yaml` returns them.

    Args:
        path: The file; sections may be nested or dotted.

    Raises:
        GigamaskError: The file cannot be read or is not a mapping of flags and their values.
    """
    found = flatten_yaml(read_yaml(path), path)
    return {
        name: _value_of(value) if isinstance(value, str) else [*map(expand_home, value)]
        for name, value in found.items()
    }


def _value_of(text: str) -> str:
    """Return a value of a YAML file: null in one spelling, and the home folder in place of `~/`."""
    return "null" if text in ("~", "Null", "NULL") else expand_home(text)


class _Dumper(yaml.SafeDumper):
    """Writes each value, also a list, in one line, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    tuple,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=True
    ),
)
_Dumper.add_representer(
    float,  # inf as the command line takes it
    lambda dumper, value: (
        dumper.represent_str("inf") if value == float("inf") else dumper.represent_float(value)
    ),
)
_Dumper.add_multi_representer(int, lambda dumper, value: dumper.represent_int(int(value)))


def config_yaml(config: TrainConfig) -> str:
    """Return the whole configuration as YAML: sections nested, values with their types."""
    return yaml.dump(_nested(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _nested(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a configuration as nested mappings; that of a component begins with its class."""
    content: dict[str, Any] = {}
    for name, value in parser.values_of(config).items():
        key = name.replace("_", "-")
        if is_dataclass(value):
            is_component = f"{prefix}{key}" in registry.kinds()
            chosen = registry.name_of_component(f"{prefix}{key}", value) if is_component else None
            value = ({CLASS: chosen} if chosen else {}) | _nested(value, f"{prefix}{key}.")
        content[key] = value
    return content


def config_as_text(config: TrainConfig) -> dict[str, Any]:
    """Return the values of the whole configuration by flag, as text."""
    return flatten_yaml(decode_yaml(config_yaml(config), CONFIG), CONFIG)


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
    nested = read_yaml(path)
    if any("." in key for key in nested):
        raise GigamaskError(f"{path}: was written by an older version, whose runs cannot be read")
    content = flatten_yaml(nested, str(path))
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
        if above := run_folder_of(f"{folder}/step"):
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
    return _parse([], default, prog, RunFlags, contents=[(str(path), content)])[0].run


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
    return load_config(str(folder), trust) if folder else None
