import importlib.util
from dataclasses import replace

import pytest
import torch

from gigamask.models.init import build_model
from gigamask.training.muon import Muon, newton_schulz
from gigamask.training.optim import AdamW, AdamW8bit, MuonAdamW, has_weight_decay, select_trained
from gigamask.training.trainer import train
from tests.errors import error_line
from tests.laws.test_training import run_in, same
from tests.little import SPEC


def scales(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """The scale of each parameter by its id."""
    return {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}


def test_what_decays():
    model = build_model(SPEC, 0)
    for name, p in model.named_parameters():
        exempt = p.ndim == 1 or any(
            part in name
            for part in ("pos_embed", "rel_pos", "iou_token", "mask_tokens", "point_embeddings")
        )
        exempt |= name.startswith("prompt_encoder.no")
        assert has_weight_decay(name, p.ndim) != exempt, name


def test_groups_hold_every_parameter_once_with_its_scale():
    model = build_model(SPEC, 0)
    [optimizer] = AdamW(lr=1.0, weight_decay=0.1, layer_decay=0.5).build(model)
    groups, scale = optimizer.param_groups, scales(optimizer)
    members = [p for group in groups for p in group["params"]]
    assert len(members) == len(scale) == len(list(model.parameters()))
    assert scale[id(model.image_encoder.pos_embed)] == 0.5**3
    assert scale[id(model.image_encoder.blocks[0].attn.qkv.weight)] == 0.5**2
    assert scale[id(model.image_encoder.blocks[1].attn.qkv.weight)] == 0.5
    assert scale[id(model.mask_decoder.mask_tokens.weight)] == 1
    assert all(group["fused"] for group in groups)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    model = build_model(SPEC, 0)
    muon, adamw = MuonAdamW(lr=1e-3, muon_lr=0.02, weight_decay=0.1, layer_decay=0.5).build(model)
    matrices, others = scales(muon), scales(adamw).keys()
    assert not matrices.keys() & others
    assert len(matrices.keys() | others) == len(list(model.parameters()))
    assert {
        id(model.mask_decoder.transformer.final_attn_token_to_image.q_proj.weight),
        id(model.mask_decoder.mask_tokens.weight),
        id(model.image_encoder.neck[0].weight),
        id(model.image_encoder.pos_embed),
    } <= others
    own = 5.0
    assert matrices[id(model.image_encoder.blocks[0].attn.qkv.weight)] == pytest.approx(own)


def test_muon_takes_kernels_on_request():
    model = build_model(SPEC, 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def taken(**options) -> set[str]:
        return {names[each] for each in scales(MuonAdamW(**options).build(model)[0])}

    assert taken(muon_kernels=True) - taken() == {
        "image_encoder.patch_embed.proj.weight",
        "image_encoder.neck.0.weight",
        "image_encoder.neck.2.weight",
        "mask_decoder.output_upscaling.0.weight",
        "mask_decoder.output_upscaling.3.weight",
        *(f"prompt_encoder.mask_downscaling.{layer}.weight" for layer in (0, 3, 6)),
    }, "no position embedding, though it has four dimensions"
    thin = torch.nn.Sequential(torch.nn.Conv2d(3, 1, 3), torch.nn.Conv2d(1, 6, 1))
    assert [type(each) for each in MuonAdamW(muon_kernels=True).build(thin)] == [torch.optim.AdamW]


@pytest.mark.parametrize("shape", [(8, 3, 2, 2), (5, 1, 2, 2), (12, 2, 2, 1)])
def test_muon_updates_a_kernel_as_its_flattened_matrix(shape):
    draw = torch.Generator().manual_seed(0)
    kernels = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for _ in range(2)]
    matrices = [torch.nn.Parameter(kernel.detach().flatten(1).clone()) for kernel in kernels]
    optimizers = [
        Muon([{"params": each, "weight_decay": 0.1}], lr=0.02, momentum=0.95)
        for each in (kernels, matrices)
    ]
    for _ in range(3):
        for kernel, matrix in zip(kernels, matrices, strict=True):
            kernel.grad = torch.randn(shape, generator=draw)
            matrix.grad = kernel.grad.flatten(1).clone()
        for optimizer in optimizers:
            optimizer.step()
    for kernel, matrix in zip(kernels, matrices, strict=True):
        assert torch.equal(kernel.flatten(1), matrix)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (12, 5)])
def test_muon_is_torchs_in_float32(shape):
    """torch's own rounds to bf16: equal within a few per cent of the largest entry."""
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
    singular = torch.linalg.svdvals(
        newton_schulz(torch.randn(1, *shape, generator=torch.Generator().manual_seed(9)))[0]
    )
    assert ((singular > 0.5) & (singular < 1.3)).all()


