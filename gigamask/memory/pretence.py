"""Tensors that have a shape but no numbers, and pretend to lie on a CPU or a GPU: what is computed with them takes no memory and hardly any time.

Each stands for a tensor of the meta device, which works out shapes, strides and storages. To autograd, autocast and the choice of kernels it is one
of the CPU's: a torch built without CUDA cannot let tensors pretend to be CUDA's (it aborts in autograd). A GPU is therefore pretended with the
attention that a GPU takes, CUDA's autocast of layer norms, and the blocks of CUDA's allocator. torch's own FakeTensorMode says the same in three
times the time.

Not here: counting bytes (`memory.allocations`), the step that is rehearsed with them (`memory.rehearsal`).
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gigamask.memory.allocations import Allocations
from gigamask.model.attention import form_on
from gigamask.model.image_encoder import Attention
from gigamask.parallel.shard import matrices

Model = TypeVar("Model", bound=nn.Module)
Device = Literal["cuda", "cpu"]
CUDA_BLOCK = 512
"""What CUDA's caching allocator rounds bytes up to."""
NUMBERS = {Tensor.item: 1, Tensor.__int__: 1, Tensor.__index__: 1, Tensor.__float__: 1.0, Tensor.__bool__: True}
"""What is told to those who ask for a number."""
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextlib.contextmanager
def stage(device: Device) -> Iterator[Allocations]:
    """Lets every tensor that is made in here pretend to lie on such a device, and counts the bytes it would hold there."""
    with _Stage(device) as book, Pretence(device):
        yield book


def embody(model: Model, device: Device) -> Model:
    """Gives a model of the meta device parameters of the stage, in place, and the attention that the device takes."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in holders:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    body = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[tensor] = nn.Parameter(body, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else body
                tensors[name] = made[tensor]
        if isinstance(module, Attention):
            module.attend = form_on(device)
    return model


def gather(blocks: Iterable[nn.Module], half: torch.dtype) -> None:
    """Gives blocks matrices of another type to compute with, as sharding in that type does: no copies of them are made, and gradients do not stay."""
    for block in blocks:
        shared = matrices(block)
        for module in block.modules():
            for name in [name for name, parameter in module._parameters.items() if parameter in shared]:
                parameter = getattr(module, name)
                body = nn.Parameter(torch.empty(parameter.shape, dtype=half), parameter.requires_grad)
                if body.requires_grad:
                    body.register_post_accumulate_grad_hook(_let_go)
                module._parameters[name] = body


class Pretence(TorchFunctionMode):
    """Answers what tensors without numbers cannot: the numbers, which are all one. CUDA's autocast widens layer norms, where a CPU's does not."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._widen = device == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in NUMBERS:
            return NUMBERS[func]
        if func is Tensor.numpy:
            return np.ones(tuple(args[0].shape))
        if func is functional.layer_norm and self._widen and torch.is_autocast_enabled("cpu"):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


class _Pretended(Tensor):
    """A tensor that lies on the CPU for all who ask, and whose `meta` does the work."""

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    @staticmethod
    def __new__(cls, meta: Tensor) -> "_Pretended":
        place = {"strides": meta.stride(), "storage_offset": meta.storage_offset(), "layout": meta.layout}
        made = Tensor._make_wrapper_subclass(cls, meta.size(), dtype=meta.dtype, device=torch.device("cpu"), **place)
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyrefly: ignore[bad-override]
        raise RuntimeError(f"{func}: a pretended tensor left the stage it was made on")


class _Stage(Allocations):
    """Runs every operation on the meta device and dresses its results up. What has been answered once is not worked out again."""

    def __init__(self, device: Device) -> None:
        super().__init__(CUDA_BLOCK if device == "cuda" else 1)
        self._inside = _inside if device == "cuda" else None
        self._answered: dict[tuple, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        known: dict[int, _Pretended] = {}
        bare = dict(zip(kwargs, _bare(kwargs.values(), known), strict=True)) if kwargs else {}
        if _names_device(func):
            bare["device"] = torch.device("meta")
        result = self._dress(self._answer(func, _bare(args, known), bare), known)
        if self._inside is not None:
            self.peak = max(self.peak, self.now + self._inside(func, args))
        return result

    def _answer(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation; from the shapes it had before, where it makes new tensors of what it is given."""
        if not _makes(func):
            return func(*args, **kwargs)
        seen: list[Tensor] = []
        key = func, _asked(args, seen), tuple(kwargs), _asked(kwargs.values(), seen)
        answered = self._answered.get(key)
        if answered is not None:
            kind, shapes = answered
            again = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in shapes]
            return again[0] if kind is None else kind(again)
        result = func(*args, **kwargs)
        made: Any = [result] if isinstance(result, Tensor) else result if isinstance(result, list | tuple) else [None]
        given = {each.untyped_storage()._cdata for each in seen}
        if all(_is_new(each, given) for each in made):
            kind = None if isinstance(result, Tensor) else type(result)
            self._answered[key] = kind, [(each.shape, each.stride(), each.dtype) for each in made]
        return result

    def _dress(self, value: Any, known: dict[int, _Pretended]) -> Any:
        if isinstance(value, Tensor):
            if id(value) in known:  # what an operation changes in place is what it was given
                return known[id(value)]
            self.see(value)
            return _Pretended(value)
        return type(value)([self._dress(each, known) for each in value]) if isinstance(value, list | tuple) else value


def _bare(values: Iterable[Any], known: dict[int, _Pretended]) -> list[Any]:
    """Returns what an operation is given on the meta device, and notes what stood for it."""
    bare: list[Any] = []
    for value in values:
        if isinstance(value, _Pretended):
            known[id(value.meta)] = value
            value = value.meta
        elif isinstance(value, Tensor):
            value = value.detach().to("meta")
        elif isinstance(value, list | tuple):
            value = _bare(value, known)
        bare.append(value)
    return bare


def _asked(values: Iterable[Any], seen: list[Tensor]) -> tuple:
    """Returns what an answer depends on: of tensors all but their numbers, of a number its type as well."""
    asked: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            seen.append(value)
            asked.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        else:
            asked.append(_asked(value, seen) if isinstance(value, list | tuple) else (type(value), value))
    return tuple(asked)


def _is_new(made: Any, given: set[int]) -> bool:
    """Tells whether a result has a storage of its own, no larger than itself."""
    if not isinstance(made, Tensor) or made.untyped_storage()._cdata in given:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True)) if made.numel() else 0
    return made.storage_offset() == 0 and made.untyped_storage().nbytes() == extent * made.itemsize


@cache
def _names_device(operation: Any) -> bool:
    """Tells whether an operation is told where its result shall lie."""
    return any(argument.name == "device" for argument in operation._schema.arguments)


@cache
def _makes(operation: Any) -> bool:
    """Tells whether an operation changes nothing and returns no view, as far as it says."""
    schema = operation._schema
    return not schema.is_mutable and not any(each.alias_info for each in schema.returns)


def _inside(operation: Any, arguments: tuple) -> int:
    """Returns the bytes that an operation holds inside on a GPU: flash attention sums the gradient of its queries in float32, in whole tiles."""
    if operation is not FLASH_BACKWARD or arguments[1].dtype == torch.float32:
        return 0
    batch, heads, tokens, width = arguments[1].shape
    return 4 * batch * heads * 128 * math.ceil(tokens / 128) * (32 * math.ceil(width / 32) + 1)
