"""What the first step shows about modules of a user."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gigamask.distributed.foreign_modules import is_foreign
from gigamask.distributed.world import World
from gigamask.training.first_step import seed_modules, watched
from tests.errors import error_line
from tests.little import little


class Encoder(nn.Module):
    """An encoder of a user."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.layers = nn.Conv2d(3, 4, 1), nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(self.conv(x))


def step(*layers: nn.Module, world: World | None = None) -> None:
    model = nn.Module()
    model.image_encoder = Encoder(*layers)
    with torch.random.fork_rng(), watched(model, world or World()):
        model.image_encoder(torch.rand(2, 3, 4, 4, generator=torch.Generator()))


@pytest.mark.parametrize(
    "layer, line",
    [
        (nn.GroupNorm(2, 4), None),
        (nn.Dropout(0.5), "random numbers"),
        (nn.BatchNorm2d(4), "layers.0.num_batches_tracked"),
        (nn.BatchNorm2d(4).eval(), None),
    ],
    ids=str,
)
def test_dropout_and_statistics_are_said(layer, line, capsys):
    step(layer)
    said = capsys.readouterr().err
    assert (said.count("\n") == 1 and line in said) if line else not said


class Two(World):
    """Two processes, of which the other one has nothing to do."""

    def gather(self, value):
        return [value, type(value)()]


def test_statistics_of_several_processes_are_refused():
    with error_line("2 processes"):
        step(nn.BatchNorm2d(4), world=Two(size=2))
    step(nn.GroupNorm(2, 4), world=Two(size=2))


def test_seeds_are_those_of_step_and_process():
    drawn = []
    with torch.random.fork_rng():
        for key in ((3, 0), (3, 0), (4, 0), (3, 1)):
            seed_modules(7, *key)
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_models_of_gigamask_draw_nothing_and_are_not_foreign():
    model = replace(little(), freeze=()).build()
    assert not is_foreign(model.image_encoder)
    assert is_foreign(nn.Sequential())
