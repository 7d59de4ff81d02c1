import pytest
import torch

from gigamask.model.sizes import vit_b
from gigamask.model.start import build
from gigamask.train.muon import Muon, orthogonalise
from gigamask.train.optim import AdamW, MuonAdamW, decays, layer_of
from gigamask.train.state import freeze
from tests.little import SPEC


def test_what_decays():
    model = build(SPEC, 0)
    decayed = {name for name, p in model.named_parameters() if decays(name, p.ndim)}
    assert "image_encoder.blocks.0.attn.qkv.weight" in decayed
    assert "mask_decoder.output_upscaling.0.weight" in decayed
    for name in model.state_dict():
        if name.endswith("bias") or "norm" in name or "pos" in name or "token" in name or "embed.weight" in name or "point_embeddings" in name:
            assert name not in decayed, name


def test_learning_rate_falls_with_depth_as_in_vitdet():
    model = build(vit_b(), 0, device="meta")
    optimizer_scale = {name: 0.6 ** (13 - layer_of(name, 13)) for name, _ in model.named_parameters()}
    assert optimizer_scale["image_encoder.pos_embed"] == pytest.approx(0.6**13)
    assert optimizer_scale["image_encoder.patch_embed.proj.weight"] == pytest.approx(0.6**13)
    assert optimizer_scale["image_encoder.blocks.0.attn.rel_pos_h"] == pytest.approx(0.6**12)
    assert optimizer_scale["image_encoder.blocks.11.mlp.lin1.weight"] == pytest.approx(0.6)
    assert optimizer_scale["image_encoder.neck.0.weight"] == 1
    assert optimizer_scale["mask_decoder.iou_token.weight"] == 1


def test_groups_hold_every_parameter_once_with_its_scale():
    model = build(SPEC, 0)
    groups = AdamW(lr=1.0, weight_decay=0.1, layer_decay=0.5).build(model)[0].param_groups
    members = [p for group in groups for p in group["params"]]
    assert len(members) == len({id(p) for p in members}) == len(list(model.parameters()))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.image_encoder.pos_embed)] == 0.5**3
    assert scale[id(model.image_encoder.blocks[0].attn.qkv.weight)] == 0.5**2
    assert scale[id(model.image_encoder.blocks[1].attn.qkv.weight)] == 0.5
    assert scale[id(model.mask_decoder.mask_tokens.weight)] == 1
    assert all(group["fused"] for group in groups)


def test_frozen_parameters_are_left_out():
    model = build(SPEC, 0)
    model.image_encoder.requires_grad_(False)
    members = [p for group in AdamW().build(model)[0].param_groups for p in group["params"]]
    assert len(members) == sum(1 for p in model.parameters() if p.requires_grad) > 0
    assert isinstance(AdamW().build(model)[0], torch.optim.AdamW)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    model = build(SPEC, 0)
    muon, adamw = MuonAdamW(lr=1e-3, muon_lr=0.02, weight_decay=0.1, layer_decay=0.5).build(model)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    others = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert not matrices & others
    assert len(matrices | others) == len(list(model.parameters()))
    assert id(model.image_encoder.blocks[0].attn.qkv.weight) in matrices
    assert {id(model.mask_decoder.mask_tokens.weight), id(model.image_encoder.neck[0].weight), id(model.image_encoder.pos_embed)} <= others
    scale = {id(p): group["lr_scale"] for group in muon.param_groups for p in group["params"]}
    assert scale[id(model.image_encoder.blocks[0].attn.qkv.weight)] == pytest.approx(20 * 0.5**2)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (12, 5)])
def test_muon_is_torchs_in_float32(shape):
    """torch's own rounds every product to bf16, so equal means within a few per cent of the largest entry."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], lr=0.02, momentum=0.95)
    torchs = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1)
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        torchs.step()
    moved = (theirs - start).abs().max()
    assert (ours - theirs).abs().max() < 0.05 * moved
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(1, *shape, generator=torch.Generator().manual_seed(9)))[0])
    assert ((singular > 0.5) & (singular < 1.3)).all()


@pytest.mark.parametrize(("matrices", "kinds"), [(True, [Muon]), (False, [torch.optim.AdamW])])
def test_with_only_matrices_or_only_others_left_there_is_one_optimizer(matrices, kinds):
    model = build(SPEC, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((parameter.ndim == 2 and decays(name, 2)) == matrices)
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = MuonAdamW().build(model)
    assert list(map(type, optimizers)) == kinds
    optimizers[0].step()
    assert all(torch.equal(parameter, before[name]) != parameter.requires_grad for name, parameter in model.named_parameters())


def test_a_frozen_part_has_no_rate_and_no_decay():
    model = build(SPEC, 0)
    freeze(model, ("image_encoder", "prompt_encoder"))
    groups = [group for optimizer in MuonAdamW(layer_decay=0.5, weight_decay=0.3).build(model) for group in optimizer.param_groups]
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.mask_decoder.parameters()}
    assert {round(group["lr_scale"], 9) for group in groups} == {1.0, round(0.02 / 8e-4, 9)}, "depth counts all layers, also frozen ones"
