"""A student's gradients are those of a plain loop, however it is batched, cached or stopped."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gigamask import config_files, save_model
from gigamask.losses.focal_dice import dice_loss, focal_loss
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.compact.prompt_maps import PromptShapes
from gigamask.models.init import build_model
from gigamask.models.pretrained import load_sam
from gigamask.prompts.clicks import cell_to_input, next_click
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import compact_student
from gigamask.training import checkpoint
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.tasks import targets_from_batch
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from gigamask.types import Prompts
from gigamask.workflows.train import opening
from tests.journeys.runs import same
from tests.little import COMPACT, SPEC
from tests.plugins.distill.students import little_compact_student, little_student


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    """Two untrained models, with other weights than a student's."""
    folder, generator = tmp_path_factory.mktemp("teachers"), torch.Generator().manual_seed(0)
    found = {name: folder / f"{name}.safetensors" for name in ("sam", "compact")}
    for path, spec in zip(found.values(), (SPEC, COMPACT), strict=True):
        model = build_model(spec, 7)
        with torch.no_grad():  # the answers of an untrained compact model are all the prior
            for parameter in model.mask_decoder.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        save_model(model, path)
    return found


NO_FEATURES = replace(little_student().features, steps=0)
CPU = torch.device("cpu")


def phases_in(folder: Path, scenes: Path, teacher: Path, recipe=little_student, **changes):
    """The phases of a run, without that of features unless `changes` ask for it."""
    places = {"out": str(folder), "data": (str(scenes),), "teacher": str(teacher)}
    run = replace(recipe(), **places, **({"features": NO_FEATURES} | changes))
    config_files.save_config(run)
    return run.phases()


def start(run) -> TrainState:
    return TrainState.initialize(run, CPU, run.init)


def batches(run) -> list:
    """The micro-batches of the first step."""
    return list(next(TrainData(run, open_index(run)).batches()))


def gradients(run) -> dict[str, torch.Tensor]:
    """The gradients of the first step's whole batch, which does not change the teacher."""
    task, state = run.task(CPU), TrainState.from_model(start(run).model.double(), run)
    teacher = task.teacher.model.double()
    before = deepcopy(teacher.state_dict())
    metrics = StepMetrics.zero(run.batch_size, torch.zeros(0, dtype=torch.float64))
    for batch in batches(run):
        accumulate(task, state.model, batch, metrics)
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    return {
        name: parameter.grad
        for name, parameter in state.model.named_parameters()
        if parameter.requires_grad
    }


def models(run):
    """The student and the teacher in float64."""
    return start(run).model.double(), load_sam(run.teacher).double().eval()


def equal(found, expected) -> bool:
    largest = max(each.norm() for each in expected.values())
    assert found.keys() == expected.keys()
    return all(
        (found[name] - each).norm() <= 1e-10 * each.norm() + 1e-13 * largest
        for name, each in expected.items()
    )


