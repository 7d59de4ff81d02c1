"""Submit a plan to Slurm with sbatch, and follow it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.plugins.cluster.submission import Plan, last_line

POLL_S = 10.0
"""Seconds between two questions to squeue."""
SIGNAL_S = 300
"""Seconds before its time limit at which Slurm signals a job; fewer for a short job."""
EARLY_S = 60
"""Seconds by which Slurm may send that signal too early."""
SAVE_S = 240
"""Seconds that torchrun gives a stopped training to save; by default 30."""
MAX_FAILED_POLLS = 30
"""squeue may fail for a while, as when the controller restarts."""
PORT = 29500
"""First of the 1,000 ports of which a training takes one by its job's number."""

# The step runs in the background of the shell, so that a trap runs at once. A job that gets
# SIGUSR1 (time limit) or SIGTERM stops its step, which saves, and is requeued under its number.
# The step is signaled by scancel: srun itself answers SIGTERM by killing its tasks. Step 0 is the
# only one, also after a requeue; srun is ended if there is no such step yet.
# A preemption signals the step alone, which ends; Slurm then states when it preempted the job.
# Most parts begin anew then: one that is longer than its time limit would do so for ever.
TRAPS = """\
requeue() {
    if [ -n "$SLURM_ARRAY_TASK_ID" ] && [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ]; then
        echo "stopped ($1) and requeued 20 times; give more --submit-time or more --submit-jobs"
        exit 1
    fi
    echo "gigamask: job $SLURM_JOB_ID was stopped ($1); it is requeued and continues"
    scontrol requeue "$SLURM_JOB_ID"
    exit $?
}
stop() {
    trap '' USR1 TERM
    scancel --signal=TERM "$SLURM_JOB_ID.0" || kill -TERM "$step" 2>/dev/null
    wait "$step" && exit 0
    requeue "SIG$1"
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM"""
WAIT = """\
step=$!
wait "$step"
code=$?
if [ $code -ne 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
    requeue preempted
fi
exit $code
"""
# srun of Slurm 22.05 to 23.02 does not take it from the job.
CPUS = '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'


def batch_script(plan: Plan, numbers: Sequence[int]) -> str:
    """Return the batch script of a plan.

    Args:
        plan: The plan.
        numbers: The parts to run; ignored for a training.
    """
    options = plan.options
    name = plan.name.replace(" ", "-")
    sbatch = {"job-name": f"gigamask-{name}"}
    if plan.count:
        limit = f"%{plan.parallel}" if plan.parallel else ""
        sbatch["array"] = ",".join(map(str, numbers)) + limit
    sbatch |= {
        "output": str(plan.log(0).with_stem("%a" if plan.count else "%j")),
        "open-mode": "append",
        "nodes": str(plan.nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(plan.gpus)} if plan.gpus else {}),
        **({"partition": options.submit_partition} if options.submit_partition else {}),
        **({"time": options.submit_time} if options.submit_time else {}),
        "requeue": "",
    }
    for word in options.submit_sbatch:
        key, _, value = word.partition("=")
        sbatch[key] = value
    sbatch.setdefault("signal", f"B:USR1@{signal_s(sbatch.get('time', ''))}")
    lines = [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in sbatch.items()]
    srun = ["--kill-on-bad-exit=1"]
    if options.submit_container:
        here = Path.cwd()
        mounts = [str(here), str(plan.folder), *options.submit_mounts]
        srun += [
            f"--container-image={options.submit_container}",
            f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
            f"--container-workdir={here}",
        ]
    else:
        folder = shlex.quote(str(Path(sys.executable).parent))
        lines.append(f"\nexport PATH={folder}:$PATH")
    lines += [CPUS, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    if not plan.count:
        lines.append(f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_S}")
        lines.append('first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    words = part_words(plan) if plan.count else training_words(plan)
    return "\n".join(["#!/bin/bash", *lines, TRAPS, f"srun {shlex.join(srun)} {words} &", WAIT])


def signal_s(limit: str) -> int:
    """Return how many seconds before its time limit Slurm signals a job.

    Half of a short time is left to the job, or it would be requeued for ever.

    Args:
        limit: Minutes, minutes:s, h:m:s, or days-h with or without :m:s; others mean no limit.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        return SIGNAL_S
    days, dash, rest = limit.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return min(SIGNAL_S, max(0, total - EARLY_S) // 2) if total else SIGNAL_S


def part_words(plan: Plan) -> str:
    """Return the command of a part, whose number is the index in the job array."""
    *words, part = plan.task("")
    return f'{shlex.join(["gigamask", *words])} "$SLURM_ARRAY_TASK_ID"{shlex.quote(part)}'


def training_words(plan: Plan) -> str:
    """Return the command that starts a training on every machine."""
    return (
        'torchrun --nnodes "$SLURM_NNODES" '
        f"--nproc-per-node {max(plan.gpus, 1)} --max-restarts 10 --rdzv-backend c10d "
        f'--rdzv-endpoint "$first:$(({PORT} + SLURM_JOB_ID % 1000))" --rdzv-id "$SLURM_JOB_ID" '
        f"--no-python {shlex.join(['gigamask', *plan.task(0)])}"
    )


@dataclass
class SlurmExecutor:
    """Runs tasks as jobs of Slurm."""

    job: str = ""

    def run(self, plan: Plan, numbers: Sequence[int]) -> None:
        """Submit parts as a job array, and wait until it has left the queue.

        Args:
            plan: The plan.
            numbers: The parts.

        Raises:
            GigamaskError: Slurm refuses the job, or does not answer.
        """
        self.submit(plan, numbers)
        try:
            failures = 0
            while failures < MAX_FAILED_POLLS:
                done = _call("squeue", "--noheader", "--jobs", self.job)
                if "Invalid job id" in done.stderr:  # it ended some minutes ago
                    return
                if done.returncode == 0 and not done.stdout.strip():
                    return
                failures = failures + 1 if done.returncode else 0
                if all(plan.result(number).exists() for number in numbers):
                    return
                time.sleep(POLL_S)
        except BaseException:
            _call("scancel", self.job)
            raise
        raise GigamaskError(f"squeue failed {failures} times ({done.stderr.strip()})")

    def submit(self, plan: Plan, numbers: Sequence[int] = ()) -> str:
        """Submit a plan.

        Args:
            plan: The plan.
            numbers: The parts; ignored for a training.

        Returns:
            The number of the job.

        Raises:
            GigamaskError: Slurm refuses the job.
        """
        script = plan.folder / "job.sh"
        files.write_text(script, batch_script(plan, numbers))
        done = _call("sbatch", "--parsable", str(script))
        if done.returncode:
            reason = " ".join(done.stderr.split())
            raise GigamaskError(f"sbatch refused {script}: {reason}; change the flags --submit-*")
        self.job = done.stdout.strip().partition(";")[0]
        return self.job

    def describe_failure(self, plan: Plan, number: int) -> str:
        """Return the state that Slurm recorded for a part, and the last line of its log.

        Args:
            plan: The plan.
            number: The part.
        """
        job = f"{self.job}_{number}"
        done = _call("sacct", "-X", "-P", "--noheader", "--format=State,ExitCode", "--jobs", job)
        state = done.stdout.strip().split("\n")[-1].replace("|", " ") or "unknown state"
        return f"job {job}, {state}: {last_line(plan.log(number))}"


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm."""
    try:
        return subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise GigamaskError(
            f"{words[0]}: not found; --submit slurm needs Slurm's commands on PATH, "
            "--submit local runs the same plan on this machine"
        ) from None
