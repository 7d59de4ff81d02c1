"""Plays a policy against a model: prompts go to `decode`, its answer becomes a round, the round decides the next prompts.

Not here: which prompts (`policy`), the model (`decode` is any callable), the backward pass of each round (`train.step`).
"""

from collections.abc import Callable, Iterator

from gigamask.contracts import Draws, Prediction, Prompts, Round, Truth
from gigamask.seams import Policy


def play(decode: Callable[[Prompts], Prediction], truth: Truth, policy: Policy, draws: Draws | None = None, pause: float = 0.0) -> Iterator[Round]:
    """Yields one round at a time and keeps nothing of it: what a round hands on is outside the graph, and it is let go before the next is decoded.

    So a caller that back-propagates each round as it comes holds one round's activations, however many there are.
    """
    index = 0
    prompts = policy.next(None, truth, draws, pause)
    while prompts is not None:
        played = Round(index, prompts, decode(prompts))
        yield played
        index += 1
        prompts = policy.next(played, truth, draws, pause)
        del played
