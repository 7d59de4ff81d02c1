"""Which checkpoints of a run are kept: the newest, the best, and the one it was resumed from.

If a run was resumed with another evaluation, the best by each of them is kept.
Only what has exactly the name of a checkpoint, and holds nothing but its files, is ever removed.
Damaged checkpoints do not count; they are renamed, not removed.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gigamask.errors import GigamaskError
from gigamask.files import UNSUPPORTED, flush
from gigamask.models import manifest
from gigamask.models.manifest import (
    BEST,
    MANIFEST,
    UnreadableCheckpointError,
    list_checkpoints,
    step_of,
)

PART, REPLACED = ".part", ".replaced"
"""Ends of the hidden names of a checkpoint that is being written or removed, and of one that a
new checkpoint of the same step is about to replace."""


@dataclass(eq=False)
class Retention:
    """Removes checkpoints that are no longer needed.

    Attributes:
        keep: Number of newest checkpoints to keep besides the best.
        resumed: The checkpoint that the training was resumed from, which is kept, too.
        verified: State of the files of each checkpoint when its checksums were last verified.
    """

    keep: int
    resumed: Path | None = None
    verified: dict[Path, tuple] = field(default_factory=dict)

    def prune(self, folder: Path, written: Path) -> None:
        """Update the link `best`, and remove the checkpoints that need not be kept.

        One that cannot be read at the moment is left as it is.

        Args:
            folder: Folder of the checkpoints.
            written: The checkpoint written last, which is kept, too.
        """
        kept, others, best = [written, self.resumed], [], None
        newest = 0
        for path in reversed(list_checkpoints(folder)):
            if newest == self.keep:
                others.append(path)
            else:
                newest += self.is_whole(path)
        for scored in by_score(folder):
            for path in scored:
                kept.append(path)
                if self.is_whole(path):
                    best = best or path
                    break
        _link(folder / BEST, best)
        for path in others:
            changed = path in self.verified  # read again only what was read before, if it changed
            if path not in kept and self.is_whole(path, changed) and is_only_ours(path):
                remove(path)

    def verify(self, path: Path, contents: bool = True, known_as: Path | None = None) -> None:
        """Verify a checkpoint, but not again if its files have not changed since.

        Args:
            path: The checkpoint.
            contents: Whether to verify checksums, or only sizes.
            known_as: Its name later; None means that it keeps its name.

        Raises:
            GigamaskError: It is damaged.
        """
        state = state_of_files(path)
        if self.verified.get(path) != state:
            manifest.verify(path, contents)
            if contents:
                self.verified[known_as or path] = state

    def is_whole(self, path: Path, contents: bool = True) -> bool:
        """Return whether a checkpoint is intact; a damaged one is set aside.

        Args:
            path: The checkpoint.
            contents: Whether to verify checksums, or only sizes.
        """
        try:
            self.verify(path, contents)
        except (UnreadableCheckpointError, OSError):
            return False
        except GigamaskError as error:
            warnings.warn(f"{error}; renamed to {set_aside(path, 'damaged').name}", stacklevel=2)
            return False
        return True


def state_of_files(path: Path) -> tuple:
    """Return what changes when a file in a folder is changed."""
    stats = ((file.name, file.stat()) for file in sorted(path.iterdir()))
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats)


def is_only_ours(path: Path) -> bool:
    """Return whether a checkpoint is a folder, not a link, with no file but its own in it."""
    try:
        own = {MANIFEST, *json.loads((path / MANIFEST).read_bytes())["files"]}
        visible = {name for name in os.listdir(path) if not name.startswith(".")}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not path.is_symlink() and visible <= own


def set_aside(path: Path, reason: str) -> Path:
    """Rename a damaged checkpoint, or what is in the way of one, and return the new path.

    Args:
        path: What to rename.
        reason: End of the new name.
    """
    count, target = 1, path.with_name(f"{path.name}.{reason}")
    while os.path.lexists(target):
        count += 1
        target = path.with_name(f"{path.name}.{reason}-{count}")
    path.rename(target)
    flush(path.parent)
    return target


def remove(path: Path) -> None:
    """Remove a checkpoint, under a hidden name, so that half of one is never taken for it."""
    hidden = path.with_name(f".{path.name}{PART}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what is left is removed by the next save


def replace(part: Path, final: Path) -> None:
    """Give a written checkpoint its name; an earlier one of the same step is removed afterwards.

    Args:
        part: The written checkpoint.
        final: Its name.
    """
    earlier = final.with_name(f".{final.name}{REPLACED}")
    if os.path.lexists(final):
        if is_only_ours(final):
            final.rename(earlier)
        else:
            set_aside(final, "old")
    part.rename(final)
    flush(final.parent)
    if earlier.exists():
        shutil.rmtree(earlier, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what an interrupted save or removal has left, and restore what it had not replaced.

    Args:
        folder: Folder of the checkpoints.
    """
    for path in _hidden(folder, REPLACED):
        final = path.with_name(path.name.removesuffix(REPLACED)[1:])
        if not os.path.lexists(final):
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in _hidden(folder, PART):
        shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the folders that have the hidden name of a checkpoint."""
    for path in list(folder.glob(f".step_*{suffix}")):
        name = path.with_name(path.name.removesuffix(suffix)[1:])
        if step_of(name) is not None and path.is_dir() and not path.is_symlink():
            yield path


def by_score(folder: Path) -> list[list[Path]]:
    """Return the checkpoints with a score, by what was evaluated: what has the newest score first.

    Of each, the best is the first; of equal ones, the newest.
    """
    scored: dict[str, list[tuple[float, int, Path]]] = {}
    for age, path in enumerate(reversed(list_checkpoints(folder))):
        if found := _score(path):
            scored.setdefault(found[1], []).append((-found[0], age, path))
    return [[path for *_, path in sorted(each)] for each in scored.values()]


def _score(folder: Path) -> tuple[float, str] | None:
    """Return a checkpoint's score and what was evaluated; None if it has no valid score."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        score, by = content["score"], str(content["scored_by"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (score, by) if isinstance(score, float | int) and not math.isnan(score) else None


def _link(path: Path, target: Path | None) -> None:
    """Replace a symbolic link atomically, or remove it if there is no target.

    A folder or file of that name, such as a copy of the checkpoint, is left as it is.
    """
    if path.exists() and not path.is_symlink():
        if target:
            warnings.warn(f"{path}: is not a link, so it stays as it is; rename it", stacklevel=2)
        return
    if target is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.link")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target.name)
    except OSError as error:  # Windows allows it only to developers and administrators
        if os.name != "nt" and error.errno not in UNSUPPORTED:
            raise
        return
    temporary.replace(path)
