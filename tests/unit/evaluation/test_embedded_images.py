"""Images in front of a model: in order, several at once, few in memory."""

import threading

import numpy as np
import pytest
import torch

from gigamask.data.dataset import Sa1bDataset
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import clicks, embedded_images
from gigamask.evaluation.embedded_images import embed_image, embed_images
from gigamask.models.init import build_model
from tests.errors import error_line
from tests.little import SPEC

EVERYTHING = MaskFilters(max_area=None)


@pytest.fixture(scope="module")
def model():
    return build_model(SPEC, 0).eval()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_images_come_in_order_as_they_are_alone(index, model, batch_size):
    rows = [4, 0, 7, 2, 1]
    with torch.inference_mode():
        found = list(embed_images(model, index, rows, batch_size))
        alone = [embed_image(model, Sa1bDataset(index), row) for row in rows]
    assert [row for row, _ in found] == rows
    for (_, scene), other in zip(found, alone, strict=True):
        assert scene.transform == other.transform
        assert np.array_equal(scene.pixels, other.pixels)
        torch.testing.assert_close(scene.embedding, other.embedding)


@pytest.mark.long
def test_scores_are_the_same_however_many_are_embedded_at_once(index, model):
    """To rounding, which may turn a pixel at a mask's edge."""
    alone, *together = (
        clicks.evaluate_clicks(
            model, index, EVERYTHING, clicks.ClickProtocol(clicks=(1, 2)), range(6), each
        )
        for each in (1, 2, 4, 6)
    )
    for other in together:
        assert [(score.row, score.mask_index) for score in other.scores] == [
            (score.row, score.mask_index) for score in alone.scores
        ]
        for one, two in zip(alone.scores, other.scores, strict=True):
            assert [*two.clicks.values(), two.oracle, two.box] == pytest.approx(
                [*one.clicks.values(), one.oracle, one.box], abs=0.01
            )


def test_few_images_are_read_ahead_and_none_when_the_rest_is_not_wanted(index, model, monkeypatch):
    read, told = Sa1bDataset.read, []
    monkeypatch.setattr(
        Sa1bDataset,
        "read",
        lambda self, row: told.append((row, threading.current_thread())) or read(self, row),
    )
    with torch.inference_mode():
        found = embed_images(model, index, range(12), batch_size=2)
        next(found)
        assert len(told) <= 2 + 2
        found.close()
    assert not told[0][1].is_alive()
    assert len(told) <= 2 + 2
    assert [row for row, _ in told] == list(range(len(told)))
    assert len({thread for _, thread in told}) == 1, "a reader belongs to one thread"


def test_none_at_once_is_refused(index, model):
    with error_line(r"batch_size.*0"):
        next(embedded_images.embed_images(model, index, [0], batch_size=0))


def test_an_image_without_a_json_is_named(index, model, monkeypatch):
    read = Sa1bDataset.read
    monkeypatch.setattr(Sa1bDataset, "read", lambda self, row: read(self, row)._replace(json=None))
    [(row, bad)] = embed_images(model, index, [3])
    assert row == 3
    assert "sa_3: has no json" in str(bad)
