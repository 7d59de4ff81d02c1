"""The small built-in image encoders: their layers, training, commands and limits."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from gigamask import Sam, config_files, load_model
from gigamask.cli.main import main
from gigamask.distributed.fsdp import is_sharded_tensor
from gigamask.distributed.world import destroy_world, init_world
from gigamask.errors import GigamaskError
from gigamask.models.configs import RepViT, SamConfig, ViTSmall, ViTTiny, vit_b
from gigamask.models.init import build_model
from gigamask.training.optim import AdamW, layer_ids
from gigamask.training.trainer import train
from tests.laws.test_training import same
from tests.little import SPEC, little
from tests.ranks import fork

SMALL = {
    "vit_t": ViTTiny(embed_dim=16, depth=3, num_heads=2),
    "vit_s": ViTSmall(embed_dim=24, depth=2, num_heads=2),
    "repvit": RepViT(widths=(8, 8, 16, 24), depths=(1, 1, 2, 1)),
}
COUNTS = {"vit_t": 3, "vit_s": 2, "repvit": 8}


@pytest.fixture(params=SMALL)
def name(request) -> str:
    return request.param


def spec_of(name: str, rate: float = 0.0) -> SamConfig:
    return replace(SPEC, encoder=SMALL[name], drop_path_rate=rate)


def case(out: Path, scenes: Path, name: str, **changes):
    changes = {"steps": 4, "save_every": 2, "optimizer": AdamW(layer_decay=0.8)} | changes
    run = replace(little(), out=str(out), data=(str(scenes),), model=spec_of(name, 0.3), **changes)
    config_files.save_config(run)
    return run


def pixels(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_vit_t_is_a_plain_transformer():
    """Written with torch's own attention: norm, attention, norm, MLP, each with a residual."""
    model = build_model(spec_of("vit_t"), 0).double()
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


