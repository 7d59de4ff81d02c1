"""Queries: what is asked of an image in words, and which of its masks are the answer. JSONL enters, queries leave, with their rows of an index.

A line is an object with `image` (`sa_9.jpg` or `sa_9`), `query` (the words), and `mask_index` (the right mask's number among the annotations of the
image's json, from 0) or `mask_indices` (those of all right masks; none where nothing fits). It may have `tar` (as much of its path as tells it from
others), `kind` (a word of the owner's, scores are told by it) and `domain`; other keys are not read. Empty lines are passed over.

Not here: how hard a query is (`grounding.data`), made-up ones (`prepare.descriptions`).
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Int64

from gigamask.data import storage
from gigamask.data.index import Index, as_list
from gigamask.errors import GigamaskError

MAX_TEXT_LENGTH = 1000
"""Characters; text encoders read some hundred words at most."""


@dataclass(frozen=True)
class Query:
    """What is asked of an image, and the numbers of the right masks among its annotations, none where nothing fits. `tar` and `image` as written."""

    tar: str | None
    image: str
    text: str
    mask_indices: tuple[int, ...]
    kind: str = ""
    domain: str = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise GigamaskError("the query has no words; write what is asked for")
        if len(self.text) > MAX_TEXT_LENGTH:
            raise GigamaskError(
                f"the query has {len(self.text)} characters, at most {MAX_TEXT_LENGTH} are read; shorten it"
            )
        if not self.image or self.tar == "":
            raise GigamaskError(
                f"the query {self.text!r} has an empty {'tar' if self.image else 'image'}; name it{', or leave it out' if self.image else ''}"
            )
        if min(self.mask_indices, default=0) < 0:
            raise GigamaskError(
                f"the query {self.text!r} has the right mask {min(self.mask_indices)}, masks are numbered from 0 in their json's order; mend it"
            )
        if len(set(self.mask_indices)) < len(self.mask_indices):
            raise GigamaskError(
                f"the query {self.text!r} has a right mask twice among {', '.join(map(str, self.mask_indices))}; name each once"
            )

    @property
    def name(self) -> str:
        """Returns how errors call it: its words, and where it belongs."""
        return f"the query {self.text!r} of {f'{self.tar}:' if self.tar else ''}{self.image}"


class _Line(msgspec.Struct):
    """One line as it stands, its types checked and nothing else."""

    image: str
    query: str
    mask_index: int | None = None
    mask_indices: list[int] | None = None
    tar: str | None = None
    kind: str = ""
    domain: str = ""


_DECODER = msgspec.json.Decoder(_Line)


def read(paths: str | Path | Sequence[str | Path]) -> list[Query]:
    """Returns the queries of these files, in order; raises Fault for a file that holds none, and for a line that is none."""
    found: list[Query] = []
    for path in as_list(paths):
        before = len(found)
        try:
            with open(path, "rb") as file:
                found += [
                    _parse(line, f"{path}:{number}")
                    for number, line in enumerate(file, 1)
                    if line.strip()
                ]
        except OSError as error:
            raise GigamaskError(
                f"{path}: the queries cannot be read ({error.strerror}); give a JSONL file of queries"
            ) from error
        if len(found) == before:
            raise GigamaskError(f"{path}: holds no query; write one a line")
    return found


def _parse(raw: bytes, place: str) -> Query:
    try:
        line = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        act = (
            'write an object such as {"image": "sa_1.jpg", "query": "the red box", "mask_index": 0}'
        )
        raise GigamaskError(f"{place}: is no query ({error}); {act}") from error
    one, several = line.mask_index, line.mask_indices
    if (one is None) == (several is None):
        both = (
            "neither mask_index nor mask_indices"
            if one is None
            else "both mask_index and mask_indices"
        )
        raise GigamaskError(
            f"{place}: the query {line.query!r} has {both}, it needs one of them; write mask_indices [] where nothing fits"
        )
    right = tuple(several or ()) if one is None else (one,)
    try:
        return Query(line.tar, line.image, line.query, right, line.kind, line.domain)
    except GigamaskError as fault:
        raise GigamaskError(f"{place}: {fault}") from fault


def write(path: str | Path, queries: Iterable[Query]) -> None:
    """Writes the queries one a line, in a file that appears whole; `read` returns their equals."""
    lines = []
    for query in queries:
        right = (
            {"mask_index": query.mask_indices[0]}
            if len(query.mask_indices) == 1
            else {"mask_indices": query.mask_indices}
        )
        rest = {"kind": query.kind, "domain": query.domain}
        told = {
            "tar": query.tar,
            "image": query.image,
            "query": query.text,
            **right,
            **{key: word for key, word in rest.items() if word},
        }
        lines.append(
            json.dumps(
                {key: value for key, value in told.items() if value is not None}, ensure_ascii=False
            )
            + "\n"
        )
    storage.write(Path(path), "".join(lines).encode())


def locate(queries: Sequence[Query], index: Index) -> Int64[np.ndarray, "n"]:
    """Returns the index row of each query's image; raises Fault where it has none or several, or has fewer masks than the query names."""
    named = _rows_by_name({name for query in queries for name in _names(query)}, index)
    shards = {
        tar: index.find_shard_numbers(tar) for tar in {query.tar for query in queries} if tar is not None
    }
    found: dict[tuple[str | None, str], tuple[int, int]] = {}
    for query in queries:
        image = query.tar, query.image
        if image not in found:
            row = _only_row(
                query, np.concatenate([named[name] for name in _names(query)]), shards, index
            )
            found[image] = row, int(index.images["masks"][row])
        if query.mask_indices and max(query.mask_indices) >= found[image][1]:
            raise GigamaskError(
                f"{query.name}: its right mask is number {max(query.mask_indices)}, the image has {found[image][1]}, counted from 0; mend the number"
            )
    return np.array([found[query.tar, query.image][0] for query in queries], np.int64)


