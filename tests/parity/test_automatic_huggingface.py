"""Automatic masks against Hugging Face's mask generation, as far as it needs no torchvision."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.inference.automatic_mask_generator import (
    SamAutomaticMaskGenerator,
    build_point_grid,
    encode_masks,
    generate_crop_boxes,
)
from gigamask.inference.resize_longest_side import ResizeLongestSide
from gigamask.masks.components import paste
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.synthetic.scenes import compose_scene

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

pytest.importorskip("transformers", minversion="5.22", reason="its crops were elsewhere")


@pytest.fixture(scope="module")
def processor():
    return SamImageProcessorPil()


@pytest.mark.parametrize("layers, points", [(0, 32), (1, 8), (2, 9)])
@pytest.mark.parametrize("size", [(259, 316), (400, 120), (64, 64)])
def test_crops_and_their_points_agree(processor, layers, points, size):
    boxes, grids, _, _ = processor.generate_crop_boxes(
        np.zeros((*size, 3), np.uint8), 1024, layers, 512 / 1500, points
    )
    mine = generate_crop_boxes(size, layers, 512 / 1500)
    assert [list(box) for box, _ in mine] == boxes.tolist()
    for (box, _), theirs in zip(mine, grids[0].swapaxes(0, 1), strict=True):
        own = (box[3] - box[1], box[2] - box[0])
        grid = build_point_grid(points) * own[::-1]
        assert np.array_equal(theirs.numpy(), ResizeLongestSide(1024).apply_coords(grid, own))


def blobs(embedding, mask_image, prompts):
    """Predict three discs around each point, at low resolution for an input of 64 px."""
    place = torch.arange(32) * 2 + 0.5
    far = (place[:, None] - prompts.points_xy_input[:, :1, 1:, None]) ** 2 + (
        place - prompts.points_xy_input[:, :1, :1, None]
    ) ** 2
    radius = (
        torch.tensor([4.0, 9.0, 20.0])[:, None, None]
        * prompts.points_xy_input[:, :1, :1, None]
        / 32
    )
    iou = torch.rand(len(mask_image), 3, generator=torch.Generator().manual_seed(0))
    return (radius - far.sqrt()).float(), iou


@pytest.mark.parametrize("crop", [(0, 0, 316, 259), (0, 0, 200, 180), (120, 80, 316, 259)])
def test_filters_boxes_and_runs_agree(processor, crop, monkeypatch):
    """The same masks of one batch pass, with the same boxes and run lengths on the image."""
    image, size = compose_scene(1, 3).pixels, (259, 316)
    x0, y0, x1, y1 = crop
    model = build_model(replace(tiny(), image_size=64), 0).eval()
    monkeypatch.setattr(model, "decode", blobs)
    asked = SamAutomaticMaskGenerator(model, pred_iou_thresh=0.3, stability_score_thresh=0.7)
    asked.predictor.set_image(image[y0:y1, x0:x1])
    points = build_point_grid(6) * (x1 - x0, y1 - y0)
    found = asked._process_batch(points, crop, size)
    coords = torch.from_numpy(asked.predictor.transform.apply_coords(points, (y1 - y0, x1 - x0)))[
        :, None
    ]
    logits, iou, _ = asked.predictor.predict_torch(
        coords, torch.ones(len(points), 1), return_logits=True
    )
    masks, scores, boxes = processor.filter_masks(
        logits[None].flatten(0, 1), iou, size, list(crop), 0.3, 0.7, 0.0, 1.0
    )
    assert len(found) == len(scores) > 3
    assert len(found) < iou.numel() - 10
    assert found.predicted_iou.tolist() == scores.tolist()
    assert (found.boxes + np.array([x0, y0, x0, y0])).tolist() == boxes.tolist()
    mine = encode_masks(paste(found.masks, x0, y0, size), "uncompressed_rle")
    assert mine == [{"size": list(each["size"]), "counts": each["counts"]} for each in masks]
