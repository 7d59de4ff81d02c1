"""Flags that a phase of distillation does not read are refused."""

import pytest

from gigamask import recipes
from gigamask.config_files import check_used
from tests.errors import error_line


@pytest.mark.parametrize(
    "name, value",
    [
        ("features__lr", 0.1),
        ("teacher_iou_weight", 0.5),
        ("prompts__clicks", 2),
        ("loader__max_masks", 3),
    ],
)
def test_flags_without_effect(name, value):
    flag, changed = name.replace("__", ".").replace("_", "-"), {name: value}
    with error_line(f"--{flag} {value}: has no effect"):
        check_used(recipes.make("mobile_sam").with_(**changed))
    both = recipes.make("edge_sam").with_(**changed)
    for phase in (both, *both.phases()):
        check_used(phase)
