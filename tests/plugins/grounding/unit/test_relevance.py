"""What scores cost, against the definitions written out query by query."""

import math

import pytest
import torch

from gigamask.plugins.grounding.relevance import relevance_losses


def plainly(scores, right, there):
    """The two losses of one query."""
    none, masks = float(scores[-1]), [number for number in range(len(right)) if there[number]]
    chosen = [number for number in masks if right[number]]
    wrong = [float(scores[number]) for number in masks if not right[number]]

    def nce(score, rivals):
        return -math.log(math.exp(score) / (math.exp(score) + sum(map(math.exp, rivals))))

    contrastive = [nce(float(scores[number]), [*wrong, none]) for number in chosen] or [
        nce(none, wrong)
    ]

    def cross_entropy(number):
        sure = 1 / (1 + math.exp(none - float(scores[number])))
        return -math.log(sure if right[number] else 1 - sure)

    return sum(contrastive) / len(contrastive), sum(map(cross_entropy, masks)) / max(len(masks), 1)


def made(seed, queries=6, masks=5):
    """Random scores; of the queries one has no mask, one no right one, and one nothing but right
    ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(queries, masks + 1, generator=generator)
    there = torch.rand(queries, masks, generator=generator) < 0.7
    there[0], there[1:3, 0] = False, True
    right = there & (torch.rand(queries, masks, generator=generator) < 0.4)
    right[1], right[2] = False, there[2]
    scores[:, :-1] = scores[:, :-1].masked_fill(~there, -1e4)
    return scores, right, there


@pytest.mark.parametrize("seed", range(8))
def test_losses_are_what_is_written(seed):
    scores, right, there = made(seed)
    found = relevance_losses(scores, right, there)
    wanted = [plainly(*each) for each in zip(scores, right, there, strict=True)]
    assert found.contrastive.tolist() == pytest.approx(
        [each[0] for each in wanted], rel=1e-4, abs=1e-6
    )
    assert found.alignment.tolist() == pytest.approx(
        [each[1] for each in wanted], rel=1e-4, abs=1e-6
    )


def test_gradients_are_those_of_the_definitions_and_finite_everywhere():
    scores, right, there = made(0)
    scores = scores.requires_grad_(True)
    sum(relevance_losses(scores, right, there)).sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[:, :-1][~there] == 0).all()
    assert (scores.grad[0] == 0).all()
    step = 1e-3
    for row, column in ((1, 0), (2, 0), (3, -1), (1, -1), (2, -1)):
        sides = []
        for way in (step, -step):
            moved = scores.detach().double().clone()
            moved[row, column] += way
            sides.append(sum(plainly(moved[row], right[row], there[row])))
        assert scores.grad[row, column].item() == pytest.approx(
            (sides[0] - sides[1]) / (2 * step), rel=1e-3, abs=1e-5
        )


def test_a_query_without_any_mask_costs_nothing():
    for masks in (0, 3):
        scores = torch.randn(2, masks + 1, requires_grad=True)
        none = torch.zeros(2, masks, dtype=torch.bool)
        found = relevance_losses(scores, none, none)
        assert (found.contrastive.tolist(), found.alignment.tolist()) == ([0, 0], [0, 0])
        sum(found).sum().backward()
        assert (scores.grad == 0).all()


def test_far_scores_cost_what_they_are_apart():
    there, right = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[True, False], [False, False]])
    scores = torch.tensor([[-3e3, 3e3, 0.0], [3e3, -3e3, 0.0]], requires_grad=True)
    found = relevance_losses(scores, right, there)
    assert found.contrastive.tolist() == pytest.approx([6e3, 3e3])
    assert found.alignment.tolist() == pytest.approx([3e3, 1.5e3])
    sum(found).sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_halves_are_computed_in_singles(dtype):
    scores, right, there = made(1)
    halves = relevance_losses(scores.to(dtype), right, there)
    wanted = relevance_losses(scores.to(dtype).float(), right, there)
    assert halves.contrastive.dtype == torch.float32
    assert torch.equal(halves.contrastive, wanted.contrastive)
    assert torch.equal(halves.alignment, wanted.alignment)
