import torch

from gigamask.models.transformer import DecoderAttention, gather


def test_gather_picks_images_and_sums_their_gradients():
    images = torch.randn(
        3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    mask_image = torch.tensor([0, 0, 2, 2, 2])
    weight = torch.randn(5, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    picked = gather(images, mask_image)
    assert torch.equal(picked, images[mask_image])
    (gradient,) = torch.autograd.grad(picked, images, weight)
    wanted = torch.zeros_like(images).index_add(0, mask_image, weight)
    assert (gradient - wanted).abs().max() < 1e-12


def test_gathering_a_single_image_copies_nothing():
    images = torch.randn(1, 4, 5)
    assert gather(images, torch.zeros(7, dtype=torch.int64)).data_ptr() == images.data_ptr()


def test_a_broken_image_does_not_reach_the_masks_of_another():
    images = torch.ones(2, 3)
    images[0] = float("nan")
    assert gather(images, torch.tensor([0, 1, 1]))[1:].isfinite().all()


def test_attention_mixes_values_by_softmax():
    layer = DecoderAttention(8, 4, 2)
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 4, generator=chance) for n in (3, 5, 5))
    weights = torch.softmax(
        torch.stack(
            [q[..., part] @ k[..., part].transpose(1, 2) for part in (slice(0, 2), slice(2, 4))]
        )
        / 2**0.5,
        -1,
    )
    wanted = torch.cat([weights[0] @ v[..., :2], weights[1] @ v[..., 2:]], -1)
    assert torch.allclose(layer.attend(q, k, v), wanted, atol=1e-6)
