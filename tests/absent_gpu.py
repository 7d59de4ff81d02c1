"""A GPU that is not there: its tensors compute on the CPU, and refuse tensors of the CPU as CUDA
does.

They belong to torch's backend for other devices, so that autograd takes them; their `device` says
`cuda:0`, so that code takes its way for GPUs, or `mps:0`, which has no float64. Autocast has CUDA's
rules. A backend is registered for the life of a process, and autograd must not have run before: use
it in a process of its own, as `tests/device/test_absent_gpu.py` does.
"""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
"""Operators that take tensors of both devices."""
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""Operators whose second argument may be on the CPU, from where it is copied; of bools, the CPU
reads how many there are."""
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
}
"""Operators by which the CPU waits for a GPU, besides copies to the CPU."""
# The operators that CUDA's autocast computes in half precision, in float32, and in the widest dtype
# of its arguments, of those that gigamask and its dependencies call.
HALF = """conv1d conv2d conv3d conv_transpose2d.input matmul mm addmm addbmm baddbmm bmm linear
addmv mv scaled_dot_product_attention prelu"""
FLOAT32 = """layer_norm group_norm softmax.int log_softmax.int pow.Tensor_Scalar pow.Scalar
pow.Tensor_Tensor exp log log1p rsqrt reciprocal sum sum.dim_IntList cumsum prod norm.Scalar
norm.ScalarOpt_dim mse_loss l1_loss smooth_l1_loss binary_cross_entropy_with_logits softplus
cosine_similarity nll_loss"""
WIDEST = "addcmul addcdiv cat stack index_put scatter_add bilinear dot grid_sampler"


class DeviceError(Exception):
    """Tensors of the CPU and of the GPU in one operation."""


class GpuTensor(Tensor):
    """Claims to be on the GPU; `held` has its values."""

    held: Tensor
    device = property(lambda self: AbsentGpu.active.device)
    is_cuda = property(lambda self: self.device.type == "cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "GpuTensor":
        if held.dtype == torch.float64 and AbsentGpu.active.device.type == "mps":
            raise TypeError("the MPS framework doesn't support float64")
        tensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="absent:0",
        )
        tensor.held = held
        return tensor

    def tolist(self) -> Any:
        """Torch refuses this of all subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return AbsentGpu.active.compute(func, args, kwargs or {})


class AbsentGpu(TorchDispatchMode):
    """Computes on the GPU while it is entered.

    Attributes:
        device: What its tensors say that their device is.
        waits: Where the CPU waited for the GPU, as module:line of gigamask's code.
    """

    active: "AbsentGpu"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.device, self.waits = torch.device(kind, 0), list[str]()
        self.operators = 0
        AbsentGpu.active = self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute an operator; its result is on the GPU if an argument is, or if it says so."""
        self.operators += 1
        tensors = _tensors_in((*args, *kwargs.values()))
        here = [each for each in tensors if isinstance(each, GpuTensor)]
        if here and func not in COPIES:
            self._refuse(func, args, [each for each in tensors if not isinstance(each, GpuTensor)])
        on_gpu = bool(here)
        if func is aten.copy_.default:
            on_gpu = isinstance(args[0], GpuTensor)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            on_gpu = torch.device(device).type in ("absent", self.device.type)
            kwargs = {**kwargs, "device": torch.device("cpu")}
        is_indexed_slowly = func in INDEXING and any(
            each is not None and (each.dtype == torch.bool or not isinstance(each, GpuTensor))
            for each in args[1]
        )
        is_copied_here = not here and on_gpu and func is aten._to_copy.default
        if is_copied_here and not kwargs.get("non_blocking"):
            self.waits.append(_line_of_gigamask())
        if here and (func in WAITING or is_indexed_slowly or not on_gpu):
            self.waits.append(_line_of_gigamask())
        result = func(
            *_mapped(_held, args), **{name: _mapped(_held, each) for name, each in kwargs.items()}
        )
        written = [
            each
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if written:
            given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
            given |= kwargs
            results = result if isinstance(result, tuple) else (result,)
            outputs = [
                next(
                    (
                        given[each.name]
                        for each in written
                        if output.alias_info is not None
                        and each.alias_info.before_set == output.alias_info.before_set
                    ),
                    _claimed(value) if on_gpu else value,
                )
                for output, value in zip(func._schema.returns, results, strict=False)
            ]
            return outputs[0] if len(outputs) == 1 else tuple(outputs) or None
        return _mapped(_claimed, result) if on_gpu else result

    def _refuse(self, func: Any, args: tuple, others: Sequence[Tensor]) -> None:
        """Raise an error for tensors of the CPU that CUDA refuses: those of more than a number."""
        refused = [each for each in others if each.dim() and each.device.type != "meta"]
        if func in INDEXING:
            refused = [each for each in refused if not any(each is index for index in args[1])]
        if refused or (func._schema.is_mutable and any(each is args[0] for each in others)):
            raise DeviceError(f"{func} got tensors of {[each.shape for each in others]} on the CPU")


class _Names(TorchFunctionMode):
    """Translates the GPU in the arguments of torch's functions, which would look for a driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _translated(each) for name, each in (kwargs or {}).items()}
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            func, args = Tensor.to, (*args[:1], torch.device("absent:0"))
        return func(*map(_translated, args), **kwargs)


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in arguments of an operator; torch's pytree takes ten times as long."""
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list):
        return []
    return [tensor for each in values for tensor in _tensors_in(each)]


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, tuple | list):
        return type(values)([_mapped(function, each) for each in values])
    return function(values)


