"""Grounding queries: their attributes for samplers, and batches with candidate masks."""

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gigamask.data import storage
from gigamask.data.index import Index
from gigamask.data.sample_table import LazyColumns, granularity
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError
from gigamask.interfaces import SampleTable
from gigamask.plugins.grounding.mask_features import MaskFeatureExtractor
from gigamask.plugins.grounding.queries import Query, locate
from gigamask.plugins.grounding.text_features import TextFeatures
from gigamask.plugins.grounding.vocabulary import STOP_WORDS, words
from gigamask.records import DataCursor, SampleRef, SkippedSample, StepPlan
from gigamask.rng import make_rng
from gigamask.samplers.batch_sampler import whole_images

AREA_WEIGHT, LENGTH_WEIGHT, OBJECTS_WEIGHT, RELATIONS_WEIGHT = 0.3, 0.2, 0.3, 0.2
"""Weights of the difficulty ("Curriculum for Spatial Grounding", `compute_grounding_difficulty`).
"""
MAX_WORDS, MAX_OBJECTS, MAX_RELATIONS = 50, 20, 5
"""Counts at which each part of the difficulty saturates."""

GRANULARITIES = ("fine", "medium", "coarse", "absent")
COMPLEXITIES = ("simple", "compound", "relational")

RELATIONS = (
    *("above", "against", "along", "alongside", "among", "around", "behind", "below", "beneath"),
    *("beside", "between", "beyond", "far from", "in front of", "inside", "near", "nearest"),
    *("closest", "close to", "next to", "off", "on", "on top of", "opposite", "outside", "over"),
    *("left of", "to the left of", "on the left of", "right of", "to the right of"),
    *("on the right of", "under", "underneath", "within", "on the left", "on the right"),
    *("to the left", "to the right", "at the left", "at the right", "at the bottom", "at the top"),
    *("at the back", "at the front", "in the back", "in the background", "in the centre"),
    *("in the center", "in the corner", "in the foreground", "in the front", "in the middle"),
    *("on the bottom", "on the top", "leftmost", "rightmost", "topmost", "bottommost"),
)
"""Words and phrases of spatial relations."""

_RELATION = re.compile(rf"\b(?:{'|'.join(sorted(RELATIONS, key=len, reverse=True))})\b")
_CONJUNCTIONS = frozenset(
    ["and", "but", "except", "not", "or", "that", "which", "who", "whose", "with", "without"]
)


def count_relations(text: str) -> int:
    """Count the spatial relations in a text: non-overlapping phrases of `RELATIONS`."""
    return len(_RELATION.findall(" ".join(words(text))))


def complexity(text: str) -> int:
    """Return the index of a text's complexity in `COMPLEXITIES`.

    A relational text has a spatial relation. A compound text has at least three words that are not
    stop words ("the red striped disc"), or a conjunction ("dogs and cats"). All others are simple.
    """
    if count_relations(text):
        return 2
    tokens = words(text)
    content = [word for word in tokens if word not in STOP_WORDS]
    return int(len(content) > 2 or not _CONJUNCTIONS.isdisjoint(tokens))


def difficulty(
    area_fraction: Float[np.ndarray, "n"],
    length: Int[np.ndarray, "n"],
    objects: Int[np.ndarray, "n"],
    relations: Int[np.ndarray, "n"],
) -> Float32[np.ndarray, "n"]:
    """Compute the difficulty of queries.

    Args:
        area_fraction: Mean fraction of the image that the target masks cover, 0 without targets.
        length: Number of words in the text.
        objects: Number of masks of the image.
        relations: Number of spatial relations in the text.

    Returns:
        Difficulties in [0, 1].
    """
    total = AREA_WEIGHT * (1 - area_fraction.astype(np.float64))
    total += LENGTH_WEIGHT * np.minimum(1, length / MAX_WORDS)
    total += OBJECTS_WEIGHT * np.minimum(1, objects / MAX_OBJECTS)
    total += RELATIONS_WEIGHT * np.minimum(1, relations / MAX_RELATIONS)
    return total.astype(np.float32)


@dataclass(frozen=True, eq=False)
class QueryDataset:
    """Queries about indexed images.

    Attributes:
        queries: The queries.
        rows: Row of each query's image in the index.
        items: Table of the queries for samplers; columns as in `open_queries`.
        kinds: Names that the column `kind` indexes.
        domains: Names that the column `domain` indexes.
    """

    queries: tuple[Query, ...]
    rows: Int64[np.ndarray, "n"]
    items: SampleTable
    kinds: tuple[str, ...]
    domains: tuple[str, ...]

    locate = staticmethod(whole_images)
    """Returns the number of each item's query, and -1 in place of a mask number."""


