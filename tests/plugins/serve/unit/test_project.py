"""A project keeps every edit, refuses stale ones, loses nothing, and exports what is accepted."""

import json
import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from gigamask.datatools.formats import writers
from gigamask.masks.rle import RLEMasks
from gigamask.pixels import WindowOptions
from gigamask.plugins.serve import edits
from gigamask.plugins.serve import project as projects
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import Project, StaleError, judged, progress
from gigamask.plugins.serve.project_export import export
from gigamask.serialization import read_json
from tests.errors import error_line
from tests.plugins.serve.annotated import save_pictures

SIZE = (30, 40)


@pytest.fixture
def photos(tmp_path):
    """Five photographs, one in a subfolder."""
    save_pictures(tmp_path / "photos", "0.png 1.png 2.png 3.png more/4.png".split(), SIZE)
    return tmp_path / "photos"


@pytest.fixture
def project(tmp_path, photos):
    with Project.open(tmp_path / "project", photos) as opened:
        yield opened


@pytest.fixture
def out(tmp_path):
    """Folder of an export."""
    return tmp_path / "export"


def square(at, accepted=True, **more):
    """A square of five pixels."""
    dense = np.zeros((1, *SIZE), bool)
    dense[0, at : at + 5, at : at + 5] = True
    [counts] = RLEMasks.from_dense(dense).to_coco()
    return MaskObject(counts.decode(), accepted=accepted, **more)


def edit(project, row, version=0, objects=None, kind="prompt"):
    """Edit an image of a project, or draw a square on it."""
    return project.edit(row, version, Edit(kind, objects or {1: square(row)}), SIZE)


def check_refused(message, *places):
    with error_line(message), Project.open(*places):
        pass


def test_edits_are_undone_to_the_beginning_and_redone(project):
    found = edit(project, 0)
    found = edit(project, 0, 1, {2: square(9, name="b")})
    found = edit(project, 0, 2, {1: None}, "delete")
    assert list(found.objects) == [2]
    assert found.objects is found.objects, "each of thousands looks there"
    assert found.next_id == 3
    for version in (3, 4, 5):
        found = project.change(0, version, lambda each: each.moved(-1))
    assert found.objects == {}
    assert found.status == "not begun"
    with error_line("nothing to undo"):
        project.change(0, 6, lambda each: each.moved(-1))
    found = project.change(0, 6, lambda each: each.moved(2))
    assert list(found.objects) == [1, 2]
    found = edit(project, 0, 7, {3: square(3)})
    assert [edit.kind for edit in found.edits] == ["prompt"] * 3
    assert project.read(0) == found


def test_a_stale_edit_is_refused_and_changes_nothing(project):
    edit(project, 1)
    with pytest.raises(StaleError, match=r"1\.png: was changed elsewhere"):
        edit(project, 1, 0, {1: square(5)})
    assert project.read(1).objects[1].mask == square(1).mask


def test_a_project_is_opened_again_as_it_was(tmp_path, photos):
    with Project.open(tmp_path / "project", photos) as project:
        edit(project, 4)
        project.update(categories=(projects.ObjectCategory("cell", "#ff0000"),))
        before = project.summary()
    moved = photos.rename(tmp_path / "moved")
    check_refused("is not a folder", tmp_path / "project")
    with Project.open(tmp_path / "project", moved) as project:
        assert project.summary() == before
        assert project.content.categories[0].name == "cell"
    check_refused(
        r"1 annotated image of .*, such as more/4\.png", tmp_path / "project", moved / "more"
    )


def test_a_window_is_kept_and_its_change_is_said(tmp_path, photos):
    first, other = WindowOptions(percentiles=(1.0, 99.0)), WindowOptions(window=(0.0, 3e3))
    with Project.open(tmp_path / "project", photos) as project:
        assert project.keep_window(first) is None
    with Project.open(tmp_path / "project") as project:
        for given in (WindowOptions(), first):
            assert project.keep_window(given) is None
            assert project.content.pixels == first
        assert "--window 0 3000 replaces --percentiles 1 99" in str(project.keep_window(other))
    with Project.open(tmp_path / "project") as project:
        assert project.content.pixels == other


@pytest.mark.parametrize(
    "content, message",
    [('{"version": 2}', "is of version 2"), ("{", "not valid JSON"), ('{"version": 1}', "images")],
)
def test_a_project_that_cannot_be_read_is_left_alone(content, message, tmp_path, photos):
    path = tmp_path / "project.json"
    path.write_text(content)
    check_refused(message, tmp_path, photos)
    assert path.read_text() == content