def _translated(value: Any) -> Any:
    kind = AbsentGpu.active.device.type
    is_gpu = (isinstance(value, torch.device) and value.type == kind) or (
        isinstance(value, str) and value.partition(":")[0] == kind
    )
    return torch.device("absent:0") if is_gpu else value


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def _claimed(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and not isinstance(value, GpuTensor)
    return GpuTensor(value) if is_plain else value


def _line_of_gigamask() -> str:
    frame = sys._getframe()
    while frame is not None and not frame.f_globals["__name__"].startswith("gigamask."):
        frame = frame.f_back
    module = "elsewhere" if frame is None else frame.f_globals["__name__"].rpartition(".")[2]
    return f"{module}:{0 if frame is None else frame.f_lineno}"


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def absent_gpu(kind: str = "cuda") -> Iterator[AbsentGpu]:
    """Let torch have one GPU, also in threads that are started; only once in a process.

    Args:
        kind: "cuda" or "mps".
    """
    gpu, run = AbsentGpu(kind), threading.Thread.run
    backend_registration._setup_privateuseone_for_python_backend("absent", _Backend())
    libraries = _register_autocast()
    torch._C._set_only_lift_cpu_tensors(True)
    # Tensors of a subclass cannot be made in it.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()
    names = "autocast", "is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype"
    for name in names:
        setattr(torch, name, _renamed(getattr(torch, name)))
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    chip = types.SimpleNamespace(name="absent", major=9, minor=0, total_memory=80 * 2**30)
    for name, value in {
        "is_available": kind == "cuda",
        "device_count": int(kind == "cuda"),
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "get_device_name": "absent",
        "get_device_properties": chip,
        "get_device_capability": (9, 0),
        "Event": event,
        "_lazy_init": None,
    }.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    torch.backends.mps.is_available = lambda: kind == "mps"

    def run_on_gpu(thread: threading.Thread) -> None:
        with _Names(), gpu:
            run(thread)

    threading.Thread.run = run_on_gpu
    with _Names(), gpu:
        yield gpu
    del libraries


def _renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device, *args, **kwargs: function(
        "absent" if device == AbsentGpu.active.device.type else device, *args, **kwargs
    )


def _register_autocast() -> list[torch.library.Library]:
    """Register CUDA's rules of autocast; they hold as long as what is returned."""
    dtype_of, rules, others = (
        torch.get_autocast_dtype,
        torch.library.Library("aten", "IMPL"),
        torch.library.Library("_", "IMPL"),
    )
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def widest(tensors: list[Tensor]) -> torch.dtype | None:
        return torch.float32 if any(each.dtype == torch.float32 for each in tensors) else None

    for names, choose in (
        (HALF, lambda tensors: dtype_of("absent")),
        (FLOAT32, lambda tensors: torch.float32),
        (WIDEST, widest),
    ):
        for name in names.split():
            rules.impl(name, _Autocast(name, choose), "AutocastPrivateUse1")
    return [rules, others]


class _Autocast:
    """Casts the arguments of an operator."""

    def __init__(self, name: str, choose: Callable[[list[Tensor]], torch.dtype | None]) -> None:
        packet, _, overload = name.partition(".")
        self.operator = getattr(getattr(aten, packet), overload or "default")
        self.choose = choose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_cast = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if is_cast and value.dtype != torch.float64 else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST)):
            tensors = _tensors_in((*args, *kwargs.values()))
            dtype = self.choose(tensors)
            if dtype is None:
                return self.operator(*args, **kwargs)
            kwargs = {name: _mapped(cast, each) for name, each in kwargs.items()}
            return self.operator(*_mapped(cast, args), **kwargs)
