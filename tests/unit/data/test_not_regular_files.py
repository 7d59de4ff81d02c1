"""A pipe where a file is expected is refused at once, with its path, whoever reads it."""

import os
import signal

import numpy as np
import pytest
from PIL import Image

from gigamask.data import attributes, image_folder, index, storage, tar
from gigamask.data.shards import ShardReader
from gigamask.datatools import checksums, convert, verify
from gigamask.errors import CorruptSampleError
from gigamask.synthetic import scenes
from tests.errors import error_line


@pytest.fixture
def pipe(tmp_path):
    """A pipe named `x.tar` that no process writes to; opening it would wait for ever."""
    os.mkfifo(tmp_path / "x.tar")
    signal.setitimer(signal.ITIMER_REAL, 10)  # ends the test run instead of hanging
    yield tmp_path / "x.tar"
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: index.build(path, path.parent / "index"),
        lambda path: index.build(path.parent, path.parent / "index"),
        lambda path: verify.verify(path),
        lambda path: tar.scan(path),
        lambda path: storage.read(str(path), 0, 10),
        lambda path: ShardReader([str(path)]).read(0, 0, 10),
        checksums.read,
        lambda path: checksums.digest(path, "0" * 32),
        lambda path: convert.convert(
            path, path.parent, path.parent / "out", convert.ConvertOptions()
        ),
    ],
)
def test_a_pipe_is_refused(pipe, read):
    with error_line(r"x\.tar"):
        read(pipe)


def test_a_pipe_among_images_is_left_out(pipe):
    folder, labels = pipe.parent / "photos", pipe.parent / "labels"
    for path in (folder, labels):
        path.mkdir()
        Image.fromarray(np.ones((8, 8), np.uint8)).save(path / "a.png")
        os.mkfifo(path / "b.png")
    built = index.build(folder, pipe.parent / "index")
    assert built.images["name"].tolist() == [b"a.png"]
    assert isinstance(image_folder.read_file(str(folder / "b.png"), 10), CorruptSampleError)
    with error_line(r"x\.tar"):
        attributes.read(pipe, built)
    result = convert.convert(labels, folder, pipe.parent / "out", convert.ConvertOptions())
    assert (result["images"], result["masks"], result["skipped_images"]) == (1, 1, [])


def test_scenes_are_not_written_over_a_pipe(pipe):
    pipe.rename(pipe.parent / "sa_000000.tar")
    with error_line(r"sa_000000\.tar"):
        scenes.write(pipe.parent, 1)
