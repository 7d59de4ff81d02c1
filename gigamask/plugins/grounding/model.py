"""The grounding model, which scores each mask of an image for a text, and its training task.

The last score is that of "no mask fits": masks that score higher fit the text. Masks attend to the
text and to each other, with pairwise geometry in the attention, and are then compared with each
token; the similarities are averaged with learned token weights.

Attribute names are the keys of checkpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from gigamask.distributed.precision import Precision, autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.interfaces import Mining, Task
from gigamask.models.layers import MLPBlock
from gigamask.models.model import Model
from gigamask.plugins.grounding.attention import Attention
from gigamask.plugins.grounding.data import QueryBatch
from gigamask.plugins.grounding.model_config import (
    COLOR_FEATURES,
    GEOMETRY_FEATURES,
    GroundingModelConfig,
)
from gigamask.plugins.grounding.relevance import relevance_losses
from gigamask.types import LossSums

PAIRWISE_FEATURES = 7
"""Number of features that `pairwise_geometry` returns for a pair of masks."""
PAIR_DIM = 32
"""Width of the embedding of a pair."""
PADDING_LOGIT = -1e4
"""Logit of padding, representable in half precision."""


class MaskSelfAttention(nn.Module):
    """Multi-head attention among masks, with pairwise geometry in the logits and in the values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.pair_features = nn.Linear(PAIRWISE_FEATURES, PAIR_DIM)
        self.bias = nn.Linear(PAIR_DIM, heads, bias=False)
        self.pair_values = nn.Linear(heads * PAIR_DIM, dim)

    def forward(
        self,
        x: Float[Tensor, "B N C"],
        pairs: Float[Tensor, "B N N G"],
        valid: Bool[Tensor, "B N"],
    ) -> Float[Tensor, "B N C"]:
        """Attend from each mask to all masks.

        Args:
            x: Features of masks.
            pairs: Geometry of each pair of masks.
            valid: False for padding.
        """
        projected = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        pair = functional.gelu(self.pair_features(pairs))
        logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        logits = logits + self.bias(pair).permute(0, 3, 1, 2)
        attention = logits.masked_fill(~valid[:, None, None], PADDING_LOGIT).softmax(3)
        pair_value = self.pair_values(torch.einsum("bhij,bijg->bihg", attention, pair).flatten(2))
        return self.out((attention @ value).transpose(1, 2).flatten(2) + pair_value)


