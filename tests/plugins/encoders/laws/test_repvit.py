"""RepViT: its layers, and what holds for every small encoder."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.plugins.encoders.configs import RepViT
from tests.commands import invoke, refusal
from tests.errors import error_line
from tests.laws.test_small_encoders import (
    pixels,
    run_commands,
    spec_of,
    test_a_stopped_training_resumes_bit_for_bit,  # noqa: F401
    test_an_embedding_does_not_depend_on_other_images,  # noqa: F401
    test_blocks_decay_by_depth_and_can_be_skipped,  # noqa: F401
)
from tests.little import SPEC
from tests.unit.models.test_channels import (
    test_weights_for_rgb_see_gray_images_in_five_channels_as_before,  # noqa: F401
)

REPVIT = RepViT(widths=(8, 8, 16, 24), depths=(1, 1, 2, 1))


@pytest.fixture
def small() -> tuple[RepViT, int]:
    return REPVIT, 8


@pytest.fixture
def config() -> SamConfig:
    return replace(SPEC, encoder=RepViT((8, 8, 16, 16), (1, 1, 1, 1)))


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


def test_gradients_of_padded_images_are_as_small_as_others():
    encoder = build_model(SamConfig(image_size=64, encoder=RepViT()), 0).image_encoder
    images = pixels()
    images[:, :, 40:] = 0
    encoder(images, None)[:, :, :, ::2].mean().backward()
    norms = [parameter.grad.norm() for parameter in encoder.parameters()]
    assert torch.stack(norms).norm() < 100


@pytest.mark.parametrize("patch_size", [8, 16, 32])
def test_repvit_has_any_of_its_strides(patch_size):
    spec = replace(spec_of(REPVIT), patch_size=patch_size)
    assert build_model(spec, 0).image_encoder(pixels(), None).shape[-1] == 64 // patch_size


@pytest.mark.long
def test_by_command(tmp_path, scenes, capsys):
    sizes = "--model.encoder.widths 8 8 16 16 --model.encoder.depths 1 1 1 1"
    run_commands(tmp_path, scenes, capsys, "repvit", sizes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RepViT(widths=(8, 8, 8, 9)), r"RepViT.widths must be positive multiples of 4"),
        (lambda: RepViT(depths=(1, 1, 0, 1)), r"RepViT.depths must be at least 1"),
        (
            lambda: build_model(SamConfig(image_size=64, patch_size=4, encoder=RepViT()), 0),
            r"repvit needs --model.patch-size 8, 16 or 32",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_said(make, message):
    with error_line(message):
        make()


@pytest.mark.long
def test_what_it_cannot_is_said(tmp_path, scenes, capsys):
    mae = tmp_path / "mae"
    words = f"--data {scenes} --out {mae} --steps 1 --device cpu".split()
    invoke("pretrain", "mae_tiny", *words)
    words[3] = str(tmp_path / "b")
    for given, message in (
        (f"repvit --init mae:{mae}", "mae: is for --model.encoder vit, vit_t or vit_s"),
        ("repvit --parallel fsdp --optimizer adamw", "of which repvit has none"),
        ("repvit:m1", "repvit takes no value"),
    ):
        assert message in refusal(capsys, "train", "tiny", *words, "--model.encoder", given)
