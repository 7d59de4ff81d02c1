"""Time `gigamask --help`, that of some commands, and wrong paths, each in its own process.

CPU time (user and system) of the fastest of ten runs, so that other work on the machine does not
count. Targets: 0.25 s for help, 1 s for a wrong path.

Run: python -m benchmarks.help
"""

import os
import subprocess
import sys

RUNS = 10
CODE = "import sys; from gigamask.cli.main import main; sys.exit(main())"
HELPS = [
    "--help",
    "index --help",
    "segment --help",
    "stats --help",
    "plan --help",
    "train --help",
    "train sam_vit_b --help",
]
WRONG = [
    "train tiny --data nowhere",
    "evaluate nowhere --data nowhere",
    "segment starter nowhere.png --out out",
    "export nowhere --to onnx --out out",
    "index nowhere --out out",
    "benchmark davis starter --data nowhere",
]


def cpu_s(words: list[str], code: int) -> float:
    """Returns what one such process took; it must end with `code`."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", CODE, *words], stdout=nothing, stderr=nothing)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise SystemExit(f"gigamask {' '.join(words)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    for lines, code, target in ((HELPS, 0, 0.25), (WRONG, 2, 1.0)):
        print(f"CPU seconds, the least of {RUNS} runs; target {target}")
        for line in lines:
            least = min(cpu_s(line.split(), code) for _ in range(RUNS))
            print(f"gigamask {line:38}{least:6.2f}")


if __name__ == "__main__":
    main()
