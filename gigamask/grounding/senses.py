"""What a run sees and reads with: its segmenter, which describes masks, and its text model, which turns texts into words.

Not here: descriptions (`grounding.gallery`), text models (`grounding.text`), features kept (`grounding.features`).
"""

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import Progress

from gigamask.faults import Fault
from gigamask.grounding.features import FeatureStore
from gigamask.grounding.gallery import Gallery
from gigamask.grounding.run import Grounding
from gigamask.grounding.words import TextModel, Words
from gigamask.parallel.precision import choose_device
from gigamask.predict.cache import EmbeddingCache
from gigamask.train.checkpoint import load_model


def open_gallery(run: Grounding) -> Gallery:
    """Returns what describes masks: the segmenter, loaded, and what it has seen before."""
    return Gallery(load_model(run.segmenter, run.device), run.model, EmbeddingCache(run.kept, limit_bytes=None))


def open_reader(run: Grounding, texts: Sequence[str] = ()) -> Callable[[Sequence[str]], Words] | None:
    """Returns what turns texts into words, None where the text model learns along, so that the network has it.

    Those of `texts` are computed at once and kept with the run, so that their file is not written anew in every step; without, nothing is kept.
    """
    if run.text.learns:
        return None
    store = FeatureStore(open_text(run, choose_device(run.device)), run.kept if texts else None)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task("read texts", total=None)
        store.fill(texts, lambda done, of: shown.update(bar, completed=done, total=of))
    return store.get


def open_text(run: Grounding, device: torch.device | str) -> TextModel:
    """Returns the run's text model; raises `Fault` where its features are not as wide as the network takes them."""
    text = run.text.build(device, run.seed)
    if text.dim != run.model.text_dim:
        raise Fault(f"the text model's features have {text.dim} channels, --model.text-dim is {run.model.text_dim}; give {text.dim}")
    return text
