"""What a training of grounding takes of one GPU: its parts enter, bytes of each leave, beside the budget of 13.3 GB that is often written.

Not here: what a part holds (`grounding.parts`), GPUs (`memory.gpus`), what a training of masks takes (`planning`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gigamask.faults import Fault
from gigamask.grounding import parts
from gigamask.grounding.parts import Head
from gigamask.grounding.text_encoders import HuggingFace, require
from gigamask.memory.gpus import GPUS
from gigamask.memory.planner import GIB
from gigamask.model.sizes import SamSpec, vit_h
from gigamask.parallel.precision import HALVES
from gigamask.train.optim import AdamW, AdamW8bit
from gigamask.train.run import at_least

GB, MILLION = 1e9, 1e6
WRITTEN = {
    "vision encoder": 2.0,
    "language model": 3.5,
    "gradients": 3.5,
    "optimizer": 1.0,
    "cross-modal head": 1.0,
    "masks": 0.3,
    "activations": 2.0,
}
"""The write-up's budget in GB: frozen, 7e9 parameters in 4 bits, gradients in fp16, 8-bit Adam, not said, 16 masks at float16, checkpointing."""
SEVEN = 7e9
"""Parameters of its language model."""


@dataclass(frozen=True)
class Ask:
    """What is trained: a head and adapters of a language model, or with `train_all` the whole of it, in float32 under autocast. It reads `queries`
    texts of each of `images` images; without `vision` the images' embeddings are there already.
    """

    text: HuggingFace = field(default_factory=lambda: HuggingFace("7b", "bf16", four_bit=True, lora_rank=16, recompute=True))
    train_all: bool = False
    vision: SamSpec | None = field(default_factory=vit_h)
    images: int = 1
    queries: int = 1
    masks: int = 16
    head: Head = field(default_factory=Head)
    optimizer: AdamW = field(default_factory=AdamW)

    def check(self) -> None:
        """Raises `Fault` for what cannot be trained."""
        at_least(1, tokens=self.text.max_tokens, images=self.images, queries=self.queries, masks=self.masks)
        if self.head.dim < 64 or self.head.dim % 64 or self.head.layers < 0:
            raise Fault(f"a head of {self.head.layers} layers of {self.head.dim}: its attention has heads of 64 channels; give a multiple of that")
        if self.train_all and self.text.four_bit:
            raise Fault("--train all in 4 bits: such numbers cannot take the small steps of a training; give --no-four-bit, or --train adapters")


def plan(ask: Ask, spare_gib: float = 1.5) -> dict[str, Any]:
    """Returns the bytes of each part, of which activations are the most that a step holds beside the others, and on which GPUs they fit."""
    ask.check()
    require("transformers", "the plan of a language model", "grounding")
    half = HALVES.get(ask.text.precision, torch.float32)
    text = replace(ask.text, precision="fp32") if ask.train_all else ask.text
    base = parts.language(text)
    matrices, others = parts.matrices(base)
    lora = parts.adapters(base, replace(text, lora_rank=text.lora_rank or 16))
    parts.prepare(base, text, ask.train_all)
    head = ask.head.build(base.config.hidden_size)
    ours, theirs = parts.trained(base), parts.trained(head)
    vision, seeing = parts.see(ask.vision, half, ask.images) if ask.vision else (0, 0)
    held = {
        "vision encoder": vision,
        "language model": parts.standing(base),
        "gradients": sum(each.nbytes for each in ours),
        "optimizer": parts.moments(ask.optimizer, ours),
        "cross-modal head": 2 * parts.standing(head) + parts.moments(ask.optimizer, theirs),
        "masks": 2 * ask.images * ask.masks * (ask.vision.input_side if ask.vision else 1024) ** 2,
    }
    counts = {"images": ask.images, "queries": ask.queries, "tokens": ask.text.max_tokens, "masks": ask.masks}
    reading = parts.read(base, head, counts, autocast=ask.train_all and half != torch.float32)
    held["activations"] = max(seeing, reading)
    total = sum(held.values())
    width = 4 if half == torch.float32 else 2
    return {
        **counts,
        "precision": ask.text.precision,
        "four_bit": ask.text.four_bit,
        "trained": "all" if ask.train_all else f"adapters of rank {text.lora_rank}" if text.lora_rank else "none",
        "parameters": {
            "vision encoder": parts.parameters_of(ask.vision),
            "language model": sum(matrices) + sum(others),
            "trained of the language model": sum(each.numel() for each in ours),
            "cross-modal head": sum(each.numel() for each in theirs),
        },
        "bytes": held,
        "total_bytes": total,
        "written_gb": WRITTEN,
        "step_bytes": {"images": seeing, "texts and head": reading},
        "ways": ways(matrices, others, lora, width, f"adapters of rank {text.lora_rank or 16}"),
        "remarks": remarks(),
        "spare_gib": spare_gib,
        "gpus": {gpu.name: fit(ask.text.precision, gpu.tflops, total, (gpu.gib - spare_gib) * GIB) for gpu in GPUS},
    }


