import contextlib
import errno
import gc
import itertools
import json
import os
import pathlib
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.models import manifest, state_dict, weight_files
from gigamask.models.model import Model
from gigamask.samplers.loss_history import LossHistory
from gigamask.training import checkpoint, retention
from gigamask.training.retention import Retention
from gigamask.training.state import TrainState, build_to_load
from tests.checkpoints import resume, save
from tests.errors import error_line
from tests.limits import files_limited
from tests.little import little, little_compact

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path):
    return replace(little(), out=str(tmp_path / "run"), data=("x",))


def state_at(run, step):
    state = TrainState.initialize(run, CPU)
    for parameter in state.model.parameters():
        parameter.grad.fill_(0.01 * step)
    for optimizer in state.optimizers:
        optimizer.step()
    state.step = step
    return state


def test_no_checkpoint_is_none(run):
    assert resume(run, CPU) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, named",
    [
        ("flip", r"optimizer.safetensors.*crc32 \d+.*\d+ bytes with crc32 \d+"),
        ("cut", "optimizer.safetensors"),
        ("remove", "optimizer.safetensors.*manifest"),
        ("{", "manifest.json"),
        ("[]", "manifest"),
        ({"samples": 99}, "manifest.json.*crc32"),
        ({"format": 7}, "format must be 2 .*7"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, damage, named):
    save(state_at(run, 1), run)
    newest = save(state_at(run, 2), run)
    victim, told = newest / checkpoint.OPTIMIZER, newest / checkpoint.MANIFEST
    content = victim.read_bytes()
    if damage == "flip":
        flip(victim, content, 4 * len(content))
    elif damage == "cut":
        victim.write_bytes(content[:-7])
    elif damage == "remove":
        victim.unlink()
    elif isinstance(damage, str):
        told.write_text(damage)
    else:
        told.write_text(json.dumps(json.loads(told.read_text()) | damage))
    with error_line(named):
        manifest.verify(newest)
    with pytest.warns(UserWarning, match="step_00000002.*going back to the checkpoint before it"):
        assert resume(run, CPU).step == 1


@pytest.mark.slow
def test_flipped_bits_are_all_found(run, record_property):
    """Three hundred of them, anywhere in any file."""
    record_property("tried", 300)
    folder, chance = save(state_at(run, 1), run), np.random.default_rng(0)
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    assert {path.name for path in files} == {
        checkpoint.MODEL,
        checkpoint.OPTIMIZER,
        checkpoint.MANIFEST,
    }
    for path, content in files.items():
        for bit in chance.integers(8 * len(content), size=100).tolist():
            flip(path, content, bit)
            with error_line(path.name):
                manifest.verify(folder)
        path.write_bytes(content)
    manifest.verify(folder)


def flip(path, content, bit):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)


@pytest.mark.slow
def test_flipped_bits_of_a_checkpoint_are_found_however_it_is_named(run, tmp_path, record_property):
    folder = keep(state_at(run, 1), run, 0.5)
    file, out = folder / checkpoint.MODEL, pathlib.Path(run.out)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.safetensors").symlink_to(file)
    shutil.copytree(folder, tmp_path / "copy")
    content = file.read_bytes()
    named = [
        *(out, out / "checkpoints" / "best", out / "checkpoints" / "best" / checkpoint.MODEL),
        *(folder, file, tmp_path / "link", tmp_path / "link.safetensors", tmp_path / "copy"),
    ]
    chance = np.random.default_rng(1)
    record_property("tried", 10 * len(named))
    for path in named:
        state_dict.read_weights(path)
        for bit in chance.integers(8 * len(content), size=10).tolist():
            flip(tmp_path / "copy" / checkpoint.MODEL, content, bit)
            flip(file, content, bit)
            with warnings.catch_warnings(action="ignore"), error_line(r"safetensors|damaged"):
                state_dict.read_weights(path)
        file.write_bytes(content)
        (tmp_path / "copy" / checkpoint.MODEL).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.MANIFEST])
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(run, name, monkeypatch):
    """The permission is refused by a patch, since root may read everything."""
    keep(state_at(run, 1), run, None)
    folder = keep(state_at(run, 2), run, None)
    allowed, refused = os.stat(folder).st_mode & 0o777, folder / name
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == allowed & 0o666, path

    def deny(call):
        def denied(path, *given, **named):
            if pathlib.Path(path) == refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *given, **named)

        return denied

    monkeypatch.setattr(manifest, "crc32", deny(manifest.crc32))
    monkeypatch.setattr(pathlib.Path, "read_bytes", deny(pathlib.Path.read_bytes))
    for use in (
        lambda: resume(run, CPU),
        lambda: state_dict.read_weights(run.out),
        lambda: manifest.verify(folder),
    ):
        with error_line(rf"{name}: permission denied"):
            use()


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_it_is_said(run):
    (save(state_at(run, 1), run) / checkpoint.MODEL).unlink()
    with pytest.warns(UserWarning, match="going back"), error_line("1 checkpoint"):
        resume(run, CPU)


