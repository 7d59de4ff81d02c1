"""Submit a command instead of running it: `--submit slurm` and `--submit local`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gigamask.distributed import local_jobs, slurm, submission
from gigamask.distributed.submission import Plan, SubmitPartsOptions, SubmitTrainingOptions
from gigamask.errors import TrainingInterruptedError


def submit_training(
    name: str, arguments: Sequence[str], options: SubmitTrainingOptions, out: str
) -> None:
    """Submit a training to Slurm, or run it on this machine and wait.

    Args:
        name: "train", "pretrain", "distill" or "ground train".
        arguments: The arguments after the command.
        options: Where it runs.
        out: The run folder.

    Raises:
        GigamaskError: An option is invalid, Slurm refuses the job, or the training failed twice.
        SystemExit: The training on this machine ended with one line about wrong input.
        TrainingInterruptedError: The training on this machine was interrupted and saved.
    """
    options.check()
    words = [*name.split(), *arguments]
    if options.submit == "local":
        code = local_jobs.train_here(Plan(name, words, options), os.environ)
        if code == local_jobs.INTERRUPTED:
            raise TrainingInterruptedError(f"{out}: interrupted; run the same command to continue")
        if code:
            raise SystemExit(code)
        return
    folder = submission.make_folder(options, name)
    plan = Plan(name, words, options, nodes=options.submit_nodes, folder=folder)
    job = slurm.SlurmExecutor().submit(plan)
    print(f"job {job}: {plan.nodes} x {max(plan.gpus, 1)} processes train into {out}")
    print(f"script: {plan.folder}/job.sh, output: {plan.folder}/{job}.log")
    print(f"follow with: squeue --jobs {job}; tail -F {plan.folder}/{job}.log")


@contextmanager
def run_parts(name: str, arguments: Sequence[str], command: Any) -> Iterator[Any]:
    """Run the parts of a command if its flags ask for it.

    Args:
        name: The command, such as "verify".
        arguments: The arguments after the command.
        command: The parsed command.

    Yields:
        The command that joins the results of the parts; the same command if there are none.

    Raises:
        GigamaskError: An option is invalid, Slurm refuses the job, or a part failed twice.
    """
    if not isinstance(command, SubmitPartsOptions) or command.submit == "none":
        yield command
        return
    command.check()
    plan = Plan(
        name,
        [name, *arguments],
        command,
        command.submit_jobs,
        command.submit_parallel,
        folder=submission.make_folder(command, name),
    )
    here = command.submit == "local"
    executor = local_jobs.LocalExecutor(os.environ) if here else slurm.SlurmExecutor()
    submission.run_parts(plan, executor)
    yield replace(command, submit="none", part=plan.part("join"))
    shutil.rmtree(plan.folder)
