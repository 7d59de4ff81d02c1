"""Compare a decoder round, forward and backward, with SAM's published form: CPU time and memory.

Memory is the bytes kept for the backward pass. `decode_plainly` is SAM's decoder as published:
every image repeated for each of its masks, every projection and attention written out. On a CPU
without bf16 units the bf16 times are those of emulated matrix products; use --float32 there.

Run: python benchmarks/decoder_round.py [--masks 8] [--images 1] [--side 64] [--repeats 3]
    [--float32] [--device cuda]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import math
import statistics
import time

import torch
import torch.nn.functional as F

from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.types import Prompts


def decode_plainly(
    model: Sam, embedding: torch.Tensor, mask_image: torch.Tensor, prompts: Prompts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `Sam.decode` returns, with the model's own parameters, in the order of work of
    the publication."""
    encoder, decoder = model.prompt_encoder, model.mask_decoder
    count, side = len(mask_image), embedding.shape[-1]
    own = torch.cat([decoder.iou_token.weight, decoder.mask_tokens.weight]).expand(count, -1, -1)
    tokens = torch.cat([own, _points(encoder, prompts)], 1)
    if prompts.masks is None:
        dense = encoder.no_mask_embed.weight.view(1, -1, 1, 1).expand(count, -1, side, side)
    else:
        dense = prompts.masks[:, None]
        for layer in encoder.mask_downscaling:
            dense = _layer_norm_2d(layer, dense) if hasattr(layer, "eps") else layer(dense)
    image = (embedding[mask_image] + dense).flatten(2).transpose(1, 2)
    place = (torch.arange(side, dtype=embedding.dtype, device=embedding.device) + 0.5) / side
    grid = torch.stack([place.expand(side, -1), place[:, None].expand(-1, side)], -1)
    positions = _position_code(encoder, grid).flatten(0, 1).expand(count, -1, -1)
    tokens, image = _transform(decoder.transformer, tokens, image, positions)
    image = image.transpose(1, 2).unflatten(2, (side, side))
    first, norm, activation, second, last = decoder.output_upscaling
    image = last(second(activation(_layer_norm_2d(norm, first(image)))))
    heads = torch.stack(
        [
            head(tokens[:, 1 + index])
            for index, head in enumerate(decoder.output_hypernetworks_mlps)
        ],
        1,
    )
    masks = (heads @ image.flatten(2)).unflatten(2, (4 * side, 4 * side))
    iou = decoder.iou_prediction_head(tokens[:, 0])
    return (masks[:, 1:], iou[:, 1:]) if prompts.multimask_output else (masks[:, :1], iou[:, :1])


def _position_code(encoder, xy: torch.Tensor) -> torch.Tensor:
    angles = 2 * math.pi * ((2 * xy - 1) @ encoder.pe_layer.positional_encoding_gaussian_matrix)
    return torch.cat([angles.sin(), angles.cos()], -1)


def _points(encoder, prompts: Prompts) -> torch.Tensor:
    with torch.autocast(prompts.labels.device.type, enabled=False):
        tokens = _position_code(
            encoder, (prompts.points_xy_input + 0.5) / encoder.input_image_size[0]
        )
    tokens[prompts.labels == -1] = encoder.not_a_point_embed.weight
    for label, kind in enumerate(encoder.point_embeddings):
        tokens[prompts.labels == label] += kind.weight
    return tokens


def _layer_norm_2d(norm, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(1, keepdim=True)
    return (
        norm.weight[:, None, None]
        * (centred / torch.sqrt(centred.pow(2).mean(1, keepdim=True) + norm.eps))
        + norm.bias[:, None, None]
    )


def _attention(layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        x.unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
        for x in (layer.q_proj(q), layer.k_proj(k), layer.v_proj(v))
    )
    weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), -1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2))


