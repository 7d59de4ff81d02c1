"""What a run of the tests reports: the time of each test, and the machine if one fails.

`conftest.py` registers it. Times are stored in the pytest cache, `.pytest_cache/v/durations`, and
printed by folder. CPU time is that of the process that runs the test and of its children that have
ended: it is about the same on a busy machine, unlike wall time.
"""

import collections
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WALL, CPU = "wall_s", "cpu_s"
SETTINGS = ("OMP_", "MKL_", "ONEDNN_", "ATEN_", "TORCH", "CUDA", "GIGAMASK_", "PYTHON")
"""How the names of environment variables begin that may change what a test finds."""
LIBRARIES = (
    "torch",
    "numpy",
    "simplejpeg",
    "opencv-python-headless",
    "transformers",
    "onnxruntime",
)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Begin to measure a test with its fixtures."""
    item.stash[_BEGAN] = time.perf_counter(), _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    """Note what a test has taken so far in the report, which reaches the main process."""
    report = yield
    wall, cpu = item.stash[_BEGAN]
    report.user_properties = [
        *(each for each in report.user_properties if each[0] not in (WALL, CPU)),
        (WALL, time.perf_counter() - wall),
        (CPU, _cpu_s() - cpu),
    ]
    return report


_BEGAN = pytest.StashKey[tuple[float, float]]()


def machine() -> list[str]:
    """Return the lines that a report of a failed test must have: versions, processor, threads."""
    import torch

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.partition(":")[2].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor()
    versions = [f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES]
    capability = torch.backends.cpu.get_cpu_capability()
    settings = [f"{key}={value}" for key, value in os.environ.items() if key.startswith(SETTINGS)]
    return [
        f"{platform.platform()}, Python {platform.python_version()}, {', '.join(versions)}",
        f"{name}, {capability}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch",
        f"environment: {' '.join(sorted(settings)) or 'no setting'}",
    ]


class Durations:
    """Collects the times of all tests in the main process."""

    def __init__(self) -> None:
        self.began, self.tests = time.perf_counter(), {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the times of a test, of which the last report has the whole."""
        if report.when == "teardown":
            times = dict(report.user_properties)
            self.tests[report.nodeid] = times[WALL], times[CPU]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Store the times beside those of earlier sessions, which ran other tests."""
        if getattr(session.config, "cache", None) is None:  # with -p no:cacheprovider
            return
        stored = session.config.cache.get("durations", {})
        rounded = {test: [round(each, 3) for each in times] for test, times in self.tests.items()}
        session.config.cache.set("durations", stored | rounded)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the machine if a test failed, and the times by folder if there were many."""
        if terminalreporter.stats.keys() & {"failed", "error"}:
            terminalreporter.section("send this with what failed")
            for line in machine():
                terminalreporter.line(line)
        if len(self.tests) < 100:
            return
        rows = collections.defaultdict(lambda: [0, 0.0, 0.0])
        for test, (wall, cpu) in self.tests.items():
            folder = str(Path(test.partition("::")[0]).parent)
            for name in {folder, "/".join(folder.split("/")[:2]), "all"}:
                for i, each in enumerate((1, wall, cpu)):
                    rows[name][i] += each
        elapsed = time.perf_counter() - self.began
        terminalreporter.section(f"times by folder ({elapsed / 60:.1f} minutes elapsed)")
        terminalreporter.line(f"{'folder':32}{'tests':>8}{'wall s':>10}{'CPU s':>10}")
        for name, (count, wall, cpu) in sorted(rows.items()):
            terminalreporter.line(f"{name:32}{count:8}{wall:10.1f}{cpu:10.1f}")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the main process alone."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "durations")