OPERATIONS = [
    *(
        (pathlib.Path, name)
        for name in (
            "mkdir",
            "iterdir",
            "stat",
            "write_bytes",
            "rename",
            "replace",
            "symlink_to",
            "unlink",
            "glob",
        )
    ),
    *((os, name) for name in ("open", "fsync", "close", "replace")),
    *((checkpoint, name) for name in ("save_file", "save_arrays", "crc32")),
    *((weight_files, "save_file"), (shutil, "rmtree")),
]


@pytest.mark.long
@pytest.mark.usefixtures("no_shape_checks")
def test_a_crash_anywhere_in_a_save_leaves_the_newest_complete_checkpoint(run, monkeypatch):
    """Let each file operation of a save and its score fail in turn; the same save then succeeds.

    Each file has a few tensors: hundreds would make no other operation.
    """
    run = replace(run, keep=1)
    folder, before = pathlib.Path(run.out) / "checkpoints", pathlib.Path(run.out) / "before"
    first, second = (
        replace(whole, model=few(whole.model), optimizer=few(whole.optimizer))
        for step in (1, 2)
        for whole in [checkpoint.Snapshot.from_state(with_book(state_at(run, step)))]
    )
    gc.freeze()  # of what is imported, which every collection below would walk through

    def write_scored(snapshot: checkpoint.Snapshot, score: float) -> None:
        path = checkpoint.write(snapshot, run, Retention(run.keep))
        checkpoint.record_score(path, score, "box", run.keep)

    write_scored(first, 0.5)
    folder.rename(before)
    for k in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder, symlinks=True)
        with failing(monkeypatch, k) as left:
            try:
                write_scored(second, 0.7)
            except (OSError, GigamaskError):
                assert not left
        assert checkpoint.newest(pathlib.Path(run.out)).name in ("step_00000001", "step_00000002")
        write_scored(second, 0.7)
        assert sorted(path.name for path in folder.iterdir()) == ["best", "step_00000002"]
        assert manifest.verify(folder / "best")["score"] == 0.7
        if left:
            break
    assert k > 50


def few(tensors):
    return dict(itertools.islice(tensors.items(), 3))


def with_book(state):
    """Returns the state with losses that its sampler has learned."""
    state.loss_history = LossHistory.empty("tars", 3, 0.9)
    return state


@contextlib.contextmanager
def failing(monkeypatch, k):
    """Lets the k-th of the operations fail; yields a list that is empty once it has."""
    left = list(range(k))

    def failing(function):
        def call(*given, **named):
            if left and left.pop() == 0:
                raise OSError(28, "No space left on device")
            return function(*given, **named)

        return call

    gc.collect()  # what earlier tests left open would be closed by a failing operation
    with monkeypatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, failing(getattr(owner, name)))
        yield left


@pytest.mark.slow
def test_a_disk_that_is_full_says_so(run):
    """What safetensors raises is no OSError by itself."""
    state = state_at(run, 1)
    for most, name in ((100, "model.safetensors"), (150_000, "optimizer.safetensors")):
        with (
            files_limited(most),
            pytest.raises(OSError, match=rf"^\[Errno {errno.EFBIG}\] File too large: '.*/{name}'$"),
        ):
            save(state, run)
    with (
        pytest.raises(OSError, match=rf"^\[Errno {errno.EIO}\] "),
        files.report_write_errors(pathlib.Path("x")),
    ):
        raise SafetensorError("something else")


def test_optimizer_entries_must_match(run):
    state = state_at(run, 1)
    tensors = state.optimizer_tensors()
    missing = dict(list(tensors.items())[1:])
    act = "--freeze and --optimizer .*: --init here and another --out"
    with error_line(rf"^here.*1 optimizer.*{act}"):
        state.load_optimizer(missing, "here")


def test_parameters_may_have_different_entries(run):
    """As Adafactor's vectors and matrices."""
    state = state_at(run, 1)
    tensors = {
        name.replace("exp_avg/", "row/") if value.ndim > 1 else name: value
        for name, value in state.optimizer_tensors().items()
        if "exp_avg_sq/" not in name
    }
    state.load_optimizer(tensors, "here")
    assert state.optimizer_tensors().keys() == tensors.keys()
    del tensors[next(name for name in tensors if name.startswith("row/"))]
    with error_line("^here: 2 optimizer entries are missing"):  # of either kind
        state.load_optimizer(tensors, "here")


def keep(state, run, score: float | None):
    """Save the state, record its score if there is one, and return the folder."""
    folder = save(state, run)
    if score is not None:
        checkpoint.record_score(folder, score, run.evaluation.best_by, run.keep)
    return folder


