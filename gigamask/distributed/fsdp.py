"""Sharded training (FSDP2): each process holds a part of the encoder blocks and their state.

The weight matrices of a block are gathered before it runs, forward and backward, and freed
afterwards; their gradient is summed and each process keeps its shard. All other parameters (2 % of
ViT-H) are replicated, including the biases, norms and position embeddings of the blocks, which half
precision would round; the step sums their gradients. "fsdp" shards over all processes, "hsdp" over
those of a machine, with the same shards on every machine (Zhao et al. 2023, arXiv 2304.11277).

Processes communicate at every block, so all must run the blocks the same number of times: see
`dummy_forward`.
"""

import math
import warnings
from collections import Counter
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
    parallel: Parallel,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    timeout_s: float,
    blocks: Sequence[nn.Module],
) -> None:
    """Shard the weights of the linear layers in an encoder's blocks.

    Args:
        encoder: The encoder, with its final initial weights.
        world: The processes of the run, at least two.
        parallel: Which of them shard a model among themselves: "fsdp" or "hsdp".
        dtypes: Dtypes to gather weights in, to which autocast would round them anyway, and to sum
            gradients in; None keeps float32.
        timeout_s: Seconds to wait for another process.
        blocks: The encoder's blocks.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    check_mesh(parallel, world.nodes, world.size // world.nodes)
    check_blocks(encoder, blocks, parallel)
    device_type = next(encoder.parameters()).device.type
    if parallel == "fsdp":
        mesh = init_device_mesh(device_type, (world.size,), mesh_dim_names=("shard",))
    else:
        ranks = torch.arange(world.size).view(world.nodes, -1)
        timeout = timedelta(seconds=timeout_s)  # groups made by the mesh have torch's default
        groups = [
            cast(
                distributed.ProcessGroup,
                distributed.new_subgroups_by_enumeration(rows.tolist(), timeout)[0],
            )
            for rows in (ranks.T, ranks)
        ]
        mesh = DeviceMesh.from_group(
            groups, device_type, ranks, mesh_dim_names=("replicate", "shard")
        )
    param_dtype, reduce_dtype = dtypes
    policy = MixedPrecisionPolicy(
        param_dtype,
        reduce_dtype or (param_dtype and torch.float32),
        cast_forward_inputs=param_dtype is None,
    )
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            ignored_params=set(block.parameters()) - shardable_parameters(block),
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
        # Gradients are summed; only the step divides.
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)
    if hasattr(encoder, "leaves_out_branches"):
        encoder.leaves_out_branches = False  # pyrefly: ignore[bad-argument-type]
    # An encoder may return the embedding as a view; it is never written to.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def check_blocks(encoder: nn.Module, blocks: Sequence[nn.Module], parallel: Parallel) -> None:
    """Check that no parameter belongs to two blocks, which gather it at different times.

    Args:
        encoder: The encoder.
        blocks: Its blocks.
        parallel: Value of --parallel, for the error.

    Raises:
        GigamaskError: A parameter does.
    """
    names = {parameter: name for name, parameter in encoder.named_parameters()}
    counts = Counter(parameter for block in blocks for parameter in block.parameters())
    if tied := [names[parameter] for parameter, count in counts.items() if count > 1]:
        raise GigamaskError(
            f"--parallel {parallel} shards blocks one by one, of which several share "
            f"{tied[0][:80]}; use --parallel ddp"
        )


def check_mesh(parallel: Parallel, nodes: int, processes_per_node: int) -> None:
    """Check that "hsdp" has several machines with several processes each.

    Args:
        parallel: Value of --parallel.
        nodes: Number of machines.
        processes_per_node: Number of processes on each.

    Raises:
        GigamaskError: There are too few machines or processes.
    """
    if parallel == "hsdp" and 1 in (nodes, processes_per_node):
        raise GigamaskError(
            f"--parallel hsdp requires at least 2 machines with at least 2 processes each "
            f"(got {nodes} with {processes_per_node}); use --parallel fsdp"
        )


def shardable_parameters(block: nn.Module) -> set[Tensor]:
    """Return the parameters of a block that `shard` shards: weights of linear layers."""
    return {module.weight for module in block.modules() if isinstance(module, nn.Linear)}


def is_sharded_tensor(tensor: Tensor | None) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without importing DTensor, which takes a second."""
    return hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard` has sharded the model, its encoder that is."""
    return hasattr(getattr(model, "encoder", model), "set_requires_all_reduce")


def dummy_forward(model: nn.Module, forward: Callable[[], Tensor]) -> None:
    """Run a sharded model, without effect, in a process that has no data.

    The process thus takes part in the communication at every block, forward and backward; gradients
    do not change.

    Args:
        model: The model; nothing is run unless it is sharded.
        forward: Runs the model on some input and returns its output.
    """
    if is_sharded(model):
        output = forward()
        if output.requires_grad:
            (output * 0).sum().backward()


def exchange_across_machines(model: nn.Module, enabled: bool) -> None:
    """Set whether backward passes sum the sharded gradients of "hsdp" over the machines.

    Without, they are summed over the processes of each machine, and added to the next exchange.

    Args:
        model: The model; nothing is set unless it is sharded.
        enabled: Whether the next backward pass is the last one of a step.
    """
    if is_sharded(model):
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(enabled, recurse=False)


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, sharing memory; the tensor itself if not sharded."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (a collective operation); return other tensors unchanged."""
    return tensor.full_tensor() if is_sharded_tensor(tensor) else tensor


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a full tensor on the device and with the sharding of a parameter.

    Args:
        tensor: The full tensor; one of another shape, such as a step count, stays replicated.
        parameter: The parameter it belongs to.
    """
    tensor = tensor.to(parameter.device)
    if is_sharded_tensor(parameter) and tensor.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            tensor, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return tensor


def squared_norm(gradients: Iterable[Tensor], like: Tensor) -> Tensor:
    """Return this process's part of the squared norm of the sharded gradients.

    Args:
        gradients: Gradients; those that are not sharded are left out.
        like: A tensor with the device and type of the result.

    Returns:
        A scalar whose sum over all processes is the squared norm; 0 without sharded gradients.
    """
    total = like.new_zeros(())
    for gradient in gradients:
        if is_sharded_tensor(gradient):
            copies = math.prod(
                gradient.device_mesh.size(axis)
                for axis, placement in enumerate(gradient.placements)
                if placement.is_replicate()
            )
            total += gradient.to_local().square().sum() / copies
    return total
