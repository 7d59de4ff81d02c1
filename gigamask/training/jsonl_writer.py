"""The record of a training: events enter, each becomes a whole line of JSON at the end of a file, and a disk that is full stops nothing.

Not here: what is recorded (`train.watch`), reading it (`report.history`).
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT_BYTES = 2**24
"""Of lines that the disk does not take; beyond it the oldest go."""


class JsonlWriter:
    """A file of lines, open to be appended to. Lines that it does not take are said once, kept, and written before the next that it does."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._left = b""
        self._failing = False

    def end_line(self) -> None:
        """Ends the last line where a process that was killed left half of one."""
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._left = b"\n"

    def write(self, event: dict[str, Any]) -> None:
        """Appends one line."""
        self._left += f"{json.dumps(event)}\n".encode()
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) :]
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._say(
                    f"{self._path}: not written ({error.strerror}), which keeps its lines for later and stops nothing; make room on the disk"
                )
            self._failing = True
            if len(self._left) > KEPT_BYTES:
                self._left = self._left[-KEPT_BYTES:].partition(b"\n")[2]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
