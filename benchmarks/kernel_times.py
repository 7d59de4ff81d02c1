"""Times of each of the plugin's kernels beside torch's operations and those compiled by torch.

Each is a forward and a backward pass of one round of SAM in bf16, with 64 masks, or of a block
of ViT-B for one image; the next click has no gradient. Kernels come first, then what a
training calls: transformer, upscaling, blocks of the encoder, loss and click.
First calls, which compile and choose configurations, are not timed, nor is what a training computes
once for all rounds, which it does unless they are compiled. When the time for all is over, nothing
more is compiled. The last line says, by the sum of what a training calls, what should be
the default on this device. Prints Markdown.

Run: python -m benchmarks.kernel_times [--masks 64] [--repeats 10] [--seconds 110]
To see that it runs, in Triton's interpreter: python -m benchmarks.kernel_times --device cpu
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gigamask.interfaces import Loss
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.mask_decoder import MaskDecoder
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.sam.image_encoder import EncoderBlock
from gigamask.models.shared_tensors import sharing
from gigamask.models.transformer import DensePrompt, TwoWayTransformer
from gigamask.plugins.kernels.decoder import (
    AFTER_IMAGE,
    AFTER_TOKENS,
    attend,
    predict_heads,
    token_weights,
    upscaled,
)
from gigamask.plugins.kernels.encoder import attended, transformed
from gigamask.plugins.kernels.image_attention import ImageAttention
from gigamask.plugins.kernels.mask_features import features
from gigamask.plugins.kernels.mask_loss import FusedSamLoss
from gigamask.plugins.kernels.next_click import FusedSchedule
from gigamask.plugins.kernels.token_attention import TokenAttention
from gigamask.plugins.kernels.token_blocks import Shared, TokensAfterImage, TokensAfterTokens
from gigamask.profiling.dry_run import tensors_in
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.types import Prediction, PromptRound, Prompts, Targets

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
SCALE = 0.25
"""Factor of the scores, that of 16 channels of a head."""


@dataclass(frozen=True)
class Operation:
    """What is timed.

    Attributes:
        name: Its name.
        ways: Functions by the name of a way to compute it, without the compiled one.
        args: Their arguments.
        is_called: Whether a training calls it; otherwise it is a kernel within another operation.
    """

    name: str
    ways: dict[str, Callable[..., Any]]
    args: tuple[Any, ...]
    is_called: bool = True


def random(like: Tensor, *shape: int) -> Tensor:
    """Returns a leaf of random numbers with the dtype and device of another tensor."""
    return torch.randn(*shape, device=like.device, dtype=like.dtype, requires_grad=True)


def tokens_to_image(rows: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """Returns what rows attend to among image tokens, by torch."""
    image = x.expand(len(rows), -1, -1)
    found = functional.scaled_dot_product_attention(
        rows.flatten(1, 2), image + positions, image, scale=SCALE
    )
    return found.view_as(rows)


def image_to_tokens(
    keys: Tensor, values: Tensor, bias: Tensor, vectors: Tensor, x: Tensor, positions: Tensor
) -> Tensor:
    """Returns image tokens after attention to tokens, the sum and the layer norm, by torch."""
    image, (k, v) = x.expand(len(keys), -1, -1), (each.transpose(1, 2) for each in (keys, values))
    queries = (image + positions)[:, None].expand(-1, k.shape[1], -1, -1)
    added = SCALE * bias.transpose(1, 2)[:, :, None]
    found = functional.scaled_dot_product_attention(queries, k, v, added, scale=SCALE).sum(1)
    total = image + found + vectors[0]
    return functional.layer_norm(total, total.shape[-1:], vectors[1], vectors[2], 1e-5)


def attention_kernels(model: Any, masks: int) -> Iterator[Operation]:
    """Yields both attentions, to image tokens that masks share and to their own."""
    like, config = model.mask_decoder.iou_token.weight, model.config
    tokens, dim, heads = config.embedding_size**2, config.embedding_dim, config.decoder_num_heads
    positions = torch.rand(tokens, dim, device=like.device, dtype=like.dtype)
    shape = masks, TOKENS, heads
    keys, values, bias, vectors = (
        random(like, *each) for each in ((*shape, dim), (*shape, dim), shape, (3, dim))
    )
    for name, count in (("shared", 1), ("own", masks)):
        shared, rest = name == "shared", (positions, None, None, None)

        def to_image(rows: Tensor, x: Tensor, _: Tensor, shared=shared, rest=rest) -> Tensor:
            return TokenAttention.apply(rows, SCALE, shared, x, *rest)[0]

        def to_tokens(
            keys: Tensor, values: Tensor, bias: Tensor, vectors: Tensor, x: Tensor, _: Tensor,
            shared=shared, rest=rest,
        ) -> Tensor:  # fmt: skip
            own = keys, values, bias, *vectors
            return ImageAttention.apply(SCALE, 1e-5, shared, *own, x, *rest)

        x = random(like, count, tokens, dim)
        ways = {"torch": tokens_to_image, "triton": to_image}
        yield Operation(f"kernel: tokens to image, {name}", ways, (keys, x, positions), False)
        ways = {"torch": image_to_tokens, "triton": to_tokens}
        args = keys, values, bias, vectors, x, positions
        yield Operation(f"kernel: image to tokens, {name}", ways, args, False)


def normalized(x: Tensor, norm: Tensor) -> Tensor:
    """Returns the layer norm of rows, by torch."""
    gain, shift = norm[0].to(x.dtype)
    return functional.layer_norm(x, x.shape[-1:], gain, shift, 1e-5)


def tokens_after_tokens(attended: Tensor, own: Tensor, *weights: Tensor) -> Tensor:
    """Returns queries for the image tokens after attention among tokens, by torch."""
    out, out_bias, norm, weight, bias = weights
    x = normalized(own + functional.linear(attended, out, out_bias), norm)
    return functional.linear(x + own, weight, bias)


def tokens_after_image(attended: Tensor, own: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Returns keys and values of tokens after attention to the image and the MLP, by torch."""
    out, out_bias, norm, first, first_bias, second, second_bias, last_norm, *pairs = weights
    x = normalized(own + functional.linear(attended, out, out_bias), norm)
    hidden = functional.relu(functional.linear(x, first, first_bias))
    x = normalized(x + functional.linear(hidden, second, second_bias), last_norm)
    width = attended.shape[1]
    keys = functional.linear(x + own, *pairs[:2])[:, :width]
    return keys, functional.linear(x, *pairs[2:])[:, :width]


