"""Features of texts computed once: texts enter, padded words leave, from memory, from a file of an earlier time, or from the model.

One file a model (its digest is the name), which appears whole under its name and tells by a digest of its own when it is damaged; all is computed
anew then. Where several processes write, the last one's stays, and nobody is wrong. A folder that cannot be written costs the reuse and a warning.

Not here: the model (`grounding.words`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gigamask.grounding.words import TextModel, Words
from gigamask.predict.cache import read_sealed, write_sealed

SUFFIX = ".words"


class FeatureStore:
    """What a text model that does not learn makes of texts, each computed once, `batch` of similar length at a time; kept in `folder` where given."""

    def __init__(self, model: TextModel, folder: Path | None = None, batch: int = 64) -> None:
        if model.learns:
            raise ValueError("features of a text model that learns change; ask the model itself")
        self._model, self._batch = model, batch
        self._path = folder / f"{model.digest}{SUFFIX}" if folder else None
        self._kept = self._read()
        self._written = len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, texts: Sequence[str]) -> Words:
        """Returns the texts' words on the CPU, padded to the longest of them."""
        self.fill(texts)
        found = [self._kept[text] for text in texts]
        present = torch.arange(max(map(len, found), default=0)) < torch.tensor([[len(each)] for each in found], dtype=torch.int64).reshape(-1, 1)
        empty = torch.zeros(0, 0, self._model.dim)
        return Words(pad_sequence(found, batch_first=True).float() if found else empty, present)

    def fill(self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> None:
        """Computes what is not there; before a training, with all its texts. `progress` is told how many of how many are done."""
        wanted = sorted({text for text in texts if text not in self._kept}, key=lambda text: (len(text), text))
        for start in range(0, len(wanted), self._batch):
            some = wanted[start : start + self._batch]
            with torch.inference_mode():
                words = self._model(self._model.tokenise(some))
            features, present = words.features.to(self._model.dtype).cpu(), words.present.cpu()
            self._kept |= {text: each[where] for text, each, where in zip(some, features, present, strict=True)}
            if len(self._kept) >= 2 * self._written:  # so seldom that all writing together is a few times the last
                self._write()
            if progress:
                progress(start + len(some), len(wanted))
        if len(self._kept) > self._written:
            self._write()

    def _read(self) -> dict[str, Float[Tensor, "T D"]]:
        try:
            held = read_sealed(self._path) if self._path else None
        except OSError:
            held = None
        if held is None:
            return {}
        texts = json.loads(held["texts"].numpy().tobytes())
        return dict(zip(texts, held["features"].split(held["lengths"].tolist()), strict=True))

    def _write(self) -> None:
        self._written = len(self._kept)
        if self._path is None:
            return
        held = {
            "texts": torch.frombuffer(bytearray(json.dumps(list(self._kept)).encode()), dtype=torch.uint8),
            "lengths": torch.tensor([len(each) for each in self._kept.values()]),
            "features": torch.cat(list(self._kept.values())),
        }
        write_sealed(self._path, held, f"{self._path}: no features")
