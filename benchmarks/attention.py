"""Compare forms of attention with relative position: CPU time of forward and backward, memory.

Memory is the bytes kept for the backward pass. On a GPU only the ratio of wall times counts: the
clocks are read after synchronizing the device.

Run: python benchmarks/attention.py [--tokens 64] [--heads 4] [--dim 64] [--images 1] [--repeats 5]
    [--bf16] [--device cuda]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import time

import torch

from gigamask.models.sam.attention import (
    get_rel_pos,
    rel_pos_attention_augmented,
    rel_pos_attention_chunked,
    rel_pos_attention_reference,
)

FORMS = {
    "plain": rel_pos_attention_reference,
    "chunked": rel_pos_attention_chunked,
    "augmented": rel_pos_attention_augmented,
}


def kept_bytes(function) -> int:
    """Returns the bytes of the distinct storages that autograd keeps while `function` runs."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()
    del result
    return sum(storages.values())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 64), ("heads", 4), ("dim", 64), ("images", 1), ("repeats", 5)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--bf16", action="store_true")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if given.bf16 else torch.float32
    device = torch.device(given.device)
    chance = torch.Generator().manual_seed(0)
    shape = (given.images, given.heads, given.tokens**2, given.dim)
    q, k, v = (
        torch.randn(shape, generator=chance).to(device, dtype).requires_grad_() for _ in range(3)
    )
    tables = [
        (0.1 * torch.randn(2 * given.tokens - 1, given.dim, generator=chance))
        .to(device, dtype)
        .requires_grad_()
        for _ in range(2)
    ]

    def answer(form):
        return form(q, k, v, get_rel_pos(tables[0]), get_rel_pos(tables[1]))

    def moment() -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.process_time(), time.perf_counter()

    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(given.repeats):
        for name, form in FORMS.items():
            begin = moment()
            result = answer(form)
            middle = moment()
            result.sum().backward()
            end = moment()
            seconds.setdefault((name, "forward"), []).append(
                (middle[0] - begin[0], middle[1] - begin[1])
            )
            seconds.setdefault((name, "both"), []).append((end[0] - begin[0], end[1] - begin[1]))
            for leaf in (q, k, v, *tables):
                leaf.grad = None
    print(
        f"{given.tokens}x{given.tokens} tokens, {given.images} x {given.heads} heads of "
        f"{given.dim}, {dtype}, {device}, ratios to plain: CPU (wall)"
    )
    print("form       forward      forward + backward   its wall ms   kept for backward")
    for name, form in FORMS.items():
        ratios = []
        for part in ("forward", "both"):
            mine, plain = (
                [statistics.median(column) for column in zip(*seconds[who, part], strict=True)]
                for who in (name, "plain")
            )
            ratios.append(f"{mine[0] / plain[0]:.2f} ({mine[1] / plain[1]:.2f})")
        print(
            f"{name:<10} {ratios[0]:<12} {ratios[1]:<20} {1e3 * mine[1]:<13.2f} "
            f"{kept_bytes(lambda form=form: answer(form)) / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
