"""The manifest of a checkpoint: its format, progress, and the size and crc32 of each file.

Imports no torch, so that listing checkpoints is fast.
"""

import json
import zlib
from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError
from gigamask.files import crc32

FORMAT = 2
MANIFEST, BEST = "manifest.json", "best"


def with_checksum(manifest: dict[str, Any]) -> bytes:
    """Serialize a manifest, with the crc32 of its content."""
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return json.dumps(
        content | {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}, indent=1
    ).encode()


def verify(folder: Path, contents: bool = True) -> dict:
    """Verify the files of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        contents: Whether to verify checksums, which reads every file, or only sizes.

    Returns:
        The manifest.

    Raises:
        GigamaskError: The manifest or a file is missing, damaged, or of another format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        is_known, files = (
            manifest["format"] == FORMAT,
            [(name, entry["bytes"], entry["crc32"]) for name, entry in manifest["files"].items()],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GigamaskError(f"{folder / MANIFEST}: not a readable manifest ({error})") from None
    if not is_known:
        raise GigamaskError(
            f"{folder}: checkpoint format must be {FORMAT} (got {manifest['format']}); "
            "use the version that wrote it"
        )
    if json.loads(with_checksum(manifest)) != manifest:
        raise GigamaskError(f"{folder / MANIFEST}: damaged, its crc32 does not match its content")
    for name, expected_bytes, expected_crc in files:
        try:
            actual_bytes = (folder / name).stat().st_size
            actual_crc = crc32(folder / name) if contents else expected_crc
        except OSError:
            raise GigamaskError(
                f"{folder / name}: listed in the manifest, but cannot be read"
            ) from None
        if (actual_bytes, actual_crc) != (expected_bytes, expected_crc):
            actual = f"{actual_bytes} bytes" + (f" with crc32 {actual_crc}" if contents else "")
            raise GigamaskError(
                f"{folder / name}: damaged, has {actual}; "
                f"the manifest says {expected_bytes} bytes with crc32 {expected_crc}"
            )
    return manifest


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step_[0-9]*"))
