"""A pixel or box of an image is the same prompt wherever it is given: in evaluation, to the
predictor, in training, and on the automatic generator's grid."""

from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.data.augment import (
    HorizontalFlip,
    LargeScaleJitter,
    NoAugment,
    RandomResizedCrop,
    ScaleJitter,
)
from gigamask.data.dataset import build_sample
from gigamask.data.loader import collate
from gigamask.data.sample_config import SampleConfig
from gigamask.evaluation.embedded_images import CropOptions, EmbeddedImage
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.boundary import farthest_point
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.masks.valid_area import valid_cells
from gigamask.models.init import build_model
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks, InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.records import DataCursor, ImageAnnotation, SampleRef
from gigamask.training.tasks import targets_from_batch
from gigamask.types import RandomSpec
from tests.little import SPEC

SIDE = SPEC.image_size
SIZES = [(64, 64), (48, 64), (200, 131), (333, 500), (17, 40), (31, 9)]
AUGMENTS = [
    NoAugment(),
    HorizontalFlip(),
    HorizontalFlip(1.0),
    LargeScaleJitter(),
    LargeScaleJitter(2.0, 4.0),
    ScaleJitter(),
    RandomResizedCrop(),
]
RANDOM = RandomSpec(seed=0, clicks=1, blocks=1)


@pytest.fixture(scope="module")
def model():
    return build_model(SPEC, 0).eval()


@pytest.fixture
def asked(model, monkeypatch):
    """Prompts that the model was given."""
    prompts, decode = [], model.decode

    def spy(embedding, mask_image, given):
        prompts.append(given)
        return decode(embedding, mask_image, given)

    monkeypatch.setattr(model, "decode", spy)
    return prompts


def annotated(masks, pixels=None):
    """Masks, their image and its bytes."""
    height, width = masks.shape[1:]
    if pixels is None:
        pixels = np.full((height, width, 3), 90, np.uint8)
    scores = np.full(len(masks), 0.9, np.float32)
    runs = RLEMasks.from_dense(masks)
    entry = ImageAnnotation("x.tar:a", (height, width), runs, scores, scores)
    return entry, simplejpeg.encode_jpeg(pixels)


def blobs(size, seed=0):
    """Three rectangles of an image."""
    random, masks = np.random.default_rng(seed), np.zeros((3, *size), bool)
    for mask in masks:
        y0, x0 = random.integers(0, np.array(size) - 2)
        y1, x1 = random.integers(np.array([y0, x0]) + 2, np.array(size) + 1)
        mask[y0:y1, x0:x1] = True
    return masks


TILES = {"tile": 40, "halo": 8}


@pytest.mark.parametrize(
    "size, options", [*((size, {}) for size in SIZES), ((64, 48), TILES)], ids=str
)
@torch.inference_mode()
def test_evaluation_and_predictor_give_the_same_prompts_and_masks(model, asked, size, options):
    """In tiles, of an image that neither of them resizes; a large tile is none."""
    masks = blobs(size)
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    transform = ImageTransform.resize_longest_side(size, SIDE)
    predictor = SamPredictor(model, **options)
    if options:
        predictor.set_image(pixels)
    else:
        predictor.set_torch_image(transform.apply_image(pixels)[None], size)
    entry, _ = annotated(masks, pixels)
    image = EmbeddedImage(pixels, entry, transform, predictor.get_image_embedding())
    assert type(image.decoder(model, CropOptions(tile=512))) is PromptDecoder
    for number, mask in enumerate(masks):
        targets = image.targets(np.array([number]))
        decode = image.decoder(model, CropOptions(**options))
        [evaluated] = run_rounds(decode, targets, BoxPrompt(), None, 0.0)
        found, _, _ = predictor.predict(box=entry.masks.boxes()[number], return_logits=True)
        check_same(evaluated, found, asked, options)
        clicks, labels, low, shown = [], [], None, np.zeros_like(mask)
        for evaluated in run_rounds(decode, targets, CenterClicks(3), None, 0.0):
            x, y = click_of(mask, shown, clicks)
            clicks, labels = [*clicks, [x, y]], [*labels, int(mask[y, x])]
            found, iou, low_res = predictor.predict(
                np.array(clicks),
                np.array(labels),
                mask_input=low,
                multimask_output=low is None,
                return_logits=True,
            )
            check_same(evaluated, found, asked, options)
            best = int(iou.argmax())
            shown, low = found[best] > 0, low_res[best : best + 1]


