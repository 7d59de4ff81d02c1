"""Scores in the docs are fractions, as the glossary says: in the columns of tables and in prose."""

import re
from collections.abc import Iterator

import pytest

from tests.laws.test_language import PAGES, ROOT

COLUMN = re.compile(
    r"(?:\d+ clicks?|oracle|(?:loose )?box|mIoU|best IoU|IoU|AP\d*|AR@\d+|top \d"
    r"|boundary F|absent|answered|refused|pointing)(?:, 1 click)?"
)
"""Heads of columns of scores; a head of more words is not one."""
LARGE = re.compile(r"(?<![\w.,])(?:[1-9]\d+|[2-9]|1\.\d*[1-9]\d*|[2-9]\.\d+)(?:\.\d+)?(?![\w,])")
"""A number above 1, with which no fraction begins."""
PROSE = re.compile(
    r"IoU (?:of )?(?:about |at least |above )?\d+(?:\.\d+)? ?(?:%|per cent|points)"
    r"|\d ?(?:%|per cent|points) (?:of )?(?:m?IoU|AP|AR)\b"
    r"|(?:IoU|scores?) (?:is|are)? ?(?:in|as) per ?cent"
    r"|\d{2}\.\d (?:at|with|after|for) (?:one|two|three|five|nine|\d|a) (?:clicks?|box)\b"
)


def per_cents(text: str) -> Iterator[str]:
    """Yield what a page states of scores, but not as fractions."""
    heads: list[str] = []
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            heads = []
        cells = [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("|") and not heads:
            heads = cells
            continue
        for head, cell in zip(heads, cells, strict=False):
            if COLUMN.fullmatch(head) and (LARGE.search(cell) or "%" in cell):
                yield f"{head}: {cell}"
    yield from (each.group() for each in PROSE.finditer(" ".join(text.split())))


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_scores_are_fractions(path):
    assert list(per_cents(path.read_text())) == []


@pytest.mark.parametrize(
    "text, found",
    [
        (
            "| model | 1 click | ms |\n|---|---|---|\n| a | 43.2 ± 2.1 | 51 |",
            ["1 click: 43.2 ± 2.1"],
        ),
        ("| | box |\n|---|---|\n| a | **.432 ± .021** |\n| b | 1.000 |\n| c | 0 |", []),
        ("| | AP50 |\n|---|---|\n| a | 43 |", ["AP50: 43"]),
        ("it reaches an IoU of 43 %", ["IoU of 43 %"]),
        ("up to 2 points of IoU", ["2 points of IoU"]),
        ("it has 43.2\nat one click", ["43.2 at one click"]),
        ("it has .432 at one click, and 3 points in 40 % of the image", []),
    ],
)
def test_per_cents_are_found(text, found):
    assert list(per_cents(text)) == found
