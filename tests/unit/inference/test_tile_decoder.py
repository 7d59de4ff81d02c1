"""Prompts in tiles of large images: what is embedded, where answers lie, how they are extended."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.inference import tile_decoder
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.models.init import build_model
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.prompt_encoder import make_prompts
from gigamask.types import MaskDecoderOutput
from tests.errors import error_line
from tests.little import SPEC
from tests.unit.inference.test_tiles import rectangles

WINDOWED = replace(
    SPEC,
    patch_size=4,
    embedding_dim=32,
    encoder=ConvPyramid((8, 8, 16, 16), width=8, fine_width=4),
    decoder=WindowDecoder(widths=(8, 8)),
)
"""Answers in windows around the prompt."""
BOXES = [(4, 4, 20, 24), (40, 30, 80, 84), (100, 0, 116, 128), (130, 100, 134, 106)]
"""One in the first tile, one across four, one along the image, and one that has no cell in it."""


@pytest.fixture
def scene():
    return rectangles((128, 160), BOXES)


@pytest.fixture
def asked(by_color, monkeypatch):
    """What the model was given: sizes of embedded inputs, and prompts."""
    log = {"embedded": [], "prompts": []}
    encode, decode = by_color.encode, by_color.predict

    def logged_encode(images, input_sizes, drop_path=None):
        log["embedded"] += input_sizes.tolist()
        return encode(images, input_sizes)

    def logged_decode(embedding, mask_image, prompts):
        log["prompts"].append(prompts)
        assert (mask_image.diff() >= 0).all()
        parts = [
            decode(
                embedding[image : image + 1], mask_image[:1], prompts.select(torch.tensor([row]))
            )
            for row, image in enumerate(mask_image)
        ]
        return MaskDecoderOutput(*(torch.cat([part[i] for part in parts]) for i in (0, 1)))

    monkeypatch.setattr(by_color, "encode", logged_encode)
    monkeypatch.setattr(by_color, "predict", logged_decode)
    return log


def tiled(model, image, **options):
    predictor = SamPredictor(model, tile=64, halo=8, **options)
    predictor.set_image(image)
    return predictor


def iou(mask, truth, index):
    return RLEMasks.from_dense(mask[None]).iou(truth[index : index + 1])[0, 0]


def test_only_tiles_that_prompts_touch_are_embedded(by_color, asked, scene):
    image, truth = scene
    predictor = tiled(by_color, image)
    assert predictor.is_image_set
    assert predictor.original_size == (128, 160)
    assert not asked["embedded"]
    masks, scores, low = predictor.predict(np.array([[10, 10]]), np.array([1]))
    assert masks.shape == (3, 128, 160)
    assert low.shape == (3, 32, 32)
    assert scores.tolist() == [1, 1, 1]
    assert iou(masks[0], truth, 0) > 0.9
    predictor.predict(np.array([[18, 20]]), np.array([1]))
    assert asked["embedded"] == [[64, 64]]


@pytest.mark.parametrize("prompt", ["click", "box"])
@pytest.mark.parametrize("index", range(len(BOXES)))
def test_objects_across_borders_are_found_whole(by_color, asked, scene, prompt, index):
    image, truth = scene
    predictor, (x0, y0, x1, y1) = tiled(by_color, image), BOXES[index]
    if prompt == "click":
        point = np.array([[min(x0 + 8, (x0 + x1) // 2), min(y0 + 8, (y0 + y1) // 2)]])
        masks, _, _ = predictor.predict(point, np.array([1]))
    else:
        points = np.array([[(x0 + x1) // 2, (y0 + y1) // 2]])
        masks, _, _ = predictor.predict(
            points, np.array([1]), box=np.array([x0, y0, x1 - 1, y1 - 1])
        )
    assert iou(masks[0], truth, index) > 0.75
    assert not masks[0][:, x1 + 4 :].any()
    assert len(asked["embedded"]) <= 4
    assert max(map(max, asked["embedded"])) == 64


def test_prompts_at_once_are_answered_as_one_by_one(by_color, asked, scene):
    image, _ = scene
    predictor = tiled(by_color, image)
    points = np.array([[10, 10], [132, 103], [60, 50], [15, 20], [104, 5]])
    coords = torch.from_numpy(predictor.transform.apply_coords(points, (128, 160)))[:, None]
    labels = torch.ones(len(points), 1, dtype=torch.int64)
    together, _, low = predictor.predict_torch(coords, labels, return_logits=True)
    for row, point in enumerate(points):
        alone, _, own = tiled(by_color, image).predict(
            point[None], np.array([1]), return_logits=True
        )
        np.testing.assert_allclose(together[row].numpy(), alone, atol=1e-4)
        np.testing.assert_allclose(low[row].numpy(), own, atol=1e-4)


def test_an_image_no_larger_than_a_tile_is_answered_as_without_tiles(by_color, asked):
    image, _ = rectangles((40, 64), [(4, 4, 20, 30)])
    plain = SamPredictor(by_color)
    plain.set_image(image)
    given = (np.array([[10, 10]]), np.array([1]))
    for found, wanted in zip(
        tiled(by_color, image).predict(*given, return_logits=True),
        plain.predict(*given, return_logits=True),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_earlier_logits_keep_the_resolution_of_their_tile(by_color, asked, scene):
    """The smallest object has no cell in the image, and fifteen in its tile."""
    image, _ = scene
    predictor = tiled(by_color, image)
    point, label = np.array([[132, 103]]), np.array([1])
    _, _, low = predictor.predict(point, label)
    shown = asked["prompts"][-1]
    again, _, same = predictor.predict(
        np.array([[132, 103], [133, 101]]), np.array([1, 1]), mask_input=low[:1]
    )
    used = asked["prompts"][-1].masks[0]
    assert len(asked["embedded"]) == 1
    assert 4 <= (used > 0).sum() <= 9
    assert again[0].any()
    np.testing.assert_allclose(same, low, atol=1e-4)
    # Of another predictor, they are a mask of the image.
    other = tiled(by_color, image)
    other.predict(point, label, mask_input=low[:1])
    assert asked["prompts"][-1].masks[0].shape == used.shape
    assert not torch.equal(asked["prompts"][-1].masks[0], used)
    assert shown.masks is None


@pytest.mark.slow
def test_kept_embeddings_and_logits_are_limited(by_color, asked, scene, monkeypatch):
    image, _ = scene
    monkeypatch.setattr(tile_decoder, "CACHE_BYTES", 1)
    monkeypatch.setattr(tile_decoder, "ANSWERS_KEPT", 1)
    predictor = tiled(by_color, image)
    for point in ([10, 10], [132, 103], [10, 12]):
        predictor.predict(np.array([point]), np.array([1]))
    [decoder] = predictor.crop_decoders
    assert len(asked["embedded"]) >= 3
    assert len(decoder.embeddings) == 1
    assert decoder.nbytes == next(iter(decoder.embeddings.values())).nbytes
    assert len(decoder._answers) == 1


def test_several_images_and_prompts_without_a_place(by_color, asked, scene):
    image, truth = scene
    predictor = SamPredictor(by_color, tile=64)
    predictor.set_images([image, image[::-1, :, ::-1]], "BGR")
    predictor.select(1)
    masks, _, _ = predictor.predict(np.array([[10, 117]]), np.array([1]))
    assert iou(masks[0][::-1], truth, 0) > 0.9
    predictor.predict(np.array([[10, 117]]), np.array([0]))
    assert predictor.get_image_embedding().shape[0] == 1
    assert asked["embedded"] == [[64, 64], [51, 64]]
    predictor.reset_image()
    with error_line("no image is set"):
        predictor.predict(np.array([[10, 117]]), np.array([1]))


def test_what_tiles_cannot_is_one_line(by_color):
    with error_line(r"halo of tile 64 must be between 0 and 32.*40"):
        SamPredictor(by_color, tile=64, halo=40)
    with error_line(r"^tile crops.*set_torch_image"):
        SamPredictor(by_color, tile=64).set_torch_image(torch.zeros(1, 3, 64, 48), (64, 48))


def test_no_prompts_have_no_masks(by_color, scene):
    predictor = SamPredictor(by_color, tile=64)
    predictor.set_image(scene[0])
    masks, iou, low = predictor.predict_torch(None, None, torch.zeros(0, 4))
    assert (len(masks), len(iou), len(low)) == (0, 0, 0)
    assert masks.shape[2:] == scene[0].shape[:2]


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"tile": 40, "halo": 8}])
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["plain", "windowed"])
@torch.no_grad()
def test_a_refined_mask_is_the_better_one_for_a_box_and_the_mean_for_clicks(spec, options):
    predictor = SamPredictor(build_model(spec, 0).eval(), **options)
    predictor.set_image(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    box, point = torch.tensor([[5.0, 4.0, 20.0, 16.0]]), torch.tensor([[[9.0, 30.0]]])
    for prompt in ((None, None, box), (point, torch.ones(1, 1), None)):
        first = plain = predictor.predict_torch(*prompt, return_logits=True)
        for count in (1, 2):
            wanted = []
            for mask in zip(*(each.split(1, 1) for each in plain), strict=True):
                again = predictor.predict_torch(*prompt, mask[2], False, return_logits=True)
                mean = (mask[0] + again[0]) / 2, mask[1], (mask[2] + again[2]) / 2
                better = max(mask, again, key=lambda each: each[1])
                wanted.append(mean if prompt[2] is None else better)
            plain = [torch.cat(parts, 1) for parts in zip(*wanted, strict=True)]
            found = predictor.predict_torch(*prompt, return_logits=True, refine=count)
            expected = plain
            if spec == WINDOWED and "tile" not in options:  # they are looked at more closely
                ask = make_prompts(*prompt, None, False, predictor.model.config.mask_size)
                decode = PromptDecoder(predictor.model, predictor.get_image_embedding())
                low = torch.cat(
                    [
                        decode(replace(ask, masks=mask[:, 0], closer=True)).low_res_logits
                        for mask in plain[2].split(1, 1)
                    ],
                    1,
                )
                assert not torch.allclose(low, plain[2])
                whole = predictor.transform.image_transform((60, 90))
                expected = whole.logits_to_original(low), plain[1], low
            # Further clicks go on from the masks of a click before they were refined.
            fed = first[2] if prompt[2] is None else expected[2]
            torch.testing.assert_close(found, (*expected[:2], fed), atol=1e-4, rtol=1e-4)
            masks, *_ = predictor.predict_torch(*prompt, refine=count)
            assert (masks == (found[0] > 0)).float().mean() > 0.999
    with error_line(r"^refine must be .*\(got -1\)$"):
        predictor.predict(box=box[0], refine=-1)
