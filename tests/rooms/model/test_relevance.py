"""Scores of masks for a text: they depend on nothing but what is there."""

from dataclasses import replace

import pytest
import torch

from gigamask.faults import Fault
from gigamask.model.relevance import lie
from gigamask.model.sizes import RelevanceSpec
from gigamask.model.start import build
from tests.asked import SPEC


def network(spec=SPEC, seed=0):
    """A network of which every parameter speaks."""
    model, generator = build(spec, seed).double().eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def given(queries=3, masks=5, tokens=4, seed=0, spec=SPEC):
    """Descriptions of masks and features of words, all of them there."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(queries, masks, sum(spec.parts), generator=generator, dtype=torch.float64)
    words = torch.randn(queries, tokens, spec.text_dim, generator=generator, dtype=torch.float64)
    return features, torch.ones(queries, masks, dtype=torch.bool), words, torch.ones(queries, tokens, dtype=torch.bool)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-11)


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
        alone = model(features[row, :masks], there[row, :masks], words[row, :tokens], spoken[row, :tokens])
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
    parts = features.split(SPEC.parts, 2)
    for number in range(4):
        other = [part.clone() for part in parts]
        other[number][0, 2] += 0.5 * torch.linspace(-1, 1, other[number].shape[2], dtype=torch.float64)
        assert ((model(torch.cat(other, 2), there, words, spoken) - scores).abs() > 1e-7).all(), number
    assert not close(model(features, there, words.flip(2), spoken), scores)


def test_gradients_reach_every_weight_and_nothing_that_is_padding():
    model, (features, there, words, spoken) = network().train(), given()
    there[:, 4:] = spoken[:, 3:] = False
    features.requires_grad_(True)
    words.requires_grad_(True)
    model(features, there, words, spoken)[:, [0, 1, 2, 3, 5]].square().sum().backward()
    silent = [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and not parameter.grad.abs().max() > 1e-9]
    assert silent == []
    assert model.none.grad.abs().max() > 1e-9
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    look, colour, _, outline = features.grad.split(SPEC.parts, 2)  # places are no one's to learn, and a mask's distance to itself has no slope
    for part in (look, colour, outline):
        assert (part[:, 4:] == 0).all()
        assert part[:, :4].abs().amax(2).min() > 0
    assert (words.grad[:, 3:] == 0).all()
    assert words.grad[:, :3].abs().amax(2).min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype):
    model = network().float()
    features, there, words, spoken = (each.float() if each.is_floating_point() else each for each in given())
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
    told = lie(place)[0]
    distance = (0.5**2 + 0.1**2) ** 0.5
    near = torch.tensor(-4 * distance).exp().item()
    assert told[0, 1].tolist() == pytest.approx([0.5, 0.1, distance, near, 0.5 - 0.2, 0.1 - 0.3, 0.2], abs=1e-6)
    assert told[1, 0].tolist() == pytest.approx([-0.5, -0.1, distance, near, 0.5 - 0.2, 0.1 - 0.3, -0.2], abs=1e-6)
    assert told[0, 0].tolist() == pytest.approx([0, 0, 0, 1, -0.1, -0.2, 0], abs=1e-6)


def test_it_starts_by_seed_alone():
    one, same, other = (build(SPEC, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["word.weight"], other["word.weight"])
    assert build(SPEC, 0, "meta").none.device.type == "meta"


@pytest.mark.parametrize("name", ["embedding_dim", "text_dim", "dim", "layers", "heads", "crop_side"])
def test_sizes_that_cannot_be(name):
    with pytest.raises(Fault, match=rf"^{name}.*0"):
        replace(SPEC, **{name: 0})


def test_a_width_that_heads_do_not_divide():
    with pytest.raises(Fault, match=r"^dim.*16.*heads.*3"):
        RelevanceSpec(dim=16, heads=3)
