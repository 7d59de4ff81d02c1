"""Recipes: Python functions that return a `TrainConfig`; each docstring states command, hardware, hours and the source of each number.

A recipe is chosen by name (`tiny`) or, for one of the user's own, as `file.py:function`, `package.module:function` or an entry point
(`recipes.user_code`); a configuration class of the user's own, a subclass of `TrainConfig` whose fields all have defaults, is a recipe, too.
"""

from collections.abc import Callable, Sequence

from gigamask.errors import GigamaskError
from gigamask.grounding.config import GroundingTrainConfig
from gigamask.recipes.grounding import ground, ground_tiny
from gigamask.recipes.mae import mae_tiny, mae_vit_b, mae_vit_h, mae_vit_l
from gigamask.recipes.sam import sam_vit_b, sam_vit_h, sam_vit_l
from gigamask.recipes.tiny import photos, tiny
from gigamask.recipes.user_code import entry_points, find_object, load_entry_point
from gigamask.recipes.variants import (
    finetune,
    finetune_vit_h,
    finetune_vit_l,
    mixed_prompts,
    one_gpu,
)
from gigamask.training.config import ImageTrainConfig, TrainConfig
from gigamask.training.mae_config import MAETrainConfig
from gigamask.training.sam_config import SamTrainConfig

SEGMENTATIONS: tuple[Callable[[], SamTrainConfig], ...] = (
    *(tiny, photos, sam_vit_b, sam_vit_l, sam_vit_h),
    *(mixed_prompts, one_gpu, finetune, finetune_vit_l, finetune_vit_h),
)
PRETRAININGS: tuple[Callable[[], MAETrainConfig], ...] = (mae_tiny, mae_vit_b, mae_vit_l, mae_vit_h)
GROUNDINGS: tuple[Callable[[], GroundingTrainConfig], ...] = (ground, ground_tiny)
BUILT_IN: tuple[Callable[[], TrainConfig], ...] = (*SEGMENTATIONS, *PRETRAININGS, *GROUNDINGS)
OF_VERB: dict[str, Sequence[Callable[[], TrainConfig]]] = {
    SamTrainConfig.verb: SEGMENTATIONS,
    MAETrainConfig.verb: PRETRAININGS,
    GroundingTrainConfig.verb: GROUNDINGS,
}
"""The recipes of each command that trains."""


def listed(known: Sequence[Callable[[], TrainConfig]]) -> str:
    """Returns a line for each of some recipes: its name, and the first of its docstring."""
    return "\n".join(
        f"  {recipe.__name__:15} {(recipe.__doc__ or '').strip().splitlines()[0]}"
        for recipe in known
    )


def find(name: str) -> Callable[[], TrainConfig]:
    """Returns the recipe of that name, built-in or of the user's own."""
    known = {recipe.__name__: recipe for recipe in BUILT_IN}
    if name in known:
        return known[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        installed = entry_points("recipe")
        if name not in installed:
            raise GigamaskError(
                f"no recipe is called {name!r}; known are {', '.join([*known, *installed])}, and file.py:function for your own"
            )
        recipe = load_entry_point(installed[name])
    else:
        recipe = find_object(name)
    if not callable(recipe):
        raise GigamaskError(
            f"{path or name} has no function {function!r}; write one that returns a gigamask.training.sam_config.SamTrainConfig"
        )
    return recipe


def make(name: str) -> TrainConfig:
    """Returns the run of a recipe; raises `GigamaskError` where one's own function fails or returns something else."""
    recipe = find(name)
    try:
        run = recipe()
    except GigamaskError:
        raise
    except Exception as error:
        raise GigamaskError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(run, TrainConfig):
        wanted = f"{SamTrainConfig.__module__}.{SamTrainConfig.__name__}, or another {TrainConfig.__module__}.{TrainConfig.__name__}"
        raise GigamaskError(f"{name} returned a {type(run).__name__}; return a {wanted}")
    return run


def imaged(run: TrainConfig) -> ImageTrainConfig:
    """Returns a run whose samples are images; raises `GigamaskError` for another."""
    if not isinstance(run, ImageTrainConfig):
        raise GigamaskError(
            f"recipe {run.recipe} trains on queries, here images are wanted; give a recipe of 'gigamask train' or 'gigamask pretrain'"
        )
    return run
