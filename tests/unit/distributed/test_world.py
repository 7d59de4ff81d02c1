"""Which process this is, and that it leaves as it came."""

import sys

import pytest
import torch

from gigamask.distributed.world import World, init_world
from gigamask.errors import GigamaskError
from tests.errors import error_line
from tests.ranks import launch

CPU = torch.device("cpu")


def test_without_torchrun_one_process_is_the_world():
    assert init_world({}, CPU) == init_world({"WORLD_SIZE": "1"}, CPU) == World()
    assert World().is_main
    assert World().interleaved_rank == 0


@pytest.mark.parametrize("nodes, local", [(1, 4), (2, 4), (3, 2), (4, 1)])
def test_interleaved_ranks_alternate_between_machines(nodes, local):
    """Torchrun numbers machine by machine; interleaved ranks are a permutation."""
    worlds = [World(rank, nodes * local, rank // local, nodes) for rank in range(nodes * local)]
    assert sorted(world.interleaved_rank for world in worlds) == list(range(nodes * local))
    assert all(world.interleaved_rank % nodes == world.node for world in worlds)
    assert [world.is_main for world in worlds] == [True] + [False] * (nodes * local - 1)


def test_alone_sums_stay():
    tensors = [torch.ones(2), torch.arange(3.0)]
    World().all_reduce(tensors)
    World().barrier()
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 1, 2]]


WHOLE = {
    "WORLD_SIZE": "8",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
}


@pytest.mark.parametrize(
    "environment, device, line",
    [
        (
            {"WORLD_SIZE": "8", "RANK": "1"},
            "cpu",
            "LOCAL_RANK must .* WORLD_SIZE is 8 .*None.*torchrun",
        ),
        (
            WHOLE | {"GROUP_RANK": "one"},
            "cpu",
            "GROUP_RANK must .* WORLD_SIZE is 8 .*one.*torchrun",
        ),
        (WHOLE | {"LOCAL_WORLD_SIZE": "3"}, "cpu", ": 8 in all, 3 on this one"),
        (WHOLE, "cuda:0", "--device cuda:0 .* 8 processes; use --device cuda"),
    ],
)
def test_odd_environments_are_refused(environment, device, line):
    with error_line(line):
        init_world(environment, torch.device(device))


def test_alone_turns_are_taken_at_once():
    assert World().main_first(lambda: 5) == 5
    with error_line(r"^mine$"):
        World().main_first(fail)


def fail() -> None:
    raise GigamaskError("mine")


LEAVING = """
import os, torch
from gigamask.distributed.world import destroy_world, init_world

def train():
    world = init_world(os.environ, torch.device("cpu"))
    world.all_reduce([torch.ones(3)])
    world.barrier()
    assert world.gather(world.rank) == [0, 1]
    parameter = torch.ones(3, requires_grad=True)
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()
    assert tasks() > before
    destroy_world(world)

tasks = lambda: len(os.listdir("/proc/self/task"))
before = tasks()
train()
assert tasks() == before, (before, tasks())
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
@pytest.mark.slow
def test_who_leaves_takes_the_threads_along():
    """A thread that outlives the group and needs the interpreter at exit aborts the process."""
    launch(2, LEAVING)


@pytest.mark.parametrize("count", [0, 1, 5, 12])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_local_ranges_cover_the_range(count, size):
    parts = [World(rank, size).local_range(count) for rank in range(size)]
    assert [each for part in parts for each in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
