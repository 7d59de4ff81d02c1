"""Queries: texts that refer to masks of an image, read from JSONL and located in an index.

A line is an object with `image` (`sa_9.jpg` or `sa_9`), `query` (the text), and either `mask_index`
(index of the target mask among the annotations of the image's json) or `mask_indices` (all target
masks; empty if no mask matches the text). Optional keys are `tar` (the tar's name, with as much of
its path as makes it unique), `kind` (any label; scores are reported for each kind) and `domain`;
other keys are ignored, and so are empty lines.
"""

import codecs
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Int64

from gigamask import files
from gigamask.data import image_folder
from gigamask.data.index import Index
from gigamask.data.storage import path_list
from gigamask.errors import GigamaskError
from gigamask.serialization import JSON_ERRORS, check_regular

MAX_TEXT_LENGTH = 1000
"""Most characters of a text, in queries, `ask` and the page."""


def check_length(text: str) -> None:
    """Raise `GigamaskError` if a text is longer than is read anywhere."""
    if len(text) > MAX_TEXT_LENGTH:
        raise GigamaskError(
            f"the text has {len(text):,} characters, but at most {MAX_TEXT_LENGTH:,} are read; "
            "shorten it"
        )


@dataclass(frozen=True)
class Query:
    """A text about an image, and its target masks; `tar` and `image` are as in the file.

    `mask_indices` are the positions of the target masks among the image's annotations, empty if no
    mask matches.
    """

    tar: str | None
    image: str
    text: str
    mask_indices: tuple[int, ...]
    kind: str = ""
    domain: str = ""

    def __post_init__(self) -> None:
        query = f"the query {self.text!r}"
        if not self.text.strip():
            raise GigamaskError("the query is empty; write the text")
        check_length(self.text)
        if not self.image:
            raise GigamaskError(f"{query} has an empty image; name the image")
        if self.tar == "":
            raise GigamaskError(f"{query} has an empty tar; name it, or leave the key out")
        if min(self.mask_indices, default=0) < 0:
            raise GigamaskError(
                f"{query} has the mask index {min(self.mask_indices)}, which must be >= 0: "
                "masks are numbered from 0 in the order of their json"
            )
        if len(set(self.mask_indices)) < len(self.mask_indices):
            raise GigamaskError(
                f"{query} has a duplicate among the mask indices "
                f"{', '.join(map(str, self.mask_indices))}; remove it"
            )

    @property
    def name(self) -> str:
        """The query's text and image, for error messages."""
        return f"the query {self.text!r} of {f'{self.tar}:' if self.tar else ''}{self.image}"


class _Line(msgspec.Struct):
    """One decoded line; only the types are checked."""

    image: str
    query: str
    mask_index: int | None = None
    mask_indices: list[int] | None = None
    tar: str | None = None
    kind: str = ""
    domain: str = ""


_DECODER = msgspec.json.Decoder(_Line)


def read(paths: str | Path | Sequence[str | Path]) -> list[Query]:
    """Read the queries of JSONL files, in order.

    Raises:
        GigamaskError: A file cannot be read or has no query, or a line is not a query.
    """
    queries: list[Query] = []
    for path in path_list(paths):
        count = len(queries)
        check_regular(path)
        try:
            with open(path, "rb") as file:
                queries += [
                    _parse(line.removeprefix(codecs.BOM_UTF8), f"{path}:{number}")
                    for number, line in enumerate(file, 1)
                    if line.strip()
                ]
        except OSError as error:
            raise GigamaskError(
                f"{path}: the queries cannot be read ({error.strerror}); give a JSONL file"
            ) from error
        if len(queries) == count:
            raise GigamaskError(f"{path}: has no query; write one per line")
    return queries


def _parse(raw: bytes, where: str) -> Query:
    try:
        line = _DECODER.decode(raw)
    except JSON_ERRORS as error:
        raise GigamaskError(
            f"{where}: is not a query ({error}); write an object such as "
            '{"image": "sa_1.jpg", "query": "the red box", "mask_index": 0}'
        ) from error
    index, indices = line.mask_index, line.mask_indices
    if (index is None) == (indices is None):
        keys = (
            "neither mask_index nor mask_indices"
            if index is None
            else "both mask_index and mask_indices"
        )
        raise GigamaskError(
            f"{where}: the query {line.query!r} has {keys}, but needs one of them; "
            "write mask_indices [] if no mask matches"
        )
    targets = tuple(indices or ()) if index is None else (index,)
    try:
        return Query(line.tar, line.image, line.query, targets, line.kind, line.domain)
    except GigamaskError as error:
        raise GigamaskError(f"{where}: {error}") from error


