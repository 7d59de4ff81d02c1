"""Times of the decoder's transformer and upscaling: of torch, compiled by torch, and with the
plugin's kernels.

Each is a forward and a backward pass of one round of SAM's decoder in bf16, without and with mask
prompts; the first calls, which compile and choose configurations, are not timed. The last line says
what should be the default on this device. Prints Markdown.

Run: python -m benchmarks.kernel_times [--masks 64] [--repeats 10]
To see that it runs, in Triton's interpreter: python -m benchmarks.kernel_times --device cpu
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gigamask import recipes
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.transformer import DensePrompt
from gigamask.plugins.kernels.config import TritonKernels

SMALL = SamConfig(
    image_size=64,
    embed_dim=32,
    depth=1,
    num_heads=2,
    window_size=2,
    global_attn_indexes=(),
    embedding_dim=32,
    decoder_num_heads=2,
    decoder_mlp=32,
)
TOKENS = 12
"""Prompt tokens, those of the decoder among them, about as in the middle of SAM's rounds."""


def operations(model: Any, masks: int, dtype: torch.dtype) -> Iterator[tuple[str, Any, Any]]:
    """Yields a name, the object and the name of its method, and the method's arguments."""
    decoder, config = model.mask_decoder, model.config
    device = decoder.iou_token.weight.device
    side, dim = config.embedding_size, config.embedding_dim

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    positions = torch.rand(side, side, dim, device=device, dtype=dtype)
    for count in (1, 3):
        args = make(masks, side * side, dim), make(masks, dim // 8, count), positions
        yield f"upscaling, {count} logits", (decoder, "upscaled"), args
    for name, dense in (
        ("no mask prompt", DensePrompt(make(dim))),
        ("mask prompts", DensePrompt(make(dim), make(masks, side * side, 16), make(dim, 16))),
    ):
        index = torch.zeros(masks, dtype=torch.int64, device=device)
        own = make(1, side * side, dim), positions.flatten(0, 1), make(masks, TOKENS, dim)
        yield f"transformer, {name}", (decoder.transformer, "attend"), (*own, index, dense, None)


def seconds(run: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """Returns the shortest time of a forward and a backward pass."""
    device = args[0].device

    def once() -> float:
        start_s = time.perf_counter()
        found = run(*args)
        outputs = list(found) if isinstance(found, tuple) else [found]
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    if device.type == "cuda":
        once(), once()
    return min(once() for _ in range(repeats))


@contextmanager
def kernels_in(model: Any, device: torch.device) -> Iterator[None]:
    """Lets a model compute with the kernels within the context."""
    task = replace(recipes.tiny(), device=str(device)).task(device)
    with TritonKernels().used(task, model):
        yield


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--masks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.kernel_times", *sys.argv[1:]]
        subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
        return
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = build_model(SamConfig() if is_cuda else SMALL, 0, "cpu").to(device, dtype)
    totals = {"torch": 0.0, "compiled": 0.0, "triton": 0.0}
    print("| operation | torch ms | compiled ms | triton ms |\n|---|---|---|---|")
    for name, (owner, method), args in operations(model, given.masks, dtype):
        times = {}
        for kind in totals:
            if kind == "compiled" and not is_cuda:
                continue
            with kernels_in(model, device) if kind == "triton" else nullcontext():
                run = getattr(owner, method)
                chosen = torch.compile(run) if kind == "compiled" else run
                times[kind] = seconds(chosen, args, given.repeats)
                totals[kind] += times[kind]
        cells = [f"{1e3 * times[kind]:.2f}" if kind in times else "" for kind in totals]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    measured = {kind: total for kind, total in totals.items() if total}
    best = min(measured, key=lambda kind: measured[kind])
    place = torch.cuda.get_device_name() if is_cuda else "a CPU"
    print(f"\nfastest on {place}: {best}")


if __name__ == "__main__":
    main()
