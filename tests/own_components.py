"""One class of the user's own for every interface; `USED` notes which of them have done
something.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gigamask.data.augment import Augment
from gigamask.data.mask_sampling import MaskSampler
from gigamask.data.sample_config import SampleConfig
from gigamask.interfaces import (
    EvaluationResult,
    Evaluator,
    ImageEncoder,
    LRSchedule,
    Mining,
    Optimizer,
    Sampler,
    Task,
)
from gigamask.losses.sam_loss import SamLoss
from gigamask.masks.transforms import ImageTransform
from gigamask.models.configs import SamConfig
from gigamask.prompts.schedule import BoxPrompt
from gigamask.training.config import ImageTrainConfig
from gigamask.training.sam_config import SamTrainConfig
from tests.little import SPEC, little

USED: set[str] = set()


@dataclass(frozen=True)
class Backwards(Sampler):
    """Visits the items from the last to the first."""

    def order(self, table, epoch, history):
        USED.add("sampler")
        return np.arange(table.count)[::-1]


@dataclass(frozen=True)
class TwoBoxes(BoxPrompt):
    """Asks for the box twice."""

    def next(self, previous, targets, random_inputs, mask_only_round_u):
        USED.add("prompts")
        return (
            super().next(None, targets, random_inputs, mask_only_round_u)
            if previous is None or previous.index == 0
            else None
        )


@dataclass(frozen=True)
class SquaredLoss(SamLoss):
    """Squared errors of the probabilities in place of dice."""

    squared_weight: float = 3.0

    def mask_losses(self, logits, targets, valid):
        USED.add("loss")
        focal = super().mask_losses(logits, targets, valid)["focal"]
        errors = (logits.sigmoid() - targets[:, None].float()) ** 2
        return {"focal": focal, "squared": errors.masked_fill(~valid[:, None], 0).mean((2, 3))}


@dataclass(frozen=True)
class Odd(Mining):
    """Keeps every other mask."""

    def keep(self, losses, strata):
        import torch

        USED.add("mining")
        return ~losses.isnan() & (torch.arange(len(losses), device=losses.device) % 2 == 0)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.01
    momentum: float = 0.9

    def build(self, model):
        import torch

        USED.add("optimizer")
        learned = [p for p in model.parameters() if p.requires_grad]
        return [torch.optim.SGD(learned, lr=self.lr, momentum=self.momentum)]


@dataclass(frozen=True)
class Halving(LRSchedule):
    """Halves the learning rate at every update."""

    def factor(self, step, steps):
        USED.add("schedule")
        return 0.5**step


@dataclass(frozen=True)
class Pooled(ImageEncoder):
    """Colors of the patches, and two residual blocks."""

    blocks_inside: int = 2

    def build(self, model: SamConfig):
        from torch import nn

        class Block(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.linear = nn.Linear(dim, dim)

            def forward(self, x):
                return x + self.linear(x)

        class PooledEncoder(nn.Module):
            def __init__(self, patch, dim, count):
                super().__init__()
                self.pool, self.colours = nn.AvgPool2d(patch), nn.Linear(3, dim)
                self.layers = nn.ModuleList(Block(dim) for _ in range(count))

            def forward(self, pixels, drop_path):
                x = self.colours(self.pool(pixels).permute(0, 2, 3, 1))
                for layer in self.layers:
                    x = layer(x)
                return x.permute(0, 3, 1, 2)

        USED.add("model.encoder")
        return PooledEncoder(model.patch_size, model.embedding_dim, self.blocks_inside)

    def blocks(self, encoder):
        return list(encoder.layers)

    @property
    def pretrained(self):
        return True


@dataclass(frozen=True)
class LoudEvaluation(Evaluator):
    """Scores how large the weights are."""

    interval: int = 2
    scale: float = 1.0

    def open(self, config: Any, world: Any) -> Callable[[Any], EvaluationResult]:
        USED.add("evaluation")
        return lambda model: EvaluationResult(
            {"size": self.scale * float(sum(p.detach().abs().sum() for p in model.parameters()))},
            "size",
        )


@dataclass(frozen=True)
class Mirrored(Augment):
    """Mirrors every image."""

    def get_transform(self, original, image_size, generator):
        USED.add("loader.augment")
        return ImageTransform.resize_longest_side(original, image_size, flip=True)


@dataclass(frozen=True)
class FirstMasks(MaskSampler):
    """Takes the first masks of the annotation."""

    def choose(self, candidates, max_masks, generator):
        USED.add("loader.mask-sampler")
        return np.arange(min(max_masks, len(candidates)))


PARTS = {
    "sampler": Backwards,
    "prompts": TwoBoxes,
    "loss": SquaredLoss,
    "mining": Odd,
    "optimizer": SGD,
    "schedule": Halving,
    "model.encoder": Pooled,
    "evaluation": LoudEvaluation,
    "loader.augment": Mirrored,
    "loader.mask-sampler": FirstMasks,
}


@dataclass(frozen=True)
class OneTask(Task):
    """Pulls the embedding of every image towards 1."""

    def compute_losses(self, model, batch, detach):
        import torch

        from gigamask.types import LossSums

        USED.add("task")
        embedding = model.encode(batch.images, batch.input_sizes, batch.random_inputs.drop_path)
        by_image = (embedding - 1).square().mean((1, 2, 3))
        count = torch.tensor(float(len(by_image)), device=by_image.device)
        parts = {"distance": by_image.detach().sum()}
        image = torch.arange(len(by_image), device=by_image.device)
        yield LossSums(
            loss=by_image.sum(),
            count=count,
            parts=parts,
            per_mask=by_image.detach(),
            first=0,
            image=image,
        )


@dataclass(frozen=True)
class Distilled(ImageTrainConfig):
    """A training with a task of its own; its images need no masks."""

    model: SamConfig = field(default_factory=lambda: SPEC)
    save_every: int = 2
    log_every: int = 1
    device: str = "cpu"

    def build(self, device="cpu"):
        from gigamask.models.init import build_model

        return build_model(self.model, self.seed, device)

    def task(self, device):
        return OneTask()

    @property
    def items(self):
        return "image"

    @property
    def random_spec(self):
        from gigamask.types import RandomSpec

        return RandomSpec(seed=self.seed, clicks=0, blocks=self.model.depth)

    @property
    def sample_config(self):
        return SampleConfig(image_size=self.model.image_size, mask_size=1, with_masks=False)


def narrow() -> SamTrainConfig:
    """The little recipe, as a function of the user's own."""
    base = little()
    return SamTrainConfig(**{each.name: getattr(base, each.name) for each in fields(base)})
