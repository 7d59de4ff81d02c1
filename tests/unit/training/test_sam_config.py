"""A SAM configuration reaches batches and task: grids, random numbers, mining."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gigamask.interfaces import EvaluationResult, Evaluator, Loss
from gigamask.losses.ohem import OHEM, NoMining
from gigamask.losses.sam_loss import SamLoss
from gigamask.models import manifest
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import BoxPrompt, InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.training import checkpoint
from gigamask.training.logging import MetricsLogger
from gigamask.training.optim import AdamW
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from gigamask.types import LossSums, PromptRound, Targets
from tests.errors import error_line
from tests.laws.test_mining import after, same
from tests.laws.test_training import run_in
from tests.little import COMPACT, SPEC, little

CPU = torch.device("cpu")
POINTS = SamLoss(num_points=40)


def with_target(folder, scenes, target="full", **changes):
    """The grid of the encoder's input has a side of 64, the low-resolution one of 32."""
    loader = replace(little().loader, target=target, max_masks=3)
    return run_in(
        folder,
        scenes,
        loader=loader,
        **{
            "prompts": InteractiveSchedule(clicks=1, mask_only_rounds=False, box_prob=0.0),
            **changes,
        },
    )


@dataclass(frozen=True)
class Watched(Loss):
    """A loss that remembers what it was given."""

    loss: Loss
    seen: list[tuple[PromptRound, Targets]] = field(default_factory=list)

    @property
    def num_uniforms(self) -> int:
        return self.loss.num_uniforms

    def __call__(self, round: PromptRound, targets: Targets) -> LossSums:
        self.seen.append((round, targets))
        return self.loss(round, targets)


def played(run):
    """One batch, and what its loss saw of it; the gradients of the whole are finite."""
    run = replace(
        run, loss=Watched(run.loss), masks_per_chunk=1000, batch_size=3, micro_batch_size=3
    )
    (batch,) = next(TrainData(run, open_index(run)).batches())
    state = TrainState.initialize(run, CPU)
    accumulate(run.task(CPU), state.model, batch, StepMetrics.zero(3, torch.zeros(())))
    gradients = torch.cat([parameter.grad.flatten() for parameter in state.model.parameters()])
    assert gradients.isfinite().all()
    assert gradients.any()
    return batch, run.loss.seen


@pytest.mark.slow
@pytest.mark.parametrize("loss", [SamLoss(), POINTS], ids=["cells", "points"])
def test_in_full_loss_and_clicks_live_on_the_inputs_grid(tmp_path, scenes, loss):
    batch, seen = played(with_target(tmp_path / "run", scenes, loss=loss))
    assert batch.mask_size == 64
    masks, every = len(batch.mask_image), torch.arange(len(batch.mask_image))
    heights, widths = batch.input_sizes[batch.mask_image].T
    for round, truth in seen:
        assert round.prediction.logits.shape == (masks, 3 if round.index == 0 else 1, 64, 64)
        assert round.prediction.low_res_logits.shape[2:] == round.mask_input.shape[1:] == (32, 32)
        enlarged = functional.interpolate(
            round.prediction.low_res_logits, (64, 64), mode="bilinear", align_corners=False
        )
        assert torch.equal(round.prediction.logits, enlarged)
        assert (truth.cell_xy, truth.mask_prompt_size) == ((1.0, 1.0), 32)
        assert torch.equal(truth.masks, batch.dense(0, masks))
        rows, columns = (
            torch.arange(64)[:, None] < heights[:, None, None],
            torch.arange(64) < widths[:, None, None],
        )
        assert torch.equal(truth.valid, rows & columns)
        assert not (truth.masks & ~truth.valid).any()
    (first, truth), (second, _) = seen
    centers = first.prompts.points_xy_input[:, 0] + truth.scale_xy / 2
    x, y = centers.long().unbind(1)
    assert truth.masks[every, y, x].all(), "the first click is a pixel of the mask"
    assert torch.allclose(centers % 1, torch.tensor(0.5), atol=1e-4)
    assert (x % 2 == 1).any(), "of the fine grid, not of the coarse one"
    x, y = (second.prompts.points_xy_input[:, -1] + truth.scale_xy / 2).long().unbind(1)
    assert torch.equal(second.prompts.labels[:, -1] == 1, truth.masks[every, y, x])
    assert torch.equal(second.prompts.masks, first.mask_input)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["hard", "area", "full"])
