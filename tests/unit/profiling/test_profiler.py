"""What is written of some steps that go by; they need not be a training's."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from gigamask.data import process_memory
from gigamask.distributed.profile_ranges import profile_range
from gigamask.profiling.profiler import Profile

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def goes_by(profile, done, last, act=lambda: None):
    """Carries a training of one product a step past a profile, and returns what is said and behind
    which step."""
    told = []
    for number in range(done, last):
        told += [(number, line) for line, noted in profile.observe(number, False) if not noted]
        with profile_range("encode"):
            torch.ones(3, 3) @ torch.ones(3, 3)
        act()
    return told + [(last, line) for line, _ in profile.observe(last, True)]


def steps_of(folder: Path, mark: str = "") -> list[str]:
    events = json.loads(gzip.decompress((folder / f"trace{mark}.json.gz").read_bytes()))[
        "traceEvents"
    ]
    return sorted(
        {event["name"] for event in events if event["name"].startswith("gigamask: step ")}
    )


def test_steps_behind_the_warm_up_are_profiled_and_said_once(tmp_path):
    folder = tmp_path / "run" / "profile"
    ((step, line),) = goes_by(Profile(folder, 2, 10, 20, CPU), 10, 20)
    assert step == 15
    files = "profile.md, trace.json.gz (for https://ui.perfetto.dev or chrome://tracing)"
    assert line == f"profiled steps 14 to 15; in {folder}: {files}"
    assert sorted(path.name for path in folder.iterdir()) == ["profile.md", "trace.json.gz"]
    assert steps_of(folder) == ["gigamask: step 14", "gigamask: step 15"]
    report = (folder / "profile.md").read_text()
    assert report.startswith(
        f"# {tmp_path / 'run'}: steps 14 to 15\n\ncpu, torch {torch.__version__}. A profiled step "
        f"took "
    )
    assert "; the step before them, not profiled, took " in report
    (encode,) = (row for row in report.splitlines() if row.startswith("| encode |"))
    assert encode.endswith("| 1 |")
    assert "| aten::mm |" in report
    units = ("MB |", "GB |")  # a process of many tests has taken more than a gigabyte
    assert [row.split()[1] for row in report.splitlines() if row.endswith(units)] == ["14", "15"]
    assert "remained" not in report


@pytest.mark.parametrize(
    "asked, last, steps, fewer",
    [
        (2, 5, "steps 4 to 5", ""),
        (2, 4, "step 4", ", not 2: training had no more"),
        (2, 3, "step 3", ", not 2: training had no more"),
        (1, 1, "step 1", ""),
    ],
)
def test_short_trainings_are_profiled_as_far_as_they_go(tmp_path, asked, last, steps, fewer):
    ((step, line),) = goes_by(Profile(tmp_path, asked, 0, last, CPU), 0, last)
    assert step == last
    assert line.startswith(f"profiled {steps}{fewer}; in ")
    assert ("not profiled, took" in (tmp_path / "profile.md").read_text()) is (last > 1)


@pytest.mark.parametrize("ended", [0, 2, 3])
def test_a_training_that_ends_before_has_no_profile(tmp_path, ended):
    """At 3 the first step to profile has begun; the next profile finds torch's recorder at rest."""
    ((step, line),) = goes_by(Profile(tmp_path / "profile", 2, 0, 20, CPU), 0, ended)
    assert step == ended
    assert re.match(f"--profile 2: .* step {ended}, .* 4$", line)
    assert not (tmp_path / "profile").exists()
    assert goes_by(Profile(tmp_path / "profile", 1, 0, 1, CPU), 0, 1)[0][1].startswith(
        "profiled step 1; "
    )


def test_a_training_that_ends_amid_them_has_a_profile_of_those_that_were_over(tmp_path):
    ((_, line),) = goes_by(Profile(tmp_path, 9, 0, 20, CPU), 0, 6)
    assert line.startswith("profiled steps 4 to 6, not 9: training had no more; in ")