def kept(run) -> tuple[list[int], int | None]:
    """The steps of the checkpoints there are, and the one that `best` links to."""
    folder = checkpoint.Path(run.out) / "checkpoints"
    best = folder / manifest.BEST
    if best.is_symlink():
        assert not best.readlink().is_absolute(), "the run folder may be moved"
        assert manifest.verify(best) == manifest.verify(best.resolve())
    return [int(path.name[-8:]) for path in manifest.list_checkpoints(folder)], int(
        best.resolve().name[-8:]
    ) if best.is_symlink() else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "scores, steps, best",
    [
        ([0.5, 0.4, 0.3, 0.2], [1, 3, 4], 1),
        ([0.1, 0.2, 0.3, 0.4], [3, 4], 4),
        ([0.1, 0.7, 0.3, 0.4, 0.5], [2, 4, 5], 2),
        ([0.5, 0.5, 0.4, 0.4], [2, 3, 4], 2),
        ([None, 0.5, None, None, None], [2, 4, 5], 2),
        ([0.5, None, None, 0.6, None], [4, 5], 4),
        ([0.0, None, None, None], [1, 3, 4], 1),
        ([None, None, None], [2, 3], None),
        ([float("nan"), 0.2, 0.1, 0.1], [2, 3, 4], 2),
        ([0.2, float("nan"), float("nan"), float("nan")], [1, 3, 4], 1),
        ([float("nan"), None, None], [2, 3], None),
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(run, scores, steps, best):
    """Of equal ones the newest; what has no score, or none that is a number, is never the best."""
    state = state_at(run, 1)
    for state.step, score in enumerate(scores, 1):
        keep(state, run, score)
    assert kept(run) == (steps, best)
    assert resume(run, CPU).step == len(scores), "going on is from the newest, not from the best"


@pytest.mark.slow
@pytest.mark.parametrize("again, best", [(None, 1), (0.4, 1), (0.6, 2), (0.95, 2)])
def test_a_step_that_is_saved_again_counts_as_it_is_now(run, again, best):
    """A run that went back to an earlier checkpoint saves the best one again."""
    state = state_at(run, 0)
    for state.step, score in ((1, 0.5), (2, 0.9), (2, again)):
        keep(state, run, score)
    assert kept(run) == ([1, 2], best)


@pytest.mark.slow
def test_scores_that_mean_another_thing_are_not_compared(run):
    keep(state_at(run, 1), run, 0.9)
    by_box = replace(run, evaluation=replace(run.evaluation, best_by="box"), keep=9)
    newest = keep(state_at(by_box, 2), by_box, 0.2)
    assert (newest.parent / "best").resolve() == newest.resolve()
    keep(state_at(by_box, 3), by_box, 0.1)
    assert (newest.parent / "best").resolve() == newest.resolve()


@pytest.mark.slow
def test_where_no_scored_checkpoint_is_left_there_is_no_best(run):
    keep(state_at(run, 1), run, 0.5)
    assert kept(run)[1] == 1
    keep(state_at(run, 1), run, None)
    assert kept(run) == ([1], None)


@pytest.mark.slow
def test_a_save_that_failed_before_it_linked_is_made_up_for_by_the_next(run, monkeypatch):
    state = state_at(run, 1)
    keep(state, run, 0.5)
    state.step = 2
    second = save(state, run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Path, "symlink_to", fail)
        with pytest.raises(OSError, match="full"):
            checkpoint.record_score(second, 0.9, run.evaluation.best_by, run.keep)
    assert kept(run) == ([1, 2], 1)
    folder = checkpoint.Path(run.out) / "checkpoints"
    (folder / ".best.link").symlink_to("step_00000001")
    for state.step in (3, 4, 5):
        keep(state, run, 0.7)
    assert kept(run) == ([2, 4, 5], 2)
    assert not (folder / ".best.link").is_symlink()
    (folder / ".step_00000009.part").mkdir()
    retention.sweep(folder)
    assert kept(run) == ([2, 4, 5], 2)
    assert not (folder / ".step_00000009.part").exists()


def fail(*_):
    raise OSError("the disk is full")


@pytest.fixture
def drawn(monkeypatch):
    """The names of tensors that get initial values."""
    names, value = [], Model._initial_value

    def initial_value(self, module, name, *given):
        names.append(name)
        return value(self, module, name, *given)

    monkeypatch.setattr(Model, "_initial_value", initial_value)
    return names


@pytest.mark.parametrize("make", [little, little_compact])
def test_no_initial_value_is_drawn_for_what_a_checkpoint_holds(make, drawn):
    """All else, such as the mean of the pixels, is as in a new model."""
    run = make()
    expected = run.build()
    drawn.clear()
    built = build_to_load(run, CPU)
    assert drawn == ["pixel_mean", "pixel_std"]
    assert all(torch.equal(getattr(built, name), getattr(expected, name)) for name in drawn)
    shapes = [{n: t.shape for n, t in each.state_dict().items()} for each in (built, expected)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("make", [little, little_compact])
def test_no_initial_value_is_drawn_for_what_initial_weights_hold(make, drawn, tmp_path):
    run, path = make(), tmp_path / "model.safetensors"
    given = replace(run, seed=5).build()
    state_dict.save_weights(state_dict.to_official(given), given.config, path)
    drawn.clear()
    model = TrainState.initialize(run, CPU, str(path)).model
    assert drawn == ["pixel_mean", "pixel_std"]
    expected = given.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
