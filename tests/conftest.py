"""Turns shape checks on, finds the real data, and keeps torch and OpenCV to one thread so that
parallel test processes do not fight.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import hypothesis
import jaxtyping
import pytest
import torch

from gigamask import progress
from tests import reporting, shape_checks
from tests.browser import browser  # noqa: F401 (a fixture)

torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))
# OpenMP of a forked process would wait forever for the threads of its parent.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
torch.backends.mkldnn.enabled = os.environ.get("TEST_MKLDNN", "1") == "1"
cv2.setNumThreads(1)  # also, a fork of a process whose OpenCV has threads may hang
# A busy machine is slow, not wrong: it shall print no progress where a test expects an error alone;
# and forty examples find what a hundred find, or a law says more. They are the same ones in every
# run, so that a run fails by what was changed; `--hypothesis-profile random` draws others.
progress.INTERVAL_S = 3600.0
hypothesis.settings.register_profile("random", deadline=None, max_examples=400)
hypothesis.settings.register_profile("same", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("same")

SLOW = ("laws", "journeys", "parity")
"""Folders whose tests are all slow; elsewhere a slow test bears the mark itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-shape-checks", action="store_true", help="do not check shapes and types of calls"
    )


if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["SHAPE_CHECKS"] = str("--no-shape-checks" not in sys.argv)
if os.environ["SHAPE_CHECKS"] == "True":
    # Not in `pytest_configure`: before it, pytest imports conftest.py of a folder that it is given,
    # and with it modules of gigamask.
    shape_checks.install()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(reporting)
    # A shell starts commands in the background with SIGINT ignored, nohup ignores SIGHUP, and tests
    # send both.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Exempt what is imported from garbage collections, whose time it would multiply, and ask
    servers that fail again at once."""
    from gigamask.data import storage

    storage.FIRST_WAIT_S = 0.002
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Kill the processes that failed tests left: Python waits for them at exit."""
    for process in multiprocessing.active_children():
        process.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out."""
    for item in items:
        quick = item.path.stem == "test_code_rules"
        if item.path.parent.name in SLOW and not quick:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real photographs with real masks; tests that need it skip, and say so, where it
    is absent."""
    folder = Path(
        os.environ.get("GIGAMASK_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    )
    if not (folder / "bsds_val").is_dir():
        pytest.skip(
            f"no real data at {folder}: set GIGAMASK_DATA to the folder that holds bsds_val"
        )
    return folder


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tar of twelve synthetic scenes."""
    from gigamask.synthetic import scenes

    folder = tmp_path_factory.mktemp("scenes")
    scenes.write(str(folder), 12, seed=7)
    return folder


@pytest.fixture(scope="module")
def index(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An index of the scenes; a module may have scenes of its own."""
    from gigamask.data.index import build

    return build(scenes, tmp_path_factory.mktemp("index") / "index")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights of the little model."""
    from gigamask.models.init import build_model
    from tests.little import SPEC

    folder = tmp_path_factory.mktemp("weights")
    build_model(SPEC, 5).save_pretrained(folder)
    return folder


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of `parallel_map`, which would import torch anew, in tests of what they do.
    Tests of `parallel_map` itself start them as commands do."""
    from gigamask.data import worker_pool

    fork = multiprocessing.get_context("fork")
    own = SimpleNamespace(
        get_context=lambda method: fork,
        active_children=multiprocessing.active_children,
        parent_process=multiprocessing.parent_process,
    )
    monkeypatch.setattr(worker_pool, "multiprocessing", own)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread, as forks of this process do, for what is the same bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check no shapes in a slow test of what other tests call with checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def progress_is_shown_as_before() -> Iterator[None]:
    """Forget that a test was a process of several, of which one shows progress."""
    yield
    progress.CHOSEN.set("")


@pytest.fixture(autouse=True)
def shapes_are_checked_in_unit_tests(request: pytest.FixtureRequest) -> None:
    """Check the first calls of each test.

    Laws and journeys train and score at length what unit tests call once; checking every shape
    again would double their time. `make test` does not even install the checks there."""
    shape_checks.next_test()
    if request.path.parent.name in ("laws", "journeys"):
        request.getfixturevalue("no_shape_checks")
