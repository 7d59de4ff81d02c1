"""Kills, damaged files, odd folders and full disks: no acknowledged change of a project is lost,
what cannot be used is named, and the rest goes on."""

import multiprocessing
import os
import random
import shutil
import time
from contextlib import suppress

import numpy as np
import pytest

from gigamask.errors import GigamaskError
from gigamask.plugins.serve.categories import change_category
from gigamask.plugins.serve.project import ObjectCategory, Project
from gigamask.plugins.serve.project_export import export
from tests.errors import error_line
from tests.limits import files_limited
from tests.plugins.serve.annotated import annotated
from tests.plugins.serve.unit.test_project import SIZE, edit, square
from tests.plugins.serve.unit.test_project_routes import client_of

pytestmark = pytest.mark.long

KILLS, DAMAGES, MOST_S = 30, 24, 60
RESULT = b'{"weights": "rounds/0001/run", "before": 9.0, "after": 5.0, "held_out_masks": 3}'


@pytest.fixture
def folder(tmp_path):
    """A project of three annotated images, with a finished round."""
    with annotated(tmp_path, SIZE) as project:
        made = project.folder / "rounds" / "0001"
        made.mkdir(parents=True)
        (made / "round.json").write_text("{}")
        (made / "result.json").write_bytes(RESULT)
    return tmp_path / "project"


def use(folder, session):
    """Open a project and ask for all that a page asks for; return what was refused."""
    refused = []
    with Project.open(folder) as project, client_of(project, session) as client:
        about = "/api/project"
        paths = [f"{about}/images", f"{about}/loop", f"{about}/images/0", f"{about}/images/1"]
        for answer in [*map(client.get, paths), client.post(f"{about}/export", json={})]:
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert "\n" not in answer.text
                refused.append(answer.text)
        listed = client.get(f"{about}/images").json()["images"]
        row = [each["name"] for each in listed].index("2.png")
        rest = client.get(f"{about}/images/{row}")
        assert rest.status_code == 200 or listed[row]["status"] == "damaged", rest.text
    return refused


def edit_until_killed(folder, pipe):
    """Make changes of every kind, and acknowledge each by the versions of the images."""
    with Project.open(folder) as project:
        for i in range(10**6):
            row, edits = i % 3, project.read(i % 3)
            if i % 7 == 5:
                project.change(row, edits.version, lambda found: found.moved(-1))
            elif i % 7 == 6:
                project.mark_done(row, edits.version, True, SIZE)
            else:
                edit(project, row, edits.version, {i: square(i % 20)})
            if i % 5 == 4:
                name = project.content.categories[0].name
                change_category(project, name, ObjectCategory(f"c{i}", "#123456"))
            if i % 11 == 10:
                export(project, folder / "export", None, ("coco",))
            pipe.send([project.read(each).version for each in range(3)])


def test_killed_at_any_moment_it_loses_nothing_that_it_acknowledged(folder, record_property):
    record_property("tried", KILLS)
    context, chance = multiprocessing.get_context("fork"), random.Random(0)
    acknowledged = 0
    for _ in range(KILLS):
        ours, its = context.Pipe(duplex=False)
        process = context.Process(target=edit_until_killed, args=(folder, its))
        process.start()
        its.close()
        last = ours.recv()
        until = time.monotonic() + chance.random() / 10
        while time.monotonic() < until:
            if ours.poll(0.001):
                last = ours.recv()
        process.kill()
        process.join()
        with suppress(EOFError):
            while ours.poll():
                last = ours.recv()
        with Project.open(folder) as project:
            assert "damaged" not in {each["status"] for each in project.summary()}
            assert all(project.read(row).version >= last[row] for row in range(3))
        acknowledged += sum(last)
    assert acknowledged > KILLS


def damages(raw, chance):
    """Yield what may be left of a file."""
    yield from (b"", b"{", b"null", b"[]", b"\x00" * len(raw), raw[: len(raw) // 2], raw + b"}")
    yield b"[" * 50_000
    for _ in range(DAMAGES):
        kept = bytearray(raw)
        at = int(chance.integers(len(raw)))
        kind = int(chance.integers(3))
        if kind == 0:
            kept[at] ^= 1 << int(chance.integers(8))
        elif kind == 1:
            del kept[at : at + int(chance.integers(1, 20))]
        else:
            kept[at:at] = bytes(
                chance.integers(32, 127, int(chance.integers(1, 6)), dtype=np.uint8)
            )
        yield bytes(kept)


def survives(folder, session):
    """Check that a project is used, or refused in one line."""
    try:
        use(folder, session)
    except GigamaskError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "name",
    "project.json annotations/1.png.json rounds/0001/round.json rounds/0001/result.json".split(),
)
def test_damaged_files_are_named_and_the_rest_goes_on(name, folder, session, record_property):
    path = folder / name
    contents = list(damages(path.read_bytes(), np.random.default_rng(0)))
    record_property("tried", len(contents))
    for content in contents:
        path.write_bytes(content)
        survives(folder, session)


ODD = {
    "folder": lambda path: path.mkdir(),
    "FIFO": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "file": lambda path: path.write_bytes(b"x"),
}


@pytest.mark.parametrize(
    "name",
    "project.json .lock annotations annotations/1.png.json rounds rounds/0001 "
    "rounds/0001/round.json rounds/0001/result.json export ../photos/1.png "
    "../photos/new.png".split(),
)
def test_odd_files_and_folders_hang_nothing(name, folder, session, record_property):
    record_property("tried", len(ODD))
    path, aside = folder / name, folder / ".aside"
    for make in ODD.values():
        if path.exists():
            path.rename(aside)
        make(path)
        survives(folder, session)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True)
        if aside.exists():
            aside.rename(path)
    assert name.endswith("new.png") or not use(folder, session)


def test_on_a_full_disk_nothing_changes_and_it_works_once_there_is_room(folder, record_property):
    acts = [
        lambda project: edit(project, 1, project.read(1).version, {9: square(9)}),
        lambda project: project.mark_done(1, project.read(1).version, False, SIZE),
        lambda project: project.change(1, project.read(1).version, lambda each: each.moved(-1)),
        lambda project: project.update(model=0),
        lambda project: change_category(project, "object", ObjectCategory("x", "#123456")),
        lambda project: export(project, folder / "export", None, table=True, images=True),
    ]
    limits_bytes = (0, 50)
    record_property("tried", len(acts) * len(limits_bytes))
    with Project.open(folder) as project:
        for act in acts:
            for limit in limits_bytes:
                before = contents_of(folder)
                with files_limited(limit), error_line(r"cannot be|disk|space|room"):
                    act(project)
                assert contents_of(folder) == before
            act(project)


def contents_of(folder):
    """Return the content of each file of a project, but for the lock."""
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: content for path, content in found.items() if path.name != ".lock"}