def test_what_cannot_be_opened_is_said(tmp_path, photos):
    for folder in (photos, photos / "annotated"):  # its exports would be taken for images
        check_refused("lies in --images", folder, photos)
    (tmp_path / "export").symlink_to(photos)
    check_refused("in its folder export", tmp_path, tmp_path / "export")
    check_refused("no project yet", tmp_path / "new")
    (tmp_path / "file").touch()
    check_refused("cannot be written", tmp_path / "file" / "project", photos)


def test_a_failed_save_is_said_and_the_image_stays_as_it_was(project, monkeypatch):
    edit(project, 0)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(projects.files, "write_bytes", full)
    with error_line(r"0\.png\.json: cannot be saved \(No space"):
        edit(project, 0, 1, {1: None}, "delete")
    assert list(project.read(0).objects) == [1]
    assert project.summary()[0]["objects"] == 1


def test_a_damaged_file_is_listed_and_never_overwritten(project):
    edit(project, 0)
    path = project.folder / "annotations" / "0.png.json"
    path.write_text("{")
    project.summaries.rows.clear()
    assert project.summary()[0]["status"] == "damaged"
    with error_line("not valid JSON"):
        edit(project, 0, 1, {1: None}, "delete")
    assert path.read_text() == "{"


def test_an_image_of_another_size_is_refused(project):
    edit(project, 0)
    with error_line("31 x 40 pixels, but was annotated with 30 x 40"):
        project.read(0, (31, 40))


def test_a_tenth_of_the_images_done_is_held_out_for_good(project):
    for row in range(3):
        edit(project, row)
        project.mark_done(row, 1, True, SIZE)
    assert [each["held_out"] for each in project.summary()] == [True, False, False, False, False]
    assert project.mark_done(0, 2, False, SIZE).held_out
    assert not project.mark_done(3, 0, True, SIZE).held_out


@pytest.mark.parametrize(
    "kind, status, clicks", [("stroke", "in progress", 12), ("propose", "proposed", 0)]
)
def test_old_edits_are_merged_and_keep_what_they_cost(kind, status, clicks, project, monkeypatch):
    monkeypatch.setattr(projects, "MAX_FILE_BYTES", 2500)
    for version in range(12):
        found = edit(project, 0, version, {version % 3 + 1: square(version)}, kind)
    assert not any(each.changes for each in found.edits[: -found.undoable - 1])
    assert found.objects == {at - 8: square(at) for at in (9, 10, 11)}
    assert (found.status, progress(project)[0]["clicks"]) == (status, clicks)
    with error_line("nothing to undo"):
        found.moved(-found.undoable - 1)


def test_what_masks_cost_is_counted_for_the_model_in_use_and_by_how_they_came(project, monkeypatch):
    times = iter([0.0, 10.0, 12.0, 100.0, 101.0, 102.0])
    monkeypatch.setattr(projects.time, "time", lambda: next(times))
    one = square(0, accepted=False, origin="clicked")
    edit(project, 0, 0, {1: one})
    edit(project, 0, 1, {1: one})
    edit(project, 0, 2, {1: replace(one, accepted=True)}, "assign")
    project.update(rounds=(projects.TrainingRound("w", 9.0, 4.0),))
    edit(project, 0, 3, {2: one})
    seen = replace(one, by_model=True, accepted=True, origin="accepted")
    edit(project, 0, 4, {2: seen}, "assign")
    project.update(model=0)
    unseen = {3: replace(seen, origin="accepted in bulk"), 4: square(3, origin="drawn")}
    edit(project, 0, 5, unseen, "accept all")
    clicks_s = 12.0 + edits.IDLE_S + 1.0
    assert progress(project) == [
        {
            "round": 0,
            "masks": 2,
            "clicks": 3,
            "seconds": clicks_s,
            "origins": {"clicked": 1, "accepted": 1},
        },
        {
            "round": 1,
            "masks": 1,
            "clicks": 0,
            "seconds": 0.0,
            "origins": {"accepted in bulk": 1, "drawn": 1},
        },
    ]


