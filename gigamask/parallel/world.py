"""The processes of a training: which one this is, and what they share in a step.

In: the environment that torchrun sets. Out: a `World`. One process alone is a world, too.

Not here: what is shared when (`train.step`), who does what (`train.loop`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor, distributed

from gigamask.faults import Fault

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """`size` processes, of which this is number `rank`; they run on `nodes` machines, as many on each, this one on machine number `node`."""

    rank: int = 0
    size: int = 1
    node: int = 0
    nodes: int = 1

    @property
    def place(self) -> int:
        """This process's number when the machines take turns: processes whose place is `node` modulo `nodes` are on one machine."""
        return self.rank % (self.size // self.nodes) * self.nodes + self.node

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor, which all processes have in the same shapes, by its sum over them, in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        distributed.all_reduce(flat)
        for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def in_turn(self, act: Callable[[], Result]) -> Result:
        """Returns what `act` returns, which the first process does before the others; all leave together.

        Where one raises a `Fault`, that is its line, and the others end in silence (exit code 2).
        """
        if not self.first:
            self.wait()
        try:
            result = act()
        except Fault:
            self.wait(failed=True)
            raise
        self.wait()
        if self.first:
            self.wait()
        return result

    def wait(self, failed: bool = False) -> None:
        """Waits until every process has come here; ends this one when another has failed."""
        on_gpu = self.size > 1 and distributed.get_backend() == "nccl"
        others = torch.tensor(float(failed), device="cuda" if on_gpu else "cpu")
        self.add([others])
        if others and not failed:
            raise SystemExit(2)


def join(environment: Mapping[str, str], device: torch.device) -> World:
    """Returns the world that torchrun's variables describe, once all of its processes have met; alone where there are none.

    On GPUs, each process takes the one of its number on its machine.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if odd := [name for name in names if not environment.get(name, "").isdigit()]:
        raise Fault(f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {odd[0]} is {environment.get(odd[0])}; start several processes by torchrun")
    rank, size, number, local, node = (int(environment[name]) for name in names)
    if size % local:
        raise Fault(f"{size} processes do not make equally many on each machine, this one has {local}; start as many everywhere")
    if device.type == "cuda":
        if device.index is not None:
            raise Fault(f"--device is {device}, one GPU for {size} processes; give cuda, and each takes one of its own")
        torch.cuda.set_device(number)
    # Its functions' default arguments keep the group there is when they are imported, which torch does at the first optimizer step: `leave` would not
    # end the group's threads, and one that asks for the interpreter while that is ending aborts the process.
    import_module("torch.distributed.nn")
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, node, size // local)


def leave(world: World) -> None:
    """Takes leave of the other processes."""
    if world.size > 1:
        distributed.destroy_process_group()
