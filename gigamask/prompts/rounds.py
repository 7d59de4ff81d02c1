"""Plays a policy against a model: prompts go to `decode`, its answer becomes a round, the round decides the next prompts.

Not here: which prompts (`policy`), the model (`decode` is any callable), the backward pass of each round (`train.step`).
"""

from collections.abc import Callable, Iterator

from gigamask.interfaces import PromptSchedule
from gigamask.types import Prediction, PromptRound, Prompts, RandomInputs, Targets


def run_rounds(
    decode: Callable[[Prompts], Prediction],
    targets: Targets,
    policy: PromptSchedule,
    random_inputs: RandomInputs | None = None,
    mask_only_round_u: float = 0.0,
) -> Iterator[PromptRound]:
    """Yields one round at a time and keeps nothing of it: what a round hands on is outside the graph, and it is let go before the next is decoded.

    So a caller that back-propagates each round as it comes holds one round's activations, however many there are.
    """
    index = 0
    prompts = policy.next(None, targets, random_inputs, mask_only_round_u)
    while prompts is not None:
        played = PromptRound(index, prompts, decode(prompts))
        yield played
        index += 1
        prompts = policy.next(played, targets, random_inputs, mask_only_round_u)
        del played
