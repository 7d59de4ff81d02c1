"""Everything that a GPU has to show, in ten minutes: device tests, then each benchmark.

Each command runs in a process of its own and prints its own tables. The last table lists the
commands with seconds and outcome; those for which no time was left say so. Prints Markdown.

Run: python -m benchmarks.gpu_all [--minutes 10] [--out FILE]
On a CPU, in small, to see that each of them runs: python -m benchmarks.gpu_all --device cpu
"""

import argparse
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

COMMANDS = (
    ("pytest -q -m gpu -rs -p no:cacheprovider tests/device", None),
    (
        "benchmarks.gpu_step --size h --levers none activation_checkpointing=1 --profile",
        "benchmarks.gpu_step --size tiny --masks 2 --levers none "
        "activation_checkpointing=1,optimizer=adamw8bit --repeats 1 --device cpu",
    ),
    (
        "benchmarks.kernel_times",
        "benchmarks.kernel_times --device cpu --masks 1 --repeats 1",
    ),
    ("benchmarks.gpu_step --size h --levers none --compile", None),
    ("benchmarks.gpu_step --size h --levers none --compile --combine", None),
    ("benchmarks.gpu_step --size h --levers none --compile --graphs", None),
    ("benchmarks.gpu_step --size b", None),
    ("benchmarks.gpu_step --size l", None),
    (
        "benchmarks.attention --device cuda --bf16",
        "benchmarks.attention --tokens 4 --heads 1 --dim 8 --repeats 1",
    ),
    (
        "benchmarks.decoder_round --device cuda --masks 64",
        "benchmarks.decoder_round --masks 1 --side 2 --repeats 1 --float32",
    ),
    (
        "benchmarks.evaluate --size b --device cuda --precision bf16",
        "benchmarks.evaluate --images 1 --repeats 1 --batch-size 2",
    ),
    (
        "benchmarks.next_click",
        "benchmarks.next_click --device cpu --masks 2 --size 150 225 --repeats 1",
    ),
    (
        "benchmarks.logit_stacks --device cuda",
        "benchmarks.logit_stacks --masks 6 --size 150 225 --repeats 1",
    ),
    (
        "benchmarks.plain_loops --size b",
        "benchmarks.plain_loops --size tiny --masks 2 --rounds 4 --repeats 1 --device cpu",
    ),
    (
        "benchmarks.plan --device cuda --sizes b h --masks 64 --masks-per-chunk 64 --clicks 8 "
        "--levers all",
        "benchmarks.plan --sizes tiny --masks 1",
    ),
    ("benchmarks.gpu_step --size h --levers optimizer=adamw8bit precision=fp16", None),
)
"""Commands for a GPU, the most wanted first, and what runs in place of each on a CPU."""


def run(line: str, limit_s: float) -> tuple[str, str, float]:
    """Run a command.

    Args:
        line: Module and arguments.
        limit_s: Seconds after which it is stopped.

    Returns:
        Its output, its outcome and its seconds.
    """
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *line.split()],
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd=Path(__file__).parents[1],
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return output, "stopped: no time left", time.perf_counter() - start_s
    outcome = "done" if done.returncode == 0 else f"**exit code {done.returncode}**"
    errors = done.stderr[-2000:] if done.returncode else ""
    return done.stdout + errors, outcome, time.perf_counter() - start_s


def main() -> None:
    """Run all commands and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="also write everything to this file")
    given = parser.parse_args()
    is_cuda = given.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("no GPU is available; --device cpu runs the same commands in small")
    written: list[str] = []

    def tell(text: str) -> None:
        print(text, flush=True)
        written.append(text)
        if given.out:
            given.out.write_text("\n".join(written) + "\n")

    chip = torch.cuda.get_device_name() if is_cuda else platform.processor() or "CPU"
    tell(f"{chip}, torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.platform()}\n")
    rows = ["| command | seconds | outcome |", "|---|---|---|"]
    deadline_s = time.perf_counter() + 60 * given.minutes
    failed = False
    for large, small in COMMANDS:
        line = large if is_cuda else small
        if line is None:
            continue
        left_s = deadline_s - time.perf_counter()
        output, outcome, seconds = run(line, left_s) if left_s > 0 else ("", "no time left", 0.0)
        failed |= "exit code" in outcome
        tell(f"## `python -m {line}`\n\n{output.strip()}\n")
        rows.append(f"| `{line}` | {seconds:.0f} | {outcome} |")
    tell("\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
