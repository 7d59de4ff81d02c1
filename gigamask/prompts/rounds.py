"""The interactive loop: a prompt schedule and a model, round by round."""

from collections.abc import Callable, Iterator

from gigamask.errors import GigamaskError
from gigamask.interfaces import PromptSchedule
from gigamask.types import Prediction, PromptRound, Prompts, RandomInputs, Targets


def run_rounds(
    decode: Callable[[Prompts], Prediction],
    targets: Targets,
    schedule: PromptSchedule,
    random_inputs: RandomInputs | None = None,
    mask_only_round_u: float = 0.0,
) -> Iterator[PromptRound]:
    """Run a prompt schedule, yielding one round at a time and keeping none of them.

    Each round uses only detached results of the previous one, which is released before the next is
    decoded. A caller that runs the backward pass of each round immediately therefore holds the
    activations of only one round.

    Args:
        decode: Predicts masks from the prompts of M masks.
        targets: Ground truth of the M masks.
        schedule: Chooses the prompts of each round.
        random_inputs: Random numbers of the masks; None if the schedule uses none.
        mask_only_round_u: Uniform number in [0, 1) that picks the round without a new point.

    Raises:
        GigamaskError: The schedule has no round.
    """
    index = 0
    prompts = schedule.next(None, targets, random_inputs, mask_only_round_u)
    if prompts is None:
        raise GigamaskError(f"{type(schedule).__name__}.next gave no prompts for the first round")
    while prompts is not None:
        prompt_round = PromptRound(index, prompts, decode(prompts))
        yield prompt_round
        index += 1
        prompts = schedule.next(prompt_round, targets, random_inputs, mask_only_round_u)
        del prompt_round
