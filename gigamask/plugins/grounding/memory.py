"""Memory for training a grounding model on one GPU, part by part.

Weights, gradients and optimizer state are counted on models on the meta device. Activations come
from a dry run of the real step with fake tensors: transformers' own model with peft's adapters,
the grounding model, and the frozen image encoder without gradients. A 4-bit matrix is dequantized
for each matrix product, forward and backward, and the copy is not kept.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gigamask.distributed.precision import HALF_DTYPES
from gigamask.errors import check_range
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.plugins.grounding import text_models
from gigamask.plugins.grounding.model import GroundingModel
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import HuggingFace, require
from gigamask.profiling.dry_run import Device, fake_tensors, to_fake
from gigamask.profiling.gpus import GPUS
from gigamask.profiling.held_bytes import held_bytes
from gigamask.profiling.memory_plan import GIB
from gigamask.training.optim import AdamW

LLAMA_2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
"""Shapes of Llama 2 7B, from the config.json of meta-llama/Llama-2-7b-hf."""


@dataclass(frozen=True)
class GroundingSetup:
    """Grounding training with a text model's adapters, with `queries` texts per image.

    With `vision=None`, image embeddings are read from disk. `model.text_dim` is the text model's.
    """

    text: HuggingFace
    vision: SamConfig | None
    images: int
    queries: int
    masks: int
    model: GroundingModelConfig
    optimizer: AdamW

    def check(self) -> None:
        """Raise `GigamaskError` if a size is invalid."""
        check_range("--tokens", self.text.max_tokens, 1)
        for name in ("images", "queries", "masks"):
            check_range(f"--{name}", getattr(self, name), 1)


def plan(setup: GroundingSetup, spare_gib: float = 1.5) -> dict[str, Any]:
    """Return the bytes of each part, and the GPUs that have room for all of them.

    Args:
        setup: The training to plan.
        spare_gib: GiB of a GPU to keep free.

    Returns:
        JSON-compatible data; `activations` is the peak of a step above the other parts.
    """
    setup.check()
    require("transformers", "the plan of a language model", "grounding")
    text, vision, optimizer = setup.text, setup.vision, setup.optimizer
    base = text_model(text)
    parameters = sum(each.numel() for each in base.parameters())
    prepare(base, text)
    with torch.device("meta"):
        model = GroundingModel(replace(setup.model, text_dim=base.config.hidden_size))
    adapters, model_parameters = trained(base), trained(model)
    half = HALF_DTYPES.get(text.precision, torch.float32)
    image_bytes, image_peak = dry_run_images(vision, half, setup.images) if vision else (0, 0)
    side = vision.image_size if vision else 1024
    held = {
        "vision encoder": image_bytes,
        "language model": model_bytes(base),
        "gradients": sum(each.nbytes for each in adapters),
        "optimizer": optimizer_bytes(optimizer, adapters),
        "grounding model": 2 * model_bytes(model) + optimizer_bytes(optimizer, model_parameters),
        "masks": 2 * setup.images * setup.masks * side**2,
    }
    counts = {
        "images": setup.images,
        "queries": setup.queries,
        "tokens": text.max_tokens,
        "masks": setup.masks,
    }
    text_peak = dry_run_texts(base, model, counts)
    held["activations"] = max(image_peak, text_peak)
    total = sum(held.values())
    return {
        **counts,
        "precision": text.precision,
        "four_bit": text.four_bit,
        "lora_rank": text.lora_rank,
        "parameters": {
            "vision encoder": parameters_of(vision),
            "language model": parameters,
            "adapters": sum(each.numel() for each in adapters),
            "grounding model": sum(each.numel() for each in model_parameters),
        },
        "bytes": held,
        "total_bytes": total,
        "peak_bytes": {"images": image_peak, "texts": text_peak},
        "spare_gib": spare_gib,
        "gpus": {
            gpu.name: fit(text.precision, gpu.tflops, total, (gpu.gib - spare_gib) * GIB)
            for gpu in GPUS
        },
    }


def fit(precision: str, tflops: Mapping[str, float], total: int, room: float) -> str:
    """Return `fits`, `too small`, or that the GPU lacks the precision.

    Args:
        precision: `bf16`, `fp16` or `fp32`.
        tflops: Peak of the GPU by precision.
        total: Bytes needed.
        room: Bytes available.
    """
    if precision not in tflops:
        return f"no {precision}"
    return "fits" if total <= room else "too small"


def table(found: Mapping[str, Any]) -> str:
    """Format a plan as plain text, in GB."""
    parameters = found["parameters"]
    lines = [
        f"language model of {parameters['language model'] / 1e6:,.1f} M parameters without its "
        f"head, {'4-bit' if found['four_bit'] else found['precision']}; adapters of rank "
        f"{found['lora_rank']}, {parameters['adapters'] / 1e6:,.1f} M",
        f"{found['images']} images, {found['queries']} queries each, {found['tokens']} tokens, "
        f"{found['masks']} masks per image; {found['precision']}",
        "",
    ]
    lines += [f"{part:18}{held / 1e9:9.2f} GB" for part, held in found["bytes"].items()]
    lines += [f"{'total':18}{found['total_bytes'] / 1e9:9.2f} GB", ""]
    lines.append(f"with {found['spare_gib']:g} GiB kept free:")
    gpus = found["gpus"]
    for verdict in dict.fromkeys(gpus.values()):
        names = ", ".join(name for name, each in gpus.items() if each == verdict)
        lines.append(f"  {verdict:10}{names}")
    return "\n".join(lines)


class FourBitLinear(nn.Module):
    """Stand-in for bitsandbytes' layer: packed weights, dequantized for each matrix product."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        shape = layer.weight.shape
        size = nf4_bytes(layer.weight.numel())
        packed = torch.empty(size, dtype=torch.uint8, device="meta")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), layer.bias
        self._shape = shape if isinstance(layer, nn.Linear) else shape[::-1]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dequantized weights."""
        return _WidenedProduct.apply(x, self.bias, self._shape)


class _WidenedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
        ctx.shape = shape
        return functional.linear(x, torch.empty(shape, dtype=x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ torch.empty(ctx.shape, dtype=gradients[0].dtype), None, None


def nf4_bytes(elements: int) -> int:
    """Return the bytes of a matrix in bitsandbytes' NF4 with double quantisation.

    Half a byte per element, an 8-bit scale per 64 elements, a 32-bit scale per 256 of those scales,
    their mean, and two code tables per matrix.
    """
    scales = math.ceil(elements / 64)
    return math.ceil(elements / 2) + scales + 4 * math.ceil(scales / 256) + 4 + 4 * 16 + 4 * 256


def text_model(encoder: HuggingFace) -> Any:
    """Return the text part of a language model on the meta device; `7b` is Llama 2's shapes."""
    from transformers import AutoConfig, LlamaConfig

    config = LlamaConfig(**LLAMA_2_7B)
    if encoder.name != "7b":
        folder = encoder.folder()
        with text_models.loading_errors(encoder.name), text_models.quiet():
            found = AutoConfig.from_pretrained(folder, local_files_only=True)
            config = found.get_text_config()
    config.use_cache = False
    with text_models.quiet():
        half = HALF_DTYPES.get(encoder.precision, torch.float32)
        return text_models.meta_model(config, half).eval()


