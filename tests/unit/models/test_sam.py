from dataclasses import replace

import pytest
import torch
from torch import nn

from gigamask.interfaces import PIXEL_MEAN
from gigamask.models.configs import tiny, vit_b, vit_h, vit_l
from gigamask.models.init import build_model
from gigamask.models.promptable import evaluated
from gigamask.models.sam.image_encoder import sine_positions
from gigamask.models.transformer import TIE_SCALE
from gigamask.types import Prompts
from tests.errors import error_line
from tests.little import COMPACT, noise


@pytest.mark.parametrize(
    "make, keys, parameters, encoder",
    [
        (vit_b, 314, 93_735_472, 89_670_912),
        (vit_l, 482, 312_342_832, 308_278_272),
        (vit_h, 594, 641_090_608, 637_026_048),
    ],
)
def test_sizes_are_metas(make, keys, parameters, encoder):
    model = build_model(make(), 0, "meta")
    assert len(model.state_dict()) == keys
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(parameter.numel() for parameter in model.image_encoder.parameters()) == encoder
    assert sum(parameter.numel() for parameter in model.prompt_encoder.parameters()) == 6_220
    assert sum(parameter.numel() for parameter in model.mask_decoder.parameters()) == 4_058_340


def test_the_gaussian_matrix_is_saved_and_the_pixel_mean_is_not():
    model = build_model(tiny(), 0)
    assert "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix" in model.state_dict()
    assert not any(name.startswith("pixel") for name in model.state_dict())
    assert model.pixel_mean.flatten().tolist() == pytest.approx(PIXEL_MEAN)


