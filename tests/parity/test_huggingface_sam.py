"""SAM against Hugging Face's `SamModel`, which was tested against Meta's, with the same weights."""

import warnings
from dataclasses import replace

import pytest
import torch

from gigamask.models import configs
from gigamask.models.configs import tiny, vit_b
from gigamask.models.convert import huggingface_config, to_huggingface
from gigamask.models.init import build_model
from gigamask.models.state_dict import load_weights, to_official
from gigamask.types import Prompts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import SamConfig, SamModel

# Windows of 3 on 8 x 8 tokens need padding.
SMALL = replace(tiny(), image_size=64, window_size=3)


def pair(config: configs.SamConfig):
    """Return both models with the same weights, none of them zero."""
    chance = torch.Generator().manual_seed(1)
    model = build_model(config, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=chance))
    with torch.device("meta"):
        theirs = SamModel(SamConfig(**huggingface_config(config)))
    theirs.load_state_dict(to_huggingface(to_official(model)), assign=True)
    for layer in theirs.mask_decoder.transformer.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            # Meta's decoder has torch's default here; Hugging Face's has 1e-6.
            layer.eps = 1e-5
    return model.eval(), theirs.eval()


def assert_close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def assert_same_answer(model, embedding, mask_image, prompts: Prompts, answer) -> None:
    logits, iou = model.decode(embedding, mask_image, prompts)
    assert_close(logits, answer.pred_masks.flatten(0, 1))
    assert_close(iou, answer.iou_scores.flatten(0, 1))


@pytest.fixture(scope="module")
def models():
    return pair(SMALL)


@torch.no_grad()
def embeddings(models, images: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    model, theirs = models
    pictures = torch.randint(
        0,
        256,
        (images, 3, side, side),
        generator=torch.Generator().manual_seed(2),
        dtype=torch.uint8,
    )
    pixels = (pictures.float() - model.pixel_mean) / model.pixel_std
    return model.encode(pictures, torch.full((images, 2), side)), theirs.get_image_embeddings(
        pixels
    )


def test_names_and_shapes_of_the_real_size_are_theirs():
    with torch.device("meta"):
        theirs = SamModel(SamConfig()).state_dict()
    mine = to_huggingface(build_model(vit_b(), 0, "meta").state_dict())
    assert {name: value.shape for name, value in mine.items()} == {
        name: value.shape for name, value in theirs.items()
    }


def test_embeddings_agree(models):
    assert_close(*embeddings(models, 2, 64))


@pytest.mark.parametrize("several", [True, False])
@torch.no_grad()
def test_points_agree_for_many_masks_of_many_images(models, several):
    model, theirs = models
    mine, others = embeddings(models, 2, 64)
    points = 64 * torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([[[1, 0], [1, 1], [0, 1]], [[1, -1], [0, 0], [1, 1]]])
    answer = theirs(
        image_embeddings=others, input_points=points, input_labels=labels, multimask_output=several
    )
    # Hugging Face, as Meta, appends one point that is none.
    prompts = Prompts(
        torch.cat([points.flatten(0, 1), torch.zeros(6, 1, 2)], 1),
        torch.cat([labels.flatten(0, 1), torch.full((6, 1), -1)], 1),
        None,
        several,
    )
    assert_same_answer(model, mine, torch.arange(2).repeat_interleave(3), prompts, answer)


@torch.no_grad()
def test_boxes_agree(models):
    model, theirs = models
    mine, others = embeddings(models, 2, 64)
    boxes = torch.tensor(
        [
            [[3.0, 5.0, 40.0, 50.0], [0.0, 0.0, 10.0, 63.0]],
            [[1.0, 2.0, 3.0, 4.0], [20.0, 8.0, 60.0, 9.5]],
        ]
    )
    answer = theirs(image_embeddings=others, input_boxes=boxes, multimask_output=True)
    prompts = Prompts(boxes.view(4, 2, 2), torch.tensor([[2, 3]] * 4), None, True)
    assert_same_answer(model, mine, torch.tensor([0, 0, 1, 1]), prompts, answer)


@torch.no_grad()
def test_mask_prompts_agree(models):
    model, theirs = models
    mine, others = embeddings(models, 1, 64)
    point, box = torch.tensor([[[[20.0, 30.0]]]]), torch.tensor([[[3.0, 5.0, 40.0, 50.0]]])
    masks = 4 * torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(4))
    answer = theirs(
        image_embeddings=others,
        input_points=point,
        input_labels=torch.ones(1, 1, 1, dtype=torch.int64),
        input_boxes=box,
        input_masks=masks,
        multimask_output=False,
    )
    prompts = Prompts(
        torch.cat([point[0, 0], box.view(2, 2)])[None], torch.tensor([[1, 2, 3]]), masks[0], False
    )
    assert_same_answer(model, mine, torch.tensor([0]), prompts, answer)


def test_the_real_width_agrees_at_a_smaller_side_and_depth():
    config = replace(vit_b(), image_size=256, depth=3, global_attn_indexes=(2,))
    models = pair(config)
    mine, others = embeddings(models, 1, 256)
    assert_close(mine, others)
    point = torch.tensor([[[[200.0, 30.0]]]])
    with torch.no_grad():
        answer = models[1](
            image_embeddings=others,
            input_points=point,
            input_labels=torch.ones(1, 1, 1, dtype=torch.int64),
        )
        prompts = Prompts(
            torch.cat([point[0, 0], torch.zeros(1, 2)])[None], torch.tensor([[1, -1]]), None, True
        )
        assert_same_answer(models[0], mine, torch.tensor([0]), prompts, answer)


def test_weights_at_another_side_agree_with_tables_interpolated_on_the_fly(models):
    """Hugging Face interpolates relative positions in each forward; here it was done on load."""
    model, theirs = models
    larger = build_model(replace(SMALL, image_size=96), 0)
    load_weights(larger, to_official(model), "weights")
    x = torch.randn(1, 12, 12, 96, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        assert_close(larger.image_encoder.blocks[1](x, None), theirs.vision_encoder.layers[1](x))
