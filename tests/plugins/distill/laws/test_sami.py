"""SAMI: a masked autoencoder that predicts the embedding of a teacher."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gigamask import load_model
from gigamask.models.init import build_model
from gigamask.models.state_dict import read_weights
from gigamask.plugins.distill.sami import patch_features
from gigamask.plugins.distill.sami_config import SAMITrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.commands import invoke, refusal
from tests.laws.test_training import same
from tests.little import SPEC
from tests.plugins.distill.students import little_sami

MODEL = little_sami().model


SMALL_VIT = (
    "--model.encoder vit_t --model.encoder.embed-dim 16 --model.encoder.depth 2 "
    "--model.encoder.num-heads 2 --model.image-size 64 --evaluation none --steps 1"
).split()


def run_in(out: Path, scenes: Path, teacher: Path, **changes) -> SAMITrainConfig:
    places = {"teacher": str(teacher), "data": (str(scenes),), "out": str(out)}
    return replace(little_sami(), **places, **changes)


def test_blocks_change_hidden_patches_only():
    """Visible ones are predicted from what the encoder has made of them alone."""
    model = build_model(MODEL, 0).double()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    sizes, uniforms = torch.full((2, 2), 32), torch.rand(2, MODEL.patches)
    output = model(images, sizes, uniforms)
    assert output.patches.shape == (2, MODEL.patches, 16)
    assert output.scored.all(), "the loss is that of all patches"
    visible = uniforms.argsort(1)[:, : MODEL.visible]
    encoded = model.encode(output.pixels, visible)
    tokens = model.decoder_embed(encoded)[:, 1:]
    for row in range(2):
        at = visible[row]
        own = tokens[row] + model.decoder_pos_embed[0, 1 + at]
        expected = model.decoder_pred(model.decoder_norm(own))
        torch.testing.assert_close(output.patches[row, at], expected)
    hidden = uniforms.argsort(1)[:, -1]
    model.decoder_blocks[0].mlp.fc2.bias.data += 1.0
    moved = model(images, sizes, uniforms).patches != output.patches
    assert moved[torch.arange(2), hidden].any(1).all()
    assert not moved[torch.arange(2), visible[:, 0]].any()


def test_features_are_means_of_the_teachers_tokens():
    """The image is enlarged from 32 to 64 pixels; two by two tokens are a patch."""
    model = build_model(SPEC, 5).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    sizes = torch.tensor([[32, 32], [20, 32]])
    large = functional.interpolate(images.float(), (64, 64), mode="bilinear")
    with torch.no_grad():
        embedding = model.encode(large, 2 * sizes)
    expected = embedding.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5))
    found = patch_features(model, images, sizes, 4)
    torch.testing.assert_close(found, expected.flatten(2).mT)
    own = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        expected = model.encode(own, torch.tensor([[64, 64]])).flatten(2).mT
    torch.testing.assert_close(patch_features(model, own, torch.tensor([[64, 64]]), 8), expected)


def test_gradients_are_those_of_the_plain_loss(tmp_path, scenes, weights):
    """Over images in micro-batches: the squared error of all patches and channels."""
    run = run_in(tmp_path / "run", scenes, weights)
    state = TrainState.initialize(run, torch.device("cpu"))
    state = TrainState.from_model(state.model.double(), run)
    task, metrics = run.task(torch.device("cpu")), StepMetrics.zero(3, torch.zeros(0).double())
    task.teacher.double()
    before = deepcopy(task.teacher.state_dict())
    batches = list(next(TrainData(run, open_index(run)).batches()))
    assert len(batches) == 2
    for batch in batches:
        accumulate(task, state.model, batch, metrics)
    learned = [each for each in state.model.parameters() if each.requires_grad]
    found = [each.grad for each in learned]
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        output = state.model(batch.images, batch.input_sizes, batch.random_inputs.patches)
        target = patch_features(task.teacher, batch.images, batch.input_sizes, 4)
        loss = loss + (output.patches - target).square().mean((1, 2)).sum()
    expected = torch.autograd.grad(loss, learned)
    torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(task.teacher.state_dict(), before, rtol=0, atol=0)


def test_a_stopped_training_resumes_bit_for_bit(tmp_path, scenes, weights):
    whole = train(run_in(tmp_path / "whole", scenes, weights))
    run = run_in(tmp_path / "run", scenes, weights, steps=2)
    half = train(run)
    assert not same(whole, half)
    assert same(whole, train(replace(run, steps=4)))


@pytest.mark.long
def test_by_command(tmp_path, scenes, weights, capsys):
    """Pre-trained, resumed, planned; then the encoder of a SAM."""
    data = ["--data", str(scenes)]
    words = [little_sami().recipe, "--teacher", str(weights)]
    run, out = tmp_path / "run", tmp_path / "sam"
    invoke("plan", *words)
    invoke("pretrain", *words, *data, "--out", run, "--steps", "2")
    assert "gigamask train efficient_sam" in capsys.readouterr().out
    invoke(f"pretrain --resume {run} --steps 3")
    begun = ["train", "tiny", *data, "--init", f"mae:{run}", "--out", str(out), *SMALL_VIT]
    invoke(*begun, "--model.patch-size 8 --freeze image_encoder.blocks")
    found, (taught, _) = load_model(out).state_dict(), read_weights(run)
    for own, mae in (("attn.qkv.weight", "attn.qkv.weight"), ("mlp.lin1.bias", "mlp.fc1.bias")):
        assert torch.equal(found[f"image_encoder.blocks.1.{own}"], taught[f"blocks.1.{mae}"])


def test_it_starts_from_efficient_sams_names(tmp_path, scenes):
    """MAE's names and SAM's neck below `image_encoder.`, positions of 14 x 14 patches."""
    mae = build_model(replace(MODEL, image_size=112), 3).state_dict()
    names = ("blocks.", "patch_embed.", "pos_embed")
    encoder = {name: value for name, value in mae.items() if name.startswith(names)}
    neck = {"neck.0.weight": torch.randn(16, 16, 1, 1)}
    state = {f"image_encoder.{name}": value for name, value in (encoder | neck).items()}
    torch.save({"model": state}, tmp_path / "efficient_sam_vitt.pt")
    out = tmp_path / "run"
    words = f"train tiny --data {scenes} --out {out} --model.embedding-dim 16 --freeze".split()
    words += ["image_encoder.blocks", "image_encoder.neck.0", *SMALL_VIT]
    invoke(*words, "--init", f"mae:{tmp_path / 'efficient_sam_vitt.pt'}")
    found = load_model(out).state_dict()
    assert torch.equal(found["image_encoder.neck.0.weight"], neck["neck.0.weight"])
    first = encoder["blocks.0.mlp.fc1.weight"]
    assert torch.equal(found["image_encoder.blocks.0.mlp.lin1.weight"], first)


def test_what_does_not_fit_is_said(tmp_path, scenes, weights, capsys):
    words = f"pretrain {little_sami().recipe} --data {scenes} --out {tmp_path}/run".split()
    for more, message in (
        ("", "--teacher is required"),
        (f"--teacher {tmp_path}/none", "no such file or folder"),
        (f"--teacher {weights} --model.feature-channels 8", "--model.feature-channels 16 (got 8)"),
        (f"--teacher {weights} --model.feature-channels -1", "must be at least 0"),
        (f"--teacher {weights} --model.image-size 128", "choose a smaller --model.image-size"),
        (f"--teacher {weights} --model.patch-size 2", "32 pixels or 16 x 16 patches"),
    ):
        assert message in refusal(capsys, *words, more)
