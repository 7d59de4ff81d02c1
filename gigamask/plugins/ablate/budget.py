"""Budgets of the runs of an ablation: steps, or CPU minutes, which become steps of each variant."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from gigamask import config_files, files
from gigamask.distributed.precision import choose_device
from gigamask.errors import GigamaskError, check_positive
from gigamask.serialization import read_json
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.step_time import WARM_UP_STEPS, measure_step

MEASUREMENTS = "cpu_seconds.json"
"""File of an ablation with the CPU seconds of a step of each variant."""
STEPS = WARM_UP_STEPS + 21
"""Steps that are trained to measure twenty of them: each is measured before the next one."""


@dataclass(frozen=True)
class Budget:
    """How long each run of an ablation trains.

    Attributes:
        steps: Steps of every run; None means the recipe's.
        cpu_minutes: CPU minutes of every run, in place of `steps`.
    """

    steps: int | None = None
    cpu_minutes: float | None = None

    def __post_init__(self) -> None:
        if self.cpu_minutes is None:
            return
        if self.steps is not None:
            raise GigamaskError("--steps and --cpu-minutes are both given; leave one out")
        check_positive("--cpu-minutes", self.cpu_minutes)

    @property
    def flags(self) -> list[str]:
        """Flags of `gigamask train`."""
        return [] if self.steps is None else ["--steps", str(self.steps)]

    def steps_of(self, step_cpu_s: float) -> int:
        """Return the steps of a variant.

        Args:
            step_cpu_s: CPU seconds of one of its steps.
        """
        assert self.cpu_minutes is not None
        return max(1, round(60 * self.cpu_minutes / step_cpu_s))


def step_cpu_seconds(
    variants: Mapping[str, Sequence[str]], arguments: Sequence[str], out: str, digest: str
) -> dict[str, float]:
    """Return the CPU seconds of a training step of each variant.

    They are measured once and recorded in the folder, so that the same command has the same steps.

    Args:
        variants: Flags by variant.
        arguments: Arguments of `gigamask train` shared by all runs.
        out: Output folder of the ablation.
        digest: Digest of the training data.

    Raises:
        GigamaskError: The training is not on a CPU, or cannot run.
    """
    path = Path(out) / MEASUREMENTS
    known: dict[str, Any] = read_json(path, dict) if path.exists() else {}
    found = {}
    for variant, flags in variants.items():
        # A change of the recipe's defaults shows in the configuration, not in the flags.
        words = [*arguments, "--out", out, *flags, "--steps", str(STEPS)]
        config = cast(SamTrainConfig, config_files.parse_train(words).limited)
        stated = config_files.config_as_text(replace(config, data=(), out=""))
        key = {"flags": list(flags), "data": digest, "threads": torch.get_num_threads()}
        key["config"] = json.loads(json.dumps(stated, default=str))
        record = known.get(variant, {})
        if {name: record.get(name) for name in key} != key:
            if (device := choose_device(config.device).type) != "cpu":
                raise GigamaskError(
                    f"--cpu-minutes is for trainings on a CPU, this one is on {device}; use "
                    "--steps, or --device cpu in the recipe"
                )
            record = key | {"step_cpu_s": measure_step(config, config.steps)}
            known[variant] = record
            files.write_text(path, json.dumps(known, indent=1) + "\n")
            print(f"{variant}: {record['step_cpu_s']:.3f} CPU s per step", flush=True)
        found[variant] = record["step_cpu_s"]
    return found


def cpu_time_s() -> float:
    """Return the CPU seconds of this process so far, and of its worker processes that ended."""
    return sum(os.times()[:4])
