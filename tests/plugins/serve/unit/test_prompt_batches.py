"""Prompts decoded together have the masks of one at a time; edits are first, previews replaced."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve import prompt_batches
from gigamask.plugins.serve.open_images import OpenImage
from gigamask.plugins.serve.prompt_batches import (
    PromptBatches,
    PromptRequest,
    SupersededError,
    answer_together,
)
from gigamask.plugins.serve.prompt_steps import PromptStep
from gigamask.training.checkpoint import load_model
from tests.errors import error_line
from tests.plugins.serve.annotated import click_at, picture

FIRST, SECOND = click_at(20.0, 10.0), click_at(33.0, 30.0, foreground=False)
BASE = np.zeros((1, 40, 60), bool)
BASE[0, 5:30, 10:40] = True


def open_image(model, seed=0, **options) -> OpenImage:
    predictor, pixels = SamPredictor(model, **options), picture(seed=seed)
    predictor.set_image(pixels)
    return OpenImage("a", pixels, predictor)


def requests(model) -> list[PromptRequest]:
    images = [open_image(model, seed) for seed in range(3)] + [open_image(model, 0, tile=32)]
    base = RLEMasks.from_dense(BASE)
    given = (
        (0, (FIRST,)),
        (1, (FIRST, SECOND)),
        (2, (PromptStep(box=(5.0, 5.0, 30.0, 30.0)), SECOND)),
        (0, (FIRST, SECOND, FIRST), True),
        (2, (replace(FIRST, chosen=1), SECOND)),
        (1, (FIRST, SECOND), None, base),
        (1, (SECOND,), None, base),
        (0, (SECOND,)),
        (3, (FIRST, SECOND)),
    )
    return [PromptRequest(images[i], *more) for i, *more in given]


@pytest.mark.slow
@pytest.mark.parametrize("window", [False, True])
def test_together_masks_are_those_of_one_at_a_time(model, window, monkeypatch):
    model = load_model("starter", "cpu") if window else model
    rows, predict = [], model.predict

    def counted(embedding, image_index, prompts):
        rows.append(len(image_index))
        return predict(embedding, image_index, prompts)

    monkeypatch.setattr(model, "predict", counted)
    alone, together = requests(model), requests(model)
    for request in alone:
        answer_together([request])
    before = len(rows)
    answer_together(together)
    assert len(rows) - before < before
    assert max(rows) >= 3
    config = model.config
    for one, other in zip(alone, together, strict=True):
        expected, found = one.future.result(), other.future.result()
        assert torch.allclose(found.iou, expected.iou, atol=1e-5)
        transform = one.opened.predictor.transform.image_transform(one.opened.size)
        for number in range(len(expected.iou)):
            low, same = (each.low_res_logits(number, config) for each in (found, expected))
            assert torch.allclose(low, same, atol=1e-4)
            masks = [each.show(number, config, transform) for each in (found, expected)]
            assert masks[0]["segmentation"] == masks[1]["segmentation"]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("options", [{}, {"tile": 32}], ids=str)
def test_the_masks_of_a_box_are_refined_once_and_those_of_points_are_not(model, window, options):
    model = load_model("starter", "cpu") if window else model
    opened, point = open_image(model, **options), np.array([FIRST.point])
    for step, prompt in (
        (PromptStep(box=(5.0, 5.0, 30.0, 30.0)), {"box": np.array([5, 5, 30, 30]), "refine": 1}),
        (FIRST, {"point_coords": point, "point_labels": np.ones(1)}),
    ):
        request = PromptRequest(opened, (step,))
        answer_together([request])
        answer = request.future.result()
        _, iou, low = opened.predictor.predict(**prompt)
        np.testing.assert_allclose(answer.iou, iou, atol=1e-5)
        for number in range(3):
            found = answer.low_res_logits(number, model.config)
            np.testing.assert_allclose(found, low[number], atol=1e-4)


def test_a_wrong_request_does_not_spoil_the_others(session):
    opened = open_image(session.model)
    wrong = PromptRequest(opened, (replace(FIRST, chosen=5), SECOND))
    right = PromptRequest(opened, (FIRST,))
    answer_together([wrong, right])
    with error_line("mask 5 was chosen of 3"):
        wrong.future.result()
    assert len(right.future.result().iou) == 3


def test_edits_are_answered_before_previews_and_only_the_newest_preview(model, monkeypatch):
    opened, batches = open_image(model), PromptBatches(threads=1)
    busy, resume, order = threading.Event(), threading.Event(), []

    def slow(some):
        busy.set()
        resume.wait(20)
        order.append([each.client for each in some])
        answer_together(some)

    monkeypatch.setattr(prompt_batches, "answer_together", slow)
    monkeypatch.setattr(prompt_batches, "MAX_BATCH", 1)

    def ask(x, client=None):
        request = PromptRequest(opened, (click_at(x, 5.0),), client=client)
        asked = pool.submit(batches.answer, request)
        while busy.is_set() and request not in batches._waiting:
            time.sleep(0.001)
        return asked

    with ThreadPoolExecutor(8) as pool:
        first = ask(0.0)
        assert busy.wait(20)
        old, other, new, edit = ask(1.0, "a"), ask(2.0, "b"), ask(3.0, "a"), ask(4.0)
        with pytest.raises(SupersededError):
            old.result(20)
        resume.set()
        assert all(len(each.result(20).iou) == 3 for each in (first, other, new, edit))
    assert [each for each in order if each] == [[None], [None], ["b"], ["a"]]


def test_an_error_of_the_model_reaches_all_who_wait(model, monkeypatch):
    def broken(*given):
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "predict", broken)
    monkeypatch.setattr(model, "decode", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        PromptBatches().answer(PromptRequest(open_image(model), (FIRST,)))
