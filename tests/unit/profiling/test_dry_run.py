"""The rounds and phases of a dry run, and its blank batch."""

from dataclasses import fields, replace

import pytest
import torch

from gigamask.data.loader import collate
from gigamask.profiling.dry_run import (
    PhaseBatches,
    PhasePeaks,
    PhaseTask,
    ShortSchedule,
    blank_batch,
)
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.tasks import select_random_inputs, targets_from_batch
from gigamask.types import Batch, Prediction, PromptRound, RandomInputs
from tests.little import little


class Counter:
    """Reports the bytes it was given."""

    current = 0
    most = 0

    def take_peak(self) -> int:
        peak, self.most = self.most, self.current
        return peak

    def hold(self, bytes_held: int) -> None:
        self.current = bytes_held
        self.most = max(self.most, bytes_held)


def rounds(policy) -> list[PromptRound]:
    run = replace(little(), prompts=policy)
    batch = blank_batch(run.sample_config, run.random_spec, 1, 3)
    part = slice(0, 3)

    def decode(prompts) -> Prediction:
        low = torch.zeros(
            3, 3 if prompts.multimask_output else 1, run.model.mask_size, run.model.mask_size
        )
        return Prediction(low, torch.zeros(low.shape[:2]), low)

    return list(
        run_rounds(
            decode,
            targets_from_batch(batch, part, run.model.mask_size),
            policy,
            select_random_inputs(batch.random_inputs, part),
            batch.mask_only_round_u,
        )
    )


@pytest.mark.parametrize(
    "policy",
    [
        InteractiveSchedule(),
        InteractiveSchedule(clicks=1, mask_only_rounds=False),
        InteractiveSchedule(clicks=0, mask_only_rounds=False),
        InteractiveSchedule(clicks=2, mask_only_rounds=False, center_click_prob=0.5),
        TwoSidedCorrection(corrections=3),
        MixedPrompts(),
    ],
)
def test_the_first_two_rounds_and_the_last_are_run(policy):
    short = ShortSchedule(policy)
    whole, some = rounds(policy), rounds(short)
    assert max(short.round_counts) == len(whole) == policy.rounds
    assert short.num_uniforms == policy.num_uniforms
    chosen = [whole[0], whole[1], whole[-1]] if len(whole) > 2 else whole
    assert len(some) == len(chosen)
    for ours, theirs in zip(some, chosen, strict=True):
        assert ours.prompts.points_xy_input.shape == theirs.prompts.points_xy_input.shape
        assert (ours.prompts.masks is None) == (theirs.prompts.masks is None)
        assert ours.prompts.multimask_output == theirs.prompts.multimask_output


def test_each_phase_has_its_peak():
    counter = Counter()
    counter.hold(100)
    seen = PhasePeaks(counter)
    counter.hold(900)
    counter.hold(100)
    seen.start()  # earlier peaks do not count
    counter.hold(150)
    counter.hold(130)
    seen.enter("rounds")
    counter.hold(180)
    counter.hold(130)
    seen.enter("rounds")
    counter.hold(170)
    seen.enter("backward")
    counter.hold(101)
    seen.enter("update")
    seen.enter("update")
    assert seen.peaks == {"forward": 50, "rounds": 80, "backward": 70, "update": 1}
    assert seen.activation_bytes == 30


def test_a_blank_batch_has_the_loaders_shapes():
    run = little()
    batch = blank_batch(run.sample_config, run.random_spec, 3, 4)
    real = collate([], (), run.sample_config, run.random_spec, 0.0, batch.cursor)
    for ours, theirs, kind in (
        (batch, real, Batch),
        (batch.random_inputs, real.random_inputs, RandomInputs),
    ):
        for field in fields(kind):
            here, there = getattr(ours, field.name), getattr(theirs, field.name)
            assert type(here) is type(there), field.name
            if isinstance(here, torch.Tensor):
                assert (here.dtype, here.ndim) == (there.dtype, there.ndim), field.name
    assert batch.mask_image.tolist() == [0, 0, 1, 1]
    assert batch.dense(0, 4).shape == (4, run.model.mask_size, run.model.mask_size)
    assert len(blank_batch(run.sample_config, run.random_spec, 2, 0).mask_image) == 0


@pytest.mark.slow
def test_reporting_phases_does_not_change_the_step():
    run = replace(little(), data=("x",))
    gradients = []
    for watched in (False, True):
        state, marks = TrainState.initialize(run, torch.device("cpu")), []
        batches = PhaseBatches([blank_batch(run.sample_config, run.random_spec, 2, 7)])
        batches.enter = marks.append
        task = run.task(torch.device("cpu"))
        for batch in batches:
            totals = StepMetrics.zero(2, torch.zeros(()))
            accumulate(
                PhaseTask(task, marks.append, accumulated=True) if watched else task,
                state.model,
                batch,
                totals,
            )
        gradients.append([parameter.grad for parameter in state.model.parameters()])
    assert all(torch.equal(here, there) for here, there in zip(*gradients, strict=True))
    # Seven masks, five at a time, two rounds each, each marked before and after its backward pass.
    assert marks == ["rounds"] * (1 + 2 * 4) + ["backward", "update"]
