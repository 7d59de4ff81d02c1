"""The interactive loop: a prompt schedule and a model, round by round."""

from collections.abc import Callable, Iterator

from gigamask.interfaces import PromptSchedule
from gigamask.types import Prediction, PromptRound, Prompts, RandomInputs, Targets


def run_rounds(
    decode: Callable[[Prompts], Prediction],
    targets: Targets,
    schedule: PromptSchedule,
    random_inputs: RandomInputs | None = None,
    mask_only_round_u: float = 0.0,
) -> Iterator[PromptRound]:
    """Yield the rounds of a prompt schedule, one at a time, keeping none of them.

    The next round uses only detached results, and the last one is released before the next is
    decoded. A caller that runs the backward pass of each round as it comes therefore holds the
    activations of one round, however many there are.

    Args:
        decode: the model: prompts of M masks to their prediction.
        targets: ground truth of the M masks.
        schedule: chooses the prompts of each round.
        random_inputs: random numbers of the masks; None if the schedule needs none.
        mask_only_round_u: uniform number in [0, 1) that picks the round without a new point.
    """
    index = 0
    prompts = schedule.next(None, targets, random_inputs, mask_only_round_u)
    while prompts is not None:
        prompt_round = PromptRound(index, prompts, decode(prompts))
        yield prompt_round
        index += 1
        prompts = schedule.next(prompt_round, targets, random_inputs, mask_only_round_u)
        del prompt_round
