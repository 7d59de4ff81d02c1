"""What a run of the tests prints beside its results."""

from types import SimpleNamespace

import pytest
import torch

from tests.reporting import CPU, WALL, Durations


@pytest.mark.parametrize("stats", [{}, {"failed": [1]}, {"error": [1]}])
def test_a_failure_is_reported_with_the_machine_and_many_tests_by_folder(stats, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    durations, printed = Durations(), []
    durations.pytest_terminal_summary(SimpleNamespace(stats={}, section=print, line=print))
    for number in range(120):
        times = [(WALL, 2.0), (CPU, 1.0)]
        name = f"tests/unit/{'masks' if number % 3 else 'data'}/test_it.py::test[{number}]"
        report = SimpleNamespace(when="teardown", nodeid=name, user_properties=times)
        durations.pytest_runtest_logreport(report)
    durations.pytest_terminal_summary(
        SimpleNamespace(stats=stats, section=printed.append, line=printed.append)
    )
    text = "\n".join(printed)
    assert ("torch " + torch.__version__.partition("+")[0] in text) == bool(stats)
    assert ("MKL_CBWR=COMPATIBLE" in text) == bool(stats)
    rows = {line.split()[0]: line.split()[1:] for line in printed if line.startswith(("t", "a"))}
    assert rows["tests/unit/data"] == ["40", "80.0", "40.0"]
    assert rows["tests/unit"] == rows["all"] == ["120", "240.0", "120.0"]
