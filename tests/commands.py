"""Commands as a user types them, run in this process."""

import shlex
from pathlib import Path

import pytest

from gigamask.cli.main import main
from tests import little

LITTLE = f"{Path(little.__file__).resolve()}:little"
"""The recipe of `tests/little.py`."""


def exit_code(*words: object) -> int:
    """Run a command and return its exit code.

    Args:
        words: Its text, in any number of parts, of which each may have several words.
    """
    return main(shlex.split(" ".join(map(str, words))))


def invoke(*words: object) -> None:
    """Run a command that succeeds.

    Args:
        words: Its text, as of `exit_code`.
    """
    code = exit_code(*words)
    assert code == 0, f"exit code {code} of {words}"


def refusal(capsys: pytest.CaptureFixture, *words: object) -> str:
    """Run a command that is refused with one line, and return that line.

    Args:
        capsys: Of the test.
        words: Its text, as of `exit_code`.
    """
    capsys.readouterr()
    code = exit_code(*words)
    told = capsys.readouterr().err.strip()
    assert (code, told.count("\n")) == (2, 0), f"exit code {code} of {words}: {told}"
    return told