def prepare(base: Any, encoder: HuggingFace) -> None:
    """Freeze a language model and add adapters, 4-bit layers and checkpointing, in place.

    Args:
        base: The text model on the meta device.
        encoder: Settings that select which of these to add.
    """
    base.requires_grad_(False)
    if encoder.recompute:
        text_models.enable_checkpointing(base)
    if encoder.lora_rank:
        text_models.add_lora(base, encoder, seed=0)
    if encoder.four_bit:
        for module, name, layer in four_bit_layers(base):
            setattr(module, name, FourBitLinear(layer))


def four_bit_layers(base: Any) -> list[tuple[nn.Module, str, Any]]:
    """Return the linear layers stored in 4 bits, as parent module, name and layer.

    Adapters and modules that transformers keeps in float32 are left out.
    """
    from transformers.pytorch_utils import Conv1D

    kept = set(base._keep_in_fp32_modules or ())
    return [
        (module, name, layer)
        for path, module in base.named_modules()
        if not path.endswith((".lora_A", ".lora_B"))
        for name, layer in module.named_children()
        if isinstance(layer, nn.Linear | Conv1D) and name not in kept
    ]


def parameters_of(config: SamConfig | None) -> int:
    """Return the number of parameters of an image encoder."""
    if config is None:
        return 0
    return sum(each.numel() for each in build_model(config, 0, "meta").image_encoder.parameters())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers."""
    return held_bytes((*model.parameters(), *model.buffers()))


def optimizer_bytes(optimizer: AdamW, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of optimizer state: `state_bytes`, or else two moments and a step count.

    Args:
        optimizer: The optimizer.
        parameters: The trained parameters.
    """
    sizes = [(optimizer.state_bytes(each.numel()), each.nbytes) for each in parameters]
    return sum(2 * size + 4 if state is None else state for state, size in sizes)


def dry_run_images(
    config: SamConfig, dtype: torch.dtype, images: int, device: Device = "cuda"
) -> tuple[int, int]:
    """Return the bytes of an image encoder, and the peak above them while it embeds images.

    Args:
        config: Sizes of the model.
        dtype: Precision of its weights.
        images: Number of images embedded at a time.
        device: The device to plan for.
    """
    # Fake tensors cannot be converted.
    encoder = build_model(config, 0, "meta").image_encoder.to(dtype)
    with fake_tensors(device) as tracker:
        to_fake(encoder, device)
        before, _ = tracker.current, tracker.take_peak()
        with torch.no_grad():
            encoder(torch.zeros(images, 3, config.image_size, config.image_size, dtype=dtype), None)
        return model_bytes(encoder), tracker.take_peak() - before


def dry_run_texts(
    base: Any, model: GroundingModel, counts: Mapping[str, int], device: Device = "cuda"
) -> int:
    """Return the peak of a step of both models, above their weights and gradients.

    Texts are treated as padded, since a fake attention mask has no values that show otherwise.

    Args:
        base: The prepared text model, on the meta device.
        model: The grounding model, on the meta device.
        counts: `images`, `queries` per image, `tokens` per text and `masks` per image.
        device: The device to plan for.

    Returns:
        Bytes.
    """
    texts = counts["images"] * counts["queries"]
    with fake_tensors(device) as tracker:
        for part in (base, model):
            to_fake(part, device)
            for parameter in trained(part):
                parameter.grad = torch.zeros_like(parameter)
        before, _ = tracker.current, tracker.take_peak()
        ids = torch.zeros(texts, counts["tokens"], dtype=torch.int64)
        features = torch.zeros(texts, counts["masks"], sum(model.config.parts))
        valid = torch.ones(features.shape[:2], dtype=torch.bool)
        with torch.set_grad_enabled(bool(trained(base))):
            out = base(input_ids=ids, attention_mask=torch.ones_like(ids))
            words = out.last_hidden_state.float()
        model(features, valid, words, ids == 0).sum().backward()
        return tracker.take_peak() - before
