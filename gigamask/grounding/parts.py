"""What the parts of a grounding hold: models without numbers enter, bytes leave, of what stands and of what a step holds beside.

The step is the real one, of transformers' own model with peft's adapters, on tensors that take no memory (`memory.pretence`): of images without
gradients, of texts and head with them. In 4 bits a linear layer is widened to be multiplied, forward and backward, and keeps nothing of that.

Not here: which parts, and the table (`grounding.budget`).
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gigamask.grounding import text_models
from gigamask.grounding.text_encoders import HuggingFace
from gigamask.memory.pretence import Device, embody, stage
from gigamask.memory.sample import held_bytes
from gigamask.model.sizes import SamSpec
from gigamask.model.start import build
from gigamask.parallel.precision import HALVES
from gigamask.train.optim import AdamW

LLAMA_2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
"""Llama 2's 7B (Touvron et al. 2023), as its config.json has it (meta-llama/Llama-2-7b-hf)."""
EMBEDDING_DIM = 256


@dataclass(frozen=True)
class Head:
    """A cross-modal head by its shape: each mask's embedding attends to the other masks and to the words, in blocks of the usual four-fold MLP."""

    dim: int = 256
    layers: int = 2

    def build(self, text_dim: int) -> "Crossing":
        """Returns it without numbers."""
        with torch.device("meta"):
            return Crossing(text_dim, self)


class Crossing(nn.Module):
    """Scores each mask for each token of a text."""

    def __init__(self, text_dim: int, shape: Head) -> None:
        super().__init__()
        self.masks, self.words = nn.Linear(EMBEDDING_DIM, shape.dim), nn.Linear(text_dim, shape.dim)
        block = {"dim_feedforward": 4 * shape.dim, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerDecoderLayer(shape.dim, max(1, shape.dim // 64), **block) for _ in range(shape.layers))

    def forward(self, masks: Tensor, words: Tensor) -> Tensor:
        masks, words = self.masks(masks), self.words(words)
        for block in self.blocks:
            masks = block(masks, words)
        return torch.einsum("bmd,btd->bmt", masks, words)


class FourBit(nn.Module):
    """Stands for bitsandbytes' layer: packed weights that are widened whenever they are multiplied with."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nf4_bytes(layer.weight.numel()), dtype=torch.uint8, device="meta"), requires_grad=False)
        self.bias, self._shape = layer.bias, layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]

    def forward(self, x: Tensor) -> Tensor:
        return _Widened.apply(x, self.bias, self._shape)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
        ctx.shape = shape
        return functional.linear(x, torch.empty(shape, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ torch.empty(ctx.shape, dtype=gradients[0].dtype), None, None


def nf4_bytes(elements: int) -> int:
    """Returns what a matrix of so many elements takes as bitsandbytes' NF4 with double quantisation: half a byte each; of every 64 a scale of 8 bits,
    of every 256 of these one of 32; their mean, and the two tables that codes mean numbers by, which every matrix brings.
    """
    scales = math.ceil(elements / 64)
    return math.ceil(elements / 2) + scales + 4 * math.ceil(scales / 256) + 4 + 4 * 16 + 4 * 256


def language(encoder: HuggingFace) -> Any:
    """Returns the part of a language model that reads texts, without numbers; `7b` is Llama 2's."""
    from transformers import AutoConfig, LlamaConfig

    config = LlamaConfig(**LLAMA_2_7B)
    if encoder.name != "7b":
        folder = encoder.folder()
        with text_models.loading_errors(encoder.name), text_models.quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    config.use_cache = False
    with text_models.quiet():
        return text_models.meta_model(config, HALVES.get(encoder.precision, torch.float32)).eval()


def matrices(base: Any) -> tuple[list[int], list[int]]:
    """Returns the sizes of the matrices that 4 bits are for, and of all other parameters."""
    layers = {module.weight for _, _, module in linear(base)}
    return [each.numel() for each in layers], [each.numel() for each in base.parameters() if each not in layers]


def adapters(base: Any, encoder: HuggingFace) -> list[int]:
    """Returns the sizes of the adapters' matrices."""
    shapes = [base.get_submodule(name).weight.shape for name in text_models.lora_targets(base, encoder)]
    return [encoder.lora_rank * side for shape in shapes for side in shape]


def prepare(base: Any, encoder: HuggingFace, train_all: bool) -> None:
    """Makes a language model what it is in training: frozen, with adapters, in 4 bits, its blocks computed again; or trained as a whole."""
    base.requires_grad_(train_all)
    if encoder.recompute:
        text_models.enable_checkpointing(base)
    if encoder.lora_rank and not train_all:
        text_models.add_lora(base, encoder, seed=0)
    if encoder.four_bit:
        for module, name, layer in linear(base):
            setattr(module, name, FourBit(layer))


def linear(base: Any) -> list[tuple[nn.Module, str, Any]]:
    """Returns the linear layers that 4 bits are for, each with the module it is in and its name there: not adapters, nor what transformers keeps in
    float32.
    """
    from transformers.pytorch_utils import Conv1D

    kept = set(base._keep_in_fp32_modules or ())
    modules = [(path, module) for path, module in base.named_modules() if not path.endswith((".lora_A", ".lora_B"))]
    children = [(module, name, layer) for _, module in modules for name, layer in module.named_children()]
    return [each for each in children if isinstance(each[2], nn.Linear | Conv1D) and each[1] not in kept]


def parameters_of(spec: SamSpec | None) -> int:
    """Returns how many parameters an image encoder has."""
    return sum(each.numel() for each in build(spec, 0, "meta").image_encoder.parameters()) if spec else 0


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def standing(model: nn.Module) -> int:
    """Returns the bytes of parameters and buffers."""
    return held_bytes((*model.parameters(), *model.buffers()))


def moments(optimizer: AdamW, parameters: Iterable[Tensor]) -> int:
    """Returns what AdamW keeps of parameters: two numbers of theirs and the count of its steps, or what its rule says."""
    rule = getattr(optimizer, "state_bytes", None)
    return sum(rule(each.numel()) if rule else 2 * each.nbytes + 4 for each in parameters)


def see(spec: SamSpec, half: torch.dtype, images: int, device: Device = "cuda") -> tuple[int, int]:
    """Returns the bytes of an image encoder in that type, and the most it holds beside while it embeds so many images without gradients."""
    with stage(device) as book:
        encoder = embody(build(spec, 0, "meta").image_encoder.to(half), device)
        stood, _ = book.now, book.since()
        with torch.no_grad():
            encoder(torch.zeros(images, 3, spec.input_side, spec.input_side, dtype=half), None)
        return standing(encoder), book.since() - stood


def read(base: Any, head: Crossing, counts: Mapping[str, int], autocast: bool, device: Device = "cuda") -> int:
    """Returns the most that a step of texts and head holds beside what stands: `images`, `queries` of each of so many `tokens`, `masks`."""
    texts = counts["images"] * counts["queries"]
    with stage(device) as book:
        for model in (base, head):
            embody(model, device)
            for parameter in trained(model):
                parameter.grad = torch.zeros_like(parameter)
        stood, _ = book.now, book.since()
        ids, pooled = torch.zeros(texts, counts["tokens"], dtype=torch.int64), torch.zeros(texts, counts["masks"], EMBEDDING_DIM)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext(), torch.set_grad_enabled(bool(trained(base))):
            words = base(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()
        head(pooled, words).sum().backward()
        return book.since() - stood
