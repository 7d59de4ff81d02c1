"""Registers, shared memory and spills of the plugin's kernels, compiled for GPUs that need not be
there.

Each kernel is compiled for SAM's sizes in bf16, with each of its configurations, by the compiler
and the assembler in Triton's package. `local` are the bytes of a thread's registers that are
spilled to memory. Prints Markdown.

Run: python -m benchmarks.kernels [--chips 90] [--first]
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner

from gigamask.plugins.kernels import (
    branch_norm,
    image_attention,
    mask_features,
    mask_loss,
    next_click,
    operators,
    token_attention,
    token_layers,
    upscaling,
    window_attention,
    window_bias,
)

CHIPS = {80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100", 120: "RTX 5090"}
"""A GPU of each compute capability, times ten."""
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
"""Most shared memory of a program, by NVIDIA's CUDA C++ Programming Guide, table of compute
capabilities, less 1 KB that CUDA keeps."""
REGISTERS = 65_536
"""Registers of a multiprocessor; a thread has at most 255."""
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
POINTERS |= {torch.bool: "*i1", torch.float16: "*fp16", torch.int32: "*i32"}

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is launched with.

    Attributes:
        kernel: The kernel.
        args: Tensors on the meta device, and numbers.
        constants: What is compiled into it.
    """

    kernel: Autotuner
    args: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a program of a kernel takes.

    Attributes:
        registers: Registers of a thread.
        shared_bytes: Shared memory.
        local_bytes: Memory of a thread for what does not fit into its registers.
        warps: Warps of 32 threads.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    warps: int


def recorded(module: Any, run: Callable[..., Any], *args: Any) -> Launch:
    """Returns what a function would launch."""
    found: list[Launch] = []

    def record(kernel: Autotuner, grid: Any, *args: Any, **constants: Any) -> None:
        found.append(Launch(kernel, args, constants))

    with patch.object(module, "launch", record):
        run(*args)
    return found[0]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns a tensor of the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launches() -> Iterator[tuple[str, Launch]]:
    """Yields the kernels at SAM's sizes: 64 masks, 4,096 image tokens, 256 channels."""
    x, vector = empty(64, 4096, 256), empty(64)
    weights = [empty(256, 256), vector, vector, vector, empty(128, 64), empty(32), empty(64, 32, 3)]
    yield "upscaling", recorded(upscaling, upscaling.upscale, x, weights, 64, 1e-6)
    args = (x, weights, empty(64, 3, 256, 256), 64, 1e-6)
    yield "upscaling, backward", recorded(upscaling, upscaling.upscale_backward, *args)
    masks, weights = empty(64, 256, 256), empty(operators.SLOTS, 2, 19, 16, dtype=torch.float32)
    run = mask_features.mask_features
    yield "mask prompts", recorded(mask_features, run, masks, weights, 1e-6)
    args = (masks, weights, empty(64, 4096, 16), 1e-6)
    run = mask_features.mask_features_backward
    yield "mask prompts, backward", recorded(mask_features, run, *args)
    yield from attention_launches()
    yield from token_launches()
    yield from mask_launches()
    yield from encoder_launches()


def attention_launches() -> Iterator[tuple[str, Launch]]:
    """Yields the kernels of attention, of 12 tokens to shared image tokens and to a mask's own."""
    rows, positions, y = empty(64, 12, 8, 256), empty(4096, 256), empty(64, 4096, 256)
    numbers, channels = empty(64, 12, 8, dtype=torch.float32), empty(256)
    projected = [empty(64, 4096, 16), empty(256, 16)]
    for name, source, options in (
        ("shared", [empty(1, 4096, 256), positions, None, *projected], (True, 0.25)),
        ("own", [y, positions, None, None, None], (False, 0.25)),
    ):
        module: Any = token_attention
        yield f"tokens, {name}", recorded(module, module.token_attention, rows, source, *options)
        args = ([rows, rows, numbers, rows], source, *options)
        run = module.token_attention_backward
        yield f"tokens, {name}, queries", recorded(module, run, *args)
        given = None if options[0] else y
        args = ([rows, numbers, numbers, rows], source, *options, given)
        yield f"tokens, {name}, image", recorded(module, module.token_attention_image, *args)
        module, own = image_attention, [rows, rows, empty(64, 12, 8), channels, channels]
        args = (own, channels, source, *options, 1e-5)
        yield f"image, {name}", recorded(module, module.image_attention, *args)
        run = module.image_attention_image
        yield f"image, {name}, image", recorded(module, run, own, source, *options, 1e-5, y)
        run = module.image_attention_rows
        yield f"image, {name}, keys", recorded(module, run, own, source, *options, y)


