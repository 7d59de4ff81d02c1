"""Submit a command instead of running it: `--submit slurm` and `--submit local`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gigamask.distributed import local_jobs, slurm, submission
from gigamask.distributed.submission import Plan, SubmitTrainingOptions
from gigamask.errors import TrainingInterruptedError


def submit_training(
    name: str, arguments: Sequence[str], options: SubmitTrainingOptions, out: str
) -> None:
    """Submit a training to Slurm, or run it on this machine and wait.

    Args:
        name: "train", "pretrain" or "ground train".
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
