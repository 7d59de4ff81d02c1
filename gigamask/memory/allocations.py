"""Live bytes: every operation that torch dispatches while this is on is looked at; the bytes that its tensors hold leave, now and at most.

A storage counts from the operation that made it until nobody holds it any more, however many tensors look at it. What an operation takes inside
itself and gives back is not seen.

Not here: tensors that hold nothing (`memory.pretence`), the phases of a step (`memory.rehearsal`).
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages made while it is on; each is rounded up to whole `blocks` of bytes, as an allocator does."""

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._block = block
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        for each in tree_iter((args, kwargs)):
            if isinstance(each, Tensor):
                self.see(each, made=False)
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self.see(each)
        return result

    def see(self, tensor: Tensor, made: bool = True) -> None:
        """Counts what a tensor holds, once; nothing where it was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        self._held[key] = -(-storage.nbytes() // self._block) * self._block if made else 0
        self.now += self._held[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, key)

    def since(self) -> int:
        """Returns the most that was held since this was last asked, and begins anew."""
        peak, self.peak = self.peak, self.now
        return peak

    def _let_go(self, key: int) -> None:
        self.now -= self._held.pop(key)