def open_queries(index: Index, queries: Sequence[Query], seed: int = 0) -> QueryDataset:
    """Make a dataset of queries, whose columns are computed on first use.

    Columns: `tar`, its number in the index; `masks`, number of masks of the image; `area_fraction`,
    mean share of the image that target masks cover; `granularity`, an index of `GRANULARITIES`;
    `length` in words; `relations`, their number; `complexity`, an index of `COMPLEXITIES`;
    `domain`, by default the name of the tar's folder; `kind`; `difficulty`.

    Args:
        index: Index of the images.
        queries: Queries about them.
        seed: Seed of the samplers' orders.

    Returns:
        The dataset.

    Raises:
        GigamaskError: An image is not in the index, or has fewer masks than a query names.
    """
    queries, rows = tuple(queries), locate(queries, index)
    folders = [
        posixpath.basename(posixpath.dirname(storage.strip_query(path)))
        for path in index.shard_paths
    ]
    shards = index.images["shard"][rows].tolist()
    domains = [query.domain or folders[shard] for query, shard in zip(queries, shards, strict=True)]
    kinds = [query.kind for query in queries]
    has_target = np.array([bool(query.mask_indices) for query in queries], bool)

    def text_column(function: Callable[[str], int]) -> Int[np.ndarray, "n"]:
        return np.array([function(query.text) for query in queries], np.int32)

    functions: dict[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]] = {
        "tar": lambda _: index.images["shard"][rows],
        "masks": lambda _: index.images["masks"][rows],
        "area_fraction": lambda _: _target_area_fractions(index, queries, rows),
        "granularity": lambda known: np.where(
            has_target,
            granularity(known["area_fraction"]),
            np.int32(GRANULARITIES.index("absent")),
        ),
        "length": lambda _: text_column(lambda text: len(words(text))),
        "relations": lambda _: text_column(count_relations),
        "complexity": lambda _: text_column(complexity),
        "domain": lambda _: _sorted_ids(domains),
        "kind": lambda _: _sorted_ids(kinds),
        "difficulty": lambda known: difficulty(
            known["area_fraction"], known["length"], known["masks"], known["relations"]
        ),
    }
    columns = _Columns(tuple(functions), functions)
    items = SampleTable(len(queries), columns, seed, len(index.shard_paths))
    return QueryDataset(
        queries, rows, items, tuple(sorted(set(kinds))), tuple(sorted(set(domains)))
    )


@dataclass(frozen=True, eq=False)
class _Columns(LazyColumns):
    """Columns of queries, each computed from the others."""

    functions: dict[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]]

    def compute(self, name: str) -> None:
        """Compute a column."""
        self.computed[name] = self.functions[name](self)


def _target_area_fractions(
    index: Index, queries: Sequence[Query], rows: Int64[np.ndarray, "n"]
) -> Float32[np.ndarray, "n"]:
    """Return the mean share of the image that each query's targets cover, 0 without targets."""
    counts = np.array([len(query.mask_indices) for query in queries], np.int64)
    query_of_target = np.repeat(np.arange(len(queries)), counts)
    numbers = np.array([number for query in queries for number in query.mask_indices], np.int64)
    masks = index.images["first_mask"][rows][query_of_target] + numbers
    pixels = index.images["width"][rows].astype(np.int64) * index.images["height"][rows]
    area = np.bincount(query_of_target, index.masks["area"][masks], len(queries))
    return (area / (np.maximum(counts, 1) * pixels)).astype(np.float32)