def test_points_are_moved_by_the_number_behind_those_of_the_prompts(tmp_path, scenes, target):
    run = with_target(tmp_path / "run", scenes, target, loss=POINTS)
    batch, seen = played(run)
    assert (
        run.random_spec.clicks + 1
        == batch.random_inputs.clicks.shape[1]
        == run.prompts.num_uniforms + 1
        == 3
    )
    assert all(torch.equal(truth.shift, batch.random_inputs.clicks[:, 2]) for _, truth in seen)
    plain, unmoved = played(replace(run, loss=SamLoss()))
    assert all(truth.shift is None for _, truth in unmoved)
    assert torch.equal(plain.random_inputs.clicks, batch.random_inputs.clicks[:, :2]), (
        "the clicks do not depend on the loss"
    )


@pytest.mark.slow
def test_area_is_the_average_of_full_and_hard_is_the_cells_centre(tmp_path, scenes):
    (full, of_full), (area, of_area), (hard, of_hard) = (
        played(with_target(tmp_path / kind, scenes, kind)) for kind in ("full", "area", "hard")
    )
    assert (full.mask_size, area.mask_size, hard.mask_size) == (64, 64, 32)
    (_, full_truth), (_, area_truth), (_, hard_truth) = of_full[0], of_area[0], of_hard[0]
    assert full_truth.masks.dtype == hard_truth.masks.dtype == torch.bool
    covered, shown = (
        functional.avg_pool2d(each[:, None].float(), 2)[:, 0]
        for each in (full_truth.masks, full_truth.valid.expand_as(full_truth.masks))
    )
    inside = shown == 1
    assert torch.equal(area_truth.masks[inside], covered[inside])
    assert (area_truth.masks >= covered).all(), "of a cell at the border, its part in the image"
    assert area_truth.masks.max() <= 1
    assert torch.equal(hard_truth.masks, hard.dense(0, len(hard.mask_image)))
    for truth in (area_truth, hard_truth):
        assert (truth.cell_xy, truth.mask_prompt_size, truth.masks.shape[-1]) == (
            (2.0, 2.0),
            32,
            32,
        )


