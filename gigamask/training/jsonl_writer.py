"""A file of JSON lines that survives a full disk."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_PENDING_BYTES = 2**24
"""Size of the lines kept for later while the disk is full; beyond it the oldest are dropped."""


class JsonlWriter:
    """Appends JSON lines to a file; lines that cannot be written are kept and written later.

    Args:
        path: the file.
        warn: called with a message when writing starts to fail.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._pending = b""
        self._failing = False

    def end_line(self) -> None:
        """End the last line if a killed process left it incomplete."""
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._pending = b"\n"

    def write(self, event: dict[str, Any]) -> None:
        """Append one line."""
        self._pending += f"{json.dumps(event)}\n".encode()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._warn(
                    f"{self._path}: cannot be written ({error.strerror}); its lines are kept for "
                    "later and work continues; free some disk space"
                )
            self._failing = True
            if len(self._pending) > MAX_PENDING_BYTES:
                self._pending = self._pending[-MAX_PENDING_BYTES:].partition(b"\n")[2]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
