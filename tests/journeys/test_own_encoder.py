"""A user's own image encoder in their own recipe: train, resume, evaluate, export, initialize."""

from functools import partial

import pytest
import torch

from gigamask.config_files import config_of_weights
from gigamask.training.checkpoint import load_model, newest
from tests.commands import LITTLE, invoke, refusal

RECIPE = '''
from dataclasses import dataclass, fields
from gigamask.training.sam_config import SamTrainConfig
from tests.little import little

@dataclass(frozen=True)
class Pooled(SamTrainConfig):
    """Patches of mean colour, projected."""
    scale: float = 1.0

    def build(self, device="cpu"):
        from torch import nn
        class Pool(nn.Module):
            def __init__(self, patch, dim, scale):
                super().__init__()
                self.pool, self.scale = nn.AvgPool2d(patch), scale
                self.colours = nn.Conv2d(3, dim, 1, device=device)
            def forward(self, pixels, drop_path):
                return self.scale * self.colours(self.pool(pixels))
        model = super().build(device)
        model.image_encoder = Pool(self.model.patch_size, self.model.embedding_dim, self.scale)
        return model

def pooled():
    base = little()
    return Pooled(**{each.name: getattr(base, each.name) for each in fields(base)})
'''


@pytest.mark.long
def test_it_is_known_wherever_its_run_is_named(scenes, tmp_path, capsys):
    (tmp_path / "pooled.py").write_text(RECIPE)
    recipe, run = f"{tmp_path / 'pooled.py'}:pooled", tmp_path / "run"
    invoke(f"train {recipe} --data {scenes} --out {run} --scale 2 --steps 2")
    invoke(f"train --resume {run} --steps 3")
    last = newest(run)
    evaluate = f"--data {scenes} --max-images 1 --trust"
    invoke(f"evaluate {last}", evaluate)
    invoke(f"evaluate {last}/model.safetensors", evaluate)
    invoke(f"follow {scenes}/sa_000000.tar:sa_3 --recipe {recipe}")
    invoke(f"export {run} --to safetensors --trust --out {tmp_path}/own.safetensors")
    invoke(f"train {recipe} --data {scenes} --out {tmp_path}/next --init {run} --steps 1")
    model = load_model(str(run), "cpu", partial(config_of_weights, trust=True))
    assert (type(model.image_encoder).__name__, model.image_encoder.scale) == ("Pool", 2.0)
    assert torch.isfinite(model.image_encoder(torch.zeros(1, 3, 64, 64), None)).all()
    capsys.readouterr()
    assert "image_encoder.colours" in refusal(
        capsys, f"evaluate {tmp_path}/own.safetensors --data {scenes}"
    )


def test_the_run_of_weights(scenes, tmp_path):
    assert config_of_weights(str(tmp_path / "none.pth")) is None
    run = tmp_path / "run"
    invoke(f"train {LITTLE} --data {scenes} --out {run}")
    held = [
        config_of_weights(str(each), trust=True)
        for each in (run, newest(run), newest(run) / "model.safetensors")
    ]
    assert [each and each.steps for each in held] == [4, 4, 4]
