"""The batch script of `--submit slurm`."""

from gigamask.plugins.cluster import slurm


def test_a_job_trains_for_half_of_a_short_time_before_it_is_signaled():
    """Otherwise it would be signaled at its start, and requeued for ever."""
    limits = "UNLIMITED 11 5 4:30 0:04:00 1-0 1".split()
    expected = [300, 300, 120, 105, 90, 300, 0]
    assert [slurm.signal_s(limit) for limit in limits] == expected
