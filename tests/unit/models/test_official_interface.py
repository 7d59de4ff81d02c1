"""What the modules with Meta's signatures take that Meta's do not, and what they refuse."""

import pytest
import torch
from torch import nn

from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.mask_decoder import MaskDecoder
from gigamask.models.sam.sam import Sam
from gigamask.models.transformer import TwoWayTransformer
from tests.errors import error_line

BOXES = torch.tensor([[5.0, 8, 40, 33], [20, 3, 60, 30], [1, 1, 9, 30]])


@pytest.fixture
def model() -> Sam:
    return build_model(tiny(), 0).eval()


def decode(model: Sam, embedding: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Return the three masks of boxes."""
    sparse, dense = model.prompt_encoder(points=None, boxes=boxes, masks=None)
    positions = model.prompt_encoder.get_dense_pe()
    return model.mask_decoder(embedding, positions, sparse, dense, multimask_output=True)[0]


def test_an_embedding_for_each_prompt(model):
    embedding = model.image_encoder(torch.randn(3, 3, 128, 128))
    found = decode(model, embedding, BOXES)
    one_by_one = [decode(model, embedding[i : i + 1], BOXES[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(found, torch.cat(one_by_one))


def test_no_prompts_are_no_masks(model):
    assert decode(model, torch.zeros(1, 64, 16, 16), BOXES[:0]).shape == (0, 3, 64, 64)


def test_other_numbers_of_images_and_prompts_are_refused(model):
    with error_line("one for each of 3 prompts \\(got 2\\)"):
        decode(model, torch.zeros(2, 64, 16, 16), BOXES)


def test_what_replaces_a_projection_of_the_decoder_must_be_affine(model):
    attention = model.mask_decoder.transformer.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj, nn.Dropout(0.5))
    model.eval()
    embedding = torch.randn(1, 64, 16, 16)
    kept = decode(model, embedding, BOXES)
    model.train()
    with error_line("Sequential in the mask decoder is not affine"):
        decode(model, embedding, BOXES)
    attention.q_proj = attention.q_proj[0]
    torch.testing.assert_close(kept, decode(model, embedding, BOXES))
    attention.q_proj = nn.Identity()
    with error_line("Identity in the mask decoder has no linear layer"):
        decode(model, embedding, BOXES)


def test_sizes_that_the_decoder_does_not_have_are_refused():
    with error_line("has 2 blocks \\(got depth 3\\)"):
        TwoWayTransformer(3, 64, 2, 128)
    with error_line("has 3 layers \\(got 2\\)"):
        MaskDecoder(
            transformer_dim=64, transformer=TwoWayTransformer(2, 64, 2, 128), iou_head_depth=2
        )


def test_any_number_of_masks_and_other_activations():
    transformer = TwoWayTransformer(2, 64, 2, 128, activation=nn.GELU)
    decoder = MaskDecoder(
        transformer_dim=64, transformer=transformer, num_multimask_outputs=5, activation=nn.SiLU
    )
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(0.01)
    positions, dense = torch.zeros(1, 64, 4, 6), torch.zeros(2, 64, 4, 6)
    masks, iou = decoder(positions, positions, torch.zeros(2, 3, 64), dense, True)
    assert masks.shape == (2, 5, 16, 24)
    assert iou.shape == (2, 5)
