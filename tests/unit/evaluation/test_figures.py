"""Figures of masks: rows are drawn once, and look as each does alone."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from gigamask.data.index import build
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import figures
from gigamask.evaluation.clicks import ClickProtocol, evaluate_clicks
from gigamask.evaluation.embedded_images import annotated_images, embed_image
from gigamask.models.init import build_model
from tests.little import SPEC


@pytest.mark.slow
def test_each_mask_is_drawn_once_and_each_image_embedded_once(scenes, tmp_path, monkeypatch):
    index = build(scenes, tmp_path / "index")
    model = build_model(SPEC, 0)
    result = evaluate_clicks(model, index, MaskFilters(), ClickProtocol(clicks=(1,)), rows=range(2))
    result = replace(result, scores=[*result.scores[:2], *result.scores[-2:]])
    embedded = []
    monkeypatch.setattr(
        figures,
        "embed_image",
        lambda model, images, row: embedded.append(row) or embed_image(model, images, row),
    )
    paths = figures.write_figures(model, index, result, tmp_path / "figures", 4)
    assert [path.name for path in paths] == ["best.png", "worst.png", "typical.png"]
    assert embedded == sorted({score.row for score in result.scores})
    order = sorted(result.scores, key=lambda score: -score.clicks[1])
    images = annotated_images(index, SPEC.pixels)
    with torch.inference_mode():
        alone = [
            figures.draw_row(
                model.eval(), embed_image(model, images, score.row), score, result.protocol
            )
            for score in order
        ]
    for path, rows in zip(paths, (alone, alone[::-1], alone), strict=True):
        assert np.array_equal(cv2.imread(str(path))[..., ::-1], figures.stack_rows(rows)), path


def test_panels_of_any_image_have_one_size():
    shapes = [(40, 60), (60, 40), (1, 500), (500, 1), (700, 900)]
    panels = []
    for height, width in shapes:
        pixels, mask = np.zeros((height, width, 3), np.uint8), np.ones((height, width), bool)
        panel = figures.FigurePanel("", mask)
        panels.append(figures.draw_panel(pixels, mask, panel, (0, 0, width, height)))
    width, height = figures.PANEL_SIZE
    assert {panel.shape for panel in panels} == {(height + figures.LABEL_PX, width, 3)}


@pytest.mark.parametrize("color", [figures.TRUTH, figures.PREDICTED])
def test_outlines_stand_out_from_an_image_of_their_color(color):
    pixels = np.full((200, 300, 3), color, np.uint8)
    mask = np.zeros((200, 300), bool)
    mask[50:150, 50:150] = True
    panel = figures.FigurePanel("", mask)
    drawn = figures.draw_panel(pixels, mask, panel, (0, 0, 300, 200))
    across = drawn[100, 40:60].astype(int)
    assert (across.sum(1) < 90).any(), "no dark rim"
    assert (np.abs(across - figures.TRUTH).sum(1) < 60).any()


def test_the_window_holds_masks_clicks_and_a_margin_and_stays_in_the_image():
    truth = np.zeros((400, 600), bool)
    truth[0:10, 590:600] = True
    points = np.array([[560.0, 30.0]])
    panel = figures.FigurePanel("", np.zeros_like(truth), points, np.ones(1))
    x0, y0, x1, y1 = figures._window(truth, [panel])
    assert (y0, x1) == (0, 600)
    assert x0 < 560
    assert 30 < y1 < 100
    assert (x1 - x0) / (y1 - y0) == pytest.approx(1.5, abs=0.05)
    truth[:, 100:] = True
    assert figures._window(truth, [panel]) == (0, 0, 600, 400)
    small = np.ones((8, 5), bool)
    none = figures.FigurePanel("", small)
    assert figures._window(small, [none]) == (0, 0, 5, 8)
