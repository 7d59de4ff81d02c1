"""The processes of a training: which one this is, and what they share in a step.

In: the environment that torchrun sets. Out: a `World`. One process alone is a world, too.

Not here: what is shared when (`train.step`), who does what (`train.loop`).
"""

import faulthandler
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from gigamask.errors import GigamaskError

Result = TypeVar("Result")
Value = TypeVar("Value")

STDERR = 2
PATIENCE = timedelta(days=7)
"""How long processes wait for what one of them does alone; one that dies is noticed at once."""


@dataclass(frozen=True)
class World:
    """`size` processes, of which this is number `rank`; they run on `nodes` machines, as many on each, this one on machine number `node`."""

    rank: int = 0
    size: int = 1
    node: int = 0
    nodes: int = 1
    patient: distributed.ProcessGroup | None = None
    """Where processes wait for one that does what takes long; the others' exchanges give up after a while."""

    @property
    def place(self) -> int:
        """This process's number when the machines take turns: processes whose place is `node` modulo `nodes` are on one machine."""
        return self.rank % (self.size // self.nodes) * self.nodes + self.node

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def part(self, count: int) -> range:
        """Returns which of so many things in a row are this process's; those of all processes, in the order of their ranks, are all of them."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor, which all processes have in the same shapes, by its sum over them, in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        with self._together():
            distributed.all_reduce(flat)
        for tensor, summed in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))

    def in_turn(self, act: Callable[[], Result]) -> Result:
        """Returns what `act` returns, which the first process does before the others; all leave together.

        Where one raises a `GigamaskError`, that is its line, and the others end in silence (exit code 2).
        """
        if not self.is_main:
            self.barrier()
        result = self.each(act)
        if self.is_main:
            self.barrier()
        return result

    def each(self, act: Callable[[], Result]) -> Result:
        """Returns what `act` returns, which all processes do at once.

        Where it raises a `GigamaskError`, that of the first is the line, and the others end in silence (exit code 2).
        """
        try:
            result = act()
        except GigamaskError:
            self.barrier(failed=True)
            raise
        self.barrier()
        return result

    def barrier(self, failed: bool = False) -> None:
        """Waits until every process has come here, however long that takes; ends this one when another has failed, if it has, too, one before it."""
        others = self.gather(failed)
        if any(others[: self.rank] if failed else others):
            raise SystemExit(2)

    def gather(self, value: Value) -> list[Value]:
        """Returns what each process gives, in the order of their ranks, however long that takes."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        with self._together():
            distributed.all_gather_object(values, value, group=self.patient)
        return values

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Turns what befalls an exchange into a `GigamaskError`; on GPUs the watchdog of NCCL ends the process instead."""
        try:
            yield
        except RuntimeError as error:
            told = str(error).partition("\n")[0]
            raise GigamaskError(
                f"process {self.rank} of {self.size} has lost another, or waited in vain for it ({told}); "
                "run the same command again, or under torchrun --max-restarts: training goes on from the last checkpoint"
            ) from error

    @contextmanager
    def watched(self, timeout_s: float) -> Iterator[Callable[[bool], None]]:
        """Yields what starts and stops a clock: when it has run for `timeout_s`, this process writes where each of its threads stands to stderr."""

        def watch(on: bool) -> None:
            if on and self.size > 1:
                faulthandler.dump_traceback_later(timeout_s, file=STDERR)
            else:
                faulthandler.cancel_dump_traceback_later()

        try:
            yield watch
        finally:
            watch(False)


def init_world(
    environment: Mapping[str, str], device: torch.device, timeout_s: float = 600.0
) -> World:
    """Returns the world that torchrun's variables describe, once all of its processes have met; alone where there are none.

    On GPUs, each process takes the one of its number on its machine. An exchange in which one of them has not come after `timeout_s` fails in all
    others, so that torchrun ends and restarts them all.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if odd := [name for name in names if not environment.get(name, "").isdigit()]:
        raise GigamaskError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {odd[0]} is {environment.get(odd[0])}; start several processes by torchrun"
        )
    rank, size, number, local, node = (int(environment[name]) for name in names)
    if size % local:
        raise GigamaskError(
            f"{size} processes do not make equally many on each machine, this one has {local}; start as many everywhere"
        )
    if device.type == "cuda":
        if device.index is not None:
            raise GigamaskError(
                f"--device is {device}, one GPU for {size} processes; give cuda, and each takes one of its own"
            )
        torch.cuda.set_device(number)
    # Its functions' default arguments keep the group there is when they are imported, which torch does at the first optimizer step: `leave` would not
    # end the group's threads, and one that asks for the interpreter while that is ending aborts the process.
    import_module("torch.distributed.nn")
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    patient = cast(
        distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=PATIENCE)
    )
    return World(rank, size, node, size // local, patient)


def destroy_world(world: World) -> None:
    """Takes leave of the other processes."""
    if world.size > 1:
        distributed.destroy_process_group()
