import math

import pytest
import torch

from gigamask.models.configs import MAEConfig, mae_tiny, mae_vit_b, mae_vit_h, mae_vit_l
from gigamask.models.init import build_model
from gigamask.models.mae import MAE, get_2d_sincos_pos_embed
from gigamask.rng import make_rng
from tests.errors import error_line

SPEC = MAEConfig(
    image_size=32,
    patch_size=4,
    embed_dim=24,
    depth=2,
    num_heads=3,
    decoder_dim=16,
    decoder_depth=1,
    decoder_num_heads=4,
)


def public_layout(dim: int, depth: int, patches: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of MAE's published checkpoints: decoder 8 x 512, patch size 16."""

    def block(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        matrices = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (4 * width, width),
            "mlp.fc2": (width, 4 * width),
        }
        found = {
            f"{prefix}.{norm}.{kind}": (width,)
            for norm in ("norm1", "norm2")
            for kind in ("weight", "bias")
        }
        found |= {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
        return found | {f"{prefix}.{name}.bias": shape[:1] for name, shape in matrices.items()}

    layout: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, 1 + patches, dim),
        "mask_token": (1, 1, 512),
        "decoder_pos_embed": (1, 1 + patches, 512),
        "patch_embed.proj.weight": (dim, 3, 16, 16),
        "patch_embed.proj.bias": (dim,),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "decoder_embed.weight": (512, dim),
        "decoder_embed.bias": (512,),
        "decoder_norm.weight": (512,),
        "decoder_norm.bias": (512,),
        "decoder_pred.weight": (768, 512),
        "decoder_pred.bias": (768,),
    }
    for index in range(depth):
        layout |= block(f"blocks.{index}", dim)
    for index in range(8):
        layout |= block(f"decoder_blocks.{index}", 512)
    return layout


@pytest.mark.parametrize(
    "make, dim, depth, parameters, encoder",
    [
        (mae_vit_b, 768, 12, 111_907_840, 85_798_656),
        (mae_vit_l, 1024, 24, 329_541_888, 303_301_632),
        (mae_vit_h, 1280, 32, 657_289_728, 630_918_400),
    ],
)
def test_names_and_shapes_are_the_published_ones(make, dim, depth, parameters, encoder):
    model = build_model(make(), 0, "meta")
    assert {
        name: tuple(value.shape) for name, value in model.state_dict().items()
    } == public_layout(dim, depth, 196)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(counts.values()) == parameters
    assert (
        sum(
            count
            for name, count in counts.items()
            if not name.startswith(("decoder", "mask_token"))
        )
        == encoder
    )
    assert [
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    ] == ["pos_embed", "decoder_pos_embed"]


def test_positions_are_columns_then_rows():
    table = get_2d_sincos_pos_embed(3, 16)[0]
    assert table.shape == (10, 16)
    assert not table[0].any()
    for row in range(3):
        for column in range(3):
            angles = [[place / 10000 ** (k / 4) for k in range(4)] for place in (column, row)]
            expected = [
                wave(angle) for axis in angles for wave in (math.sin, math.cos) for angle in axis
            ]
            assert table[1 + 3 * row + column].tolist() == pytest.approx(expected, abs=1e-6)


def images_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(make_rng(seed, "test images").integers(0, 256, (count, 3, 32, 32))).to(
        torch.uint8
    )


def uniforms_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(
        make_rng(seed, "test uniforms").random((count, SPEC.patches), dtype="float32")
    )


def whole(count: int) -> torch.Tensor:
    return torch.full((count, 2), 32)


@pytest.fixture(scope="module")
def model() -> MAE:
    return build_model(SPEC, 1)


def test_the_encoder_sees_a_quarter_of_the_patches_and_the_decoder_all(model):
    shapes = []
    blocks = [*model.blocks, *model.decoder_blocks]
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
        for block in blocks
    ]
    guess = model(images_of(2), whole(2), uniforms_of(2))
    for hook in hooks:
        hook.remove()
    assert shapes == [(2, 17, 24), (2, 17, 24), (2, 65, 16)]
    assert guess.patches.shape == (2, 64, 48)
    assert guess.scored.sum(1).tolist() == [48, 48]


def test_the_lowest_numbers_stay_and_hidden_pixels_are_not_seen(model):
    uniforms, images = uniforms_of(2), images_of(2)
    guess = model(images, whole(2), uniforms)
    assert torch.equal(guess.scored, uniforms >= uniforms.sort(1).values[:, 16:17])
    hidden = guess.scored.view(2, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    changed = torch.where(hidden, 255 - images, images)
    again = model(changed, whole(2), uniforms)
    assert torch.equal(again.patches, guess.patches)
    assert not torch.equal(model(255 - images, whole(2), uniforms).patches, guess.patches)


def test_padding_is_neither_seen_nor_scored(model):
    uniforms, images = uniforms_of(2), images_of(2)
    sizes = torch.tensor(
        [[32, 17], [9, 32]]
    )  # 5 of 8 columns of patches hold pixels, and 3 of 8 rows
    guess = model(images, sizes, uniforms)
    assert guess.scored.sum(1).tolist() == [40 - 16, 24 - 16]
    assert not guess.scored[0].view(8, 8)[:, 5:].any()
    assert not guess.scored[1].view(8, 8)[3:].any()
    assert not guess.pixels[0, :, :, 17:].any()
    images[0, :, :, 17:], images[1, :, 9:] = 200, 7
    assert torch.equal(model(images, sizes, uniforms).patches, guess.patches)


def test_image_with_fewer_patches_than_are_visible_has_none_masked(model):
    guess = model(images_of(1), torch.tensor([[4, 32]]), uniforms_of(1))
    assert not guess.scored.any()
    assert guess.patches.isfinite().all()


def test_images_of_another_side_and_numbers_of_other_patches_are_refused(model):
    with error_line(r"32.*16.*image_size=16"):
        model(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.full((1, 2), 16), uniforms_of(1))
    with error_line(r"RandomSpec\.patches.*64.*5"):
        model(images_of(1), whole(1), torch.zeros(1, 5))


def test_it_starts_as_its_authors_do():
    model = build_model(mae_tiny(), 0)
    bound = math.sqrt(6 / (96 + 3 * 64))
    kernel = model.patch_embed.proj.weight
    assert bound * 0.99 < kernel.abs().max() <= bound
    qkv = model.blocks[1].attn.qkv.weight
    assert float(qkv.detach().std()) == pytest.approx(math.sqrt(2 / (96 + 288)), rel=0.02)
    assert float(model.cls_token.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert float(model.mask_token.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert not model.blocks[1].mlp.fc1.bias.any()
    assert (model.decoder_norm.weight == 1).all()
    assert float(model.pixel_mean[0]) == pytest.approx(123.675)
