"""Parameters that no prompt of a training uses are neither decayed nor moved."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gigamask.distributed.world import destroy_world, init_world
from gigamask.interfaces import Optimizer
from gigamask.models import state_dict
from gigamask.models.manifest import MANIFEST, newest
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import AdamW, MuonAdamW
from gigamask.training.state import TrainState
from gigamask.training.trainer import train
from gigamask.training.unreached import Unreached
from tests.little import little
from tests.ranks import fork

BOXES = InteractiveSchedule(clicks=0, mask_only_rounds=False, box_prob=1.0)
UNUSED = ("prompt_encoder.mask_downscaling.", "mask_decoder.output_hypernetworks_mlps.0.")


@dataclass(frozen=True)
class Decaying(Optimizer):
    """SGD of a user, whose decay is part of the gradient and of the momentum."""

    def build(self, model):
        learned = [p for p in model.parameters() if p.requires_grad]
        return [torch.optim.SGD(learned, lr=self.lr, momentum=0.9, weight_decay=0.1)]


def config(out: Path, scenes: Path, **changes: object):
    options = {"prompts": BOXES, "steps": 3, "save_every": 1, "keep": 9, "ema": 0.5} | changes
    return replace(little(), data=(str(scenes),), out=str(out), **options).check()


def changed(before: dict, after: dict) -> set[str]:
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def unused(names) -> set[str]:
    return {name for name in names if name.startswith(UNUSED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [AdamW(lr=1e-2), MuonAdamW(muon_kernels=True), Decaying()],
    ids=lambda o: type(o).__name__,
)
def test_what_boxes_do_not_use_stays(optimizer, scenes, tmp_path):
    run = config(tmp_path / "run", scenes, optimizer=optimizer)
    before = TrainState.initialize(run, torch.device("cpu")).model.state_dict()
    state = train(run)
    assert unused(before)
    for after in (state.model.state_dict(), state_dict.read_weights(run.out)[0]):
        assert not unused(changed(before, after))
        assert "mask_decoder.iou_token.weight" in changed(before, after)
        assert "prompt_encoder.no_mask_embed.weight" in changed(before, after)


@pytest.mark.slow
def test_resuming_changes_nothing(scenes, tmp_path):
    """A parameter that has had a gradient is decayed also in later steps without one."""
    whole = config(tmp_path / "whole", scenes)
    train(whole)
    manifest = json.loads((newest(tmp_path / "whole") / MANIFEST).read_bytes())
    assert unused(manifest["unreached"]["names"])
    for steps in (1, 3):
        train(config(tmp_path / "again", scenes, steps=steps))
    assert not changed(
        *(state_dict.read_weights(tmp_path / each)[0] for each in ("whole", "again"))
    )


@pytest.mark.slow
def test_other_prompts_show_anew_what_has_a_gradient(scenes, tmp_path):
    train(config(tmp_path / "run", scenes, steps=1, prompts=little().prompts))
    before = train(config(tmp_path / "run", scenes, steps=2, prompts=little().prompts))
    weights = {name: value.clone() for name, value in before.model.state_dict().items()}
    assert not before.unreached.here
    after = train(config(tmp_path / "run", scenes, steps=4))
    assert not unused(changed(weights, after.model.state_dict()))


def two_processes(scenes: str, out: str) -> None:
    world = init_world(os.environ, torch.device("cpu"))
    state = train(config(Path(out), Path(scenes), batch_size=2, micro_batch_size=1), world)
    values = torch.cat([value.flatten() for value in state.model.state_dict().values()])
    assert all(torch.equal(values, other) for other in world.gather(values))
    destroy_world(world)


@pytest.mark.slow
def test_several_processes_agree(scenes, tmp_path):
    run = config(tmp_path / "one", scenes, batch_size=2, micro_batch_size=1)
    before = TrainState.initialize(run, torch.device("cpu")).model.state_dict()
    train(run)
    fork(2, two_processes, str(scenes), str(tmp_path / "two"))
    one, two = (state_dict.read_weights(tmp_path / name)[0] for name in ("one", "two"))
    assert not unused(changed(before, two))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def updated(unreached: Unreached, trained: list[torch.nn.Parameter]) -> list[float]:
    """Halve all parameters, and return their first numbers."""
    with unreached.unchanged(trained), torch.no_grad():
        torch._foreach_mul_(trained, 0.5)
    return [float(parameter[0].detach()) for parameter in trained]


def test_a_gradient_in_any_step_or_process_counts():
    trained = parameters(3)
    here = Unreached(set(trained))
    here.note({trained[1], trained[2]})
    here.note({trained[0], trained[1], trained[2]})  # the first one had one before
    assert here.flags(trained, torch.ones(())).tolist() == [1, 0, 0]
    assert updated(here, trained) == [0.5, 1, 1]
    here.add_flags(torch.tensor([1.0, 0.0, 1.0]))  # another process has one for the last
    here.add_flags(torch.tensor([0.0, 0.0, 0.0]))
    assert updated(here, trained) == [0.25, 1, 0.5]
    assert here.everywhere(trained) == [trained[1]]
