"""A plan refuses a teacher as training does, with its line, or says what it assumes."""

from dataclasses import replace

import pytest

from gigamask import recipes
from gigamask.plugins.distill.recipes import compact_student
from gigamask.workflows import fit
from gigamask.workflows.plan_checks import check_trainable
from tests.errors import error_line
from tests.unit.workflows.test_plan_checks import check_plan

pytestmark = [pytest.mark.usefixtures("no_shape_checks"), pytest.mark.slow]


@pytest.mark.parametrize(
    "words",
    [
        "sami_vit_t",
        "sami_vit_t --teacher nowhere.pth",
        "sami_vit_t --teacher starter",
        "compact_student",
        "compact_student --teacher starter --model.image-size 320",
        "compact_student --teacher starter --model.image-size 128",
        "compact_student --teacher starter --model.image-size 320 --features.steps -1",
    ],
)
def test_what_training_refuses_the_plan_refuses_or_states(words, scenes, tmp_path):
    check_plan(words, scenes, tmp_path)


def test_a_teacher_that_is_not_here_is_planned_as_vit_h_where_it_fits():
    [line] = check_trainable(recipes.make("edge_sam").with_(teacher="vit_h.pth"))
    assert line.startswith("--teacher vit_h.pth")
    assert "ViT-H" in line
    for changes in ({}, {"features__steps": 0}):
        with error_line(r"--teacher mine.pth: .*nor does SAM ViT-H fit"):
            check_trainable(recipes.make("compact_student").with_(teacher="mine.pth", **changes))


def test_what_fits_keeps_the_phase_features(monkeypatch):
    monkeypatch.setattr(fit, "dry_run", lambda *_: None)
    monkeypatch.setattr(fit, "peak_bytes", lambda *_: 0)
    config = replace(compact_student(), teacher="none", device="cpu")
    assert fit.fit(config, "1GB")[1] == "--fit 1GB: fits as it is"
