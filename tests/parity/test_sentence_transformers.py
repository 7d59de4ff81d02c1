"""MiniLM's sentences against those of sentence-transformers, which published it."""

import torch
from sentence_transformers import SentenceTransformer

from gigamask.grounding.text_encoders import MiniLm
from tests.texts import sentences

TEXTS = [
    "a red square left of the big blue circle",
    "square",
    "Two dogs are playing in the snow, and a third one watches them.",
    "zwölf Äpfel",
    "¿?",
]


def test_sentences_are_theirs():
    model = MiniLm().build()
    ours = sentences(model(model.tokenize(TEXTS)))
    theirs = SentenceTransformer(MiniLm().as_hugging_face().name, device="cpu").encode(
        TEXTS, convert_to_tensor=True, show_progress_bar=False
    )
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
