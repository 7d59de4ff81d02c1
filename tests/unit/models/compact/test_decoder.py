"""Answers in windows: what they start from, and that no prompt depends on another."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from gigamask.masks.windows import paste
from gigamask.models.compact.prompt_maps import (
    MIDDLE_WINDOW,
    QUARTER,
    PromptShapes,
    masks_in_windows,
)
from gigamask.models.init import build_model
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.prompt_encoder import make_prompts
from gigamask.models.sam.sam import Sam
from gigamask.types import OUTSIDE_LOGIT, Prompts
from tests.little import COMPACT, noise

MASK_IMAGE = torch.tensor([0, 0, 2, 2, 2])


def random_model(seed: int = 0) -> Sam:
    """Return a model no part of which has a special value."""
    model, chance = build_model(COMPACT, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=chance))
    return model.eval()


@pytest.fixture(scope="module")
def case() -> tuple[Sam, Tensor, Prompts]:
    """A model in float64, embeddings of three images, and five prompts of two of them."""
    model, chance = random_model().double(), torch.Generator().manual_seed(1)
    images = torch.rand((3, 3, 64, 64), generator=chance, dtype=torch.float64) * 255
    with torch.no_grad():
        embedding = model.encode(images, torch.tensor([[64, 64], [64, 32], [40, 64]]))
    labels = torch.tensor([[1, 0, -1], [2, 3, -1], [-1, -1, -1], [1, -1, -1], [2, 3, 1]])
    points = torch.rand((5, 3, 2), generator=chance, dtype=torch.float64) * 30
    points[:, 1] += 30
    masks = torch.full((5, 64, 64), -5.0, dtype=torch.float64)
    for m in range(5):
        masks[m, 5 * m : 5 * m + 12, 20:50] = 3.0
    return model, embedding, Prompts(points, labels, masks, True)


HAS_MASK = torch.tensor([True, False, True, False, False])


def one(prompts: Prompts, m: int, has_mask: bool) -> Prompts:
    """Return one prompt alone."""
    return Prompts(
        prompts.points_xy_input[m : m + 1],
        prompts.labels[m : m + 1],
        prompts.masks[m : m + 1] if prompts.masks is not None and has_mask else None,
        prompts.multimask_output,
    )


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("has_mask", ["none", "mixed", "all"])
def test_each_prompt_is_answered_as_if_alone(case, several, has_mask):
    """Whatever else is asked, of the same image or another, and with or without mask prompts."""
    model, embedding, prompts = case
    given = {"none": HAS_MASK & False, "mixed": HAS_MASK, "all": HAS_MASK | True}[has_mask]
    prompts = replace(
        prompts,
        multimask_output=several,
        masks=None if has_mask == "none" else prompts.masks,
        has_mask_prompt=given if has_mask == "mixed" else None,
    )
    logits, iou = model.decode(embedding, MASK_IMAGE, prompts)
    assert logits.shape == (5, 3 if several else 1, 64, 64)
    for m, image in enumerate(MASK_IMAGE.tolist()):
        alone = model.decode(
            embedding[image : image + 1],
            torch.zeros(1, dtype=torch.int64),
            one(prompts, m, bool(given[m])),
        )
        assert torch.allclose(logits[m], alone[0][0], rtol=1e-9, atol=1e-9)
        assert torch.allclose(iou[m], alone[1][0], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_what_stands_in_the_place_of_a_missing_mask_is_not_read(case):
    model, embedding, prompts = case
    prompts = replace(prompts, has_mask_prompt=HAS_MASK)
    broken = torch.where(HAS_MASK[:, None, None], prompts.masks, float("nan"))
    found = model.decode(embedding, MASK_IMAGE, replace(prompts, masks=broken))
    clean = model.decode(embedding, MASK_IMAGE, prompts)
    assert all(torch.equal(*pair) for pair in zip(found, clean, strict=True))


def test_tokens_that_only_pad_change_nothing(case):
    model, embedding, prompts = case
    prompts = replace(prompts, masks=None)
    longer = replace(
        prompts,
        points_xy_input=torch.nn.functional.pad(prompts.points_xy_input, (0, 0, 0, 2), value=9.0),
        labels=torch.nn.functional.pad(prompts.labels, (0, 2), value=1),
        token_mask=torch.tensor([[True] * 3 + [False] * 2] * 5),
    )
    for found, expected in zip(
        model.decode(embedding, MASK_IMAGE, longer),
        model.decode(embedding, MASK_IMAGE, prompts),
        strict=True,
    ):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_single_output_is_the_best_of_three_or_the_middle_window(case):
    model, embedding, prompts = case
    prompts = replace(prompts, labels=prompts.labels.index_fill(1, torch.tensor([1, 2]), -1))
    prompts.labels[[1, 4], 1] = 3
    mixed = replace(prompts, has_mask_prompt=HAS_MASK)
    three, iou, *_ = model.predict(embedding, MASK_IMAGE, mixed)
    single, own, *_ = model.predict(embedding, MASK_IMAGE, replace(mixed, multimask_output=False))
    best = torch.where(HAS_MASK, MIDDLE_WINDOW, iou.argmax(1))
    assert (iou.argmax(1) != MIDDLE_WINDOW).any(), "else nothing is tested"
    rows = torch.arange(5)
    assert torch.equal(single.logits[:, 0], three.logits[rows, best])
    assert torch.equal(single.windows[:, 0], three.windows[rows, best])
    assert torch.equal(own[:, 0], iou[rows, best])
    three, iou, *_ = model.predict(embedding, MASK_IMAGE, prompts)
    single, own, *_ = model.predict(embedding, MASK_IMAGE, replace(prompts, multimask_output=False))
    assert torch.allclose(single.logits[:, 0], three.logits[:, MIDDLE_WINDOW], atol=1e-9)
    assert torch.allclose(own[:, 0], iou[:, MIDDLE_WINDOW], atol=1e-9)


@pytest.mark.slow
def test_a_correction_is_averaged_with_answers_in_four_windows(case):
    """A mask prompt and a click after another prompt, in rows 0 and 4; training answers once."""
    model, embedding, prompts = case
    single = replace(prompts, multimask_output=False)
    model.train()
    try:
        before, same = model.decode(embedding, MASK_IMAGE, single)
    finally:
        model.eval()
    found, iou = model.decode(embedding, MASK_IMAGE, single)
    assert torch.equal(iou, same)
    is_other = (found != before)[:, 0]
    assert is_other.flatten(1).any(1).tolist() == [True, False, False, False, True]
    again = replace(single, masks=before[:, 0], closer=True)
    answer = model.mask_decoder(embedding, MASK_IMAGE, again, model.prompt_encoder, False)
    cells = torch.arange(64) + 0.5
    around = PromptShapes.from_prompts(again).windows(again.masks, model.config.decoder, 64)[:, 0]
    for row in 0, 4:
        windows = answer.masks.windows[row]
        assert torch.allclose(windows[[0, 3], [0, 2]], around[row, [0, 2]], atol=1e-9)
        sides = (around[row, 2:] - around[row, :2]) * QUARTER
        assert torch.allclose(windows[:, 2:] - windows[:, :2], sides.expand(4, 2))
        x0, y0, x1, y1 = windows.T[..., None]
        inside = ((cells >= x0) & (cells < x1))[:, None] & ((cells >= y0) & (cells < y1))[..., None]
        pasted = (model.on_grid(answer)[row] * inside).sum(0) / inside.sum(0)
        was = before[row, 0]
        expected = torch.where(inside.any(0), (was + pasted) / 2, was)
        assert torch.allclose(found[row, 0], expected, atol=1e-9)
    every = model.predict_all(
        embedding, MASK_IMAGE, replace(prompts, has_mask_prompt=HAS_MASK | True)
    )
    assert torch.allclose(every.masks[:, :1], found, rtol=1e-9, atol=1e-9)


def test_in_training_the_middle_window_answers_a_box(case):
    model, embedding, prompts = case
    boxes = replace(one(prompts, 1, False), labels=torch.tensor([[2, 3, -1]]))
    two = replace(prompts, masks=None, multimask_output=False)
    zero = torch.zeros(1, dtype=torch.int64)
    three, iou, *_ = model.predict(embedding[:1], zero, boxes)
    model.train()
    try:
        with mock.patch.object(
            model.mask_decoder, "forward", wraps=model.mask_decoder.forward
        ) as own:
            alone = model.predict(embedding[:1], zero, replace(boxes, multimask_output=False))
            mixed = model.predict(embedding, MASK_IMAGE, two)
    finally:
        model.eval()
    assert [call.args[4] for call in own.call_args_list] == [False, True]
    for found, row in ((alone, 0), (mixed, 1)):
        single, own_iou, *_ = found
        assert torch.allclose(single.logits[row, 0], three.logits[0, MIDDLE_WINDOW], atol=1e-9)
        assert torch.allclose(own_iou[row, 0], iou[0, MIDDLE_WINDOW], atol=1e-9)


def test_windows_of_a_click_compete(case):
    """A click's predicted IoU depends on its other windows, a mask prompt's does not."""
    model, embedding, prompts = case
    leaf = embedding.clone().requires_grad_()
    zero = torch.zeros(1, dtype=torch.int64)
    for has_mask in (False, True):
        # Features at the border are only in the largest window.
        asked = replace(
            one(prompts, 0, has_mask),
            points_xy_input=torch.full((1, 1, 2), 32.0, dtype=torch.float64),
            labels=torch.ones(1, 1, dtype=torch.int64),
        )
        if has_mask:
            small = torch.full_like(prompts.masks[:1], -5.0)
            small[:, 30:34, 30:34] = 3.0
            asked = replace(asked, masks=small)
        _, iou, *_ = model.predict(leaf[:1], zero, asked)
        (gradient,) = torch.autograd.grad(iou[0, 0], leaf)
        assert bool(gradient[0, :, :2, :2].any()) is not has_mask


def iou_of(found: Tensor, expected: Tensor) -> float:
    return float((found & expected).sum() / (found | expected).sum())


@pytest.mark.slow
def test_an_untrained_model_answers_with_the_prior():
    """A box's ellipse, a click's disc in each of its windows, the mask of a mask prompt."""
    model = build_model(COMPACT, 0)
    images = noise(1, 64)
    embedding = model.encode(images, torch.tensor([[64, 64]]))
    zero = torch.zeros(1, dtype=torch.int64)
    points = torch.tensor([[[10.0, 20.0], [49.0, 43.0]]])
    box = Prompts(points, torch.tensor([[2, 3]]), None, True)
    cells = torch.arange(64) + 0.5

    def ellipse(x: float, y: float, wide: float, high: float) -> Tensor:
        return ((cells - x) / wide).square() + ((cells[:, None] - y) / high).square() < 1

    logits, iou = model.decode(embedding, zero, box)
    for k in range(3):
        assert iou_of(logits[0, k] > 0, ellipse(30, 32, 19.5, 11.5)) > 0.85
    assert ((iou > 0) & (iou < 1)).all()
    assert logits.min().item() == OUTSIDE_LOGIT
    click = Prompts(points[:, :1], torch.tensor([[1]]), None, True)
    logits, _ = model.decode(embedding, zero, click)
    for k, part in enumerate(COMPACT.decoder.click_windows[1:], 1):
        radius = 0.22 * part * 64
        assert iou_of(logits[0, k] > 0, ellipse(10.5, 20.5, radius, radius)) > 0.7
    fed = torch.where(ellipse(40, 25, 12, 15), 4.0, -4.0)[None]
    logits, _ = model.decode(embedding, zero, replace(click, masks=fed))
    assert all(iou_of(logits[0, k] > 0, fed[0] > 0) > 0.8 for k in range(3))


def test_answers_are_pasted_where_their_windows_are(case):
    model, embedding, prompts = case
    windows, iou, *_ = model.predict(embedding, MASK_IMAGE, prompts)
    logits, same = model.decode(embedding, MASK_IMAGE, prompts)
    flat = paste(windows.logits.flatten(0, 1), windows.windows.flatten(0, 1), 64, OUTSIDE_LOGIT)
    assert torch.equal(logits.flatten(0, 1), flat)
    assert torch.equal(iou, same)
    half = windows.paste(32, 64)
    assert half.shape == (5, 3, 32, 32)
    inner = torch.nn.functional.avg_pool2d(logits, 2)
    assert (half - inner).abs().mean() < 0.2 * inner.abs().mean(), "the same place on another grid"


def test_prompt_decoder_hands_on_the_windows(case):
    model, embedding, prompts = case
    decoder = PromptDecoder(model, embedding, MASK_IMAGE)
    full = decoder(prompts)
    assert full.in_window.logits.shape[:2] == (5, 3)
    best = replace(decoder, best_only=True)(prompts)
    index = full.iou_predictions.argmax(1)
    rows = torch.arange(5)
    assert torch.equal(best.in_window.windows[:, 0], full.in_window.windows[rows, index])
    assert torch.equal(best.logits[:, 0], full.logits[rows, index])
    assert torch.equal(best.iou_predictions[:, 0], full.iou_predictions[rows, index])


@pytest.mark.slow
def test_every_part_learns(case):
    """All gradients are finite, and zero only where a prompt of its kind is missing."""
    model, embedding, prompts = case
    model.zero_grad()
    images = torch.rand((3, 3, 64, 64), generator=torch.Generator().manual_seed(5)) * 255
    embedding = model.encode(images.double(), torch.tensor([[64, 64], [64, 32], [40, 64]]))
    logits, iou = model.decode(embedding, MASK_IMAGE, replace(prompts, has_mask_prompt=HAS_MASK))
    (logits.square().mean() + iou.square().mean()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = {name for name, each in gradients.items() if each is None or not each.any()}
    assert all(each.isfinite().all() for each in gradients.values() if each is not None)
    # Answers always have a mask prompt, at least the prior, and a softmax sees no keys' bias.
    assert {name for name in missing if not name.endswith("k_proj.bias")} == {
        "prompt_encoder.no_mask_embed.weight"
    }


@pytest.mark.slow
def test_half_precision_is_close_to_single():
    model = random_model()
    images = noise(1, 64)
    points = torch.tensor([[[20.0, 30.0], [0.0, 0.0]], [[10.0, 5.0], [50.0, 60.0]]])
    prompts = Prompts(points, torch.tensor([[1, -1], [2, 3]]), None, True)
    both = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        embedding = model.encode(images, torch.tensor([[64, 48]]))
        exact, iou = model.decode(embedding, both, prompts)
        with torch.autocast("cpu", torch.bfloat16):
            half = model.encode(images, torch.tensor([[64, 48]]))
            near, own = model.decode(half, both, prompts)
    assert near.dtype == torch.float32
    assert (near - exact).abs().max() < 0.15 * exact.abs().max()
    assert (near - exact).abs().mean() < 0.02 * exact.abs().mean()
    assert (own - iou).abs().max() < 0.02


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_points_may_have_any_type(kind):
    model = build_model(COMPACT, 0)
    embedding = torch.randn(
        (1, COMPACT.encoder.channels(COMPACT), 16, 16), generator=torch.Generator().manual_seed(0)
    )
    points = torch.tensor([[[20, 30]]])
    labels, zero = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    found, expected = (
        model.predict(embedding, zero, Prompts(each, labels, None, True))
        for each in (points.to(kind), points.float())
    )
    assert torch.equal(found[0].logits, expected[0].logits)
    assert torch.equal(found[1], expected[1])


def test_no_prompts_give_no_masks(case):
    model, embedding, prompts = case
    none = Prompts(prompts.points_xy_input[:0], prompts.labels[:0], prompts.masks[:0], True)
    logits, iou = model.decode(embedding, MASK_IMAGE[:0], none)
    assert (logits.shape, iou.shape) == ((0, 3, 64, 64), (0, 3))


def test_features_are_sampled_at_both_strides(case):
    """In a window of the whole image each sample of the answer is a feature of stride 2."""
    model, embedding, _ = case
    whole = torch.tensor([[0.0, 0, 64, 64]], dtype=torch.float64).repeat(2, 1)
    coarse, fine = model.mask_decoder._sample(embedding, torch.tensor([1, 2]), whole, 1)
    width, images = COMPACT.encoder.width, embedding[1:]
    assert torch.allclose(coarse, images[:, : 1 + width], atol=1e-12)
    assert torch.allclose(fine[:, 1:], torch.pixel_shuffle(images[:, 1 + width :], 2), atol=1e-12)
    assert torch.equal(fine[:, :1], images[:, :1].repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_a_mask_prompt_is_background_beyond_the_image(case):
    _, _, prompts = case
    masks = torch.full_like(prompts.masks[:1], 2.0)
    windows = torch.tensor([[-32.0, 0, 32, 64]], dtype=torch.float64)
    (found,) = masks_in_windows(masks, windows[None], 64, 32)
    assert torch.allclose(found[:, 16:], torch.tensor(2.0).double())
    assert torch.allclose(found[:, :16], torch.tensor(-10.0).double())


def test_points_are_encoded_where_they_are_in_the_window(case):
    """The click in the center of its windows, the corners of a box within."""
    model, embedding, prompts = case
    seen = []
    layer = model.prompt_encoder.pe_layer
    encode = layer.encode
    with mock.patch.object(layer, "encode", lambda xy: seen.append(xy) or encode(xy)):
        for m in (3, 1):
            model.decode(embedding[:1], torch.zeros(1, dtype=torch.int64), one(prompts, m, False))
    click, box = (each for each in seen if each.ndim == 3 and each.shape[1] == 3)
    assert torch.allclose(click[:, 0], torch.tensor(0.5).double())
    for corners, size in zip(box[:, :2], COMPACT.decoder.box_windows, strict=True):
        edges = torch.tensor([-0.5, 0.5]).double()[:, None].expand(2, 2) / size
        assert torch.allclose(corners, 0.5 + edges)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_answer_as_others_do(dtype):
    boxes, answers = torch.tensor([[10.0, 12, 40, 50], [3, 3, 60, 30]]), []
    for model in (random_model(), random_model().to(dtype)):
        pixels, size = torch.zeros(1, 3, 64, 64, dtype=torch.uint8), torch.tensor([[64, 64]])
        prompts = make_prompts(None, None, boxes, None, True, model.config.mask_size)
        with torch.no_grad():
            embedding = model.encode(pixels, size, None)
            answers.append(model.predict(embedding, torch.tensor([0, 0]), prompts))
    exact, half = (answer.iou_predictions.float() for answer in answers)
    assert torch.allclose(exact, half, atol=0.05)