def token_kernels(model: Any, masks: int) -> Iterator[Operation]:
    """Yields the layers of tokens between their attentions."""
    like, transformer = model.mask_decoder.iou_token.weight, model.mask_decoder.transformer
    found = token_weights(transformer, like.dtype)[2:]
    weights = [each.detach().requires_grad_() for each in found]
    rows, heads, channels = masks * TOKENS, transformer.num_heads, like.shape[1]
    shared = Shared(None, heads, 1e-5)

    def after_tokens(attended: Tensor, own: Tensor, *weights: Tensor) -> Tensor:
        return TokensAfterTokens.apply(shared, attended, own, own, *weights)[0]

    def after_image(attended: Tensor, own: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return TokensAfterImage.apply(shared, attended, own, own, *weights)[:3:2]

    own = random(like, rows, channels)
    args = random(like, rows, channels), own, *weights[:AFTER_TOKENS]
    ways = {"torch": tokens_after_tokens, "triton": after_tokens}
    yield Operation("kernel: tokens after tokens", ways, args, False)
    args = random(like, rows, heads * channels), own, *weights[AFTER_TOKENS:][:AFTER_IMAGE]
    ways = {"torch": tokens_after_image, "triton": after_image}
    yield Operation("kernel: tokens after image", ways, args, False)


def decoder_operations(model: Any, masks: int) -> Iterator[Operation]:
    """Yields upscaling, heads and transformer, whose methods the kernels replace."""
    decoder, config = model.mask_decoder, model.config
    like, side, dim = decoder.iou_token.weight, config.embedding_size, config.embedding_dim

    def make(*shape: int) -> Tensor:
        return random(like, *shape)

    positions = torch.rand(side, side, dim, device=like.device, dtype=like.dtype)
    ways = {"torch": MaskDecoder.upscaled, "triton": upscaled}
    for count in (1, 3):
        args = decoder, make(masks, side * side, dim), make(masks, dim // 8, count), positions
        yield Operation(f"upscaling, {count} logits", ways, args)
    ways = {"torch": MaskDecoder._heads, "triton": predict_heads}
    yield Operation("heads", ways, (decoder, make(masks, TOKENS, dim), range(1, 4)))
    ways = {"torch": PromptEncoder.mask_features, "triton": features}
    masks_given = make(masks, 4 * side, 4 * side).detach()
    yield Operation("features of mask prompts", ways, (model.prompt_encoder, masks_given))
    ways = {"torch": TwoWayTransformer.attend, "triton": attend}
    for name, dense in (
        ("no mask prompt", DensePrompt(make(dim))),
        ("mask prompts", DensePrompt(make(dim), make(masks, side * side, 16), make(dim, 16))),
    ):
        index = torch.zeros(masks, dtype=torch.int64, device=like.device)
        own = make(1, side * side, dim), positions.flatten(0, 1), make(masks, TOKENS, dim)
        args = decoder.transformer, *own, index, dense, None
        yield Operation(f"transformer, {name}", ways, args)


def encoder_operations(model: Any) -> Iterator[Operation]:
    """Yields the encoder's blocks, with attention in windows and over the whole grid."""
    config, like = model.config, model.mask_decoder.iou_token.weight
    side, dim = config.embedding_size, config.embed_dim
    for name, window in (("windows", config.window_size), ("global", 0)):
        block = EncoderBlock(dim, config.num_heads, side, window, 0.0)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=dim**-0.5)
        fused: Any = deepcopy(block.to(like.device, like.dtype))
        fused.attn.forward = partial(attended, fused.attn)
        ways = {"torch": block, "triton": partial(transformed, fused)}
        yield Operation(f"encoder block, {name}", ways, (random(like, 1, side, side, dim),))


def round_operations(model: Any, masks: int) -> Iterator[Operation]:
    """Yields the loss with one and three predictions, and the next click."""
    like, side = model.mask_decoder.iou_token.weight, model.config.mask_size
    on = {"device": like.device}
    cell = model.config.image_size / side
    targets = Targets(
        torch.rand(masks, side, side, **on) > 0.5,
        torch.ones(masks, side, side, dtype=torch.bool, **on),
        torch.zeros(masks, 4, **on),
        (cell, cell),
        torch.ones(masks, 2, **on),
    )
    labels = torch.ones(masks, 2, dtype=torch.int64, **on)
    prompts = Prompts(torch.zeros(masks, 2, 2, **on), labels, None, False)

    def made(logits: Tensor, predicted: Tensor) -> PromptRound:
        return PromptRound(0, prompts, Prediction(logits, predicted, logits))

    def per_mask(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda *given: loss(made(*given), targets).per_mask

    def point(schedule: InteractiveSchedule) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(logits: Tensor, predicted: Tensor, uniforms: Tensor) -> Tensor:
            return schedule.add_click(made(logits, predicted), targets, uniforms).points_xy_input

        return run

    ways = {"torch": per_mask(SamLoss()), "triton": per_mask(FusedSamLoss())}
    for count in (1, 3):
        args = random(like, masks, count, side, side), random(like, masks, count)
        yield Operation(f"loss, {count} logits", ways, args)
    args = random(like, masks, 1, side, side), random(like, masks, 1), torch.rand(masks, 2, **on)
    ways = {"torch": point(InteractiveSchedule()), "triton": point(FusedSchedule())}
    yield Operation("next click", ways, args)


def seconds(run: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """Returns the shortest time of a forward and a backward pass."""
    device = next(each.device for each in args if isinstance(each, Tensor))

    def once() -> float:
        start_s = time.perf_counter()
        found = run(*args)
        outputs = [each for each in tensors_in(found) if each.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    if device.type == "cuda":
        once(), once()
    return min(once() for _ in range(repeats))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--masks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.kernel_times", *sys.argv[1:]]
        subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
        return
    is_cuda, deadline_s = device.type == "cuda", time.perf_counter() + given.seconds
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = build_model(SamConfig() if is_cuda else SMALL, 0, "cpu").to(device, dtype)
    totals = dict.fromkeys(("torch", "compiled", "triton"), 0.0)
    print(f"| operation | {' ms | '.join(totals)} ms | fastest |\n|{'---|' * 5}")
    for operation in chain(
        attention_kernels(model, given.masks),
        token_kernels(model, given.masks),
        decoder_operations(model, given.masks),
        encoder_operations(model),
        round_operations(model, given.masks),
    ):
        ways = dict(operation.ways)
        if is_cuda and time.perf_counter() < deadline_s:
            ways["compiled"] = torch.compile(ways["torch"])
        times = {}
        for kind, run in ways.items():
            with sharing([model], kind != "compiled"):
                times[kind] = seconds(run, operation.args, given.repeats)
        for kind in totals:
            # What was not compiled counts as it is.
            totals[kind] += times.get(kind, times["torch"]) * operation.is_called
        cells = [f"{1e3 * times[kind]:.2f}" if kind in times else "" for kind in totals]
        fastest = min(times, key=lambda kind: times[kind])
        print(f"| {operation.name} | {' | '.join(cells)} | {fastest} |", flush=True)
    if not is_cuda:
        del totals["compiled"]
    best = min(totals, key=lambda kind: totals[kind])
    place = torch.cuda.get_device_name() if is_cuda else "a CPU"
    sums = ", ".join(f"{kind} {1e3 * total:.2f} ms" for kind, total in totals.items())
    print(f"\nwhat a training calls: {sums}; the default on {place} should be {best}")


if __name__ == "__main__":
    main()
