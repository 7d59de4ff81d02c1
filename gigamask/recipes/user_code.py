"""Custom functions and classes by name: `file.py:Name`, `package.module:Name`, or an entry point.

An installed package offers its components as entry points of the group `gigamask.components`. An
entry point's name is the flag without its dashes, a dot, and the value to pass to the flag:

    [project.entry-points."gigamask.components"]
    "sampler.large_first" = "my_package.samplers:LargeFirst"
    "loader.mask-sampler.largest" = "my_package.masks:Largest"
    "recipe.mine" = "my_package.recipes:mine"

Then `gigamask train mine --sampler large_first --loader.mask-sampler largest` works.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.files import relative_to

GROUP = "gigamask.components"
_IMPORTING: list[Path] = []


def find_object(name: str) -> Any:
    """Return the object that `file.py:Name` or `package.module:Name` refers to.

    Args:
        name: File or module, colon, and name of the object.

    Returns:
        The object; None if the file or module has no object of that name.

    Raises:
        GigamaskError: The file or module cannot be imported.
    """
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py") or os.sep in module
    return getattr(load_file(module) if is_file else load_module(module), attribute, None)


def name_of_class(kind: type) -> str:
    """Return the name by which `find_object` finds a class.

    Raises:
        GigamaskError: It was defined at a prompt or in a notebook, where nothing can find it.
    """
    module = sys.modules.get(kind.__module__)
    is_importable = module is not None and getattr(module.__spec__, "name", None) == kind.__module__
    if is_importable and not getattr(module, "_gigamask_file", False):
        return f"{kind.__module__}:{kind.__qualname__}"
    try:
        return f"{os.path.abspath(inspect.getfile(kind))}:{kind.__qualname__}"
    except (OSError, TypeError):
        raise GigamaskError(
            f"{kind.__qualname__}: a run cannot find what is defined at a prompt or in a notebook "
            "when it is resumed; put it into a .py file, and import it"
        ) from None


def describe_error(error: BaseException) -> str | None:
    """Return one line about an exception from code that is not gigamask's.

    Args:
        error: The exception.

    Returns:
        File, line, class, method and the exception; the exception and the components of the
        user's own, if gigamask's code raised it where they are used; None where there are none.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("cls", type(frame.f_locals.get("self")))
        names = [base.__module__ for base in getattr(owner, "__mro__", ())]
        module = frame.f_globals.get("__name__", "")
        is_component = any(name.startswith("gigamask.") for name in names)
        is_component |= module.partition(".")[0] in plugin.packages()
        is_own = not module.startswith("gigamask.")
        if "_gigamask_file" in frame.f_globals or (is_component and is_own):
            place = f"{frame.f_code.co_filename}:{line}: {frame.f_code.co_qualname}"
            given = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            shapes = [each for name in given for each in _shapes(name, frame.f_locals.get(name))]
            got = f" (it was given {', '.join(shapes)})" if shapes else ""
            raised = f"raised {_reason(error)}{got}"
            return f"{place} {raised}; this code is your own, its traceback follows"
    # A loader process sends its traceback as text.
    modules = [vars(module) for module in list(sys.modules.values()) if module]
    files = {names["__file__"] for names in modules if "_gigamask_file" in names}
    for path, line, name in reversed(re.findall(r'File "(.+)", line (\d+), in (\S+)', str(error))):
        if path in files:
            reason = str(error).strip().splitlines()[-1]
            place = f"{path}:{line}: {name}"
            return f"{place} raised {reason}; this code is your own, its traceback follows"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = _own_components(frame.f_locals.get("config"))
        if names and "memory" not in (reason := _reason(error)).lower():
            return (
                f"{reason}; perhaps a method of your own {' or '.join(names)} returns "
                "another type or shape than docs/extend.md says; the traceback follows"
            )
    return None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _own_components(config: Any) -> list[str]:
    """Return the classes of a configuration's components that are not gigamask's."""
    parts = [part for part in getattr(config, "__dict__", {}).values() if is_dataclass(part)]
    own = [type(part) for part in parts if not type(part).__module__.startswith("gigamask.")]
    inner = [name for part in parts for name in _own_components(part)]
    return [*(kind.__qualname__ for kind in own), *inner]


