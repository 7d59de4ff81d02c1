"""Text models of a few thousand parameters, each a folder as Hugging Face's are, with a tokeniser
that knows a few words.
"""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = (
    "a",
    "the",
    "red",
    "green",
    "blue",
    "square",
    "circle",
    "triangle",
    "left",
    "right",
    "of",
    "above",
    "below",
    "big",
    "small",
    "and",
    "to",
)
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
}


def tokeniser(
    first: str, last: str, padding_side: str = "right"
) -> transformers.PreTrainedTokenizerFast:
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


def write(kind: str, folder: Path, **changes) -> Path:
    """Writes a model of random weights, and returns its folder."""
    torch.manual_seed(0)
    sizes, ends = SIZES | changes, {"first": "<s>", "last": "</s>"}
    seen = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
    }
    if kind == "bert":
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, max_position_embeddings=24)
        )
    elif kind == "t5":
        ends = {"first": "", "last": "</s>"}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=32,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
            )
        )
    elif kind == "bart":
        shape = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
        }
        model = transformers.BartModel(
            transformers.BartConfig(
                vocab_size=32, d_model=16, max_position_embeddings=24, dropout=0.5, **shape
            )
        )
    elif kind == "clip":
        model = transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={**sizes, "max_position_embeddings": 24},
                vision_config=seen,
                projection_dim=8,
            )
        )
    elif kind == "siglip":
        model = transformers.SiglipModel(
            transformers.SiglipConfig(
                text_config={**sizes, "max_position_embeddings": 24}, vision_config=seen
            )
        )
    elif kind == "gpt2":
        ends = {"first": "", "last": ""}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=24)
        )
    elif kind == "qwen3":
        ends = {"first": "", "last": ""}
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8)
        )
    else:
        ends = {"first": "<s>", "last": ""}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # as they start, they would hardly tell words apart
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tokeniser(
        **ends, padding_side="left" if kind in ("llama", "qwen3") else "right"
    ).save_pretrained(folder)
    return folder


def sentences(words):
    """Returns one feature a text, as sentence encoders pool: the mean of its tokens',
    of length 1."""
    means = (words.features * words.attention_mask[..., None]).sum(1) / words.attention_mask.sum(
        1, keepdim=True
    )
    return torch.nn.functional.normalize(means)
