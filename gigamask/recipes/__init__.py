"""Recipes: Python functions that return a `Run`; each docstring states command, hardware, hours and the source of each number.

A recipe is chosen by name (`tiny`) or, for one of the user's own, as `file.py:function`, `package.module:function` or an entry point
(`recipes.user_code`); a configuration class of the user's own, a subclass of `Run` whose fields all have defaults, is a recipe, too.
"""

from collections.abc import Callable, Sequence

from gigamask.faults import Fault
from gigamask.grounding.config import GroundingTrainConfig
from gigamask.recipes.grounding import ground, ground_tiny
from gigamask.recipes.mae import mae_tiny, mae_vit_b, mae_vit_h, mae_vit_l
from gigamask.recipes.sam import sam_vit_b, sam_vit_h, sam_vit_l
from gigamask.recipes.tiny import photos, tiny
from gigamask.recipes.user_code import entry_points, find_object, load_entry_point
from gigamask.recipes.variants import finetune, finetune_vit_h, finetune_vit_l, mixed_prompts, one_gpu
from gigamask.train.pretraining import Pretraining
from gigamask.train.run import ImageRun, Run
from gigamask.train.segmentation import Segmentation

SEGMENTATIONS: tuple[Callable[[], Segmentation], ...] = (
    *(tiny, photos, sam_vit_b, sam_vit_l, sam_vit_h),
    *(mixed_prompts, one_gpu, finetune, finetune_vit_l, finetune_vit_h),
)
PRETRAININGS: tuple[Callable[[], Pretraining], ...] = (mae_tiny, mae_vit_b, mae_vit_l, mae_vit_h)
GROUNDINGS: tuple[Callable[[], GroundingTrainConfig], ...] = (ground, ground_tiny)
BUILT_IN: tuple[Callable[[], Run], ...] = (*SEGMENTATIONS, *PRETRAININGS, *GROUNDINGS)
OF_VERB: dict[str, Sequence[Callable[[], Run]]] = {
    Segmentation.verb: SEGMENTATIONS,
    Pretraining.verb: PRETRAININGS,
    GroundingTrainConfig.verb: GROUNDINGS,
}
"""The recipes of each command that trains."""


def listed(known: Sequence[Callable[[], Run]]) -> str:
    """Returns a line for each of some recipes: its name, and the first of its docstring."""
    return "\n".join(f"  {recipe.__name__:15} {(recipe.__doc__ or '').strip().splitlines()[0]}" for recipe in known)


def find(name: str) -> Callable[[], Run]:
    """Returns the recipe of that name, built-in or of the user's own."""
    known = {recipe.__name__: recipe for recipe in BUILT_IN}
    if name in known:
        return known[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        installed = entry_points("recipe")
        if name not in installed:
            raise Fault(f"no recipe is called {name!r}; known are {', '.join([*known, *installed])}, and file.py:function for your own")
        recipe = load_entry_point(installed[name])
    else:
        recipe = find_object(name)
    if not callable(recipe):
        raise Fault(f"{path or name} has no function {function!r}; write one that returns a gigamask.train.segmentation.Segmentation")
    return recipe


def make(name: str) -> Run:
    """Returns the run of a recipe; raises `Fault` where one's own function fails or returns something else."""
    recipe = find(name)
    try:
        run = recipe()
    except Fault:
        raise
    except Exception as error:
        raise Fault(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(run, Run):
        wanted = f"{Segmentation.__module__}.{Segmentation.__name__}, or another {Run.__module__}.{Run.__name__}"
        raise Fault(f"{name} returned a {type(run).__name__}; return a {wanted}")
    return run


def imaged(run: Run) -> ImageRun:
    """Returns a run whose samples are images; raises `Fault` for another."""
    if not isinstance(run, ImageRun):
        raise Fault(f"recipe {run.recipe} trains on queries, here images are wanted; give a recipe of 'gigamask train' or 'gigamask pretrain'")
    return run
