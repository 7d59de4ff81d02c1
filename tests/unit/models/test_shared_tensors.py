"""Tensors that rounds share: the gradients of several backward passes equal those of each alone."""

import pytest
import torch
import torch.nn.functional as F

from gigamask.models import shared_tensors as shared_module
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.models.shared_tensors import linear, shared, sharing
from gigamask.models.weight_copies import weight_copies
from gigamask.types import Prompts
from tests.little import SPEC

MASK_IMAGE = torch.tensor([0, 0, 1])


def rounds(model: Sam) -> list[Prompts]:
    """A first round, two with mask prompts, and one in which some masks have one."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for index, has_mask in enumerate((None, "all", "all", "some")):
        tokens = 2 + index
        points = torch.rand(3, tokens, 2, generator=chance, dtype=torch.float64) * 60
        side = model.config.mask_size
        masks = torch.randn(3, side, side, generator=chance, dtype=torch.float64)
        found.append(
            Prompts(
                points,
                torch.ones(3, tokens, dtype=torch.int64),
                masks if has_mask else None,
                index == 0,
                torch.tensor([True, False, True]) if has_mask == "some" else None,
            )
        )
    return found


def loss(model: Sam, embedding: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    logits, iou = model.decode(embedding, MASK_IMAGE, prompts)
    return logits.square().mean() + iou.square().sum()


def gradients(model: Sam, embedding: torch.Tensor) -> dict[str, torch.Tensor | None]:
    found = {name: p.grad for name, p in model.named_parameters()}
    found["embedding"] = embedding.grad
    model.zero_grad()
    embedding.grad = None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", [SPEC, tiny()], ids=["little", "tiny"])
def test_gradients_of_rounds_are_exact(config):
    model = build_model(config, 0).double()
    size = config.embedding_size
    embedding = torch.randn(2, config.embedding_dim, size, size, dtype=torch.float64)
    embedding.requires_grad_()
    for prompts in rounds(model):
        loss(model, embedding, prompts).backward()
    plain = gradients(model, embedding)
    parts = (model.prompt_encoder, model.mask_decoder)
    with weight_copies(parts, (), torch.float64) as copies:
        for prompts in rounds(model):
            loss(model, embedding, prompts).backward()
            copies.add_gradients()
        copies.finish()
    ours = gradients(model, embedding)
    assert plain["embedding"].abs().max() > 0
    for name, gradient in plain.items():
        if gradient is None:
            assert ours[name] is None, name
            continue
        assert (ours[name] - gradient).abs().max() <= 1e-12 * (1 + gradient.abs().max()), name


def test_tensors_are_computed_once_within_the_context_and_each_time_outside():
    layer, calls = torch.nn.Linear(2, 2), []

    def compute():
        calls.append(layer.weight * 2)
        return (calls[-1],)

    with sharing([layer], enabled=True) as tensors:
        first, second = shared(layer, "twice", compute)[0], shared(layer, "twice", compute)[0]
        assert first is second
        assert first.is_leaf
        # What is computed from a shared tensor may be shared, too.
        (square,) = shared(layer, "square", lambda: (shared(layer, "twice", compute)[0] ** 2,))
        for factor in (1.0, 3.0):
            ((first + square) * factor).sum().backward()
            tensors.add_gradients()
        tensors.backward()
    assert len(calls) == 1
    wanted = 4 * (2 + 8 * layer.weight.detach())
    assert torch.allclose(layer.weight.grad, wanted)
    assert shared(layer, "twice", compute)[0] is not shared(layer, "twice", compute)[0]
    with sharing([layer], enabled=False):
        assert not shared(layer, "twice", compute)[0].is_leaf


@pytest.mark.parametrize("kept_rows", [5, 100], ids=["multiplied on the way", "at the end"])
def test_a_linear_layer_multiplies_the_rounds_at_once(kept_rows, monkeypatch):
    monkeypatch.setattr(shared_module, "MAX_KEPT_ROWS", kept_rows)
    layer, inputs = torch.nn.Linear(3, 2).double(), torch.randn(3, 2, 2, 3, dtype=torch.float64)
    inputs.requires_grad_()
    for x in inputs:
        F.linear(x, layer.weight, layer.bias).square().sum().backward()
    wanted = [layer.weight.grad, layer.bias.grad, inputs.grad]
    layer.weight.grad = layer.bias.grad = inputs.grad = None
    with sharing([layer], enabled=True) as tensors:
        for number, x in enumerate(inputs):
            linear(layer, x).square().sum().backward()
            # After 4 and 8 rows of at most 5, those of two rounds are multiplied.
            assert (layer.weight.grad is not None) == (kept_rows == 5 and number >= 1)
        tensors.backward()
    found = [layer.weight.grad, layer.bias.grad, inputs.grad]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=0)


def test_a_frozen_linear_layer_keeps_nothing():
    layer, x = torch.nn.Linear(3, 2).requires_grad_(False), torch.randn(4, 3, requires_grad=True)
    with sharing([layer], enabled=True) as tensors:
        linear(layer, x).sum().backward()
        tensors.backward()
    assert torch.equal(x.grad, layer.weight.sum(0).expand(4, -1))
    assert layer.weight.grad is None


def test_modules_forget_the_tensors_after_an_error():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="stop"), sharing([layer], enabled=True):
        raise ValueError("stop")
    assert not shared(layer, "weight", lambda: (layer.weight * 1,))[0].is_leaf
