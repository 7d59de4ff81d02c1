"""Slurm's commands, played on this machine: batch scripts are really executed.

`install` writes `sbatch`, `squeue`, `sacct`, `scancel`, `scontrol` and `srun` into a folder for
PATH. Jobs run one after the other in the background; the state is in the same folder.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun")


def install(folder: Path) -> None:
    """Write the commands."""
    folder.mkdir()
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/bash\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        path.chmod(0o755)


def options_of(script: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def run_job(state: Path, job: int) -> None:
    """Run a job, or each task of a job array; again while it asks to be requeued."""
    script = state / f"{job}.sh"
    options = options_of(script.read_text())
    tasks = options["array"].partition("%")[0].split(",") if "array" in options else [""]
    for number, task in enumerate(tasks):
        if (state / f"{job}.cancelled").exists():
            break
        own = str(job + number)
        log = options["output"].replace("%a", task).replace("%j", own)
        environment = {
            **os.environ,
            "SLURM_JOB_ID": own,
            "SLURM_NNODES": options["nodes"],
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_ARRAY_TASK_ID": task,
        }
        while True:
            with open(log, "ab") as out:
                process = subprocess.Popen(
                    ["bash", script], stdout=out, stderr=out, env=environment
                )
                (state / f"{own}.pid").write_text(str(process.pid))
                code = process.wait()
            label = f"{job}_{task}" if task else own
            (state / f"{label}.state").write_text(f"{'FAILED' if code else 'COMPLETED'}|{code}:0")
            (state / f"{own}.preempted").unlink(missing_ok=True)
            if not (state / f"{own}.requeue").exists():
                break
            (state / f"{own}.requeue").rename(state / f"{own}.requeued")
    (state / f"{job}.queued").unlink()


def signal_step(tasks: list[int], number: int) -> None:
    """Signal all processes of a step: torchrun gets it, and also the processes that it started."""
    for task in map(psutil.Process, tasks):
        for process in (task, *task.children(recursive=True)):
            process.send_signal(number)


def run_step(state: Path, words: list[str]) -> int:
    """Run a step on each machine; SIGTERM to srun itself kills its tasks, as Slurm's does."""
    while words[0].startswith("--"):
        words = words[1:]
    machines = [subprocess.Popen(words) for _ in range(int(os.environ["SLURM_NNODES"]))]
    pids = [each.pid for each in machines]
    signal.signal(signal.SIGTERM, lambda *_: signal_step(pids, signal.SIGKILL))
    (state / f"{os.environ['SLURM_JOB_ID']}.0").write_text(" ".join(map(str, pids)))
    return max(abs(each.wait()) for each in machines)


def main(name: str, words: list[str]) -> int:
    """Play one command."""
    state = Path(os.environ["FAKE_SLURM"])
    if name == "sbatch":
        job = 100 * (len(list(state.glob("*.sh"))) + 1)
        script = state / f"{job}.sh"
        script.write_bytes(Path(words[-1]).read_bytes())
        (state / f"{job}.queued").touch()
        subprocess.Popen(
            [sys.executable, __file__, "run", str(job)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        print(f"{job};cluster")
    elif name == "run":
        run_job(state, int(words[0]))
    elif name == "squeue":
        (state / f"{words[-1]}.asked").touch()
        print("job" if (state / f"{words[-1]}.queued").exists() else "", end="")
    elif name == "sacct":
        print((state / f"{words[-1]}.state").read_text())
    elif words[0] == "--signal=TERM":
        pids = (state / words[1]).read_text().split()
        signal_step(list(map(int, pids)), signal.SIGTERM)
    elif name == "scancel":
        (state / f"{words[0]}.cancelled").touch()
    elif name == "srun":
        return run_step(state, words)
    elif words[0] == "requeue":
        (state / f"{words[1]}.requeue").touch()
    elif words[:2] == ["show", "hostnames"]:
        print("localhost")
    else:
        preempted = (state / f"{words[2]}.preempted").exists()
        print(f"   PreemptTime={'2026-01-01T00:00:00' if preempted else 'None'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