class GroundingLayer(nn.Module):
    """Masks attend to the text and to each other, then the text attends to the masks."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.reading, self.relating = Attention(dim, heads), MaskSelfAttention(dim, heads)
        self.mask_attention = Attention(dim, heads)
        self.mlp = MLPBlock(dim, 2 * dim, nn.GELU)

    def forward(
        self,
        masks: Float[Tensor, "B N C"],
        tokens: Float[Tensor, "B T C"],
        pairs: Float[Tensor, "B N N G"],
        mask_valid: Bool[Tensor, "B N"],
        token_valid: Bool[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B N C"], Float[Tensor, "B T C"]]:
        """Return the updated masks and tokens.

        Args:
            masks: Features of masks.
            tokens: Features of text tokens.
            pairs: Geometry of each pair of masks.
            mask_valid: False for padding.
            token_valid: False for padding.
        """
        masks = masks + self.reading(self.norms[0](masks), tokens, token_valid)
        masks = masks + self.relating(self.norms[1](masks), pairs, mask_valid)
        masks = masks + self.mlp(self.norms[2](masks))
        return masks, tokens + self.mask_attention(self.norms[3](tokens), masks, mask_valid)


class GroundingModel(Model):
    """Scores the masks of an image for a text.

    Attributes:
        text: The text model if it is trained, else None.
    """

    kind = "grounding model"
    text: Any
    parameter_std = 0.02
    """Standard deviation of the initial value of `none`; see `models.model`."""

    def __init__(self, config: GroundingModelConfig) -> None:
        super().__init__()
        self.config, self.text = config, None
        dim = config.dim
        self.look_norm, self.look = (
            nn.LayerNorm(config.embedding_dim),
            nn.Linear(config.embedding_dim, dim),
        )
        self.colour = MLPBlock(COLOR_FEATURES, dim, nn.GELU, dim)
        self.geometry = MLPBlock(GEOMETRY_FEATURES, dim, nn.GELU, dim)
        self.outline = MLPBlock(config.crop_side**2, dim, nn.GELU, dim)
        self.none = nn.Parameter(torch.empty(dim))
        self.word_norm, self.word = nn.LayerNorm(config.text_dim), nn.Linear(config.text_dim, dim)
        self.layers = nn.ModuleList(GroundingLayer(dim, config.heads) for _ in range(config.layers))
        # No biases where they would add the same number to every mask's score.
        self.mask_norm, self.words_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim)
        self.mask_out, self.word_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.weigh = nn.Linear(dim, 1, bias=False)

    def forward(
        self,
        mask_features: Float[Tensor, "B M F"],
        mask_valid: Bool[Tensor, "B M"],
        token_features: Float[Tensor, "B T D"],
        token_valid: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B M1"]:
        """Score masks for texts.

        Args:
            mask_features: Features of each mask, see `mask_features`.
            mask_valid: Which masks are not padding.
            token_features: Features of each token.
            token_valid: Which tokens are not padding, at least one per text.

        Returns:
            Scores [B, M + 1]; the last is that of "no mask fits", and padding has the lowest.
        """
        similarity, weights = self.similarity(
            mask_features, mask_valid, token_features, token_valid
        )
        scores = (similarity * weights[:, None]).sum(2)
        return scores.masked_fill(~_append_true(mask_valid), PADDING_LOGIT)

    def similarity(
        self,
        mask_features: Float[Tensor, "B M F"],
        mask_valid: Bool[Tensor, "B M"],
        token_features: Float[Tensor, "B T D"],
        token_valid: Bool[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B M1 T"], Float[Tensor, "B T"]]:
        """Compare masks with tokens.

        Args:
            mask_features: Features of candidate masks.
            mask_valid: False for padding.
            token_features: Features of text tokens.
            token_valid: False for padding.

        Returns:
            Similarity of each mask, and of "no mask fits" last, to each token [B, M + 1, T]; and
            the tokens' weights [B, T], which sum to 1.
        """
        look, colour, geometry, outline = mask_features.split(self.config.parts, 2)
        masks = self.look(self.look_norm(look)) + self.colour(colour)
        masks = masks + self.geometry(geometry) + self.outline(outline)
        masks = torch.cat([masks, self.none.to(masks.dtype).expand(len(masks), 1, -1)], 1)
        tokens, valid = self.word(self.word_norm(token_features)), _append_true(mask_valid)
        pairs = functional.pad(pairwise_geometry(geometry), (0, 0, 0, 1, 0, 1))
        for layer in self.layers:
            masks, tokens = layer(masks, tokens, pairs, valid, token_valid)
        masks, tokens = self.mask_norm(masks), self.words_norm(tokens)
        weights = self.weigh(tokens)[..., 0].masked_fill(~token_valid, PADDING_LOGIT).softmax(1)
        similarity = torch.einsum("bmd,btd->bmt", self.mask_out(masks), self.word_out(tokens))
        return similarity * self.config.dim**-0.5, weights


def pairwise_geometry(geometry: Float[Tensor, "B M P"]) -> Float[Tensor, "B M M G"]:
    """Describe the position of mask j relative to mask i for all pairs.

    Args:
        geometry: Box centre x and y, width, height and square root of the area of each mask,
            relative to the image; further columns are ignored.

    Returns:
        Offset x and y, distance, exp(-4 distance), gap between the boxes in x and y, difference of
        the square roots of the areas; [B, M, M, 7] at [:, i, j].
    """
    x, y, width, height, extent = (geometry[..., column] for column in range(5))

    def difference(values: Tensor) -> Tensor:
        return values[:, None] - values[:, :, None]

    def mean(values: Tensor) -> Tensor:
        return (values[:, None] + values[:, :, None]) / 2

    dx, dy = difference(x), difference(y)
    distance = (dx.square() + dy.square()).sqrt()
    gap_x, gap_y = dx.abs() - mean(width), dy.abs() - mean(height)
    near = torch.exp(-4 * distance)
    return torch.stack([dx, dy, distance, near, gap_x, gap_y, difference(extent)], 3)


def _append_true(valid: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M1"]:
    return functional.pad(valid, (0, 1), value=True)


@dataclass(frozen=True)
class GroundingTask(Task):
    """Training task with the loss `contrastive + alignment_weight * alignment` per query, which is
    also used for mining."""

    alignment_weight: float
    precision: Precision = "fp32"
    mining: Mining | None = None  # pyrefly: ignore[bad-override] (a field here, a property there)

    def compute_losses(
        self, model: GroundingModel, batch: QueryBatch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the losses of a batch at once.

        Args:
            model: The grounding model.
            batch: Queries.
            detach: Not used, since there is only one term.

        Yields:
            Sums over queries and their count; nothing for an empty batch.
        """
        if not len(batch.mask_image):
            return
        scores = score_batch(model, batch, self.precision)
        losses = relevance_losses(scores, batch.is_target, batch.mask_valid)
        by_query = losses.contrastive + self.alignment_weight * losses.alignment
        best = scores.detach().argmax(1, keepdim=True)
        absent = ~batch.is_target.any(1, keepdim=True)
        correct = torch.cat([batch.is_target, absent], 1).gather(1, best)
        yield LossSums(
            loss=(by_query * batch.weights[batch.mask_image]).sum(),
            count=by_query.new_full((), len(by_query)),
            parts={
                "contrastive": losses.contrastive.detach().sum(),
                "alignment": losses.alignment.detach().sum(),
                "accuracy": correct.to(by_query.dtype).sum(),
            },
            per_mask=by_query.detach(),
            first=0,
            image=batch.mask_image,
        )


def score_batch(
    model: GroundingModel, batch: QueryBatch, precision: Precision
) -> Float[Tensor, "Q M1"]:
    """Score the masks of a batch.

    Args:
        model: The grounding model; it computes the text features if its text model is trained.
        batch: Queries on the model's device.
        precision: Precision of the computation.

    Returns:
        Scores [Q, M + 1]; the last is that of "no mask fits".
    """
    device = batch.features.device
    with profile_range("forward"), autocast(precision, device):
        text = batch.text_features
        if text is None:
            text = model.text(model.text.tokenize(batch.texts).to(device))
        return model(batch.features, batch.mask_valid, text.features, text.attention_mask)
