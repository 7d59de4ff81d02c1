"""The batch script of `--submit slurm`."""

from subprocess import getoutput

from gigamask.plugins.cluster import slurm


def test_a_job_trains_for_half_of_a_short_time_before_it_is_signaled():
    """Otherwise it would be signaled at its start, and requeued for ever."""
    signaled = map(slurm.signal_s, "UNLIMITED 11 5 4:30 0:04:00 1-0 1".split())
    assert [*signaled] == [300, 300, 120, 105, 90, 300, 0]


def test_a_part_is_not_requeued_for_ever():
    assert "more --submit-time" in getoutput(
        f"SLURM_ARRAY_TASK_ID=0 SLURM_RESTART_COUNT=20\n{slurm.TRAPS}\nrequeue"
    )
