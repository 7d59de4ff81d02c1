"""CPU seconds of a step of `compact` by precision, with any sizes of images and with few.

oneDNN prepares each convolution for each new shape, which takes longer in bfloat16 than to compute
it, so that `--loader.augment.multiple 32` matters. The difference of two runs of one process leaves
out their start. CPU seconds of one core (user and system), the least of several runs, alternating.

Run: python -m benchmarks.small_step [--data TARS] [--repeats 2]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from gigamask.plugins.scenes.dead_leaves import compose_leaves
from gigamask.synthetic import scenes

FEW, MANY = 5, 25
"""Steps of the two runs."""


def cpu_seconds(data: list[str], out: Path, steps: int, flags: list[str]) -> float:
    """Return the CPU seconds of a training in a process of its own.

    Args:
        data: Tars.
        out: Run folder to make.
        steps: Number of steps.
        flags: Further flags.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["train", "compact", "--data", *data, "--out", str(out), "--steps", str(steps)]
    command += ["--processes", "1", "--loader.workers", "0", "--schedule.warmup-steps", "2"]
    subprocess.run(
        [sys.executable, "-m", "gigamask", *command, *flags], check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print CPU seconds of a step by precision and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", help="tars; default: 60 synthetic scenes")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    kinds = list(product(("fp32", "bf16"), (1, 32)))
    least: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data
        if not data:
            scenes.write_scenes(folder / "scenes", 60, scenes.seeded(compose_leaves, 0, (400, 500)))
            data = [str(folder / "scenes")]
        for repeat, (precision, multiple) in product(range(options.repeats), kinds):
            flags = ["--precision", precision, "--loader.augment.multiple", str(multiple)]
            few, many = (
                cpu_seconds(data, folder / f"{repeat}{precision}{multiple}_{steps}", steps, flags)
                for steps in (FEW, MANY)
            )
            step = (many - few) / (MANY - FEW)
            kind = precision, multiple
            least[kind] = min(least.get(kind, step), step)
    for (precision, multiple), seconds in least.items():
        print(f"{precision}, sizes in multiples of {multiple:2d} px: {seconds:.2f} CPU s a step")


if __name__ == "__main__":
    main()
