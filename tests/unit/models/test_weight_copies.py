"""Copies of weights in half precision: their gradients, frozen weights, restored modules."""

import pytest
import torch
from torch import nn

from gigamask.models.weight_copies import casting_blocks, weight_copies

LINEAR = (nn.Linear,)


def modules():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), nn.Sequential(nn.Linear(6, 3))


def backward(first, second, x):
    with torch.autocast("cpu", torch.bfloat16):
        second(first(x)).float().square().sum().backward()


def test_gradients_equal_those_of_autocast():
    first, second = modules()
    xs = torch.randn(3, 5, 4)
    for x in xs:
        backward(first, second, x)
    parameters = [*first.parameters(), *second.parameters()]
    wanted = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    with weight_copies((first, second), LINEAR, torch.bfloat16) as copies:
        assert first[0].weight.dtype == torch.bfloat16
        assert first[1].weight.data_ptr() == parameters[2].data_ptr()
        for x in xs:
            backward(first, second, x)
            copies.add_gradients()
    assert [p.dtype for p in parameters] == [torch.float32] * 6
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, wanted, strict=True))


def test_frozen_weights_get_no_gradient():
    first, second = modules()
    second.requires_grad_(False)
    with weight_copies((first, second), LINEAR, torch.float16) as copies:
        assert not second[0].weight.requires_grad
        backward(first, second, torch.randn(5, 4))
        copies.add_gradients()
    assert second[0].weight.grad is None
    assert first[0].weight.grad.abs().sum() > 0


def test_modules_have_their_weights_again_after_an_error():
    first, _ = modules()
    own = dict(first.named_parameters())
    with pytest.raises(ValueError, match="stop"), weight_copies((first,), LINEAR, torch.bfloat16):
        raise ValueError("stop")
    assert all(weight is own[name] for name, weight in first.named_parameters())


def test_nothing_is_replaced_without_a_dtype():
    first, _ = modules()
    own = dict(first.named_parameters())
    with weight_copies((first,), LINEAR, None) as copies:
        assert all(weight is own[name] for name, weight in first.named_parameters())
        copies.add_gradients()


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4))


def test_blocks_that_are_cast_together_have_the_gradients_of_autocast():
    one, other = block(), block()
    x = torch.randn(5, 4, requires_grad=True)
    own = dict(other.named_parameters())
    answers = []
    for module in (one, other):
        cast = LINEAR if module is other else ()
        with casting_blocks([module], cast, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            answers.append(module(x))
        answers[-1].float().square().sum().backward()
    assert torch.equal(answers[0], answers[1])
    for name, parameter in one.named_parameters():
        found = dict(other.named_parameters())[name]
        assert found is own[name]
        assert found.grad.dtype == torch.float32
        assert torch.equal(found.grad, parameter.grad), name
    assert not other._forward_hooks
    assert not other._forward_pre_hooks


def test_a_cast_block_that_fails_or_uses_only_some_weights():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            assert self.unused.weight.dtype == torch.bfloat16
            if x is None:
                raise ValueError("stop")
            return self.used(x)

    module = Half()
    module.used.bias.requires_grad_(False)
    with casting_blocks([module], LINEAR, torch.bfloat16):
        with pytest.raises(ValueError, match="stop"):
            module(None)
        assert module.used.weight.dtype == torch.float32
        module(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
    assert module.used.weight.grad is not None
    assert module.used.bias.grad is None
    assert module.unused.weight.grad is None
