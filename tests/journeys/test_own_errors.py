"""An exception in a component of the user's own is one line that names it, then its traceback."""

import pytest

from tests.commands import LITTLE, exit_code, refusal

CODE = """
from dataclasses import dataclass
from gigamask.data.augment import HorizontalFlip
from gigamask.interfaces import LRSchedule, PromptSchedule
from gigamask.losses.sam_loss import SamLoss
from gigamask.samplers.random import Random
from gigamask.training.optim import AdamW

@dataclass(frozen=True)
class BadLoss(SamLoss):
    def mask_losses(self, logits, targets, valid):
        return {}["focal"]

@dataclass(frozen=True)
class FlatLoss(SamLoss):
    def mask_losses(self, logits, targets, valid):
        return {"focal": logits.mean()}

@dataclass(frozen=True)
class BadSampler(Random):
    def order(self, table, epoch, history):
        import numpy
        return numpy.zeros(2).reshape(3)

@dataclass(frozen=True)
class NoTorch(AdamW):
    def build(self, model):
        return None

@dataclass(frozen=True)
class NoPrompts(PromptSchedule):
    def next(self, previous, targets, random_inputs, mask_only_round_u):
        return None

@dataclass(frozen=True)
class NoFactor(LRSchedule):
    pass

@dataclass(frozen=True)
class BadStart(Random):
    def __post_init__(self):
        raise ValueError("no such\\nthing")

@dataclass(frozen=True)
class BadAugment(HorizontalFlip):
    def get_transform(self, original, image_size, generator):
        return helper()

def helper():
    raise RuntimeError("helper failed")
"""


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    "flag, name, said",
    [
        (
            "--loss",
            "BadLoss",
            "BadLoss.mask_losses raised KeyError: 'focal' (it was given log",
        ),
        ("--sampler", "BadSampler", "BadSampler.order raised ValueError: cannot reshape"),
        ("--sampler", "BadStart", "BadStart.__post_init__ raised ValueError: no such thing"),
        ("--loader.augment", "BadAugment", "helper raised RuntimeError: helper failed"),
    ],
)
def test_it_names_file_class_and_exception(workers, flag, name, said, scenes, tmp_path, capfd):
    if workers == "1" and name != "BadAugment":
        pytest.skip("does not run in loader processes")
    (tmp_path / "bad_parts.py").write_text(CODE)
    words = f"--data {scenes} --out {tmp_path}/run --loader.workers {workers}"
    assert exit_code(f"train {LITTLE}", words, f"{flag} {tmp_path}/bad_parts.py:{name}") == 1
    lines, first = told(capfd)
    assert first.startswith(f"gigamask: {tmp_path / 'bad_parts.py'}:")
    assert said in first
    assert any(line.startswith("Traceback") for line in lines[lines.index(first) :])


def told(capfd) -> tuple[list[str], str]:
    """The lines on standard error, and the one of gigamask."""
    lines = capfd.readouterr().err.splitlines()
    (first,) = [line for line in lines if line.startswith("gigamask: ")]
    return lines, first


def test_a_bug_of_ours_is_a_bare_traceback(monkeypatch):
    monkeypatch.setattr("gigamask.cli.main.run_command", lambda arguments: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        exit_code("train")


def test_a_loss_of_another_shape_is_told_what_it_got_and_gave(scenes, tmp_path, capfd):
    (tmp_path / "bad_parts.py").write_text(CODE)
    words = f"--data {scenes} --out {tmp_path}/run --loader.workers 0"
    line = refusal(capfd, f"train {LITTLE}", words, f"--loss {tmp_path}/bad_parts.py:FlatLoss")
    assert "FlatLoss.mask_losses: each term must have one value per mask" in line
    assert line.endswith("(got focal of [])")


@pytest.mark.parametrize(
    "flag, name, code, said",
    [
        ("--optimizer", "NoTorch", 1, "not iterable; perhaps a method of your own NoTorch returns"),
        ("--prompts", "NoPrompts", 2, "NoPrompts.next gave no prompts for the first round"),
        ("--schedule", "NoFactor", 2, "NoFactor in {path} has no method factor"),
    ],
)
def test_what_returns_another_type_is_named(flag, name, code, said, scenes, tmp_path, capfd):
    path = tmp_path / "bad_parts.py"
    path.write_text(CODE)
    words = f"--data {scenes} --out {tmp_path}/run --loader.workers 0"
    assert exit_code(f"train {LITTLE}", words, f"{flag} {path}:{name}") == code
    lines, first = told(capfd)
    assert said.format(path=path) in first
    assert any(line.startswith("Traceback") for line in lines) == (code == 1)
