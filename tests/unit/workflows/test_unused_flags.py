"""Values without effect are refused where they differ from the recipe's, and only there."""

import pytest

from gigamask import recipes
from gigamask.config_files import check_used
from tests.errors import error_line
from tests.own_components import Pooled


@pytest.mark.parametrize(
    ("recipe", "given", "other"),
    [
        ("compact", {"model__depth": 24}, {"model__depth": 12}),
        ("compact", {"model__drop_path_rate": 0.1}, {"model__drop_path_rate": 0.0}),
        (
            "tiny",
            {"optimizer__layer_decay": 0.9, "model__encoder": Pooled(0)},
            {"optimizer__layer_decay": 1},
        ),
        ("tiny", {"drop_path_mode": "batch"}, {"model__drop_path_rate": 0.1}),
        ("tiny", {"lora__on": ("q",)}, {"lora__rank": 2}),
        ("tiny", {"class_weight": 2.0}, {"model__class_names": ("cat",)}),
    ],
)
def test_a_value_without_effect_is_refused(recipe, given, other):
    config = recipes.make(recipe)
    check_used(config)
    flag = next(iter(given)).replace("__", ".").replace("_", "-")
    with error_line(f"--{flag} .*no effect"):
        check_used(config.with_(**given))
    check_used(config.with_(**(given | other)))
    check_used(config.with_(recipe="elsewhere.py:moved", **given))
