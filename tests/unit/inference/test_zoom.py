"""Zoom: where crops lie, what reaches the model, and where its answers land."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gigamask.errors import GigamaskError
from gigamask.evaluation.embedded_images import CropOptions, EmbeddedImage
from gigamask.inference import zoom
from gigamask.inference.predictor import SamPredictor
from gigamask.inference.zoom import ZoomDecoder
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform
from gigamask.models.configs import ConvPyramid, SamConfig, WindowDecoder
from gigamask.models.embedding_cache import ImageEmbedder
from gigamask.models.init import build_model
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.prompt_encoder import make_prompts
from gigamask.models.sam.sam import Sam
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks
from gigamask.records import ImageAnnotation
from gigamask.types import Prompts
from tests.little import SPEC

SIDE, GRID = 256, 64
WINDOWED = replace(
    SPEC,
    patch_size=4,
    embedding_dim=32,
    encoder=ConvPyramid((8, 8, 16, 16), width=8, fine_width=4),
    decoder=WindowDecoder(widths=(8, 8)),
)
"""Answers in windows around the prompt."""
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


def decoder(model, pixels, best_only=False):
    transform = ImageTransform.resize_longest_side(pixels.shape[:2], SIDE)
    embedder = ImageEmbedder(model, None)
    [embedding] = embedder.embed([transform.apply_image(pixels)[None]])
    return ZoomDecoder(embedder, pixels, transform, embedding, best_only)


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", BOXES)
def test_a_box_lands_on_its_own_pixels(size, part):
    model, box = Drawing(), pixel_box(size, part)
    decode = decoder(model, np.zeros((*size, 3), np.uint8))
    whole = prompts_of(decode.transform, box=box)
    answer = decode(whole)
    [zoomed] = model.asked
    assert zoomed.points_xy_input.diff(dim=1).abs().max() > (
        whole.points_xy_input.diff(dim=1).abs().max()
    )
    drawn = box - [0, 0, 1, 1]
    found = extent(answer.logits[0, 0].numpy() > 0)
    assert np.abs(found - drawn).max() <= 1
    cell = SIDE / GRID / np.array(decode.transform.scale_xy * 2)
    low = extent(answer.low_res_logits[0, 0].numpy() > 0) + np.array([0, 0, 1, 1])
    assert (np.abs(low * cell - box) <= cell + 1).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", BOXES)
def test_a_crop_lies_in_the_image_around_the_region(size, part):
    transform = ImageTransform.resize_longest_side(size, SIDE)
    x0, y0, x1, y1 = region = pixel_box(size, part) + np.array([0, 0, 1, 1])
    crop = zoom.crop_around(region, transform)
    top, left, bottom, right = crop.crop
    assert 0 <= top <= y0 < y1 <= bottom <= size[0]
    assert 0 <= left <= x0 < x1 <= right <= size[1]
    side = max(zoom.CROP_FACTOR * max(x1 - x0, y1 - y0), zoom.MIN_CROP_PX)
    assert max(crop.crop_size) == pytest.approx(side, rel=0.15)
    assert crop.crop_size == tuple(min(max(crop.crop_size), length) for length in size)


def test_the_whole_image_is_used_for_what_fills_it_and_for_nothing():
    transform = ImageTransform.resize_longest_side((300, 400), SIDE)
    assert zoom.crop_around(np.array([50.0, 20, 300, 280]), transform) is None
    assert zoom.crop_around(np.full(4, np.nan), transform) is None
    assert zoom.crop_around(np.array([50.0, 20, 200, 200]), transform) is not None


def test_what_is_not_zoomed_is_answered_as_without_zoom(model, pictures):
    for picture in pictures:
        height, width = picture.shape[:2]
        box = np.array([2, 3, width - 4, height - 2])
        answers = []
        for predictor in (SamPredictor(model), SamPredictor(model, zoom=True)):
            predictor.set_image(picture)
            answers.append(predictor.predict(box=box, return_logits=True))
        for plain, zoomed in zip(*answers, strict=True):
            assert np.array_equal(plain, zoomed)


@pytest.mark.slow
def test_a_crop_that_is_the_whole_image_gives_the_same_answer(model, monkeypatch):
    monkeypatch.setattr(zoom, "WHOLE_FRACTION", np.inf)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)
    plain, zoomed = SamPredictor(model), SamPredictor(model, zoom=True)
    for predictor in (plain, zoomed):
        predictor.set_image(pixels)
    box, low = np.array([0, 0, 47, 63]), None
    for _ in range(2):
        wanted, found = (
            predictor.predict(box=box, mask_input=low, return_logits=True)
            for predictor in (plain, zoomed)
        )
        assert len(zoomed.crop_decoders[0].embeddings) == 1
        for each, other in zip(wanted[:2], found[:2], strict=True):
            np.testing.assert_allclose(other, each, atol=1e-4)
        valid = np.s_[:, :, :24]  # the right quarter of the grid is padding
        np.testing.assert_allclose(found[2][valid], wanted[2][valid], atol=1e-4)
        low = wanted[2][:1]


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_prompt_keeps_its_place(size):
    """To the crop and back, within a cell, with the sign of every cell away from its edge."""
    model = Drawing()
    decode = decoder(model, np.zeros((*size, 3), np.uint8))
    height, width = (int(np.ceil(length * GRID / SIDE)) for length in decode.transform.resized)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    distance = torch.maximum((rows - height / 2).abs() / 2, (columns - width / 2).abs() / 3)
    masks = (1.2 - distance).clamp(-4, 4)[None, None]
    whole = prompts_of(decode.transform, masks=masks)
    answer = decode(whole)
    [zoomed] = model.asked
    assert (zoomed.masks > 0).sum() > 2 * (whole.masks > 0).sum()
    before, after = masks[0, 0] > 0, answer.low_res_logits[0, 0] > 0
    assert torch.equal(before[distance < 0.9], after[distance < 0.9])
    assert torch.equal(before[distance > 1.6], after[distance > 1.6])


@pytest.mark.parametrize("best_only", [False, True])
def test_clicks_zoom_into_the_mask_that_is_passed_with_them(best_only):
    """A bright square of 20 px, at its pixels, from a click beside it too."""
    pixels, model = np.zeros((400, 600, 3), np.uint8), Drawing()
    pixels[200:240, 100:140] = 255
    decode = decoder(model, pixels, best_only)
    plain = decode(prompts_of(decode.transform, [(120, 220)], (1,)))
    assert model.encoded == [1]  # a click alone is not zoomed
    model.asked.clear()
    mask = plain.low_res_logits[:, :1]
    prompts = prompts_of(
        decode.transform, [(120, 220), (300, 300)], (1, 0), masks=mask, multimask=True
    )
    answer = decode(prompts)
    assert len(answer.iou_predictions[0]) == (1 if best_only else 3)
    assert np.abs(extent(answer.logits[0, 0].numpy() > 0) - [100, 200, 139, 239]).max() <= 1
    [crop] = decode.embeddings
    assert crop.crop_size[0] == crop.crop_size[1] <= 90
    points = model.asked[0].points_xy_input[0].numpy()
    wanted = crop.points_to_input(np.array([[120.0, 220], [300, 300]]))
    np.testing.assert_allclose(points[:2], wanted, rtol=1e-5)
    assert (points[2] == 0).all()  # padding
    assert points[1, 0] > SIDE  # outside the crop
    decode(prompts_of(decode.transform, [(120, 220), (500, 220)], (1, 1), masks=mask))
    assert model.encoded == [1, 1]  # both clicks take the whole image
    decode(prompts_of(decode.transform, [(120, 220), (240, 220)], (1, 1), masks=mask))
    assert [*decode.embeddings][-1].crop_size == pytest.approx((212, 212), abs=12)


def test_an_object_smaller_than_a_cell_is_found_in_the_next_round():
    pixels, model = np.zeros((1600, 1600, 3), np.uint8), Drawing()
    decode, box = decoder(model, pixels), np.array([805.0, 1003, 813, 1011])
    answer = decode(prompts_of(decode.transform, box=box))
    assert (answer.low_res_logits > 0).sum() == 1
    decode(prompts_of(decode.transform, [(809, 1007)], (1,), masks=answer.low_res_logits))
    y0, x0, y1, x1 = [*decode.embeddings][-1].crop
    assert x1 - x0 <= 64
    assert x0 <= 805 < 813 < x1
    assert y0 <= 1003 < 1011 < y1


def test_similar_regions_share_an_embedding_and_the_cache_is_bounded(monkeypatch):
    model = Drawing()
    decode = decoder(model, np.zeros((400, 600, 3), np.uint8))
    for shift in (0, 1, -1):
        decode(prompts_of(decode.transform, box=np.array([160.0 + shift, 96, 255, 191 + shift])))
    assert model.encoded == [1, 1]
    monkeypatch.setattr(zoom, "CACHE_BYTES", 2 * decode.embedding.nbytes)
    for x in range(0, 400, 50):
        decode(prompts_of(decode.transform, box=np.array([x, 30.0, x + 40, 80])))
        assert len(decode.embeddings) <= 2
    assert sum(model.encoded) == 10


def random_prompts(transform, count, grid):
    random = np.random.default_rng(5)
    first = random.uniform(0, 0.8, (count, 2)) * transform.original[::-1]
    boxes = np.concatenate([first, first + random.uniform(5, 25, (count, 2))], 1)
    corners = torch.from_numpy(transform.boxes_to_input(boxes)).view(-1, 2, 2).float()
    labels = torch.tensor([2, 3]).repeat(count, 1)
    labels[1] = torch.tensor([1, -1])
    labels[2] = torch.tensor([1, 0])
    masks = torch.from_numpy(random.normal(-1, 1, (count, grid, grid))).float()
    masks[3:5, :, 6:] = masks[3:5, 6:] = -3
    labels[4] = -1
    has_mask = torch.tensor([False, False, True, True, True, False, True])
    return Prompts(corners, labels, masks, False, has_mask)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["plain", "windowed"])
def test_a_batch_answers_as_one_prompt_at_a_time(spec):
    model = build_model(spec, 0).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (120, 90, 3), np.uint8)
    transform = ImageTransform.resize_longest_side((120, 90), model.config.image_size)
    embedder = ImageEmbedder(model, None)
    [embedding] = embedder.embed([transform.apply_image(pixels)[None]])
    prompts = random_prompts(transform, 7, model.config.mask_size)
    together = ZoomDecoder(embedder, pixels, transform, embedding)
    answer = together(prompts)
    assert len(together.embeddings) >= zoom.CROPS_AT_ONCE
    for row in range(7):
        alone = ZoomDecoder(embedder, pixels, transform, embedding)
        found = alone(
            Prompts(
                prompts.points_xy_input[row : row + 1],
                prompts.labels[row : row + 1],
                prompts.masks[row : row + 1],
                False,
                prompts.has_mask_prompt[row : row + 1],
            )
        )
        for name in ("logits", "iou_predictions", "low_res_logits"):
            torch.testing.assert_close(
                getattr(found, name)[0], getattr(answer, name)[row], atol=1e-4, rtol=1e-4
            )


def test_outside_of_the_crop_nothing_is_foreground(model):
    pixels = np.random.default_rng(0).integers(0, 256, (120, 90, 3), np.uint8)
    predictor = SamPredictor(model, zoom=True)
    predictor.set_image(pixels[..., ::-1], "BGR")
    masks, _, low = predictor.predict(box=np.array([40, 50, 55, 70]), return_logits=True)
    [crop] = predictor.crop_decoders[0].embeddings
    y0, x0, y1, x1 = crop.crop
    as_image = ImageTransform.resize_longest_side(crop.crop_size, crop.image_size)
    outside = np.ones((120, 90), bool)
    outside[y0:y1, x0:x1] = False
    assert (masks[:, outside] == zoom.OUTSIDE_LOGIT).all()
    assert masks.shape == (3, 120, 90)
    assert low.shape == (3, 32, 32)
    plain = PromptDecoder(
        model,
        ImageEmbedder(model, None).embed([crop.apply_image(pixels)[None]])[0],
        resize=as_image.logits_to_original,
    )
    corners = crop.boxes_to_input(np.array([[40.0, 50, 55, 70]]))
    boxes = torch.from_numpy(corners).float()
    with torch.no_grad():
        wanted = plain(make_prompts(None, None, boxes, None, True, model.config.mask_size))
    np.testing.assert_allclose(masks[:, y0:y1, x0:x1], wanted.logits[0], atol=1e-4)


@pytest.mark.slow
def test_each_image_is_zoomed_in_its_own_pixels(model, pictures):
    predictor, box = SamPredictor(model, zoom=True), np.array([10, 12, 22, 25])
    predictor.set_images(pictures)
    for number, picture in enumerate(pictures):
        predictor.select(number)
        alone = SamPredictor(model, zoom=True)
        alone.set_image(picture)
        found = predictor.predict(box=box, return_logits=True)
        for each, other in zip(found, alone.predict(box=box, return_logits=True), strict=True):
            np.testing.assert_allclose(each, other, atol=1e-5)
    predictor.reset_image()
    with pytest.raises(GigamaskError, match="call set_image first"):
        predictor.predict(box=box)


def test_an_image_without_its_pixels_cannot_be_zoomed(model):
    with pytest.raises(GigamaskError, match="call set_image instead of set_torch_image") as error:
        SamPredictor(model, zoom=True).set_torch_image(torch.zeros(1, 3, 64, 64), (64, 64))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zoom": True}, {"tile": 40, "halo": 8}], ids=str)
@torch.inference_mode()
def test_predictor_and_evaluation_agree(model, options):
    """On an image of the model's size, which neither of them resizes."""
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), np.uint8)
    mask = np.zeros((64, 48), bool)
    mask[20:31, 9:17] = True
    runs, one = RLEMasks.from_dense(mask[None]), np.ones(1, np.float32)
    transform = ImageTransform.resize_longest_side((64, 48), 64)
    predictor = SamPredictor(model, **options)
    predictor.set_image(pixels)
    annotation = ImageAnnotation("x.tar:a", (64, 48), runs, one, one)
    image = EmbeddedImage(pixels, annotation, transform, predictor.get_image_embedding())
    targets, decode = image.targets(np.array([0])), image.decoder(model, CropOptions(**options))
    [evaluated] = run_rounds(decode, targets, BoxPrompt(), None, 0.0)
    found, _, _ = predictor.predict(box=runs.boxes()[0], return_logits=True)
    torch.testing.assert_close(torch.from_numpy(found), evaluated.prediction.logits[0])
    best, refined = run_rounds(decode, targets, BoxPrompt(refine=True))
    found, _, _ = predictor.predict(box=runs.boxes()[0], return_logits=True, refine=1)
    found = torch.from_numpy(found[int(best.best_index)])
    torch.testing.assert_close(found, refined.prediction.logits[0, 0])
    low = None
    for evaluated in run_rounds(decode, targets, CenterClicks(3), None, 0.0):
        prompts = evaluated.prompts
        clicks = transform.points_to_original(prompts.points_xy_input[0].numpy())[:-1]
        found, _, low_res = predictor.predict(
            clicks,
            prompts.labels[0, :-1].numpy(),
            mask_input=low,
            multimask_output=low is None,
            return_logits=True,
        )
        prediction = evaluated.prediction
        torch.testing.assert_close(torch.from_numpy(found), prediction.logits[0])
        torch.testing.assert_close(torch.from_numpy(low_res), prediction.low_res_logits[0])
        low = low_res[int(evaluated.best_index)][None]
    assert image.crops, "kept for the other masks of the image"
    larger = CropOptions(tile=64)
    assert type(image.decoder(model, larger)) is PromptDecoder, "no larger than a tile"


