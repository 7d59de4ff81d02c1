"""A small transformer over words that is trained with the grounding model and needs no download."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gigamask.models.layers import MLPBlock
from gigamask.models.model import Model
from gigamask.plugins.grounding.attention import Attention
from gigamask.plugins.grounding.text_features import TextFeatures, TextModel, Tokens
from gigamask.plugins.grounding.vocabulary import words

BUCKET_BITS, HASHES = 10, 4
"""Bits of a hash, and hashes per word: each hash selects a part of the word's embedding, so that
two words rarely share more than a part."""


class WordLayer(nn.Module):
    """Words attend to each other."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention, self.mlp = Attention(dim, heads), MLPBlock(dim, 2 * dim, nn.GELU)

    def forward(
        self, x: Float[Tensor, "B T C"], valid: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T C"]:
        """Return the updated words.

        Args:
            x: Features of words.
            valid: False for padding.
        """
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, valid)
        return x + self.mlp(self.norms[1](x))


class WordModel(TextModel, Model):
    """Hashed word embeddings, position embeddings, and transformer layers.

    Hashing needs no vocabulary: words that were not trained get an embedding too.
    """

    trainable, dtype = True, torch.float32

    def __init__(self, dim: int, layers: int, heads: int, max_tokens: int) -> None:
        super().__init__()
        self.dim, self.max_tokens = dim, max_tokens
        self.embed_tokens = nn.Embedding(HASHES << BUCKET_BITS, dim // HASHES)
        self.pos_embed = nn.Embedding(max_tokens, dim)
        self.layers = nn.ModuleList(WordLayer(dim, heads) for _ in range(layers))

    @property
    def digest(self) -> str:
        """Not the weights', since features of a trained model are not stored."""
        return "trained"

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return a hash per word, padded at the end; words after the first `max_tokens` are left
        out, with a warning. A text without words is one word."""
        split = [words(text) for text in texts]
        for text, found in zip(texts, split, strict=True):
            if len(found) > self.max_tokens:
                self.warn_cut(text)
        rows = [
            torch.tensor(
                [
                    int.from_bytes(blake2b(word.encode(), digest_size=7).digest())
                    for word in found[: self.max_tokens] or [text]
                ]
            )
            for text, found in zip(texts, split, strict=True)
        ]
        lengths = torch.tensor([[len(row)] for row in rows])
        input_ids = pad_sequence(rows, batch_first=True)
        return Tokens(input_ids, torch.arange(input_ids.shape[1]) < lengths)

    def cut_note(self, text: str) -> str:
        """Return how many words of a text are read; "" if all are."""
        count, limit = len(words(text)), self.max_tokens
        return f"only its first {limit} of {count:,} words are read" if count > limit else ""

    def forward(self, tokens: Tokens) -> TextFeatures:
        """Return the features of words."""
        tokens = tokens.to(self.pos_embed.weight.device)
        x = self.embed_tokens(_buckets(tokens.input_ids)).flatten(2)
        x = x + self.pos_embed.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, tokens.attention_mask)
        return TextFeatures(x.float(), tokens.attention_mask)


def _buckets(ids: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T H"]:
    """Return the rows of the embedding that a word's hash selects."""
    place = torch.arange(HASHES, device=ids.device)
    parts = ids[..., None] >> (BUCKET_BITS * place)
    return parts % (1 << BUCKET_BITS) + (place << BUCKET_BITS)
