"""Back-propagating each round and chunk of masks at once, onto a leaf copy of the embedding, gives
the whole graph's gradients.
"""

import dataclasses
import itertools

import pytest
import torch

from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.rng import make_rng
from gigamask.types import Prediction, RandomInputs, Targets

MASK_IMAGE = torch.tensor([0, 0, 1, 1, 1])
PAUSE = 0.4


SMALL = dataclasses.replace(
    tiny(),
    image_size=64,
    embed_dim=32,
    depth=2,
    num_heads=2,
    window_size=4,
    global_attn_indexes=(1,),
    embedding_dim=32,
    decoder_mlp=64,
)


@pytest.fixture(scope="module")
def world():
    return make_world(SMALL)


def make_world(spec):
    """A small model in float64, two images of uneven size, five masks and their draws."""
    cell = 64 // spec.mask_size
    model = build_model(spec, seed=0).double()
    rng = make_rng(0, "test gradients")
    sizes = torch.tensor([[64, 48], [40, 64]])
    images = torch.tensor(rng.integers(0, 256, (2, 3, 64, 64))).to(torch.uint8)
    place = (torch.arange(spec.mask_size) + 0.5) * cell
    valid = ((place[:, None] < sizes[:, None, :1]) & (place < sizes[:, 1:, None].transpose(1, 2)))[
        MASK_IMAGE
    ]
    coarse = torch.tensor(rng.random((5, 1, 4, 4)))
    masks = (
        torch.nn.functional.interpolate(
            coarse, size=(spec.mask_size, spec.mask_size), mode="bilinear"
        )[:, 0]
        > 0.5
    ) & valid
    boxes = torch.tensor([[4.0, 8.0, 40.0, 30.0]]).expand(5, 4)
    draws = RandomInputs(
        first_prompt=torch.tensor([0.1, 0.9, 0.7, 0.3, 0.6]),
        clicks=torch.tensor(rng.random((5, 9, 2)), dtype=torch.float32),
        box_noise=torch.tensor(rng.standard_normal((5, 4)), dtype=torch.float32),
        drop_path=torch.zeros(2, spec.encoder.drop_path_blocks(spec), 2),
    )
    return (
        model,
        images,
        sizes,
        Targets(masks, valid, boxes, (float(cell), float(cell)), torch.ones_like(boxes[:, :2])),
        draws,
    )


def rounds(model, embedding, truth, draws, chunk, policy):
    """Yields the rounds of some masks, each with its targets."""
    part = Targets(
        truth.masks[chunk],
        truth.valid[chunk],
        truth.boxes_input[chunk],
        truth.cell_xy,
        truth.scale_xy[chunk],
    )
    spent = RandomInputs(
        draws.first_prompt[chunk], draws.clicks[chunk], draws.box_noise[chunk], draws.drop_path
    )

    def decode(prompts):
        low, iou = model.decode(embedding, MASK_IMAGE[chunk], prompts)
        return Prediction(low, iou, low)

    for played in run_rounds(decode, part, policy, spent, PAUSE):
        yield played, part


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def whole_graph(world, policy):
    """Every round's loss in one sum, then one backward pass through everything."""
    model, images, sizes, truth, draws = world
    embedding = model.encode(images, sizes)
    losses = [
        SamLoss()(played, part).loss
        for played, part in rounds(model, embedding, truth, draws, slice(0, 5), policy)
    ]
    assert len(losses) == policy.rounds
    torch.stack(losses).sum().backward()
    return gradients(model)


def leaf(world, policy, chunk):
    """Each round's loss at once onto a leaf copy of the embedding, then once through
    the encoder."""
    model, images, sizes, truth, draws = world
    embedding = model.encode(images, sizes)
    copy = embedding.detach().requires_grad_()
    for start in range(0, 5, chunk):
        for played, part in rounds(
            model, copy, truth, draws, slice(start, min(5, start + chunk)), policy
        ):
            SamLoss()(played, part).loss.backward()
    embedding.backward(copy.grad)
    return gradients(model)


@pytest.mark.parametrize(
    "policy", [InteractiveSchedule(), InteractiveSchedule(clicks=2, mask_only_rounds=False)]
)
def test_leaf_gradients_in_any_chunks_are_the_whole_graphs(world, policy):
    expected = whole_graph(world, policy)
    learned = {name: grad for name, grad in expected.items() if grad is not None}
    assert {name.split(".")[0] for name in learned} == {
        "image_encoder",
        "prompt_encoder",
        "mask_decoder",
    }
    largest = max(grad.norm() for grad in learned.values())
    for chunk in (5, 2, 1):
        found = leaf(world, policy, chunk)
        assert {name for name, grad in found.items() if grad is not None} == set(learned)
        for name, grad in learned.items():
            # A bias of keys shifts all scores alike: its gradient is zero in theory and rounding in
            # practice, so the largest one sets the floor.
            assert (found[name] - grad).norm() <= 1e-12 * grad.norm() + 1e-16 * largest, name


def test_the_masks_fed_back_matter_to_the_gradient(world):
    """Were rounds independent of each other, the law above would say little."""
    model, images, sizes, truth, draws = world
    embedding = model.encode(images, sizes).detach()
    fed = [
        played.prompts.masks
        for played, _ in rounds(model, embedding, truth, draws, slice(0, 5), InteractiveSchedule())
    ]
    assert fed[0] is None
    assert all(not mask.requires_grad for mask in fed[1:])
    assert all(not torch.equal(before, after) for before, after in itertools.pairwise(fed[1:]))
    assert (
        whole_graph(world, InteractiveSchedule())["prompt_encoder.mask_downscaling.0.weight"] != 0
    ).any()
