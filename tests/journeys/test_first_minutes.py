"""docs/first_minutes.md shows the commands of its program, and what they print today."""

import pytest

from docs.run_first_minutes import PAGE, STEPS, recorded, render, run, shapes

AGAIN = "run python -m docs.run_first_minutes"


def test_the_page_is_that_of_its_program():
    page = PAGE.read_text()
    assert page == render(recorded(page)), AGAIN
    assert len(recorded(page)) == len(STEPS)


@pytest.mark.long
def test_the_commands_print_lines_of_the_same_form(tmp_path):
    """Numbers and lines of progress may differ."""
    for (_, command), output in zip(STEPS, recorded(PAGE.read_text()), strict=True):
        again = run(command, tmp_path)
        assert list(shapes(again)) == list(shapes(output)), AGAIN


def test_a_line_without_its_number_or_another_is_found():
    assert [*shapes("step 3/40  loss 1.5\n1 scene, 2,000.5 MB\n")] == ["# scene, # MB"]
    assert [*shapes("a 1.0\n")] == [*shapes("a   2\n")] != [*shapes("b 1.0\n")]
