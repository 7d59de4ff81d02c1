"""Queries with the masks to choose from, as a step takes them: visits of queries enter, batches leave.

Every query of a batch has `M` places for candidate masks, of which it fills those that are `there`: all of its image's masks, or of more than the run
wants the right ones and others drawn at random for each visit. What masks are described by comes from the gallery, what texts are from the store
of features, or, where the text model learns, from the model itself in the step.

Not here: descriptions (`grounding.gallery`), features of texts (`grounding.features`), the order of queries (`samplers`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gigamask.contracts import Cursor, Group, Rejected, Visit
from gigamask.data.index import Index
from gigamask.data.shards import Shards
from gigamask.draws import draw
from gigamask.faults import BadSample
from gigamask.grounding.gallery import Gallery
from gigamask.grounding.items import Catalogue
from gigamask.grounding.words import Words


@dataclass(frozen=True, eq=False)
class Questions:
    """Queries of one step of one rank, or a micro-batch of it; a `contracts.Portion`, in which each query has one loss.

    B counts the samples, Q those of them that are asked (all, unless some were mined), M candidates of the query that has most. `words` is None
    where the text model learns.
    """

    names: tuple[str, ...]
    places: Int64[Tensor, "B"]
    weights: Float[Tensor, "B"]
    mask_image: Int64[Tensor, "Q"]
    strata: Int64[Tensor, "Q"]
    texts: tuple[str, ...]
    words: Words | None
    features: Float[Tensor, "Q M F"]
    there: Bool[Tensor, "Q M"]
    right: Bool[Tensor, "Q M"]
    cursor: Cursor
    rejected: tuple[Rejected, ...] = ()

    def to(self, device: torch.device | str) -> "Questions":
        """Moves every tensor to `device`."""
        tensors = {name: getattr(self, name).to(device) for name in ("places", "weights", "mask_image", "strata", "features", "there", "right")}
        return replace(self, words=self.words and self.words.to(device), **tensors)

    def only(self, kept: Int64[Tensor, "K"]) -> "Questions":
        """Returns the batch with these queries alone asked, given in ascending order; samples stay."""
        chosen = {name: getattr(self, name)[kept] for name in ("mask_image", "strata", "features", "there", "right")}
        words = None if self.words is None else Words(self.words.features[kept], self.words.present[kept])
        return replace(self, texts=tuple(self.texts[i] for i in kept.tolist()), words=words, **chosen)


@dataclass(frozen=True, eq=False)
class Questioner:
    """Makes batches of queries: `read` returns what texts are, or is None where the text model learns. At most `max_masks` candidates a query."""

    catalogue: Catalogue
    index: Index
    gallery: Gallery
    read: Callable[[Sequence[str]], Words] | None
    max_masks: int
    seed: int

    def batches(self, groups: Iterable[Group]) -> Iterator[tuple[Questions, ...]]:
        """Yields each step's micro-batches."""
        shards = Shards(self.index.shard_paths)
        try:
            for group in groups:
                yield tuple(self.batch(visits, shards, Cursor(group.samples)) for visits in group.micros)
        finally:
            shards.close()

    def close(self) -> None:
        """Nothing was begun that would have to end."""

    def batch(self, visits: Sequence[Visit], shards: Shards, cursor: Cursor) -> Questions:
        """Makes one micro-batch; queries about an image that cannot be read are left out and named in it."""
        rows = [int(self.catalogue.rows[visit.row]) for visit in visits]
        asked, rejected = [], []
        for visit, row, found in zip(visits, rows, self.gallery.rows(self.index, shards, rows), strict=True):
            if isinstance(found, BadSample):
                rejected.append(Rejected(self.index.entry_name(row), str(found)))
            else:
                asked.append((visit, row, found, self._candidates(visit, len(found))))
        queries = [self.catalogue.queries[visit.row] for visit, *_ in asked]
        described = [found[chosen] for _, _, found, chosen in asked]
        texts = tuple(query.text for query in queries)
        granularity = self.catalogue.items.columns["granularity"]
        strata = [visit.stratum if visit.stratum >= 0 else int(granularity[visit.row]) for visit, *_ in asked]
        return Questions(
            names=tuple(f"{self.index.entry_name(row)}: {text}" for (_, row, _, _), text in zip(asked, texts, strict=True)),
            places=torch.tensor([visit.place for visit, *_ in asked], dtype=torch.int64),
            weights=torch.tensor([visit.weight for visit, *_ in asked], dtype=torch.float32),
            mask_image=torch.arange(len(asked)),
            strata=torch.tensor(strata, dtype=torch.int64),
            texts=texts,
            words=self.read(texts) if self.read else None,
            features=padded(described, self.gallery.width),
            there=padded([torch.ones(len(each), 1) for each in described], 1)[..., 0] > 0,
            right=padded([torch.from_numpy(np.isin(c, q.right))[:, None] for (_, _, _, c), q in zip(asked, queries, strict=True)], 1)[..., 0] > 0,
            cursor=cursor,
            rejected=tuple(rejected),
        )

    def _candidates(self, visit: Visit, masks: int) -> Int64[np.ndarray, "m"]:
        """Returns the numbers of the masks that a query chooses from, ascending; of too many right ones some."""
        if masks <= self.max_masks:
            return np.arange(masks)
        generator = draw(self.seed, "candidates", visit.epoch, visit.position)
        right = generator.permutation(np.array(self.catalogue.queries[visit.row].right, np.int64))[: self.max_masks]
        wrong = generator.permutation(np.setdiff1d(np.arange(masks), self.catalogue.queries[visit.row].right))
        return np.sort(np.concatenate([right, wrong])[: self.max_masks])


def padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """Returns tables of so many columns as one stack, the shorter ones followed by zeros; there may be no table."""
    return pad_sequence(list(parts), batch_first=True) if parts else torch.zeros(0, 0, width)
