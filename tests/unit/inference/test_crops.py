"""Crops around what is prompted: where they lie, what reaches the model, where answers land."""

import numpy as np
import pytest
import torch
from torch import nn

from gigamask.inference import crops
from gigamask.masks.transforms import ImageTransform
from gigamask.models.configs import SamConfig
from gigamask.models.embedding_cache import ImageEmbedder
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.prompt_encoder import make_prompts
from gigamask.models.sam.sam import Sam
from gigamask.types import OUTSIDE_LOGIT

SIDE, GRID, LEAST = 256, 64, 32
SIZES = [(480, 320), (320, 480), (400, 400), (90, 700), (700, 90), (333, 500)]
BOXES = {
    "middle": (0.45, 0.5, 0.55, 0.58),
    "top left": (0.0, 0.0, 0.08, 0.1),
    "bottom right": (0.9, 0.93, 1.0, 1.0),
    "left": (0.0, 0.4, 0.12, 0.5),
}


class Drawing(Sam):
    """A model that answers with the box, with the brightness, or with the mask prompt, on the grid
    of its input; it notes what it was given."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.config = SamConfig(image_size=SIDE)
        self.pixel_mean = torch.zeros(3, 1, 1)
        self.encoded, self.asked = [], []

    def encode(self, images, input_sizes, drop_path=None):
        self.encoded.append(len(images))
        return nn.functional.avg_pool2d(images[:, :1].float(), SIDE // GRID)

    def decode(self, embedding, mask_image, prompts):
        assert (mask_image.diff() >= 0).all()
        self.asked.append(prompts)
        bright = (embedding[mask_image] - 127) / 32
        corners = prompts.points_xy_input[prompts.labels >= 2].view(-1, 2, 2)
        if len(corners):
            bright = self.box(corners)[:, None]
        elif prompts.masks is not None:
            bright = prompts.masks[:, None]
        count = 3 if prompts.multimask_output else 1
        iou = torch.tensor([0.5, 0.9, 0.7])[:count].expand(len(mask_image), -1)
        return bright.expand(-1, count, -1, -1), iou

    @staticmethod
    def box(corners):
        """Logits of boxes from corner to corner: a model does not know how wide the last pixel is,
        so it leaves out its row and column."""
        centers = (torch.arange(GRID) + 0.5) * (SIDE / GRID)
        first, last = corners[:, 0], corners[:, 1]
        inside = [
            torch.minimum(centers - first[:, axis, None], last[:, axis, None] - centers)
            for axis in (0, 1)
        ]
        return torch.minimum(inside[0][:, None, :], inside[1][:, :, None]) / 8


def pixel_box(size, part):
    height, width = size
    x0, y0, x1, y1 = BOXES[part]
    return np.array(
        [int(x0 * width), int(y0 * height), int(x1 * width) - 1, int(y1 * height) - 1], np.float64
    )


def prompts_of(transform, points=(), labels=(), box=None, masks=None, multimask=False):
    coords = torch.from_numpy(
        transform.points_to_input(np.array(points, np.float64).reshape(1, -1, 2))
    )
    boxes = None if box is None else torch.from_numpy(transform.boxes_to_input(box[None]))
    given = (coords, torch.tensor([labels])) if len(points) else (None, None)
    return make_prompts(*given, boxes, masks, multimask, GRID)


def extent(mask):
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array([columns[0], rows[0], columns[-1], rows[-1]])


def crop_of(prompts, transform):
    """The crop around what a prompt refers to."""
    [region] = crops.prompted_regions(prompts, transform, [transform])
    return crops.crop_around(region, transform, LEAST)


def answer_in_crop(model, pixels, prompts, crop, transform):
    """The answer of a model that sees only the crop, for the whole image."""
    [embedding] = ImageEmbedder(model, None).embed([crop.apply_image(pixels)[None]])
    moved = crops.prompts_in_crops(prompts, [0], [crop], transform, [transform])
    with torch.no_grad():
        answer = PromptDecoder(model, embedding)(moved)
    return crops.pasted_answer(answer, [crop], transform)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", BOXES)
def test_a_box_lands_on_its_own_pixels(size, part):
    model, box = Drawing(), pixel_box(size, part)
    transform = ImageTransform.resize_longest_side(size, SIDE)
    whole = prompts_of(transform, box=box)
    crop = crop_of(whole, transform)
    answer = answer_in_crop(model, np.zeros((*size, 3), np.uint8), whole, crop, transform)
    [asked] = model.asked
    assert asked.points_xy_input.diff(dim=1).abs().max() > (
        whole.points_xy_input.diff(dim=1).abs().max()
    )
    logits = answer.logits[0, 0].numpy()
    assert np.abs(extent(logits > 0) - (box - [0, 0, 1, 1])).max() <= 1
    cell = SIDE / GRID / np.array(transform.scale_xy * 2)
    low = extent(answer.low_res_logits[0, 0].numpy() > 0) + np.array([0, 0, 1, 1])
    assert (np.abs(low * cell - box) <= cell + 1).all()
    y0, x0, y1, x1 = crop.crop
    outside = np.ones(size, bool)
    outside[y0:y1, x0:x1] = False
    assert (logits[outside] == OUTSIDE_LOGIT).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", BOXES)
def test_a_crop_lies_in_the_image_around_the_region(size, part):
    transform = ImageTransform.resize_longest_side(size, SIDE)
    x0, y0, x1, y1 = region = pixel_box(size, part) + np.array([0, 0, 1, 1])
    crop = crops.crop_around(region, transform, LEAST)
    top, left, bottom, right = crop.crop
    assert 0 <= top <= y0 < y1 <= bottom <= size[0]
    assert 0 <= left <= x0 < x1 <= right <= size[1]
    side = max(crops.CROP_FACTOR * max(x1 - x0, y1 - y0), LEAST)
    assert max(crop.crop_size) == pytest.approx(side, rel=0.15)
    assert crop.crop_size == tuple(min(max(crop.crop_size), length) for length in size)


def test_the_whole_image_is_used_for_what_nearly_fills_it():
    transform = ImageTransform.resize_longest_side((300, 400), SIDE)
    assert crops.crop_around(np.array([50.0, 20, 300, 280]), transform, LEAST) == transform
    assert crops.crop_around(np.array([50.0, 20, 200, 200]), transform, LEAST) != transform


def test_nearly_equal_regions_share_a_crop():
    transform = ImageTransform.resize_longest_side((400, 600), SIDE)
    boxes = [np.array([160.0 + shift, 96, 255, 191 + shift]) for shift in (0, 1, -1)]
    assert len({crop_of(prompts_of(transform, box=box), transform) for box in boxes}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_prompt_keeps_its_place(size):
    """To the crop and back, within a cell, with the sign of every cell away from its edge."""
    model, transform = Drawing(), ImageTransform.resize_longest_side(size, SIDE)
    height, width = (int(np.ceil(length * GRID / SIDE)) for length in transform.resized)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    distance = torch.maximum((rows - height / 2).abs() / 2, (columns - width / 2).abs() / 3)
    masks = (1.2 - distance).clamp(-4, 4)[None, None]
    whole, pixels = prompts_of(transform, masks=masks), np.zeros((*size, 3), np.uint8)
    answer = answer_in_crop(model, pixels, whole, crop_of(whole, transform), transform)
    [asked] = model.asked
    assert (asked.masks > 0).sum() > 2 * (whole.masks > 0).sum()
    before, after = masks[0, 0] > 0, answer.low_res_logits[0, 0] > 0
    assert torch.equal(before[distance < 0.9], after[distance < 0.9])
    assert torch.equal(before[distance > 1.6], after[distance > 1.6])


def test_a_mask_and_the_positive_clicks_with_it_are_what_is_prompted():
    transform = ImageTransform.resize_longest_side((400, 600), SIDE)
    mask = torch.full((1, 1, GRID, GRID), -1.0)
    mask[..., 22:26, 11:15] = 1  # x 103 to 141, y 206 to 244

    def region(points, labels):
        prompts = prompts_of(transform, points, labels, masks=mask)
        return crops.prompted_regions(prompts, transform, [transform])[0]

    of_mask = region([(120, 220)], (1,))
    np.testing.assert_allclose(of_mask, [103, 206, 141, 244], atol=1)
    assert np.array_equal(region([(120, 220), (300, 300)], (1, 0)), of_mask)
    wide = region([(120, 220), (500, 220)], (1, 1))
    np.testing.assert_allclose(wide, [*of_mask[:2], 501, of_mask[3]], atol=0.5)
    empty = torch.full((1, 1, GRID, GRID), -1.0)
    nothing = prompts_of(transform, [(5, 5)], (0,), masks=empty)
    assert np.isnan(crops.prompted_regions(nothing, transform, [transform])).all()


def test_an_object_smaller_than_a_cell_is_found_in_the_next_round():
    size = (1600, 1600)
    pixels, transform = (
        np.zeros((*size, 3), np.uint8),
        ImageTransform.resize_longest_side(size, SIDE),
    )
    box = prompts_of(transform, box=np.array([805.0, 1003, 813, 1011]))
    answer = answer_in_crop(Drawing(), pixels, box, crop_of(box, transform), transform)
    assert (answer.low_res_logits > 0).sum() == 1
    click = prompts_of(transform, [(809, 1007)], (1,), masks=answer.low_res_logits)
    y0, x0, y1, x1 = crop_of(click, transform).crop
    assert x1 - x0 <= 64
    assert x0 <= 805 < 813 < x1
    assert y0 <= 1003 < 1011 < y1
