"""Embeddings of resized images, from the cache where it has them, and prompts as the decoder takes them.

Input coordinates are in `predict.transform`, decoding in `model.decoding`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.inference.embedding_cache import EmbeddingCache, digest_weights, key
from gigamask.models.sam.sam import Sam
from gigamask.types import Prompts

PADDING, CORNERS = -1, (2, 3)
"""Labels of a token that is no point, and of a box's two corners (`contracts.Prompts`)."""


class ImageEmbedder:
    """A model's image encoder, and where its embeddings are kept."""

    def __init__(self, model: Sam, cache: EmbeddingCache | None) -> None:
        self.model, self.cache = model, cache
        self._weights: tuple[tuple, str] = (), ""

    @torch.no_grad()
    def embed(self, resized: Sequence[Tensor]) -> list[Float[Tensor, "1 C E E"]]:
        """Returns the embedding of each image `(1, 3, h, w)` in 0..255; what the cache does not have goes through the encoder together."""
        device, side = self.model.pixel_mean.device, self.model.spec.image_size
        if self.cache is None:
            return self._encode(resized, side, device)
        keys = [key(self.weights(), pixels) for pixels in resized]
        found = {each: self.cache.get(each) for each in dict.fromkeys(keys)}
        new = {
            each: pixels for each, pixels in zip(keys, resized, strict=True) if found[each] is None
        }
        if new:
            for each, embedding in zip(
                new, self._encode(list(new.values()), side, device), strict=True
            ):
                found[each] = embedding
                self.cache.put(each, embedding)
        return [embedding.to(device) for each in keys if (embedding := found[each]) is not None]

    def _encode(self, resized: Sequence[Tensor], side: int, device: torch.device) -> list[Tensor]:
        squares = [
            functional.pad(
                pixels.to(device), (0, side - pixels.shape[3], 0, side - pixels.shape[2])
            )
            for pixels in resized
        ]
        sizes = torch.tensor([pixels.shape[2:] for pixels in resized], device=device)
        return list(self.model.encode(torch.cat(squares), sizes).split(1))

    def weights(self) -> str:
        """Returns what names the encoder and how it computes; weights are digested again once they have changed."""
        state = {
            **self.model.image_encoder.state_dict(),
            "mean": self.model.pixel_mean,
            "deviation": self.model.pixel_std,
        }
        versions = tuple((tensor.data_ptr(), tensor._version) for tensor in state.values())
        if versions != self._weights[0]:
            self._weights = (
                versions,
                digest_weights(state, str(replace(self.model.spec, drop_path_rate=0.0))),
            )
        kind = self.model.pixel_mean.device.type
        cast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
        return f"{self._weights[1]} {cast}"


def make_prompts(
    points: Tensor | None,
    labels: Tensor | None,
    boxes: Tensor | None,
    masks: Tensor | None,
    multimask_output: bool,
    grid: int,
) -> Prompts:
    """Returns prompts in input pixels as the decoder takes them: points, then a box's corners; where there is no box, one token that is no point.

    `points` `(B, N, 2)`, `labels` `(B, N)`, `boxes` `(B, 4)`, `masks` `(B, 1, G, G)` or one for all. Raises Fault where points and labels do not fit
    together, labels are others than 1, 0 and -1, numbers of prompts differ, or masks do not have side `grid`.
    """
    if (points is None) != (labels is None):
        lone, other = (
            ("point_coords", "point_labels") if labels is None else ("point_labels", "point_coords")
        )
        raise GigamaskError(f"{lone} came without {other}; give both, a label for each point")
    tokens, kinds = [], []
    if points is not None and labels is not None:
        if points.shape[:-1] != labels.shape or points.ndim != 3 or points.shape[-1] != 2:
            raise GigamaskError(
                f"point_coords are {_stated(points)} and point_labels {_stated(labels)}; give prompts x points x 2, and prompts x points"
            )
        if bool(((labels < PADDING) | (labels > 1)).any()):
            raise GigamaskError(
                f"point_labels hold {_strange(labels)}, known are 1 foreground, 0 background, -1 no point; give a box as the box"
            )
        none = boxes is None
        tokens.append(functional.pad(points, (0, 0, 0, int(none))))
        kinds.append(functional.pad(labels.long(), (0, int(none)), value=PADDING))
    if boxes is not None:
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise GigamaskError(f"boxes are {_stated(boxes)}; give prompts x 4, x0 y0 x1 y1")
        tokens.append(boxes.view(-1, 2, 2))
        kinds.append(torch.tensor([CORNERS], device=boxes.device).expand(len(boxes), 2))
    if masks is not None and masks.shape[1:] != (1, grid, grid):
        raise GigamaskError(
            f"mask_input is {_stated(masks)}, the model takes prompts x 1 x {grid} x {grid}; give low-resolution logits of an earlier answer"
        )
    counts = {len(each) for each in tokens} | (
        {len(masks)} if masks is not None and (not tokens or len(masks) != 1) else set()
    )
    if len(counts) > 1:
        raise GigamaskError(
            f"points, boxes and masks are of {' and '.join(map(str, sorted(counts)))} prompts; give the same number of each"
        )
    count = counts.pop() if counts else 1
    if not tokens:
        device = None if masks is None else masks.device
        tokens, kinds = (
            [torch.zeros(count, 0, 2, device=device)],
            [torch.zeros(count, 0, dtype=torch.int64, device=device)],
        )
    dtype = max((each.dtype for each in tokens), key=lambda each: each.itemsize)
    fed = None if masks is None else masks[:, 0].expand(count, -1, -1)
    return Prompts(
        torch.cat([each.to(dtype) for each in tokens], 1),
        torch.cat(kinds, 1),
        fed,
        multimask_output,
    )


def _stated(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


def _strange(labels: Tensor) -> int:
    return int(labels[(labels < PADDING) | (labels > 1)][0])
