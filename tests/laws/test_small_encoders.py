"""The small built-in image encoders: their layers, training, commands and limits."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from gigamask import Sam, config_files, load_model
from gigamask.distributed.fsdp import is_sharded_tensor
from gigamask.distributed.world import destroy_world, init_world
from gigamask.interfaces import ImageEncoder
from gigamask.models.configs import SamConfig, ViTSmall, ViTTiny, vit_b
from gigamask.models.init import build_model
from gigamask.training.optim import AdamW, layer_ids
from gigamask.training.trainer import train
from tests.commands import invoke, refusal
from tests.errors import error_line
from tests.laws.test_training import same
from tests.little import SPEC, little
from tests.ranks import fork

VIT_T = ViTTiny(embed_dim=16, depth=3, num_heads=2)


@pytest.fixture(params=[(VIT_T, 3), (ViTSmall(embed_dim=24, depth=2, num_heads=2), 2)])
def small(request) -> tuple[ImageEncoder, int]:
    """An encoder and the number of its blocks; other modules of tests have others."""
    return request.param


def spec_of(encoder: ImageEncoder, rate: float = 0.0) -> SamConfig:
    return replace(SPEC, encoder=encoder, drop_path_rate=rate)


def case(out: Path, scenes: Path, encoder: ImageEncoder, **changes):
    changes = {"steps": 4, "save_every": 2, "optimizer": AdamW(layer_decay=0.8)} | changes
    model = spec_of(encoder, 0.3)
    run = replace(little(), out=str(out), data=(str(scenes),), model=model, **changes)
    config_files.save_config(run)
    return run


def pixels(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_vit_t_is_a_plain_transformer():
    """Written with torch's own attention: norm, attention, norm, MLP, each with a residual."""
    model = build_model(spec_of(VIT_T), 0).double()
    encoder, images = model.image_encoder, pixels().double()
    x = encoder.patch_embed.proj(images).flatten(2).mT + encoder.pos_embed.flatten(1, 2)
    for block in encoder.blocks:
        attention = nn.MultiheadAttention(16, 2, batch_first=True).double()
        attention.in_proj_weight, attention.in_proj_bias = (
            block.attn.qkv.weight,
            block.attn.qkv.bias,
        )
        attention.out_proj.weight, attention.out_proj.bias = (
            block.attn.proj.weight,
            block.attn.proj.bias,
        )
        y = block.norm1(x)
        x = x + attention(y, y, y, need_weights=False)[0]
        hidden = functional.gelu(block.mlp.lin1(block.norm2(x)))
        x = x + block.mlp.lin2(hidden)
    expected = encoder.neck(x.mT.unflatten(2, (8, 8)))
    torch.testing.assert_close(encoder(images, None), expected, rtol=1e-10, atol=1e-10)


def test_an_embedding_does_not_depend_on_other_images(small):
    encoder = build_model(spec_of(small[0]), 0).image_encoder.train()
    both, first = encoder(pixels(), None), encoder(pixels()[:1], None)
    torch.testing.assert_close(both[:1], first)


def test_blocks_decay_by_depth_and_can_be_skipped(small):
    spec = spec_of(small[0], 0.5)
    model = build_model(spec, 0)
    blocks = model.encoder_blocks
    assert len(blocks) == small[1] == spec.encoder.drop_path_blocks(spec)
    layers = layer_ids(model, blocks)
    assert {
        layers[f"image_encoder.blocks.{i}.{n}"]
        for i, b in enumerate(blocks)
        for n, _ in b.named_parameters()
    } == set(range(1, len(blocks) + 1))
    assert {n.split(".")[1] for n, depth in layers.items() if depth == 0} <= {
        *("patch_embed", "pos_embed", "stem")
    }
    encoder, images = model.image_encoder.train(), pixels()
    kept, skipped = (encoder(images, value * torch.ones(2, len(blocks), 2)) for value in (1.0, 0.0))
    mixed = encoder(images, torch.tensor([0.0, 1.0]).view(2, 1, 1).expand(2, len(blocks), 2))
    torch.testing.assert_close(mixed[0], skipped[0])
    torch.testing.assert_close(mixed[1], kept[1])
    assert not torch.allclose(kept, skipped)


