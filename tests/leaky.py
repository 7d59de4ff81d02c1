"""A training that keeps each step's embedding, to be found out, and the same one that does not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from gigamask.interfaces import Task
from gigamask.models.sam.sam import Sam
from gigamask.training.sam_config import SamTrainConfig
from gigamask.types import Batch, LossSums
from tests.little import little

STEPS = 400


@dataclass(frozen=True)
class Encoding(Task):
    """Makes embeddings small; `copies` says how many of each are kept."""

    copies: int
    kept: list[Tensor] = field(default_factory=list)

    def compute_losses(
        self, model: Sam, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        embedding = model.encode(batch.images, batch.input_sizes, batch.random_inputs.drop_path)
        if self.copies:
            self.kept.append(embedding.detach().repeat(self.copies, 1, 1, 1))
        size = embedding.square().mean((1, 2, 3))
        images = len(batch.images)
        yield LossSums(
            size.sum(), torch.tensor(float(images)), {}, size.detach(), 0, torch.arange(images)
        )


@dataclass(frozen=True)
class Leaky(SamTrainConfig):
    """A run of that task."""

    copies: int = 200

    def task(self, device: torch.device) -> Task:
        return Encoding(self.copies)


def leaky() -> Leaky:
    """Returns a run of little steps, each of which keeps 0.8 MB."""
    run = little()
    plain = {each.name: getattr(run, each.name) for each in fields(run)}
    return Leaky(
        **{
            **plain,
            "recipe": f"{Path(__file__).resolve()}:leaky",
            "batch_size": 1,
            "micro_batch_size": 1,
            "steps": STEPS,
            "save_every": STEPS,
            "log_every": 4,
        }
    )


def main(scenes: str, out: str) -> None:
    """Trains both, and prints what is noted of leaks in each."""
    from gigamask.profiling.leaks import Leaks
    from gigamask.training.trainer import train

    torch.set_num_threads(1)
    for copies in (0, 200):
        run, told = (
            replace(leaky(), copies=copies, data=(scenes,), out=str(Path(out) / str(copies))),
            [],
        )
        look = Leaks(run.log_every, run.steps, torch.device("cpu")).observe
        train(
            run,
            make_observers=lambda done, device, look=look, told=told: [
                lambda done, over: told.extend(noted for _, noted in look(done, over)) or ()
            ],
        )
        print(told)