VARIANTS = {
    "full": {"target": "full"},
    "full, points": {"target": "full", "loss": POINTS},
    "points": {"target": "hard", "loss": POINTS},
    "area, points": {
        "target": "area",
        "loss": replace(POINTS, ohem_pixel_ratio=0.5, ohem_min_pixels=5),
    },
    "full, mixed": {"target": "full", "prompts": MixedPrompts()},
    "a part corrected": {"prompts": replace(little().prompts, corrected=0.5)},
    "area, two-sided, mined": {
        "target": "area",
        "prompts": TwoSidedCorrection(corrections=1),
        "mining": OHEM(0.4),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes, variant):
    run = with_target(tmp_path / "run", scenes, batch_size=4, **VARIANTS[variant])
    whole, done = after(replace(run, micro_batch_size=4, masks_per_chunk=1000))
    cut, again = after(replace(run, micro_batch_size=3, masks_per_chunk=2))
    assert same(whole, cut)
    assert done.losses == pytest.approx(again.losses, rel=1e-9)


@pytest.mark.slow
def test_mixed_prompts_in_full_hand_on_masks_of_the_low_grid(tmp_path, scenes):
    _, ((round, truth),) = played(
        with_target(
            tmp_path / "run",
            scenes,
            prompts=MixedPrompts(point_prob=0.3, box_prob=0.0, mask_prob=0.7),
        )
    )
    assert truth.masks.shape[-1] == 64
    assert round.prompts.masks.shape[1:] == (32, 32)
    assert round.prompts.has_mask_prompt.any()
    assert not round.prompts.has_mask_prompt.all()
    near = functional.avg_pool2d(truth.masks[:, None].float(), 2)[:, 0] > 0.5
    overlap = ((round.prompts.masks > 0) & near).sum((1, 2)) / (
        (round.prompts.masks > 0) | near
    ).sum((1, 2))
    assert overlap[round.prompts.has_mask_prompt].median() > 0.5, "a hurried one of this mask"


@pytest.mark.parametrize(
    "prompts, loss, clicks",
    [
        (InteractiveSchedule(clicks=3), SamLoss(), 4),
        (InteractiveSchedule(clicks=3), POINTS, 5),
        (MixedPrompts(), SamLoss(), 8),
        (BoxPrompt(), POINTS, 1),
        (BoxPrompt(), SamLoss(), 0),
    ],
)
def test_samples_carry_what_prompts_and_loss_spend(prompts, loss, clicks):
    run = replace(little(), prompts=prompts, loss=loss, seed=9)
    assert (
        run.random_spec.clicks + run.random_spec.points,
        run.random_spec.blocks,
        run.random_spec.patches,
        run.random_spec.seed,
    ) == (clicks, SPEC.depth, 0, 9)
    assert run.random_spec.points == loss.num_uniforms


def test_mining_is_the_tasks_where_there_is_some(tmp_path):
    run, mining = little(), OHEM(group_by="sampler")
    assert run.mining == NoMining()
    assert run.task(CPU).mining is None
    assert replace(run, mining=mining).task(CPU).mining == mining
    kinds = (NoMining(), OHEM(), OHEM(group_by="granularity"), mining)
    assert [each.use_sampler_strata for each in kinds] == [False] * 3 + [True]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, r"--steps must be at least 1 \(got 0\)"),
        ({"masks_per_chunk": -3}, r"--masks-per-chunk .*-3"),
        ({"data": ()}, r"--data is required.*gigamask synth"),
        ({"device": "tpu"}, r"--device must be auto, cpu, cuda .*'tpu'"),
        (
            {"activation_checkpointing": -1},
            r"^--activation-checkpointing must be at least 0 \(got -1\)$",
        ),
        (
            {"evaluation": replace(little().evaluation, interval=0)},
            r"^--evaluation.interval must be at least 1 \(got 0\)$",
        ),
        (
            {"evaluation": replace(little().evaluation, images=0)},
            r"^--evaluation.images must be at least 1 \(got 0\)$",
        ),
        (
            {"parallel": "fsdp", "model": COMPACT, "optimizer": AdamW()},
            r"^--parallel fsdp shards .*conv_pyramid has none; use --parallel ddp$",
        ),
    ],
)
def test_impossible_numbers_are_one_line(change, message):
    with error_line(message):
        replace(little(), **{"data": ("x",), **change}).check()


@pytest.mark.slow
def test_a_training_in_a_thread_is_the_same(tmp_path, scenes):
    ran = [run_in(tmp_path / name, scenes, steps=2) for name in ("thread", "main")]
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(train, ran[0]).result()
    here = train(ran[1])
    assert state.step == here.step == 2
    assert all(
        map(torch.equal, state.model.state_dict().values(), here.model.state_dict().values())
    )


@dataclass(frozen=True)
class Told(Evaluator):
    """Returns given scores, one per evaluation."""

    scores: list[float] = field(default_factory=list)

    def open(self, config, world):
        return lambda model: EvaluationResult({"other": 0.5, "box": self.scores.pop(0)}, "box")


@dataclass(frozen=True)
class Leaves(Evaluator):
    """Leaves evaluation mode and no gradients, as programs do; scores what it was given."""

    def open(self, config, world):
        def evaluate(model):
            found = not model.training and torch.is_grad_enabled()
            model.eval()
            torch.set_grad_enabled(False)
            return EvaluationResult({"box": float(found)}, "box")

        return evaluate


