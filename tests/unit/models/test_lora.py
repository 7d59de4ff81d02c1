from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from gigamask.export.probe import Probe
from gigamask.models import lora
from gigamask.models.init import build_model
from gigamask.models.lora_config import LoRA
from gigamask.training.optim import select_trained
from tests.errors import error_line
from tests.little import COMPACT, SPEC, little
from tests.own_components import Pooled

ALL_FROZEN = ("image_encoder", "prompt_encoder", "mask_decoder")
DIM = SPEC.embed_dim


def adapted(config=None, **options) -> nn.Module:
    """A little model with adapters, whose outputs they change."""
    model = (config or little()).build()
    select_trained(model, ALL_FROZEN, lora=LoRA(**{"rank": 2, **options}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, lora.LowRank):
                module.lora_B.copy_(0.1 * torch.randn(module.lora_B.shape, generator=generator))
    return model.eval()


def adapters_of(model: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """The rows of each layer's adapters, by the layer's path."""
    return {
        path: [tuple(each.rows.tolist()[:2]) for each in module.parametrizations.weight]
        for path, module in model.named_modules()
        if parametrize.is_parametrized(module)
    }


def names_of(model: nn.Module) -> set[str]:
    return {path.rpartition(".")[2] for path in adapters_of(model)}


@pytest.mark.slow
def test_the_layers_of_on():
    attention = {"qkv", "proj", "q_proj", "k_proj", "v_proj", "out_proj"}
    assert names_of(adapted()) == attention
    assert names_of(adapted(on=("lin1", "qkv"))) == {"lin1", "qkv"}
    assert names_of(adapted(on=("all",))) > attention | {"lin1", "lin2"}
    parts = adapters_of(adapted(on=("q", "v")))
    assert {path.rpartition(".")[2] for path in parts} == {"qkv", "q_proj", "v_proj"}
    assert parts["image_encoder.blocks.0.attn.qkv"] == [(0, DIM), (2 * DIM, 3 * DIM)]
    assert adapters_of(adapted(on=("k",)))["image_encoder.blocks.1.attn.qkv"] == [(DIM, 2 * DIM)]


@pytest.mark.slow
def test_the_last_blocks_of_the_encoder():
    blocks = {path for path in adapters_of(adapted(last=1)) if path.startswith("image_encoder")}
    assert blocks == {"image_encoder.blocks.1.attn.qkv", "image_encoder.blocks.1.attn.proj"}
    assert not any("image_encoder" in path for path in adapters_of(adapted(last=0)))


def test_a_decoder_that_is_trained_has_no_adapters():
    model = little().build()
    select_trained(model, (), lora=LoRA(rank=2))
    assert all(path.startswith("image_encoder.") for path in adapters_of(model))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith("image_encoder.") for name in frozen)


@pytest.mark.slow
def test_new_adapters_change_nothing():
    model = little().build().eval()
    probe = Probe.from_model(model)
    before = probe.outputs(model)
    select_trained(model, ALL_FROZEN, lora=LoRA(rank=2, on=("all",)))
    for first, second in zip(before, probe.outputs(model), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("on", [("attention",), ("q", "v"), ("all",)], ids=" ".join)
def test_the_merged_model_computes_the_same_bit_for_bit(on):
    check_merged(little(), on)


def check_merged(config, on):
    model = adapted(config, on=on, alpha=3.0)
    probe = Probe.from_model(model)
    trained, base = lora.split_trained(model)
    assert set(lora.join_trained(trained, base)) == set(model.state_dict())
    plain = build_model(config.model, 1).eval()
    plain.load_state_dict(lora.merge(trained, base, "here"))
    for one, other in zip(probe.outputs(model), probe.outputs(plain), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_the_scale_is_alpha_over_the_rank():
    one, three = (adapted(alpha=alpha) for alpha in (2.0, 6.0))
    weights = [model.image_encoder.blocks[0].attn.qkv.weight for model in (one, three)]
    original = one.image_encoder.blocks[0].attn.qkv.parametrizations.weight.original
    torch.testing.assert_close(weights[1] - original, 3 * (weights[0] - original))
    assert (weights[0] != original).any()


def test_half_precision_adds_in_float32():
    model = adapted()
    layer = model.image_encoder.blocks[0].attn.qkv
    with torch.autocast("cpu", torch.bfloat16):
        weight = layer.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, layer.weight)


@pytest.mark.slow
def test_what_unfreeze_names():
    def trained(*names: str) -> set[str]:
        model = little().build()
        select_trained(model, ALL_FROZEN, names)
        return {name for name, p in model.named_parameters() if p.requires_grad}

    norms = trained("norms")
    assert "image_encoder.blocks.0.norm1.weight" in norms
    assert "image_encoder.neck.1.bias" in norms
    assert "mask_decoder.transformer.norm_final_attn.weight" in norms
    assert not any("attn.qkv" in name or "lin1" in name for name in norms)
    biases = trained("biases")
    assert "image_encoder.blocks.0.attn.qkv.bias" in biases
    assert all(name.endswith("bias") for name in biases)
    token = {"mask_decoder.iou_token.weight"}
    assert trained("mask_decoder.iou_token") == token
    assert trained("norms", "mask_decoder.iou_token") == norms | token
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for nothing in ("norms", "biases", "1"):
        with error_line(f"--unfreeze {nothing}: "):
            select_trained(plain, ["0"], [nothing])


@pytest.mark.parametrize(
    "options, found",
    [
        ({"on": ("lin3",)}, "lin3.*attention or all, or from .*lin1"),
        ({"on": ("attention", "lin3")}, "--lora.on lin3: no frozen linear layer"),
        ({"rank": 17}, "--lora 17: larger than .*16 inputs"),
    ],
)
def test_layers_and_ranks_that_there_are_not(options, found):
    with error_line(found):
        adapted(**options)


@pytest.mark.parametrize(
    "last, found",
    [(None, {"image_encoder.layers.0.linear", "image_encoder.layers.1.linear"}), (1, None)],
)
def test_the_last_blocks_of_an_encoder_that_lists_none(monkeypatch, last, found):
    monkeypatch.setattr(Pooled, "blocks", lambda self, encoder: [])
    model = replace(little(), model=replace(SPEC, encoder=Pooled())).build()
    lora_settings = LoRA(rank=2, on=("linear",), last=last)
    if found:
        select_trained(model, (), lora=lora_settings)
        assert set(adapters_of(model)) == found
        return
    with error_line("--lora.on linear: .*blocks that --lora.last counts.* from none"):
        select_trained(model, (), lora=lora_settings)


@pytest.mark.parametrize(
    "options", [{"rank": -1}, {"alpha": 0.0}, {"alpha": float("nan")}, {"on": ()}, {"last": -1}]
)
def test_settings_that_are_refused(options):
    with error_line(r"^--lora"):
        LoRA(**{"rank": 2, **options})


@pytest.mark.slow
def test_adapters_for_other_weights_are_refused():
    trained, _ = lora.split_trained(adapted())
    other = build_model(COMPACT, 0).state_dict()
    with error_line("weights they were trained on"):
        lora.merge(trained, other, "here")
