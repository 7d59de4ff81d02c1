"""Fake tensors behave as real ones and are counted with the bytes those would hold."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gigamask.models.sam import attention
from gigamask.models.sam.image_encoder import EncoderAttention
from gigamask.profiling.dry_run import fake_tensors, to_fake


def test_fake_tensors_take_no_memory_and_are_counted():
    with fake_tensors("cpu") as tracker:
        huge = torch.empty(2**40, 8)
        assert huge.device.type == "cpu"
        assert tracker.current == 2**45
        assert (huge + 1).shape == (2**40, 8)
        assert tracker.peak == 2**46
        del huge
        assert tracker.current == 0


def test_every_number_is_one():
    with fake_tensors("cpu"):
        some = torch.zeros(3, dtype=torch.int64)
        assert (int(some[0]), float(some[1]), bool(some[2]), some[0].item()) == (1, 1.0, True, 1)
        assert list(range(9))[some[0] :] == list(range(9))[1:]
        assert np.array_equal(some.numpy(), np.ones(3))


def test_in_place_operators_allocate_nothing():
    with fake_tensors("cpu") as tracker:
        some = torch.zeros(10)
        view = some.view(2, 5)
        assert view.add_(1) is view
        assert torch.add(view, 1, out=view) is view
        torch._foreach_mul_([some], 2.0)
        assert tracker.peak == 40


def test_real_tensors_can_be_mixed_in():
    real = torch.ones(4)
    with fake_tensors("cpu"):
        assert (torch.zeros(4) + real).shape == (4,)
        assert torch.tensor([1.0, 2.0]).shape == (2,)


def test_gradients_and_autocast_are_those_of_real_tensors():
    layer = nn.Linear(8, 4)
    held = []
    for fake in (False, True):
        with fake_tensors("cpu") if fake else torch.enable_grad():
            model = to_fake(nn.Linear(8, 4, device="meta"), "cpu") if fake else layer
            with torch.autocast("cpu", torch.bfloat16):
                answer = model(torch.zeros(2, 8)).relu()
            answer.sum().backward()
            held.append(
                (answer.dtype, [p.grad.shape for p in model.parameters()], model.weight.grad.dtype)
            )
    assert held[0] == held[1]
    assert held[0][0] == torch.bfloat16


def test_tied_parameters_stay_tied_and_attention_is_the_devices():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            self.attention = EncoderAttention(8, 2, 4, 0)
            self.register_buffer("scale", torch.zeros(5))
            self.register_buffer("none", None)

    with torch.device("meta"):
        model = Two()
    model.one.bias.requires_grad_(False)
    with fake_tensors("cuda"):
        to_fake(model, "cuda")
        assert model.one.weight is model.two.weight
        assert not model.one.bias.requires_grad
        assert model.scale.device.type == "cpu"
        assert isinstance(model.scale, torch.Tensor)
        assert not isinstance(model.scale, nn.Parameter)
        assert model.attention.attend is attention.rel_pos_attention_augmented
        assert to_fake(model, "cpu").attention.attend is attention.rel_pos_attention_chunked


def test_a_gpu_has_allocator_blocks_float32_norms_and_a_flash_workspace():
    """Flash attention accumulates the query gradient in float32, in tiles of 128 x 32."""
    norm = torch.ones(16)
    kinds = {}
    for device in ("cpu", "cuda"):
        with fake_tensors(device) as tracker:
            small = torch.zeros(1)
            kinds[device] = [tracker.current]
            with torch.autocast("cpu", torch.bfloat16):
                half = torch.zeros(2, 16, dtype=torch.bfloat16)
                kinds[device].append(functional.layer_norm(half, (16,), norm, norm).dtype)
            q, k, v = (
                torch.zeros(1, 2, 100, 16, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            answer = functional.scaled_dot_product_attention(q, k, v).sum()
            tracker.take_peak()
            before = tracker.current
            answer.backward()
            kinds[device].append(tracker.peak - before)
            del small
    assert kinds["cpu"][:2] == [4, torch.bfloat16]
    assert kinds["cuda"][:2] == [512, torch.float32]
    assert kinds["cuda"][2] - kinds["cpu"][2] > 4 * 2 * 128 * 33 - 3 * 6400
