from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gigamask.models.configs import ConvPyramid, SamConfig, WindowDecoder, tiny
from gigamask.models.encoder_configs import ViT, ViTTiny
from gigamask.models.init import build_model
from gigamask.models.sam.attention import get_rel_pos, rel_pos_attention_reference
from gigamask.models.sam.image_encoder import EncoderAttention, ImageEncoderViT
from tests.errors import error_line

SMALL = SamConfig(
    image_size=64,
    patch_size=8,
    embed_dim=24,
    depth=3,
    num_heads=2,
    window_size=3,
    global_attn_indexes=(1,),
    embedding_dim=16,
    decoder_num_heads=2,
)


def shaken(config: SamConfig) -> ImageEncoderViT:
    encoder = build_model(config, 0).image_encoder.double()
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
            )
    return encoder


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=chance, dtype=torch.float64)


def windowed_plainly(layer: EncoderAttention, x: torch.Tensor) -> torch.Tensor:
    """Pads with zeros before the projection, then attends window by window, as SAM's code does."""
    side, window = x.shape[1], layer.window_size
    padded = F.pad(x, (0, 0, 0, -side % window, 0, -side % window))
    result = torch.empty_like(padded)
    for top in range(0, padded.shape[1], window):
        for left in range(0, padded.shape[2], window):
            tokens = padded[:, top : top + window, left : left + window].flatten(1, 2)
            q, k, v = (
                layer.qkv(tokens)
                .unflatten(2, (3, layer.num_heads, -1))
                .permute(2, 0, 3, 1, 4)
                .unbind(0)
            )
            answer = rel_pos_attention_reference(
                q, k, v, get_rel_pos(layer.rel_pos_h, window), get_rel_pos(layer.rel_pos_w, window)
            )
            answer = layer.proj(answer.transpose(1, 2).flatten(2))
            result[:, top : top + window, left : left + window] = answer.unflatten(
                1, (window, window)
            )
    return result[:, :side, :side]


@pytest.mark.parametrize("block", [0, 2])
def test_padding_after_the_projection_equals_padding_before(block):
    layer = shaken(SMALL).blocks[block].attn
    x = normal(2, 8, 8, 24)
    assert (layer(x) - windowed_plainly(layer, x)).abs().max() < 1e-12


@pytest.mark.parametrize("side", [24, 64, 128, 200])
def test_any_side_that_the_patch_divides(side):
    encoder = shaken(replace(SMALL, image_size=side))
    embedding = encoder(normal(2, 3, side, side), None)
    assert embedding.shape == (2, 16, side // 8, side // 8)
    assert embedding.isfinite().all()


def test_drop_rates_grow_linearly_from_zero():
    rates = [
        block.drop_rate
        for block in build_model(replace(tiny(), drop_path_rate=0.6), 0).image_encoder.blocks
    ]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.6])


def test_a_block_whose_branches_are_all_skipped_is_the_identity():
    encoder = shaken(replace(SMALL, drop_path_rate=0.5))
    x = normal(2, 8, 8, 24, seed=1)
    assert torch.equal(encoder.blocks[2](x, torch.zeros(2, 2)), x)


def test_drop_path_skips_single_images_and_single_branches():
    encoder = shaken(replace(SMALL, drop_path_rate=0.5))
    block = encoder.blocks[2]
    x = normal(4, 8, 8, 24, seed=1)
    uniforms = torch.tensor([[0.9, 0.9], [0.1, 0.9], [0.9, 0.1], [0.1, 0.1]])
    result = block(x, uniforms)
    attended = x + 2 * block.attn(block.norm1(x))
    both = attended + 2 * block.mlp(block.norm2(attended))
    only_mlp = x + 2 * block.mlp(block.norm2(x))
    for index, wanted in enumerate((both, only_mlp, attended, x)):
        assert (result[index] - wanted[index]).abs().max() < 1e-12


@pytest.mark.slow
def test_left_out_branches_change_neither_result_nor_gradients():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 8, 24, dtype=torch.float64, generator=generator)
    found = []
    uniforms = torch.tensor([[0.1, 0.9], [0.2, 0.1]])
    for given in (uniforms, uniforms.tolist()):
        block = shaken(replace(SMALL, drop_path_rate=0.5)).blocks[2]
        leaf = x.clone().requires_grad_()
        result = block(leaf, given)
        result.square().sum().backward()
        found.append((result.detach(), leaf.grad, block.mlp.lin1.weight.grad))
    assert all(map(torch.equal, *found))
    assert block.attn.qkv.weight.grad is None  # not computed


def test_uniforms_do_nothing_without_a_rate():
    encoder = shaken(SMALL)
    pixels = normal(2, 3, 64, 64)
    assert torch.equal(encoder(pixels, torch.zeros(2, 3, 2)), encoder(pixels, None))