def write(path: str | Path, queries: Iterable[Query]) -> None:
    """Write queries to a JSONL file atomically, in the format of `read`.

    Args:
        path: The file.
        queries: The queries.
    """
    lines = []
    for query in queries:
        targets = (
            {"mask_index": query.mask_indices[0]}
            if len(query.mask_indices) == 1
            else {"mask_indices": query.mask_indices}
        )
        labels = {"kind": query.kind, "domain": query.domain}
        line = {
            **({} if query.tar is None else {"tar": query.tar}),
            "image": query.image,
            "query": query.text,
            **targets,
            **{key: label for key, label in labels.items() if label},
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    files.write_text(path, "".join(lines))


def locate(queries: Sequence[Query], index: Index) -> Int64[np.ndarray, "n"]:
    """Find the images of queries in an index.

    Args:
        queries: The queries.
        index: The index.

    Returns:
        The row of each query's image.

    Raises:
        GigamaskError: A query matches no image or several, or its image lacks a target mask.
    """
    rows_by_name = _rows_by_name({name for query in queries for name in _names(query)}, index)
    shards = {
        tar: index.find_shard_numbers(tar)
        for tar in {query.tar for query in queries}
        if tar is not None
    }
    images: dict[tuple[str | None, str], tuple[int, int]] = {}
    for query in queries:
        key = query.tar, query.image
        if key not in images:
            rows = np.concatenate([rows_by_name[name] for name in _names(query)])
            row = _single_row(query, rows, shards, index)
            images[key] = row, int(index.images["masks"][row])
        masks = images[key][1]
        if query.mask_indices and max(query.mask_indices) >= masks:
            raise GigamaskError(
                f"{query.name}: mask index {max(query.mask_indices)} must be less than {masks}, "
                "the number of masks of the image; correct it, or give the tars of its queries"
            )
    return np.array([images[query.tar, query.image][0] for query in queries], np.int64)


def _single_row(
    query: Query, rows: Int64[np.ndarray, "k"], shards: dict[str, list[int]], index: Index
) -> int:
    """Return the query's row: the only one of `rows`, those of all images with its image's name.

    If the query names a tar, rows of other tars do not count.
    """
    if query.tar is not None:
        if not len(shards[query.tar]):
            raise GigamaskError(
                f"{query.name}: no tar of the index {index.folder} ends in {query.tar!r}; "
                "index it too, or leave its queries out"
            )
        rows = rows[np.isin(index.images["shard"][rows], shards[query.tar])]
    if not len(rows):
        raise GigamaskError(
            f"{query.name}: the index {index.folder} has no such image; "
            "index its tar too, or leave the query out"
        )
    if len(rows) > 1:
        tars = ", ".join(index.shard_paths[index.images["shard"][row]] for row in rows[:3].tolist())
        raise GigamaskError(
            f"{query.name}: {len(rows)} images of the index have this name; "
            f"give the tar with more of its path: {tars}"
        )
    return int(rows[0])


def _names(query: Query) -> list[bytes]:
    """Return the possible names of the query's image: the full name and, for a jpg, the stem."""
    stem, extension = os.path.splitext(query.image)
    is_jpg = extension.lower() in image_folder.JPEG
    return list(map(os.fsencode, [query.image, stem] if is_jpg else [query.image]))


def _rows_by_name(names: set[bytes], index: Index) -> dict[bytes, Int64[np.ndarray, "_"]]:
    """Return the rows of all images of each name, in one pass over the index."""
    wanted = np.array(sorted(names), "S")
    if not len(wanted):
        return {}
    stored = index.images["name"]
    positions = np.minimum(np.searchsorted(wanted, stored), len(wanted) - 1)
    rows = np.flatnonzero(wanted[positions] == stored)
    rows = rows[np.argsort(positions[rows], kind="stable")]
    bounds = np.searchsorted(positions[rows], np.arange(len(wanted) + 1))
    return {
        name: rows[bounds[number] : bounds[number + 1]]
        for number, name in enumerate(wanted.tolist())
    }
