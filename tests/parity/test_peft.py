"""Adapters in peft's format: peft merges what we write, and we merge what peft writes."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import SamModel

from gigamask.cli.main import main
from gigamask.errors import GigamaskError
from gigamask.export.huggingface import huggingface_outputs
from gigamask.export.probe import Probe, compare
from gigamask.models import peft_files, state_dict
from gigamask.models.sam.sam import Sam
from tests.little import SPEC

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"


def trained(out: Path, scenes, weights, *words: str) -> Path:
    """A run with adapters, whose export is in the folder beside it."""
    given = ["--data", str(scenes), "--init", str(weights), "--steps", "2", "--lora", "2", *words]
    assert main(["train", LITTLE, *given, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--lora.on", "q", "v", "--lora.alpha", "3"],
        ["--lora.on", "q", "lin1", "--freeze", "prompt_encoder", "mask_decoder"],
        ["--freeze", "prompt_encoder", "mask_decoder", "--unfreeze", "norms"],
    ],
    ids=" ".join,
)
def test_peft_computes_what_the_run_computes(words, scenes, weights, tmp_path):
    run, out = trained(tmp_path / "run", scenes, weights, *words), tmp_path / "adapters"
    assert main(["export", str(run), "--to", "peft", "--out", str(out)]) == 0
    ours, probe = Sam.from_pretrained(run), Probe.from_config(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(SamModel.from_pretrained(weights), out).eval()
    for layer in theirs.get_base_model().mask_decoder.transformer.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            layer.eps = 1e-5  # as Meta's
    outputs = huggingface_outputs(theirs.get_base_model(), ours, probe)
    for mine, other in zip(probe.outputs(ours), outputs, strict=True):
        compare(mine, other, "peft", 1e-5)
    first = probe.outputs(Sam.from_pretrained(weights))
    assert not torch.equal(first[0]["embedding"], outputs[0]["embedding"])
    read = Sam.from_pretrained(out)
    for mine, other in zip(probe.outputs(ours), probe.outputs(read), strict=True):
        compare(mine, other, "the folder", 1e-5)


@pytest.fixture
def written(weights, tmp_path) -> Path:
    """Adapters that peft has written, with one rank and scale of their own."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["qkv", "q_proj"],
        rank_pattern={"layers.1.attn.qkv": 2},
        alpha_pattern={"layers.1.attn.qkv": 6},
        init_lora_weights=False,
        modules_to_save=["iou_token"],
    )
    model = get_peft_model(SamModel.from_pretrained(weights), config)
    model.save_pretrained(tmp_path / "adapters")
    model.eval().merge_and_unload().save_pretrained(tmp_path / "merged")
    return tmp_path / "adapters"


def test_what_peft_writes_is_merged_as_peft_does(written):
    ours, _ = state_dict.read_weights(written)
    theirs, _ = state_dict.read_weights(written.parent / "merged")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def changed(folder: Path, **entries: object) -> Path:
    path = folder / peft_files.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "nowhere/at/all"}, "'nowhere/at/all' is no model"),
        ({"peft_type": "LOHA"}, "only LoRA"),
        ({"use_dora": True}, "only LoRA"),
        ({"r": "four"}, "not the config of LoRA"),
        ({"r": 0}, "only LoRA"),
    ],
)
def test_configs_that_are_refused(written, entries, found):
    with pytest.raises(GigamaskError, match=found):
        state_dict.read_weights(changed(written, **entries))


def test_a_folder_that_names_itself_is_refused(written):
    with pytest.raises(GigamaskError, match="is no model"):
        state_dict.read_weights(changed(written, base_model_name_or_path=str(written)))


def test_files_that_are_refused(written):
    path = written / peft_files.WEIGHTS
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("layers.0.attn.qkv.lora_A.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(GigamaskError, match="lacks lora_A or lora_B"):
        state_dict.read_weights(written)
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, path)
    with pytest.raises(GigamaskError, match="adapters for other weights"):
        state_dict.read_weights(written)
    pair = name, name.replace("lora_A", "lora_B")
    more = {each.replace("layers.0", "layers.7"): tensors[each].clone() for each in pair}
    save_file(tensors | more, path)
    with pytest.raises(GigamaskError, match="adapters for other weights"):
        state_dict.read_weights(written)
    path.unlink()
    with pytest.raises(GigamaskError, match="holds no adapter_model"):
        state_dict.read_weights(written)


def test_only_adapters_can_be_exported(weights, scenes, tmp_path, capsys):
    out = ["--to", "peft", "--out", str(tmp_path / "out")]
    assert main(["export", str(weights), *out]) == 2
    assert "holds no adapters" in capsys.readouterr().err
    words = ["--freeze", "prompt_encoder", "mask_decoder"]
    unfreeze = ["--unfreeze", "image_encoder.pos_embed"]
    run = trained(tmp_path / "run", scenes, weights, *words, *unfreeze)
    capsys.readouterr()
    assert main(["export", str(run), *out]) == 2
    assert "vision_encoder beside its layers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
