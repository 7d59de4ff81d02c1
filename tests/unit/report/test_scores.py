"""The page of scores: what is in the summary is on it, and what is not is not."""

import pytest

from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation import clicks, proposals
from gigamask.evaluation.figures import write_figures
from gigamask.models.init import build_model
from gigamask.report.scores import page
from tests.html import Page, read
from tests.little import SPEC


@pytest.mark.slow
def test_everything_is_on_one_page(index, tmp_path):
    model, everything = build_model(SPEC, 0), MaskFilters(max_area=None)
    result = clicks.evaluate_clicks(
        model, index, everything, clicks.ClickProtocol(boundaries=True), [0, 1]
    )
    summary = result.summary() | {
        "weights": "<mine>",
        "data": ["held_out.tar"],
        "skipped": ["sa_7: no image"],
    }
    plain = page(summary)
    words = read(plain)
    assert words.count("Scores of <mine>") == words.count("<mine>") == 1
    error = summary["standard_error"]["clicks"]["9"]
    assert f"{summary['clicks']['9']:.3f} ± {error:.3f}" in words
    assert f"{summary['boundary_f']['3']:.3f}" in words
    assert "sa_7: no image" in words
    drawn, bins = (
        Page(plain).data["reliability"],
        [each for each in summary["calibration"]["bins"] if each["count"]],
    )
    assert [(each["predicted"], each["actual"], each["count"]) for each in drawn] == [
        (each["predicted"], each["actual"], each["count"]) for each in bins
    ]
    assert "Automatic masks" not in words
    search = proposals.ProposalRecall(proposals.proposal_config(2))
    clicks.evaluate_clicks(model, index, everything, rows=[0], callbacks=[search.update])
    summary["automatic"] = search.summary()
    whole = page(summary, write_figures(model, index, result, tmp_path, count=1))
    assert {"Automatic masks", "Best", "Worst", "Typical"} <= set(read(whole))
    assert whole.count("data:image/jpeg;base64,") == 3


@pytest.mark.slow
def test_page_omits_what_was_not_requested(index):
    result = clicks.evaluate_clicks(
        build_model(SPEC, 0),
        index,
        MaskFilters(max_area=None),
        clicks.ClickProtocol(clicks=(1,)),
        [0],
    )
    words = read(page(result.summary() | {"weights": "mine", "data": ["x"], "skipped": []}))
    assert not {"Boundaries", "Left out", "Automatic masks"} & set(words)