@pytest.mark.slow
@pytest.mark.parametrize("config, weight", [(tiny(), "patch_embed.proj"), (COMPACT, "stem.conv")])
def test_same_seed_builds_the_same_model_without_global_rng(config, weight):
    before = torch.get_rng_state()
    first, again, other = (build_model(config, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in first.state_dict().items():
        assert value.isfinite().all()
        assert torch.equal(value, again.state_dict()[name])
    weights = [each.image_encoder.get_parameter(f"{weight}.weight") for each in (first, other)]
    assert not torch.equal(*weights)


@pytest.mark.slow
def test_a_deeper_model_starts_its_first_blocks_alike():
    shallow, deep = build_model(tiny(), 0), build_model(replace(tiny(), depth=6), 0)
    assert torch.equal(
        shallow.image_encoder.blocks[2].mlp.lin1.weight,
        deep.image_encoder.blocks[2].mlp.lin1.weight,
    )


@pytest.mark.slow
def test_tied_cross_attentions_start_at_one_scaled_orthogonal_matrix():
    transformer = build_model(tiny(), 0).mask_decoder.transformer
    crosses = [transformer.final_attn_token_to_image]
    crosses += [layer.cross_attn_token_to_image for layer in transformer.layers] + [
        layer.cross_attn_image_to_token for layer in transformer.layers
    ]
    for cross in crosses:
        weight = cross.q_proj.weight
        assert torch.equal(weight, cross.k_proj.weight)
        assert torch.allclose(weight @ weight.T, TIE_SCALE**2 * torch.eye(32), atol=1e-5)
    assert not torch.equal(
        transformer.layers[0].self_attn.q_proj.weight, transformer.layers[0].self_attn.k_proj.weight
    )
    untied = build_model(
        replace(tiny(), custom_init=False), 0
    ).mask_decoder.transformer.final_attn_token_to_image
    assert not torch.equal(untied.q_proj.weight, untied.k_proj.weight)


def test_sine_positions_are_distinct_for_every_token():
    code = sine_positions(16, 96).flatten(0, 2)
    distance = torch.cdist(code, code) + 100 * torch.eye(256)
    assert distance.min() > 0.5
    assert code.abs().max() <= 1


def test_what_has_no_rule_says_so():
    model = build_model(tiny(), 0)
    model.image_encoder = nn.PReLU()
    with error_line(r"image_encoder\.weight"):
        model.init_weights(0)


@pytest.mark.slow
def test_padding_is_zero_after_normalising():
    model = build_model(tiny(), 0)
    seen = []
    model.image_encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = noise(2, 128)
    model.encode(images, torch.tensor([[128, 96], [50, 128]]))
    (pixels,) = seen
    assert pixels[0, :, :, 96:].abs().max() == 0
    assert pixels[1, :, 50:].abs().max() == 0
    mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
    assert torch.allclose(pixels[1, :, 49, 127], (images[1, :, 49, 127] - mean) / std, atol=1e-5)


@pytest.mark.slow
def test_what_lies_in_the_padding_does_not_matter():
    model = build_model(tiny(), 0)
    images = torch.full((1, 3, 128, 128), 90, dtype=torch.uint8)
    other = images.clone()
    other[:, :, 100:] = 7
    sizes = torch.tensor([[100, 128]])
    assert torch.equal(model.encode(images, sizes), model.encode(other, sizes))


def test_another_side_is_refused():
    with error_line(r"128.*64.*image_size=64"):
        build_model(tiny(), 0).encode(
            torch.zeros(1, 3, 64, 64, dtype=torch.uint8), torch.tensor([[64, 64]])
        )


@pytest.mark.slow
def test_pixels_become_masks_and_every_part_learns():
    model = build_model(replace(tiny(), drop_path_rate=0.2), 0)
    images = noise(2, 128)
    embedding = model.encode(images, torch.full((2, 2), 128), torch.full((2, 4, 2), 0.5))
    assert embedding.shape == (2, 64, 16, 16)
    prompts = Prompts(torch.full((3, 2, 2), 60.0), torch.tensor([[1, -1]] * 3), None, True)
    logits, iou = model.decode(embedding, torch.tensor([0, 1, 1]), prompts)
    assert logits.shape == (3, 3, 64, 64)
    assert iou.shape == (3, 3)
    (logits.square().mean() + iou.square().mean()).backward()
    assert all(
        parameter.grad.abs().sum() > 0
        for name, parameter in model.image_encoder.named_parameters()
        if "rel_pos" not in name
    )


@pytest.fixture(scope="module")
def double():
    """A small model in float64 with random parameters, and prompts of five masks of two images."""
    config = replace(
        tiny(),
        image_size=64,
        embed_dim=24,
        depth=1,
        num_heads=1,
        global_attn_indexes=(),
        embedding_dim=32,
        decoder_mlp=48,
        iou_hidden=24,
    )
    model, chance = build_model(config, 0).double(), torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=chance, dtype=torch.float64)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * normal(*parameter.shape))
    labels = torch.tensor([[1, 0, -1], [2, 3, -1], [-1, -1, -1], [1, -1, -1], [-1, -1, -1]])
    points = torch.rand(5, 3, 2, generator=chance, dtype=torch.float64) * 64
    return (
        model,
        normal(2, 32, 8, 8),
        torch.tensor([0, 0, 1, 1, 1]),
        Prompts(points, labels, 5 * normal(5, 32, 32), True),
    )


def gradients(model, embedding, mask_image, prompts, weight):
    """Returns the answer, and the gradients of a weighted sum of it."""
    leaf = embedding.clone().requires_grad_()
    logits, iou = model.decode(leaf, mask_image, prompts)
    model.zero_grad()
    (logits * weight[:, None, None, None]).square().sum().add(
        (iou * weight[:, None]).sum()
    ).backward()
    found = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
    return logits.detach(), iou.detach(), found | {"embedding": leaf.grad}


