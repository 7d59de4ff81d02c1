"""Images that are gone and annotations that are damaged are named, and the rest goes on."""

import pytest

from gigamask.plugins.serve.lost_images import notice, pair_by_content, unused
from gigamask.plugins.serve.project import Project, progress, replaced
from gigamask.plugins.serve.project_export import export
from tests.plugins.serve.unit.test_project import edit, names, photos, square  # noqa: F401 (a fixture)


@pytest.fixture
def annotated(tmp_path, photos):  # noqa: F811
    """The folder of a project of which all five images have a mask."""
    with Project.open(tmp_path / "project", photos) as opened:
        for row in range(5):
            edit(opened, row)
        assert notice(opened) is None
    return tmp_path / "project"


def exported(project):
    return export(project, project.folder / "export")


def test_photographs_that_are_not_read_are_named(annotated, photos):  # noqa: F811
    (photos / "phone.heic").touch()
    with Project.open(annotated) as opened:
        [line] = unused(opened)
        assert "HEIC is not read" in line
        assert exported(opened)["skipped"] == [line]


def test_renamed_images_are_named_and_paired_by_content(annotated, photos):  # noqa: F811
    (photos / "1.png").rename(photos / "renamed.png")
    (photos / "3.png").unlink()
    with Project.open(annotated) as opened:
        assert opened.missing == {"1.png": 1, "3.png": 1}
        for line, name in zip(unused(opened), ("1.png", "3.png"), strict=True):
            assert line.startswith(f"{name}: ")
            assert "1 mask " in line
        told = exported(opened)
        assert (told["masks"], told["skipped"]) == (3, unused(opened))
        assert pair_by_content(opened) == {"1.png": "renamed.png"}
        row = opened.names.index("renamed.png")
        assert opened.summary()[row]["accepted"] == 1
        assert opened.read(row).objects[1].mask == square(1).mask
        assert opened.missing == {"3.png": 1}
        assert exported(opened)["masks"] == 4
    with Project.open(annotated) as opened:
        assert opened.missing == {"3.png": 1}


def test_a_folder_of_renamed_images_is_opened_and_paired(annotated, photos):  # noqa: F811
    for path in list(photos.rglob("*.png")):
        path.rename(path.with_name(f"photo_{path.name}"))
    with Project.open(annotated) as opened:
        assert len(opened.missing) == 5
        assert str(notice(opened)).splitlines()[-1].startswith("and 2 images more")
        assert pair_by_content(opened)["more/4.png"] == "more/photo_4.png"
        assert sum(each["accepted"] for each in opened.summary()) == 5


@pytest.mark.parametrize("what", ["truncated", "deleted"])
def test_annotations_lost_while_the_page_is_open_are_named_and_the_rest_goes_on(what, annotated):
    with Project.open(annotated) as opened:
        assert len(opened.summary()) == 5
        path = annotated / "annotations" / "2.png.json"
        path.unlink() if what == "deleted" else path.write_bytes(path.read_bytes()[:40])
        change = opened.summaries.changes
        assert [each["masks"] for each in progress(opened)] == [4]
        assert opened.summaries.since(change) == [2]
        assert opened.summary()[2]["status"] == "damaged"
        told = exported(opened)
        assert names(annotated / "export") == ["0.png", "1.png", "3.png", "more/4.png"]
        assert (told["masks"], told["skipped"]) == (4, unused(opened))
        [line] = unused(opened)
        assert line.startswith("2.png: its annotations cannot be used: ")
        assert what == "truncated" or "deleted" in line


def test_a_photograph_that_was_replaced_is_named(annotated, photos):  # noqa: F811
    """Its masks are those of another file of the same size; they are exported all the same."""
    (photos / "0.png").write_bytes((photos / "1.png").read_bytes())
    (photos / "2.png").unlink()
    with Project.open(annotated) as opened:
        rows = [opened.names.index(name) for name in ("0.png", "1.png")]
        lines = [line for row in rows for line in replaced(opened, row, opened.read(row))]
        assert lines == ["0.png: is another file than the one that was annotated; check its masks"]
        told = exported(opened)
    assert (told["images"], told["skipped"][0]) == (4, lines[0])


def test_photographs_deleted_while_the_page_is_open_are_left_out_by_name(annotated, photos):  # noqa: F811
    with Project.open(annotated) as opened:
        (photos / "0.png").unlink()
        told = exported(opened)
    assert told["masks"] == 4
    assert [line for line in told["skipped"] if "0.png" in line]
