from dataclasses import replace

import pytest

from gigamask.models.configs import (
    ConvPyramid,
    MAEConfig,
    SamConfig,
    SamDecoder,
    ViT,
    WindowDecoder,
    compact,
    mae_tiny,
    mae_vit_b,
    mae_vit_h,
    mae_vit_l,
    tiny,
    vit_b,
    vit_h,
    vit_l,
)
from tests.errors import error_line


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"depth": 0}, r"SamConfig\.depth.*\(got 0\)"),
        ({"image_size": 1000}, r"image_size.*patch_size 16 \(got 1000\).*992"),
        ({"num_heads": 7}, r"embed_dim.*7.*num_heads \(got 768\)"),
        ({"embed_dim": 30, "num_heads": 3}, r"embed_dim.*4.*\(got 30\)"),
        ({"embedding_dim": 100}, r"embedding_dim.*8.*\(got 100\)"),
        ({"decoder_num_heads": 3}, r"embedding_dim.*6.*decoder_num_heads \(got 256\)"),
        ({"global_attn_indexes": (2, 12)}, r"global_attn_indexes.*11.*12.*\(got 12\)"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate.*\[0, 1\) \(got 1\.0\)"),
    ],
)
def test_impossible_values_are_named(changes, message):
    with error_line(message):
        SamConfig(**changes)


@pytest.mark.parametrize(
    "mae, sam", [(mae_vit_b, vit_b), (mae_vit_l, vit_l), (mae_vit_h, vit_h), (mae_tiny, tiny)]
)
def test_a_masked_autoencoder_has_the_encoder_of_its_sam(mae, sam):
    ours, theirs = mae(), sam()
    assert (ours.embed_dim, ours.depth, ours.num_heads, ours.patch_size) == (
        theirs.embed_dim,
        theirs.depth,
        theirs.num_heads,
        theirs.patch_size,
    )


def test_three_quarters_of_the_patches_are_hidden():
    assert [(config.patches, config.visible) for config in (mae_vit_b(), mae_tiny())] == [
        (196, 49),
        (256, 64),
    ]
    assert MAEConfig(mask_ratio=0.9).visible == 20


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder_depth": 0}, r"MAEConfig\.decoder_depth.*\(got 0\)"),
        ({"patch_size": 14, "image_size": 225}, r"image_size.*14 \(got 225\).*224"),
        ({"num_heads": 7}, r"embed_dim.*7.*num_heads \(got 768\)"),
        ({"decoder_num_heads": 7}, r"decoder_dim.*7.*decoder_num_heads \(got 512\)"),
        ({"decoder_dim": 30, "decoder_num_heads": 3}, r"decoder_dim.*4.*\(got 30\)"),
        ({"mask_ratio": 1.0}, r"mask_ratio.*\(0, 1\) \(got 1\.0\)"),
        ({"mask_ratio": 0.999}, r"mask_ratio 0\.999 of 196 patches.*0 visible"),
        ({"mask_ratio": 0.001}, r"mask_ratio 0\.001 of 196 patches.*196 visible"),
    ],
)
def test_impossible_values_of_a_masked_autoencoder_are_named(changes, message):
    with error_line(message):
        MAEConfig(**changes)


def test_channels_of_the_embedding_are_the_encoders():
    assert [config.encoder.channels(config) for config in (vit_b(), tiny(), compact())] == [
        256,
        64,
        1 + 32 + 4 * 16,
    ]
    assert (compact().embedding_size, compact().mask_size) == (64, 256)
    found = [config.embedding_channels for config in (vit_b(), compact())]
    assert found == [256, 97]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": SamDecoder()}, r"conv_pyramid.*--model\.decoder window.*--model\.encoder vit"),
        ({"encoder": ViT()}, r"decoder window.*--model\.encoder conv_pyramid.*ViT.*compact"),
        ({"custom_init": True}, r"SamConfig\.custom_init.*decoder window"),
        ({"patch_size": 8}, r"SamConfig\.patch_size must be 4.*\(got 8\)"),
        ({"image_size": 120}, r"SamConfig\.image_size.*16.*\(got 120\)"),
        (
            {"embedding_dim": 56, "decoder_num_heads": 1},
            r"SamConfig\.embedding_dim.*16.*\(got 56\)",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(changes, message):
    with error_line(rf"^[^\n]*{message}[^\n]*$"):
        replace(compact(), **changes)


@pytest.mark.parametrize(
    "part, changes, message",
    [
        (ConvPyramid, {"width": 30}, r"ConvPyramid\.width.*4.*\(got 30\)"),
        (ConvPyramid, {"width": 0}, r"ConvPyramid\.width.*\(got 0\)"),
        (ConvPyramid, {"fine_width": 0}, r"ConvPyramid\.fine_width.*\(got 0\)"),
        (ConvPyramid, {"widths": (24, 48, 96, 100)}, r"ConvPyramid\.widths.*8.*100"),
        (ConvPyramid, {"widths": (0, 48, 96, 128)}, r"ConvPyramid\.widths.*8.*\(0,"),
        (ConvPyramid, {"depths": (0, 1, -1, 2)}, r"ConvPyramid\.depths.*-1"),
        (WindowDecoder, {"click_windows": (0.3, 0.2, 1.0)}, r"WindowDecoder\.click_win.*0\.2"),
        (WindowDecoder, {"box_windows": (0.0, 1.4, 1.8)}, r"WindowDecoder\.box_windows.*0\.0"),
        (
            WindowDecoder,
            {"correction_windows": (1.0, 2.0, 1.5)},
            r"WindowDecoder\.correction_windows.*1\.5",
        ),
        (
            WindowDecoder,
            {"correction_windows": (1.0, 2.0, float("nan"))},
            r"WindowDecoder\.correction_windows.*nan",
        ),
        (WindowDecoder, {"widths": (48, 90)}, r"WindowDecoder\.widths.*8.*90"),
        (WindowDecoder, {"widths": (0, 96)}, r"WindowDecoder\.widths.*8.*\(0,"),
    ],
)
def test_impossible_values_of_parts_are_named(part, changes, message):
    with error_line(message):
        part(**changes)
