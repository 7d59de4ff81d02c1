"""Which head size and which kernels are chosen for each GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from gigamask.models import transformer
from gigamask.models.configs import SamConfig
from gigamask.models.layers import planless_attention
from gigamask.models.sam import attention
from gigamask.models.sam.attention import (
    flash_head_size,
    rel_pos_attention_augmented,
    rel_pos_attention_reference,
)
from gigamask.models.transformer import DensePrompt, TwoWayTransformer

VIT_H_GLOBAL, VIT_B_GLOBAL, VIT_H_WINDOW = 80 + 2 * 64, 64 + 2 * 64, 80 + 2 * 14


@pytest.mark.parametrize("capability", [(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)])
def test_limited_gpus_get_heads_that_flash_trains(capability):
    assert flash_head_size(VIT_H_GLOBAL, capability) == 232
    for size in range(1, 257):
        padded = flash_head_size(size, capability)
        assert size <= padded <= 256
        assert padded % 8 == 0
        assert not 192 < padded <= 224
        assert padded - size < 8 or 192 < size <= 224


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0), (10, 0), (10, 3)])
def test_other_devices_get_the_next_multiple_of_eight(capability):
    assert flash_head_size(VIT_H_GLOBAL, capability) == 208
    for size in range(1, 257):
        assert 0 <= flash_head_size(size, capability) - size < 8


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (12, 0)])
def test_only_the_largest_heads_differ(capability):
    assert flash_head_size(VIT_B_GLOBAL, capability) == 192
    assert flash_head_size(VIT_H_WINDOW, capability) == 112


@pytest.mark.parametrize("capability, width", [(None, 208), ((8, 9), 232), ((9, 0), 208)])
def test_attention_pads_to_the_head_size_of_its_gpu(monkeypatch, capability, width):
    widths, original = [], F.scaled_dot_product_attention

    def recorded(q, k, v, **kwargs):
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return original(q, k, v, **kwargs)

    monkeypatch.setattr(attention, "_compute_capability", lambda device: capability)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    chance = torch.Generator().manual_seed(0)
    # A narrow grid of 2 x 126 tokens has the same sum, 208, as ViT-H's of 64 x 64.
    q, k, v = (torch.randn(1, 1, 2 * 126, 80, generator=chance) for _ in range(3))
    rows, columns = (
        torch.randn(2, 2, 80, generator=chance),
        torch.randn(126, 126, 80, generator=chance),
    )
    found = rel_pos_attention_augmented(q, k, v, rows, columns)
    assert widths == [(width,) * 3]
    wanted = rel_pos_attention_reference(q, k, v, rows, columns)
    assert (found - wanted).abs().max() < 1e-4


def test_the_decoder_excludes_cudnn_on_a_gpu_alone():
    before = set(_cur_sdpa_kernel_backends())
    with planless_attention(torch.device("cuda")):
        assert set(_cur_sdpa_kernel_backends()) == {
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        }
    assert set(_cur_sdpa_kernel_backends()) == before
    with planless_attention(torch.device("cpu")):
        assert set(_cur_sdpa_kernel_backends()) == before


def test_all_attention_of_the_decoder_runs_in_that_context(monkeypatch):
    config = SamConfig(image_size=32, embedding_dim=8, decoder_num_heads=2, decoder_mlp=8)
    model, backends = TwoWayTransformer.from_config(config), []
    original = F.scaled_dot_product_attention

    def recorded(*args):
        backends.append(set(_cur_sdpa_kernel_backends()))
        return original(*args)

    monkeypatch.setattr(transformer.F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(
        transformer, "planless_attention", lambda device: planless_attention(torch.device("cuda"))
    )
    images, tokens = torch.randn(1, 4, 8), torch.randn(3, 5, 8)
    dense = DensePrompt(torch.zeros(8))
    model.attend(images, torch.randn(4, 8), tokens, torch.zeros(3, dtype=torch.int64), dense, None)
    assert len(backends) == 7
    assert all(SDPBackend.CUDNN_ATTENTION not in each for each in backends)