def test_tensors_that_stay_are_named(tmp_path):
    kept = []
    goes_by(Profile(tmp_path, 3, 0, 20, CPU), 0, 20, lambda: kept.append(torch.zeros(2, 31)))
    report = (tmp_path / "profile.md").read_text().splitlines()
    assert "| 3 | (2, 31) float32 cpu |" in report
    assert len(kept) == 20


def test_each_process_has_files_of_its_own_and_the_first_one_speaks(tmp_path):
    ((_, line),) = goes_by(Profile(tmp_path, 1, 0, 9, CPU, rank=0), 0, 9)
    assert line.endswith(", and those of the other processes")
    assert goes_by(Profile(tmp_path, 1, 0, 9, CPU, rank=3), 0, 9) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}_rank{rank}.{end}" for name, end in FILES for rank in (0, 3)
    ]
    assert "cpu, process 3, torch" in (tmp_path / "profile_rank3.md").read_text()


FILES = [("profile", "md"), ("trace", "json.gz")]


def test_a_profile_that_cannot_be_written_is_said_and_training_goes_on(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    ((step, line),) = goes_by(Profile(tmp_path / "profile", 1, 0, 9, CPU), 0, 9)
    assert step == 4
    assert line.startswith(
        f"{tmp_path / 'profile'}: no profile can be written ([Errno 17] File exists: "
    )
    assert line.endswith("; training continues")


def test_a_recorder_that_will_not_start_is_said_and_training_goes_on(tmp_path, monkeypatch):
    def start(recorder):
        raise RuntimeError("profiling is off here")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    ((step, line),) = goes_by(Profile(tmp_path, 1, 0, 9, CPU), 0, 9)
    assert step == 3
    assert (
        line == f"{tmp_path}: no profile can be written (profiling is off here); training continues"
    )


class Gpu:
    """Stands for CUDA's allocator."""

    def __init__(self, monkeypatch, broken=False):
        self.said = []
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", self.record)
        monkeypatch.setattr(
            memory,
            "_dump_snapshot",
            lambda path: (self.said.append("snapshot"), Path(path).write_bytes(b"history")),
        )
        monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: f"statistics of {device}")
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: self.said.append("synchronise")
        )
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7_000_000_000)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 9_000_000_000)
        self.broken = broken

    def record(self, enabled="all", **_):
        if self.broken:
            raise RuntimeError("this allocator keeps no history")
        self.said.append(enabled)


def test_on_a_gpu_allocator_statistics_are_reported(tmp_path, monkeypatch):
    gpu = Gpu(monkeypatch)
    ((_, line),) = goes_by(Profile(tmp_path, 1, 0, 9, torch.device("cuda:2")), 0, 9)
    assert gpu.said == ["synchronise", "all", "snapshot", None]
    assert line.endswith(", memory.pickle (for https://pytorch.org/memory_viz), allocator.txt")
    assert (tmp_path / "memory.pickle").read_bytes() == b"history"
    assert (tmp_path / "allocator.txt").read_text() == "statistics of cuda:2"
    report = (tmp_path / "profile.md").read_text()
    assert "| part of a step | ms/step | GPU ms/step | share | calls/step |" in report
    assert "| 7.00 GB | 9.00 GB |" in report


def test_an_allocator_without_history_ends_the_profile_and_not_the_training(tmp_path, monkeypatch):
    Gpu(monkeypatch, broken=True)
    ((_, line),) = goes_by(Profile(tmp_path, 1, 0, 9, torch.device("cuda:2")), 0, 9)
    assert line == (
        f"{tmp_path}: no profile can be written (this allocator keeps no history); training "
        f"continues"
    )
    assert goes_by(Profile(tmp_path, 1, 0, 1, CPU), 0, 1)[0][1].startswith("profiled step 1; ")


def test_a_system_that_does_not_say_what_a_process_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(process_memory, "allocated_bytes", lambda: None)
    goes_by(Profile(tmp_path, 1, 0, 9, CPU), 0, 9)
    assert "| step | ms |\n|---|---|\n| 4 | " in (tmp_path / "profile.md").read_text()
