"""Sharded training (FSDP2): each process keeps a part of the encoder's blocks, their gradients and their optimizer state.

A block's matrices are gathered before it runs, forward and backward, and let go of behind it; their gradient is added up and each process keeps its
part. All else, 2 % of ViT-H, is whole everywhere, biases, norms and positions within the blocks as well, which half precision would round; its
gradient is exchanged with the rest of a step (`train.step`). "fsdp" shares out over all processes, "hsdp" over those of a machine, with the same
parts on every machine (Zhao et al. 2023, arXiv 2304.11277).

Processes meet at every block, so each must pass through the blocks equally often: see `pass_through`.

Not here: which parameters are trained (`train.state`), checkpoints, which are whole whatever the sharding (`train.checkpoint`).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeGuard, cast

import torch
from torch import Tensor, distributed, nn

from gigamask.distributed.world import World
from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Parallel = Literal["ddp", "fsdp", "hsdp"]


def shard(
    encoder: nn.Module,
    world: World,
    how: Parallel,
    half: torch.dtype | None,
    timeout_s: float,
    blocks: Sequence[nn.Module] | None = None,
) -> None:
    """Share out the weights of the linear layers in an encoder's blocks. Alone or with "ddp", all stay whole.

    Args:
        encoder: the encoder, its weights as they are to be already.
        world: the processes that share.
        how: over which of them.
        half: the type to gather weights in, to which autocast rounds them anyway; gradients are added up in float32.
        timeout_s: how long processes wait for each other.
        blocks: the encoder's blocks; None: the children of `encoder.blocks`.
    """
    if world.size == 1 or how == "ddp":
        return
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    check(how, world.nodes, world.size // world.nodes)
    blocks = list(encoder.get_submodule("blocks").children()) if blocks is None else blocks
    kind = next(encoder.parameters()).device.type
    if how == "fsdp":
        mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    else:
        grid = torch.arange(world.size).view(world.nodes, -1)
        timeout = timedelta(seconds=timeout_s)  # the mesh's own groups would have torch's
        groups = [
            cast(
                distributed.ProcessGroup,
                distributed.new_subgroups_by_enumeration(rows.tolist(), timeout)[0],
            )
            for rows in (grid.T, grid)
        ]
        mesh = DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(half, half and torch.float32, cast_forward_inputs=half is None)
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            ignored_params=set(block.parameters()) - matrices(block),
        )
    fully_shard(
        encoder,
        mesh=mesh,
        ignored_params={
            parameter for parameter in encoder.parameters() if not is_sharded_tensor(parameter)
        },
    )
    for block in blocks:
        assert isinstance(block, FSDPModule)
        # Sums travel, only the step divides.
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    # Nobody writes into the embedding, which an encoder may return as a view.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def check(how: Parallel, nodes: int, each: int) -> None:
    """Raises `GigamaskError` where so many machines with so many processes each leave "hsdp" nothing to copy or nothing to share."""
    if how == "hsdp" and 1 in (nodes, each):
        raise GigamaskError(
            f"--parallel hsdp wants several machines with several processes each, here are {nodes} with {each}; give fsdp"
        )


def matrices(block: nn.Module) -> set[Tensor]:
    """Returns those parameters of a block that may be shared out."""
    return {module.weight for module in block.modules() if isinstance(module, nn.Linear)}


def is_sharded_tensor(tensor: Tensor | None) -> "TypeGuard[DTensor]":
    """Tells whether this process has a part of a tensor only: a DTensor, whose module takes a second to import."""
    return hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Tells whether a part of the model is shared out."""
    return any(map(is_sharded_tensor, model.parameters()))


def pass_through(model: nn.Module, run: Callable[[], Tensor]) -> None:
    """Runs a sharded model for nothing: a process that has no data in turn still meets the others at every block. Gradients stay as they are."""
    if is_sharded(model):
        idle = run()
        if idle.requires_grad:
            (idle * 0).sum().backward()


def to_local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor, itself where it is whole; both share their memory."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor as it is over all processes, each of which must ask."""
    return tensor.full_tensor() if is_sharded_tensor(tensor) else tensor


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Returns a whole tensor in the parts and on the device of a parameter; one of another shape, such as a count of steps, stays whole."""
    tensor = tensor.to(parameter.device)
    if is_sharded_tensor(parameter) and tensor.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return tensor


def squared_norm(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """Returns the sum of squares of the shared-out ones among these, this process's part of the sum over all; zero where all are whole."""
    total = like.new_zeros(())
    for gradient in gradients:
        if is_sharded_tensor(gradient):
            copies = math.prod(
                gradient.device_mesh.size(axis)
                for axis, kind in enumerate(gradient.placements)
                if kind.is_replicate()
            )
            total += gradient.to_local().square().sum() / copies
    return total
