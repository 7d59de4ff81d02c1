"""The processes of a training: which one this is, and what they share in a step.

In: the environment that torchrun sets. Out: a `World`. One process alone is a world, too.

Not here: what is shared when (`train.step`), who does what (`train.loop`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from gigamask.faults import Fault


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

    def wait(self) -> None:
        """Waits until every process has come here."""
        if self.size > 1:
            distributed.barrier()


def join(environment: Mapping[str, str], device: torch.device) -> World:
    """Returns the world that torchrun's variables describe, once all of its processes have met; alone where there are none.

    On GPUs, each process takes the one of its number on its machine.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if missing := [name for name in names if not environment.get(name, "").isdigit()]:
        raise Fault(f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {missing[0]} is not set; start several processes by torchrun")
    rank, size, local, node = (int(environment[name]) for name in names)
    if device.type == "cuda":
        torch.cuda.set_device(rank % local)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(rank, size, node, size // local) if size % local == 0 else World(rank, size)
