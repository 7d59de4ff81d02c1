"""The transformer over words: what a text's words become, and what the rest of a batch changes."""

import pytest
import torch

from gigamask.plugins.grounding.text_encoders import WordTransformer
from gigamask.plugins.grounding.word_model import _buckets
from tests.errors import error_line

TEXTS = ["a red square", "the big blue circle left of the small green triangle", "circle", "!!!"]
SMALL = WordTransformer(dim=16, layers=2, heads=2, max_tokens=8)


def read(model, texts=TEXTS):
    model.is_warned = True
    with torch.no_grad():
        return model(model.tokenize(texts))


def test_a_word_is_a_token_and_long_texts_are_cut():
    model = SMALL.build()
    with pytest.warns(UserWarning, match="first 8 of 10 words.*the big blue"):
        tokens = model.tokenize(TEXTS)
    assert [model.cut_note(text) != "" for text in TEXTS] == [False, True, False, False]
    assert tokens.attention_mask.sum(1).tolist() == [3, 8, 1, 1]
    again = model.tokenize(["Circle!"]).input_ids
    assert torch.equal(again[0, 0], tokens.input_ids[2, 0])
    assert torch.equal(tokens.input_ids[1, 3], tokens.input_ids[2, 0])
    assert (model.dim, model.trainable, model.dtype) == (16, True, torch.float32)


def test_what_stands_beside_a_text_changes_nothing():
    model = SMALL.build()
    together = read(model)
    for row, text in enumerate(TEXTS):
        alone = read(model, [text]).features[0]
        assert torch.allclose(together.features[row, : len(alone)], alone, atol=1e-5)


def test_the_order_of_words_and_their_neighbours_count():
    model = SMALL.build()
    first, second, other = read(model, ["red box", "box red", "blue box"]).features
    assert not torch.allclose(first[0], second[1], atol=1e-2)
    assert not torch.allclose(first[1], other[1], atol=1e-3)


def test_words_rarely_share_an_embedding():
    model = SMALL.build()
    words = [f"word{number}" for number in range(2000)]
    parts = _buckets(model.tokenize(words).input_ids)[:, 0]
    assert parts.max() < model.embed_tokens.num_embeddings
    assert len({tuple(row) for row in parts.tolist()}) == len(words)


def test_weights_follow_from_the_seed():
    first, same, other = (SMALL.build(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert {tensor.device.type for tensor in SMALL.build("meta").parameters()} == {"meta"}


@pytest.mark.parametrize("change", [{"dim": 0}, {"dim": 18}, {"heads": 3}, {"max_tokens": 0}])
def test_sizes_that_cannot_be_built_are_named(change):
    [(name, value)] = change.items()
    with error_line(rf"{name}\b.*\b{value}\b"):
        WordTransformer(**change)
