"""Pictures in responses. Their addresses state what they show, so that browsers may keep them.

A page asks for `.../jpeg?shows=VERSION` with the version that a listing stated. A browser may keep
the answer if it is of that version; it keeps nothing else, since rows and ports are used again for
other pictures.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from gigamask import __version__
from gigamask.plugins.serve.photographs import stamp_of

KEPT = "private, max-age=3600"
"""Whatever has no such header gets `no-store` (`security`)."""

Shows = Annotated[str, Query(max_length=64)]
"""The version that a page asks for."""


def version_of(*facts: object) -> str:
    """Return a short version that differs whenever one of the facts does."""
    text = repr((__version__, *facts)).encode("utf-8", "surrogateescape")
    return blake2b(text, digest_size=12).hexdigest()


def file_version(path: Path | str, *facts: object) -> str:
    """Return the version of what a file shows; "" if there is no such file.

    Args:
        path: The file: its absolute path, size, and times of modification and change count.
        *facts: What else the picture depends on, such as the window of its pixels.
    """
    stamp = stamp_of(path)
    return "" if stamp is None else version_of(os.path.abspath(path), stamp, *facts)


def picture_response(
    raw: bytes, version: str, asked: str, media_type: str = "image/jpeg"
) -> Response:
    """Return a response with a picture, which a browser may keep if it is what was asked for.

    Args:
        raw: The bytes of the picture.
        version: Its version.
        asked: The version in the address of the request.
        media_type: Its media type.
    """
    headers = {"cache-control": KEPT} if version and version == asked else None
    return Response(raw, media_type=media_type, headers=headers)
