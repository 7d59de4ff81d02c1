import json
from dataclasses import replace

import pytest
import torch

from gigamask.faults import Fault
from gigamask.train import checkpoint
from gigamask.train.state import TrainState
from tests.little import little


@pytest.fixture
def run(tmp_path):
    return replace(little(), out=str(tmp_path / "run"), data=("x",))


def state_at(run, step):
    state = TrainState.begin(run, torch.device("cpu"))
    for parameter in state.model.parameters():
        parameter.grad.fill_(0.01 * step)
    for optimizer in state.optimizers:
        optimizer.step()
    state.step = step
    return state


def test_what_is_loaded_is_what_was_saved(run):
    saved = state_at(run, 2)
    checkpoint.save(saved, run)
    loaded = checkpoint.resume(run, torch.device("cpu"))
    assert (loaded.step, loaded.cursor) == (saved.step, saved.cursor)
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name
    ours, theirs = saved.optimizer_tensors(), loaded.optimizer_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_no_checkpoint_is_none(run):
    assert checkpoint.resume(run, torch.device("cpu")) is None
    assert checkpoint.locate("some.pth") == "some.pth"


def test_only_the_last_k_stay(run):
    for step in (1, 2, 3, 4):
        folder = checkpoint.save(state_at(run, step), run)
    assert [path.name for path in checkpoint.complete(folder.parent)] == ["step_00000003", "step_00000004"]
    assert checkpoint.locate(run.out) == str(folder)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "format"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, damage):
    checkpoint.save(state_at(run, 1), run)
    newest = checkpoint.save(state_at(run, 2), run)
    victim = newest / checkpoint.OPTIMIZER
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
        victim.write_bytes(content)
    elif damage == "cut":
        victim.write_bytes(content[:-7])
    elif damage == "remove":
        victim.unlink()
    elif damage == "manifest":
        (newest / checkpoint.MANIFEST).write_text("{")
    else:
        manifest = json.loads((newest / checkpoint.MANIFEST).read_text())
        (newest / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.warns(UserWarning, match="step_00000002.*going back to the checkpoint before it"):
        assert checkpoint.resume(run, torch.device("cpu")).step == 1


def test_messages_name_file_and_numbers(run):
    folder = checkpoint.save(state_at(run, 1), run)
    victim = folder / checkpoint.MODEL
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(Fault, match=r"model.safetensors: \d+ bytes with crc32 \d+, the manifest says \d+ and \d+"):
        checkpoint.verify(folder)
    with pytest.warns(UserWarning, match="going back"), pytest.raises(Fault, match="none of its 1 checkpoints is sound"):
        checkpoint.resume(run, torch.device("cpu"))
    victim.unlink()
    with pytest.raises(Fault, match="the manifest lists it, but it cannot be read"):
        checkpoint.verify(folder)
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"format": 7, "files": {}}))
    with pytest.raises(Fault, match="checkpoint format 7, this version reads 1"):
        checkpoint.verify(folder)
    (folder / checkpoint.MANIFEST).write_text("[]")
    with pytest.raises(Fault, match="not readable as a manifest"):
        checkpoint.verify(folder)


def test_a_crash_anywhere_in_a_save_leaves_the_newest_complete_checkpoint(run, monkeypatch):
    """Lets the k-th file operation of a save fail, for every k until none is left."""
    checkpoint.save(state_at(run, 1), run)
    state = state_at(run, 2)
    operations = ["weights.save", "save_file", "checksum", "_flush", "shutil.rmtree"]
    for k in range(1, 100):
        counter = {"left": k}

        def failing(function, counter=counter):
            def call(*args, **kwargs):
                counter["left"] -= 1
                if counter["left"] == 0:
                    raise OSError("no space left on device")
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in operations:
                owner, _, attribute = name.rpartition(".")
                target = getattr(checkpoint, owner) if owner else checkpoint
                patch.setattr(target, attribute, failing(getattr(target, attribute)))
            try:
                checkpoint.save(state, run)
            except OSError:
                assert checkpoint.resume(run, torch.device("cpu")).step in (1, 2)
                continue
        break
    assert k > 8
    assert checkpoint.resume(run, torch.device("cpu")).step == 2
    assert not list((checkpoint.Path(run.out) / "checkpoints").glob(".step*"))


def test_optimizer_entries_must_match(run):
    state = state_at(run, 1)
    tensors = state.optimizer_tensors()
    missing = dict(list(tensors.items())[1:])
    with pytest.raises(Fault, match=r"here: 1 optimizer entries are missing or unknown, the first is"):
        state.load_optimizer(missing, "here")
