"""What graphs keep in memory for their backward passes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect the tensors that a block saves for backward passes."""
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def storage_bytes(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages of tensors, each counted once.

    Args:
        tensors: Tensors, which may share storages.
        besides: Tensors whose storages are not counted.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in besides}
    storages = (tensor.untyped_storage() for tensor in tensors)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in sizes.items() if place not in left_out)
