"""Automatic masks of models with known predictions, compared with the ground truth."""

import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.data.index import build
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import clicks
from gigamask.evaluation.embedded_images import scored_masks, scored_rows
from gigamask.evaluation.proposals import (
    ProposalRecall,
    class_table,
    classify,
    proposal_config,
    table,
)
from gigamask.inference.automatic_mask_generator import MaskProposals
from gigamask.masks.rle import RLEMasks
from gigamask.models.init import build_model
from tests.little import SPEC

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


def test_classified_masks_are_matched_within_their_classes():
    """Of two masks in one place the likelier stays; the other is of the right class, but hidden."""
    dense = np.zeros((4, 20, 20), bool)
    dense[0, :8, :8] = dense[1, :8, :9] = dense[2, 10:, 10:] = dense[3, 10:, :5] = True
    found = RLEMasks.from_dense(dense)
    count, iou = 4, np.array([0.9, 0.9, 0.5, np.nan], np.float32)
    classes = np.array([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4], [0.1, 0.9]], np.float32)
    boxes = found.boxes().astype(np.int64)
    points, crops = np.zeros((count, 2)), np.zeros((count, 4), np.int64)
    proposals = MaskProposals(found, boxes, iou, iou, points, crops, classes)
    truth = RLEMasks.from_dense(dense[[0, 2, 3]])
    image = classify(proposals, truth, np.array([0, 0, -1]))
    assert image.truth.areas().tolist() == [64, 100]
    assert image.truth_classes.tolist() == [0, 0]
    assert image.detection_classes.tolist() == [1, 0, 1]
    assert image.scores == pytest.approx([0.72, 0.3, 0.0])
    summary = ProposalRecall(proposal_config(2), classified=[image], class_names=["a", "b"])
    result = summary._class_summary()
    assert result["by_class"] == {"a": {"AP": pytest.approx(51 / 101), "AP50": 51 / 101}}
    assert result["AP"] == pytest.approx(51 / 101)
    assert "a                                0.505   0.505" in class_table(result)


def test_what_is_found_in_images_without_masks_counts_for_classes(tmp_path, scenes):
    with tarfile.open(next(scenes.glob("*.tar"))) as shard:
        shard.extractall(tmp_path, members=list(shard)[:4], filter="data")
    first, _ = sorted(tmp_path.glob("*.json"))
    first.write_text(json.dumps(json.loads(first.read_text()) | {"annotations": []}))
    with tarfile.open(tmp_path / "some.tar", "w") as shard:
        for path in sorted(tmp_path.glob("*.j*")):
            shard.add(path, path.name)
    index = build(tmp_path / "some.tar", tmp_path / "index")
    rows = [list(scored_rows(index, range(2), EVERYTHING, empty)) for empty in (False, True)]
    assert rows == [[1], [0, 1]]
    model = build_model(replace(SPEC, class_names=("object",)), 0)
    found = measure(model, index, EVERYTHING, proposal_config(2), range(2))
    assert (found["images"], found["classes"]["images"]) == (2, 2)


@pytest.mark.slow
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
