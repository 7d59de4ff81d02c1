"""`--lora`: adapters are trained, saved alone, resumed exactly, and merged wherever weights are
read.
"""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gigamask.models import state_dict
from gigamask.models.init import build_model
from gigamask.models.lora_config import LoRA
from gigamask.models.manifest import BASE, MODEL, newest
from gigamask.models.sam.sam import Sam
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData, open_index
from tests.commands import LITTLE, invoke, refusal
from tests.errors import error_line
from tests.journeys.runs import CONSTANT_LR, same
from tests.little import SPEC, little

FROZEN = ("image_encoder", "prompt_encoder", "mask_decoder")


@pytest.fixture(scope="module")
def command(scenes, weights) -> str:
    """A training of the little model from weights, without its folder."""
    rate = " ".join(CONSTANT_LR)
    return f"train {LITTLE} --data {scenes} --init {weights} --save-every 1 {rate} --out"


@pytest.fixture(scope="module")
def run(command, tmp_path_factory) -> Path:
    """Three steps of adapters alone."""
    out = tmp_path_factory.mktemp("runs") / "lora"
    lora = "--lora 2 --lora.on q v --steps 3 --freeze"
    invoke(command, out, lora, *FROZEN)
    return out


def test_a_checkpoint_holds_the_adapters_alone(run, weights):
    names = set(load_file(newest(run) / MODEL))
    assert all("parametrizations.weight." in name for name in names)
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B", "scale", "rows"}
    base = load_file(run / "checkpoints" / BASE)
    first, _ = state_dict.read_weights(weights)
    assert base.keys() == first.keys()
    assert all(torch.equal(base[name], first[name]) for name in base)


def test_the_run_is_read_as_a_model_without_adapters(run, weights):
    merged, config = state_dict.read_weights(run)
    first, _ = state_dict.read_weights(weights)
    assert config.depth == SPEC.depth
    assert merged.keys() == first.keys()
    changed = {name for name in first if not torch.equal(first[name], merged[name])}
    assert changed
    assert all(name.endswith(("qkv.weight", "q_proj.weight", "v_proj.weight")) for name in changed)
    layer = merged["image_encoder.blocks.0.attn.qkv.weight"].chunk(3)
    before = first["image_encoder.blocks.0.attn.qkv.weight"].chunk(3)
    assert [torch.equal(a, b) for a, b in zip(layer, before, strict=True)] == [False, True, False]


@pytest.mark.long
def test_resumed_training_is_the_same_bit_for_bit(command, tmp_path):
    words = "--lora 2 --lora.alpha 4 --unfreeze norms --ema 0.5"
    invoke(command, tmp_path / "whole", words, "--steps 4")
    invoke(command, tmp_path / "parts", words, "--steps 2")
    invoke(f"train --resume {tmp_path}/parts --steps 4")
    assert same(tmp_path / "whole", tmp_path / "parts")
    one, other = (Sam.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.long
def test_two_processes_train_as_one(command, tmp_path):
    words = "--lora 2 --ema 0.5 --steps 2 --batch-size 4"
    for processes in (1, 2):
        out = tmp_path / str(processes)
        invoke(command, out, words, f"--processes {processes}")
    one, two = (state_dict.read_weights(tmp_path / name)[0] for name in ("1", "2"))
    for name, tensor in one.items():
        if not name.endswith("k_proj.bias"):  # it changes no output: its gradients are rounding
            torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_are_those_of_the_whole_weight(scenes, tmp_path):
    """The chain rule: those of `B A` follow from that of the weight they are added to."""
    config = replace(
        little(), data=(str(scenes),), out=str(tmp_path), freeze=FROZEN, batch_size=2, seed=1
    )
    index = open_index(config)
    (batch,) = next(TrainData(config, index).batches())
    batch = replace(batch, weights=batch.weights.double())
    adapted = TrainState.from_model(
        build_model(SPEC, 3).double(), replace(config, lora=LoRA(rank=3, alpha=6.0))
    ).model
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=chance))
    whole = TrainState.from_model(build_model(SPEC, 3).double(), replace(config, freeze=())).model
    layers = {
        path: module for path, module in adapted.named_modules() if hasattr(module, "original")
    }
    for path in layers:
        layer = path.partition(".parametrizations")[0]
        whole.get_submodule(layer).weight.data = adapted.get_submodule(layer).weight.detach()
    task = config.task(torch.device("cpu"))
    for model in (adapted, whole):
        model.train()
        totals = StepMetrics.zero(2, torch.zeros(0, dtype=torch.float64))
        accumulate(task, model, batch, totals)
    for path, module in layers.items():
        gradient = whole.get_submodule(path.partition(".parametrizations")[0]).weight.grad
        (adapter,) = [each for each in module if hasattr(each, "lora_A")]
        scale = 2.0
        expected = {
            "lora_A": scale * adapter.lora_B.T @ gradient,
            "lora_B": scale * gradient @ adapter.lora_A.T,
        }
        for name, value in expected.items():
            torch.testing.assert_close(
                getattr(adapter, name).grad, value, rtol=1e-10, atol=1e-12, msg=f"{path} {name}"
            )


