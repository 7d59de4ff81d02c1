"""Parameters, FLOPs, CPU time and planned memory of image encoders, with random weights.

The sizes of the backbones are those of their published `config.json`; nothing is downloaded. FLOPs
and milliseconds are those of one image's embedding, neck included, without gradients; the median of
three, after one more. Memory is that of a training step with the encoder trained, as `gigamask
plan` predicts it: bf16, one image, 64 masks, 11 rounds.

Run: python -m benchmarks.encoders [--threads 2] [--only NAME ...]
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gigamask import recipes
from gigamask.models.configs import (
    SamConfig,
    ViTSmall,
    ViTTiny,
    vit_b,
    vit_h,
    vit_l,
)
from gigamask.models.init import build_model
from gigamask.plugins.encoders.configs import HuggingFaceBackbone, RepViT
from gigamask.plugins.sam2.configs import sam2_base_plus, sam2_large, sam2_small, sam2_tiny
from gigamask.profiling.memory_plan import GIB
from gigamask.workflows.plan import plan

SIDES = (512, 1024)
TIMED = 3
SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
CONVNEXT = {"depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}
BACKBONES = {
    "dinov2-small": {"model_type": "dinov2", "patch_size": 14, "image_size": 518, **SMALL},
    "dinov2-base": {"model_type": "dinov2", "patch_size": 14, "image_size": 518, **BASE},
    "dinov3-vits16": {"model_type": "dinov3_vit", "intermediate_size": 1536, **SMALL},
    "dinov3-vitb16": {"model_type": "dinov3_vit", "intermediate_size": 3072, **BASE},
    "hiera-tiny": {"model_type": "hiera", "depths": [1, 2, 7, 2], "num_heads": [1, 2, 4, 8]},
    "swin-tiny": {"model_type": "swin"},
    "convnext-tiny": {"model_type": "convnext", **CONVNEXT},
    "dinov3-convnext-tiny": {"model_type": "dinov3_convnext", **CONVNEXT},
    "resnet-50": {"model_type": "resnet"},
}
SMALL_ENCODERS = {"vit_t": ViTTiny(), "vit_s": ViTSmall(), "repvit": RepViT()}
SIZES = {
    "vit_b": vit_b,
    "vit_l": vit_l,
    "vit_h": vit_h,
    "sam2_tiny": sam2_tiny,
    "sam2_small": sam2_small,
    "sam2_base_plus": sam2_base_plus,
    "sam2_large": sam2_large,
}
NAMES = [*SIZES, *SMALL_ENCODERS, *BACKBONES]


def configured(name: str, side: int) -> SamConfig:
    """Return a SAM with this encoder, at the largest possible input of at most `side` pixels."""
    if name in SIZES:
        return replace(SIZES[name](), image_size=side)
    if name in SMALL_ENCODERS:
        return SamConfig(image_size=side, encoder=SMALL_ENCODERS[name])
    values = dict(BACKBONES[name])
    if name.startswith("hiera"):
        values["image_size"] = [side, side]  # its positions are not interpolated
    stride = values.get("patch_size", 16)
    encoder = HuggingFaceBackbone(architecture=json.dumps(values))
    return SamConfig(image_size=side // stride * stride, patch_size=stride, encoder=encoder)


def embedding(config: SamConfig) -> tuple[int, float, float]:
    """Return the encoder's parameters, the GFLOP of an embedding, and its milliseconds."""
    model = build_model(config, 0).eval()
    side = config.image_size
    images, sizes = torch.zeros(1, 3, side, side), torch.tensor([[side, side]])
    spans = []
    with torch.no_grad():
        # The counter does not know the fused attention of CPUs.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
            model.encode(images, sizes)
        for _ in range(TIMED):
            start = time.perf_counter()
            model.encode(images, sizes)
            spans.append(1e3 * (time.perf_counter() - start))
    parameters = sum(each.numel() for each in model.image_encoder.parameters())
    return parameters, flops.get_total_flops() / 1e9, statistics.median(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'':22}{'M':>7}" + "".join(f"{side:>9} px GFLOP     ms  GiB" for side in SIDES))
    for name in arguments.only:
        cells = []
        for side in SIDES:
            config = configured(name, side)
            parameters, gflop, ms = embedding(config)
            run = replace(recipes.sam_vit_b(), model=config, micro_batch_size=1)
            gib = plan(run)["peak_bytes"] / GIB
            cells.append(f"{config.image_size:9} px {gflop:5,.0f} {ms:6,.0f} {gib:4.1f}")
        print(f"{name:22}{parameters / 1e6:7.1f}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
