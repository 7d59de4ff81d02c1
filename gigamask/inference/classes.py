"""Classes of predicted masks: their scores, and their fields in records."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float32
from torch import Tensor


def class_scores(logits: Float[Tensor, "*masks C"]) -> Float32[Tensor, "*masks C"]:
    """Return the probabilities of the classes.

    Args:
        logits: Logits of the classes.
    """
    return logits.float().softmax(-1)


def class_fields(
    scores: Float[np.ndarray, "n C"] | None, names: Sequence[str]
) -> list[dict[str, Any]] | None:
    """Return `category_id`, `category` and `class_score` of each mask; None without classes.

    Args:
        scores: Probabilities of the classes of n masks.
        names: Names of the classes, whose positions are the ids.
    """
    if scores is None:
        return None
    return [
        {"category_id": best, "category": names[best], "class_score": float(row[best])}
        for row, best in zip(scores, scores.argmax(1).tolist(), strict=True)
    ]
