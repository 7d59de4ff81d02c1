"""Every malformed file is refused with one line: at once, in little memory, and running nothing."""

import multiprocessing
import resource
from pathlib import Path

import pytest

from gigamask.errors import GigamaskError
from gigamask.models.sam.sam import Sam
from tests.unit.models.malformed_weights import write_all

MAX_BYTES = 1 << 30
"""Memory beyond what the process has before, for files of a megabyte."""
MAX_S = 300


def load_each(paths: dict[str, Path], folder: Path, answers) -> None:
    """Load each path in a process whose memory is limited, and send what came of it."""
    import os

    os.chdir(folder)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    for name, path in paths.items():
        answers.send((name, None))
        try:
            Sam.from_pretrained(path)
            outcome = "loaded"
        except GigamaskError as error:
            outcome = f"error: {error}"
        except BaseException as error:
            outcome = f"traceback: {type(error).__name__} {error}"
        answers.send((name, outcome))
    answers.close()


@pytest.mark.long
@pytest.mark.slow
def test_each_is_refused_with_one_line(tmp_path, record_property):
    paths = write_all(tmp_path)
    record_property("tried", len(paths))
    assert len(paths) > 100
    context = multiprocessing.get_context("fork")
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=load_each, args=(paths, tmp_path, theirs))
    process.start()
    theirs.close()
    outcomes: dict[str, str | None] = {}
    try:
        while answers.poll(MAX_S):
            name, outcome = answers.recv()
            outcomes[name] = outcome
    except EOFError:
        pass
    process.kill()
    process.join()
    assert outcomes.keys() == paths.keys(), f"ended or hung at {list(outcomes)[-1]}"
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if not str(outcome).startswith("error: ")
        or "weights_only" in str(outcome)
        or len(str(outcome)) > 700
        or str(paths[name])[:40] not in str(outcome)
    }
    assert not wrong
    assert not (tmp_path / "ran").exists()
