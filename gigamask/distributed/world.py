"""The processes of a run, as launched by torchrun, and their collective operations."""

import faulthandler
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from gigamask import progress
from gigamask.errors import EvaluationStoppedError, GigamaskError

Result = TypeVar("Result")
Value = TypeVar("Value")

HOST, STARTED = "127.0.0.1", "GIGAMASK_STARTED_PROCESS"
"""Host of processes that `local_processes` starts, and the environment variable that marks them."""
STDERR = 2
SLOW_TIMEOUT = timedelta(days=7)
"""Timeout for work that one process does alone; the death of a process is noticed at once."""


@dataclass(frozen=True)
class World:
    """The processes that train together, the same number per machine; by default only this one.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        node: Index of this machine.
        nodes: Number of machines.
        slow_group: Process group for waits of any length; other operations time out.
        stop_requested: Returns whether this process has received a stop signal, or its time is up.
    """

    rank: int = 0
    size: int = 1
    node: int = 0
    nodes: int = 1
    slow_group: distributed.ProcessGroup | None = None
    stop_requested: Callable[[], bool] = lambda: False

    @property
    def interleaved_rank(self) -> int:
        """This process's rank in an order that alternates between machines.

        The processes of machine `node` have the ranks that equal `node` modulo `nodes`.
        """
        return self.rank % (self.size // self.nodes) * self.nodes + self.node

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def local_range(self, count: int) -> range:
        """Return this process's share of `range(count)`: contiguous, in order of rank."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in one operation.

        Args:
            tensors: Tensors, of the same number and shapes in all processes.

        Raises:
            GigamaskError: Another process has ended or did not answer in time.
        """
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        with self.explain_failure():
            distributed.all_reduce(flat)
        for tensor, summed in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))

    def main_first(self, function: Callable[[], Result]) -> Result:
        """Call a function in the main process, then in all others; return together.

        If it raises `GigamaskError` in a process, that process prints it, and the others exit
        silently with code 2.

        Args:
            function: Function without arguments.

        Returns:
            The result of the function in this process.
        """
        if not self.is_main:
            self.barrier()
        result = self.run_on_all(function)
        if self.is_main:
            self.barrier()
        return result

    def run_on_all(self, function: Callable[[], Result]) -> Result:
        """Call a function in all processes at once.

        If it raises `GigamaskError`, the failed process of lowest rank prints it, and the others
        exit silently with code 2.

        Args:
            function: Function without arguments.

        Returns:
            The result of the function in this process.
        """
        try:
            result = function()
        except GigamaskError:
            self.barrier(failed=True)
            raise
        self.barrier()
        return result

    def barrier(self, failed: bool = False) -> None:
        """Wait for all processes, without a timeout, and exit if another one has failed.

        Args:
            failed: Whether this process has failed; it then exits only if one of lower rank has
                failed, too.
        """
        others = self.gather(failed)
        if any(others[: self.rank] if failed else others):
            raise SystemExit(2)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by rank, without a timeout."""
        if self.size == 1:
            return [value]
        values: list[Value] = [value] * self.size
        with self.explain_failure():
            distributed.all_gather_object(values, value, group=self.slow_group)
        return values

    def broadcast(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the main process's tensors in all processes, on a device.

        Args:
            tensors: Tensors by name; only those of the main process matter.
            device: Device of the result. With one process, the tensors are returned as they are.

        Raises:
            GigamaskError: Another process has ended or did not answer in time.
        """
        if self.size == 1:
            return dict(tensors)
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        received = {}
        for name, (shape, dtype) in self.gather(own)[0].items():
            tensor = (
                tensors[name].to(device).contiguous()
                if self.is_main
                else torch.empty(shape, dtype=dtype, device=device)
            )
            with self.explain_failure():  # as bytes, since not every type can be sent
                distributed.broadcast(tensor.view(-1).view(torch.uint8), 0)
            received[name] = tensor
        return received

    @contextmanager
    def explain_failure(self) -> Iterator[None]:
        """Convert a failed exchange to a `GigamaskError`; on GPUs, NCCL ends the process."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, distributed.DistError) or "gloo" in str(error)):
                raise
            reason = str(error).partition("\n")[0]
            raise GigamaskError(
                f"process {self.rank} of {self.size}: another process ended or did not answer "
                f"({reason}); run the same command again, or use torchrun --max-restarts: "
                "training continues from the last checkpoint"
            ) from error


def announce(environment: Mapping[str, str]) -> None:
    """Tell the process that started this one by `start_world` that it is about to join.

    Args:
        environment: Environment variables; does nothing if something else started the process.
    """
    if STARTED in environment:
        port = int(environment["MASTER_PORT"])
        distributed.TCPStore(HOST, port, is_master=False).set(environment["RANK"], "")


def init_world(
    environment: Mapping[str, str], device: torch.device, timeout_s: float = 600.0
) -> World:
    """Initialize the process group that torchrun's environment variables describe.

    Args:
        environment: Environment variables; without torchrun's, this process is alone.
        device: Device to train on; "cuda" becomes the GPU of the process's local rank.
        timeout_s: Seconds to wait for another process in a collective operation; then all fail, and
            torchrun restarts them.

    Returns:
        The processes, once all have joined.

    Raises:
        GigamaskError: The variables or the device are invalid.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return World()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    if invalid := [name for name in names if not environment.get(name, "").isdigit()]:
        raise GigamaskError(
            f"{invalid[0]} must be a number when WORLD_SIZE is {environment['WORLD_SIZE']} "
            f"(got {environment.get(invalid[0])}); start several processes with torchrun"
        )
    rank, size, local_rank, local_size, node = (int(environment[name]) for name in names)
    if rank:
        progress.CHOSEN.set("none")
    if size % local_size:
        raise GigamaskError(
            "every machine must run the same number of processes"
            f": {size} in all, {local_size} on this one"
        )
    if device.type == "cuda":
        if device.index is not None:
            raise GigamaskError(
                f"--device {device} names one GPU for {size} processes; "
                "use --device cuda, which gives each process its own GPU"
            )
        torch.cuda.set_device(local_rank)
    # torch imports this module at the first optimizer step. Its functions then hold the current
    # process group as a default argument, which would keep the group's threads alive after
    # `destroy_world`; a thread that needs the interpreter while it exits aborts the process.
    import_module("torch.distributed.nn")
    if distributed.is_initialized():
        raise GigamaskError(
            "the program has a process group of its own already; call gigamask before it is "
            "initialized, or in a process of its own"
        )
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    slow_group = cast(
        distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=SLOW_TIMEOUT)
    )
    return World(rank, size, node, size // local_size, slow_group)


@contextmanager
def dump_stacks_on_hang(world: World, timeout_s: float) -> Iterator[Callable[[bool], None]]:
    """Print the stack of each thread when this process waits too long for the others.

    Args:
        world: The processes of the run.
        timeout_s: Seconds after which to print to stderr.

    Yields:
        A function that (re)starts the clock (True) or stops it (False).
    """

    def set_clock(running: bool) -> None:
        if running and world.size > 1:
            faulthandler.dump_traceback_later(timeout_s, file=STDERR)
        else:
            faulthandler.cancel_dump_traceback_later()

    try:
        yield set_clock
    finally:
        set_clock(False)


def destroy_world(world: World) -> None:
    """Destroy the process group."""
    if world.size > 1:
        distributed.destroy_process_group()


def meet(world: World) -> None:
    """Wait for all processes, at most for the timeout of the process group.

    A process that hangs is found here, before the others wait for it without a timeout.

    Args:
        world: The processes.
    """
    if world.size > 1:
        with world.explain_failure():
            distributed.barrier()


def check_stop(world: World) -> None:
    """End an evaluation in all processes if one has received a stop signal.

    A collective operation, which evaluators call after each image.

    Args:
        world: The processes.

    Raises:
        EvaluationStoppedError: A process has received one.
    """
    if any(world.gather(world.stop_requested())):
        raise EvaluationStoppedError
