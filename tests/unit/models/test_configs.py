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
        (spec.image_size, spec.embedding_size, spec.mask_size)
        for spec in (vit_b(), vit_l(), vit_h())
    } == {(1024, 64, 256)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth is 0; it counts something and must be at least 1"),
        (
            {"input_side": 1000},
            "input_side 1000 is not a multiple of patch 16; the nearest that is: 992",
        ),
        ({"heads": 7}, "dim 768 is not a multiple of heads 7"),
        ({"dim": 30, "heads": 3}, "dim 30 is not a multiple of 4"),
        ({"embedding_dim": 100}, "embedding_dim 100 is not a multiple of 8"),
        ({"decoder_heads": 3}, "decoder_heads 3 does not divide half of embedding_dim 256"),
        (
            {"global_blocks": (2, 12)},
            "global_blocks names block 12, but a depth of 12 has blocks 0 to 11",
        ),
        ({"drop_path": 1.0}, r"drop_path is 1.0; it is a rate and must lie in \[0, 1\)"),
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
        theirs.dim,
        theirs.depth,
        theirs.heads,
        theirs.patch,
    )


def test_three_quarters_of_the_patches_are_hidden():
    assert [(spec.patches, spec.visible) for spec in (mae_vit_b(), mae_tiny())] == [
        (196, 49),
        (256, 64),
    ]
    assert MAEConfig(mask_ratio=0.9).visible == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_depth": 0}, "decoder_depth is 0; it counts something and must be at least 1"),
        (
            {"patch": 14, "input_side": 225},
            "input_side 225 is not a multiple of patch 14; the nearest that is: 224",
        ),
        ({"heads": 7}, "dim 768 is not a multiple of heads 7"),
        ({"decoder_heads": 7}, "decoder_dim 512 is not a multiple of decoder_heads 7"),
        (
            {"decoder_dim": 30, "decoder_heads": 3},
            "decoder_dim 30 is not a multiple of 4, which the positions need",
        ),
        ({"mask_share": 1.0}, r"mask_share is 1.0; it is a share and must lie in \(0, 1\)"),
        (
            {"mask_share": 0.999},
            "mask_share 0.999 of 196 patches leaves 0 visible; choose one that hides some, not all",
        ),
        ({"mask_share": 0.001}, "mask_share 0.001 of 196 patches leaves 196 visible"),
    ],
)
def test_impossible_values_of_a_masked_autoencoder_are_named(changes, message):
    with pytest.raises(GigamaskError, match=message):
        MAEConfig(**changes)