def _transform(
    transformer, tokens: torch.Tensor, image: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    code = tokens
    for index, block in enumerate(transformer.layers):
        if index == 0:
            tokens = _attention(block.self_attn, tokens, tokens, tokens)
        else:
            tokens = tokens + _attention(block.self_attn, tokens + code, tokens + code, tokens)
        tokens = block.norm1(tokens)
        tokens = block.norm2(
            tokens
            + _attention(block.cross_attn_token_to_image, tokens + code, image + positions, image)
        )
        tokens = block.norm3(tokens + block.mlp(tokens))
        image = block.norm4(
            image
            + _attention(block.cross_attn_image_to_token, image + positions, tokens + code, tokens)
        )
    final = _attention(
        transformer.final_attn_token_to_image, tokens + code, image + positions, image
    )
    return transformer.norm_final_attn(tokens + final), image


def draw_prompts(
    spec: SamConfig,
    masks: int,
    fed_back: bool,
    chance: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Prompts:
    """Returns random prompts: three points of every kind of label, and logits fed back
    when asked."""
    return Prompts(
        points_xy_input=spec.image_size * torch.rand(masks, 3, 2, generator=chance, dtype=dtype),
        labels=torch.randint(-1, 4, (masks, 3), generator=chance),
        masks=4 * torch.randn(masks, spec.mask_size, spec.mask_size, generator=chance, dtype=dtype)
        if fed_back
        else None,
        multimask_output=not fed_back,
    )


def _kept_bytes(function) -> int:
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
    for name, default in (("masks", 8), ("images", 1), ("side", 64), ("repeats", 3)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--float32", action="store_true")
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    torch.set_num_threads(1)
    spec = SamConfig(
        image_size=16 * given.side, embed_dim=64, depth=1, num_heads=1, global_attn_indexes=()
    )
    device = torch.device(given.device)
    model = build_model(spec, 0, device)
    chance = torch.Generator().manual_seed(0)
    embedding = (
        torch.randn(given.images, 256, given.side, given.side, generator=chance)
        .to(device)
        .requires_grad_()
    )
    mask_image = torch.arange(given.masks, device=device) * given.images // given.masks
    forms = {"plain": decode_plainly, "gigamask": Sam.decode}
    precision = (
        contextlib.nullcontext
        if given.float32
        else lambda: torch.autocast(device.type, torch.bfloat16)
    )

    print(
        f"{given.images} images, {given.masks} masks, {given.side}x{given.side} tokens, "
        f"{'float32' if given.float32 else 'bf16'}, forward + backward"
    )
    print(
        "round             CPU time x    wall x   (target >= 2)   kept for backward a mask   "
        "ratio   (target <= 0.6)"
    )
    for title, fed_back in (("points, 3 masks", False), ("fed back, 1 mask", True)):
        drawn = draw_prompts(spec, given.masks, fed_back, chance)
        fed = None if drawn.masks is None else drawn.masks.to(device)
        prompts = Prompts(
            drawn.points_xy_input.to(device), drawn.labels.to(device), fed, drawn.multimask_output
        )

        def forward(form, prompts=prompts):
            with precision():
                logits, iou = form(model, embedding, mask_image, prompts)
            return F.softplus(logits.float()).mean() + iou.float().mean()

        seconds = {name: [] for name in forms}
        for _ in range(given.repeats):
            for name, form in forms.items():
                begin = time.process_time(), time.perf_counter()
                forward(form).backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds[name].append(
                    (time.process_time() - begin[0], time.perf_counter() - begin[1])
                )
                model.zero_grad()
                embedding.grad = None
        cpu, wall = (
            {
                name: statistics.median(pair[part] for pair in pairs)
                for name, pairs in seconds.items()
            }
            for part in (0, 1)
        )
        kept = {
            name: _kept_bytes(lambda form=form: forward(form)) / given.masks / 2**20
            for name, form in forms.items()
        }
        print(
            f"{title:<17} {cpu['plain'] / cpu['gigamask']:<13.2f} "
            f"{wall['plain'] / wall['gigamask']:<24.2f} "
            f"{kept['gigamask']:.0f} of {kept['plain']:.0f} MiB {'':<12} "
            f"{kept['gigamask'] / kept['plain']:.2f}"
        )


if __name__ == "__main__":
    main()
