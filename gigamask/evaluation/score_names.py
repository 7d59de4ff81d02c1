"""The names by which the scores of a summary are printed; imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from gigamask.errors import score_text

BOXES_AND_ORACLE = ("oracle", "box", "loose_box")
EXPLAINED = (
    "mean IoU after clicks and for a box; oracle: of the best of three masks; wrong image: after "
    "one click on another image (low is good); points with a mask: as a share of 8 x 8"
)
"""What the scores of an evaluation in training are."""


def by_prompt(means: Mapping[str, Any]) -> dict[str, Any]:
    """Return scores by the names of their prompts, as "1 click" or "loose box".

    Args:
        means: Summary of all masks or of some, or their standard errors; empty if there are none.
    """
    # A report reads files of others, whose counts may be any text.
    clicks = {f"{n} click{'s' * (n != '1')}": mean for n, mean in means.get("clicks", {}).items()}
    others = {name.replace("_", " "): means[name] for name in BOXES_AND_ORACLE if name in means}
    return clicks | others


def score_texts(
    scores: Mapping[str, Any], errors: Mapping[str, Any], names: Iterable[str] | None = None
) -> list[str]:
    """Return scores as text with their standard errors; empty text for one that is unknown.

    Args:
        scores: Scores by name.
        errors: Their standard errors, those that are known.
        names: Names of the scores to return; default: all.
    """
    return [score_text(scores.get(name), errors.get(name)) for name in names or scores]
