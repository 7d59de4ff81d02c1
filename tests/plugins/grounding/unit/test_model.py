"""The grounding model's scores, and the loss of a training step."""

from dataclasses import replace

import pytest
import torch

from gigamask.distributed.world import World
from gigamask.losses.ohem import OHEM
from gigamask.plugins.grounding.data import QueryBatch
from gigamask.plugins.grounding.model import GroundingTask, pairwise_geometry, score_batch
from gigamask.plugins.grounding.relevance import relevance_losses
from gigamask.plugins.grounding.text_features import TextFeatures
from gigamask.records import DataCursor
from gigamask.training.ohem import mine_hard_masks
from gigamask.training.step import StepMetrics, accumulate
from tests.errors import error_line
from tests.plugins.grounding.asked import SPEC, untrained


def network():
    """A network of which every parameter speaks."""
    model, generator = untrained().double().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = {"generator": generator, "dtype": parameter.dtype}
            parameter.add_(0.2 * torch.randn(parameter.shape, **draw))
    return model


def given(queries=3, masks=5, tokens=4, seed=0):
    """Descriptions of masks and features of words, all of them there."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    features = torch.randn(queries, masks, sum(SPEC.parts), **draw)
    words = torch.randn(queries, tokens, SPEC.text_dim, **draw)
    there, spoken = (torch.ones(each.shape[:2], dtype=torch.bool) for each in (features, words))
    return features, there, words, spoken


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_the_order_of_masks_orders_the_scores_and_nothing_else():
    model, (features, there, words, spoken) = network(), given()
    scores = model(features, there, words, spoken)
    assert scores.shape == (3, 6)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert close(model(features[:, order], there, words, spoken), scores[:, [*order.tolist(), 5]])
    assert (scores.std(1) > 1e-3).all()


def test_what_is_not_there_changes_nothing():
    """Padded masks and tokens may hold any numbers."""
    model, (features, there, words, spoken) = network(), given()
    scores = model(features, there, words, spoken)
    more, longer = given(masks=7, tokens=9, seed=1)[::2]
    more[:, [0, 2, 3, 5, 6]], longer[:, [0, 1, 2, 3]] = features, words
    held, said = torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 9, dtype=torch.bool)
    held[:, [0, 2, 3, 5, 6]] = said[:, [0, 1, 2, 3]] = True
    padded = model(more, held, longer, said)
    assert close(padded[:, [0, 2, 3, 5, 6, 7]], scores)
    assert (padded[:, [1, 4]] == -1e4).all()


def test_a_query_in_a_batch_is_the_query_alone():
    model, (features, there, words, spoken) = network(), given()
    there[0, 3:] = there[2, 1:] = spoken[1, 2:] = False
    scores = model(features, there, words, spoken)
    for number, (masks, tokens) in enumerate([(3, 4), (5, 2), (1, 4)]):
        row = slice(number, number + 1)
        alone = model(
            features[row, :masks], there[row, :masks], words[row, :tokens], spoken[row, :tokens]
        )
        assert close(alone[0, :-1], scores[number, :masks])
        assert close(alone[0, -1], scores[number, -1])


def test_an_image_without_a_mask_has_the_score_of_none():
    model = network()
    features, there, words, spoken = given(queries=2, masks=0)
    scores = model(features, there, words, spoken)
    assert scores.shape == (2, 1)
    assert scores.isfinite().all()
    more, held = given(queries=2, masks=3)[0], torch.zeros(2, 3, dtype=torch.bool)
    assert close(model(more, held, words, spoken)[:, -1], scores[:, -1])


def test_scores_depend_on_text_descriptions_and_the_other_masks():
    model, (features, there, words, spoken) = network(), given(queries=1)
    scores = model(features, there, words, spoken)
    for number, size in enumerate(SPEC.parts):
        other = features.clone()
        part = other.split(SPEC.parts, 2)[number]
        part[0, 2] += 0.5 * torch.linspace(-1, 1, size, dtype=torch.float64)
        assert ((model(other, there, words, spoken) - scores).abs() > 1e-7).all(), number
    assert not close(model(features, there, words.flip(2), spoken), scores)


def test_gradients_reach_every_weight_and_nothing_that_is_padding():
    model, (features, there, words, spoken) = network().train(), given()
    there[:, 4:] = spoken[:, 3:] = False
    features.requires_grad_(True)
    words.requires_grad_(True)
    model(features, there, words, spoken)[:, [0, 1, 2, 3, 5]].square().sum().backward()
    silent = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not parameter.grad.abs().max() > 1e-9
    ]
    assert silent == []
    assert model.none.grad.abs().max() > 1e-9
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    look, colour, _, outline = features.grad.split(
        SPEC.parts, 2
    )  # places are no one's to learn, and a mask's distance to itself has no slope
    for part in (look, colour, outline):
        assert (part[:, 4:] == 0).all()
        assert part[:, :4].abs().amax(2).min() > 0
    assert (words.grad[:, 3:] == 0).all()
    assert words.grad[:, :3].abs().amax(2).min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype):
    model = network().float()
    features, there, words, spoken = (
        each.float() if each.is_floating_point() else each for each in given()
    )
    there[0, 2:] = spoken[1, 1:] = False
    scores = model(features, there, words, spoken)
    with torch.autocast("cpu", dtype=dtype):
        halves = model(features, there, words, spoken)
        halves.float().logsumexp(1).sum().backward()
    assert halves.isfinite().all()
    seen = torch.cat([there, torch.ones(3, 1, dtype=torch.bool)], 1)
    assert (halves - scores)[seen].abs().max() < 0.1 * scores[seen].std()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_how_masks_lie_to_each_other():
    """Two boxes, the second to the right of the first, a little lower, and larger."""
    place = torch.tensor([[[-0.2, 0.0, 0.1, 0.2, 0.1], [0.3, 0.1, 0.3, 0.4, 0.3]]])
    found = pairwise_geometry(place)[0]
    distance = (0.5**2 + 0.1**2) ** 0.5
    near = torch.tensor(-4 * distance).exp().item()
    assert found[0, 1].tolist() == pytest.approx(
        [0.5, 0.1, distance, near, 0.5 - 0.2, 0.1 - 0.3, 0.2], abs=1e-6
    )
    assert found[1, 0].tolist() == pytest.approx(
        [-0.5, -0.1, distance, near, 0.5 - 0.2, 0.1 - 0.3, -0.2], abs=1e-6
    )
    assert found[0, 0].tolist() == pytest.approx([0, 0, 0, 1, -0.1, -0.2, 0], abs=1e-6)


def test_sizes_that_cannot_be():
    for name in ("embedding_dim", "text_dim", "dim", "layers", "heads", "crop_side"):
        with error_line(rf"\.{name}\b.*\b0\b"):
            replace(SPEC, **{name: 0})
    with error_line(r"\.dim\b.*\b3\b.*\bheads\b.*\b16\b"):
        replace(SPEC, heads=3)


def query_batch(count=7, masks=5, tokens=4, seed=0) -> QueryBatch:
    """Random queries: the first has no mask, the second no right one, the third nothing else."""
    generator = torch.Generator().manual_seed(seed)
    mask_valid = torch.rand(count, masks, generator=generator) < 0.7
    mask_valid[0], mask_valid[1:, 0] = False, True
    is_target = mask_valid & (torch.rand(count, masks, generator=generator) < 0.4)
    is_target[1], is_target[2] = False, mask_valid[2]
    spoken = torch.arange(tokens) < torch.randint(1, tokens + 1, (count, 1), generator=generator)
    return QueryBatch(
        names=tuple(f"q{number}" for number in range(count)),
        batch_index=torch.arange(count),
        weights=torch.ones(count),
        mask_image=torch.arange(count),
        strata=torch.arange(count) % 2,
        texts=tuple(f"text {number}" for number in range(count)),
        text_features=TextFeatures(
            torch.randn(count, tokens, SPEC.text_dim, generator=generator), spoken
        ),
        features=torch.randn(count, masks, sum(SPEC.parts), generator=generator)
        * mask_valid[..., None],
        mask_valid=mask_valid,
        is_target=is_target,
        cursor=DataCursor(count),
    )


def cut(whole: QueryBatch, rows: list[int]) -> QueryBatch:
    """Some of the queries as a micro-batch of their own."""
    some = whole.select(torch.tensor(rows, dtype=torch.int64))
    names = tuple(whole.names[row] for row in rows)
    return replace(
        some,
        names=names,
        batch_index=whole.batch_index[rows],
        weights=whole.weights[rows],
        mask_image=torch.arange(len(rows)),
    )


@pytest.fixture
def model():
    return untrained()


def by_query(model, batch, weight):
    found = relevance_losses(score_batch(model, batch, "fp32"), batch.is_target, batch.mask_valid)
    return found.contrastive + weight * found.alignment


def test_a_query_costs_both_losses_times_its_weight(model):
    batch = query_batch()
    batch = replace(batch, weights=torch.linspace(0.5, 2, 7))
    [terms] = GroundingTask(0.25).compute_losses(model, batch, lambda whole: whole)
    losses = by_query(model, batch, 0.25)
    assert torch.allclose(terms.per_mask, losses)
    assert torch.allclose(terms.loss, (losses * batch.weights).sum())
    assert (float(terms.count), terms.first) == (7.0, 0)
    scores = score_batch(model, batch, "fp32")
    found = relevance_losses(scores, batch.is_target, batch.mask_valid)
    assert torch.allclose(terms.parts["contrastive"], found.contrastive.sum())
    assert torch.allclose(terms.parts["alignment"], found.alignment.sum())
    absent = ~batch.is_target.any(1, keepdim=True)
    right = torch.cat([batch.is_target, absent], 1)
    hits = right[torch.arange(len(right)), scores.argmax(1)]
    assert float(terms.parts["accuracy"]) == hits.sum()
    [half] = GroundingTask(0.25, "bf16").compute_losses(model, batch, lambda whole: whole)
    assert 0 < (half.per_mask - losses).abs().max() < 0.1


def test_no_query_has_no_terms(model):
    none = cut(query_batch(), [])
    assert list(GroundingTask(1.0).compute_losses(model, none, lambda whole: whole)) == []


@pytest.mark.parametrize("group_by", ["batch", "granularity"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6]], [[5, 0], [1, 2, 3], [4, 6]]])
def test_the_hardest_queries_by_both_losses_are_kept(model, parts, group_by):
    """Mining of level 7: a query is as hard as its contrastive and its alignment loss together."""
    mining = OHEM(keep_ratio=0.4, group_by=group_by)
    batch, task = query_batch(), GroundingTask(2.0, mining=mining)
    losses = by_query(model, batch, 2.0).detach()
    kept, mined = mine_hard_masks(
        task, mining, model, [cut(batch, rows) for rows in parts], 7, World()
    )
    wanted = set()
    for stratum in [range(7)] if group_by == "batch" else [range(0, 7, 2), range(1, 7, 2)]:
        count = -(-len(stratum) * 2 // 5)
        wanted |= set(sorted(stratum, key=lambda number: -losses[number])[:count])
    assert {text for each in kept for text in each.texts} == {f"text {number}" for number in wanted}
    assert [len(each.names) for each in kept] == [len(rows) for rows in parts], "samples stay"
    assert torch.allclose(mined, losses.double(), rtol=1e-4, atol=1e-6)
    totals = StepMetrics.zero(7, torch.zeros(()))
    for each in kept:
        accumulate(task, model, each, totals)
    assert float(totals.count) == len(wanted)
    assert totals.means()["loss"] == pytest.approx(float(losses[sorted(wanted)].mean()), rel=1e-4)