@pytest.mark.parametrize("options", [{}, {"zoom": True}, {"tile": 40, "halo": 8}], ids=str)
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["plain", "windowed"])
def test_a_refinement_is_each_mask_passed_back_with_its_prompt(spec, options):
    predictor = SamPredictor(build_model(spec, 0).eval(), **options)
    predictor.set_image(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    box, point = torch.tensor([[5.0, 4.0, 20.0, 16.0]]), torch.tensor([[[9.0, 30.0]]])
    for prompt in ((None, None, box), (point, torch.ones(1, 1), None)):
        plain = predictor.predict_torch(*prompt)
        for count in (1, 2):
            wanted = [
                predictor.predict_torch(*prompt, plain[2][:, number : number + 1], False)
                for number in range(3)
            ]
            plain = [torch.cat(parts, 1) for parts in zip(*wanted, strict=True)]
            found = predictor.predict_torch(*prompt, refine=count)
            assert torch.equal(found[0], plain[0])
            torch.testing.assert_close(found[1:], tuple(plain[1:]), atol=1e-4, rtol=1e-4)
    with pytest.raises(GigamaskError, match=r"^refine must be .*\(got -1\)$"):
        predictor.predict(box=box[0], refine=-1)


def test_nothing_to_crop_around_is_not_zoomed():
    """Neither a mask, nor a box: the model finds nothing at the click."""
    model = Drawing()
    decode = decoder(model, np.zeros((400, 600, 3), np.uint8))
    empty = torch.full((1, 1, GRID, GRID), -1.0)
    for masks in (None, empty):
        prompts = prompts_of(decode.transform, [(120, 220)], (1,), masks=masks)
        answer, plain = decode(prompts), PromptDecoder(model, decode.embedding)(prompts)
        assert torch.equal(answer.low_res_logits, plain.low_res_logits)
    assert model.encoded == [1]