def token_launches() -> Iterator[tuple[str, Launch]]:
    """Yields the kernels of the layers of 12 tokens of each of 64 masks."""
    module: Any = token_layers
    x, norm = empty(768, 256), empty(32, 2, 256, dtype=torch.float32)
    keys, values, bias = empty(2568, 256), empty(2304, 256), empty(2568)
    rows, wide, hidden = empty(768, 2568), empty(768, 2304), empty(768, 2048)
    out, vector = empty(256, 2048), empty(256)
    ranges = [0, 0, 0, 2048, 2048, 4864, 0, 8, 2056, 4096, 0, 768, 2568, 2048, 0, 2048]
    ranges += [4616, 4096, 512, 768]
    weights = [keys, bias, values, bias]
    run = module.project_tokens
    yield "tokens: norm, two layers", recorded(module, run, x, x, norm, weights, ranges, 1e-5)
    args = (x, None, norm, [empty(2048, 256), bias], [0, 0, 0, 2048], 1e-5)
    yield "tokens: norm, layer, ReLU", recorded(module, run, *args)
    run = module.project_tokens_backward
    yield "tokens: norm, backward", recorded(module, run, [x, x, norm, out], hidden, 1e-5)
    run = module.sum_tokens
    yield "tokens: sum", recorded(module, run, [hidden, out], [vector, x], False)
    pairs = [rows, keys, wide, values]
    yield "tokens: sum, backward", recorded(module, run, pairs, [None, x, x], True)


def mask_launches() -> Iterator[tuple[str, Launch]]:
    """Yields the kernels of loss and next click, with three predictions and with one."""
    masks, numbers = empty(64, 256, 256, dtype=torch.bool), [0.25, 1.0, 20.0, 1.0, 1.0]
    per_mask = empty(64, dtype=torch.float32)
    for count in (3, 1):
        tensors = [empty(64, count, 256, 256), masks, None, masks, empty(64, count)]
        module, name = mask_loss, f"loss, {count} logits"
        yield name, recorded(module, module.mask_loss, tensors, numbers, [0, 0, 0])
        run, state = module.mask_loss_backward, empty(64, 4, 4, dtype=torch.float32)
        yield f"{name}, backward", recorded(module, run, tensors, state, per_mask, numbers)
    pair = empty(64, 2, dtype=torch.float32)
    tensors = [empty(64, 1, 256, 256), None, masks, masks, masks, pair, pair, pair]
    yield "next click", recorded(next_click, next_click.next_click, tensors, [4.0, 4.0])


