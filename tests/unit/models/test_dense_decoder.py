"""Options of SAM's decoder: each is compared with SAM's own decoder and a plain computation."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models.compact.prompt_maps import PromptShapes
from gigamask.models.configs import SamConfig, SamDecoder, tiny, vit_b
from gigamask.models.init import build_model
from gigamask.models.sam.dense_decoder import SIZES, DenseMaskDecoder, prompt_frame
from gigamask.models.sam.mask_decoder import MaskDecoder
from gigamask.models.sam.sam import Sam
from gigamask.types import Prompts
from tests.little import DENSE, SPEC

MASK_IMAGE = torch.tensor([0, 0, 2, 2, 2])
HAS_MASK = torch.tensor([True, False, True, False, False])
DOUBLE = {"dtype": torch.float64}
OPTIONS = {
    "prior": SamDecoder(prior=True),
    "residual": SamDecoder(prior=True, residual=True),
    "windows": SamDecoder(windows=True),
    "all": DENSE,
}


def with_options(decoder: SamDecoder) -> SamConfig:
    return replace(SPEC, decoder=decoder)


def random_model(config: SamConfig) -> Sam:
    """Return a model in float64 no part of which has a special value.

    Parameters of one name have one value, whatever the options.
    """
    model = build_model(config, 0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            chance = torch.Generator().manual_seed(sum(name.encode()))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=chance, **DOUBLE))
    return model


def embed(model: Sam) -> Tensor:
    images = torch.rand((3, 3, 64, 64), generator=torch.Generator().manual_seed(1), **DOUBLE) * 255
    return model.encode(images, torch.tensor([[64, 64], [64, 32], [40, 64]]))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Five prompts of two images: clicks, boxes, nothing but padding, and both."""
    chance = torch.Generator().manual_seed(1)
    labels = torch.tensor([[1, 0, -1], [2, 3, -1], [-1, -1, -1], [1, -1, -1], [2, 3, 1]])
    points = torch.rand((5, 3, 2), generator=chance, **DOUBLE) * 30
    points[:, 1] += 30
    masks = torch.full((5, 32, 32), -5.0, **DOUBLE)
    for m in range(5):
        masks[m, 3 * m : 3 * m + 8, 10:25] = 4.0
    return Prompts(points, labels, masks, True)


def given(prompts: Prompts, has_mask: str, several: bool = True) -> tuple[Prompts, Tensor]:
    """Return the prompts, and which of them have a mask prompt."""
    which = {"none": HAS_MASK & False, "mixed": HAS_MASK, "all": HAS_MASK | True}[has_mask]
    masks = None if has_mask == "none" else prompts.masks
    mixed = which if has_mask == "mixed" else None
    changes = {"multimask_output": several, "masks": masks, "has_mask_prompt": mixed}
    return replace(prompts, **changes), which


def one(prompts: Prompts, m: int, has_mask: bool) -> Prompts:
    """Return one prompt alone."""
    masks = prompts.masks[m : m + 1] if prompts.masks is not None and has_mask else None
    points, labels = prompts.points_xy_input[m : m + 1], prompts.labels[m : m + 1]
    return Prompts(points, labels, masks, prompts.multimask_output)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(*pair, rtol=1e-9, atol=1e-9) for pair in pairs)


def discs(prompts: Prompts, has_mask: Tensor, side: int = 32) -> Tensor:
    """Return the three priors of each prompt on the whole image, one cell at a time."""
    found = torch.zeros(5, 3, side, side, **DOUBLE)
    windows = PromptShapes.from_prompts(prompts).windows(prompts.masks, SIZES, 64)
    for m, labels in enumerate(prompts.labels.tolist()):
        for k in range(3):
            x0, y0, x1, y1 = windows[m, k].tolist()
            center, radius = ((x0 + x1) / 2, (y0 + y1) / 2), [0.22 * (x1 - x0), 0.22 * (y1 - y0)]
            if 2 in labels:
                first, last = (prompts.points_xy_input[m, i] + 0.5 for i in (0, 1))
                center, radius = ((first + last) / 2).tolist(), ((last - first) / 2).tolist()
            for row in range(side):
                for column in range(side):
                    x, y = (64 / side * (i + 0.5) for i in (column, row))
                    away = ((x - center[0]) / radius[0]) ** 2 + ((y - center[1]) / radius[1]) ** 2
                    found[m, k, row, column] = min(1.5, max(-3.0, 4 * (1.05 - away**0.5)))
    if prompts.masks is not None:
        masks = prompts.masks.clamp(-3, 3)[:, None]
        found = torch.where(has_mask[:, None, None, None], masks, found)
    return found


