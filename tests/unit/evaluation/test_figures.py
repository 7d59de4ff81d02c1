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
