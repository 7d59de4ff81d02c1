"""The CPU time of a training step, measured by training a few."""

import tempfile
import time
from dataclasses import replace
from typing import Any

from gigamask.errors import TrainingInterruptedError
from gigamask.interfaces import NoEvaluation
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.trainer import train

WARM_UP_STEPS = 2


def measure_step(config: SamTrainConfig, steps: int) -> float:
    """Return the mean CPU seconds of a training step, which include the reading of data.

    Args:
        config: Configuration of a training of `steps` steps on a CPU; its output folder is not
            used.
        steps: Steps to train, more than `WARM_UP_STEPS`; all but those are measured.

    Raises:
        GigamaskError: The training cannot run.
        TrainingInterruptedError: It was interrupted.
    """
    times: list[float] = []

    def observe(step: int, is_last: bool) -> list[Any]:
        if not is_last:
            times.append(time.process_time())
        return []

    with tempfile.TemporaryDirectory() as folder:
        short = replace(
            config,
            out=folder,
            log_every=steps,
            save_every=steps,
            evaluation=NoEvaluation(),
            # In this process, whose CPU time is measured.
            loader=replace(config.loader, workers=0),
        )
        state = train(short, make_observers=lambda step, device: (observe,))
    if state.step < steps:
        raise TrainingInterruptedError("interrupted while the CPU time of a step was measured")
    return (times[-1] - times[WARM_UP_STEPS]) / (len(times) - 1 - WARM_UP_STEPS)
