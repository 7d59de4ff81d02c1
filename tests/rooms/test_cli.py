"""What ends a command besides its own end."""

import subprocess
import sys

import pytest

from gigamask import cli

READ_ONE_LINE = "import sys; from gigamask.cli import main; sys.exit(main(sys.argv[1:]))"


def test_who_reads_no_further_ends_it_quietly(tmp_path):
    """As behind `| head -1`: no traceback, and the code that a shell gives for it."""
    process = subprocess.Popen([sys.executable, "-c", READ_ONE_LINE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == cli.UNREAD
    assert said == b""


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch):
    def broken(words):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "dispatch", broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["--help"])
