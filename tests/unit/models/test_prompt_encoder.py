import math

import pytest
import torch

from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.prompt_encoder import PromptEncoder


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return build_model(tiny(), 0).prompt_encoder


def code(encoder: PromptEncoder, x: float, y: float) -> torch.Tensor:
    matrix = encoder.pe_layer.positional_encoding_gaussian_matrix
    angles = (
        2
        * math.pi
        * ((2 * (x + 0.5) / 128 - 1) * matrix[0] + (2 * (y + 0.5) / 128 - 1) * matrix[1])
    )
    return torch.cat([angles.sin(), angles.cos()])


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_a_point_is_its_place_and_its_kind(encoder, label):
    token = encoder.points(torch.tensor([[[40.0, 90.5]]]), torch.tensor([[label]]))[0, 0]
    assert torch.allclose(
        token, code(encoder, 40.0, 90.5) + encoder.point_embeddings[label].weight[0], atol=1e-4
    )


def test_no_point_has_no_place(encoder):
    tokens = encoder.points(torch.tensor([[[40.0, 90.5], [1.0, 2.0]]]), torch.full((1, 2), -1))
    assert torch.equal(tokens[0], encoder.not_a_point_embed.weight.expand(2, -1))


def test_every_kind_takes_part_whatever_the_labels(encoder):
    encoder.zero_grad()
    encoder.points(torch.zeros(2, 1, 2), torch.ones(2, 1, dtype=torch.int64)).sum().backward()
    kinds = [encoder.not_a_point_embed, *encoder.point_embeddings]
    assert [kind.weight.grad.abs().sum() > 0 for kind in kinds] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_the_grid_codes_the_centre_of_each_token(encoder):
    grid = encoder.token_positions()
    assert grid.shape == (16, 16, 64)
    assert torch.equal(encoder.get_dense_pe()[0], grid.permute(2, 0, 1))
    # Token (row 3, column 5) of side 8 has its centre at pixel index (43.5, 27.5).
    assert torch.allclose(grid[3, 5], code(encoder, 43.5, 27.5), atol=1e-4)


def test_mask_features_are_the_convolutions(encoder):
    masks = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))
    prompt = encoder.dense(masks, None)
    mine = prompt.features @ prompt.weight.T + prompt.bias
    mine = mine.transpose(1, 2).unflatten(2, (16, 16))
    assert torch.allclose(mine, encoder.mask_downscaling(masks[:, None]), atol=1e-5)


def test_positions_stay_exact_under_autocast(encoder):
    points, labels = (
        torch.tensor([[[40.0, 90.5], [41.0, 90.5]]]),
        torch.ones(1, 2, dtype=torch.int64),
    )
    with torch.autocast("cpu", torch.bfloat16):
        half = encoder.points(points, labels)
    assert torch.equal(half, encoder.points(points, labels))
