import pytest

from gigamask.errors import GigamaskError
from gigamask.models.configs import (
    MAEConfig,
    SamConfig,
    mae_tiny,
    mae_vit_b,
    mae_vit_h,
    mae_vit_l,
    tiny,
    vit_b,
    vit_h,
    vit_l,
)


def test_official_sizes_see_1024_pixels_as_64_tokens():
    assert {
        (config.image_size, config.embedding_size, config.mask_size)
        for config in (vit_b(), vit_l(), vit_h())
    } == {(1024, 64, 256)}


@pytest.mark.parametrize(
    ("changes", "message"),
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
    with pytest.raises(GigamaskError, match=message):
        SamConfig(**changes)


@pytest.mark.parametrize(
    ("mae", "sam"), [(mae_vit_b, vit_b), (mae_vit_l, vit_l), (mae_vit_h, vit_h), (mae_tiny, tiny)]
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
    ("changes", "message"),
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
    with pytest.raises(GigamaskError, match=message):
        MAEConfig(**changes)
