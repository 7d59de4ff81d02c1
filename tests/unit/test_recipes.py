import subprocess
import sys

import pytest

from gigamask import recipes
from gigamask.training.optim import WarmupMultiStep
from tests.errors import error_line


@pytest.mark.parametrize(
    "name, steps, batch, lr, layer_decay, drop_path, dim",
    [
        ("sam_vit_b", 180_000, 128, 8e-4, 0.6, 0.6, 768),
        ("sam_vit_l", 180_000, 128, 4e-4, 0.8, 0.4, 1024),
        ("sam_vit_h", 90_000, 256, 8e-4, 0.8, 0.4, 1280),
    ],
)
def test_sams_runs_have_the_papers_numbers(name, steps, batch, lr, layer_decay, drop_path, dim):
    run = recipes.find(name)()
    optimizer, loss = run.optimizer, run.loss
    assert (run.recipe, run.steps, run.batch_size) == (name, steps, batch)
    assert (run.model.embed_dim, run.model.drop_path_rate) == (dim, drop_path)
    assert (optimizer.lr, optimizer.layer_decay) == (lr, layer_decay)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), 0.1)
    assert run.schedule == WarmupMultiStep(250, (2 / 3, 26 / 27), 0.1)
    assert (run.loader.max_masks, run.prompts.rounds, run.prompts.box_prob) == (64, 11, 0.5)
    assert (loss.focal_weight, loss.dice_weight, loss.iou_weight) == (20, 1, 1)
    assert (loss.mask_supervision, run.loader.filters.max_area) == ("best", 0.9)


def test_every_recipe_says_what_it_is_and_can_be_found():
    for recipe in recipes.built_in():
        assert recipes.find(recipe.__name__) is recipe
        command = recipe().command
        assert recipe in recipes.built_in(command)
        assert f"gigamask {command} {recipe.__name__} --" in recipe.__doc__
        assert recipe().recipe == recipe.__name__


def test_a_recipe_without_a_docstring_is_listed(monkeypatch):
    monkeypatch.setattr(recipes, "built_in", lambda command: [lambda: None])
    assert recipes.format_recipes() == "  <lambda>        -"


def test_a_recipe_is_still_a_function_after_its_module_was_imported():
    for recipe in recipes.built_in():
        assert getattr(recipes, recipe.__name__) is recipe


def test_custom_recipe_file(tmp_path):
    file = tmp_path / "own_recipe.py"
    file.write_text("from gigamask.recipes import tiny\nmine = tiny\nbroken = 3\n")
    assert recipes.find(f"{file}:mine")() == recipes.tiny()
    with error_line(r"own_recipe.py.*'broken'"):
        recipes.find(f"{file}:broken")
    (tmp_path / "recipe.txt").write_text("def mine(): ...")
    with error_line(r"recipe.txt"):
        recipes.find(f"{tmp_path}/recipe.txt:mine")
    with error_line(r"gone.py"):
        recipes.find(f"{tmp_path}/gone.py:mine")
    (tmp_path / "raising.py").write_text("1 / 0")
    with error_line(r"raising.py.*ZeroDivisionError"):
        recipes.find(f"{tmp_path}/raising.py:mine")


@pytest.mark.slow
def test_recipes_and_flags_import_no_torch():
    code = (
        "import sys, gigamask.cli.main, gigamask.config_files\n"
        "from gigamask import recipes; from gigamask.losses.ohem import OHEM\n"
        "[make() for make in recipes.built_in()], OHEM()\n"
        "assert not {'torch', 'cv2', 'jaxtyping'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_of_a_custom_recipe_function(tmp_path):
    file = tmp_path / "wrong_recipe.py"
    file.write_text(
        "from gigamask.training.config import TrainConfig\n\n"
        "def bare():\n    return TrainConfig('bare')\n\ndef nothing():\n    pass\n"
    )
    with error_line(r"wrong_recipe.py:bare.*TypeError"):
        recipes.make(f"{file}:bare")
    with error_line(r"gigamask.training.sam_config.SamTrainConfig.*NoneType"):
        recipes.make(f"{file}:nothing")
