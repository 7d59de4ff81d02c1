"""Scores by the names that are printed."""

from gigamask.evaluation.score_names import by_prompt


def test_scores_have_the_names_of_their_prompts():
    means = {"masks": 3, "clicks": {"1": 0.5, "20": 0.75}, "box": 0.25, "loose_box": None}
    assert by_prompt(means) == {"1 click": 0.5, "20 clicks": 0.75, "box": 0.25, "loose box": None}
    assert list(by_prompt({"clicks": {}, "box": 1.0, "oracle": 2.0})) == ["oracle", "box"]
