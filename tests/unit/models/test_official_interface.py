"""What the modules with Meta's signatures take that Meta's do not, and what they refuse."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gigamask.segment_anything
from gigamask.inference.predictor import SamPredictor
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.models.mask_decoder import MaskDecoder
from gigamask.models.prompt_encoder import PromptEncoder, make_prompts
from gigamask.models.sam.image_encoder import ImageEncoderViT, window_partition, window_unpartition
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


def test_constructors_set_normal_values_as_metas_do():
    torch.empty(10**6).fill_(torch.nan)  # memory that torch gives out again
    torch.manual_seed(0)
    encoder = PromptEncoder(256, (8, 8), (128, 128))
    decoder = MaskDecoder(transformer_dim=256, transformer=TwoWayTransformer(2, 256, 8, 512))
    matrix = encoder.pe_layer.positional_encoding_gaussian_matrix
    for values in (matrix, encoder.no_mask_embed.weight, decoder.mask_tokens.weight):
        assert 0.8 < values.std() < 1.2
    for name, values in ImageEncoderViT(32, 8, 3, 16, 2, 2, 8, 3, [1]).named_parameters():
        assert values.isfinite().all(), name
        assert ("pos" not in name) or not values.any()


def test_whole_numbers_for_points_leave_boxes_as_they_are(model):
    points, labels = torch.tensor([[[5, 8]], [[20, 30]], [[3, 4]]]), torch.ones(3, 1)
    found = make_prompts(points, labels, BOXES + 0.25, None, True, 64).points_xy_input
    assert torch.equal(found[:, 1:].flatten(1), BOXES + 0.25)
    assert torch.equal(found[:, :1], points.float())
    several = make_prompts(None, None, BOXES[:, None], None, True, 64).points_xy_input
    assert torch.equal(several.flatten(1), BOXES)


class Scaled(nn.Module):
    """An encoder of a program's, with an argument of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, scale: bool = True) -> torch.Tensor:
        return self.inner(x) * (2 if scale else 1)


def test_arguments_of_another_encoder_keep_their_defaults(model):
    images, sizes = 255 * torch.rand(1, 3, 128, 128), torch.tensor([[128, 128]])
    expected = 2 * model.encode(images, sizes)
    model.image_encoder = Scaled(model.image_encoder)
    assert torch.equal(model.encode(images, sizes), expected)


def test_another_attention_gets_windows(model):
    images = torch.randn(1, 3, 128, 128)
    block = next(each for each in model.image_encoder.blocks if each.window_size)
    expected, seen = model.image_encoder(images), []
    block.attn.register_forward_hook(lambda layer, given, found: seen.append(given[0].shape))
    torch.testing.assert_close(model.image_encoder(images), expected)
    assert seen[0][1:3] == (block.window_size, block.window_size)

    class Mixed(nn.Module):
        """The mean of all tokens that it gets."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2), keepdim=True).expand_as(x)

    block.attn, x = Mixed(), torch.randn(1, 16, 16, model.config.embed_dim)
    windows, padded = window_partition(block.norm1(x), block.window_size)
    means = window_unpartition(Mixed()(windows), block.window_size, padded, (16, 16))
    torch.testing.assert_close(block.attend(x, None), x + means)


def test_another_size_of_the_input_is_refused(model):
    for side in (64, 192):
        with error_line(f"16 x 16 patches \\(got {side // 8} x {side // 8}\\).*--image-size"):
            model.image_encoder(torch.zeros(1, 3, side, side))


def test_second_derivatives_are_refused(model):
    images = torch.randn(1, 3, 128, 128, requires_grad=True)
    with error_line("no second derivatives.*use_attention"):
        torch.autograd.grad(model.image_encoder(images).square().sum(), images, create_graph=True)


def test_hooks_of_gradients_are_called(model):
    block, seen = model.image_encoder.blocks[0], []
    for name in ("attn.qkv", "mlp.lin1", "mlp.lin2"):
        layer = block.get_submodule(name)
        layer.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    model.image_encoder(torch.randn(1, 3, 128, 128)).sum().backward()
    assert sorted(seen) == ["attn.qkv", "mlp.lin1", "mlp.lin2"]


def test_a_weight_that_a_hook_sets_is_used(model):
    """As of `torch.nn.utils.prune`."""
    embedding = torch.randn(1, 64, 16, 16)
    layer = model.mask_decoder.transformer.layers[0].self_attn.q_proj
    before, weight = decode(model, embedding, BOXES), layer.weight.detach()

    def halve(module: nn.Module, given: object) -> None:
        module.weight.data = weight / 2

    layer.register_forward_pre_hook(halve)
    halved = decode(model, embedding, BOXES)
    assert not torch.allclose(halved, before)
    layer.weight.data = weight  # stale until the next call
    torch.testing.assert_close(decode(model, embedding, BOXES), halved)


@pytest.mark.parametrize("part", ["output_upscaling", "mask_downscaling"])
def test_a_layer_more_is_no_silent_change(model, part):
    owner = model.mask_decoder if part == "output_upscaling" else model.prompt_encoder
    getattr(owner, part).append(nn.ReLU())
    predictor = SamPredictor(model)
    predictor.set_image(np.zeros((20, 30, 3), np.uint8))
    with pytest.raises(ValueError, match="too many values"):
        predictor.predict(box=np.array([1, 2, 9, 9]), mask_input=np.ones((1, 64, 64)))


@pytest.mark.parametrize("name", ["preprocess", "mask_decoder.predict_masks", "a subclass"])
def test_predictors_warn_of_methods_that_they_do_not_call(model, name):
    image = np.zeros((20, 30, 3), np.uint8)
    SamPredictor(model).set_image(image)
    if name == "a subclass":

        class Own(MaskDecoder):
            def forward(self, *given: object, **named: object) -> None:
                raise AssertionError

        model.mask_decoder.__class__, name = Own, "Own.forward"
    else:
        owner = model.mask_decoder if "." in name else model
        setattr(owner, name.rpartition(".")[2], lambda *given: given)
    with pytest.warns(UserWarning, match=f"{name.rpartition('.')[2]}: replaced"):
        SamPredictor(model).set_image(image)


@pytest.mark.slow
def test_encoders_exported_by_a_program_attend(model, tmp_path):
    """torch's older exporter drops what is written in place."""
    pytest.importorskip("onnxruntime")
    import onnxruntime

    images = torch.randn(1, 3, 128, 128)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.image_encoder(images)
        torch.onnx.export(
            model.image_encoder, (images,), tmp_path / "e.onnx", dynamo=False, opset_version=17
        )
    session = onnxruntime.InferenceSession(tmp_path / "e.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(found, expected, atol=1e-4)
    exported = torch.export.export(model.image_encoder, (images,)).module()
    torch.testing.assert_close(exported(images), expected, rtol=1e-4, atol=1e-4)


def test_modules_are_attributes_as_in_metas_package():
    package = gigamask.segment_anything
    assert package.modeling.image_encoder.ImageEncoderViT is ImageEncoderViT
    assert (
        package.utils.transforms.ResizeLongestSide
        is package.predictor.SamPredictor(build_model(tiny(), 0)).transform.__class__
    )
    assert callable(package.build_sam)
