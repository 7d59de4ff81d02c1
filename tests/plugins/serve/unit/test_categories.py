"""Categories are renamed, merged and recolored in all edits, also of missing images."""

import pytest

from gigamask.plugins.serve.categories import change_category
from gigamask.plugins.serve.project import ObjectCategory, Project
from tests.errors import error_line
from tests.plugins.serve.unit.test_project import edit, photos, square  # noqa: F401 (a fixture)


@pytest.fixture
def folder(tmp_path, photos):  # noqa: F811
    """A project with objects of two categories in two images, of which one is missing."""
    with Project.open(tmp_path / "project", photos) as opened:
        opened.update(categories=tuple(ObjectCategory(name, "#000000") for name in ("cat", "dog")))
        drawn = ((0, 0, "cat"), (0, 1, "dog"), (0, 2, "cat"), (1, 0, "cat"), (2, 0, "dog"))
        for row, version, name in drawn:
            edit(opened, row, version, {version + 1: square(version, category=name)})
        opened.change(0, 3, lambda found: found.moved(-1))
    (photos / "1.png").unlink()
    return tmp_path / "project"


@pytest.mark.parametrize(
    "new, left, tally",
    [
        (ObjectCategory("kitten", "#ff0000"), {"kitten": "#ff0000", "dog": "#000000"}, None),
        (ObjectCategory("dog", "#ff0000"), {"dog": "#000000"}, {"dog": 2}),
    ],
)
def test_a_category_is_renamed_or_merged_everywhere(new, left, tally, folder):
    with Project.open(folder) as opened:
        assert change_category(opened, "cat", new) == {"objects": 2, "images": 2}
        assert {each.name: each.color for each in opened.content.categories} == left
        assert opened.summary()[0]["categories"] == (tally or {"kitten": 1, "dog": 1})
        version = opened.read(0).version
        again = opened.change(0, version, lambda found: found.moved(1))
        assert again.objects[3].category == new.name
        assert list(opened.missing) == ["1.png"]
        assert b'"cat"' not in (folder / "annotations" / "1.png.json").read_bytes()


def test_a_color_touches_no_object_and_unknown_categories_are_refused(folder):
    with Project.open(folder) as opened:
        before = opened.read(0)
        assert change_category(opened, "cat", ObjectCategory("cat", "#00ff00"))["objects"] == 0
        assert opened.content.categories[0] == ObjectCategory("cat", "#00ff00")
        assert opened.read(0) == before
        with error_line("no category cow"):
            change_category(opened, "cow", ObjectCategory("cat", "#00ff00"))
