"""Compare the host time of one training step with plain loops over Meta's modules and HF's model.

A GPU waits for its host wherever kernels are short, so what a step costs the CPU beside the kernels
counts. Models have ViT-B's depth and widths so small that the kernels themselves take little; the
steps are those of `benchmarks.plain_loops`, in bf16. CPU seconds, the least of alternating
steps, so that other work on the machine does not count.

Needs `pip install segment-anything transformers`; a package that is not installed is skipped.
Prints Markdown. `--profile N` lists the N functions that take most of our step instead.

Run: python -m benchmarks.host_time [--masks 8] [--rounds 11] [--repeats 25] [--precision bf16]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import cProfile
import gc
import pstats
import sys
import time
from dataclasses import replace

import torch

from benchmarks.gpu_step import batch_in_memory
from benchmarks.plain_loops import contenders
from gigamask import recipes
from gigamask.models.configs import vit_b
from gigamask.models.sam import attention
from gigamask.prompts.schedule import InteractiveSchedule


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--masks", type=int, default=8)
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--repeats", type=int, default=25)
    options.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    options.add_argument("--profile", type=int, default=0)
    options.add_argument("--sort", default="tottime", help="of --profile, such as cumtime")
    given = options.parse_args()
    given.levers, given.compile, given.gather = ["none"], False, None
    torch.set_num_threads(1)
    small = replace(
        vit_b(), image_size=64, embed_dim=48, window_size=2, embedding_dim=32, decoder_mlp=64
    )
    run = replace(
        recipes.sam_vit_b(),
        model=replace(small, iou_hidden=32),
        prompts=InteractiveSchedule(clicks=given.rounds - 3),
        masks_per_chunk=given.masks,
        activation_checkpointing=0,
        batch_size=1,
        micro_batch_size=1,
        precision=given.precision,
        device="cpu",
    )
    # The operators that a GPU's step is made of, on a CPU.
    attention.attention_for_device = lambda kind: attention.rel_pos_attention_augmented
    for module in [module for name, module in sys.modules.items() if name.startswith("gigamask.")]:
        if hasattr(module, "is_readable"):
            vars(module)["is_readable"] = lambda tensor: False
    device = torch.device("cpu")
    batch = batch_in_memory(run, given.masks).to(device)
    steps = {name: begin() for name, begin in contenders(run, device, batch, given)}
    for step in steps.values():
        step()
        step()
    if given.profile:
        profiler = cProfile.Profile()
        with profiler:
            for _ in range(given.repeats):
                next(iter(steps.values()))()
        pstats.Stats(profiler).sort_stats(given.sort).print_stats(given.profile)
        return
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.repeats):
        for name, step in steps.items():
            if name.startswith("gigamask"):  # as the trainer does
                gc.freeze()
            began = time.process_time()
            step()
            took[name].append(time.process_time() - began)
            gc.unfreeze()
    print(f"`python -m benchmarks.host_time {' '.join(sys.argv[1:])}`\n")
    print(f"torch {torch.__version__}, {given.precision}, {given.masks} masks, ", end="")
    print(
        f"{given.rounds} rounds\n\n| what | CPU s | operators | of Meta's loop |\n|---|---|---|---|"
    )
    least = {name: min(each) for name, each in took.items()}
    against = next((each for name, each in least.items() if name.startswith("Meta")), None)
    for name, step in steps.items():
        with torch.profiler.profile() as profile:
            step()
        operators = sum(not event.cpu_children for event in profile.events() or ())
        share = f"{least[name] / against:.2f}" if against else ""
        print(f"| {name} | {least[name]:.4f} | {operators:,} | {share} |")


if __name__ == "__main__":
    main()
