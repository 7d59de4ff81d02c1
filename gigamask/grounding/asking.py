"""A trained relevance network asked about one image: texts and candidate masks enter, ranked answers leave.

Not here: queries whose right masks are known (`grounding.scores`), where candidates come from (`predict.automatic`, or the image's own json).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8
from safetensors.torch import load_file

from gigamask.data import store
from gigamask.faults import Fault
from gigamask.geometry.runs import Runs
from gigamask.grounding.run import Grounding
from gigamask.grounding.scores import Confidence
from gigamask.model import weights
from gigamask.model.relevance import Relevance
from gigamask.parallel.precision import choose_device
from gigamask.train import checkpoint, manifest

CONFIDENCE = "confidence.json"
"""In the run folder: how scores become confidences, fitted on held-out queries."""
CAPTION, LINE_PX = (cv2.FONT_HERSHEY_SIMPLEX, 0.45), 18
FITS_RGB, OTHER_RGB = (0, 158, 115), (213, 94, 0)
"""Of masks that fit, and of those shown because none does."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a text means: the candidates' numbers from the best on, how sure one may be that each is right, and how many fit better than none."""

    text: str
    order: Int64[np.ndarray, "m"]
    confidence: Float64[np.ndarray, "m"]
    fitting: int


def load(run: Grounding, folder: str) -> Relevance:
    """Returns the network of a run: that of the checkpoint `folder`, or of the newest sound one where it is the run's own folder."""
    path = checkpoint.newest(Path(folder))
    if path is None:  # else it is sound
        path = Path(folder)
        if not (path / checkpoint.MODEL).is_file():
            raise Fault(f"{folder}: holds no checkpoint; train it first: gigamask ground train RECIPE --out {folder}")
        manifest.verify(path)
    model = run.build()
    weights.load(model, load_file(path / checkpoint.MODEL), str(path))
    return model.to(choose_device(run.device)).eval()


def save_confidence(folder: str, confidence: Confidence) -> Path:
    """Keeps what was fitted beside the run's checkpoints."""
    path = Path(folder) / CONFIDENCE
    store.write(path, json.dumps(asdict(confidence)).encode())
    return path


def load_confidence(folder: str) -> Confidence:
    """Returns what was fitted for a run, scores as they come where nothing was."""
    path = Path(folder) / CONFIDENCE
    try:
        told = json.loads(path.read_bytes())
        return Confidence(float(told["scale"]), float(told["shift"]), float(told["least"]))
    except FileNotFoundError:
        return Confidence()
    except (ValueError, TypeError, KeyError) as error:
        raise Fault(f"{path}: is no fitted confidence ({error}); fit it again: gigamask ground evaluate {folder} --calibrate") from error


class Asker:
    """A run's network with all that it needs to answer."""

    def __init__(self, run: Grounding, model: Relevance, confidence: Confidence) -> None:
        self.model, self.confidence, self.gallery = model, confidence, run.senses.gallery
        self._read = run.senses.reader()

    @torch.inference_mode()
    def ask(self, pixels: UInt8[np.ndarray, "H W 3"], masks: Runs, texts: Sequence[str]) -> list[Found]:
        """Returns which of an image's masks each text means."""
        if empty := [text for text in texts if not text.strip()]:
            raise Fault(f"the text {empty[0]!r} has no words; say what to look for")
        device = next(self.model.parameters()).device
        features = self.gallery.describe(pixels, masks).to(device)
        words = self._read(texts) if self._read else self.model.text(self.model.text.tokenise(texts).to(device))
        count = len(texts)
        there = torch.ones(count, len(masks), dtype=torch.bool, device=device)
        words = words.to(device)
        scores = self.model(features.expand(count, -1, -1), there, words.features, words.present).double().cpu().numpy()
        return [self._found(text, row) for text, row in zip(texts, scores, strict=True)]

    def _found(self, text: str, scores: Float64[np.ndarray, "m1"]) -> Found:
        logits = scores[:-1] - scores[-1]
        order = np.argsort(-logits, kind="stable")
        return Found(text, order, self.confidence(logits)[order], int((logits > self.confidence.least).sum()))


def drawn(pixels: UInt8[np.ndarray, "H W 3"], masks: Runs, found: Found, most: int) -> UInt8[np.ndarray, "h W 3"]:
    """Returns the image with its answers laid over it, the best one strongest and each numbered by rank; where nothing fits, outlines alone."""
    canvas, chosen = pixels.copy(), found.order[: min(most, found.fitting) or 1]
    for rank in range(len(chosen) - 1, -1, -1):
        dense = masks[chosen[rank : rank + 1]].to_dense()[0]
        colour = FITS_RGB if found.fitting else OTHER_RGB
        if found.fitting:
            opacity = 0.55 if not rank else 0.3
            canvas[dense] = ((1 - opacity) * canvas[dense] + opacity * np.array(colour)).astype(np.uint8)
        outline, _ = cv2.findContours(dense.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outline, -1, (255, 255, 255), 3)
        cv2.drawContours(canvas, outline, -1, colour, 1)
        x0, y0, _, _ = masks[chosen[rank : rank + 1]].boxes()[0].tolist()
        _label(canvas, f"{rank + 1}: {100 * found.confidence[rank]:.0f}%", x0, max(y0, 14))
    said = found.text if found.fitting else f"{found.text}: nothing here fits"
    return np.concatenate([canvas, _caption(said, canvas.shape[1])])


def _caption(text: str, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Returns a strip of that width with the text on as many lines as it takes; a word that is longer than one is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and cv2.getTextSize(longer, *CAPTION, 1)[0][0] > width - 8:
            lines.append(word)
        else:
            lines[-1] = longer
    strip = np.full((LINE_PX * len(lines) + 6, width, 3), 255, np.uint8)
    for number, line in enumerate(lines):
        cv2.putText(strip, line, (4, LINE_PX * (number + 1)), *CAPTION, (0, 0, 0), 1, cv2.LINE_AA)
    return strip


def _label(canvas: UInt8[np.ndarray, "H W 3"], text: str, x: int, y: int) -> None:
    for thickness, colour in ((3, (255, 255, 255)), (1, (0, 0, 0))):
        cv2.putText(canvas, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.45, colour, thickness, cv2.LINE_AA)
