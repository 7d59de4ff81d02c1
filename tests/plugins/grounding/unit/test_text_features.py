"""Features are computed once, kept, and those of a damaged file are computed anew."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gigamask.plugins.grounding.text_features import (
    TextFeatures,
    TextFeatureStore,
    TextModel,
    Tokens,
)
from tests.plugins.grounding.asked import DAMAGES


class Letters(TextModel):
    """Each letter is a token, and its feature its number; notes what it has read."""

    def __init__(self, trainable: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dim, self.trainable, self.dtype, self.read = 2, trainable, dtype, []

    @property
    def digest(self) -> str:
        return "letters"

    def tokenize(self, texts):
        self.read.append(list(texts))
        rows = [torch.tensor([ord(letter) for letter in text]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Tokens(ids, ids > 0)

    def forward(self, tokens):
        return TextFeatures(
            torch.stack([tokens.input_ids, -tokens.input_ids], -1).float(), tokens.attention_mask
        )


def test_words_are_padded_together():
    words = TextFeatureStore(Letters()).get(["b", "abc", "b"])
    assert words.features[..., 0].tolist() == [[98, 0, 0], [97, 98, 99], [98, 0, 0]]
    assert words.attention_mask.sum(1).tolist() == [1, 3, 1]
    learned = torch.ones(1, requires_grad=True)
    (words.features * learned).sum().backward()  # nothing of inference mode is left in them


def test_no_text_has_no_words():
    words = TextFeatureStore(Letters()).get([])
    assert (tuple(words.features.shape), tuple(words.attention_mask.shape)) == ((0, 0, 2), (0, 0))


def test_nothing_is_computed_twice_and_texts_of_like_length_are_computed_together():
    model = Letters()
    store = TextFeatureStore(model, batch_size=2)
    told = []
    store.fill(["ccc", "a", "bb", "ccc", "aa", "dddd"], lambda *counts: told.append(counts))
    assert model.read == [["a", "aa"], ["bb", "ccc"], ["dddd"]]
    assert told == [(2, 5), (4, 5), (5, 5)]
    store.get(["a", "e", "dddd"])
    assert model.read[3:] == [["e"]]
    assert len(store) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_is_read_by_the_next(tmp_path, dtype):
    first = TextFeatureStore(Letters(dtype=dtype), tmp_path / "new", batch_size=1)
    wanted = first.get(["a", "née", "ccc"])
    assert os.listdir(tmp_path / "new") == ["letters.words"]
    model = Letters(dtype=dtype)
    found = TextFeatureStore(model, tmp_path / "new").get(["a", "née", "ccc"])
    assert model.read == []
    assert torch.equal(found.features, wanted.features)
    assert torch.equal(found.attention_mask, wanted.attention_mask)
    assert found.features.dtype == torch.float32


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_anew(tmp_path, damage):
    TextFeatureStore(Letters(), tmp_path).get(["abc"])
    path = tmp_path / "letters.words"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    model = Letters()
    assert TextFeatureStore(model, tmp_path).get(["abc"]).features[0, 0, 0] == 97
    assert model.read == [["abc"]]
    assert path.read_bytes() == whole


def test_few_writes_however_many_batches(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(os, "replace", lambda *_: written.append(1))
    TextFeatureStore(Letters(), tmp_path, batch_size=1).fill(
        [f"text {number}" for number in range(100)]
    )
    assert len(written) <= 8


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.warns(
        UserWarning,
        match=r"letters.words: no features.*free space",
    ):
        words = TextFeatureStore(Letters(), tmp_path / "file").get(["a"])
    assert words.features[0, 0, 0] == 97

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        TextFeatureStore(Letters(), tmp_path).get(["a"])
    assert [each for each in Path(tmp_path).iterdir() if each.name != "file"] == []


def test_a_model_that_learns_has_no_features_to_keep():
    with pytest.raises(ValueError, match="trainable"):
        TextFeatureStore(Letters(trainable=True))
