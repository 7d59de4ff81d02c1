"""A file gets its name when it is complete, with the permissions that the umask gives."""

import os
import resource
import stat
import zlib

import pytest
import torch
from safetensors.torch import save_file

from gigamask import files
from gigamask.cli.main import expand_home_of
from gigamask.data import storage
from gigamask.files import expand_home
from tests.errors import error_line
from tests.limits import files_limited


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["text", "library"])
def test_modes_follow_the_umask(name, umask, tmp_path):
    """safetensors writes files that only their owner can read."""
    path = tmp_path / name
    if name == "text":
        files.write_text(path, "x")
    else:
        files.write_atomically(path, lambda partial: save_file({"x": torch.zeros(1)}, partial))
    assert mode(path) == 0o666 & ~umask


def test_an_error_keeps_the_earlier_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "before")

    def fail(partial):
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, fail)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_may_have_the_most_bytes_that_file_systems_allow(tmp_path):
    files.write_text(tmp_path / ("字" * 85), "x")
    assert [len(path.name) for path in tmp_path.iterdir()] == [85]


def test_a_full_disk_names_the_file(tmp_path):
    with files_limited(10), pytest.raises(OSError, match="File too large") as full:
        files.write_bytes(tmp_path / "file", bytes(1000))
    assert full.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        files.write_text(tmp_path / "none" / "file", "x")
    assert missing.value.filename == str(tmp_path / "none" / "file")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target.name)
    files.write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_device_is_written_in_place():
    files.write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_crc32_is_that_of_the_content(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 7)
    content = bytes(range(100))
    files.write_bytes(tmp_path / "file", content)
    assert files.crc32(tmp_path / "file") == zlib.crc32(content)


def test_an_output_folder_holds_nothing_else(tmp_path):
    files.check_out(tmp_path / "new", "an index")
    files.check_out(tmp_path, "an index")
    for name in ".manifest.json.0d6c2ca0.partial", "b.jpg", "a.log":
        (tmp_path / name).touch()
    with error_line(r"is not an index, but holds a\.log and 1 more"):
        files.check_out(tmp_path, "an index")
    with error_line(r"holds b\.jpg, so"):
        files.check_out(tmp_path, "an index", lambda entry: entry.name == "a.log")
    with error_line(r"b\.jpg: cannot be an index"):
        files.check_out(tmp_path / "b.jpg", "an index")


@pytest.mark.parametrize(
    "name, foreign",
    [
        ("._1.jpg", True),
        (".ipynb_checkpoints", True),
        ("Thumbs.db", True),
        ("__MACOSX", True),
        ("@eaDir", True),
        ("~$labels.txt", True),
        ("1.jpg", False),
        ("__ignore__.png", False),
    ],
)
def test_what_systems_leave_among_files(name, foreign):
    assert files.is_foreign(name) == foreign


def test_tars_of_a_folder(tmp_path):
    for name in ("b.tar", "a.tar", "._a.tar", "a.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in files.find_tars(tmp_path)] == ["a.tar", "b.tar"]
    assert files.find_tars(tmp_path / "a.tar") == []


def test_the_limit_of_open_files_is_raised_as_far_as_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        files.raise_file_limit()
        assert files.file_limit() == min(files.MAX_FILES, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_many_open_files_are_no_fault_of_a_file():
    files.check_file_limit(OSError(2, "No such file or directory"))
    for error in (OSError(24, "x"), RuntimeError("shared memory: Too many open files (24)")):
        with error_line("ulimit -n"):
            files.check_file_limit(error)


def test_a_tilde_is_the_home_folder_unless_a_file_is_named_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/a")
    assert expand_home("~/x") == "/home/a/x"
    assert expand_home("~") == "/home/a"
    assert [expand_home(name) for name in ("~x", "x/~", "a~/b")] == ["~x", "x/~", "a~/b"]
    assert storage.normalize("~/x") == "/home/a/x"
    assert [expand_home_of(word) for word in ("--data=~/s", "~/s", "--text=a=~/b", "--n=3")] == [
        "--data=/home/a/s",
        "/home/a/s",
        "--text=a=~/b",
        "--n=3",
    ]
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "x").touch()
    assert expand_home("~/x") == "~/x"


def test_where_a_relative_path_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.relative_to("shards/a.tar") == f" in {tmp_path}"
    for whole in ("/shards", "~/shards", "s3://shards/a.tar"):
        assert files.relative_to(whole) == ""
