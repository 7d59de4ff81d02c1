"""Text encoders against transformers, and MiniLM against sentence-transformers."""

import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, BertModel

from gigamask.plugins.grounding.text_encoders import MINILM, HuggingFace
from tests.plugins.grounding.texts import sentences, write

TEXTS = [
    "a red square left of the big blue circle",
    "square",
    "Two dogs are playing in the snow, and a third one watches them.",
    "zwölf Äpfel",
    "¿?",
]


def test_features_are_those_of_transformers(tmp_path):
    folder = write("bert", tmp_path)
    model = HuggingFace(str(folder), max_tokens=24).build()
    ours = model(model.tokenize(TEXTS))
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = BertModel.from_pretrained(folder).eval()(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        )
    valid = ours.attention_mask
    assert torch.equal(valid, tokens.attention_mask.bool())
    assert torch.equal(ours.features[valid], theirs.last_hidden_state[valid])


@pytest.fixture(scope="module")
def minilm() -> HuggingFace:
    folder = os.environ.get("GIGAMASK_MINILM")
    if not folder:
        pytest.skip(
            f"no weights: set GIGAMASK_MINILM to the folder of {MINILM.name} "
            f"(hf download {MINILM.name} --revision {MINILM.revision})"
        )
    return replace(MINILM, name=folder)


def test_minilm_finds_like_sentences_alike(minilm):
    model = minilm.build()
    texts = [
        "a man is eating food",
        "a man is eating a piece of bread",
        "the girl is carrying a baby",
        "a red square",
    ]
    pooled = sentences(model(model.tokenize(texts)))
    likeness = pooled @ pooled.T
    assert likeness[0, 1] > 0.7 > 0.2 > likeness[0, 2:].max()
    assert (model.dim, model.trainable, model.dtype) == (384, False, torch.float32)


def test_sentences_are_theirs(minilm):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = minilm.build()
    ours = sentences(model(model.tokenize(TEXTS)))
    theirs = sentence_transformers.SentenceTransformer(minilm.name, device="cpu").encode(
        TEXTS, convert_to_tensor=True, show_progress_bar=False
    )
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
