"""What a step computes for grounding: each query's scores over its image's masks, and what they cost.

Not here: the network (`model.relevance`), the losses (`losses.relevance`), the loop (`train.loop`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gigamask.contracts import Terms
from gigamask.grounding.questions import Questions
from gigamask.losses.relevance import relevance_losses
from gigamask.model.relevance import Relevance
from gigamask.parallel.precision import Precision, casting
from gigamask.parallel.ranges import marked
from gigamask.seams import Mining, Task


@dataclass(frozen=True)
class RelevanceTask(Task):
    """Grounding: one term for a batch. A query's loss, by which it is mined as well, is `contrastive + alignment_weight * alignment`."""

    alignment_weight: float
    precision: Precision = "fp32"
    mining: Mining | None = None  # pyrefly: ignore[bad-override] (a field, where other tasks have none)

    def terms(self, model: Relevance, batch: Questions, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        if not len(batch.mask_image):
            return
        scores = score(model, batch, self.precision)
        losses = relevance_losses(scores, batch.right, batch.there)
        by_query = losses.contrastive + self.alignment_weight * losses.alignment
        best = scores.detach().argmax(1, keepdim=True)
        absent = ~batch.right.any(1, keepdim=True)
        hits = torch.cat([batch.right, absent], 1).gather(1, best)[:, 0]
        yield Terms(
            loss=(by_query * batch.weights[batch.mask_image]).sum(),
            count=by_query.new_tensor(float(len(by_query))),
            parts={
                "contrastive": losses.contrastive.detach().sum(),
                "alignment": losses.alignment.detach().sum(),
                "right": hits.to(by_query.dtype).sum(),
            },
            by_mask=by_query.detach(),
            first=0,
            image=batch.mask_image,
        )


def score(model: Relevance, batch: Questions, precision: Precision) -> Float[Tensor, "Q M1"]:
    """Returns the scores of a batch's masks, and of none, last."""
    device = batch.features.device
    with marked("forward"), casting(precision, device):
        words = batch.words
        if words is None:
            assert model.text is not None, "a text model that learns is part of the network"
            words = model.text(model.text.tokenise(batch.texts).to(device))
        return model(batch.features, batch.there, words.features, words.present)