def encoder_launches() -> Iterator[tuple[str, Launch]]:
    """Yields the kernels of the encoder, of ViT-B's and of ViT-H's heads, in windows and global."""
    for heads, channels in ((12, 64), (16, 80)):
        for kind, side in (("windows", 14), ("global", 64)):
            projected, size = empty(1, 64, 64, 3 * heads * channels), [side, side, heads]
            source = [projected, empty(3 * heads * channels) if kind == "windows" else None]
            tables = [empty(2 * side - 1, channels, dtype=torch.float32)] * 2
            biases = list(window_bias.BIAS(projected, tables, size))
            out, numbers = window_attention.FORWARD(source, biases, size)
            module: Any
            for module, run, args in (
                (window_bias, window_bias.window_bias, (projected, tables)),
                (window_attention, window_attention.window_attention, (source, biases)),
                (
                    window_attention,
                    window_attention.window_attention_queries,
                    (source, biases, [out, numbers, out]),
                ),
                (
                    window_attention,
                    window_attention.window_attention_keys,
                    (source, biases, [numbers, numbers, out]),
                ),
                (
                    window_bias,
                    window_bias.window_bias_queries,
                    (projected, tables, biases, out, projected),
                ),
                (window_bias, window_bias.window_bias_tables, (projected, tables, biases)),
            ):
                name = run.__name__.replace("_", " ").removeprefix("window ")
                yield f"{kind} of {channels}: {name}", recorded(module, run, *args, size)
        width = heads * channels
        x, branch = empty(4096, width, dtype=torch.float32), empty(4096, width)
        vector, options = empty(width, dtype=torch.float32), [1e-6, 1.0]
        tensors, kind = [x, branch, vector, vector], torch.bfloat16
        run = branch_norm.branch_norm
        yield f"sum and norm of {width}", recorded(branch_norm, run, tensors, options, kind)
        tensors, run = [x, vector, x, branch], branch_norm.branch_norm_backward
        yield f"sum and norm of {width}, backward", recorded(branch_norm, run, tensors, options, 1)


def compiled(launch: Launch, chip: int, config: int) -> Resources:
    """Returns what a kernel takes on a chip.

    Args:
        launch: The kernel and its arguments.
        chip: Compute capability, times ten.
        config: Which of its configurations.
    """
    chosen, function = launch.kernel.configs[config], launch.kernel.fn
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, *place: int) -> Any:
        """Returns the type of an argument, and notes what is compiled into the kernel."""
        if isinstance(value, tuple):
            return tuple(kind(each, *place, at) for at, each in enumerate(value))
        if isinstance(value, Tensor):
            aligned[place] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if value is None:
            constants[place] = None
            return "constexpr"
        return "fp32" if isinstance(value, float) else "i32"

    fixed = {**launch.constants, **chosen.kwargs}
    for at, name in enumerate(function.arg_names):
        if name in fixed:
            constants[(at,)], signature[name] = fixed[name], "constexpr"
        else:
            signature[name] = kind(launch.args[at], at)
    source = ASTSource(function, signature, constants, aligned)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    found = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    registers, local = used_registers(found.asm["cubin"])
    return Resources(registers, found.metadata.shared, local, chosen.num_warps)


def used_registers(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes that are spilled, of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--chips", nargs="+", type=int, choices=CHIPS, default=[*CHIPS])
    options.add_argument("--first", action="store_true", help="only each first configuration")
    given = options.parse_args()
    print("| kernel | blocks | warps | chip | registers | shared KB (most) | local bytes |")
    print("|---|---|---|---|---|---|---|")
    rows = [
        (name, launch, chip, config)
        for name, launch in launches()
        for config in range(1 if given.first else len(launch.kernel.configs))
        for chip in given.chips
    ]

    def resources(row: tuple[str, Launch, int, int]) -> Resources | Exception:
        try:
            return compiled(*row[1:])
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        for (name, launch, chip, config), found in zip(
            rows, pool.map(resources, rows), strict=True
        ):
            blocks = launch.kernel.configs[config].kwargs
            sizes = " ".join(f"{key} {value}" for key, value in blocks.items())
            if isinstance(found, Exception):
                print(f"| {name} | {sizes} | | {chip} | {type(found).__name__} {str(found)[:200]}")
                continue
            print(
                f"| {name} | {sizes} | {found.warps} | {CHIPS[chip]} | {found.registers} "
                f"| {found.shared_bytes / 1024:.0f} ({SHARED_BYTES[chip] / 1024:.0f}) "
                f"| {found.local_bytes} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
