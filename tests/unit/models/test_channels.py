"""Models of any number of channels, and weights for RGB that start them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.models import state_dict, weight_files
from gigamask.models.configs import SamConfig, ViTTiny
from gigamask.models.init import build_model
from gigamask.models.pretrained import load_sam
from gigamask.pixels import PixelConfig
from tests.errors import error_line
from tests.little import COMPACT, SPEC

MODELS = {
    "vit": SPEC,
    "vit_t": replace(SPEC, encoder=ViTTiny(embed_dim=24, depth=2)),
    "compact": COMPACT,
}
FIVE = PixelConfig(5, window=(0.0, 999.0))


def gray_embedding(model, level: torch.Tensor) -> torch.Tensor:
    """The embedding of normalized gray pixels, the same in all channels."""
    mean, std = model.pixel_mean, model.pixel_std
    images = (level * std + mean).expand(1, model.config.in_channels, 64, 64)
    return model.eval().encode(images.contiguous(), torch.tensor([[64, 64]]))


@pytest.fixture(params=MODELS)
def config(request) -> SamConfig:
    """A model; other modules of tests have others."""
    return MODELS[request.param]


@pytest.mark.slow
@torch.no_grad()
def test_weights_for_rgb_see_gray_images_in_five_channels_as_before(config, tmp_path):
    rgb = build_model(config, 0)
    path = tmp_path / "rgb.safetensors"
    state_dict.save_weights(rgb.state_dict(), config, path)
    five = build_model(replace(config, pixels=FIVE), 1)
    assert five.pixel_mean.shape == (5, 1, 1)
    five.load_init(str(path))
    level = torch.randn(1, 1, 64, 64)
    torch.testing.assert_close(gray_embedding(five, level), gray_embedding(rgb, level))
    differing = [
        key
        for key, value in rgb.state_dict().items()
        if five.state_dict()[key].shape != value.shape
    ]
    assert len(differing) == 1
    for key in differing:
        mean = rgb.state_dict()[key].mean(1)
        for channel in range(5):
            torch.testing.assert_close(five.state_dict()[key][:, channel], mean * 0.6)


@pytest.mark.slow
def test_one_channel_sums_the_three():
    one = build_model(replace(SPEC, pixels=PixelConfig(1)), 0)
    rgb = build_model(SPEC, 0)
    name = "image_encoder.patch_embed.proj.weight"
    fitted = state_dict.fit_weights(one, rgb.state_dict(), "x")[name]
    torch.testing.assert_close(fitted[:, 0], rgb.state_dict()[name].sum(1))
    with error_line(r"patch_embed.*\(16, 1, 8, 8\).*\(16, 3, 8, 8\)"):
        state_dict.fit_weights(rgb, one.state_dict(), "x")
    with error_line("patch_embed"):
        state_dict.fit_weights(one, rgb.state_dict(), "x", resample=False)


@pytest.mark.slow
def test_files_state_the_pixels_and_only_where_they_differ(tmp_path):
    config = replace(SPEC, pixels=PixelConfig(5, percentiles=(0.5, 99.5)))
    assert weight_files.make_spec(config)["pixels"] == {"channels": 5, "percentiles": (0.5, 99.5)}
    assert "pixels" not in weight_files.make_spec(SPEC)
    state = build_model(config, 0).state_dict()
    for path in (tmp_path / "a.safetensors", tmp_path / "a.pth"):
        write = weight_files.save_weights if path.suffix != ".pth" else weight_files.write_pth
        write(state, config, path)
        assert load_sam(path).config == config
    broken = weight_files.make_spec(config) | {"pixels": {"channels": -2}}
    with error_line(r"x: .*channels"):
        weight_files._parse_spec(json.dumps(broken), "x")


def test_other_channels_are_one_line():
    model = build_model(replace(SPEC, pixels=PixelConfig(1)), 0)
    with error_line(r"1 channels .*3"):
        model.encode(torch.zeros(1, 3, 64, 64), torch.tensor([[64, 64]]))


def test_a_window_is_stated_once():
    model = build_model(SPEC, 0)
    assert model.set_window((0.0, 9.0)).config.pixels == PixelConfig(window=(0.0, 9.0))
    assert model.set_window().config.pixels.window == (0.0, 9.0)
    measured = np.array([0, 9], np.uint16)
    assert json.dumps(model.set_window(tuple(measured)).config.pixels.window) == "[0.0, 9.0]"
    with error_line("window 0 9"):
        model.set_window(percentiles=(1.0, 99.0))
