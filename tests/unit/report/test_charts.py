"""What charts are drawn from: short, of finite numbers, and safe inside a script element."""

import json

import pytest

from gigamask.report import charts, history, html
from tests.html import Page
from tests.unit.report.test_history import record, written


def test_long_curves_are_thinned_to_means():
    count = 3 * charts.MAX_POINTS - 1
    told = charts.downsample(
        {
            "step": list(range(1, count + 1)),
            "loss": [float(step % 3) for step in range(count)],
            "none": [None] * count,
        }
    )
    assert len(told["step"]) == charts.MAX_POINTS
    assert told["step"][:2] == [3, 6]
    assert told["step"][-1] == count
    assert told["loss"][:2] == [1.0, 1.0]
    assert set(told["none"]) == {None}
    assert charts.downsample({"step": []}) == {"step": []}


def test_curves_hold_records_scores_and_where_training_resumed(tmp_path):
    start = {"step": 2, "started": "2026-01-02T03:04:05+00:00", "device": "cpu"}
    scored = {
        "step": 2,
        "evaluation": {"box": 0.5, "nan": float("nan")},
        "warnings": ["oh"],
    }
    events = [record(1), record(2), scored, start, record(3, float("inf"), huge=10**400)]
    found = charts.curves(history.read(written(tmp_path / "run", *events)))
    assert found["records"]["step"] == [1, 2, 3]
    assert found["records"]["loss"] == [0.5, 0.5, None]
    assert found["records"]["huge"] == [None, None, None]
    assert found["records"]["waiting"] == pytest.approx([25.0, 25.0, 25.0])  # 0.1 of 0.4 s
    assert found["evaluations"] == [{"step": 2, "scores": {"box": 0.5, "nan": None}}]
    assert found["resumed"] == [2]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "&lt;",
        "\u2028",
        "]]>",
        "\ud800",
        "\\u003c",
    ],
)
def test_names_cannot_end_the_script_that_holds_them(text):
    data = {"runs": [{"name": text, text: text}]}
    page = Page(html.document("<title>", [], data))
    assert page.data == data
    assert (page.count("script"), len(page.scripts)) == (2, 1)
    embedded = html.json_in_html(data)
    assert not {"<", ">", "&", "\u2028"} & set(embedded)


def test_a_page_without_charts_has_no_script():
    assert Page(html.document("plain", ["<p>text</p>"])).count("script") == 0