def test_without_options_it_is_sams_decoder():
    assert SamDecoder().unpublished(SPEC) == ""
    assert all(options.unpublished(SPEC) for options in OPTIONS.values())
    model = build_model(SPEC, 0)
    assert type(model.mask_decoder) is MaskDecoder
    assert SPEC.embedding_channels == SPEC.embedding_dim


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_no_weights(name):
    own, found = (build_model(SPEC, 0), build_model(with_options(OPTIONS[name]), 0))
    assert type(found.mask_decoder) is DenseMaskDecoder
    assert found.state_dict().keys() == own.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("has_mask", ["none", "mixed", "all"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_prompt_is_answered_as_if_alone(prompts, name, has_mask, several):
    model = random_model(with_options(OPTIONS[name]))
    asked, which = given(prompts, has_mask, several)
    with torch.no_grad():
        embedding = embed(model)
        logits, iou = model.decode(embedding, MASK_IMAGE, asked)
        assert logits.shape == (5, 3 if several else 1, 32, 32)
        for m, image in enumerate(MASK_IMAGE.tolist()):
            alone = model.decode(
                embedding[image : image + 1],
                torch.zeros(1, dtype=torch.int64),
                one(asked, m, bool(which[m])),
            )
            assert close((logits[m], iou[m]), (alone[0][0], alone[1][0]))


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_only_padding_is_not_read(prompts, name):
    """Masks of prompts without one, tokens that pad, and no prompts at all."""
    model = random_model(with_options(OPTIONS[name]))
    asked, _ = given(prompts, "mixed")
    with torch.no_grad():
        embedding = embed(model)
        clean = model.decode(embedding, MASK_IMAGE, asked)
        broken = torch.where(HAS_MASK[:, None, None], prompts.masks, float("nan"))
        assert close(model.decode(embedding, MASK_IMAGE, replace(asked, masks=broken)), clean)
        longer = replace(
            asked,
            points_xy_input=F.pad(asked.points_xy_input, (0, 0, 0, 2), value=9.0),
            labels=F.pad(asked.labels, (0, 2), value=1),
            token_mask=torch.tensor([[True] * 3 + [False] * 2] * 5),
        )
        assert close(model.decode(embedding, MASK_IMAGE, longer), clean)
        none = Prompts(asked.points_xy_input[:0], asked.labels[:0], asked.masks[:0], True)
        logits, iou = model.decode(embedding, MASK_IMAGE[:0], none)
    assert (logits.shape, iou.shape) == ((0, 3, 32, 32), (0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("has_mask", ["none", "mixed", "all"])
def test_the_prior_is_sams_mask_prompt(prompts, has_mask, several):
    """SAM's decoder predicts the same where it is given the middle prior as a mask prompt."""
    asked, which = given(prompts, has_mask, several)
    priors = discs(asked, which)
    masks = priors[:, 1]
    if asked.masks is not None:
        masks = torch.where(which[:, None, None], asked.masks, masks)
    with torch.no_grad():
        plain = random_model(SPEC)
        expected = plain.decode(
            embed(plain), MASK_IMAGE, replace(asked, masks=masks, has_mask_prompt=None)
        )
        model = random_model(with_options(OPTIONS["prior"]))
        assert close(model.decode(embed(model), MASK_IMAGE, asked), expected)
        residual = random_model(with_options(OPTIONS["residual"]))
        added = expected[0] + (priors if several else priors[:, 1:2])
        assert close(residual.decode(embed(residual), MASK_IMAGE, asked), (added, expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("custom_init", [False, True])
@pytest.mark.parametrize("windows", [False, True])
def test_an_untrained_residual_is_the_prior(prompts, custom_init, windows):
    options = replace(DENSE, windows=windows)
    config = replace(with_options(options), custom_init=custom_init)
    model = build_model(config, 0).double()
    asked, which = given(prompts, "mixed")
    with torch.no_grad():
        logits, _ = model.decode(embed(model), MASK_IMAGE, asked)
    priors = discs(asked, which)
    if not windows:
        assert torch.allclose(logits, priors, atol=1e-5)
        return
    # The largest windows of prompts hold all of what they start from.
    found, expected = logits[:, 2] > 0, priors[:, 2] > 0
    overlap = (found & expected).sum((1, 2)) / (found | expected).sum((1, 2))
    assert (overlap > 0.75).all()


def average(maps: Tensor, window: list[float], samples: int) -> Tensor:
    """Return the average of maps over each part of a window, 0 beyond them; bilinear if finer."""
    side = maps.shape[-1]
    found = torch.zeros(len(maps), samples, samples, **DOUBLE)

    def weights(first: float, last: float, index: int) -> Tensor:
        step = (last - first) / samples
        center, width = first + (index + 0.5) * step, max(step, 1.0)
        parts = [
            max(0.0, min(center + width / 2, i + 1) - max(center - width / 2, i)) / width
            for i in range(side)
        ]
        return torch.tensor(parts, **DOUBLE)

    for row in range(samples):
        for column in range(samples):
            down, across = (
                weights(window[1], window[3], row),
                weights(window[0], window[2], column),
            )
            found[:, row, column] = maps @ across @ down
    return found


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_window_is_sams_decoder_on_a_crop_of_the_embedding(prompts, has_mask, several):
    """Three masks are those of SAM's tokens 1 to 3, each in its window; one is that of token 0."""
    config = with_options(OPTIONS["windows"])
    model, frame = random_model(config), prompt_frame(config)
    assert (frame.image_size, frame.embedding_size) == (32, 8)
    crop = random_model(replace(frame, decoder=SamDecoder()))
    crop.prompt_encoder.load_state_dict(model.prompt_encoder.state_dict())
    with torch.no_grad():
        embedding = embed(model)
        for m in (0, 1, 4):
            asked = replace(one(prompts, m, has_mask), multimask_output=several)
            answer, iou, *_ = model.predict(embedding[:1], torch.zeros(1).long(), asked)
            windows = PromptShapes.from_prompts(asked).windows(asked.masks, SIZES, 64)[0]
            windows = windows if several else windows[1:2]
            assert torch.equal(answer.windows[0], windows)
            for k, window in enumerate(windows.tolist()):
                first, size = (
                    torch.tensor(window[:2]),
                    torch.tensor(window[2:]) - torch.tensor(window[:2]),
                )
                points = (asked.points_xy_input + 0.5 - first) / size * 32 - 0.5
                masks = None
                if has_mask:
                    cells = [edge / 2 for edge in window]
                    inside = average(torch.ones(1, 32, 32, **DOUBLE), cells, 32)
                    masks = average(asked.masks, cells, 32) - 10 * (1 - inside)
                cropped = average(embedding[0], [edge / 8 for edge in window], 8)
                moved = replace(asked, points_xy_input=points, masks=masks)
                logits, score = crop.decode(cropped[None], torch.zeros(1).long(), moved)
                assert torch.allclose(answer.logits[0, k], logits[0, k], atol=1e-5)
                assert torch.allclose(iou[0, k], score[0, k], atol=1e-5)


@pytest.mark.slow
def test_every_part_learns(prompts):
    """All gradients are finite, and zero only where a prompt of its kind is missing."""
    asked, _ = given(prompts, "mixed")
    for options in (DENSE, replace(DENSE, windows=False)):
        model = random_model(with_options(options))
        losses = []
        for several in (True, False):
            found = model.decode(embed(model), MASK_IMAGE, replace(asked, multimask_output=several))
            losses += [each.square().mean() for each in found]
        torch.stack(losses).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        missing = {name for name, each in gradients.items() if each is None or not each.any()}
        assert all(each.isfinite().all() for each in gradients.values() if each is not None)
        # Every prompt has a mask prompt, at least the prior, and a softmax sees no keys' bias.
        assert {name for name in missing if not name.endswith("k_proj.bias")} == {
            "prompt_encoder.no_mask_embed.weight"
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_half_precision_is_close_to_single(prompts, name):
    model = random_model(with_options(OPTIONS[name])).float()
    images = torch.rand((3, 3, 64, 64), generator=torch.Generator().manual_seed(1)) * 255
    sizes, (asked, _) = torch.tensor([[64, 64]] * 3), given(prompts, "mixed")
    asked = replace(asked, points_xy_input=asked.points_xy_input.float(), masks=asked.masks.float())
    with torch.no_grad():
        exact, iou = model.decode(model.encode(images, sizes), MASK_IMAGE, asked)
        with torch.autocast("cpu", torch.bfloat16):
            near, own = model.decode(model.encode(images, sizes), MASK_IMAGE, asked)
    assert (near - exact).abs().mean() < 0.05 * exact.abs().mean()
    assert (own - iou).abs().mean() < 0.05 * iou.abs().mean() + 0.05


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_points_may_have_any_type(kind):
    model = build_model(with_options(DENSE), 0)
    embedding = torch.randn(1, model.config.embedding_channels, 8, 8)
    labels, zero = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    point = torch.tensor([[[20, 30]]])
    found, expected = (
        model.decode(embedding, zero, Prompts(each, labels, None, True))
        for each in (point.to(kind), point.float())
    )
    assert torch.equal(found[0], expected[0])


def test_options_that_do_not_fit_are_named():
    with pytest.raises(GigamaskError, match=r"^SamDecoder\.residual.*--model\.decoder\.prior"):
        SamDecoder(residual=True)


def test_sizes_of_the_published_models_are_accepted():
    for config in (tiny(), vit_b()):
        with torch.device("meta"):
            model = Sam.from_config(replace(config, decoder=DENSE))
        assert model.answers_in_windows
        tokens = min(32, config.embedding_size)
        assert model.mask_decoder.embedding_size == tokens
        assert model.prompt_encoder.image_size == 4 * tokens
