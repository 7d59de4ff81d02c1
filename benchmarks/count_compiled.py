"""Launches and bytes of one training step with --compile, counted without a GPU.

The trainer's own step runs on fake tensors, as in `count_step`. Its graphs are captured, and
torch's inductor schedules them for a GPU that need not be there: each fused loop, matrix product
and call of a library is a launch, whose bytes are those of the buffers that it reads and writes. No
code is made of it, so nothing is timed. What runs between the graphs is counted as `count_step`
does.

With --combine, inductor also puts small independent kernels into one launch (`combo_kernels`, which
torch leaves off). Prints Markdown; takes minutes.

Run: python -m benchmarks.count_compiled --size h [--masks 64] [--combine]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config, scheduler
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
    shape_env_from_inputs,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from benchmarks.count_step import (
    PHASES,
    RECIPES,
    ROUNDS,
    LaunchCounter,
    StepCount,
    configured,
    count_step,
)
from gigamask.distributed import compilation
from gigamask.profiling.dry_run import AllocationTracker
from gigamask.training.sam_config import SamTrainConfig

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
)
"""What inductor asks of a GPU; an H200 differs in its memory only."""


class CompiledCounter(LaunchCounter):
    """Counts what runs between compiled graphs; the graphs add their own kernels."""

    paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch may compile while this is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Counts nothing within the context."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def add(self, kernels: Sequence[float]) -> None:
        """Adds launches to the current phase.

        Args:
            kernels: Bytes of each.
        """
        key = self.phase, "other", "compiled"
        self.counts.cells[key] += self.quantities(len(kernels), sum(kernels), 0)


def counting_backend(counter: CompiledCounter) -> Callable[..., Any]:
    """Returns a backend of torch.compile that counts the kernels of a graph whenever it runs."""

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        with counter.pause():
            view_to_reshape(graph)
            plain = fx.GraphModule(graph, copy.deepcopy(graph.graph))
            kernels = scheduled(graph, inputs, bool(options.get("is_backward")))

        def run(args: list[Any]) -> list[Any]:
            with counter.pause():
                outputs = plain(*args)
            counter.add(kernels)
            return list(outputs)

        run._boxed_call = True  # pyrefly: ignore[missing-attribute]
        return run

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)


def scheduled(graph: fx.GraphModule, inputs: Sequence[Any], is_backward: bool) -> list[float]:
    """Returns the bytes of each kernel that inductor makes of a graph on a GPU.

    Args:
        graph: A graph of aten operators.
        inputs: Its inputs, fake tensors and numbers.
        is_backward: Whether it computes gradients.
    """
    with torch.no_grad():
        mode = fake_tensor_prop(graph, inputs)
    _recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(graph)
        on_gpu = move_to_gpu(graph, inputs, mode)
        lowered = GraphLowering(
            graph,
            example_inputs=on_gpu,
            shape_env=shape_env_from_inputs(on_gpu),
            graph_id=0,
            is_backward=is_backward,
        )
        lowered.freeze_runtime_asserts()
        with (
            V.set_debug_handler(DebugContext()),
            V.set_graph_handler(lowered),
            V.set_extern_kernel_nodes([]),
        ):
            lowered.run(*on_gpu)
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            return [
                node.get_read_write_buffers_sizes()
                for node in lowered.scheduler.nodes
                if is_launched(node)
            ]


def is_launched(node: scheduler.BaseSchedulerNode) -> bool:
    """Returns whether a node runs a kernel, and is not one of several results of another's."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return False
    return type(node.node).__name__ != "MultiOutput"


def move_to_gpu(
    graph: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> Sequence[Any]:
    """Moves a graph's fake tensors to the GPU, in place, and returns its inputs likewise."""

    def moved(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, GPU)

    def device(value: Any) -> Any:
        return GPU if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, device)
        node.kwargs = fx.node.map_aggregate(node.kwargs, device)
        if "val" in node.meta:
            node.meta["val"] = tree_map_only(Tensor, moved, node.meta["val"])
    return tree_map_only(Tensor, moved, list(inputs))


@contextmanager
def gpu_to_schedule_for() -> Iterator[None]:
    """Lets inductor schedule for an H100, which need not be there, nor Triton."""
    properties, index = (lambda *_: H100), (lambda *_: 0)
    places = [
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", lambda *_: (H100.major, H100.minor)),
        (torch.cuda, "current_device", index),
        (CudaInterface, "get_device_properties", staticmethod(properties)),
        (CudaInterface, "current_device", staticmethod(index)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(properties)),
        (CudaInterface.Worker, "current_device", staticmethod(index)),
        (scheduler, "has_triton", lambda *_: True),
    ]
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def compiling_fake_tensors(counter: CompiledCounter) -> Iterator[None]:
    """Lets functions be compiled while fake tensors are tracked and their numbers are made up."""
    compile_function = compilation.compile_function

    def compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        fast = compile_function(function, backend)

        def call(*args: Any) -> Any:
            numbers = _pop_mode()
            try:
                with counter.pause():
                    return fast(*args)
            finally:
                _push_mode(numbers)

        return call

    is_infra = patch.object(AllocationTracker, "is_infra_mode", classmethod(lambda _: True))
    with (
        is_infra,
        patch.object(compilation, "compile_function", compiled),
    ):
        yield


def count_compiled(run: SamTrainConfig, masks: int, combine: bool) -> StepCount:
    """Returns the launches and bytes of one compiled step.

    Args:
        run: The configuration; one image is one micro-batch.
        masks: Number of masks of the image.
        combine: Whether small independent kernels share a launch.
    """
    counter = CompiledCounter(run.model.mask_size)
    backend = staticmethod(counting_backend(counter))
    with (
        patch.object(SamTrainConfig, "compile_backend", backend),
        config.patch(combo_kernels=combine, combo_kernels_autotune=0),
        gpu_to_schedule_for(),
        compiling_fake_tensors(counter),
    ):
        return count_step(replace(run, compile=True), masks, counter)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--size", choices=RECIPES, default="h")
    options.add_argument("--masks", type=int, default=64)
    options.add_argument("--combine", action="store_true", help="let small kernels share a launch")
    given = options.parse_args()
    counts = count_compiled(configured(given.size, given.masks), given.masks, given.combine)
    print("| phase | launches | GB |\n|---|---|---|")
    rows = {name: [phase] for phase, name in PHASES.items()} | {"rounds": ROUNDS, "all": [*PHASES]}
    for name, phases in rows.items():
        count = counts.count(phases)
        print(f"| {name} | {count.launches:,.0f} | {count.bytes / 1e9:.1f} |")


if __name__ == "__main__":
    main()
