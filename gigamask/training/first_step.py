"""What the first step of a run shows about modules that are not gigamask's."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from gigamask.distributed.foreign_modules import trained_foreign_parts
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.rng import make_rng


def seed_modules(seed: int, step: int, rank: int) -> None:
    """Seed torch's global generators, from which gigamask draws nothing, for a step.

    So modules of a user that draw from them repeat their numbers in a run that was resumed, and
    draw others in each process.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        rank: Rank of the process.
    """
    torch.manual_seed(int(make_rng(seed, "modules of a user", step, rank).integers(2**63)))


@contextmanager
def training_mode(
    model: nn.Module, seed: int, world: World
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Set a model to training mode, and leave the caller's random numbers as they are.

    Args:
        model: The model.
        seed: Seed of the run.
        world: The processes of the run.

    Yields:
        A function that returns the context of a step, by its number.
    """
    watch = [watched(model.train(), world)]

    def of_step(step: int) -> AbstractContextManager[None]:
        seed_modules(seed, step, world.rank)
        return watch.pop() if watch else nullcontext()

    with torch.random.fork_rng(devices=[]):
        yield of_step


@contextmanager
def watched(model: nn.Module, world: World) -> Iterator[None]:
    """Watch a step, and say what makes results depend on processes and micro-batches.

    Args:
        model: The model.
        world: The processes of the run.

    Raises:
        GigamaskError: Buffers have changed, which every one of several processes would have of its
            own.
    """
    parts = trained_foreign_parts(model)
    buffers = {name: each.clone() for name, each in parts.named_buffers()}
    generators = _generator_states()
    yield
    if any(not torch.equal(a, b) for a, b in zip(generators, _generator_states(), strict=True)):
        _say(
            world,
            "the model or the loss draws random numbers from torch's global generator, as dropout "
            "does: a resumed run repeats them, but other micro-batches or processes draw others",
        )
    if not buffers:
        return
    changed = [name for name, each in parts.named_buffers() if not torch.equal(each, buffers[name])]
    names = sorted({name for own in world.gather(changed) for name in own})
    if not names:
        return
    what = (
        f"a step changes {len(names)} buffers of the model such as "
        f"{names[0].partition('.')[2][:80]}, as batch norm does"
    )

    def refuse() -> None:
        if world.size > 1:
            raise GigamaskError(
                f"{what}, which each of {world.size} processes would have of its own; use norms "
                "without statistics, set such modules to evaluation mode, or train in one process"
            )

    world.run_on_all(refuse)
    _say(world, f"{what}: results depend on the micro-batch size, and --ema does not average them")


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def _say(world: World, line: str) -> None:
    if world.is_main:
        print(line, file=sys.stderr)
