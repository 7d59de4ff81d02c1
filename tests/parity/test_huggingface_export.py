"""What transformers' own tests ask of a `SamModel`, of one that gigamask has exported."""

import warnings
from pathlib import Path

import pytest
import torch

from gigamask.export.huggingface import write_huggingface
from gigamask.models.configs import tiny
from gigamask.models.init import build_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import SamModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "sam_hf"
    write_huggingface(build_model(tiny(), 0), path)
    return path


@pytest.fixture
def model(folder) -> SamModel:
    return SamModel.from_pretrained(folder).eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(2, 3, 128, 128, generator=draw),
        "input_points": 128 * torch.rand(2, 3, 1, 2, generator=draw),
    }


def masks(model: SamModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).pred_masks


def test_it_is_saved_and_loaded_again(model, inputs, tmp_path):
    model.save_pretrained(tmp_path)
    again = SamModel.from_pretrained(tmp_path).eval()
    assert torch.equal(masks(model, inputs), masks(again, inputs))
    assert again.config.to_diff_dict() == model.config.to_diff_dict()


def test_one_image_is_answered_as_in_a_batch(model, inputs):
    both = masks(model, inputs)
    one = masks(model, {name: value[1:] for name, value in inputs.items()})
    torch.testing.assert_close(one, both[1:], rtol=1e-4, atol=1e-4)


def test_embeddings_may_be_computed_before(model, inputs):
    embeddings = model.get_image_embeddings(inputs["pixel_values"])
    found = masks(model, {"image_embeddings": embeddings, "input_points": inputs["input_points"]})
    assert torch.equal(found, masks(model, inputs))


def test_hidden_states_and_attentions_come_out(folder, inputs):
    model = SamModel.from_pretrained(folder, attn_implementation="eager").eval()
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    layers = model.config.vision_config.num_hidden_layers
    assert len(output.vision_hidden_states) == layers + 1
    assert len(output.vision_attentions) == layers
    assert output.vision_hidden_states[0].shape == (2, 16, 16, 96)


def test_attention_kernels_agree(folder, model, inputs):
    eager = SamModel.from_pretrained(folder, attn_implementation="eager").eval()
    torch.testing.assert_close(masks(eager, inputs), masks(model, inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_part_gets_gradients(model, inputs, checkpointing):
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    output = model(**inputs)
    (output.pred_masks.square().mean() + output.iou_scores.mean()).backward()
    parts = ("vision_encoder", "prompt_encoder", "mask_decoder")
    with_gradients = {
        name.partition(".")[0] for name, each in model.named_parameters() if each.grad is not None
    }
    assert with_gradients >= set(parts)


def test_half_precision(folder, inputs):
    half = SamModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    found = masks(half, {name: value.bfloat16() for name, value in inputs.items()})
    assert torch.isfinite(found).all()
    assert found.dtype == torch.bfloat16


def test_the_pipeline_makes_all_masks(folder):
    pytest.importorskip("torchvision", reason="transformers' pipeline needs torchvision")
    from PIL import Image
    from transformers import pipeline

    generate = pipeline("mask-generation", model=str(folder), points_per_batch=16)
    found = generate(Image.new("RGB", (60, 40)), pred_iou_thresh=0.0, stability_score_thresh=0.0)
    assert len(found["masks"]) == len(found["scores"])
