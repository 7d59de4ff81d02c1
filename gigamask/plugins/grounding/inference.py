"""Inference: find masks of one image by text."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8

from gigamask.distributed.precision import choose_device
from gigamask.errors import GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.models import state_dict
from gigamask.models.manifest import MODEL, list_checkpoints
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.grounding import vocabulary
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.plugins.grounding.config import GroundingTrainConfig
from gigamask.plugins.grounding.model import GroundingModel

FONT, FONT_SCALE, LINE_PX = cv2.FONT_HERSHEY_SIMPLEX, 0.45, 18
FITS_RGB, OTHER_RGB = (0, 158, 115), (213, 94, 0)
"""Colours of masks that fit the text, and of the best mask if none fits."""


@dataclass(frozen=True, eq=False)
class GroundingResult:
    """Ranking of an image's masks for a text.

    Attributes:
        text: The text.
        order: Numbers of the masks, best first.
        confidence: Probability that each mask in `order` is correct.
        num_matches: Number of masks that fit the text; they come first in `order`.
        note: How much of the text is read, if it is cut, and which of its words no training query
            has; "" if there is nothing to say.
    """

    text: str
    order: Int64[np.ndarray, "m"]
    confidence: Float64[np.ndarray, "m"]
    num_matches: int
    note: str = ""


def load_model(config: GroundingTrainConfig, path: str) -> GroundingModel:
    """Load a trained model on the config's device, in evaluation mode.

    Args:
        config: Config of the run.
        path: Run folder, whose newest valid checkpoint is loaded, or a checkpoint.

    Returns:
        The model.

    Raises:
        GigamaskError: There is no checkpoint, or it is damaged.
    """
    folder = Path(path)
    if not list_checkpoints(folder / "checkpoints") and not (folder / MODEL).is_file():
        raise GigamaskError(
            f"{path}: contains no checkpoint; train first: gigamask ground train RECIPE --out "
            f"{path}"
        )
    tensors, _ = state_dict.read_weights(folder)
    model = config.build()
    state_dict.load_weights(model, tensors, path)
    return model.to(choose_device(config.device)).eval()


class GroundingPredictor:
    """Finds masks by text with a trained model.

    Attributes:
        model: The grounding model.
        confidence: Its calibration.
        known_words: Words of the training queries; None if they are not known.
        mask_features: Features of masks, with the segmenter as `mask_features.model`.
    """

    def __init__(
        self,
        config: GroundingTrainConfig,
        model: GroundingModel,
        confidence: Confidence,
        known_words: Collection[str] | None = None,
    ) -> None:
        self.model, self.confidence, self.known_words = model, confidence, known_words
        self.mask_features = config.backbones.mask_features
        self._text_features = config.backbones.text_features()
        is_trained = self._text_features is None
        self._text = model.text if is_trained else config.backbones.frozen_text_model
        self._text.is_warned = True  # each result says what is cut

    @classmethod
    def from_checkpoint(cls, config: GroundingTrainConfig, path: str) -> "GroundingPredictor":
        """Load a predictor.

        Args:
            config: Config of the run; its `out` contains the fitted confidence and the words of the
                training queries, if any.
            path: Run folder or checkpoint.

        Returns:
            The predictor.

        Raises:
            GigamaskError: There is no checkpoint, or a file is damaged.
        """
        model, known_words = load_model(config, path), vocabulary.load(config.out)
        return cls(config, model, Confidence.load(config.out), known_words)

    @property
    def segmenter(self) -> PromptableModel:
        """The model that finds the candidate masks."""
        return self.mask_features.model

    def check(self, text: str) -> None:
        """Raise `GigamaskError` if a text has no letters, or is too long."""
        vocabulary.check_text(text)

    @torch.inference_mode()
    def predict(
        self, pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks, texts: Sequence[str]
    ) -> list[GroundingResult]:
        """Rank the masks of an image for each text.

        Args:
            pixels: RGB image.
            masks: Its candidate masks.
            texts: The texts.

        Returns:
            One result per text.

        Raises:
            GigamaskError: A text has no letters, or is too long.
        """
        for text in texts:
            self.check(text)
        device = next(self.model.parameters()).device
        features = self.mask_features.extract(pixels, masks).to(device)
        if self._text_features:
            text = self._text_features(texts).to(device)
        else:
            text = self._text(self._text.tokenize(texts).to(device)).to(device)
        valid = torch.ones(len(texts), len(masks), dtype=torch.bool, device=device)
        features = features.expand(len(texts), -1, -1)
        scores = self.model(features, valid, text.features, text.attention_mask)
        rows = scores.cpu().double().numpy()
        return [self._result(text, row) for text, row in zip(texts, rows, strict=True)]

    def _result(self, text: str, scores: Float64[np.ndarray, "m1"]) -> GroundingResult:
        logits = scores[:-1] - scores[-1]
        order = np.argsort(-logits, kind="stable")
        num_matches = int((logits > self.confidence.threshold).sum())
        known = self.known_words
        notes = [self._text.cut_note(text)]
        notes.append("" if known is None else vocabulary.describe_unknown(text, known))
        note = "; ".join(filter(None, notes))
        return GroundingResult(text, order, self.confidence(logits)[order], num_matches, note)


def draw_result(
    pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks, result: GroundingResult, limit: int
) -> UInt8[np.ndarray, "h W 3"]:
    """Draw the masks that fit, numbered by rank, or the outline of the best mask if none fits.

    Args:
        pixels: RGB image.
        masks: Its candidate masks.
        result: Ranking of the masks.
        limit: Maximum number of masks to draw.

    Returns:
        The image above a caption with the text.
    """
    canvas, colour = pixels.copy(), FITS_RGB if result.num_matches else OTHER_RGB
    count = min(limit, result.num_matches) or 1
    for rank, number in reversed(list(enumerate(result.order[:count].tolist()))):
        mask = masks[number : number + 1]
        dense = mask.to_dense()[0]
        if result.num_matches:
            opacity = 0.3 if rank else 0.55
            blend = (1 - opacity) * canvas[dense] + opacity * np.array(colour)
            canvas[dense] = blend.astype(np.uint8)
        outline, _ = cv2.findContours(dense.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outline, -1, (255, 255, 255), 3)
        cv2.drawContours(canvas, outline, -1, colour, 1)
        x0, y0, _, _ = mask.boxes()[0].tolist()
        label = f"{rank + 1}: {result.confidence[rank]:.3f}"
        for thickness, shade in ((3, (255, 255, 255)), (1, (0, 0, 0))):
            position = (x0, max(y0, 14))
            cv2.putText(canvas, label, position, FONT, FONT_SCALE, shade, thickness, cv2.LINE_AA)
    text = result.text if result.num_matches else f"{result.text}: no mask fits"
    return np.concatenate([canvas, _caption(text, canvas.shape[1])])


def _caption(text: str, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Return a strip of the given width with the wrapped text; overlong words are cut off."""
    lines = [""]
    for word in text.split():
        extended = f"{lines[-1]} {word}".strip()
        (extended_width, _), _ = cv2.getTextSize(extended, FONT, FONT_SCALE, 1)
        if lines[-1] and extended_width > width - 8:
            lines.append(word)
        else:
            lines[-1] = extended
    strip = np.full((LINE_PX * len(lines) + 6, width, 3), 255, np.uint8)
    for number, line in enumerate(lines, 1):
        position = (4, LINE_PX * number)
        cv2.putText(strip, line, position, FONT, FONT_SCALE, (0, 0, 0), 1, cv2.LINE_AA)
    return strip
