"""Queries as items: an index and its queries enter, what samplers know of each leaves.

A column is worked out when it is first asked for, and then kept:

- tar (its number in the index); masks (the image's, all of them: the objects that a right one is told from)
- area_share: the mean over the right masks, 0 where nothing fits
- granularity: 0 fine, 1 medium, 2 coarse by that share (`data.items`); 3 where nothing fits, since what is not there has no size
- length (words), relations, complexity (0 simple, 1 compound, 2 relational), difficulty: `grounding.difficulty`
- domain: the number of the query's `domain` among the sorted ones; one without has the name of the folder that its tar lies in
- kind: the number of its `kind` among the sorted ones

Not here: reading queries (`data.queries`), orders of them (`samplers`).
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32, Int32, Int64

from gigamask.data import store
from gigamask.data.index import Index
from gigamask.data.items import granularity
from gigamask.data.queries import Query, locate
from gigamask.faults import Fault
from gigamask.grounding.difficulty import complexity, difficulty, relations, words
from gigamask.seams import Items

GRANULARITIES = ("fine", "medium", "coarse", "absent")


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The queries of an index: `items` has one item for each, `rows` holds the index row of its image.

    `kinds` and `domains` hold what the columns kind and domain number.
    """

    queries: tuple[Query, ...]
    rows: Int64[np.ndarray, "n"]
    items: Items
    kinds: tuple[str, ...]
    domains: tuple[str, ...]

    def locate(self, items: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Returns the items themselves, which are the queries' numbers, and -1 for each, as `samplers.batch_sampler` asks where items lie."""
        return items, np.full(len(items), -1)


def open_queries(index: Index, queries: Sequence[Query], seed: int = 0) -> Catalogue:
    """Returns the queries as items, in orders that `seed` names; raises Fault for a query that does not fit the index."""
    queries, rows = tuple(queries), locate(queries, index)
    folders = [posixpath.basename(posixpath.dirname(store.bare(path))) for path in index.shard_paths]
    shards = index.images["shard"][rows].tolist()
    domains = [query.domain or folders[shard] for query, shard in zip(queries, shards, strict=True)]
    kinds = [query.kind for query in queries]
    columns = _Columns(
        {
            "tar": lambda _: index.images["shard"][rows],
            "masks": lambda _: index.images["masks"][rows],
            "area_share": lambda _: _shares(index, queries, rows),
            "granularity": lambda made: np.where([bool(query.right) for query in queries], granularity(made["area_share"]), np.int32(3)),
            "length": lambda _: _counts([len(words(query.text)) for query in queries]),
            "relations": lambda _: _counts([relations(query.text) for query in queries]),
            "complexity": lambda _: _counts([complexity(query.text) for query in queries]),
            "domain": lambda _: _numbered(domains),
            "kind": lambda _: _numbered(kinds),
            "difficulty": lambda made: difficulty(made["area_share"], made["length"], made["masks"], made["relations"]),
        }
    )
    items = Items(len(queries), columns, seed, len(index.shard_paths))
    return Catalogue(queries, rows, items, tuple(sorted(set(kinds))), tuple(sorted(set(domains))))


@dataclass(frozen=True, eq=False)
class _Columns(Mapping[str, np.ndarray]):
    """The queries' columns by name; a name that is not there is the user's Fault."""

    makers: dict[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]]
    made: dict[str, np.ndarray] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)

    def __contains__(self, name: object) -> bool:
        return name in self.makers

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.makers:
            raise Fault(f"the queries have no column {name!r}; choose one of {', '.join(self.makers)}")
        if name not in self.made:
            self.made[name] = self.makers[name](self)
        return self.made[name]


def _shares(index: Index, queries: Sequence[Query], rows: Int64[np.ndarray, "n"]) -> Float32[np.ndarray, "n"]:
    """Returns the mean share of the image that each query's right masks cover, 0 where there are none."""
    counts = np.array([len(query.right) for query in queries], np.int64)
    owner = np.repeat(np.arange(len(queries)), counts)
    masks = index.images["first_mask"][rows][owner] + np.array([number for query in queries for number in query.right], np.int64)
    pixels = index.images["width"][rows].astype(np.int64) * index.images["height"][rows]
    sums = np.bincount(owner, index.masks["area"][masks], len(queries))
    return (sums / (np.maximum(counts, 1) * pixels)).astype(np.float32)


def _counts(values: list[int]) -> Int32[np.ndarray, "n"]:
    return np.array(values, np.int32)


def _numbered(texts: Sequence[str]) -> Int32[np.ndarray, "n"]:
    """Returns each text's place among the sorted ones."""
    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    return np.array([places[text] for text in texts], np.int32)