def _sorted_ids(names: Sequence[str]) -> Int[np.ndarray, "n"]:
    """Return the position of each name among the sorted distinct names."""
    positions = {name: position for position, name in enumerate(sorted(set(names)))}
    return np.array([positions[name] for name in names], np.int32)


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Queries of a micro-batch with their candidate masks.

    B is the number of samples, Q of queries with a loss (B unless mining dropped some), and M the
    largest number of candidates of a query.

    Attributes:
        text_features: Features of the texts, None if the text model is trained.
        features: Features of the candidates.
        mask_valid: Which candidates are not padding.
        is_target: Which candidates are targets.
    """

    names: tuple[str, ...]
    batch_index: Int64[Tensor, "B"]
    weights: Float[Tensor, "B"]
    mask_image: Int64[Tensor, "Q"]
    strata: Int64[Tensor, "Q"]
    texts: tuple[str, ...]
    text_features: TextFeatures | None
    features: Float[Tensor, "Q M F"]
    mask_valid: Bool[Tensor, "Q M"]
    is_target: Bool[Tensor, "Q M"]
    cursor: DataCursor
    skipped: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> "QueryBatch":
        """Move every tensor to `device`."""
        text = self.text_features
        tensors = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors, text_features=text and text.to(device))

    def select(self, indices: Int64[Tensor, "K"]) -> "QueryBatch":
        """Return the batch with only the queries at `indices`, in ascending order."""
        text = self.text_features
        return replace(
            self,
            mask_image=self.mask_image[indices],
            strata=self.strata[indices],
            texts=tuple(self.texts[number] for number in indices.tolist()),
            text_features=text
            and TextFeatures(text.features[indices], text.attention_mask[indices]),
            features=self.features[indices],
            mask_valid=self.mask_valid[indices],
            is_target=self.is_target[indices],
        )


@dataclass(frozen=True, eq=False)
class QueryLoader:
    """Makes batches of queries.

    Attributes:
        dataset: The queries.
        index: Index of the images.
        mask_features: Features of masks.
        text_features: Features of texts, None if the text model is trained.
        max_masks: Maximum number of candidates per query.
        seed: Seed for the choice of candidates.
    """

    dataset: QueryDataset
    index: Index
    mask_features: MaskFeatureExtractor
    text_features: Callable[[Sequence[str]], TextFeatures] | None
    max_masks: int
    seed: int

    def batches(self, plans: Iterable[StepPlan]) -> Iterator[tuple[QueryBatch, ...]]:
        """Yield the micro-batches of each step."""
        with closing(ShardReader(self.index.shard_paths)) as shards:
            for plan in plans:
                cursor = DataCursor(plan.samples_after)
                yield tuple(self.batch(refs, shards, cursor) for refs in plan.micro_batches)

    def close(self) -> None:
        """Do nothing: there are no worker processes."""

    def batch(
        self, sample_refs: Sequence[SampleRef], shards: ShardReader, cursor: DataCursor
    ) -> QueryBatch:
        """Make a micro-batch.

        Args:
            sample_refs: Sampled queries.
            shards: Tars of the index.
            cursor: State of the training after this batch.

        Returns:
            The batch; queries whose image cannot be read are left out and listed as `skipped`.
        """
        rows = [int(self.dataset.rows[ref.row]) for ref in sample_refs]
        outcomes = self.mask_features.extract_rows(self.index, shards, rows)
        kept, names, features, is_target, skipped = [], [], [], [], []
        for ref, row, outcome in zip(sample_refs, rows, outcomes, strict=True):
            image = self.index.entry_name(row)
            if isinstance(outcome, CorruptSampleError):
                skipped.append(SkippedSample(image, str(outcome)))
                continue
            query, candidates = (
                self.dataset.queries[ref.row],
                self._candidates(ref, len(outcome)),
            )
            kept.append(ref)
            names.append(f"{image}: {query.text}")
            features.append(outcome[candidates])
            is_target.append(torch.from_numpy(np.isin(candidates, query.mask_indices)))
        texts = tuple(self.dataset.queries[ref.row].text for ref in kept)
        granularities = self.dataset.items.columns["granularity"]
        strata = [ref.stratum if ref.stratum >= 0 else int(granularities[ref.row]) for ref in kept]
        return QueryBatch(
            names=tuple(names),
            batch_index=torch.tensor([ref.batch_index for ref in kept], dtype=torch.int64),
            weights=torch.tensor([ref.weight for ref in kept], dtype=torch.float32),
            mask_image=torch.arange(len(kept)),
            strata=torch.tensor(strata, dtype=torch.int64),
            texts=texts,
            text_features=self.text_features(texts) if self.text_features else None,
            features=pad(features, torch.zeros(0, 0, self.mask_features.width)),
            mask_valid=pad(
                [torch.ones_like(row) for row in is_target], torch.zeros(0, 0, dtype=torch.bool)
            ),
            is_target=pad(is_target, torch.zeros(0, 0, dtype=torch.bool)),
            cursor=cursor,
            skipped=tuple(skipped),
        )

    def _candidates(self, ref: SampleRef, masks: int) -> Int64[np.ndarray, "m"]:
        """Return the numbers of a query's candidate masks, ascending.

        If the image has more than `max_masks` masks, targets are kept first and others are drawn.
        """
        if masks <= self.max_masks:
            return np.arange(masks)
        targets = np.array(self.dataset.queries[ref.row].mask_indices, np.int64)
        generator = make_rng(self.seed, "candidates", ref.epoch, ref.position)
        positive = generator.permutation(targets)[: self.max_masks]
        negative = generator.permutation(np.setdiff1d(np.arange(masks), targets))
        return np.sort(np.concatenate([positive, negative])[: self.max_masks])


def pad(rows: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Stack tensors of different lengths, padded with zeros at the end.

    Args:
        rows: Tensors that differ in their first dimension only.
        empty: Returned if there are none.
    """
    return pad_sequence(list(rows), batch_first=True) if rows else empty
