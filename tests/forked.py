"""Processes of `gigamask` without a start of Python, which takes longer than their work."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import IO

import pytest

from gigamask.cli.main import main

COMMAND = [sys.executable, "-m", "gigamask"]


class Fork:
    """Runs `python -m gigamask WORDS` in a fork of this process; has what is used of `Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        assert command[: len(COMMAND)] == COMMAND
        assert stdout is stderr

        def run() -> None:
            if stdout is not None:
                for number in (1, 2):
                    os.dup2(stdout.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            try:
                code = main(command[len(COMMAND) :])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
            sys.exit(code)

        self.process = multiprocessing.get_context("fork").Process(target=run)
        self.process.start()
        self.pid = self.process.pid
        self.terminate, self.kill = self.process.terminate, self.process.kill

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("gigamask", timeout)
        return self.process.exitcode


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of `--submit local`; other tests start them as a user's command does."""

    def start(command: Sequence[str], **options: object) -> object:
        kind = Fork if command[: len(COMMAND)] == COMMAND else subprocess.Popen
        return kind(command, **options)

    own = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    if find_spec("gigamask.plugins.cluster"):
        local_jobs = import_module("gigamask.plugins.cluster.local_jobs")
        monkeypatch.setattr(local_jobs, "subprocess", own)


@pytest.fixture
def started(forked: None, monkeypatch: pytest.MonkeyPatch) -> list[Fork]:
    """The processes that `--submit local` has started; the first waits, and is killed."""
    local_jobs = import_module("gigamask.plugins.cluster.local_jobs")
    processes, lock, begin = list[Fork](), Lock(), local_jobs.subprocess.Popen

    def start(command: Sequence[str], **options: object) -> Fork:
        with lock, monkeypatch.context() as patched:
            if not processes:
                patched.setattr(f"{__name__}.main", lambda _: signal.pause())
            process = begin(command, **options)
            if not processes:
                process.kill()
            processes.append(process)
        return process

    monkeypatch.setattr(local_jobs.subprocess, "Popen", start)
    return processes