def test_muon_skips_parameters_without_a_gradient():
    """As PyTorch's optimizers do; the updates of the others must not shift to another matrix."""
    start = [torch.full((3, 4), float(value)) for value in (1, 2, 3)]
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def after_step(gradients):
        parameters = [torch.nn.Parameter(each.clone()) for each in start]
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = each
        optimizer = Muon([{"params": parameters, "weight_decay": 0.1}], lr=0.02, momentum=0.95)
        optimizer.step()
        return parameters, optimizer

    parameters, optimizer = after_step([None, gradient.clone(), None])
    everywhere, _ = after_step([gradient.clone() for _ in start])
    assert torch.equal(parameters[1], everywhere[1])
    assert torch.equal(parameters[0], start[0])
    assert torch.equal(parameters[2], start[2])
    assert set(optimizer.state) == {parameters[1]}
    after_step([None, None, None])


@pytest.mark.parametrize("matrices, kinds", [(True, [Muon]), (False, [torch.optim.AdamW])])
def test_with_only_matrices_or_only_others_left_there_is_one_optimizer(matrices, kinds):
    model = build_model(SPEC, 0)
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and has_weight_decay(name, 2) and "_attn_" not in name
        parameter.requires_grad_(is_matrix == matrices)
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers = MuonAdamW().build(model)
    assert list(map(type, optimizers)) == kinds
    optimizers[0].step()
    assert all(
        torch.equal(parameter, before[name]) != parameter.requires_grad
        for name, parameter in model.named_parameters()
    )


def test_a_frozen_part_has_no_rate_and_no_decay():
    model = build_model(SPEC, 0)
    select_trained(model, ("image_encoder", "prompt_encoder"))
    muon, adamw = MuonAdamW(layer_decay=0.5, weight_decay=0.3).build(model)
    found = scales(muon) | scales(adamw)
    assert found.keys() == {id(p) for p in model.mask_decoder.parameters()}
    assert {round(scale, 9) for scale in found.values()} == {1.0, round(0.02 / 8e-4, 9)}, (
        "depth counts all layers, also frozen ones"
    )


def updated(optimizer, steps: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """Returns a layer of 65,536 weights after some steps on the same random gradients."""
    layer, chance = torch.nn.Linear(256, 256), torch.Generator().manual_seed(0)
    torch.nn.init.zeros_(layer.weight)
    (built,) = optimizer.build(layer)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=chance)
        built.step()
    return layer, built


@pytest.mark.slow
def test_eight_bits_hold_the_moments_in_a_quarter_and_move_as_adamw_does():
    (ours, built), (theirs, _) = (
        updated(kind(lr=1e-3, weight_decay=0.0), 20) for kind in (AdamW8bit, AdamW)
    )
    for parameter in ours.parameters():
        held = sum(
            value.nbytes
            for key, value in built.state[parameter].items()
            if torch.is_tensor(value) and not key.startswith("qmap")
        )
        assert held == AdamW8bit().state_bytes(parameter.numel())
    assert AdamW8bit().state_bytes(ours.weight.numel()) < 2.1 * ours.weight.numel()
    apart = (ours.weight - theirs.weight).detach().norm() / theirs.weight.detach().norm()
    assert float(apart) < 0.05


@pytest.mark.long
def test_a_training_in_eight_bits_goes_on_bit_for_bit(tmp_path, scenes):
    """At this width the neck's 3 x 3 kernel is large enough for 8 bits, most others are not."""
    parts = {
        "model": replace(SPEC, embedding_dim=32),
        "optimizer": AdamW8bit(lr=1e-3),
        "save_every": 3,
    }
    whole = train(run_in(tmp_path / "whole", scenes, steps=6, **parts))
    kinds = {key.partition("/")[0] for key in whole.optimizer_tensors()}
    assert {"state1", "state2", "qmap1", "absmax1", "step"} <= kinds
    run = run_in(tmp_path / "again", scenes, steps=3, **parts)
    train(run)
    assert same(whole, train(replace(run, steps=6)))


def test_eight_bits_want_bitsandbytes(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with error_line(r"^--optimizer adamw8bit.*gigamask\[quant\]"):
        AdamW8bit().build(build_model(SPEC, 0))


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"lr": -1.0}, r"^lr must be > 0 and finite \(got -1.0\)$"),
        ({"lr": float("nan")}, r"^lr must be > 0 and finite \(got nan\)$"),
        ({"lr": 0.0}, r"^lr must be > 0 .*0\.0"),
        ({"layer_decay": 0.0}, r"^layer_decay must be > 0 .*0\.0"),
        ({"grad_clip": -1.0}, r"^grad_clip.*-1\.0"),
        ({"weight_decay": -0.1}, r"^weight_decay must be at least 0 \(got -0.1\)$"),
        ({"encoder_lr_scale": -1.0}, r"^encoder_lr_scale must be at least 0 \(got -1.0\)$"),
        ({"betas": (0.9, 1.0)}, r"^betas must be between 0 and 0.999999999\d* \(got 1.0\)$"),
        ({"muon_lr": 0.0}, r"^muon_lr must be > 0 .*0\.0"),
        ({"momentum": 1.0}, r"^momentum must be between 0 and .* \(got 1.0\)$"),
    ],
)
def test_numbers_that_no_optimizer_takes_are_refused(numbers, message):
    with error_line(message):
        MuonAdamW(**numbers)
    assert AdamW(lr=0.0).lr == 0  # a step that changes nothing