def ways(matrices: list[int], others: list[int], lora: list[int], width: int, adapters: str) -> dict[str, dict[str, int]]:
    """Returns the language model's own bytes of weights, gradients and optimizer state if it were trained otherwise."""
    whole, small = sum(matrices) + sum(others), sum(lora)
    packed = sum(map(parts.nf4_bytes, matrices)) + width * sum(others)
    by_rule = AdamW8bit().state_bytes
    found = {
        "frozen, 4 bits": (packed, 0, 0),
        f"{adapters}, 4 bits, AdamW": (packed + 4 * small, 4 * small, sum(8 * each + 4 for each in lora)),
        f"{adapters}, {8 * width} bits, AdamW": (width * whole + 4 * small, 4 * small, sum(8 * each + 4 for each in lora)),
        "all, 32 bits, 8-bit AdamW": (4 * whole, 4 * whole, sum(map(by_rule, [*matrices, *others]))),
        "all, 32 bits, AdamW": (4 * whole, 4 * whole, sum(8 * each + 4 for each in [*matrices, *others])),
    }
    return {way: dict(zip(("weights", "gradients", "optimizer"), sizes, strict=True)) for way, sizes in found.items()}


def remarks() -> dict[str, str]:
    """Returns what the write-up's lines come to by what they say themselves, where that is something else."""
    vision, grown = 2 * parts.parameters_of(vit_h()) / GB, 2 * SEVEN / GB
    mask, image = 16 * 2 / GB, 100 * 1500 * 2250 / GB
    others = sum(WRITTEN.values()) - WRITTEN["gradients"] - WRITTEN["optimizer"]
    return {
        "vision encoder": f"ViT-H's has {vision:.2f} GB in half and {2 * vision:.2f} in float32",
        "gradients": f"7e9 in fp16 are {grown:.1f} GB, 3.5 would be in 4 bits; and weights of 4 bits cannot be trained: hence adapters beside them",
        "optimizer": f"8-bit Adam keeps 2 bytes a parameter, of 7e9 {grown:.1f} GB; 1.0 GB is of {GB / 2 / 1e9:.1f}e9",
        "cross-modal head": f"no size is stated; in float32 with AdamW, 16 bytes a parameter, 1.0 GB is of {GB / 16 / MILLION:.1f} M",
        "masks": f"16 in float16 are {mask * 1024**2:.2f} GB at 1024 x 1024, {mask * 1500 * 2250:.2f} at 1500 x 2250; 100 in uint8 are {image:.2f}",
        "activations": "neither images nor tokens are stated",
        "in all": f"{others + 2 * grown:.1f} GB with gradients and optimizer by their own words",
    }


def fit(precision: str, tflops: Mapping[str, float], total: int, room: float) -> str:
    """Returns whether a training fits a GPU: `fits`, `too small`, or that it cannot compute so."""
    if precision not in tflops:
        return f"no {precision}"
    return "fits" if total <= room else "too small"


def table(found: Mapping[str, Any]) -> str:
    """Returns a plan as plain text, in GB."""
    parameters = found["parameters"]
    bits = "4 bits" if found["four_bit"] else "fp32" if found["trained"] == "all" else found["precision"]
    lines = [
        f"language model of {parameters['language model'] / MILLION:,.1f} M parameters without its head, {bits}; trained of it: "
        f"{found['trained']}, {parameters['trained of the language model'] / MILLION:,.1f} M",
        f"images: {found['images']}, queries of each: {found['queries']}, tokens: {found['tokens']}, masks of an image: {found['masks']}; computing "
        f"in {found['precision']}",
        "",
        f"{'GB':18}{'planned':>9}{'written':>9}",
    ]
    lines += [f"{part:18}{held / GB:9.2f}{WRITTEN[part]:9.1f}" for part, held in found["bytes"].items()]
    lines += [f"{'in all':18}{found['total_bytes'] / GB:9.2f}{sum(WRITTEN.values()):9.1f}", "", "what the written lines come to by their own words:"]
    lines += [f"  {part:18}{remark}" for part, remark in found["remarks"].items()]
    lines += ["", f"{'the language model alone, GB:':38}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'in all':>9}"]
    for way, sizes in found["ways"].items():
        cells = [f"{held / GB:{width}.2f}" for held, width in zip((*sizes.values(), sum(sizes.values())), (9, 11, 11, 9), strict=True)]
        lines.append(f"  {way:36}{''.join(cells)}")
    verdicts = found["gpus"]
    groups = {verdict: ", ".join(name for name, each in verdicts.items() if each == verdict) for verdict in dict.fromkeys(verdicts.values())}
    return "\n".join([*lines, "", f"with {found['spare_gib']:g} GiB kept free:", *(f"  {verdict:10}{names}" for verdict, names in groups.items())])