def test_features_are_the_mean_squared_error_where_there_is_an_image(tmp_path, scenes, teachers):
    model = replace(SPEC, drop_path_rate=0.0)
    sizes = {"batch_size": 4, "micro_batch_size": 4}
    (run,) = phases_in(tmp_path, scenes, teachers["sam"], phase="features", model=model, **sizes)
    student, teacher = models(run)
    (batch,), loss = batches(run), 0
    assert (batch.input_sizes <= 56).any(), "beside some image a row of tokens sees none"
    for image, (height, width) in zip(batch.images, batch.input_sizes.tolist(), strict=True):
        size = torch.tensor([[height, width]])
        own, taught = (model.encode(image[None], size) for model in (student, teacher))
        rows, columns = -(-height // 8), -(-width // 8)
        loss += functional.mse_loss(
            own[..., :rows, :columns], taught[..., :rows, :columns].detach()
        )
    loss.backward()
    expected = {
        name: parameter.grad
        for name, parameter in student.named_parameters()
        if name.startswith("image_encoder.")
    }
    found = gradients(run)
    assert any(each.any() for each in expected.values())
    assert equal(found, expected)  # and nothing but the encoder is trained


def test_prompts_are_a_plain_loop_of_both_models(tmp_path, scenes, teachers):
    """One image, three rounds; written with the models' `encode` and `decode` alone."""
    (run,) = phases_in(
        tmp_path,
        scenes,
        teachers["sam"],
        teacher_decoder=False,
        batch_size=1,
        micro_batch_size=1,
        teacher_iou_weight=0.7,
        model=replace(SPEC, drop_path_rate=0.0),
        prompts=InteractiveSchedule(clicks=2, mask_only_rounds=False),
        loss=SamLoss(focal_weight=5.0, alpha=0.5, gamma=0.0, dice_weight=5.0, iou_weight=0.0),
    )
    student, teacher = models(run)
    (batch,) = batches(run)
    targets = targets_from_batch(batch, slice(0, len(batch.mask_image)), SPEC.mask_size)
    own = student.encode(batch.images, batch.input_sizes)
    with torch.no_grad():
        taught = teacher.encode(batch.images, batch.input_sizes)
    prompts = run.prompts.next(None, targets, batch.random_inputs, 0.0)
    given, loss = prompts, 0
    for number in range(3):
        logits, iou = student.decode(own, batch.mask_image, prompts)
        with torch.no_grad():
            answers, scores = teacher.decode(taught, batch.mask_image, given)
        valid = targets.valid[:, None].expand_as(answers).flatten(0, 1)
        rows = logits.flatten(0, 1)[:, None], (answers > 0).flatten(0, 1), valid
        mask_losses = focal_loss(*rows, alpha=0.5, gamma=0.0) + dice_loss(*rows)
        each = 5 * mask_losses.view_as(iou) + 0.7 * (iou - scores).square()
        loss = loss + each.mean(1).sum()
        row = torch.arange(len(logits))
        best, preferred = iou.argmax(1), scores.argmax(1)
        target = answers[row, preferred] > 0
        xy, label = next_click(
            logits.detach()[row, best] > 0,
            target,
            batch.random_inputs.clicks[:, number + 1] if number < 2 else torch.zeros(len(row), 2),
            targets.valid,
        )
        points = torch.cat([prompts.points_xy_input, cell_to_input(xy, targets)[:, None]], 1)
        labels = torch.cat([prompts.labels, label[:, None]], 1)
        prompts = Prompts(points, labels, logits.detach()[row, best], False)
        given = Prompts(points, labels, answers[row, preferred], False)
    loss.backward()
    expected = {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in student.named_parameters()
    }
    assert equal(gradients(run), expected)


@pytest.mark.parametrize("kind", ["sam", "compact"])
@pytest.mark.parametrize("phase", ["features", "prompts"])
def test_micro_batches_and_chunks_change_no_gradient(tmp_path, scenes, teachers, kind, phase):
    recipe = little_student if kind == "sam" else little_compact_student
    found = []
    for micro, chunk in ((3, 64), (1, 2)):
        sizes = {"micro_batch_size": micro, "masks_per_chunk": chunk}
        (run,) = phases_in(tmp_path, scenes, teachers[kind], recipe, phase=phase, **sizes)
        found.append(gradients(run))
    assert any(each.any() for each in found[0].values())
    assert equal(*found)


def test_each_answer_in_a_window_learns_the_teachers(tmp_path, scenes, teachers, monkeypatch):
    """A student equal to its teacher has nothing to learn but certainty, beside the closer windows
    of corrections, in which a model in training does not answer."""
    monkeypatch.setattr(PromptShapes, "corrects", torch.zeros(1, dtype=torch.bool))
    own = teachers["compact"]
    (run,) = phases_in(tmp_path, scenes, own, little_compact_student, seed=7, init=str(own))
    batch, *_ = batches(run)
    sums = list(run.task(CPU).compute_losses(start(run).model, batch, lambda tensor: tensor))
    assert len(sums) == 3 * -(-len(batch.mask_image) // run.masks_per_chunk)
    for each in sums:
        assert float(each.parts["iou"] / each.count) == pytest.approx(1.0)
        assert float(each.parts["iou_difference"]) == 0.0


@pytest.mark.parametrize("phase", ["features", "prompts"])
def test_a_stopped_distillation_resumes_bit_for_bit(tmp_path, scenes, teachers, phase):
    changes = {"phase": phase, "teacher_cache": str(tmp_path / "cache")}

    def config(name: str, steps: int):
        (run,) = phases_in(tmp_path / name, scenes, teachers["sam"], steps=steps, **changes)
        return replace(run, schedule=replace(run.schedule, min_lr_ratio=1.0))

    train(config("whole", 4))
    train(config("parts", 2))
    assert checkpoint.newest(tmp_path / "parts").name == "step_00000002"
    train(config("parts", 4))
    assert same(tmp_path / "whole", tmp_path / "parts")


def test_cached_embeddings_are_those_computed_in_half_precision(tmp_path, scenes, teachers):
    (run,) = phases_in(tmp_path, scenes, teachers["sam"], phase="features")
    cached = replace(run, teacher_cache=str(tmp_path / "cache"))
    batch, *_ = batches(run)
    plain, first = (each.task(CPU).teacher.embed(batch) for each in (run, cached))
    assert len(list((tmp_path / "cache").iterdir())) == len(batch.images)
    again = cached.task(CPU).teacher
    again.model.encode = None  # nothing is computed anew
    assert torch.equal(again.embed(batch), first)
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, plain.half().float())


def test_a_narrow_student_takes_over_the_decoder(tmp_path, scenes, teachers):
    narrow = replace(COMPACT, encoder=replace(COMPACT.encoder, widths=(8, 8, 8, 8)))
    changes = {"model": narrow, "features": little_student().features}
    features, prompts = phases_in(
        tmp_path, scenes, teachers["compact"], little_compact_student, **changes
    )
    taught = load_sam(features.teacher).state_dict()
    for name, parameter in start(features).model.named_parameters():
        is_decoder = name.startswith(("prompt_encoder.", "mask_decoder."))
        assert parameter.requires_grad != is_decoder
        assert not is_decoder or torch.equal(parameter, taught[name])
    assert (prompts.init, prompts.freeze) == (features.out, ())


def test_the_phases_of_compact_student_have_their_own_rates():
    features, prompts = compact_student().with_(teacher="t").phases()
    assert [(run.optimizer.lr, run.optimizer.muon_lr) for run in (features, prompts)] == [
        (2e-3, pytest.approx(0.02)),
        (2e-4, 2e-3),
    ]
    assert prompts.task(torch.device("meta")).kernels is prompts.kernels


def test_the_first_line_names_the_decoder_that_a_student_starts_from():
    config = compact_student().with_(teacher="runs/large", data=["tars"], out="o")
    assert "from decoder:runs/large: " in opening(config)
    assert "from random weights: " in opening(replace(config, teacher_decoder=False))