@pytest.mark.parametrize(
    "words, found",
    [
        ("--lora 2 --embedding-cache cache", "--embedding-cache .*--lora 2"),
        ("--unfreeze norms --embedding-cache cache", "--embedding-cache .*norms"),
        ("--lora 2 --parallel fsdp", "--parallel fsdp.*--lora"),
    ],
)
def test_what_cannot_be_adapted_is_one_line(words, found, command, tmp_path, capsys):
    line = refusal(capsys, command, tmp_path / "run", words)
    assert re.search(found, line), line
    assert not (tmp_path / "run").exists()


def test_a_damaged_or_missing_base_is_found(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved, symlinks=True)
    base = moved / "checkpoints" / BASE
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    damaged = "checkpoints are damaged"
    with error_line(damaged), pytest.warns(UserWarning, match=f"{BASE}: damaged"):
        state_dict.read_weights(moved)
    base.unlink()
    with error_line(damaged), pytest.warns(UserWarning, match=f"{BASE}: listed"):
        state_dict.read_weights(moved)


@pytest.mark.long
def test_the_plan_counts_adapters_alone(capsys, tmp_path):
    few = "--micro-batch-size 1 --prompts.clicks 0 --prompts.no-mask-only-rounds"
    words = f"plan finetune --freeze {' '.join(FROZEN)} {few}"
    plans = {}
    for rank in (0, 8):
        path = tmp_path / f"{rank}.json"
        freeze = "" if rank else "--freeze"
        invoke(words, freeze, f"--lora {rank} --json {path}")
        plans[rank] = json.loads(path.read_text())
    attention = 12 * 8 * ((768 + 2304) + 2 * 768)
    decoder = 2 * 8 * (4 * 512 + 2 * 4 * 384) + 8 * 4 * 384
    assert plans[8]["trained"] == attention + decoder
    assert plans[8]["peak_bytes"] < 0.8 * plans[0]["peak_bytes"]
    assert math.isclose(plans[8]["parameters"], plans[0]["parameters"], rel_tol=0.01)


@pytest.mark.long
def test_fit_chooses_what_fits_and_says_so(command, tmp_path, capsys):
    out = tmp_path / "run"
    invoke(command, out, "--fit 1GB --steps 1")
    assert "--fit 1GB: fits as it is" in capsys.readouterr().out
    for words, message in {
        "1MB": "--fit 1MB: leaves 0.00093 GiB, but a step needs",
        "much": "--fit much: expected a size",
        "8GB --stages joint": "leave --stages out",
    }.items():
        assert message in refusal(capsys, command, f"{tmp_path}/small --fit {words}")
    assert not (tmp_path / "small").exists()
    invoke(f"plan {LITTLE} --fit 1GB")
    assert "\n--fit 1GB: fits as it is\n" in capsys.readouterr().out
    line = refusal(capsys, "plan mae_tiny --fit 8GB")
    assert "--fit 8GB is for recipes of gigamask train" in line
