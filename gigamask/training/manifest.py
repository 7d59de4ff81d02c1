"""What a checkpoint says of itself: its manifest, with the size and crc32 of each of its files, and whether they hold.

Imports no torch, so that what only looks at checkpoints answers at once.

Not here: writing and loading one (`train.checkpoint`).
"""

import json
import zlib
from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError

FORMAT = 2
MANIFEST, BEST = "manifest.json", "best"


def with_checksum(manifest: dict[str, Any]) -> bytes:
    """Returns a manifest as it stands in its file, behind it the crc32 of what it says."""
    told = {name: value for name, value in manifest.items() if name != "crc32"}
    return json.dumps(
        told | {"crc32": zlib.crc32(json.dumps(told, sort_keys=True).encode())}, indent=1
    ).encode()


def verify(folder: Path, contents: bool = True) -> dict:
    """Returns a checkpoint's manifest once every file has the size and crc32 it states; raises `GigamaskError` naming the first that has not.

    Without `contents` files have their size alone, for which none has to be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        known, files = (
            manifest["format"] == FORMAT,
            [(name, entry["bytes"], entry["crc32"]) for name, entry in manifest["files"].items()],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GigamaskError(f"{folder / MANIFEST}: not readable as a manifest ({error})") from None
    if not known:
        raise GigamaskError(
            f"{folder}: checkpoint format {manifest['format']}, this version reads {FORMAT}; use the version that wrote it"
        )
    if json.loads(with_checksum(manifest)) != manifest:
        raise GigamaskError(f"{folder / MANIFEST}: its crc32 is not that of what it says")
    for name, wanted_bytes, wanted_crc in files:
        try:
            found_bytes = (folder / name).stat().st_size
            found_crc = checksum(folder / name) if contents else wanted_crc
        except OSError:
            raise GigamaskError(
                f"{folder / name}: the manifest lists it, but it cannot be read"
            ) from None
        if (found_bytes, found_crc) != (wanted_bytes, wanted_crc):
            found = f"{found_bytes} bytes" + (f" with crc32 {found_crc}" if contents else "")
            raise GigamaskError(
                f"{folder / name}: {found}, the manifest says {wanted_bytes} and {wanted_crc}"
            )
    return manifest


def checksum(path: Path) -> int:
    """Returns the crc32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            crc = zlib.crc32(chunk, crc)
    return crc


def complete(folder: Path) -> list[Path]:
    """Returns the finished checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step_[0-9]*"))
