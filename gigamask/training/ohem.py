"""Online hard example mining (OHEM): score all masks without gradients, train on the hardest.

Masks are chosen over the whole global batch in the order of its samples, so the choice depends
neither on micro-batches nor on the number of processes, and gradients equal those of one process
with the whole batch. All random numbers are in the batch, so a mask gets the same prompts in both
passes (Shrivastava et al. 2016, section 4: a read-only pass over all examples).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.distributed.foreign_modules import (
    copy_buffers,
    trained_foreign_parts,
    using_buffers,
)
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.interfaces import Mining, Task
from gigamask.types import BatchProtocol


@profile_range("mining")
def mine_hard_masks(
    task: Task,
    mining: Mining,
    model: nn.Module,
    batches: Sequence[BatchProtocol],
    batch_size: int,
    world: World,
) -> tuple[list[BatchProtocol], Float[Tensor, "batch"]]:
    """Reduce this process's micro-batches to the masks to train on.

    A mask's loss is the sum over its rounds. A NaN loss ranks hardest: dropping it would hide a
    broken model from the step, which skips non-finite gradients.

    Args:
        task: Computes the losses.
        mining: Chooses the masks.
        model: The model.
        batches: This process's micro-batches of the step.
        batch_size: Samples of the global batch.
        world: The processes of the run.

    Returns:
        The reduced micro-batches, and the mean loss of each sample of the global batch over all its
        masks and rounds, chosen or not (NaN if a sample has no mask).
    """
    # The statistics of a batch norm are collected in the pass that trains.
    with using_buffers(copy_buffers(trained_foreign_parts(model))):
        losses_and_counts = [_mask_losses(task, model, batch) for batch in batches]
    max_masks = _max_masks_per_image(batches, world)
    device = batches[0].batch_index.device
    # Rounds, loss and stratum of each mask, by sample of the global batch and mask of the image.
    table = torch.zeros(3, batch_size, max_masks, dtype=torch.float64, device=device)
    cells = [_cells(batch) for batch in batches]
    for batch, (losses, counts), (sample, number) in zip(
        batches, losses_and_counts, cells, strict=True
    ):
        for row, values in enumerate((counts, losses, batch.strata)):
            table[row, sample, number] = values.double()
    world.all_reduce([table])
    counts, losses, strata = table[0], table[1], table[2].long()
    hardness = torch.where(counts > 0, torch.where(losses.isnan(), torch.inf, losses), torch.nan)
    keep = mining.keep(hardness.flatten(), strata.flatten()).view(batch_size, max_masks)
    mined = [
        batch.select(torch.nonzero(keep[sample, number])[:, 0])
        for batch, (sample, number) in zip(batches, cells, strict=True)
    ]
    return mined, losses.sum(1) / counts.sum(1)


@torch.no_grad()
def _mask_losses(
    task: Task, model: nn.Module, batch: BatchProtocol
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Return the sum of each mask's losses over its rounds, and the number of rounds."""
    losses, counts = (
        torch.zeros(len(batch.mask_image), dtype=torch.float64, device=batch.batch_index.device)
        for _ in range(2)
    )
    for sums in task.compute_losses(model, batch, lambda tensor: tensor):
        part = slice(sums.first, sums.first + len(sums.per_mask))
        losses[part] += sums.per_mask
        counts[part] += 1
    return losses, counts


def _max_masks_per_image(batches: Sequence[BatchProtocol], world: World) -> int:
    """Return the largest number of masks of an image over all processes."""
    own_max = max(
        (int(torch.bincount(batch.mask_image).max()) for batch in batches if len(batch.mask_image)),
        default=1,
    )
    counts = torch.zeros(world.size, device=batches[0].batch_index.device)
    counts[world.rank] = own_max
    world.all_reduce([counts])
    return int(counts.max())


def _cells(batch: BatchProtocol) -> tuple[Tensor, Tensor]:
    """Return each mask's sample in the global batch and its number within its image."""
    firsts = torch.searchsorted(batch.mask_image, batch.mask_image)
    numbers = torch.arange(len(firsts), device=firsts.device) - firsts
    return batch.batch_index[batch.mask_image], numbers
