"""The manifest of a checkpoint: its format, progress, and the size and crc32 of each file.

Imports no torch, so that listing checkpoints is fast.
"""

import errno
import os
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError
from gigamask.files import crc32
from gigamask.serialization import MAX_JSON_BYTES, check_checksum, decode_json

FORMAT = 2
MANIFEST, BEST = "manifest.json", "best"
MODEL = "model.safetensors"
BASE = "base.safetensors"
"""The weights that a training of adapters does not change, beside its checkpoints."""


DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""Errors of reading that the next attempt will not mend."""


class UnreadableCheckpointError(GigamaskError):
    """A checkpoint that cannot be read now; it need not be damaged."""

    def __init__(self, path: Path, error: OSError) -> None:
        act = "run the command again when it can be read"
        if isinstance(error, PermissionError):
            act = "ask its owner for read permission (chmod -R a+rX)"
        super().__init__(f"{path}: {(error.strerror or str(error)).lower()}; {act}")


def verify(folder: Path, contents: bool = True, names: Collection[str] | None = None) -> dict:
    """Verify the files of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        contents: Whether to verify checksums, which reads every file, or only sizes.
        names: Files to verify besides the manifest; None: all.

    Returns:
        The manifest.

    Raises:
        GigamaskError: The manifest or a file is missing, damaged, or of another format.
        UnreadableCheckpointError: A file may not be read.
    """
    manifest = _read(folder)
    entries = {folder / name: entry for name, entry in manifest["files"].items()}
    if manifest.get("base"):
        entries[folder.parent / BASE] = manifest["base"]
    for path, entry in entries.items():
        if names is not None and path.name not in (*names, BASE):
            continue
        try:
            if not path.is_file():
                raise FileNotFoundError
            actual_bytes = path.stat().st_size
            actual_crc = crc32(path) if contents else entry["crc32"]
        except OSError as error:
            if error.errno not in DAMAGE:
                raise UnreadableCheckpointError(path, error) from None
            raise GigamaskError(f"{path}: listed in the manifest, but cannot be read") from None
        if (actual_bytes, actual_crc) != (entry["bytes"], entry["crc32"]):
            actual = f"{actual_bytes} bytes" + (f" with crc32 {actual_crc}" if contents else "")
            raise GigamaskError(
                f"{path}: damaged, has {actual}; "
                f"the manifest says {entry['bytes']} bytes with crc32 {entry['crc32']}"
            )
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking its format and checksum."""
    path = folder / MANIFEST
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
            raise FileNotFoundError("not a file of its size")
        manifest = decode_json(path.read_bytes(), str(path))
        found = manifest["format"]
        valid = all(
            "/" not in name and isinstance(entry["bytes"], int) and isinstance(entry["crc32"], int)
            for name, entry in [
                *manifest["files"].items(),
                *([(BASE, manifest["base"])] if manifest.get("base") else []),
            ]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in DAMAGE:
            raise UnreadableCheckpointError(path, error) from None
        raise GigamaskError(f"{path}: not a readable manifest ({error})") from None
    if found != FORMAT:
        raise GigamaskError(
            f"{folder}: checkpoint format must be {FORMAT} (got {found}); "
            "use the version that wrote it"
        )
    progress = (manifest.get("step"), manifest.get("samples"))
    if not valid or not all(isinstance(count, int) for count in progress):
        raise GigamaskError(f"{path}: damaged, its entries are not those of a checkpoint")
    check_checksum(manifest, str(path))
    return manifest


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint by its name; None if the name is not exactly one of ours."""
    match = re.fullmatch(r"step_([0-9]{8,18})", path.name)
    step = int(match[1]) if match else -1
    return step if path.name == checkpoint_name(step) else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first.

    Copies that people made under other names, and files, are none.

    Raises:
        UnreadableCheckpointError: The folder may not be read.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        if error.errno not in DAMAGE:
            raise UnreadableCheckpointError(folder, error) from None
        return []
    steps = {folder / name: step_of(folder / name) for name in names}
    found = {
        path: step for path, step in steps.items() if step is not None and not os.path.isfile(path)
    }
    return sorted(found, key=found.__getitem__)


def newest(out: Path, damaged: list[Path] | None = None) -> Path | None:
    """Return the newest intact checkpoint of a run folder; None if it has no checkpoint.

    A damaged checkpoint causes a warning, and the previous one is used.

    Args:
        out: The run folder.
        damaged: Where the newer, damaged checkpoints are added.

    Raises:
        GigamaskError: All checkpoints are damaged, or one may not be read.
    """
    folders = list_checkpoints(out / "checkpoints")
    for folder in reversed(folders):
        try:
            verify(folder)
        except UnreadableCheckpointError:
            raise
        except GigamaskError as error:
            warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
            if damaged is not None:
                damaged.append(folder)
        else:
            return folder
    if folders:
        raise GigamaskError(
            f"{out}: all {len(folders)} checkpoints are damaged; train again with another --out"
        )
    return None


def verify_named(file: Path) -> None:
    """Verify a file's checksum if it is, or links to, a file of a checkpoint.

    Raises:
        GigamaskError: The file or the checkpoint's manifest is damaged.
    """
    real = Path(os.path.realpath(file))
    if re.match(r"step_[0-9]", real.parent.name) and (real.parent / MANIFEST).exists():
        verify(real.parent, names=(real.name,))
