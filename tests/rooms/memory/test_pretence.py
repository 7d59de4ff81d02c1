"""Tensors without numbers do what tensors do, and hold what those would."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gigamask.memory.pretence import embody, stage
from gigamask.model import attention
from gigamask.model.image_encoder import Attention


def test_nothing_is_computed_and_all_is_counted():
    with stage("cpu") as book:
        huge = torch.empty(2**40, 8)
        assert huge.device.type == "cpu"
        assert book.now == 2**45
        assert (huge + 1).shape == (2**40, 8)
        assert book.peak == 2**46
        del huge
        assert book.now == 0


def test_numbers_are_all_one():
    with stage("cpu"):
        some = torch.zeros(3, dtype=torch.int64)
        assert (int(some[0]), float(some[1]), bool(some[2]), some[0].item()) == (1, 1.0, True, 1)
        assert list(range(9))[some[0] :] == list(range(9))[1:]
        assert np.array_equal(some.numpy(), np.ones(3))


def test_what_is_changed_in_place_stays_itself():
    with stage("cpu") as book:
        some = torch.zeros(10)
        view = some.view(2, 5)
        assert view.add_(1) is view
        assert torch.add(view, 1, out=view) is view
        torch._foreach_mul_([some], 2.0)
        assert book.peak == 40


def test_real_tensors_may_be_met():
    real = torch.ones(4)
    with stage("cpu"):
        assert (torch.zeros(4) + real).shape == (4,)
        assert torch.tensor([1.0, 2.0]).shape == (2,)


def test_gradients_and_autocast_are_those_of_real_tensors():
    layer = nn.Linear(8, 4)
    held = []
    for pretended in (False, True):
        with stage("cpu") if pretended else torch.enable_grad():
            model = embody(nn.Linear(8, 4, device="meta"), "cpu") if pretended else layer
            with torch.autocast("cpu", torch.bfloat16):
                answer = model(torch.zeros(2, 8)).relu()
            answer.sum().backward()
            held.append((answer.dtype, [p.grad.shape for p in model.parameters()], model.weight.grad.dtype))
    assert held[0] == held[1]
    assert held[0][0] == torch.bfloat16


def test_a_model_gets_a_body_once_for_what_it_shares_and_the_devices_attention():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            self.attention = Attention(8, 2, 4, 0)
            self.register_buffer("scale", torch.zeros(5))
            self.register_buffer("none", None)

    with torch.device("meta"):
        model = Two()
    model.one.bias.requires_grad_(False)
    with stage("cuda"):
        embody(model, "cuda")
        assert model.one.weight is model.two.weight
        assert not model.one.bias.requires_grad
        assert model.scale.device.type == "cpu"
        assert isinstance(model.scale, torch.Tensor)
        assert not isinstance(model.scale, nn.Parameter)
        assert model.attention.attend is attention.attend_augmented
        assert embody(model, "cpu").attention.attend is attention.attend_in_chunks


def test_a_gpu_has_blocks_widens_norms_and_sums_inside_flash_attention():
    """CUDA's autocast computes layer norms in float32; its flash attention sums the gradient of the queries there, in tiles of 128 x 32."""
    norm = torch.ones(16)
    kinds = {}
    for device in ("cpu", "cuda"):
        with stage(device) as book:
            small = torch.zeros(1)
            kinds[device] = [book.now]
            with torch.autocast("cpu", torch.bfloat16):
                half = torch.zeros(2, 16, dtype=torch.bfloat16)
                kinds[device].append(functional.layer_norm(half, (16,), norm, norm).dtype)
            q, k, v = (torch.zeros(1, 2, 100, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            answer = functional.scaled_dot_product_attention(q, k, v).sum()
            book.since()
            before = book.now
            answer.backward()
            kinds[device].append(book.peak - before)
            del small
    assert kinds["cpu"][:2] == [4, torch.bfloat16]
    assert kinds["cuda"][:2] == [512, torch.float32]
    assert kinds["cuda"][2] - kinds["cpu"][2] > 4 * 2 * 128 * 33 - 3 * 6400


def test_no_tensor_leaves_the_stage():
    with stage("cpu"):
        some = torch.zeros(3)
    with pytest.raises(RuntimeError, match="a pretended tensor left the stage it was made on"):
        some + 1
