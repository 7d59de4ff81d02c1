"""Recipes: functions that return a `TrainConfig` and document command, hardware and sources.

A recipe is chosen by name (`tiny`), a custom one as `file.py:function`, `package.module:function`
or an entry point (`recipes.user_code`). A subclass of `TrainConfig` whose fields all have defaults
is a recipe, too.
"""

import difflib
import os
from collections.abc import Callable, Mapping

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.plugin import References
from gigamask.training.config import ImageTrainConfig, TrainConfig
from gigamask.training.sam_config import SamTrainConfig


def _of(module: str, *names: str) -> References:
    """Return the references of recipes of a module by name."""
    return {name: f"{__name__}.{module}:{name}" for name in names}


CORE: Mapping[str, References] = {
    "train": {
        **_of("sam", "tiny"),
        **_of("photographs", "photos", "compact"),
        **_of("sam", "sam_vit_s", "sam_vit_b", "sam_vit_l", "sam_vit_h"),
        **_of("mixed", "mixed_prompts"),
        **_of("sam", "one_gpu", "finetune", "finetune_vit_l", "finetune_vit_h", "finetune_laptop"),
    },
    "pretrain": _of("mae", "mae_tiny", "mae_vit_b", "mae_vit_l", "mae_vit_h"),
}
"""The recipes of the core by training command."""


def commands() -> list[str]:
    """Return the commands that train recipes, those of plugins last."""
    return [*CORE, *(name for name in plugin.merged("recipes") if name not in CORE)]


def names(command: str | None = None) -> list[str]:
    """Return the names of the recipes of a training command, those of plugins last; None: of all.

    Args:
        command: The command, such as "train".
    """
    return list(_references(command))


def built_in(command: str | None = None) -> list[Callable[[], TrainConfig]]:
    """Return the recipes of a training command, those of plugins last; None: of all.

    Args:
        command: The command, such as "train".
    """
    return [find(name) for name in names(command)]


def format_recipes(command: str | None = None) -> str:
    """Return a line for each recipe of a training command: its name and what its docstring says.

    Args:
        command: The command, such as "train"; None: recipes of all.
    """
    return "\n".join(
        f"  {recipe.__name__:15} {(recipe.__doc__ or '-').strip().splitlines()[0]}"
        for recipe in built_in(command)
    )


def find(name: str) -> Callable[[], TrainConfig]:
    """Return a recipe by name, built-in or custom.

    Raises:
        GigamaskError: There is no such recipe, or its file or module cannot be imported.
    """
    if name in (known := _references()):
        return plugin.load(known[name])
    from gigamask.models.weight_paths import STARTER
    from gigamask.recipes.user_code import entry_points, find_object, load_entry_point

    path, colon, function = name.rpartition(":")
    if not colon:
        installed = entry_points("recipe")
        if name not in installed:
            known = [*names(), *installed]
            near = difflib.get_close_matches(name, known, 1)
            raise GigamaskError(
                f"unknown recipe {name!r}; "
                + (f"to resume a run: --resume {name}; " if os.path.isdir(name) else "")
                + (f"to start from weights: compact --init {name}; " if name == STARTER else "")
                + (f"perhaps you meant {near[0]}; " if near else "")
                + f"choose from {', '.join(known)}, or file.py:function for your own"
            )
        recipe = load_entry_point(installed[name])
    else:
        recipe = find_object(name)
    if not callable(recipe):
        raise GigamaskError(
            f"{path or name} has no function {function!r}; write one that returns a "
            f"{_name(SamTrainConfig)}"
        )
    return recipe


def __getattr__(name: str) -> Callable[[], TrainConfig]:
    """Return a recipe by name."""
    if name in (known := _references()):
        return plugin.load(known[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _references(command: str | None = None) -> dict[str, str]:
    """Return the references of the recipes of a training command by name; None: of all."""
    return {
        name: reference
        for each in (commands() if command is None else [command])
        for of_command in (CORE, plugin.merged("recipes", CORE))
        for name, reference in of_command.get(each, {}).items()
    }


def make(name: str | TrainConfig | Callable[[], TrainConfig]) -> TrainConfig:
    """Return the configuration of a recipe or of its name; a configuration is returned as it is.

    Raises:
        GigamaskError: There is no such recipe, or a custom one fails or returns something else.
    """
    if isinstance(name, TrainConfig):
        return name
    recipe = find(name) if isinstance(name, str) else name
    if not callable(recipe):
        raise GigamaskError(f"a recipe, its name or a configuration is needed (got {name!r})")
    try:
        config = recipe()
    except GigamaskError:
        raise
    except Exception as error:
        raise GigamaskError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(config, TrainConfig):
        raise GigamaskError(
            f"{name} must return a {_name(SamTrainConfig)} or another {_name(TrainConfig)} "
            f"(got {type(config).__name__})"
        )
    return config


def _name(config: type) -> str:
    return f"{config.__module__}.{config.__name__}"


def require_images(config: TrainConfig) -> ImageTrainConfig:
    """Check that a configuration trains on images, and return it.

    Raises:
        GigamaskError: It trains on queries.
    """
    if not isinstance(config, ImageTrainConfig):
        raise GigamaskError(
            f"recipe {config.recipe} trains on queries, not images; "
            "use a recipe of 'gigamask train' or 'gigamask pretrain'"
        )
    return config
