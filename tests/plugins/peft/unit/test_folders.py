"""Folders of adapters of the Hugging Face Hub."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.plugins.peft import folders
from gigamask.plugins.peft.exporter import write_peft
from gigamask.plugins.peft.formats import PEFT
from tests.errors import error_line
from tests.little import SPEC
from tests.servers import Hub
from tests.unit.models.test_pretrained import load_in_a_process


@pytest.mark.long
def test_adapters_of_the_hub_are_merged_into_the_weights_they_name(tmp_path):
    weights, adapters = tmp_path / "hub/us/sam/v1", tmp_path / "hub/us/adapters/main"
    weights.mkdir(parents=True)
    adapters.mkdir(parents=True)
    model = build_model(replace(SPEC, decoder_num_heads=4), 9)
    model.save_pretrained(weights)
    write_adapters(adapters, model, "hf:us/sam@v1")
    with Hub(tmp_path / "hub") as hub:
        assert load_in_a_process(tmp_path, "us/adapters", HF_ENDPOINT=hub.endpoint) == []
    merged = Sam.from_pretrained(tmp_path / "saved0").state_dict()
    changed = {name for name, value in model.state_dict().items() if (value != merged[name]).any()}
    assert changed == {"image_encoder.blocks.0.attn.qkv.weight"}
    assert load_in_a_process(tmp_path, "us/adapters", HF_ENDPOINT=hub.endpoint) == []


def test_the_model_card_says_how_adapters_are_loaded():
    loading = PEFT.loading.format(base="facebook/sam-vit-base", name="us/mine")
    assert 'from_pretrained("facebook/sam-vit-base"), "us/mine")' in loading


def test_adapters_for_another_image_size_are_refused(tmp_path):
    model = build_model(replace(SPEC, decoder_num_heads=4), 9)
    model.save_pretrained(tmp_path / "base")
    larger, file = build_model(replace(model.config, image_size=96), 9), tmp_path / "a.safetensors"
    save_file(adapters_of(model), file)
    with error_line("huggingface.*base with the adapters .*pos_embed of shape"):
        write_peft(larger, tmp_path / "out", str(file), str(tmp_path / "base"))


def adapters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return an adapter of one layer, as a run stores it."""
    layer = "image_encoder.blocks.0.attn.qkv"
    rows = model.get_submodule(layer).weight.shape
    prefix = f"{layer}.parametrizations.weight.0"
    return {
        f"{prefix}.lora_A": torch.ones(2, rows[1]),
        f"{prefix}.lora_B": torch.ones(rows[0], 2),
        f"{prefix}.scale": torch.tensor(0.5),
        f"{prefix}.rows": torch.tensor([0, rows[0], rows[0]]),
    }


def write_adapters(folder: Path, model: torch.nn.Module, base: str) -> None:
    """Write a folder of peft with an adapter of one layer."""
    tensors, config = folders.to_peft(adapters_of(model), "here")
    save_file(tensors, folder / folders.WEIGHTS)
    config["base_model_name_or_path"] = base
    (folder / folders.CONFIG).write_text(json.dumps(config))
