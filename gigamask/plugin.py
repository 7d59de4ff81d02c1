"""What a plugin adds to gigamask, and which plugins are installed.

A plugin is a package with a record of what it adds. Nothing that the record names is imported
before it is used: each reference is `package.module:attribute`. An installed package states where
the record is as an entry point, and gigamask's own plugins do the same:

    [project.entry-points."gigamask.plugins"]
    geojson = "my_package:PLUGIN"
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError

GROUP = "gigamask.plugins"
References = Mapping[str, str]
"""References, `package.module:attribute`, by the name that a user types."""
MISSING = "gigamask's plugin {}, which is not installed"
"""How an error names a plugin."""


@dataclass(frozen=True)
class Plugin:
    """What a plugin adds; each value is a reference.

    Attributes:
        name: Its name.
        commands: The class of each command; its module may have a function `parse`.
        trainings: The line in `gigamask --help` of each command that trains recipes; "" for a
            command of two words, which has none.
        recipes: The recipes of each command that trains.
        components: The components of each kind, such as `sampler`: a frozen dataclass or a
            `registry.Preset`.
        interfaces: The base class of each kind of component that the core does not have.
        model_configs: The configuration, a `models.configs.ModelConfig`, of each kind of model
            that a file of weights states.
        model_families: The `models.families.ModelFamily` of published models by name.
        weight_folders: Functions that read a folder of weights in another format, by the name of
            the file that such a folder has. They take a function that returns the folder with files
            of given names, and return the weights and their configuration, or None.
        exporters: The `export.formats.ExportFormat` of each `gigamask export --to`.
        readers: The `datatools.sources.Source` of each format of annotations; it is asked whether
            annotations are in this format once those of the core have said that they are not in
            theirs; a JSON file that begins otherwise than COCO's is nobody's then.
        writers: The `datatools.export_formats.Writer` of each format of annotations.
        launchers: The dataclass of flags that run a "training" or a command of "parts" elsewhere,
            with `is_elsewhere` and a context manager `launch(name, arguments, out)`, which yields
            the command that is left to run here, or None.
        functions: Functions of the Python API, such as `gigamask.NAME`.
        scenes: The function that draws the scenes of each `gigamask synth --kind`, a
            `synthetic.scenes.SyntheticScene` from a seed, its number and `long_side`.
        text_predictors: Functions that open an `inference.text_predictor.TextPredictor`.
    """

    name: str
    commands: References = field(default_factory=dict)
    trainings: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[str, References] = field(default_factory=dict)
    components: Mapping[str, References] = field(default_factory=dict)
    interfaces: References = field(default_factory=dict)
    model_configs: References = field(default_factory=dict)
    model_families: References = field(default_factory=dict)
    weight_folders: References = field(default_factory=dict)
    exporters: References = field(default_factory=dict)
    readers: References = field(default_factory=dict)
    writers: References = field(default_factory=dict)
    launchers: References = field(default_factory=dict)
    functions: References = field(default_factory=dict)
    scenes: References = field(default_factory=dict)
    text_predictors: References = field(default_factory=dict)


@cache
def installed() -> tuple[Plugin, ...]:
    """Return the records of all installed plugins; one that cannot be read is a warning."""
    found = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            record = point.load()
            if not isinstance(record, Plugin):
                raise TypeError(f"it must be a {__name__}.Plugin (got {type(record).__name__})")
            found.append(record)
        except (Exception, SystemExit) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing == point.module and point.module.startswith("gigamask."):
                continue  # its folder was deleted
            warnings.warn(
                f"plugin {point.name} = {point.value} raised {type(error).__name__}: {error}; it "
                "is left out: repair or uninstall its package",
                stacklevel=2,
            )
    return tuple(found)


def merged(what: str, core: Collection[str] = ()) -> dict[str, Any]:
    """Return what all plugins add of a kind, by name; a name that is taken is a warning.

    Args:
        what: Name of a field of `Plugin`; mappings below a name are merged, too.
        core: Names of the core, which no plugin can take, or the core's mapping.
    """
    found: dict[str, Any] = {}
    values = core if isinstance(core, Mapping) else dict.fromkeys(core)
    owners: dict[tuple[str, ...], str] = {
        place: "gigamask itself" for name in values for place in _places(name, values[name])
    }
    for plugin in installed():
        for name, value in getattr(plugin, what).items():
            nested, places = isinstance(value, Mapping), _places(name, value)
            taken = {place[-1] for place in places if place in owners}
            for place in places:
                if place in owners:
                    _warn_of_taken(plugin.name, what, place[-1], owners[place])
                else:
                    owners[place] = f"plugin {plugin.name}"
            if nested:
                added = {each: value[each] for each in value if each not in taken}
                found[name] = {**found.get(name, {}), **added}
            elif not taken:
                found[name] = value
    return found


def _places(name: str, value: Any) -> list[tuple[str, ...]]:
    """Return the path of a name, or those of the names below it."""
    return [(name, each) for each in value] if isinstance(value, Mapping) else [(name,)]


@cache
def _warn_of_taken(plugin: str, what: str, name: str, owner: str) -> None:
    """Warn once that a plugin adds a name that is taken."""
    warnings.warn(
        f"plugin {plugin} adds {name} to {what}, which {owner} has already; that of {plugin} is "
        "left out: rename it, or uninstall one of them",
        stacklevel=3,
    )


def load(reference: str) -> Any:
    """Import and return what a reference names.

    Args:
        reference: `package.module:attribute`.

    Raises:
        GigamaskError: It is a plugin's, and cannot be imported.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except GigamaskError:
        raise
    except Exception as error:
        owners = [each.name for each in installed() if reference in references(each)]
        if not owners:
            raise
        raise GigamaskError(
            f"plugin {owners[0]}: {reference} raised {type(error).__name__}: {error}; repair or "
            "uninstall its package"
        ) from error


def load_all(what: str, core: Collection[str] = ()) -> Iterator[Any]:
    """Import and yield what all plugins add of a kind; what cannot be imported is a warning.

    Args:
        what: Name of a field of `Plugin`.
        core: Names of the core, which no plugin can take.
    """
    for each in merged(what, core).values():
        try:
            yield load(each)
        except GigamaskError as error:
            warnings.warn(str(error), stacklevel=2)


def references(record: Plugin) -> Iterator[str]:
    """Yield all references of a record."""
    pending: list[Any] = list(vars(record).values())
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif ":" in value and " " not in value:  # neither a name nor a line of help
            yield value


def packages() -> set[str]:
    """Return the top-level packages of the references of strangers' plugins."""
    found = {
        each.partition(":")[0].partition(".")[0] for p in installed() for each in references(p)
    }
    return found - {"gigamask"}


def expect(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Return what a component or plugin returned, if it is of the right type.

    Args:
        value: What was returned.
        kind: The type, or the types.
        what: What returned it, such as "mine.formats:Stacks.listing".

    Raises:
        GigamaskError: It has another type.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(each.__name__.replace("NoneType", "None") for each in kinds)
        raise GigamaskError(f"{what} must return {names} (got {type(value).__name__})")
    return value


def reference(kind: type) -> str:
    """Return the reference of a class.

    Args:
        kind: The class.
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def docstring(reference: str) -> str:
    """Return the docstring of a class or function, read without importing its module.

    Args:
        reference: `package.module:attribute`.
    """
    module, _, attribute = reference.partition(":")
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    nodes = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    kinds = ast.ClassDef | ast.FunctionDef
    named = (node for node in nodes if isinstance(node, kinds) and node.name == attribute)
    return next((ast.get_docstring(node) or "" for node in named), "")
