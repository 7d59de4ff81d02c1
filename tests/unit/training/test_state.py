"""What is frozen stays out of a training altogether."""

from dataclasses import replace

import pytest
import torch

from gigamask.data.index import build as build_index
from gigamask.models import state_dict
from gigamask.models.configs import MAEConfig
from gigamask.models.init import build_model
from gigamask.training.config import check_resume
from gigamask.training.optim import MuonAdamW, select_trained
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.train_data import TrainData
from tests.checkpoints import resume, save
from tests.errors import error_line
from tests.little import little
from tests.saved_tensors import saved_tensors, storage_bytes

CPU = torch.device("cpu")
MASKS = ("prompt_encoder.mask_downscaling",)
ALL_BUT_MASKS = (
    "image_encoder",
    "mask_decoder",
    *(
        f"prompt_encoder.{name}"
        for name in ("point_embeddings", "not_a_point_embed", "no_mask_embed")
    ),
)


@pytest.fixture(scope="module")
def batch(scenes, tmp_path_factory):
    index = build_index(scenes, tmp_path_factory.mktemp("index") / "index")
    (batch,) = next(TrainData(replace(little(), batch_size=2, micro_batch_size=2), index).batches())
    return batch


def after_steps(run, batch, steps=2) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """A state after some steps, and the parameters it began with."""
    state = TrainState.initialize(run, CPU)
    before = {
        name: parameter.detach().clone() for name, parameter in state.model.named_parameters()
    }
    for _ in range(steps):
        assert not step(run.task(CPU), state, [batch], 2, 1e-3, 1.0).result().skipped
    return state, before


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("image_encoder",),
        ("prompt_encoder", "mask_decoder"),
        ("image_encoder.blocks.0", "mask_decoder.iou_token.weight"),
        MASKS,
        ALL_BUT_MASKS,
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "optimizer", [little().optimizer, MuonAdamW(lr=1e-3)], ids=lambda each: type(each).__name__
)
def test_what_is_frozen_does_not_change_and_all_else_does(batch, parts, optimizer):
    state, before = after_steps(replace(little(), freeze=parts, optimizer=optimizer), batch)
    held = {name.partition("/")[2] for name in state.optimizer_tensors()}
    for name, parameter in state.model.named_parameters():
        frozen = f"{name}.".startswith(tuple(f"{part}." for part in parts))
        assert (parameter.grad is None) == frozen, name
        assert (name in held) != frozen, name
        # An answer that was never the best learns nothing.
        assert torch.equal(parameter, before[name]) == frozen or not parameter.grad.any(), name
    assert len(held) == sum(parameter.requires_grad for parameter in state.model.parameters())


def saved_for_encoder(run, batch) -> int:
    """Bytes that the graph keeps for the encoder's backward pass, weights aside."""
    model, marks = TrainState.initialize(run, CPU).model, []

    def cut(whole):
        marks.append(len(kept))
        return whole.detach().requires_grad_(whole.requires_grad)

    with saved_tensors() as kept:
        next(run.task(CPU).compute_losses(model, batch, cut)).loss.backward()
    assert len(kept) > marks[0], "the decoder learns"
    return storage_bytes(kept[: marks[0]], besides=model.parameters())


@pytest.mark.slow
def test_of_a_frozen_encoder_no_graph_is_kept(batch):
    frozen = replace(little(), freeze=("image_encoder",))
    for run in (frozen, replace(frozen, activation_checkpointing=1)):
        assert saved_for_encoder(run, batch) == 0
    whole = saved_for_encoder(little(), batch)
    assert saved_for_encoder(replace(little(), freeze=("prompt_encoder",)), batch) == whole
    assert whole > 400_000


@pytest.mark.parametrize("parts", [("image_encoder",), ("mask_decoder",)], ids=" ".join)
def test_a_frozen_encoder_is_not_thinned(batch, parts):
    """Whatever the numbers of drop path say; they do say something to one that learns."""
    run = replace(little(), freeze=parts, model=replace(little().model, drop_path_rate=0.5))
    model, task, losses = TrainState.initialize(run, CPU).model, run.task(CPU), []
    for uniform in (0.0, 0.9):
        drawn = replace(
            batch.random_inputs, drop_path=torch.full_like(batch.random_inputs.drop_path, uniform)
        )
        losses.append(
            next(
                task.compute_losses(model, replace(batch, random_inputs=drawn), lambda whole: whole)
            ).per_mask
        )
    assert torch.equal(*losses) == (parts == ("image_encoder",))


@pytest.mark.slow
def test_unknown_frozen_parts_and_nothing_trainable_are_reported():
    run = little()
    known = "image_encoder, prompt_encoder, mask_decoder, .*image_encoder.pos_embed"
    with error_line(rf"^--freeze encoder:.*{known}"):
        select_trained(run.build(), ("mask_decoder", "encoder"))
    with error_line(r"^--freeze image_encoder.block:"):
        select_trained(run.build(), ("image_encoder.block",))
    with error_line(r"^--freeze image_encoder mask_decoder prompt_encoder"):
        select_trained(run.build(), ("image_encoder", "mask_decoder", "prompt_encoder"))
    with error_line(r"^--freeze image_encoder.*--init"):
        replace(run, data=("x",), freeze=("image_encoder",)).check()


@pytest.mark.slow
def test_what_no_weights_were_loaded_into_is_not_frozen(tmp_path):
    """An MAE has no neck; its blocks may be frozen, for without relative positions they are its."""
    run, size = little(), little().model
    mae = MAEConfig(
        image_size=size.image_size,
        patch_size=size.patch_size,
        embed_dim=size.embed_dim,
        depth=size.depth,
        num_heads=size.num_heads,
        decoder_dim=8,
        decoder_depth=1,
        decoder_num_heads=2,
    )
    path = tmp_path / "mae.safetensors"
    state_dict.save_weights(state_dict.to_official(build_model(mae, 0)), mae, path)
    with error_line(r"--freeze.* 6 \(image_encoder.neck.*mae:.*mae.safe"):
        TrainState.initialize(replace(run, freeze=("image_encoder",)), CPU, f"mae:{path}")
    parts = tuple(f"image_encoder.{part}" for part in ("patch_embed", "pos_embed", "blocks"))
    state = TrainState.initialize(replace(run, freeze=parts), CPU, f"mae:{path}")
    assert state.model.image_encoder.neck[0].weight.requires_grad
    with error_line(r"--freeze.*prompt_encoder.*--init"):
        replace(run, data=("x",), freeze=("prompt_encoder",)).check_inputs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, now",
    [(("image_encoder",), ()), ((), ("image_encoder",)), (("image_encoder",), ("prompt_encoder",))],
)
def test_what_is_frozen_may_not_change_on_resume(tmp_path, batch, before, now):
    run = replace(little(), out=str(tmp_path), freeze=before)
    state, _ = after_steps(run, batch, steps=1)
    folder = save(state, run)
    other = replace(run, freeze=now)
    with error_line(r"^--freeze.*--init"):
        check_resume(run, other, allow_data_change=True)
    act = rf"--freeze and --optimizer .*: --init {folder} and another --out"
    with error_line(rf"^{folder}.*exp_avg.*{act}"):
        resume(other, CPU)
    started = TrainState.initialize(other, CPU, str(folder))
    assert all(
        torch.equal(tensor, started.model.state_dict()[name])
        for name, tensor in state.model.state_dict().items()
    ), "as it tells"
