"""Mining of masks in two passes: all masks are answered without gradients, then the hardest of the global batch are trained on.

A mask's loss is the sum over its rounds. Which masks are kept is decided from all of the global batch, in the order of its samples, so it depends
neither on micro-batches nor on how many processes share it: gradients are those of one process with the whole batch. What a kept mask is asked
is the same in both passes, for all chance travels in the batch. (Shrivastava et al. 2016, section 4: a read-only pass over all examples.)
A mask whose loss is no number is as hard as can be: left out, it would hide from the step, which skips what is not finite, that the model is broken.

Not here: which are the hardest (`losses.mining`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
    batch: int,
    world: World,
) -> tuple[list[BatchProtocol], Float[Tensor, "batch"]]:
    """Returns this process's micro-batches with the masks that are kept, and each sample's mean loss by its place in the global batch.

    That mean is over all masks and rounds, those that are not kept as well; NaN where a sample has none.
    """
    found = [_losses(task, model, each) for each in batches]
    most = _most(batches, world)
    device = batches[0].batch_index.device
    # Of each place in the global batch: how many terms a mask's loss sums, the loss, the stratum.
    table = torch.zeros(3, batch, most, dtype=torch.float64, device=device)
    cells = [_cells(each) for each in batches]
    for each, (losses, terms), (place, number) in zip(batches, found, cells, strict=True):
        for row, values in enumerate((terms, losses, each.strata)):
            table[row, place, number] = values.double()
    world.all_reduce([table])
    terms, losses, strata = table[0], table[1], table[2].long()
    hardness = torch.where(terms > 0, torch.where(losses.isnan(), torch.inf, losses), torch.nan)
    keep = mining.keep(hardness.flatten(), strata.flatten()).view(batch, most)
    kept = [
        each.select(torch.nonzero(keep[place, number])[:, 0])
        for each, (place, number) in zip(batches, cells, strict=True)
    ]
    return kept, losses.sum(1) / terms.sum(1)


@torch.no_grad()
def _losses(
    task: Task, model: nn.Module, batch: BatchProtocol
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """Returns the sum of each mask's losses over its rounds, and how many there were."""
    losses, terms = (
        torch.zeros(len(batch.mask_image), dtype=torch.float64, device=batch.batch_index.device)
        for _ in range(2)
    )
    for piece in task.compute_losses(model, batch, lambda whole: whole):
        part = slice(piece.first, piece.first + len(piece.per_mask))
        losses[part] += piece.per_mask
        terms[part] += 1
    return losses, terms


def _most(batches: Sequence[BatchProtocol], world: World) -> int:
    """Returns how many masks the image of most has, in any process."""
    own = max(
        (int(torch.bincount(each.mask_image).max()) for each in batches if len(each.mask_image)),
        default=1,
    )
    counts = torch.zeros(world.size, device=batches[0].batch_index.device)
    counts[world.rank] = own
    world.all_reduce([counts])
    return int(counts.max())


def _cells(batch: BatchProtocol) -> tuple[Tensor, Tensor]:
    """Returns each mask's place in the global batch and its number within its image."""
    firsts = torch.searchsorted(batch.mask_image, batch.mask_image)
    return batch.batch_index[batch.mask_image], torch.arange(
        len(firsts), device=firsts.device
    ) - firsts