def test_autocast_keeps_the_embedding_close():
    encoder = shaken(SMALL)
    pixels = normal(1, 3, 64, 64)
    truth = encoder(pixels, None)
    with torch.autocast("cpu", torch.bfloat16):
        half = encoder.float()(pixels.float(), None)
    assert (half - truth).abs().mean() < 0.03 * truth.abs().mean()


def test_every_parameter_of_the_encoder_learns():
    encoder = shaken(replace(SMALL, drop_path_rate=0.2))
    pixels = normal(2, 3, 64, 64)
    encoder(pixels, torch.full((2, 3, 2), 0.5)).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in encoder.parameters()
    )


def pictures(*sizes, side=64):
    """Padded pixels of images, and their sizes."""
    images = torch.zeros(len(sizes), 3, side, side, dtype=torch.uint8)
    chance = torch.Generator().manual_seed(7)
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, :height, :width] = torch.randint(0, 256, (3, height, width), generator=chance)
    return images, torch.tensor(sizes)


def rectangular_and_square(**changed):
    """Two models with the same weights."""
    made = [
        build_model(replace(SMALL, rectangular=rectangular, **changed), 3).eval()
        for rectangular in (True, False)
    ]
    made[0].load_state_dict(made[1].state_dict())
    return made


def test_offsets_of_fewer_positions_are_those_in_the_middle():
    table = torch.arange(13.0)[:, None]
    for size in (1, 4, 7):
        found = get_rel_pos(table, size)[..., 0].flip(1)
        place = torch.arange(size)
        assert torch.equal(found, 6 + place[:, None] - place.float())


@pytest.mark.slow
def test_a_square_image_is_encoded_as_without_rectangles():
    rectangle, square = rectangular_and_square()
    batch = pictures((64, 64), (64, 60), (57, 64))
    with torch.no_grad():
        assert torch.equal(rectangle.encode(*batch), square.encode(*batch))


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [ViT(), ViTTiny(16, 2, 2)])
def test_rectangles_have_no_padding_and_do_not_depend_on_the_batch(encoder):
    rectangle, _ = rectangular_and_square(encoder=encoder)
    sizes = [(64, 40), (20, 64), (64, 64), (64, 37), (1, 64)]
    images, input_sizes = pictures(*sizes)
    with torch.no_grad():
        together = rectangle.encode(images, input_sizes)
        for index, (height, width) in enumerate(sizes):
            alone = rectangle.encode(images[index][None], input_sizes[index][None])[0]
            assert (alone - together[index]).abs().max() < 1e-5
            rows, columns = -(-height // 8), -(-width // 8)
            assert (alone[:, :rows, :columns] != 0).all()
            assert not alone[:, rows:].any()
            assert not alone[:, :, columns:].any()


def test_attention_over_a_rectangle_is_that_of_the_definition():
    layer = shaken(SMALL).blocks[1].attn
    x = normal(2, 8, 5, 24)
    q, k, v = layer.qkv(x.flatten(1, 2)).unflatten(2, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    y, column = (torch.arange(40) // 5), (torch.arange(40) % 5)
    bias = [
        torch.einsum("bnid,ijd->bnij", q, table[7 + place[:, None] - place])
        for table, place in ((layer.rel_pos_h, y), (layer.rel_pos_w, column))
    ]
    weights = ((q * 12**-0.5) @ k.transpose(2, 3) + bias[0] + bias[1]).softmax(-1)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2)).unflatten(1, (8, 5))
    assert (layer(x) - expected).abs().max() < 1e-12


@pytest.mark.slow
def test_gradients_and_drop_path_go_through_rectangles():
    rectangle, square = rectangular_and_square(drop_path_rate=0.5)
    uniforms = torch.rand(3, 3, 2, generator=torch.Generator().manual_seed(2))
    for model in (rectangle, square):
        model.train().encode(*pictures((64, 64), (60, 64), (64, 63)), uniforms).sum().backward()
    for own, other in zip(rectangle.parameters(), square.parameters(), strict=True):
        if own.grad is not None:
            assert (own.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max() + 1e-6
    embedding = rectangle.encode(*pictures((64, 40), (20, 64), (40, 64)), uniforms)
    embedding.square().sum().backward()
    gradients = [parameter.grad for parameter in rectangle.image_encoder.parameters()]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_other_encoders_have_no_rectangles():
    with error_line(r"rectangular.*conv_pyramid"):
        SamConfig(
            image_size=64,
            patch_size=4,
            rectangular=True,
            encoder=ConvPyramid(),
            decoder=WindowDecoder(),
        )
