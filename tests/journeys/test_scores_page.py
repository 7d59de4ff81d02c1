"""The Python of docs/scores.md, run as it stands there."""

from tests.journeys.pages import blocks


def test_the_pages_code_runs(capsys):
    (code,) = blocks("scores.md")
    exec(compile(code, "docs/scores.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("2 masks found, 2 to find, on 1 images; %\nAP")
    assert "AR@1000           85.0" in printed
    assert "calibration error" in printed
