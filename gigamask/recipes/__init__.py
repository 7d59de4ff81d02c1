"""Recipes: Python functions that return a `Run`; each docstring states command, hardware, hours and the source of each number.

A recipe is chosen by name (`tiny`) or as `file.py:function`, so that one's own lives in one's own file.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from gigamask.faults import Fault
from gigamask.grounding.config import GroundingTrainConfig
from gigamask.recipes.grounding import ground, ground_tiny
from gigamask.recipes.mae import mae_tiny, mae_vit_b, mae_vit_h, mae_vit_l
from gigamask.recipes.sam import sam_vit_b, sam_vit_h, sam_vit_l
from gigamask.recipes.tiny import photos, tiny
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
OF_VERB: dict[str, tuple[type[Run], Sequence[Callable[[], Run]]]] = {
    "train": (Segmentation, SEGMENTATIONS),
    "pretrain": (Pretraining, PRETRAININGS),
    "ground train": (GroundingTrainConfig, GROUNDINGS),
}
"""What each verb that trains makes, and the recipes it knows."""


def listed(known: Sequence[Callable[[], Run]]) -> str:
    """Returns a line for each of some recipes: its name, and the first of its docstring."""
    return "\n".join(f"  {recipe.__name__:15} {(recipe.__doc__ or '').strip().splitlines()[0]}" for recipe in known)


def find(name: str) -> Callable[[], Run]:
    """Returns the recipe of that name, or the function of `file.py:function`."""
    known = {recipe.__name__: recipe for recipe in BUILT_IN}
    if name in known:
        return known[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        raise Fault(f"no recipe is called {name!r}; known are {', '.join(known)}, and file.py:function for your own")
    recipe = getattr(load_file(path), function, None)
    if not callable(recipe):
        raise Fault(f"{path} has no function {function!r}; write one that returns a gigamask.train.segmentation.Segmentation")
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
        kinds = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind, _ in OF_VERB.values())
        raise Fault(f"{name} returned a {type(run).__name__}; return a {kinds}")
    return run


def imaged(run: Run) -> ImageRun:
    """Returns a run whose samples are images; raises `Fault` for another."""
    if not isinstance(run, ImageRun):
        raise Fault(f"recipe {run.recipe} trains on queries, here images are wanted; give a recipe of 'gigamask train' or 'gigamask pretrain'")
    return run


def load_file(name: str) -> ModuleType:
    """Imports a file under its stem, once, so that the classes in it are the same for everyone in this process and its workers."""
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise Fault(f"{path}: no such file of Python's; name one of your own before the colon, as in mine.py:name")
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Fault(f"{path}: importing it raised {type(error).__name__}: {error}") from error
    return module
