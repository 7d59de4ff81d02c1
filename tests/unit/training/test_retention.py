"""What is removed from a folder of checkpoints, and what people put beside them."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask.models import manifest
from gigamask.training import checkpoint
from gigamask.training.retention import Retention, sweep
from tests.little import SPEC, little


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return replace(little(), out=str(tmp_path), keep=1)


def write(run, step: int, retention: Retention | None = None) -> Path:
    tensors = {"a": torch.tensor([float(step)])}
    nothing = (None, None, None, None)
    snapshot = checkpoint.Snapshot(step, step, SPEC, tensors, None, tensors, *nothing)
    return checkpoint.write(snapshot, run, retention or Retention(run.keep))


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()} if path.is_dir() else {}


def test_a_mount_without_permissions_that_flushes_no_folder_has_checkpoints(run, monkeypatch):
    def refuse(path, *given):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(os, "fsync", fsync)
    assert manifest.verify(write(run, 1))["step"] == 1


def test_only_exact_names_are_ours(run, tmp_path):
    """Copies, links, files and folders with other names stay, whatever is saved and removed."""
    folder, kept = tmp_path / "checkpoints", {}
    first = write(run, 1)
    for name in ("step_00000001_good", "step_00000001.bak", "step_1", "step_000000001", "good"):
        os.system(f"cp -r {first} {folder / name}")
        (folder / name / "notes.txt").write_text("mine")
    for name in (".step_1.part", ".step_00000001_good.part", "step_00000001.replaced"):
        (folder / name).mkdir()
    (folder / "step_00000002.tar").write_text("mine")
    (folder / "step_00000003").write_text("mine")  # a file, until this step is saved
    (tmp_path / "disk").mkdir()
    elsewhere = (tmp_path / "disk" / "moved").absolute()
    os.system(f"cp -r {first} {elsewhere}")
    (folder / "step_00000000").symlink_to(elsewhere)
    kept = {path: contents(path) for path in folder.iterdir() if path != first}
    for step in (2, 4, 5):
        write(run, step)
    assert kept == {path: contents(path) for path in kept}
    assert (folder / "step_00000003").read_text() == "mine"
    assert [path.name for path in manifest.list_checkpoints(folder)] == [
        "step_00000000",
        "step_00000005",
    ]
    assert contents(elsewhere)
    assert manifest.verify(write(run, 3))["step"] == 3
    assert (folder / "step_00000003.old").read_text() == "mine"


def test_a_checkpoint_with_a_file_of_a_person_stays(run):
    mine = write(run, 1)
    (mine / "notes.txt").write_text("mine")
    (write(run, 2) / ".DS_Store").write_text("a system's")
    newest = write(run, 3)
    assert manifest.list_checkpoints(newest.parent) == [mine, newest]


def test_the_best_by_an_earlier_evaluation_stays(run, tmp_path):
    """As when a run is resumed with other held-out images; `best` is by the new one."""
    scores = [(0.9, "box"), (0.5, "box"), (0.2, "1 click"), (0.1, "1 click"), (0.1, "1 click")]
    for step, (score, by) in enumerate(scores, 1):
        checkpoint.record_score(write(run, step), score, by, run.keep)
    folder = tmp_path / "checkpoints"
    assert [manifest.step_of(path) for path in manifest.list_checkpoints(folder)] == [1, 3, 5]
    assert (folder / "best").readlink().name == "step_00000003"


def test_a_folder_in_the_place_of_the_link_to_the_best_stays(run, tmp_path):
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    folder = write(run, 1)
    with pytest.warns(UserWarning, match="best: is not a link"):
        checkpoint.record_score(folder, 0.5, "box", 1)
    assert not (tmp_path / "checkpoints" / "best").is_symlink()


def test_a_file_system_without_links_has_no_best(run, tmp_path, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    checkpoint.record_score(write(run, 1), 0.5, "box", 1)
    assert not (tmp_path / "checkpoints" / "best").is_symlink()
    assert len(manifest.list_checkpoints(write(run, 2).parent)) == 2


def test_what_is_not_read_back_as_it_was_written_removes_nothing(run, monkeypatch):
    before = write(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "uncache", lambda path: os.truncate(path, 9))
        with pytest.raises(OSError, match="not read back") as caught:
            write(run, 2)
    assert caught.value.errno == errno.EIO
    assert manifest.newest(Path(run.out)) == before
    assert manifest.list_checkpoints(before.parent) == [before]
    assert manifest.list_checkpoints(before.parent) != [write(run, 2)]


def test_steps_are_ordered_as_numbers(run, tmp_path):
    steps = (99_999_999, 100_000_000, 1_000_000_000)
    found = [write(replace(run, keep=3), step) for step in steps]
    assert manifest.list_checkpoints(tmp_path / "checkpoints") == found
    assert [manifest.step_of(path) for path in found] == list(steps)


def test_a_checkpoint_that_was_about_to_be_replaced_is_restored(run):
    """Killed between the two renames; and behind them."""
    first = write(run, 1)
    hidden = first.with_name(".step_00000001.replaced")
    first.rename(hidden)
    sweep(first.parent)
    assert manifest.newest(Path(run.out)) == first
    hidden.mkdir()
    sweep(first.parent)
    assert not hidden.exists()
    assert manifest.verify(first)


def test_checksums_are_not_computed_again_without_need(run, monkeypatch):
    """Of what this process wrote and has not changed since, scores aside."""
    retention = Retention(2)
    for step in (1, 2):
        folder = write(run, step, retention)
    read = []
    monkeypatch.setattr(manifest, "crc32", lambda path: read.append(path.parent.name) or 0)
    checkpoint.record_score(folder, 0.5, "box", 2, retention)
    assert read == []
    os.utime(folder / checkpoint.MODEL, (0, 0))
    with pytest.warns(UserWarning, match=r"renamed to step_00000002.damaged"):
        retention.prune(folder.parent, folder)
    assert set(read) == {"step_00000002"}
