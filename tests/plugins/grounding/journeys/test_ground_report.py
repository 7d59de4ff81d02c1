"""`gigamask report` of a grounding."""

from gigamask.cli.main import main
from tests.commands import invoke
from tests.html import Page
from tests.plugins.grounding import asked


def test_of_a_grounding(described, tmp_path):
    out = tmp_path / "run"
    words = [
        *asked.flags(described, out),
        *"--steps 2 --val-split 0.4 --evaluation.interval 2".split(),
    ]
    assert main(["ground", "train", asked.RECIPE, *words]) == 0
    invoke("report", out)
    page = Page((out / "report.html").read_text())
    assert {"contrastive", "alignment", "accuracy"} <= page.data["runs"][0]["records"].keys()
    assert {"answered", "top 1"} <= set(page.rows[0])
