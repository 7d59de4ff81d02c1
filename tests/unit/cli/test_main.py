"""What ends a command besides its own end."""

import subprocess
import sys

import pytest

from gigamask.cli import main

HELPS = """
import contextlib, io, sys
from gigamask.cli.main import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        main(line.split())
    print(line, len(told.getvalue()) > 100, *({"torch", "numpy", "tyro"} & sys.modules.keys()), sep=",")
"""
READ_ONE_LINE = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"


def test_who_reads_no_further_ends_it_quietly(tmp_path):
    """As behind `| head -1`: no traceback, and the code that a shell gives for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", READ_ONE_LINE, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == main.UNREAD
    assert said == b""


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch):
    def broken(words):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "dispatch", broken)
    with pytest.raises(BrokenPipeError):
        main.main(["--help"])


def test_help_imports_only_what_it_tells_of():
    """The overview nothing, a verb its flags' parser, what takes parts or recipes numpy, nothing torch."""
    made_of_parts = [
        "stats --help",
        "plan --help",
        "train --help",
        "pretrain --help",
        "ground train --help",
        "train sam_vit_b --help",
    ]
    others = [line for verb in main.VERBS if (line := f"{verb} --help") not in made_of_parts]
    lines = ["--help", *others, *made_of_parts]
    done = subprocess.run(
        [sys.executable, "-c", HELPS],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [row.split(",") for row in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [[line, "True"] for line in lines]
    imported = {line: set(row) for line, _, *row in rows}
    assert imported["--help"] == set()
    assert all(imported[line] == {"tyro"} for line in others)
    assert imported[lines[-1]] == {"tyro", "numpy"}
