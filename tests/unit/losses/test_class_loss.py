"""The cross entropy of classes beside the loss of the masks."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from gigamask.losses.class_loss import ClassLoss
from gigamask.losses.sam_loss import SamLoss
from gigamask.types import Prediction, PromptRound, Prompts, Targets

CLASSES = 4


@pytest.fixture
def case() -> tuple[PromptRound, Targets]:
    """Five masks, of which one has no class; for mask m, prediction m % 3 is exact."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(5, 8, 8, generator=generator) < 0.5
    logits = 3 * torch.randn(5, 3, 8, 8, generator=generator, dtype=torch.float64)
    for m in range(5):
        logits[m, m % 3] = 9.0 * (2 * masks[m].double() - 1)
    iou = torch.rand(5, 3, generator=generator, dtype=torch.float64)
    scores = torch.randn(5, 3, CLASSES, generator=generator, dtype=torch.float64)
    prompts = Prompts(torch.zeros(5, 1, 2), torch.ones(5, 1).long(), None, True)
    prediction = Prediction(
        logits.requires_grad_(), iou, logits.detach(), None, scores.requires_grad_()
    )
    targets = Targets(
        masks, torch.ones_like(masks), torch.zeros(5, 4), (1.0, 1.0), torch.ones(5, 2)
    )
    classes = torch.tensor([2, 0, -1, 3, 1])
    return PromptRound(0, prompts, prediction), replace(targets, classes=classes)


def test_sums_and_gradients_are_those_of_plain_cross_entropy(case):
    """Of the prediction that fits; the mask without a class adds nothing, and has no gradient."""
    prompt_round, targets = case
    scores, logits = prompt_round.prediction.class_logits, prompt_round.prediction.logits
    loss = ClassLoss(SamLoss(), weight=0.7)
    sums, plain = loss(prompt_round, targets), SamLoss()(prompt_round, targets)
    expected = torch.zeros(5, dtype=torch.float64)
    for m, number in enumerate(targets.classes.tolist()):
        if number >= 0:
            expected[m] = -functional.log_softmax(scores[m, m % 3], 0)[number]
    torch.testing.assert_close(sums.loss, plain.loss + 0.7 * expected.sum())
    torch.testing.assert_close(sums.per_mask, plain.per_mask + 0.7 * expected)
    torch.testing.assert_close(sums.parts["class_loss"], expected.sum().detach())
    hits = [int(scores[m, m % 3].argmax()) == targets.classes[m] for m in range(5)]
    assert float(sums.parts["class_accuracy"]) == sum(hits)
    assert {float(count) for count in sums.part_counts.values()} == {4.0}
    assert float(sums.count) == 5
    own, of_masks = torch.autograd.grad(sums.loss, (scores, logits))
    wanted = torch.zeros_like(scores)
    for m, number in enumerate(targets.classes.tolist()):
        if number >= 0:
            probabilities = scores[m, m % 3].detach().softmax(0)
            wanted[m, m % 3] = 0.7 * (probabilities - functional.one_hot(targets.classes[m], 4))
    torch.testing.assert_close(own, wanted)
    torch.testing.assert_close(of_masks, *torch.autograd.grad(plain.loss, logits))


def test_copies_that_fill_a_chunk_are_in_no_sum(case):
    prompt_round, targets = case
    index = torch.tensor([0, 1, 2, 3, 4, 4, 4])
    prediction = prompt_round.prediction
    names = ("logits", "iou_predictions", "low_res_logits", "class_logits")
    filled = replace(prediction, **{name: getattr(prediction, name)[index] for name in names})
    loss = ClassLoss(SamLoss())
    assert loss.supports_filling
    sums = loss(replace(prompt_round, prediction=filled), targets.filled(7))
    few = loss(prompt_round, targets)
    torch.testing.assert_close(sums.loss, few.loss)
    torch.testing.assert_close(sums.parts, few.parts)
    torch.testing.assert_close(sums.part_counts, few.part_counts)


def test_without_classes_it_is_the_other_loss(case):
    prompt_round, targets = case
    loss = ClassLoss(SamLoss(num_points=3))
    assert loss.num_uniforms == 1
    plain = ClassLoss(SamLoss())(prompt_round, replace(targets, classes=None))
    assert plain.parts.keys() == SamLoss()(prompt_round, targets).parts.keys()
    assert not plain.part_counts
    none = replace(targets, classes=torch.full((5,), -1))
    sums = ClassLoss(SamLoss())(prompt_round, none)
    torch.testing.assert_close(sums.loss, plain.loss)
    assert float(sums.part_counts["class_loss"]) == 0
