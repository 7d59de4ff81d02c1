"""Time `gigamask --help` and that of some commands, each in its own process. Target: 0.5 s.

CPU time (user and system) of the fastest of ten runs, so that other work on the machine does not
count.

Run: python -m benchmarks.help
"""

import os
import subprocess
import sys

RUNS = 10
TARGET_S = 0.5
LINES = [
    "--help",
    "index --help",
    "segment --help",
    "stats --help",
    "plan --help",
    "train --help",
    "train sam_vit_b --help",
]


def cpu_s(words: list[str]) -> float:
    """Returns what one such process took."""
    command = [sys.executable, "-c", "from gigamask.cli.main import main; main()", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"gigamask {' '.join(words)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    print(f"CPU seconds, the least of {RUNS} runs; target {TARGET_S}")
    for line in LINES:
        print(f"gigamask {line:25}{min(cpu_s(line.split()) for _ in range(RUNS)):6.2f}")


if __name__ == "__main__":
    main()
