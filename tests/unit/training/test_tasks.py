from dataclasses import replace

import pytest
import torch

from gigamask.data.loader import collate
from gigamask.distributed.precision import choose_precision
from gigamask.models.init import build_model
from gigamask.records import DataCursor
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.tasks import SamTask, make_decoder, targets_from_batch
from gigamask.training.train_data import TrainData
from gigamask.types import Prompts, RandomSpec
from tests.errors import error_line
from tests.little import little


def first_batch(run, index):
    (batch,) = next(TrainData(replace(run, batch_size=3, micro_batch_size=3), index).batches())
    return batch


def test_hard_and_area_targets_agree_where_cells_are_uniform(index):
    run = little()
    hard = targets_from_batch(first_batch(run, index), slice(0, 6), run.model.mask_size)
    soft_run = replace(run, loader=replace(run.loader, target="area"))
    soft = targets_from_batch(first_batch(soft_run, index), slice(0, 6), run.model.mask_size)
    assert hard.masks.dtype == torch.bool
    assert soft.masks.dtype == torch.float32
    assert hard.masks.shape == soft.masks.shape == (6, 32, 32)
    whole = (soft.masks == 0) | (soft.masks == 1)
    assert whole.float().mean() > 0.8
    assert not whole.all()
    assert (hard.masks.float() - soft.masks).abs().mean() < 0.05
    assert (soft.foreground ^ hard.masks).float().mean() < 0.05


def test_padding_is_not_valid(index):
    run = little()
    batch = first_batch(run, index)
    truth = targets_from_batch(batch, slice(0, len(batch.mask_image)), run.model.mask_size)
    heights, widths = batch.input_sizes[batch.mask_image].T
    assert torch.equal(truth.valid.any(2).sum(1), ((heights + 0.5) / 2).floor().long())
    assert torch.equal(truth.valid.any(1).sum(1), ((widths + 0.5) / 2).floor().long())
    assert truth.cell_xy == (2.0, 2.0)


def test_a_grid_that_does_not_divide_is_refused(index):
    run = little()
    batch = first_batch(replace(run, loader=replace(run.loader, target="area")), index)
    with error_line(r"multiple of 24.*64"):
        targets_from_batch(batch, slice(0, 1), 24)


def losses(run, index, precision, batch=None):
    model = build_model(run.model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    totals = StepMetrics.zero(3, next(model.parameters()))
    batch = batch or first_batch(run, index)
    accumulate(SamTask(run.prompts, run.loss, 4, precision), model, batch, totals)
    return totals, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
def test_every_round_of_every_mask_is_counted(index):
    run = little()
    totals, _ = losses(run, index, "fp32")
    assert float(totals.count) == run.prompts.rounds * len(first_batch(run, index).mask_image)


@pytest.mark.slow
def test_masks_that_are_not_corrected_have_one_round(index):
    run = replace(little(), prompts=replace(little().prompts, corrected=0.5))
    batch = first_batch(run, index)
    groups = run.prompts.groups(batch.random_inputs)
    totals, gradient = losses(run, index, "fp32", batch)
    loss, summed, counts = 0.0, torch.zeros_like(gradient), []
    for chosen, schedule in groups:
        part = batch.select(chosen.nonzero()[:, 0])
        group, each = losses(replace(run, prompts=schedule), index, "fp32", part)
        loss, summed = loss + float(group.sums["loss"]), summed + each
        counts.append((len(part.mask_image), float(group.count)))
    (corrected, count), *alone = counts
    assert all(masks for masks, _ in counts)
    assert count == run.prompts.rounds * corrected
    assert all(masks == rounds for masks, rounds in alone)
    assert float(totals.count) == sum(rounds for _, rounds in counts)
    assert float(totals.sums["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(totals.losses.sum()) == pytest.approx(loss, rel=1e-5)
    assert (gradient - summed).norm() < 1e-5 * gradient.norm()


@pytest.mark.slow
def test_bf16_gives_nearly_the_same_gradients(index):
    run = replace(
        little(), prompts=replace(little().prompts, clicks=1, mask_only_rounds=False, box_prob=1.0)
    )
    exact, gradient = losses(run, index, "fp32")
    rounded, gradient_16 = losses(run, index, "bf16")
    assert rounded.means()["loss"] == pytest.approx(exact.means()["loss"], rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradient, gradient_16, dim=0) > 0.98


@pytest.mark.parametrize("has_amx", [True, False])
def test_the_fastest_precision_is_half_where_the_hardware_multiplies_it(has_amx, monkeypatch):
    found = {"amx_bf16": has_amx, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    cpu = torch.device("cpu")
    assert choose_precision("fastest", cpu) == ("bf16" if has_amx else "fp32")
    assert choose_precision("auto", cpu) == "fp32"
    assert choose_precision("auto", torch.device("cuda")) == "bf16"
    assert choose_precision("fastest", torch.device("cuda")) == "bf16"
    assert choose_precision("fastest", torch.device("mps")) == "fp32"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert choose_precision("fastest", cpu) == "fp32"


def test_a_batch_without_masks_has_no_terms():
    run = little()
    empty = collate(
        [],
        (),
        run.sample_config,
        RandomSpec(0, run.prompts.num_uniforms, run.model.depth),
        0.0,
        DataCursor(3),
    )
    assert (
        list(
            SamTask(run.prompts, run.loss, 4).compute_losses(
                build_model(run.model, 0), empty, lambda whole: whole
            )
        )
        == []
    )


@pytest.mark.parametrize(
    "dtype, precision",
    [(torch.float64, "fp32"), (torch.float32, "fp32"), (torch.float32, "bf16")],
)
def test_logits_are_enlarged_in_the_models_precision_or_float32(dtype, precision):
    model = build_model(little().model, 0).to(dtype)
    asked = Prompts(
        torch.full((1, 2, 2), 9.0), torch.tensor([[1, -1]]), None, multimask_output=True
    )
    answer = make_decoder(
        model,
        torch.rand(1, 16, 8, 8, dtype=dtype),
        torch.zeros(1, dtype=torch.int64),
        precision,
        64,
    )(asked)
    assert answer.logits.dtype == dtype
    assert answer.low_res_logits.shape == (1, 3, 32, 32)
    assert answer.logits.shape == (1, 3, 64, 64)
    assert torch.equal(answer.logits[:, :, 0, 0], answer.low_res_logits[:, :, 0, 0].to(dtype)), (
        "nothing is rounded on the way"
    )