def entry_points(kind: str) -> dict[str, metadata.EntryPoint]:
    """Return the installed components of a kind (a flag such as `sampler`, or `recipe`) by name."""
    points = metadata.entry_points(group=GROUP)
    by_name = {point.name.removeprefix(f"{kind}."): point for point in points}
    return {
        name: point
        for name, point in by_name.items()
        if f"{kind}.{name}" == point.name and "." not in name
    }


def load_entry_point(point: metadata.EntryPoint) -> Any:
    """Return the object of an entry point.

    Raises:
        GigamaskError: It cannot be imported.
    """
    try:
        return point.load()
    except GigamaskError:
        raise
    except Exception as error:
        raise GigamaskError(
            f"entry point {point.name} = {point.value} ({GROUP}) raised "
            f"{type(error).__name__}: {error}; repair the package"
        ) from error


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name.

    Raises:
        GigamaskError: There is no such module, or importing it raises.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise GigamaskError(
                f"{name}: no such module; install its package, set PYTHONPATH, or pass a file: "
                "file.py:Name"
            ) from None
        raise GigamaskError(f"{name}: importing it raised ModuleNotFoundError: {error}") from error
    except Exception as error:
        raise GigamaskError(
            f"{name}: importing it raised {type(error).__name__}: {error}"
        ) from error


def load_file(name: str) -> ModuleType:
    """Import a file once, under its stem, so that workers find its classes by the same name.

    If that is another module's name, such as `random`, it gets one of its own. The script that runs
    is not imported again.

    Raises:
        GigamaskError: There is no such file, or importing it raises.
    """
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise GigamaskError(
            f"{path}: no such Python file{relative_to(path)}; pass one before the colon, as in "
            "mine.py:name"
        )
    own = f"{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    for loaded in map(sys.modules.get, (path.stem, own, "__main__")):
        file = getattr(loaded, "__file__", None)
        if loaded and file and Path(file).resolve() == path.resolve():
            return loaded
    name = own if _is_taken(path) else path.stem
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module._gigamask_file = True  # pyrefly: ignore[missing-attribute]
    sys.modules[name] = module
    _IMPORTING.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)  # so that it is read again once it is repaired
        if not isinstance(error, Exception):  # as Ctrl-C
            raise
        raise GigamaskError(
            f"{path}: importing it raised {type(error).__name__}: {error}"
        ) from error
    finally:
        _IMPORTING.remove(path)
    return module


def _is_taken(path: Path) -> bool:
    """Return whether the stem of a file is the name of another module, imported or installed."""
    if path.stem in sys.modules:
        return True
    with suppress(ImportError, ValueError):
        origin = getattr(importlib.util.find_spec(path.stem), "origin", None)
        return bool(origin) and Path(origin).resolve() != path.resolve()
    return False


def check_no_import() -> None:
    """Check that no file of the user's is being imported, as by the processes of a training.

    Raises:
        GigamaskError: One is, so it does at its import what is for its run alone.
    """
    if _IMPORTING:
        raise GigamaskError(
            "it trains when it is imported, as processes of a training do to find its classes; put "
            "what it does below 'if __name__ == \"__main__\":'"
        )


def _shapes(name: str, value: Any) -> Iterator[str]:
    """Yield the names and shapes of the arrays in an argument, such as "logits [8, 3]"."""
    if hasattr(value, "shape"):
        yield f"{name} {list(value.shape)}"
    for inner, each in getattr(value, "__dict__", {}).items() if name.count(".") < 2 else ():
        yield from _shapes(f"{name}.{inner}", each)
