"""Compilation with torch.compile of the functions of a training step and of a model's methods.

Each function is compiled as one graph, anew for each combination of dtypes and fixed sizes; a size
that changes becomes a variable of the graph.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import nn

from gigamask.errors import GigamaskError

Value = TypeVar("Value")
RECOMPILE_LIMIT = 64
"""Graphs of a function: by kind of block, round and gradient mode; torch's default is 8."""


def compile_function(
    function: Callable[..., Any], backend: str | Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of positional arguments that is compiled when it is called.

    Args:
        function: The function.
        backend: Backend of torch.compile, by name or as a function.

    Returns:
        The compiled function. It raises `GigamaskError` if torch cannot compile it as one graph.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    dynamo.config.recompile_limit = limit  # pyrefly: ignore[bad-assignment]
    # torch asks every input for its gradient while it traces.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # With optimized layouts, the backward pass of torch 2.13 expects the strides that attention had
    # in the round that was compiled, however many prompts there are.
    options: Any = {"layout_optimization": False} if backend == "inductor" else None
    compiled = torch.compile(function, fullgraph=True, backend=backend, options=options)

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            function(*args)  # an error of the function itself is raised as it is
            name = getattr(function, "__qualname__", repr(function))
            reason = " ".join(str(error).split("\n")[:2])
            raise GigamaskError(
                f"--compile: torch {torch.__version__} cannot compile {name} ({reason}); "
                "leave the flag out"
            ) from error

    return call


def compile_methods(value: Value, backend: str) -> Value:
    """Return a copy of a value whose `compiled_methods` are compiled.

    Args:
        value: A value, such as a prompt schedule.
        backend: Backend of torch.compile.
    """
    changed = copy(value)
    for name in getattr(value, "compiled_methods", ()):
        method = compile_function(getattr(value, name), backend)
        object.__setattr__(changed, name, method)  # the class may be frozen
    return changed


@contextmanager
def compiled_modules(model: nn.Module, backend: str) -> Iterator[None]:
    """Compile the `compiled_methods` of a model's modules within the context.

    Only calls in training mode are compiled: evaluation has other shapes.

    Args:
        model: The model.
        backend: Backend of torch.compile.
    """
    methods = [
        (module, name)
        for module in model.modules()
        for name in getattr(module, "compiled_methods", ())
    ]
    for module, name in methods:
        setattr(module, name, _in_training(module, getattr(module, name), backend))
    try:
        yield
    finally:
        for module, name in methods:
            delattr(module, name)


def _in_training(module: nn.Module, eager: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled = compile_function(eager, backend)

    def call(*args: Any) -> Any:
        if not module.training:
            return eager(*args)
        # One graph serves all values of a tensor, but a single value of a number.
        return compiled(*(torch.tensor(x) if isinstance(x, float) else x for x in args))

    return call