def test_a_stopped_training_resumes_bit_for_bit(tmp_path, scenes, small):
    """Every parameter learns; recomputing blocks changes nothing."""
    whole = train(case(tmp_path / "whole", scenes, small[0], ema=0.9))
    begun = case(tmp_path / "begun", scenes, small[0]).build().state_dict()
    now = whole.model.state_dict()
    still = [key for key in begun if torch.equal(begun[key], now[key])]
    assert not any(key.startswith("image_encoder.") for key in still)
    train(case(tmp_path / "run", scenes, small[0], ema=0.9, steps=2))
    saved = config_files.load_config(str(tmp_path / "run"), trust=True)
    resumed = train(replace(saved, steps=4, activation_checkpointing=1))
    assert same(whole, resumed)
    loaded = load_model(tmp_path / "run")
    assert loaded.config.encoder == small[0]


def sharded_training(folder: str) -> None:
    world = init_world(os.environ, torch.device("cpu"), 60.0)
    try:
        state = train(config_files.load_config(folder, trust=True), world)
        assert any(map(is_sharded_tensor, state.model.parameters()))
    finally:
        destroy_world(world)


def test_sharded_it_is_the_same_training(tmp_path, scenes):
    whole = train(case(tmp_path / "whole", scenes, VIT_T, activation_checkpointing=1))
    run = case(tmp_path / "sharded", scenes, VIT_T, parallel="fsdp", activation_checkpointing=1)
    fork(2, sharded_training, run.out)
    weights = load_model(run.out).state_dict()
    for key, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_by_command(tmp_path, scenes, capsys):
    run_commands(tmp_path, scenes, capsys, "vit_t", "--model.encoder.depth 2")


def run_commands(tmp_path, scenes, capsys, name, sizes=""):
    """Train, resume, evaluate, plan, export and read back a model with an encoder."""
    run = tmp_path / "run"
    words = f"tiny --model.image-size 64 --model.encoder {name} {sizes}"
    invoke(f"train {words} --data {scenes} --out {run} --evaluation none --steps 2")
    invoke(f"train --resume {run} --steps 3")
    invoke(f"evaluate {run} --data {scenes} --max-images 2")
    invoke(f"export {run} --to onnx --out {tmp_path}/onnx")
    assert "read back: outputs differ by at most" in capsys.readouterr().out
    exported = tmp_path / "model.safetensors"
    invoke(f"export {run} --to safetensors --out {exported}")
    assert Sam.from_pretrained(exported).config == Sam.from_pretrained(run).config
    invoke("plan", words, "--gpu h200 --activation-checkpointing 1")
    capsys.readouterr()
    kind = name.partition(":")[0]
    for to, out in (("official", "a.pth"), ("huggingface", "a")):
        line = refusal(capsys, f"export {run} --to {to} --out {tmp_path}/{out}")
        assert f"no image encoder but SAM's ViT; this model has {kind}" in line
    line = refusal(capsys, f"train tiny --data {scenes} --out {tmp_path}/b --init {run}")
    assert f"has the image encoder {kind}, the model has vit; choose a recipe" in line
    assert line.endswith(f"use --model.encoder {name}")


@pytest.mark.long
def test_what_does_not_fit_is_said(tmp_path, scenes, capsys):
    for make, message in (
        (lambda: ViTTiny(num_heads=5), r"ViTTiny.embed_dim must be a multiple of 5"),
        (lambda: ViTSmall(depth=0), r"ViTSmall.depth must be at least 1"),
    ):
        with error_line(message):
            make()
    mae = tmp_path / "mae"
    words = f"--data {scenes} --steps 1 --device cpu --out"
    invoke("pretrain mae_tiny", words, mae)
    for encoder, message in (
        ("vit_t", "use --model.encoder.depth 4 --model.encoder.embed-dim 96"),
        ("vit_s", "use --model.encoder.num-heads 3"),
    ):
        given = f"{tmp_path}/b --model.encoder {encoder} --init mae:{mae}"
        assert message in refusal(capsys, "train tiny", words, given)
    line = refusal(capsys, "train tiny", words, f"{tmp_path}/b --model.encoder vit_m")
    assert "choose from vit, vit_t, vit_s, " in line
    assert vit_b().encoder_name == "vit"
