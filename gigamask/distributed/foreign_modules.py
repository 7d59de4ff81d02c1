"""Modules that are not gigamask's: they may draw random numbers, and change without a gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Buffers = list[tuple[dict[str, Tensor | None], str, Tensor | None]]
"""The dictionary of a module's buffers, a name in it, and a value."""


def is_foreign(module: nn.Module) -> bool:
    """Return whether the class of a module is not gigamask's, whatever torch has made of it."""
    classes = (each.__module__ for each in type(module).__mro__)
    own = next(name for name in classes if not name.startswith(("torch.distributed.", "abc")))
    return not own.startswith("gigamask.")


def trained_foreign_parts(model: nn.Module) -> nn.ModuleList:
    """Return the parts of a model that are trained and not gigamask's, such as an image encoder."""
    parts = [model] if is_foreign(model) else list(model.children())
    return nn.ModuleList(
        part
        for part in parts
        if is_foreign(part) and any(p.requires_grad for p in part.parameters())
    )


def copy_buffers(module: nn.Module) -> Buffers:
    """Return copies of all buffers of a module and its children."""
    return [
        (owner._buffers, name, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


@contextmanager
def using_buffers(others: Buffers) -> Iterator[None]:
    """Give modules other buffers, so that what happens to them is undone afterwards.

    Their own are not written to, since a backward pass may need them.

    Args:
        others: The other buffers, as `copy_buffers` returns them.
    """
    before = [(own, name, own[name]) for own, name, _ in others]
    for own, name, other in others:
        own[name] = other
    try:
        yield
    finally:
        for own, name, buffer in before:
            own[name] = buffer
