"""Automatic masks of models with known predictions, compared with the ground truth."""

import numpy as np
import pytest
import torch

from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import clicks
from gigamask.evaluation.embedded_images import scored_masks
from gigamask.evaluation.proposals import ProposalRecall, proposal_config, table
from gigamask.models.init import build_model
from tests.little import SPEC
from tests.unit.evaluation.test_clicks import index

__all__ = ["index"]
EVERYTHING = MaskFilters(max_area=None)


def measure(model, index, filters, settings, rows) -> dict:
    """Returns what is found in some images."""
    search = ProposalRecall(settings)
    clicks.evaluate_clicks(
        model, index, filters, clicks.ClickProtocol(clicks=(1,)), rows, callbacks=[search.update]
    )
    return search.summary()


@pytest.mark.slow
def test_everything_found_is_held_against_everything_there(index):
    model = build_model(SPEC, 0).train()
    found = measure(model, index, EVERYTHING, proposal_config(3), [0, 1])
    assert model.training
    assert found["images"] == 2
    assert found["truth"] == sum(len(scored_masks(index, row, EVERYTHING)) for row in (0, 1))
    assert found["masks_an_image"] == found["found"] / 2
    assert 0 < found["best_iou"] < 1
    assert found["AR@1000"] is not None
    assert found["settings"]["points_per_side"] == 3
    assert f"{found['masks_an_image']:.1f} per image from 3 points per side" in table(found)


def test_perfect_model_has_full_recall(index, monkeypatch):
    """The one annotated mask that equals its predictions is found completely."""
    model = build_model(SPEC, 0)
    full = torch.full((3, SPEC.mask_size, SPEC.mask_size), 20.0)
    monkeypatch.setattr(
        model,
        "decode",
        lambda embedding, image, prompts: (
            full.expand(len(image), -1, -1, -1),
            torch.full((len(image), 3), 0.99),
        ),
    )
    found = measure(model, index, EVERYTHING, proposal_config(2), [0])
    shares = index.masks["area"][index.mask_rows(0)] / (
        int(index.images["height"][0]) * int(index.images["width"][0])
    )
    assert found["found"] == 1, "all answers are the same, and one stays"
    assert found["passing"] == 1.0
    assert found["best_iou"] == pytest.approx(np.mean(shares))


def test_nothing_to_look_at_has_no_numbers(index, monkeypatch):
    model = build_model(SPEC, 0)
    found = measure(model, index, MaskFilters(min_predicted_iou=1.0), proposal_config(2), [0])
    assert (found["images"], found["masks_an_image"], found["best_iou"]) == (0, None, None)
    assert table(found) == "automatic masks: no image to evaluate"
    monkeypatch.setattr("gigamask.data.dataset.image.decode", broken)
    assert measure(model, index, EVERYTHING, proposal_config(2), [0])["images"] == 0


def broken(*_):
    from gigamask.errors import CorruptSampleError

    raise CorruptSampleError("no image")
