"""An image encoder of a user's that draws random numbers and collects statistics.

Resuming and recomputing change nothing, frozen parts run as in evaluation, and what runs twice in a
step collects once.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gigamask.interfaces import ImageEncoder
from gigamask.losses.ohem import OHEM
from gigamask.models import state_dict
from gigamask.training.state import TrainState
from gigamask.training.trainer import train
from tests.little import little


class Block(nn.Module):
    """A convolution, a batch norm, dropout, and a skipped branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        kept = x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5) if self.training else 0.5
        return x + kept * self.drop(self.norm(self.conv(x)).relu())


class Net(nn.Module):
    """Patches, two blocks, and a neck."""

    def __init__(self, patch: int, dim: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.neck = nn.Conv2d(dim, dim, 1)

    def forward(self, pixels, drop_path):
        x = self.patches(pixels)
        for block in self.blocks:
            x = block(x)
        return self.neck(x)


@dataclass(frozen=True)
class Drawing(ImageEncoder):
    """Draws and collects."""

    def build(self, model):
        return Net(model.patch_size, model.embedding_dim)

    @property
    def pretrained(self):
        return True


def config(out: Path, scenes: Path, **changes: object):
    base = little()
    model = replace(base.model, encoder=Drawing())
    options = {
        "evaluation": replace(base.evaluation, interval=3, images=1, data=(str(scenes),))
    } | changes
    return replace(base, model=model, data=(str(scenes),), out=str(out), **options).check()


def trained(*steps: int, **given: object) -> dict[str, torch.Tensor]:
    """Return the weights after trainings of one run to each of some steps."""
    for until in steps:
        train(config(steps=until, **given))
    return state_dict.read_weights(given["out"])[0]


@pytest.mark.long
def test_resuming_and_recomputing_change_nothing(scenes, tmp_path, capfd):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    whole = trained(5, out=tmp_path / "whole", scenes=scenes, ema=0.9)
    assert torch.equal(torch.get_rng_state(), before)
    said = capfd.readouterr().err
    assert "global generator" in said
    assert "num_batches_tracked" in said
    torch.manual_seed(4)
    resumed = trained(2, 5, out=tmp_path / "resumed", scenes=scenes, ema=0.9)
    recomputed = trained(
        1, 5, out=tmp_path / "again", scenes=scenes, ema=0.9, activation_checkpointing=1
    )
    assert int(whole["image_encoder.blocks.0.norm.num_batches_tracked"]) == 10
    for other in (resumed, recomputed):
        assert other.keys() == whole.keys()
        assert all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.mark.parametrize("part", ["image_encoder", "image_encoder.blocks.0"])
def test_what_is_frozen_runs_as_in_evaluation(part, scenes, tmp_path):
    run = config(tmp_path / "run", scenes, steps=2, freeze=(part,))
    first = TrainState.initialize(run, torch.device("cpu")).model.state_dict()
    after = train(run).model
    assert not after.get_submodule(part).training
    changed = {name for name, x in after.state_dict().items() if not torch.equal(x, first[name])}
    assert changed
    assert not any(name.startswith(f"{part}.") for name in changed)
    assert ("image_encoder.blocks.1.norm.running_mean" in changed) == (part != "image_encoder")


def test_a_pass_that_only_chooses_masks_collects_nothing(scenes, tmp_path):
    weights = trained(2, out=tmp_path / "run", scenes=scenes, mining=OHEM())
    assert int(weights["image_encoder.blocks.0.norm.num_batches_tracked"]) <= 4  # micro-batches