def test_what_masks_cost_is_known_without_reading_files_that_nobody_changed(project, monkeypatch):
    for row in (0, 1):
        edit(project, row)
    before = progress(project)
    read, paths = projects.read_edits, []
    monkeypatch.setattr(projects, "read_edits", lambda path: paths.append(path) or read(path))
    assert progress(project) == before
    assert paths == []
    one, two = (project.folder / "annotations" / f"{row}.png.json" for row in (0, 1))
    edit(project, 0, 1, {2: square(9)})
    two.write_bytes(one.read_bytes())  # as if put back from a copy
    paths.clear()
    assert [each["masks"] for each in progress(project)] == [4]
    assert paths == [two]
    assert project.summary()[1]["objects"] == 2


def test_of_proposals_that_a_person_judged_those_kept_are_counted_for_the_model_in_use(project):
    proposed = square(
        0, False, by_model=True, origin="proposed", model=-1, predicted_iou=0.9, stability=0.7
    )
    assert replace(proposed, origin="").is_open, "so files of earlier versions say it"
    edit(project, 0, 0, dict.fromkeys(range(1, 6), proposed), "propose")
    assert sum(of for of, _ in judged(project)) == 0
    looked_at = replace(proposed, accepted=True, origin="accepted")
    unseen = replace(looked_at, origin="accepted in bulk")
    edit(project, 0, 1, {1: looked_at, 2: unseen}, "assign")
    edit(project, 0, 2, {3: replace(proposed, origin="corrected")})
    edit(project, 0, 3, {4: None}, "delete")  # and nobody has looked at 5
    assert {i: each for i, each in enumerate(judged(project)) if each[0]} == {80: (3, 1)}
    project.change(0, 4, lambda found: found.moved(-1))
    assert judged(project)[80] == (2, 1)
    project.update(model=0, rounds=(projects.TrainingRound("w", 9.0, 4.0),))
    assert judged(project)[80] == (0, 0)


def test_what_a_model_answered_and_nobody_changed_is_not_held_out(project, tmp_path):
    proposed = square(0, by_model=True, origin="accepted")
    edit(project, 0, 0, {1: proposed}, "assign")
    assert not project.mark_done(0, 1, True, SIZE).held_out
    edit(project, 1, 0, {1: proposed, 2: square(9, origin="drawn")}, "assign")
    assert project.mark_done(1, 1, True, SIZE).held_out
    assert [each["truth"] for each in project.summary()[:2]] == [0, 1]
    assert export(project, tmp_path / "all", [0, 1])["masks"] == 3
    assert export(project, tmp_path / "truth", [0, 1], only_truth=True)["masks"] == 1


@pytest.mark.parametrize(
    "masks, images, error, after, verdict",
    [
        (19, 9, 0.1, 4.0, "too few to tell"),
        (90, 4, 0.1, 4.0, "too few to tell"),
        (90, 1, None, 4.0, "too few to tell"),
        (20, 5, 2.1, 4.0, "no difference"),
        (20, 5, 1.9, 4.0, "better"),
        (20, 5, 1.9, 12.0, "worse"),
    ],
)
def test_what_is_said_of_a_model_depends_on_masks_images_and_error(
    masks, images, error, after, verdict
):
    found = projects.TrainingRound("w", 8.0, after, masks, None, images, error)
    assert found.verdict == verdict


def test_a_name_that_is_not_utf8_is_left_out_of_exports_and_said(tmp_path, photos, out):
    (photos / os.fsdecode(b"caf\xe9.png")).write_bytes((photos / "0.png").read_bytes())
    with Project.open(tmp_path / "project", photos) as opened:
        for row in range(6):
            edit(opened, row)
        told = export(opened, out, None, tuple(writers()), table=True, images=True)
    assert told["masks"] == 5
    [line] = told["skipped"]
    assert "caf" in line


def test_accepted_objects_are_exported_as_coco_and_shards(project, out):
    project.update(categories=tuple(projects.ObjectCategory(name, "#000000") for name in "ab"))
    with error_line("no object is accepted"):
        export(project, out)
    corrected = square(9, False, by_model=True, origin="corrected")
    objects = {1: square(0, category="b", name="x"), 2: square(9, accepted=False), 3: corrected}
    edit(project, 4, 0, objects)
    for _ in range(2):  # the second replaces the first
        counts = export(project, out)
    assert (counts["images"], counts["masks"]) == (1, 1)
    assert counts["skipped"] == ["2 objects left out: not accepted"]
    assert [path.name for path in out.glob("shards/*.tar")] == ["sa_000000.tar"]
    [entry] = read_json(out / "coco.json")["annotations"]
    assert (entry["category_id"], entry["name"], entry["bbox"]) == (2, "x", [0, 0, 5, 5])
    assert names(out) == ["more/4.png"]


