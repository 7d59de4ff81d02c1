"""Scores of the same weights, taken twice."""

from typing import Any

import pytest


def alike(ours: Any, theirs: Any) -> bool:
    """Says whether scores are the same but for rounding, which depends on where in memory numbers
    lie and may turn a mask's pixels at its edge."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(
            alike(ours[name], theirs[name]) for name in ours
        )
    return ours == pytest.approx(theirs, abs=0.02) if isinstance(ours, float) else ours == theirs
