"""The relevance network: which of an image's masks a text means.

Enters: what is known of each mask (`model.sizes.RelevanceSpec` lists it) and a text's token features. Leaves: a score for each mask, and one for
"nothing here fits", which stands last as one more candidate: what scores above it fits.

Masks read the text, then each other with what lies between them (direction, distance, sizes, overlap), so that "left of the red box" may be answered;
what is left of them is compared with each token, and the tokens' likenesses are weighed.

Not here: what masks are described by (`grounding.gallery`), the text side (`grounding.text`), the loss (`losses.relevance`).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from gigamask.model.layers import MlpBlock
from gigamask.model.sizes import COLOURS, PLACES, RelevanceSpec

BETWEEN = 7
"""Numbers that tell how one mask lies to another."""
PAIR_DIM = 32
"""Width of what is made of them."""
OUTSIDE = -1e4
"""Logit of what is not there: nothing of it is left, also in half precision."""


class Reading(nn.Module):
    """Attention of one sequence to another."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B N C"], read: Float[Tensor, "B T C"], there: Bool[Tensor, "B T"]) -> Float[Tensor, "B N C"]:
        query = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(read).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        told = functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
        return self.out(told.transpose(1, 2).flatten(2))


class Relating(nn.Module):
    """Attention among masks: how two lie to each other is part of the logit and of what is read."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.between = nn.Linear(BETWEEN, PAIR_DIM)
        self.bias, self.told = nn.Linear(PAIR_DIM, heads, bias=False), nn.Linear(heads * PAIR_DIM, dim)

    def forward(self, x: Float[Tensor, "B N C"], between: Float[Tensor, "B N N G"], there: Bool[Tensor, "B N"]) -> Float[Tensor, "B N C"]:
        query, key, value = self.query_key_value(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        pair = functional.gelu(self.between(between))
        logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + self.bias(pair).permute(0, 3, 1, 2)
        shares = logits.masked_fill(~there[:, None, None], OUTSIDE).softmax(3)
        told = self.told(torch.einsum("bhij,bijg->bihg", shares, pair).flatten(2))
        return self.out((shares @ value).transpose(1, 2).flatten(2) + told)


class Layer(nn.Module):
    """Masks read the text, each other, and think; the text reads the masks."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.reading, self.relating, self.hearing = Reading(dim, heads), Relating(dim, heads), Reading(dim, heads)
        self.mlp = MlpBlock(dim, 2 * dim, nn.GELU)

    def forward(
        self,
        masks: Float[Tensor, "B N C"],
        words: Float[Tensor, "B T C"],
        between: Float[Tensor, "B N N G"],
        there: Bool[Tensor, "B N"],
        spoken: Bool[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B N C"], Float[Tensor, "B T C"]]:
        masks = masks + self.reading(self.norms[0](masks), words, spoken)
        masks = masks + self.relating(self.norms[1](masks), between, there)
        masks = masks + self.mlp(self.norms[2](masks))
        return masks, words + self.hearing(self.norms[3](words), masks, there)


class Relevance(nn.Module):
    """Scores how relevant each mask of an image is to a text. `text` is the text model where it learns along, and None where it is another's."""

    text: Any

    def __init__(self, spec: RelevanceSpec) -> None:
        super().__init__()
        self.spec, self.text = spec, None
        dim = spec.dim
        self.look_norm, self.look = nn.LayerNorm(spec.embedding_dim), nn.Linear(spec.embedding_dim, dim)
        self.colour, self.geometry = MlpBlock(COLOURS, dim, nn.GELU, dim), MlpBlock(PLACES, dim, nn.GELU, dim)
        self.outline = MlpBlock(spec.crop_side**2, dim, nn.GELU, dim)
        self.none = nn.Parameter(torch.empty(dim))
        self.word_norm, self.word = nn.LayerNorm(spec.text_dim), nn.Linear(spec.text_dim, dim)
        self.layers = nn.ModuleList(Layer(dim, spec.heads) for _ in range(spec.layers))
        # Without biases: what they added to every mask's score alike would change no answer.
        self.mask_norm, self.words_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim)
        self.mask_out, self.word_out, self.weigh = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim), nn.Linear(dim, 1, bias=False)

    def forward(
        self,
        features: Float[Tensor, "B M F"],
        there: Bool[Tensor, "B M"],
        words: Float[Tensor, "B T D"],
        spoken: Bool[Tensor, "B T"],
    ) -> Float[Tensor, "B M1"]:
        """Returns each mask's score and, last, that of none; masks that are not `there` score lowest. At least one token must be `spoken`."""
        similarity, weights = self.similarity(features, there, words, spoken)
        return (similarity * weights[:, None]).sum(2).masked_fill(~_and_none(there), OUTSIDE)

    def similarity(
        self,
        features: Float[Tensor, "B M F"],
        there: Bool[Tensor, "B M"],
        words: Float[Tensor, "B T D"],
        spoken: Bool[Tensor, "B T"],
    ) -> tuple[Float[Tensor, "B M1 T"], Float[Tensor, "B T"]]:
        """Returns how alike each mask (and none, last) and each token are, and how much each token of a text counts."""
        look, colour, place, outline = features.split(self.spec.parts, 2)
        seen = self.look(self.look_norm(look)) + self.colour(colour) + self.geometry(place) + self.outline(outline)
        masks = torch.cat([seen, self.none.to(seen.dtype).expand(len(seen), 1, -1)], 1)
        tokens, held = self.word(self.word_norm(words)), _and_none(there)
        between = functional.pad(lie(place), (0, 0, 0, 1, 0, 1))
        for layer in self.layers:
            masks, tokens = layer(masks, tokens, between, held, spoken)
        masks, tokens = self.mask_norm(masks), self.words_norm(tokens)
        weights = self.weigh(tokens)[..., 0].masked_fill(~spoken, OUTSIDE).softmax(1)
        return torch.einsum("bmd,btd->bmt", self.mask_out(masks), self.word_out(tokens)) * self.spec.dim**-0.5, weights


def lie(place: Float[Tensor, "B M P"]) -> Float[Tensor, "B M M G"]:
    """Returns how mask j lies to mask i: right and below of it, how far, the gaps between their boxes, which one is larger, in shares of the image.

    `place` begins with the box's centre, width and height, and the area's square root.
    """
    x, y, width, height, extent = (place[..., k] for k in range(5))

    def from_to(values: Tensor) -> Tensor:
        return values[:, None] - values[:, :, None]

    across, down = from_to(x), from_to(y)
    half_width, half_height = ((each[:, None] + each[:, :, None]) / 2 for each in (width, height))
    distance = (across.square() + down.square()).sqrt()
    near = torch.exp(-4 * distance)
    return torch.stack([across, down, distance, near, across.abs() - half_width, down.abs() - half_height, from_to(extent)], 3)


def _and_none(there: Bool[Tensor, "B M"]) -> Bool[Tensor, "B M1"]:
    return functional.pad(there, (0, 1), value=True)
