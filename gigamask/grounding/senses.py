"""What a run sees and reads with: its segmenter, which describes masks, and its text model, which turns texts into words; each is loaded once.

Not here: descriptions (`grounding.gallery`), text models (`grounding.text`), features kept (`grounding.features`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from gigamask.data.index import Index
from gigamask.faults import Fault
from gigamask.grounding.features import FeatureStore
from gigamask.grounding.gallery import Gallery
from gigamask.grounding.items import Catalogue
from gigamask.grounding.questions import Questioner
from gigamask.grounding.text import TextEncoder
from gigamask.grounding.words import TextModel, Words
from gigamask.model.sizes import RelevanceSpec
from gigamask.parallel.precision import choose_device
from gigamask.predict.cache import EmbeddingCache
from gigamask.train.checkpoint import load_model


@dataclass(frozen=True, eq=False)
class Senses:
    """The segmenter and the text model of a run, for whoever asks: its training, its evaluation, a user. `kept` is where their work is kept."""

    segmenter: str
    text: TextEncoder
    spec: RelevanceSpec
    device: str
    seed: int
    kept: Path

    @cached_property
    def gallery(self) -> Gallery:
        """What describes masks, with what it has seen before."""
        return Gallery(load_model(self.segmenter, self.device), self.spec, EmbeddingCache(self.kept, limit_bytes=None))

    def reader(self, texts: Sequence[str] = ()) -> Callable[[Sequence[str]], Words] | None:
        """Returns what turns texts into words, None where the text model learns along, so that the network has it.

        Those of `texts` are computed at once and kept with the run, so that their file is not written anew in every step; without, nothing is kept.
        """
        if self.text.learns:
            return None
        store, console = self._store if texts else FeatureStore(self._text), Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
            bar = shown.add_task("read texts", total=None)
            store.fill(texts, lambda done, of: shown.update(bar, completed=done, total=of))
        return store.get

    def questioner(self, catalogue: Catalogue, index: Index, max_masks: int) -> Questioner:
        """Returns what asks these queries, each about at most so many masks of its image."""
        reader = self.reader([query.text for query in catalogue.queries])
        return Questioner(catalogue, index, self.gallery, reader, max_masks, self.seed)

    @cached_property
    def _store(self) -> FeatureStore:
        return FeatureStore(self._text, self.kept)

    @cached_property
    def _text(self) -> TextModel:
        return self.open_text(choose_device(self.device))

    def open_text(self, device: torch.device | str) -> TextModel:
        """Returns a text model of one's own; raises `Fault` where its features are not as wide as the network takes them."""
        text = self.text.build(device, self.seed)
        if text.dim != self.spec.text_dim:
            raise Fault(f"the text model's features have {text.dim} channels, --model.text-dim is {self.spec.text_dim}; give {text.dim}")
        return text