def click_of(mask, shown, clicked):
    """The pixel of the larger error that is farthest from its boundary."""
    regions = (~mask & shown, mask & ~shown)
    clicks = [farthest_point(region, np.array(clicked, int).reshape(-1, 2)) for region in regions]
    return max(clicks, key=lambda click: click[2])[:2]


def check_same(evaluated, found, asked, options):
    given = asked.pop()
    if not options:
        assert torch.equal(given.points_xy_input, evaluated.prompts.points_xy_input)
        assert torch.equal(given.labels, evaluated.prompts.labels)
    torch.testing.assert_close(torch.from_numpy(found), evaluated.prediction.logits[0])


@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_grid_of_evaluation_is_that_of_the_automatic_generator(model, asked, size):
    pixels = np.zeros((*size, 3), np.uint8)
    transform = ImageTransform.resize_longest_side(size, SIDE)
    entry, _ = annotated(blobs(size), pixels)
    image = EmbeddedImage(pixels, entry, transform, torch.zeros(1, 16, 8, 8))
    wanted = torch.cat([prompts.points_xy_input[:, 0] for prompts in image.point_grid_prompts(3)])
    SamAutomaticMaskGenerator(model, points_per_side=3).generate(pixels)
    found = torch.cat([prompts.points_xy_input[:, 0] for prompts in asked])
    by_row = wanted.view(3, 3, 2).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found.float(), by_row)


def sample_of(masks, augment, position=0, mask_size=SIDE // 4):
    entry, raw = annotated(masks)
    config = SampleConfig(image_size=SIDE, mask_size=mask_size, augment=augment)
    return build_sample(raw, entry, SampleRef(0, position, 0), config, RANDOM), config


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SIZES), st.sampled_from(AUGMENTS), st.integers(0, 999), st.booleans())
def test_training_clicks_the_pixel_under_the_cell(size, augment, position, fine):
    """A cell of a training grid has the coordinate that the predictor gives to the pixel at its
    center, up to the distance of both centers."""
    mask_size = SIDE if fine else SIDE // 4
    sample, config = sample_of(blobs(size, position), augment, position, mask_size)
    if not len(sample.masks):
        return
    batch = collate([sample], (), config, RANDOM, 0.0, DataCursor())
    transform = sample.transform
    targets = targets_from_batch(batch, slice(0, 1), mask_size)
    prompts = CenterClicks(1).next(None, targets, None, 0.0)
    [x, y, _] = farthest_point(targets.foreground[0].numpy())
    center = (np.array([x, y]) + 0.5) * SIDE / mask_size
    # The pixel of the cropped and mirrored image, which a predictor would get as its own image.
    pixel = np.floor(center / transform.scale_xy + 1e-9)
    off_center = center - (pixel + 0.5) * transform.scale_xy
    coords = pixel * transform.scale_xy
    last = batch.input_sizes[0].flip(0).numpy() - transform.scale_xy
    expected = (coords + off_center).clip(0, last)
    assert np.allclose(prompts.points_xy_input[0, 0], expected, atol=1e-4)


masks_of_noise = st.builds(
    lambda size, share, seed: np.random.default_rng(seed).random((4, *size)) < share,
    st.sampled_from(SIZES),
    st.sampled_from([0.001, 0.01, 0.3, 1.0]),
    st.integers(0, 2**32 - 1),
)
"""Specks and lines, of which a grid shows some."""


