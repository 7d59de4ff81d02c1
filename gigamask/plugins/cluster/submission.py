"""Submit a command to Slurm, or run the same plan on this machine.

A `Plan` holds the words of the command for each task. `submit_plan` runs a task again once if it
ended without its file of results. The tasks are commands that a user could type, so there is
nothing to unpickle, and the scripts can be read.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol, runtime_checkable

from gigamask.errors import GigamaskError, check_range

ATTEMPTS = 2
"""How often a task is started before its error is reported."""

FLAGS = "partition gpus time container mounts sbatch folder nodes jobs parallel"
"""Flags that begin with submit, and have no effect without it."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Where a command runs, and with what; each field is a flag."""

    heading: ClassVar[str] = "on a cluster"
    needs_flags: ClassVar = dict.fromkeys(map("submit_".__add__, FLAGS.split()), "submit")

    submit: Literal["none", "local", "slurm"] | None = None
    """slurm submits the command as a job, local runs the same plan on this machine
    (docs/plugins/cluster/index.md)"""
    submit_partition: str | None = None
    """Slurm: partition; default: the cluster's"""
    submit_gpus: int | None = None
    """GPUs of each machine of a training, or of each part; default: 1 for commands with a model,
    otherwise 0"""
    submit_time: str | None = None
    """Slurm: time limit, such as 30, 24:00:00 or 7-00:00:00 (minutes, h:m:s, days-h:m:s); a
    training that reaches it is requeued and continues"""
    submit_container: str | None = None
    """Slurm: container image, as srun's --container-image of pyxis takes it"""
    submit_mounts: tuple[str, ...] = ()
    """Slurm: folders that the container must see besides the working folder, such as the data's"""
    submit_sbatch: tuple[str, ...] = ()
    """Slurm: further options of sbatch, such as account=vision cpus-per-task=16 mem=64G"""
    submit_folder: str = "submitted"
    """folder for scripts, logs and the results of parts; all machines must see it"""

    @property
    def is_elsewhere(self) -> bool:
        """Whether the flags ask to submit the command."""
        return self.submit in ("local", "slurm")

    def check_submission(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        check_range("--submit-gpus", self.submit_gpus, 0)
        for flag in ("partition", "time", "container"):
            value = getattr(self, f"submit_{flag}") or ""
            if re.search(r"\s", value):
                raise GigamaskError(f"--submit-{flag} must be one word (got {value!r})")
        if self.submit_time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", self.submit_time):
            raise GigamaskError(
                "--submit-time must be minutes, h:m:s or days-h:m:s, as Slurm takes it "
                f"(got {self.submit_time!r})"
            )
        for word in self.submit_sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", word):
                raise GigamaskError(
                    "--submit-sbatch takes options of sbatch without dashes, such as "
                    f"account=vision (got {word!r})"
                )


@dataclass(frozen=True, kw_only=True)
class SubmitTrainingOptions(SubmitOptions):
    """Where a training runs; each field is a flag."""

    heading: ClassVar[str] = "on a cluster"

    submit_nodes: int = 1
    """Slurm: number of machines"""

    def check_submission(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        super().check_submission()
        check_range("--submit-nodes", self.submit_nodes, 1)
        if self.submit_nodes > 1 and self.submit == "local":
            raise GigamaskError(
                f"--submit-nodes is {self.submit_nodes}, but --submit local has one machine; "
                "leave it out, or use --submit slurm"
            )


@dataclass(frozen=True, kw_only=True)
class SubmitPartsOptions(SubmitOptions):
    """Where the parts of a command run; each field is a flag."""

    heading: ClassVar[str] = "on a cluster"

    submit_jobs: int = 8
    """number of parts: each gets some of the tars or images, in order"""
    submit_parallel: int | None = None
    """how many parts run at once; default: all that Slurm starts, 1 on this machine"""

    def check_submission(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        super().check_submission()
        check_range("--submit-jobs", self.submit_jobs, 1, 1000)
        check_range("--submit-parallel", self.submit_parallel, 1)


MODEL_COMMANDS = ("train", "pretrain", "distill", "ground train", "evaluate", "segment")
"""Commands that use a GPU by default."""


@dataclass(frozen=True)
class Plan:
    """What to run: one training, or the parts of another command.

    Attributes:
        name: The command, such as "train".
        words: Its words after `gigamask`.
        options: Where it runs.
        count: Number of parts; 0 for a training.
        parallel: How many parts run at once; None: all that the cluster starts, or 1 here.
        nodes: Number of machines of a training.
        folder: Folder for scripts, logs and results.
    """

    name: str
    words: Sequence[str]
    options: SubmitOptions
    count: int = 0
    parallel: int | None = None
    nodes: int = 1
    folder: Path = field(default_factory=Path)

    @property
    def gpus(self) -> int:
        """GPUs per machine."""
        default = int(self.name in MODEL_COMMANDS)
        return default if self.options.submit_gpus is None else self.options.submit_gpus

    def task(self, number: int | str) -> list[str]:
        """Return the words of one task after `gigamask`; a part's number may be a variable."""
        # The last of several values counts, also over one in a file of --config.
        words = [*self.words, "--submit", "none"]
        return [*words, "--part", self.part(number)] if self.count else words

    def part(self, number: int | str) -> str:
        """Return the value of `--part` for a number, or for "join"."""
        return f"{number}/{self.count}@{self.folder}"

    def log(self, number: int) -> Path:
        """Return the file for the output of a task."""
        return self.folder / f"{number}.log"

    def result(self, number: int) -> Path:
        """Return the file that a part writes when it is complete."""
        return self.folder / f"part-{number}.json"


@runtime_checkable
class Executor(Protocol):
    """Runs the tasks of a plan."""

    def run(self, plan: Plan, numbers: Sequence[int]) -> None:
        """Run tasks and return when they have ended, whether or not they failed.

        Args:
            plan: The plan.
            numbers: The tasks.
        """

    def describe_failure(self, plan: Plan, number: int) -> str:
        """Return how a task ended, in a few words.

        Args:
            plan: The plan.
            number: The task.
        """


def make_folder(options: SubmitOptions, name: str) -> Path:
    """Create a folder for one submission.

    Args:
        options: Where the command runs.
        name: The command.

    Raises:
        GigamaskError: It cannot be created, or its name cannot stand in a batch script.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = f"{name.replace(' ', '-')}-{stamp}-{secrets.token_hex(2)}"
    path = Path(options.submit_folder).absolute() / folder
    if options.submit == "slurm" and re.search(r"[\s%\\@]", str(path)):
        raise GigamaskError(
            f"--submit-folder {path}: Slurm cannot write logs to a path with blanks, %, @ or "
            "backslashes; give another one"
        )
    path.mkdir(parents=True)
    return path


def run_parts(plan: Plan, executor: Executor) -> None:
    """Run all parts; those without results a second time.

    Args:
        plan: The parts.
        executor: What runs them.

    Raises:
        GigamaskError: A part has failed twice; the message names its log.
    """
    for _ in range(ATTEMPTS):
        missing = [number for number in range(plan.count) if not plan.result(number).exists()]
        if not missing:
            return
        executor.run(plan, missing)
    failed = [number for number in missing if not plan.result(number).exists()]
    if failed:
        number = failed[0]
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise GigamaskError(
            f"part {number} of {plan.count}{others} failed twice "
            f"({executor.describe_failure(plan, number)}); see {plan.log(number)}, then run the "
            "same command again"
        )


def last_line(path: Path) -> str:
    """Return the last line of a log, or "no output"."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return "no output"
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
