"""SAM's decoder with kernels: what it predicts and all gradients equal those without."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from gigamask import recipes
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.transformer import DensePrompt
from gigamask.plugins.kernels.config import TritonKernels
from gigamask.types import Prompts
from tests.plugins.kernels.interpreter import patch_once

patch_once()
CONFIG = SamConfig(
    image_size=64,
    embed_dim=32,
    depth=1,
    num_heads=2,
    window_size=2,
    global_attn_indexes=(),
    embedding_dim=32,
    decoder_num_heads=2,
    decoder_mlp=32,
    iou_hidden=32,
)


@contextmanager
def kernels_in(model: nn.Module):
    task = replace(recipes.tiny(), model=CONFIG).task(torch.device("cpu"))
    with TritonKernels().used(task, model):
        yield


def decoded(model: nn.Module, images: int, has_masks: bool, is_mixed: bool, count: int = 2):
    """Return predictions of random prompts and the gradients of all of the decoder's weights."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(images, 32, 4, 4, generator=generator).requires_grad_()
    prompts = Prompts(
        torch.rand(count, 3, 2, generator=generator) * 64,
        torch.tensor([[1, 0, -1]] * count),
        torch.randn(count, 16, 16, generator=generator) if has_masks else None,
        not has_masks,
        has_mask_prompt=torch.arange(count) % 2 == 0 if is_mixed else None,
        token_mask=torch.tensor([[True, True, False]] * count) if is_mixed else None,
    )
    outputs = model.decode(embedding, torch.arange(count) * images // count, prompts)
    weights = dict(model.mask_decoder.named_parameters())
    weights |= dict(model.prompt_encoder.named_parameters())
    given = [torch.randn(each.shape, generator=generator) for each in outputs]
    found = torch.autograd.grad(outputs, [embedding, *weights.values()], given, allow_unused=True)
    return outputs, dict(zip(["embedding", *weights], found, strict=True))


@pytest.mark.parametrize("images, has_masks, is_mixed", [(1, False, False), (2, True, True)])
def test_predictions_and_gradients_equal_those_without_kernels(images, has_masks, is_mixed):
    model = build_model(CONFIG, 0, "cpu")
    for parameter in model.mask_decoder.parameters():
        nn.init.normal_(parameter, std=0.2)
    wanted, wanted_gradients = decoded(model, images, has_masks, is_mixed)
    with kernels_in(model):
        found, found_gradients = decoded(model, images, has_masks, is_mixed)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))
    scale = max(float(each.norm()) for each in wanted_gradients.values() if each is not None)
    for name, other in wanted_gradients.items():
        one = found_gradients[name]
        assert (one is None) == (other is None), name
        if one is not None:
            limit = 1e-5 * (float(other.norm()) + 1e-2 * scale)
            assert float((one - other).norm()) <= limit, name


def test_an_evaluation_within_a_training_uses_no_kernel(monkeypatch):
    model = build_model(CONFIG, 0, "cpu").eval()
    wanted, _ = decoded(model, 1, True, False)
    with kernels_in(model):
        monkeypatch.setattr("gigamask.plugins.kernels.decoder.Upscaling", None)
        found, _ = decoded(model, 1, True, False)
        with pytest.raises(AttributeError, match="apply"):
            decoded(model.train(), 1, True, False)
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_methods_are_restored():
    model = build_model(CONFIG, 0, "cpu")
    with ExitStack() as stack:
        stack.enter_context(kernels_in(model))
        assert "upscaled" in vars(model.mask_decoder)
        assert "attend" in vars(model.mask_decoder.transformer)
    assert "upscaled" not in vars(model.mask_decoder)
    assert "attend" not in vars(model.mask_decoder.transformer)


@pytest.mark.parametrize("mask_tokens", [range(1), range(1, 4)])
def test_heads_equal_those_one_by_one(mask_tokens):
    model = build_model(replace(CONFIG, class_names=("a", "b")), 0, "cpu")
    decoder = model.mask_decoder
    tokens = torch.randn(3, 7, 32, requires_grad=True)
    weights = [tokens, *decoder.parameters()]

    def results() -> list[torch.Tensor]:
        found = decoder._heads(tokens, mask_tokens)
        assert found[1].shape == (3, len(mask_tokens))
        assert found[2].shape[-1] == 2
        total = sum(each.square().sum() for each in found)
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        return [*found, *(each for each in gradients if each is not None)]

    wanted = results()
    with kernels_in(model):
        assert "_heads" in vars(decoder)
        found = results()
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_another_activation_is_computed_without_kernels(monkeypatch):
    model = build_model(CONFIG, 0, "cpu")
    transformer = model.mask_decoder.transformer
    transformer.layers[1].mlp.act = nn.GELU()
    args = torch.randn(1, 16, 32), torch.randn(16, 32), torch.randn(1, 3, 32), torch.zeros(1).long()
    wanted = transformer.attend(*args, DensePrompt(torch.zeros(32)), None)
    monkeypatch.setattr("gigamask.plugins.kernels.decoder.TokensAfterTokens", None)
    with kernels_in(model):
        found = transformer.attend(*args, DensePrompt(torch.zeros(32)), None)
    assert all(map(torch.equal, found, wanted))


def test_positions_that_are_trained_are_computed_without_kernels():
    model = build_model(CONFIG, 0, "cpu")
    positions = model.prompt_encoder.token_positions().flatten(0, 1).requires_grad_()
    transformer = model.mask_decoder.transformer
    args = torch.randn(1, 16, 32), positions, torch.randn(1, 3, 32), torch.zeros(1).long()
    with kernels_in(model):
        tokens, _ = transformer.attend(*args, DensePrompt(torch.zeros(32)), None)
    (gradient,) = torch.autograd.grad(tokens[..., 0].sum(), [positions])
    assert gradient.abs().max() > 0
