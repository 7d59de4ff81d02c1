"""MAE against `ViTMAEForPreTraining` of Hugging Face transformers: outputs, loss and gradients."""

import re

import pytest
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from gigamask.losses.mae import mae_loss, patchify
from gigamask.models.configs import MAEConfig
from gigamask.models.init import build_model
from gigamask.models.mae import MAE
from gigamask.rng import make_rng

pytest.importorskip("transformers", minversion="5.10", reason="its tensors had other names")

SPEC = MAEConfig(
    image_size=32,
    patch_size=4,
    embed_dim=24,
    depth=3,
    num_heads=3,
    decoder_dim=16,
    decoder_depth=2,
    decoder_num_heads=4,
)
# Ours and theirs, in the order in which they hold.
NAMES = (
    ("decoder_blocks.", "decoder.decoder_layers."),
    ("decoder_", "decoder.decoder_"),
    ("mask_token", "decoder.mask_token"),
    ("blocks.", "vit.layers."),
    ("norm.", "vit.layernorm."),
    ("patch_embed.proj.", "vit.embeddings.patch_embeddings.projection."),
    ("pos_embed", "vit.embeddings.position_embeddings"),
    ("cls_token", "vit.embeddings.cls_token"),
)


def renamed(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return our tensors or gradients with its names, where queries, keys and values are apart."""
    theirs = {}
    for name, value in ours.items():
        start, other = next(pair for pair in NAMES if name.startswith(pair[0]))
        other += name.removeprefix(start)
        other = re.sub(
            r"\.norm1\.", ".layernorm_before.", re.sub(r"\.norm2\.", ".layernorm_after.", other)
        )
        other = other.replace(".attn.proj.", ".attention.o_proj.")
        if ".attn.qkv." in other:
            theirs |= {
                other.replace(".attn.qkv.", f".attention.{part}_proj."): each
                for part, each in zip("qkv", value.chunk(3), strict=True)
            }
        else:
            theirs[other] = value
    return theirs


def pair(normalise: bool) -> tuple[MAE, ViTMAEForPreTraining]:
    """Returns our model and the other with the same weights, none of them a zero, in float64."""
    ours = build_model(SPEC, 3).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter += (
                torch.from_numpy(
                    make_rng(0, f"test parity {name}").standard_normal(tuple(parameter.shape))
                )
                * 0.05
            )
    config = ViTMAEConfig(
        hidden_size=SPEC.embed_dim,
        num_hidden_layers=SPEC.depth,
        num_attention_heads=SPEC.num_heads,
        intermediate_size=4 * SPEC.embed_dim,
        image_size=SPEC.image_size,
        patch_size=SPEC.patch_size,
        layer_norm_eps=1e-6,
        decoder_hidden_size=SPEC.decoder_dim,
        decoder_num_hidden_layers=SPEC.decoder_depth,
        decoder_num_attention_heads=SPEC.decoder_num_heads,
        decoder_intermediate_size=4 * SPEC.decoder_dim,
        norm_pix_loss=normalise,
        attn_implementation="sdpa",  # the other form computes a softmax in float32
    )
    theirs = ViTMAEForPreTraining(config).double()
    theirs.load_state_dict(renamed(ours.state_dict()))
    return ours, theirs.eval()


@pytest.mark.parametrize("normalise", [True, False])
def test_predictions_loss_and_gradients_equal_hugging_face(normalise):
    ours, theirs = pair(normalise)
    images = torch.from_numpy(make_rng(1, "test images").integers(0, 256, (3, 3, 32, 32))).to(
        torch.uint8
    )
    uniforms = torch.from_numpy(make_rng(1, "test uniforms").random((3, SPEC.patches)))
    guess = ours(images, torch.full((3, 2), 32), uniforms)
    answer = theirs(pixel_values=guess.pixels, noise=uniforms)
    assert torch.equal(guess.scored, answer.mask.bool())
    assert torch.allclose(guess.patches, answer.logits, rtol=0, atol=1e-12)
    loss = mae_loss(
        guess.patches, patchify(guess.pixels, SPEC.patch_size), guess.scored, normalise
    ).mean()
    assert float(loss.detach()) == pytest.approx(float(answer.loss.detach()), rel=1e-12)
    loss.backward()
    answer.loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    expected = renamed(
        {
            name: parameter.grad
            for name, parameter in ours.named_parameters()
            if parameter.requires_grad
        }
    )
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 1e-10 * max(
            float(gradient.abs().max()), 1e-3
        ), name
    assert ours.pos_embed.grad is None
    assert ours.decoder_pos_embed.grad is None
