"""Which process this is."""

import pytest
import torch

from gigamask.faults import Fault
from gigamask.parallel.world import World, join

CPU = torch.device("cpu")


def test_without_torchrun_one_process_is_the_world():
    assert join({}, CPU) == join({"WORLD_SIZE": "1"}, CPU) == World()
    assert World().first
    assert World().place == 0


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (2, 4), (3, 2), (4, 1)])
def test_places_take_turns_over_machines(nodes, local):
    """Torchrun numbers machine by machine; by place, what is `node` modulo `nodes` is on that machine, and all places are taken."""
    worlds = [World(rank, nodes * local, rank // local, nodes) for rank in range(nodes * local)]
    assert sorted(world.place for world in worlds) == list(range(nodes * local))
    assert all(world.place % nodes == world.node for world in worlds)
    assert [world.first for world in worlds] == [True] + [False] * (nodes * local - 1)


def test_alone_sums_stay():
    tensors = [torch.ones(2), torch.arange(3.0)]
    World().add(tensors)
    World().wait()
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 1, 2]]


def test_half_an_environment_is_refused():
    with pytest.raises(Fault, match=r"^WORLD_SIZE is 8, but LOCAL_WORLD_SIZE is not set; start several processes by torchrun$"):
        join({"WORLD_SIZE": "8", "RANK": "1"}, CPU)