def _only_row(
    query: Query, held: Int64[np.ndarray, "k"], shards: dict[str, list[int]], index: Index
) -> int:
    """Returns, of the rows of images that are called like a query's, the one in its tar."""
    if query.tar is not None:
        if not len(shards[query.tar]):
            raise GigamaskError(
                f"{query.name}: no tar of the index {index.folder} ends in {query.tar!r}; index it too, or leave its queries out"
            )
        held = held[np.isin(index.images["shard"][held], shards[query.tar])]
    if not len(held):
        raise GigamaskError(
            f"{query.name}: the index {index.folder} holds no such image; index its tar too, or leave the query out"
        )
    if len(held) > 1:
        places = ", ".join(
            index.shard_paths[index.images["shard"][row]] for row in held[:3].tolist()
        )
        raise GigamaskError(
            f"{query.name}: {len(held)} images of the index are called so; give the tar with more of its path: {places}"
        )
    return int(held[0])


def _names(query: Query) -> list[bytes]:
    """Returns what the index may call the query's image: its stem, or in a folder of images the whole name."""
    stem, extension = os.path.splitext(query.image)
    return list(
        map(
            os.fsencode,
            [query.image, stem] if extension.lower() in (".jpg", ".jpeg") else [query.image],
        )
    )


def _rows_by_name(names: set[bytes], index: Index) -> dict[bytes, Int64[np.ndarray, "_"]]:
    """Returns the rows of all images that are called so, by name, going through the index's names once."""
    wanted = np.array(sorted(names), "S")
    if not len(wanted):
        return {}
    held = index.images["name"]
    places = np.minimum(np.searchsorted(wanted, held), len(wanted) - 1)
    rows = np.flatnonzero(wanted[places] == held)
    rows = rows[np.argsort(places[rows], kind="stable")]
    borders = np.searchsorted(places[rows], np.arange(len(wanted) + 1))
    return {
        name: rows[borders[place] : borders[place + 1]]
        for place, name in enumerate(wanted.tolist())
    }
