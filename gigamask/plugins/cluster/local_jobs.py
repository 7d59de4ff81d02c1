"""Run the tasks of a plan on this machine."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from gigamask.errors import GigamaskError, check_processes, counted
from gigamask.plugins.cluster.submission import ATTEMPTS, Plan, last_line

STOP_S = 40.0
"""Seconds that a task gets to save after SIGTERM."""
INTERRUPTED = 75
"""Exit code of a training that a signal stopped after it had saved."""


@dataclass
class LocalExecutor:
    """Runs tasks as processes of this machine, a limited number at once."""

    environments: Sequence[Mapping[str, str]]
    """one for each task that runs at once"""
    codes: dict[int, int] = field(default_factory=dict)
    """exit code of each task"""
    processes: set[subprocess.Popen] = field(default_factory=set)
    stopping: bool = False

    def run(self, plan: Plan, numbers: Sequence[int]) -> None:
        """Run tasks; on Ctrl-C or SIGTERM, stop them.

        Args:
            plan: The plan.
            numbers: The tasks.
        """
        free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        for environment in self.environments:
            free.put(environment)

        def run_in_slot(number: int) -> None:
            environment = free.get()
            try:
                self._run_task(plan, number, environment)
            finally:
                free.put(environment)

        pool = ThreadPoolExecutor(len(self.environments))
        try:
            for future in [pool.submit(run_in_slot, number) for number in numbers]:
                future.result()
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _run_task(self, plan: Plan, number: int, environment: Mapping[str, str]) -> None:
        if self.stopping:
            return
        command = [sys.executable, "-m", "gigamask", *plan.task(number)]
        with open(plan.log(number), "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            self.processes.add(process)
            self.codes[number] = process.wait()
            self.processes.discard(process)

    def stop(self) -> None:
        """Stop all tasks: SIGTERM, and SIGKILL for those that do not end."""
        self.stopping = True
        for process in list(self.processes):
            process.terminate()
        for process in list(self.processes):
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def describe_failure(self, plan: Plan, number: int) -> str:
        """Return the exit code of a task and the last line of its log.

        Args:
            plan: The plan.
            number: The task.
        """
        return f"exit code {self.codes.get(number)}: {last_line(plan.log(number))}"


def environments_of(plan: Plan, environment: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return the environment of each part that runs at once, each with GPUs of its own.

    They are taken from CUDA_VISIBLE_DEVICES if that is set. Parts without GPUs see what is there.

    Args:
        plan: The parts.
        environment: Environment variables.

    Raises:
        GigamaskError: There are fewer GPUs than the parts need, or too many parts.
    """
    parallel = min(plan.parallel or 1, plan.count)
    check_processes("--submit-parallel", parallel)
    on_cpu = str(getattr(plan.options, "device", "auto")).startswith("cpu")
    if parallel == 1 or not plan.gpus or on_cpu:
        return [environment] * parallel
    import torch

    if not (there := torch.cuda.device_count()):
        return [environment] * parallel
    if (needed := parallel * plan.gpus) > there:
        raise GigamaskError(
            f"--submit-parallel {parallel} with {counted(plan.gpus, 'GPU')} for each part needs "
            f"{needed}, but there {'is' if there == 1 else 'are'} {there}; lower --submit-parallel"
        )
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(there))] if chosen is None else chosen.split(",")
    starts = range(0, needed, plan.gpus)
    visible = [",".join(names[start : start + plan.gpus]) for start in starts]
    return [{**environment, "CUDA_VISIBLE_DEVICES": each} for each in visible]


def train_here(plan: Plan, environment: Mapping[str, str]) -> int:
    """Run a training on this machine; one that dies is started again, and continues.

    Args:
        plan: The training.
        environment: Environment variables.

    Returns:
        Its exit code: 0, also if `torchrun` ran it until its time was over; 2 for wrong input; or
        that of an interrupted training.

    Raises:
        GigamaskError: It failed twice.
    """
    command = [sys.executable, "-m", "gigamask", *plan.task(0)]
    if plan.options.submit_gpus:
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*module, "--nproc-per-node", str(plan.gpus), "-m", "gigamask", *plan.task(0)]
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    code = None
    for _ in range(ATTEMPTS):
        process = subprocess.Popen(command, env=settings)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            raise
        if code in (0, 2, INTERRUPTED):
            return code
    raise GigamaskError(
        f"the training failed {ATTEMPTS} times (exit code {code}); its output is above; run the "
        "same command again to continue"
    )