@settings(deadline=None, max_examples=60)
@given(masks_of_noise, st.sampled_from(AUGMENTS), st.integers(0, 999), st.sampled_from([8, 16, 64]))
def test_a_box_neither_cuts_its_mask_nor_exceeds_it_by_a_cell(masks, augment, position, mask_size):
    sample, _ = sample_of(masks, augment, position, mask_size)
    transform, cell = sample.transform, SIDE / mask_size
    assert len(sample.boxes_input) == len(sample.masks)
    cells = sample.masks.boxes().reshape(-1, 2, 2).astype(float)
    low, high = sample.boxes_input.reshape(-1, 2, 2).astype(float).swapaxes(0, 1)
    high += transform.scale_xy
    assert (low >= cells[:, 0] * cell - cell / 2 - 1e-4).all()
    assert (low <= (cells[:, 0] + 0.5) * cell + 1e-4).all()
    assert (high <= (cells[:, 1] + 1) * cell + cell / 2 + 1e-4).all()
    assert (high >= (cells[:, 1] + 0.5) * cell - 1e-4).all()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SIZES), st.sampled_from(AUGMENTS[:6]), st.integers(0, 999))
def test_training_boxes_are_those_of_the_predictor(size, augment, position):
    """Of the cropped and mirrored image; masks that are too small for the grid are left out."""
    masks = blobs(size, position)
    sample, _ = sample_of(masks, augment, position, 512)
    transform = sample.transform
    (y0, x0, y1, x1), step = transform.crop, -1 if transform.flip else 1
    shown = masks[:, y0:y1, x0:x1][:, :, ::step]
    runs = RLEMasks.from_dense(shown[shown.any((1, 2))])
    plain = ImageTransform(
        transform.crop_size, (0, 0, *transform.crop_size), transform.resized, SIDE
    )
    runs = runs[np.flatnonzero(plain.apply_masks(runs, 512).areas())]
    assert np.allclose(sample.boxes_input, plain.boxes_to_input(runs.boxes().astype(float)))


BORDER_SIZES = [(48, 64), (64, 37), (200, 31), (31, 200), (7, 9), (2, 64), (640, 479)]
FIRST_PROMPTS = [
    InteractiveSchedule(1, False, 0.0),
    InteractiveSchedule(1, False, 1.0, box_noise=0.5, box_noise_limit_px=1e9),
    InteractiveSchedule(1, False, 0.0, center_click_prob=1.0),
    TwoSidedCorrection(box_prob=0.5, box_noise=0.5, box_noise_limit_px=1e9),
    MixedPrompts(0.4, 0.3, 0.3, positive_prob=1.0, box_noise=0.5, box_noise_limit_px=1e9),
]


def at_the_border(size: tuple[int, int]) -> np.ndarray:
    """Masks along the right and the lower side, and in two corners."""
    height, width = size
    masks = np.zeros((4, *size), bool)
    masks[0, :, -max(1, width // 8) :] = masks[1, -max(1, height // 8) :] = True
    masks[2, -max(1, height // 3) :, -max(1, width // 3) :] = True
    masks[3, : max(1, height // 3), : max(1, width // 3)] = True
    return masks


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(BORDER_SIZES),
    st.sampled_from(AUGMENTS),
    st.sampled_from(FIRST_PROMPTS),
    st.integers(0, 999),
    st.booleans(),
)
def test_first_prompts_lie_in_the_image_and_are_positive(size, augment, schedule, position, fine):
    """Also where a cell has less than half of a mask, or of the image, in it."""
    random = replace(RANDOM, clicks=schedule.num_uniforms)
    entry, raw = annotated(at_the_border(size))
    fine_size = SIDE if fine else SIDE // 4
    config = SampleConfig(image_size=SIDE, mask_size=fine_size, augment=augment)
    sample = build_sample(raw, entry, SampleRef(0, position, 0), config, random)
    if not len(sample.masks):
        return
    batch = collate([sample], (), config, random, 0.0, DataCursor())
    targets = targets_from_batch(batch, slice(0, len(sample.masks)), SIDE // 4)
    prompts = schedule.next(None, targets, batch.random_inputs, 0.0)
    points, labels = prompts.points_xy_input, prompts.labels
    used = labels >= 0
    extent = batch.input_sizes[0].flip(0)
    assert not (labels == 0).any()
    assert (points[used] >= 0).all()
    assert (points[used] <= extent - batch.scale_xy[0] + 1e-4).all()
    if prompts.masks is not None:
        outside = ~valid_cells(targets.extent, prompts.masks.shape[1:], (4.0, 4.0), by_center=False)
        assert (prompts.masks[outside] < 0).all()
