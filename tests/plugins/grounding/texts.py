"""Text models of a few thousand parameters, each a folder as Hugging Face's are, with a tokeniser
that knows a few words.
"""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = (
    "a the red green blue square circle triangle left right of above below big small and to"
).split()
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
}


def tokeniser(first: str, last: str, padding_side: str) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokeniser of whole words, which puts these around a text where they are
    not empty."""
    known = {word: number for number, word in enumerate(["<pad>", "<unk>", "<s>", "</s>", *WORDS])}
    made = tokenizers.Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(each, known[each]) for each in (first, last) if each]
    made.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, (first, "$A", last))), special_tokens=around
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", padding_side=padding_side
    )


POSITIONS = {"max_position_embeddings": 24}
SEEN = SIZES | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
SEEN.pop("vocab_size")
BART = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
KINDS = {
    "bert": ("BertForMaskedLM", SIZES | POSITIONS, "<s>", "</s>"),
    "t5": (
        "T5ForConditionalGeneration",
        T5 | {"vocab_size": 32, "decoder_start_token_id": 0},
        "",
        "</s>",
    ),
    "bart": (
        "BartModel",
        BART | POSITIONS | {"vocab_size": 32, "d_model": 16, "dropout": 0.5},
        "<s>",
        "</s>",
    ),
    "clip": (
        "CLIPModel",
        {"text_config": SIZES | POSITIONS, "vision_config": SEEN, "projection_dim": 8},
        "<s>",
        "</s>",
    ),
    "siglip": (
        "SiglipModel",
        {"text_config": SIZES | POSITIONS, "vision_config": SEEN},
        "<s>",
        "</s>",
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"vocab_size": 32}, "", ""),
    "qwen3": (
        "Qwen3ForCausalLM",
        SIZES | {"num_key_value_heads": 1, "head_dim": 8},
        "",
        "",
    ),
    "llama": ("LlamaForCausalLM", SIZES, "<s>", ""),
}
"""The class in transformers, sizes, and the tokens before and after a text, of each kind."""


def write(kind: str, folder: Path, **changes) -> Path:
    """Writes a model of random weights, and returns its folder."""
    torch.manual_seed(0)
    name, sizes, first, last = KINDS[kind]
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():  # as they start, they would hardly tell words apart
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    side = "left" if kind in ("llama", "qwen3") else "right"
    tokeniser(first, last, side).save_pretrained(folder)
    return folder


def sentences(words):
    """Returns one feature a text, as sentence encoders pool: the mean of its tokens',
    of length 1."""
    valid = words.attention_mask[..., None]
    means = (words.features * valid).sum(1) / valid.sum(1)
    return torch.nn.functional.normalize(means)
