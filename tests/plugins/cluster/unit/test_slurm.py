"""The batch script of `--submit slurm`."""

from pathlib import Path

import pytest

from gigamask.plugins.cluster import slurm
from gigamask.plugins.cluster.submission import Plan, SubmitTrainingOptions
from tests.plugins.cluster import fake_slurm


@pytest.mark.parametrize(
    ("sbatch", "signal"),
    [
        ((), "B:USR1@300"),
        (("time=0",), "B:USR1@300"),
        (("time=UNLIMITED",), "B:USR1@300"),
        (("time=11",), "B:USR1@300"),
        (("time=5",), "B:USR1@120"),
        (("time=4:30",), "B:USR1@105"),
        (("time=0:04:00",), "B:USR1@90"),
        (("time=0-0:5",), "B:USR1@120"),
        (("time=1-0",), "B:USR1@300"),
        (("time=1",), "B:USR1@0"),
        (("time=5", "signal=B:USR1@9"), "B:USR1@9"),
    ],
)
def test_a_job_trains_for_half_of_a_short_time_before_it_is_signaled(sbatch, signal):
    """Otherwise it would be signaled at its start, and requeued for ever."""
    plan = Plan("train", ["train"], SubmitTrainingOptions(submit_sbatch=sbatch), folder=Path("/f"))
    assert fake_slurm.options_of(slurm.batch_script(plan, ()))["signal"] == signal
