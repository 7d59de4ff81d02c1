"""The decoder's order of work changes no number: it equals the published one, and a batch equals
its masks one by one.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decoder_round import decode_plainly, draw_prompts
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam

SPEC = SamConfig(
    image_size=64,
    embed_dim=8,
    depth=1,
    num_heads=1,
    global_attn_indexes=(),
    embedding_dim=32,
    decoder_num_heads=2,
    decoder_mlp=48,
    iou_hidden=24,
)


@pytest.fixture(scope="module")
def model() -> Sam:
    """A small decoder whose every parameter is away from its start."""
    chance = torch.Generator().manual_seed(0)
    model = build_model(SPEC, 0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
            )
    return model


def question(images: int, masks: int, fed_back: bool, several: bool):
    chance = torch.Generator().manual_seed(17 * images + masks)
    embedding = torch.randn(
        images, 32, 4, 4, generator=chance, dtype=torch.float64, requires_grad=True
    )
    mask_image = torch.randint(images, (masks,), generator=chance).sort().values
    return (
        embedding,
        mask_image,
        replace(
            draw_prompts(SPEC, masks, fed_back, chance, torch.float64), multimask_output=several
        ),
    )


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("fed_back", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_decoder_equals_the_published_order_of_work(model, images, fed_back, several):
    embedding, mask_image, prompts = question(images, 5, fed_back, several)
    answers = []
    for form in (decode_plainly, Sam.decode):
        logits, iou = form(model, embedding, mask_image, prompts)
        total = (
            logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        ).sum() + iou.square().sum()
        gradients = torch.autograd.grad(total, [embedding, *model.parameters()], allow_unused=True)
        answers.append([logits, iou, *gradients])
    for plain, mine in zip(*answers, strict=True):
        if mine is None:
            assert plain is None or plain.abs().max() == 0
        else:
            plain = torch.zeros_like(mine) if plain is None else plain
            assert (plain - mine).abs().max() <= 1e-10 * (1 + plain.abs().max())


@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_a_batch_equals_its_masks_one_by_one(model, images, masks, fed_back, several):
    embedding, mask_image, prompts = question(images, masks, fed_back, several)
    with torch.no_grad():
        logits, iou = model.decode(embedding, mask_image, prompts)
        for index in range(masks):
            place = slice(index, index + 1)
            fed = None if prompts.masks is None else prompts.masks[place]
            alone = replace(
                prompts,
                points_xy_input=prompts.points_xy_input[place],
                labels=prompts.labels[place],
                masks=fed,
            )
            own = embedding[mask_image[index]][None]
            one_logits, one_iou = model.decode(own, torch.zeros(1, dtype=torch.int64), alone)
            assert (one_logits - logits[place]).abs().max() <= 1e-10 * (1 + logits.abs().max())
            assert (one_iou - iou[place]).abs().max() <= 1e-10 * (1 + iou.abs().max())


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(0, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_tokens_that_are_not_present_are_as_if_they_were_not_there(
    model, counts, spare, fed_back, chance
):
    """Wherever they stand and whatever they hold; also for gradients."""
    embedding, mask_image, prompts = question(2, len(counts), fed_back, True)
    wide = max(counts) + spare
    places = [sorted(chance.sample(range(wide), count)) for count in counts]
    present = torch.tensor(
        [[place in own for place in range(wide)] for own in places], dtype=torch.bool
    ).view(len(counts), wide)
    xy = 64 * torch.rand(
        len(counts), wide, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    labels = torch.tensor(
        [[chance.randint(-1, 3) for _ in range(wide)] for _ in counts], dtype=torch.int64
    ).view(len(counts), wide)
    logits, iou = model.decode(
        embedding,
        mask_image,
        replace(prompts, points_xy_input=xy, labels=labels, token_mask=present),
    )
    (ours,) = torch.autograd.grad(logits.square().sum() + iou.sum(), embedding)
    theirs = torch.zeros_like(ours)
    for m, own in enumerate(places):
        fed = None if prompts.masks is None else prompts.masks[m : m + 1]
        alone = replace(
            prompts, points_xy_input=xy[m : m + 1, own], labels=labels[m : m + 1, own], masks=fed
        )
        one, one_iou = model.decode(embedding, mask_image[m : m + 1], alone)
        assert (one - logits[m]).abs().max() <= 1e-10 * (1 + logits.abs().max())
        assert (one_iou - iou[m]).abs().max() <= 1e-10 * (1 + iou.abs().max())
        theirs += torch.autograd.grad(one.square().sum() + one_iou.sum(), embedding)[0]
    assert (ours - theirs).abs().max() <= 1e-10 * (1 + theirs.abs().max())


def test_multimask_and_single_mask_output_use_different_tokens(model):
    embedding, mask_image, prompts = question(2, 4, False, True)
    three, three_iou = model.decode(embedding, mask_image, prompts)
    one, one_iou = model.decode(embedding, mask_image, replace(prompts, multimask_output=False))
    assert three.shape == (4, 3, 16, 16)
    assert one.shape == (4, 1, 16, 16)
    assert not torch.isclose(three_iou, one_iou).any()


def test_every_parameter_is_used_by_one_of_the_two_questions(model):
    used = set()
    for fed_back, several in ((False, True), (True, False)):
        embedding, mask_image, prompts = question(2, 4, fed_back, several)
        logits, iou = model.decode(embedding, mask_image, prompts)
        named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not name.startswith("image_encoder")
        }
        gradients = torch.autograd.grad(
            logits.square().sum() + iou.square().sum(), list(named.values()), allow_unused=True
        )
        used |= {
            name for name, gradient in zip(named, gradients, strict=True) if gradient is not None
        }
    assert used == set(named)


def test_half_precision_stays_close(model):
    embedding, mask_image, prompts = question(2, 6, True, True)
    logits, iou = model.decode(embedding, mask_image, prompts)
    single = build_model(SPEC, 0)
    single.load_state_dict(model.state_dict())
    halved = replace(
        prompts, points_xy_input=prompts.points_xy_input.float(), masks=prompts.masks.float()
    )
    with torch.autocast("cpu", torch.bfloat16):
        half_logits, half_iou = single.decode(embedding.float(), mask_image, halved)
    assert (half_logits - logits).abs().mean() <= 0.05 * logits.abs().mean()
    assert (half_iou - iou).abs().mean() <= 0.05 * (1 + iou.abs().mean())


def test_no_masks_give_no_predictions(model):
    embedding, mask_image, prompts = question(2, 4, False, True)
    none = replace(prompts, points_xy_input=prompts.points_xy_input[:0], labels=prompts.labels[:0])
    logits, iou = model.decode(embedding, mask_image[:0], none)
    assert logits.shape == (0, 3, 16, 16)
    assert iou.shape == (0, 3)
