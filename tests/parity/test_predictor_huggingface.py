"""The predictor against Hugging Face's processor and `SamModel`, from pixels to masks."""

import warnings

import numpy as np
import pytest
import torch

from gigamask.inference.predictor import SamPredictor
from tests.parity.test_huggingface_sam import SMALL, pair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

SIDE = SMALL.image_size
POINTS, LABELS = [[[12.5, 30.0], [70.0, 8.0]]], [[1, 0]]
BOX = [[[10.0, 4.0, 60.5, 40.0]]]


@pytest.fixture(scope="module")
def models():
    return pair(SMALL)


@pytest.fixture(scope="module")
def processor():
    return SamImageProcessorPil(
        size={"longest_edge": SIDE},
        pad_size={"height": SIDE, "width": SIDE},
        mask_size={"longest_edge": 32},
        mask_pad_size={"height": 32, "width": 32},
    )


def picture(size: tuple[int, int]) -> np.ndarray:
    """Random pixels, smoothed a little so that resizing does not leave mere grey."""
    coarse = np.random.default_rng(5).integers(
        0, 256, (-(-size[0] // 3), -(-size[1] // 3), 3), dtype=np.uint8
    )
    return coarse.repeat(3, 0).repeat(3, 1)[: size[0], : size[1]]


@torch.no_grad()
def theirs(
    models, processor, image: np.ndarray, several: bool, mask: np.ndarray | None, **prompts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns logits at the image's size, IoU and low-resolution logits."""
    seen = processor(image, return_tensors="pt")
    height, width = image.shape[:2]
    h, w = seen["reshaped_input_sizes"][0].tolist()
    scale = torch.tensor([w / width, h / height])
    given = {}
    for name, value in prompts.items():
        tensor = torch.tensor(value)[None]
        given[name] = (
            tensor
            if name == "input_labels"
            else (tensor.float().unflatten(-1, (-1, 2)) * scale).flatten(-2).view(tensor.shape)
        )
    if mask is not None:
        given["input_masks"] = torch.from_numpy(mask)[None]
    answer = models[1](pixel_values=seen["pixel_values"], multimask_output=several, **given)
    large = processor.post_process_masks(
        [answer.pred_masks[0]], seen["original_sizes"], seen["reshaped_input_sizes"], binarize=False
    )
    return large[0][0], answer.iou_scores[0, 0], answer.pred_masks[0, 0]


def assert_close(mine: np.ndarray, other: torch.Tensor) -> None:
    assert mine.shape == tuple(other.shape)
    assert np.abs(mine - other.numpy()).max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("size", [(45, 90), (64, 64), (130, 75)])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("kind", ["points", "box", "points and box"])
def test_masks_scores_and_logits_agree(models, processor, size, several, kind):
    image, mine, given = picture(size), {}, {}
    if "points" in kind:
        mine |= {"point_coords": np.array(POINTS[0]), "point_labels": np.array(LABELS[0])}
        given |= {"input_points": POINTS, "input_labels": LABELS}
    if "box" in kind:
        mine |= {"box": np.array(BOX[0][0])}
        given |= {"input_boxes": BOX[0]}
    predictor = SamPredictor(models[0])
    predictor.set_image(image)
    found = predictor.predict(**mine, multimask_output=several, return_logits=True)
    expected = theirs(models, processor, image, several, None, **given)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    masks = predictor.predict(**mine, multimask_output=several)[0]
    assert (masks != (expected[0].numpy() > 0)).mean() <= 1e-4


def test_a_mask_fed_back_agrees(models, processor):
    image, predictor = picture((45, 90)), SamPredictor(models[0])
    predictor.set_image(image)
    low = predictor.predict(np.array(POINTS[0]), np.array(LABELS[0]))[2][:1]
    found = predictor.predict(
        np.array(POINTS[0]), np.array(LABELS[0]), np.array(BOX[0][0]), low, False, True
    )
    expected = theirs(
        models,
        processor,
        image,
        False,
        low,
        input_points=POINTS,
        input_labels=LABELS,
        input_boxes=BOX[0],
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
