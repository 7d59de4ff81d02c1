"""Blocks that compute again what they forgot: the same numbers, less to keep."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from gigamask.distributed.activation_checkpointing import checkpoint_blocks
from gigamask.models.init import build_model
from tests.errors import error_line
from tests.little import SPEC, little
from tests.saved_tensors import saved_tensors, storage_bytes

DEEP = replace(SPEC, depth=6, global_attn_indexes=(2, 5), drop_path_rate=0.5)
IMAGES = torch.randint(
    0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
SIZES = torch.tensor([[64, 48], [40, 64]])
DRAWN = torch.rand(2, 6, 2, generator=torch.Generator().manual_seed(1))


def encoded(every: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return the embedding, the gradients, and the bytes saved for backward besides weights."""
    model = build_model(DEEP, 0).double()
    if every is not None:
        checkpoint_blocks(model.image_encoder.blocks, every)
    with saved_tensors() as kept:
        embedding = model.encode(IMAGES, SIZES, DRAWN)
    (embedding * torch.arange(embedding.numel()).view_as(embedding).sin()).sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return embedding, gradients, storage_bytes(kept, besides=model.parameters())


@pytest.mark.slow
def test_embedding_and_gradients_are_the_same_and_less_is_kept():
    """Every n-th of six blocks keeps only its input, which saves about 1/n of the memory."""
    embedding, gradients, bytes_all = encoded(None)
    shares = {}
    for every in (1, 2, 3, 6):
        again, theirs, kept = encoded(every)
        assert torch.equal(again, embedding)
        assert gradients.keys() == theirs.keys()
        for name, gradient in gradients.items():
            assert float((gradient - theirs[name]).abs().max()) <= 1e-12 * float(
                gradient.abs().max()
            ), name
        shares[every] = kept / bytes_all
    assert shares[1] < 0.25
    saved = {every: (1 - share) / (1 - shares[1]) for every, share in shares.items()}
    assert saved == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 6: 1 / 6}, abs=0.02)


@pytest.mark.slow
def test_0_leaves_blocks_alone():
    model = build_model(DEEP, 0)
    checkpoint_blocks(model.image_encoder.blocks, 0)
    assert not any("forward" in vars(block) for block in model.image_encoder.blocks)
    assert encoded(0)[2] == encoded(None)[2]


@pytest.mark.parametrize(
    "every, which", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (4, [0, 4]), (9, [0])]
)
def test_which_blocks_recompute(every, which):
    model = build_model(DEEP, 0)
    checkpoint_blocks(model.image_encoder.blocks, every)
    assert [
        index for index, block in enumerate(model.image_encoder.blocks) if "forward" in vars(block)
    ] == which


@pytest.mark.slow
def test_checkpointing_changes_neither_weights_nor_evaluation():
    plain, run = little().build(), replace(little(), activation_checkpointing=1)
    model = run.build()
    assert all("forward" in vars(block) for block in model.image_encoder.blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    for evaluating in (torch.no_grad, torch.inference_mode):
        with evaluating():
            assert torch.equal(
                model.eval().encode(IMAGES, SIZES), plain.eval().encode(IMAGES, SIZES)
            )


class Foreign(nn.Module):
    """A block of a user: a convolution, and what is done to its result."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(4, 4, 3, padding=1), then

    def forward(self, x):
        return x + self.then(self.conv(x)).sin()


class Counting(nn.Module):
    """Draws from a generator of its own, which nobody can set back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


RANDOM: dict[str, Callable[[], Callable]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "torch": lambda: lambda x: x * torch.rand_like(x),
    "numpy": lambda: lambda x: x * np.random.rand(),
    "drop path": lambda: lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(4, 4, 1)),
    "hooked spectral norm": lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)),
}


def after_a_step(make: Callable[[], Callable], every: int) -> list[torch.Tensor]:
    """Return loss, gradients and buffers of two steps of a user's blocks."""
    np.random.seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(*(Foreign(make()) for _ in range(3))).train()
    checkpoint_blocks([*net, net[1]], every)
    loss = torch.zeros(())
    for _ in range(2):
        loss = net(torch.rand(2, 4, 8, 8)).square().sum()
        loss.backward()
    return [loss, *(p.grad for p in net.parameters()), *net.buffers(), torch.rand(2)]


@pytest.mark.slow
@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_blocks_of_a_user_are_repeated_exactly(make):
    for one, other in zip(after_a_step(make, 0), after_a_step(make, 1), strict=True):
        assert torch.equal(one, other)


def test_python_s_generator_is_repeated():
    drawn: list[float] = []

    def draw(x):
        drawn.append(random.random())
        return x * drawn[-1]

    after_a_step(lambda: draw, 1)
    assert drawn[:3] == drawn[5:2:-1]


def test_blocks_that_cannot_be_repeated_are_refused():
    with error_line("Foreign"):
        after_a_step(Counting, 1)
