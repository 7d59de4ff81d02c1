"""Limits of the operating system on what a test may write."""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import exit_code, invoke

LIMITS_BYTES = (0, 200, 3_000, 40_000)


@contextmanager
def files_limited(size: int) -> Iterator[None]:
    """Let no file grow beyond some bytes, as on a full disk.

    Python would store compiled modules that are cut off, which nothing could import afterwards.

    Args:
        size: Bytes.
    """
    limits, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes


def check_full_disk(words: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Check that on a full disk a command is refused with one line, leaves no half file, and works
    once there is room.

    Args:
        words: The command, with {out} in place of its folder.
        folder: A folder for this test.
        capsys: Of the test.
    """
    whole = folder / "whole"
    whole.mkdir()
    invoke(words.format(out=whole / "out"))
    sizes = {path.relative_to(whole): path.stat().st_size for path in _written(whole)}
    assert sizes
    refused = 0
    for limit in LIMITS_BYTES:
        place = folder / str(limit)
        place.mkdir()
        again = words.format(out=place / "out")
        capsys.readouterr()
        with files_limited(limit):
            code = exit_code(again)
        lines = capsys.readouterr().err.splitlines()
        refused += code != 0
        if code:
            assert code == 2, lines
            assert any("File too large" in line for line in lines), lines
        for path in _written(place):
            if not words.startswith("train"):  # metrics.jsonl grows in place
                assert path.stat().st_size == sizes[path.relative_to(place)], path
        if code:
            invoke(again)
            logs = {path for path in sizes if "tensorboard" in path.parts}  # named by the time
            assert {path.relative_to(place) for path in _written(place)} >= {*sizes} - logs
        if (place / "out.json").exists():
            json.loads((place / "out.json").read_text())
        assert not list(place.rglob("*.partial"))
    assert refused


def _written(folder: Path) -> list[Path]:
    """Return all files that are not the work in progress of a command to be run again."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
