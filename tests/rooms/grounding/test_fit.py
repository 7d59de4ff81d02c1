"""A step's loss is the sum of what its queries cost, however they are cut, weighted and mined."""

from dataclasses import replace

import pytest
import torch

from gigamask.contracts import Cursor
from gigamask.grounding.fit import RelevanceTask, score
from gigamask.grounding.questions import Questions
from gigamask.grounding.words import Words
from gigamask.losses.mining import Hardest
from gigamask.losses.relevance import relevance_losses
from gigamask.model.start import build
from gigamask.parallel.world import World
from gigamask.train.hardest import mine
from gigamask.train.step import Totals, accumulate
from tests.asked import SPEC


def questions(count=7, masks=5, tokens=4, seed=0) -> Questions:
    """Random queries: the first has no mask, the second no right one, the third nothing else."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(count, masks, generator=generator) < 0.7
    there[0], there[1:, 0] = False, True
    right = there & (torch.rand(count, masks, generator=generator) < 0.4)
    right[1], right[2] = False, there[2]
    spoken = torch.arange(tokens) < torch.randint(1, tokens + 1, (count, 1), generator=generator)
    return Questions(
        names=tuple(f"q{number}" for number in range(count)),
        places=torch.arange(count),
        weights=torch.ones(count),
        mask_image=torch.arange(count),
        strata=torch.arange(count) % 2,
        texts=tuple(f"text {number}" for number in range(count)),
        words=Words(torch.randn(count, tokens, SPEC.text_dim, generator=generator), spoken),
        features=torch.randn(count, masks, sum(SPEC.parts), generator=generator) * there[..., None],
        there=there,
        right=right,
        cursor=Cursor(count),
    )


def cut(whole: Questions, rows: list[int]) -> Questions:
    """Some of the queries as a micro-batch of their own."""
    some = whole.only(torch.tensor(rows, dtype=torch.int64))
    names = tuple(whole.names[row] for row in rows)
    return replace(some, names=names, places=whole.places[rows], weights=whole.weights[rows], mask_image=torch.arange(len(rows)))


@pytest.fixture
def model():
    return build(SPEC, 0)


def by_query(model, batch, weight):
    found = relevance_losses(score(model, batch, "fp32"), batch.right, batch.there)
    return found.contrastive + weight * found.alignment


def test_a_query_costs_both_losses_times_its_weight(model):
    batch = questions()
    batch = replace(batch, weights=torch.linspace(0.5, 2, 7))
    [terms] = RelevanceTask(0.25).terms(model, batch, lambda whole: whole)
    losses = by_query(model, batch, 0.25)
    assert torch.allclose(terms.by_mask, losses)
    assert torch.allclose(terms.loss, (losses * batch.weights).sum())
    assert (float(terms.count), terms.first) == (7.0, 0)
    found = relevance_losses(score(model, batch, "fp32"), batch.right, batch.there)
    assert torch.allclose(terms.parts["contrastive"], found.contrastive.sum())
    assert torch.allclose(terms.parts["alignment"], found.alignment.sum())
    best = score(model, batch, "fp32").argmax(1).tolist()
    hits = [place == 5 if not right.any() else place < 5 and bool(right[place]) for place, right in zip(best, batch.right, strict=True)]
    assert float(terms.parts["right"]) == sum(hits)


def test_no_query_has_no_terms(model):
    assert list(RelevanceTask(1.0).terms(model, cut(questions(), []), lambda whole: whole)) == []


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3, 4], [5, 6]], [[4, 0, 6], [], [1, 2, 3, 5]]])
def test_micro_batches_add_up_to_the_batch(parts):
    model, batch, task, gradients, losses = build(SPEC, 0).double(), questions(), RelevanceTask(1.0), [], []
    batch = replace(batch, features=batch.features.double(), words=Words(batch.words.features.double(), batch.words.present))
    for micros in ([batch], [cut(batch, rows) for rows in parts]):
        model.zero_grad()
        totals = Totals.zero(7, torch.zeros((), dtype=torch.float64))
        for micro in micros:
            accumulate(task, model, micro, totals)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        losses.append(totals)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)
    assert torch.allclose(losses[0].losses, losses[1].losses, rtol=1e-5)
    assert losses[0].means() == pytest.approx(losses[1].means(), rel=1e-5)


@pytest.mark.parametrize("within", ["batch", "granularity"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6]], [[5, 0], [1, 2, 3], [4, 6]]])
def test_the_hardest_queries_by_both_losses_are_kept(model, parts, within):
    """Mining of level 7: a query is as hard as its contrastive and its alignment loss together."""
    mining = Hardest(share=0.4, within=within)
    batch, task = questions(), RelevanceTask(2.0, mining=mining)
    losses = by_query(model, batch, 2.0).detach()
    kept, mined = mine(task, mining, model, [cut(batch, rows) for rows in parts], 7, World())
    wanted = set()
    for stratum in [range(7)] if within == "batch" else [range(0, 7, 2), range(1, 7, 2)]:
        count = -(-len(stratum) * 2 // 5)
        wanted |= set(sorted(stratum, key=lambda number: -losses[number])[:count])
    assert {text for each in kept for text in each.texts} == {f"text {number}" for number in wanted}
    assert [len(each.names) for each in kept] == [len(rows) for rows in parts], "samples stay"
    assert torch.allclose(mined, losses.double(), rtol=1e-4, atol=1e-6)
    totals = Totals.zero(7, torch.zeros(()))
    for each in kept:
        accumulate(task, model, each, totals)
    assert float(totals.count) == len(wanted)
    assert totals.means()["loss"] == pytest.approx(float(losses[sorted(wanted)].mean()), rel=1e-4)


def test_half_the_width_is_close_and_learns(model):
    batch = questions()
    single, half = (
        {name: float(value) for name, value in next(RelevanceTask(1.0, precision).terms(model, batch, lambda x: x)).parts.items()}
        for precision in ("fp32", "bf16")
    )
    assert half["contrastive"] == pytest.approx(single["contrastive"], rel=0.05)
    [terms] = RelevanceTask(1.0, "bf16").terms(model, batch, lambda whole: whole)
    assert terms.by_mask.dtype == torch.float32
    terms.loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
