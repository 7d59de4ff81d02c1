import gc
import weakref

import numpy as np
import torch

from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.types import Prediction

MASKS = np.zeros((2, 8, 8), bool)
MASKS[:, 2:6, 3:7] = True


def test_rounds_come_one_at_a_time(make_truth, make_draws, answer):
    decode = answer(MASKS)
    rounds = run_rounds(decode, make_truth(MASKS), InteractiveSchedule(), make_draws(2), 0.0)
    for count in (1, 2, 3):
        assert next(rounds).index == count - 1
        assert len(decode.asked) == count, "nothing is decoded ahead"


def test_an_earlier_round_is_gone_before_the_next_is_decoded(make_truth, make_draws):
    weight = torch.ones(1, requires_grad=True)
    alive = []

    def decode(prompts):
        gc.collect()
        assert all(ref() is None for ref in alive), "the round before is still held"
        assert prompts.masks is None or not prompts.masks.requires_grad
        logits = weight * torch.ones(2, 3 if prompts.multimask_output else 1, 8, 8)
        alive.append(weakref.ref(logits))
        return Prediction(logits, logits.mean((2, 3)), logits)

    rounds = run_rounds(decode, make_truth(MASKS), InteractiveSchedule(), make_draws(2), 0.0)
    gc.freeze()  # collecting passes over what was there before
    try:
        for _ in range(11):
            next(rounds).prediction.logits.sum().backward()
    finally:
        gc.unfreeze()
    assert len(alive) == 11
    assert weight.grad == 2 * 64 * (3 + 10)
