"""Blocks that compute again what they forgot: the same numbers, less to keep."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from gigamask.distributed.activation_checkpointing import checkpoint_blocks
from gigamask.models.init import build_model
from tests.little import SPEC, little

DEEP = replace(SPEC, depth=6, global_attn_indexes=(2, 5), drop_path_rate=0.5)
IMAGES = torch.randint(
    0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)
SIZES = torch.tensor([[64, 48], [40, 64]])
DRAWN = torch.rand(2, 6, 2, generator=torch.Generator().manual_seed(1))


def encoded(every: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return the embedding, the gradients, and the bytes saved for backward besides weights."""
    model = build_model(DEEP, 0).double()
    if every is not None:
        checkpoint_blocks(model.image_encoder.blocks, every)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        embedding = model.encode(IMAGES, SIZES, DRAWN)
    (embedding * torch.arange(embedding.numel()).view_as(embedding).sin()).sum().backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return (
        embedding,
        gradients,
        sum(size for place, size in storages.items() if place not in weights),
    )


@pytest.mark.slow
def test_embedding_and_gradients_are_the_same_and_less_is_kept():
    """Every n-th of six blocks keeps only its input, which saves about 1/n of the memory."""
    embedding, gradients, bytes_all = encoded(None)
    shares = {}
    for every in (1, 2, 3, 6):
        again, theirs, kept = encoded(every)
        assert torch.equal(again, embedding)
        assert gradients.keys() == theirs.keys()
        for name, gradient in gradients.items():
            assert float((gradient - theirs[name]).abs().max()) <= 1e-12 * float(
                gradient.abs().max()
            ), name
        shares[every] = kept / bytes_all
    assert shares[1] < 0.25
    saved = {every: (1 - share) / (1 - shares[1]) for every, share in shares.items()}
    assert saved == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 6: 1 / 6}, abs=0.02)


@pytest.mark.slow
def test_0_leaves_blocks_alone():
    model = build_model(DEEP, 0)
    checkpoint_blocks(model.image_encoder.blocks, 0)
    assert not any("forward" in vars(block) for block in model.image_encoder.blocks)
    assert encoded(0)[2] == encoded(None)[2]


@pytest.mark.parametrize(
    ("every", "which"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (4, [0, 4]), (9, [0])]
)
def test_which_blocks_recompute(every, which):
    model = build_model(DEEP, 0)
    checkpoint_blocks(model.image_encoder.blocks, every)
    assert [
        index for index, block in enumerate(model.image_encoder.blocks) if "forward" in vars(block)
    ] == which


@pytest.mark.slow
def test_checkpointing_changes_neither_weights_nor_evaluation():
    plain, run = little().build(), replace(little(), activation_checkpointing=1)
    model = run.build()
    assert all("forward" in vars(block) for block in model.image_encoder.blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    for evaluating in (torch.no_grad, torch.inference_mode):
        with evaluating():
            assert torch.equal(
                model.eval().encode(IMAGES, SIZES), plain.eval().encode(IMAGES, SIZES)
            )