def test_repvit_joins_its_last_two_stages():
    """At stride 16, like EdgeSAM; its blocks are those of RepViT-M1, with 1 in 2 squeezed."""
    encoder = build_model(SamConfig(image_size=64, encoder=RepViT()), 0).image_encoder
    widths = [block.norm2.normalized_shape[0] for block in encoder.blocks]
    assert widths == [48] * 3 + [96] * 4 + [192] * 16 + [384] * 3
    squeezed = [not isinstance(block.squeeze, nn.Identity) for block in encoder.blocks]
    assert squeezed == [
        *(True, False, False),
        *(False, True, False, False),
        *(False, *(True, False) * 7, False),
        *(False, True, False),
    ]
    x, images = encoder.stem(pixels()), pixels()
    assert x.shape == (2, 48, 16, 16)
    maps = []
    for index, block in enumerate(encoder.blocks):
        x = block(x, None)
        if index in (22, 25):
            maps.append(x)
    fine, coarse = (lateral(each) for lateral, each in zip(encoder.laterals, maps, strict=True))
    assert (fine.shape[-1], coarse.shape[-1]) == (4, 2)
    joined = fine + functional.interpolate(coarse, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(encoder(images, None), encoder.neck(joined))


@pytest.mark.parametrize("patch_size", [8, 16, 32])
def test_repvit_has_any_of_its_strides(patch_size):
    spec = replace(spec_of("repvit"), patch_size=patch_size)
    assert build_model(spec, 0).image_encoder(pixels(), None).shape[-1] == 64 // patch_size


def test_an_embedding_does_not_depend_on_other_images(name):
    encoder = build_model(spec_of(name), 0).image_encoder.train()
    both, first = encoder(pixels(), None), encoder(pixels()[:1], None)
    torch.testing.assert_close(both[:1], first)


def test_blocks_decay_by_depth_and_can_be_skipped(name):
    spec = spec_of(name, 0.5)
    model = build_model(spec, 0)
    blocks = model.encoder_blocks
    assert len(blocks) == COUNTS[name] == spec.encoder.drop_path_blocks(spec)
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


def test_a_stopped_training_resumes_bit_for_bit(tmp_path, scenes, name):
    """Every parameter learns; recomputing blocks changes nothing."""
    whole = train(case(tmp_path / "whole", scenes, name, ema=0.9))
    begun = case(tmp_path / "begun", scenes, name).build().state_dict()
    now = whole.model.state_dict()
    still = [key for key in begun if torch.equal(begun[key], now[key])]
    assert not any(key.startswith("image_encoder.") for key in still)
    train(case(tmp_path / "run", scenes, name, ema=0.9, steps=2))
    saved = config_files.load_config(str(tmp_path / "run"), trust=True)
    resumed = train(replace(saved, steps=4, activation_checkpointing=1))
    assert same(whole, resumed)
    loaded = load_model(tmp_path / "run")
    assert loaded.config.encoder == SMALL[name]


def sharded_training(folder: str) -> None:
    world = init_world(os.environ, torch.device("cpu"), 60.0)
    try:
        state = train(config_files.load_config(folder, trust=True), world)
        assert any(map(is_sharded_tensor, state.model.parameters()))
    finally:
        destroy_world(world)


def test_sharded_it_is_the_same_training(tmp_path, scenes):
    whole = train(case(tmp_path / "whole", scenes, "vit_t", activation_checkpointing=1))
    run = case(tmp_path / "sharded", scenes, "vit_t", parallel="fsdp", activation_checkpointing=1)
    fork(2, sharded_training, run.out)
    weights = load_model(run.out).state_dict()
    for key, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit_t", "repvit"])
def test_by_command(tmp_path, scenes, name, capsys):
    """Trained, resumed, evaluated, planned, exported and read back."""
    run = tmp_path / "run"
    words = ["tiny", "--model.image-size", "64", "--model.encoder", name]
    sizes = ["--model.encoder.depth", "2"]
    if name == "repvit":
        sizes = "--model.encoder.widths 8 8 16 16".split()
        sizes += "--model.encoder.depths 1 1 1 1".split()
    words += sizes
    data = f"--data {scenes} --out {run} --evaluation none".split()
    assert main(["train", *words, *data, "--steps", "2"]) == 0
    assert main(f"train --resume {run} --steps 3".split()) == 0
    assert main(f"evaluate {run} --data {scenes} --max-images 2".split()) == 0
    assert main(f"export {run} --to onnx --out {tmp_path}/onnx".split()) == 0
    assert "read back: outputs differ by at most" in capsys.readouterr().out
    exported = tmp_path / "model.safetensors"
    assert main(f"export {run} --to safetensors --out {exported}".split()) == 0
    assert Sam.from_pretrained(exported).config == Sam.from_pretrained(run).config
    assert main(["plan", *words, "--gpu", "h200", "--activation-checkpointing", "1"]) == 0
    capsys.readouterr()
    for kind, out in (("official", "a.pth"), ("huggingface", "a")):
        assert main(["export", str(run), "--to", kind, "--out", str(tmp_path / out)]) == 2
        assert f"no image encoder but SAM's ViT; this model has {name}" in capsys.readouterr().err
    assert main(["train", "tiny", *data[:2], "--out", str(tmp_path / "b"), "--init", str(run)]) == 2
    assert f"has the image encoder {name}, the model has vit" in capsys.readouterr().err


@pytest.mark.long
def test_what_does_not_fit_is_said(tmp_path, scenes, capsys):
    for make, message in (
        (lambda: ViTTiny(num_heads=5), r"ViTTiny.embed_dim must be a multiple of 5"),
        (lambda: ViTSmall(depth=0), r"ViTSmall.depth must be at least 1"),
        (lambda: RepViT(widths=(8, 8, 8, 9)), r"RepViT.widths must be positive multiples of 4"),
        (lambda: RepViT(depths=(1, 1, 0, 1)), r"RepViT.depths must be at least 1"),
        (
            lambda: build_model(SamConfig(image_size=64, patch_size=4, encoder=RepViT()), 0),
            r"repvit needs --model.patch-size 8, 16 or 32",
        ),
    ):
        with pytest.raises(GigamaskError, match=message):
            make()
    mae = tmp_path / "mae"
    words = f"--data {scenes} --out {mae} --steps 1 --device cpu".split()
    assert main(["pretrain", "mae_tiny", *words]) == 0
    words[3] = str(tmp_path / "b")
    for encoder, message in (
        ("vit_t", "use --model.encoder.depth 4 --model.encoder.embed-dim 96"),
        ("vit_s", "use --model.encoder.num-heads 3"),
        ("repvit", "mae: is for --model.encoder vit, vit_t or vit_s (got repvit)"),
    ):
        given = ["--model.encoder", encoder, "--init", f"mae:{mae}"]
        assert main(["train", "tiny", *words, *given]) == 2
        assert message in capsys.readouterr().err
    fsdp = "--model.encoder repvit --parallel fsdp --optimizer adamw".split()
    assert main(["train", "tiny", *words, *fsdp]) == 2
    assert "of which repvit has none; use --parallel ddp" in capsys.readouterr().err
    assert main(["train", "tiny", *words, "--model.encoder", "repvit_m1"]) == 2
    error = capsys.readouterr().err
    assert "choose from vit, vit_t, vit_s, repvit, hiera, conv_pyramid" in error
    assert vit_b().encoder_name == "vit"