def test_a_damaged_mask_leaves_its_image_out(project, out):
    edit(project, 0, 0, {1: replace(square(0), mask="0")})
    edit(project, 1)
    told = export(project, out)
    assert (told["masks"], told["skipped"][0][:16]) == (1, "0.png: mask 0: r")


def test_an_image_whose_last_object_is_gone_is_not_done(project):
    edit(project, 0)
    project.mark_done(0, 1, True, SIZE)
    assert edit(project, 0, 2, {1: None}, "delete").status == "in progress"


def names(out):
    """Returns the names of the images in COCO's file of an export."""
    return [each["file_name"] for each in read_json(out / "coco.json")["images"]]


def listed(out):
    """Returns the names of the files of an export."""
    return {path.name for path in out.iterdir() if path.name[0] != "."}


def test_an_image_that_is_done_without_objects_is_exported_as_that(project, out):
    edit(project, 0)
    project.mark_done(1, 0, True, SIZE)
    counts = export(project, out, None, tuple(writers()), table=True, images=True)
    assert (counts["images"], counts["masks"]) == (2, 1)
    assert names(out) == ["0.png", "1.png"]
    assert not np.any(Image.open(out / "labels" / "1.png"))
    assert (out / "yolo" / "labels" / "1.txt").read_text() == ""
    with tarfile.open(out / "shards" / "sa_000000.tar") as tar:
        read = [tar.extractfile(name).read() for name in tar.getnames() if name.endswith("json")]
    assert [len(json.loads(raw)["annotations"]) for raw in read] == [1, 0]


def test_an_image_that_cannot_be_read_is_in_no_file_of_an_export(project, photos, out):
    for row in (0, 1, 2):
        edit(project, row)
    (photos / "0.png").unlink()
    whole = (photos / "1.png").read_bytes()
    (photos / "1.png").write_bytes(whole[: len(whole) // 2])
    told = export(project, out, images=True)
    assert names(out) == ["2.png"]
    assert (told["images"], told["masks"]) == (1, 1)
    assert {line[:5] for line in told["skipped"]} == {"0.png", "1.png"}


def test_no_file_of_an_export_states_other_masks_than_the_last_one(project, out):
    edit(project, 0)
    export(project, out)
    assert export(project, out, None, ("labels",), table=True)["skipped"] == []
    kept = {"coco.json", "shards", "labels", "regions.csv"}
    assert kept <= listed(out), "all state the same masks"
    (out / ".state").write_text('["", "../photos", "coco.json", "regions.csv", "shards"]')
    edit(project, 1)
    told = export(project, out, None, ("labels",))["skipped"]
    assert [line.split(":")[0] for line in sorted(told)] == [
        str(out / name) for name in ("coco.json", "regions.csv", "shards")
    ]
    assert listed(out) == {"labels"}
    mine = {"coco.json", "notes.txt"}
    for name in mine:
        (out / name).write_text("{}")
    (out / ".state").unlink()  # as of an earlier version
    assert not export(project, out, None, ("labels",))["skipped"]
    assert listed(out) == {"labels"} | mine


def test_exports_at_once_are_whole_and_have_what_was_made_while_they_waited(project, out):
    for row in range(4):
        edit(project, row)
    with ThreadPoolExecutor(8) as threads:
        with project.exporting:
            waiting = [
                threads.submit(export, project, out, None, each)
                for each in [("coco", "shards"), ("labels",)] * 4
            ]
            time.sleep(0.2)
            edit(project, 4)
        assert {each.result()["masks"] for each in waiting} == {5}
    assert len(names(out)) == len(list(out.glob("labels/**/*.png"))) == 5


def test_a_name_that_is_too_long_for_annotations_is_said_and_the_others_go_on(tmp_path, photos):
    name = "é" * 125 + ".png"
    (photos / name).write_bytes((photos / "0.png").read_bytes())
    with Project.open(tmp_path / "project", photos) as opened:
        edit(opened, 0)
        rows = {each["name"]: each["status"] for each in opened.summary()}
        assert (rows["0.png"], rows[name]) == ("in progress", "damaged")
        with error_line("File name too long"):
            opened.read(opened.names.index(name))


def test_a_second_server_is_refused_also_if_the_lock_file_is_deleted(tmp_path, photos):
    with Project.open(tmp_path / "project", photos):
        (tmp_path / "project" / ".lock").unlink()
        check_refused("another gigamask serve", tmp_path / "project")