def near(found, wanted):
    return (found - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    "masked", [(1, 0, 1, 0, 0), (0, 1, 0, 1, 1), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)]
)
def test_mask_without_a_mask_prompt_is_predicted_as_if_alone(double, masked, several):
    model, embedding, mask_image, prompts = double
    masked = torch.tensor(masked, dtype=torch.bool)
    prompts = replace(prompts, multimask_output=several, has_mask_prompt=masked)
    weight = torch.linspace(-1, 1.5, 5, dtype=torch.float64)
    logits, iou, found = gradients(model, embedding, mask_image, prompts, weight)
    totals = {name: torch.zeros_like(gradient) for name, gradient in found.items()}
    for m in range(5):
        one, image = slice(m, m + 1), int(mask_image[m])
        fed = prompts.masks[one] if masked[m] else None
        alone = replace(
            prompts,
            points_xy_input=prompts.points_xy_input[one],
            labels=prompts.labels[one],
            masks=fed,
            has_mask_prompt=None,
        )
        own_logits, own_iou, own = gradients(
            model,
            embedding[image : image + 1],
            torch.zeros(1, dtype=torch.int64),
            alone,
            weight[one],
        )
        assert near(logits[one], own_logits)
        assert near(iou[one], own_iou)
        totals["embedding"][image] += own.pop("embedding")[0]
        for name, gradient in own.items():
            totals[name] += gradient
    # A softmax does not see the keys' bias: its gradient is rounding.
    assert [
        name
        for name in totals
        if not name.endswith("k_proj.bias") and not near(found[name], totals[name])
    ] == []
    assert bool(found["prompt_encoder.no_mask_embed.weight"].any()) is not bool(masked.all())
    assert bool(found["prompt_encoder.mask_downscaling.0.weight"].any()) is bool(masked.any())
    assert bool(found["prompt_encoder.mask_downscaling.6.bias"].any()) is bool(masked.any())


def test_what_stands_in_the_place_of_a_missing_mask_is_not_read(double):
    model, embedding, mask_image, prompts = double
    masked, weight = (
        torch.tensor([True, False, True, False, False]),
        torch.ones(5, dtype=torch.float64),
    )
    broken = torch.where(masked[:, None, None], prompts.masks, float("nan"))
    clean = gradients(
        model, embedding, mask_image, replace(prompts, has_mask_prompt=masked), weight
    )
    other = gradients(
        model, embedding, mask_image, replace(prompts, has_mask_prompt=masked, masks=broken), weight
    )
    assert torch.equal(clean[0], other[0])
    assert all(torch.equal(clean[2][name], other[2][name]) for name in clean[2])


@pytest.mark.slow
def test_masks_with_and_without_mask_prompt_differ_in_half_precision():
    model = build_model(tiny(), 0)
    embedding = model.encode(
        torch.full((1, 3, 128, 128), 90, dtype=torch.uint8), torch.tensor([[128, 128]])
    ).detach()
    masks = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1)) * 5
    prompts = Prompts(
        torch.full((4, 2, 2), 60.0),
        torch.tensor([[1, -1]] * 4),
        masks,
        True,
        torch.tensor([True, False, True, False]),
    )
    image_of = torch.zeros(4, dtype=torch.int64)
    exact, _ = model.decode(embedding, image_of, prompts)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = model.decode(embedding, image_of, prompts)
    assert (exact - half).abs().max() < 0.1 * exact.abs().max()
    none = Prompts(
        prompts.points_xy_input[:0],
        prompts.labels[:0],
        masks[:0],
        True,
        prompts.has_mask_prompt[:0],
    )
    assert model.decode(embedding, image_of[:0], none)[0].shape == (0, 3, 64, 64)


def test_custom_encoder_replaces_the_vit():
    class Means(nn.Module):
        def forward(self, pixels, drop_path=None):
            return (
                pixels.unflatten(2, (16, 8))
                .unflatten(4, (16, 8))
                .mean((3, 5))
                .repeat(1, 22, 1, 1)[:, :64]
            )

    model = build_model(tiny(), 0)
    model.image_encoder = Means()
    images = torch.zeros(1, 3, 128, 128, dtype=torch.uint8)
    assert model.encode(images, torch.tensor([[128, 128]])).shape == (1, 64, 16, 16)


def test_evaluation_leaves_each_module_in_its_mode():
    model = build_model(COMPACT, 0).train()
    model.mask_decoder.eval()
    with evaluated(model):
        assert not any(module.training for module in model.modules())
    assert model.training
    assert model.image_encoder.training
    assert not model.mask_decoder.training
