"""The flags of commands that run on a cluster, and what they do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gigamask.errors import TrainingInterruptedError
from gigamask.plugins.cluster import submission
from gigamask.plugins.cluster.submission import (
    Executor,
    Plan,
    SubmitPartsOptions,
    SubmitTrainingOptions,
)


@dataclass(frozen=True, kw_only=True)
class SubmitTraining(SubmitTrainingOptions):
    """Submits a training."""

    @contextmanager
    def launch(self, name: str, arguments: Sequence[str], out: str) -> Iterator[Any]:
        """Submit a training to Slurm, or run it on this machine and wait.

        Args:
            name: "train", "pretrain", "distill" or "ground train".
            arguments: The arguments after the command.
            out: The run folder.

        Yields:
            None: nothing is left to do here.

        Raises:
            GigamaskError: An option is invalid, Slurm refuses the job, or the training failed
                twice.
            SystemExit: The training on this machine ended with one line about wrong input.
            TrainingInterruptedError: The training on this machine was interrupted and saved.
        """
        from gigamask.plugins.cluster import local_jobs, slurm

        self.check_submission()
        words = [*name.split(), *arguments]
        if self.submit == "local":
            code = local_jobs.train_here(Plan(name, words, self), os.environ)
            if code == local_jobs.INTERRUPTED:
                raise TrainingInterruptedError(
                    f"{out}: interrupted; run the same command to continue"
                )
            if code:
                raise SystemExit(code)
        else:
            folder = submission.make_folder(self, name)
            plan = Plan(name, words, self, nodes=self.submit_nodes, folder=folder)
            job = slurm.SlurmExecutor().submit(plan)
            print(f"job {job}: {plan.nodes} x {max(plan.gpus, 1)} processes train into {out}")
            print(f"script: {plan.folder}/job.sh, output: {plan.folder}/{job}.log")
            print(f"follow with: squeue --jobs {job}; tail -F {plan.folder}/{job}.log")
        yield None


@dataclass(frozen=True, kw_only=True)
class SubmitParts(SubmitPartsOptions):
    """Submits the parts of a command."""

    @contextmanager
    def launch(self, name: str, arguments: Sequence[str], out: str) -> Iterator[Any]:
        """Run the parts of a command.

        Args:
            name: The command, such as "verify".
            arguments: The arguments after the command.
            out: Not used.

        Yields:
            The command that joins the results of the parts.

        Raises:
            GigamaskError: An option is invalid, Slurm refuses the job, or a part failed twice.
        """
        from gigamask.plugins.cluster import local_jobs, slurm

        self.check_submission()
        plan = Plan(name, [name, *arguments], self, self.submit_jobs, self.submit_parallel)
        if self.submit == "local":
            environments = local_jobs.environments_of(plan, os.environ)
            executor: Executor = local_jobs.LocalExecutor(environments)
        else:
            executor = slurm.SlurmExecutor()
        plan = replace(plan, folder=submission.make_folder(self, name))
        submission.run_parts(plan, executor)
        joining: Any = {"submit": "none", "part": plan.part("join")}
        yield replace(self, **joining)
        shutil.rmtree(plan.folder)
