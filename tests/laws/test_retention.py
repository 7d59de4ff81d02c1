"""However checkpoints are saved, scored, damaged and resumed from, those needed are there."""

import contextlib
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gigamask.models import manifest
from gigamask.training import checkpoint
from gigamask.training.retention import Retention, set_aside, sweep
from tests.errors import error_line
from tests.little import SPEC, little

ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("score"), st.sampled_from((0.1, 0.5, 0.9))),
    st.tuples(st.just("damage"), st.integers(0, 3), st.sampled_from(("cut", "lost", "manifest"))),
    st.tuples(st.just("resume")),
    st.tuples(st.just("copy"), st.integers(0, 3)),
)
CASES, SAVE = 40, ("save", 1)
MARK = ".damaged"


@dataclass
class Model:
    """A run, and what must be true of it."""

    folder: Path
    keep: int
    step: int = 0
    retention: Retention = field(init=False)
    written: Path | None = None
    scores: dict[Path, float] = field(default_factory=dict)
    damaged: int = 0
    copies: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retention = Retention(self.keep)
        self.config = replace(little(), out=str(self.folder.parent), keep=self.keep)

    def whole(self) -> list[Path]:
        found = manifest.list_checkpoints(self.folder)
        return [path for path in found if not (path / MARK).exists()]

    def save(self, steps: int) -> None:
        self.step += steps
        before = self.whole()
        tensors = {"a": torch.tensor([float(self.step)])}
        snapshot = checkpoint.Snapshot(
            self.step, self.step, SPEC, tensors, None, {"m/a": tensors["a"]}, None, None, None, None
        )
        self.written = checkpoint.write(snapshot, self.config, self.retention)
        self.scores.pop(self.written, None)
        self.check({*before, self.written})

    def score(self, score: float) -> None:
        if self.written and self.written in self.whole():
            before = self.whole()
            checkpoint.record_score(self.written, score, "box", self.keep, self.retention)
            self.scores[self.written] = score
            self.check(set(before))

    def damage(self, number: int, how: str) -> None:
        found = self.whole()[::-1]
        if number < len(found):
            victim = found[number]
            if how == "cut":
                os.truncate(victim / checkpoint.MODEL, 9)
            elif how == "lost":
                (victim / checkpoint.OPTIMIZER).unlink()
            else:
                (victim / checkpoint.MANIFEST).write_text("{")
            (victim / MARK).write_text(str(self.damaged))
            self.damaged += 1

    def resume(self) -> None:
        whole = self.whole()
        found: list[Path] = []
        sweep(self.folder)
        if not whole and manifest.list_checkpoints(self.folder):
            with error_line("damaged"):
                manifest.newest(self.folder.parent, found)
            raise StopIteration
        newest = manifest.newest(self.folder.parent, found)
        assert newest == (whole[-1] if whole else None)
        for path in found:
            set_aside(path, "damaged")
        self.step = manifest.verify(newest)["step"] if newest else 0
        self.retention, self.written = Retention(self.keep, newest), newest

    def copy(self, number: int) -> None:
        found = self.whole()[::-1]
        if number < len(found):
            name = f"{found[number].name}{('_good', '.bak', ' copy', '.damaged')[number]}"
            if not (self.folder / name).exists():
                shutil.copytree(found[number], self.folder / name)
                self.copies.append(self.folder / name)

    def check(self, before: set[Path]) -> None:
        """Check what is left of the intact checkpoints, of which the last one was just written."""
        left = set(self.whole())
        assert self.written in left
        assert set(sorted(before)[-self.keep :]) <= left
        if self.retention.resumed in before:
            assert self.retention.resumed in left
        scored = {path: self.scores[path] for path in sorted(before) if path in self.scores}
        if scored:
            best = max(scored, key=lambda path: (scored[path], path))
            assert (self.folder / "best").resolve() == best.resolve()
            assert best in left
        assert len(left) <= self.keep + 3
        assert len(list(self.folder.glob(f"*/{MARK}"))) == self.damaged, "one was removed"
        assert all((path / checkpoint.MODEL).exists() for path in self.copies)


@settings(
    max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(2, [SAVE, SAVE, SAVE, ("damage", 0, "cut"), SAVE])
@example(2, [SAVE, SAVE, SAVE, ("damage", 0, "cut"), ("resume",), SAVE, SAVE])
@example(1, [("score", 0.9), SAVE, SAVE, ("damage", 0, "lost"), ("damage", 0, "cut"), SAVE, SAVE])
@given(st.integers(1, 3), st.lists(ACTIONS, max_size=14))
def test_what_is_needed_is_never_removed(monkeypatch, record_property, keep, actions):
    record_property("tried", CASES)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings(action="ignore"):
        model = Model(Path(out) / "checkpoints", keep)
        with contextlib.suppress(StopIteration):
            for name, *given_ in [SAVE, *actions, SAVE, ("resume",)]:
                getattr(model, name)(*given_)