@pytest.mark.slow
def test_an_evaluation_that_leaves_evaluation_mode_and_no_gradients_is_trained_after(
    tmp_path, scenes
):
    state = train(run_in(tmp_path / "run", scenes, steps=2, evaluation=Leaves(1)))
    assert scored(tmp_path / "run") == [(1, 1.0), (2, 1.0)]
    assert all(module.training for module in state.model.modules())


@dataclass(frozen=True)
class Breaks(Evaluator):
    """Falls over, as with a disk that is gone."""

    def open(self, config, world):
        def evaluate(model):
            raise OSError("the disk is gone")

        return evaluate


def scored(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["evaluation"]["box"]) for line in lines if "evaluation" in line]


@pytest.mark.slow
def test_an_evaluation_that_fails_costs_no_step(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, steps=5, save_every=5, prompts=BoxPrompt())
    with pytest.raises(OSError, match="gone"):
        train(replace(run, evaluation=Breaks(3)))
    assert checkpoint.newest(tmp_path / "run").name == "step_00000003"


@pytest.mark.slow
def test_interrupted_training_is_not_evaluated_first(tmp_path, scenes, monkeypatch):
    run, waiting = (
        run_in(tmp_path / "run", scenes, steps=5, save_every=5, prompts=BoxPrompt()),
        MetricsLogger.time_data,
    )

    def told_to_stop(watch, batches):
        for number, batch in enumerate(waiting(watch, batches), 1):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(MetricsLogger, "time_data", told_to_stop)
    assert train(replace(run, evaluation=Breaks(3))).stopping
    assert checkpoint.newest(tmp_path / "run").name == "step_00000003"
    monkeypatch.undo()
    train(replace(run, evaluation=Told(3, [0.8, 0.5])))
    assert scored(tmp_path / "run") == [(3, 0.8), (5, 0.5)], "but as soon as it continues"
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == Path("step_00000003")


@pytest.mark.slow
def test_training_is_evaluated_when_due_and_at_its_end_and_keeps_its_best(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, steps=5, save_every=3, keep=1, prompts=BoxPrompt())
    train(replace(run, evaluation=Told(2, [0.3, 0.8, 0.5])))
    assert scored(tmp_path / "run") == [(2, 0.3), (4, 0.8), (5, 0.5)]
    folder = Path(run.out) / "checkpoints"
    assert [path.name for path in manifest.list_checkpoints(folder)] == [
        "step_00000004",
        "step_00000005",
    ]
    assert (folder / "best").readlink() == Path("step_00000004")
    train(replace(run, steps=6, evaluation=Told(2, [0.8])))
    assert (folder / "best").readlink() == Path("step_00000006")
    assert [path.name for path in manifest.list_checkpoints(folder)] == [
        "step_00000005",  # it was resumed from
        "step_00000006",
    ]


def test_compiling_is_refused_where_it_does_not_work():
    run = replace(little(), data=("x",), compile=True)
    run.check()
    with error_line(r"--compile is for --parallel ddp \(got fsdp\)"):
        replace(run, parallel="fsdp").check()
    with error_line(r"--compile .* Watched .* supports_filling"):
        replace(run, loss=Watched(SamLoss())).check()
    prompts = replace(run.prompts, corrected=0.5)
    for change, flag in (({}, "--compile"), ({"compile": False, "mining": OHEM(0.4)}, "--mining")):
        with error_line(f"{flag} .* --prompts.corrected"):
            replace(run, prompts=prompts, **change).check()
    replace(run, prompts=prompts, compile=False).check()


@pytest.mark.parametrize("items, most", [("image", 6), ("mask", 2)])
def test_a_compiled_task_has_as_many_masks_as_a_micro_batch_can_have(items, most):
    run = replace(little(), loader=replace(little().loader, max_masks=3, items=items))
    assert run.task(CPU).masks_per_chunk == 5
    assert run.task(CPU).compile_backend is None
    assert replace(run, compile=True).task(CPU).masks_per_chunk == min(5, most)
    assert replace(run, compile=True).task(CPU).compile_backend == "inductor"
    large = replace(run, compile=True, masks_per_chunk=64)
    assert large.task(CPU).masks_per_chunk == most
