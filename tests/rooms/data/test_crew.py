import os
import signal

import pytest

from gigamask.data.crew import each
from gigamask.faults import Fault


def double(number: int) -> int:
    return 2 * number


def fail_at_two(number: int) -> int:
    if number == 2:
        raise Fault("two.tar: is broken")
    return number


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_items_order_and_progress_counts(workers):
    seen = []
    assert each(double, range(5), workers, lambda done, total: seen.append((done, total))) == [0, 2, 4, 6, 8]
    assert seen == [(done, 5) for done in range(1, 6)]
    assert each(double, [], workers) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_ends_the_work(workers):
    with pytest.raises(Fault, match=r"^two.tar: is broken$"):
        each(fail_at_two, range(4), workers)


def test_a_dead_process_is_told():
    with pytest.raises(Fault, match=r"one of 2 worker processes died; often memory ran out: run the same command again with fewer --workers"):
        each(die, range(3), 2)


def test_somebody_has_to_work():
    with pytest.raises(Fault, match=r"0 workers: at least one has to do the work"):
        each(double, range(3), 0)
