"""Exit codes, warnings, and what `--help` imports."""

import os
import signal
import subprocess
import sys

import pytest

from gigamask.cli import main

HELPS = """
import contextlib, io, sys
from gigamask.cli.main import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(line.split())
    imported = {"torch", "numpy"} & sys.modules.keys()
    print(line, len(out.getvalue()) > 100, *imported, sep=",")
"""
MAIN = "import sys; from gigamask.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_quietly():
    """As with `| head -1`: no traceback, and the exit code of a shell."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == main.PIPE_CLOSED
    assert error == b""


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGUSR1, 2)],
)
def test_a_signal_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, capsys, number, times):
    """Also if a batch system repeats it while files are removed."""
    handler, unlink = signal.getsignal(number), os.unlink

    def signaled(*given, **named):
        signal.raise_signal(number)

    def twice(path):
        for _ in range(times - 1):
            signal.raise_signal(number)
        unlink(path)

    monkeypatch.setattr("gigamask.synthetic.scenes.record", signaled)
    monkeypatch.setattr(os, "unlink", twice)
    assert main.main(f"synth {tmp_path}/out --images 2".split()) == 128 + number
    name = signal.Signals(number).name
    printed = capsys.readouterr().err.lstrip()  # rich before 14.3.4 leaves an empty line
    assert printed == f"gigamask: stopped by {name}; run the same command again\n"
    assert not list((tmp_path / "out").iterdir())
    assert signal.getsignal(number) == handler


def test_another_broken_pipe_is_an_error(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "run_command", broken)
    with pytest.raises(BrokenPipeError):
        main.main(["--help"])


@pytest.mark.slow
def test_help_imports_only_what_it_describes():
    """Components and recipes import numpy, other commands do not, and none imports torch."""
    with_components = [
        *("stats --help", "plan --help", "train --help", "pretrain --help"),
        *("distill --help", "ground train --help", "train sam_vit_b --help"),
    ]
    others = [
        line for command in main.commands() if (line := f"{command} --help") not in with_components
    ]
    lines = ["--help", *others, *with_components]
    process = subprocess.run(
        [sys.executable, "-c", HELPS],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [row.split(",") for row in process.stdout.splitlines()]
    assert [row[:2] for row in rows] == [[line, "True"] for line in lines]
    imported = {line: set(names) for line, _, *names in rows}
    assert imported == {line: {"numpy"} if line in with_components else set() for line in lines}


def test_every_command_has_a_line_in_the_overview():
    lines = main.overview().splitlines()
    for command in main.commands():
        (line,) = (line for line in lines if line.startswith(f"  {command:9} "))
        assert len(line) <= 102


@pytest.mark.slow
def test_help_lists_a_command_s_own_flags_before_inherited_ones(capsys):
    for words in (["segment"], ["evaluate"], ["train", "tiny"]):
        with pytest.raises(SystemExit):
            main.main([*words, "--help"])
        out = capsys.readouterr().out
        own = "--data" if words == ["evaluate"] else "--out" if words == ["segment"] else "--epochs"
        assert 0 < out.index(f" {own} ") < out.index(" --submit ")
