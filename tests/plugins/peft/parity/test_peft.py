"""Adapters in peft's format: peft merges what we write, and we merge what peft writes."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import SamModel

from gigamask.export.huggingface import huggingface_outputs
from gigamask.export.probe import Probe, compare
from gigamask.models import convert, state_dict
from gigamask.models.sam.sam import Sam
from gigamask.plugins.peft import folders
from tests.commands import invoke, refusal
from tests.errors import error_line

LITTLE = f"{Path(__file__).resolve().parents[3] / 'little.py'}:little"


def trained(out: Path, scenes, weights, *words: str) -> Path:
    """A run with adapters, whose export is in the folder beside it."""
    given = ["--data", str(scenes), "--init", str(weights), "--steps", "2", "--lora", "2", *words]
    invoke("train", LITTLE, *given, "--out", out)
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
    invoke("export", run, "--to", "peft", "--out", out)
    ours = Sam.from_pretrained(run)
    probe = Probe.from_model(ours)
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


RANKS: list[dict] = [
    {},
    {r"layers\.\d\.attn\.qkv": 2},
    {"proj": 6, ".*": 2},
    {r".*layers\.1\..*": 2, "qkv": 6},
]
ALPHAS: list[dict] = [
    {},
    {"layers.1.attn.qkv": 6},
    {r"^vision_encoder\.layers\.0\.attn\.(qkv|proj)": 64},
    {r".*qkv": 3, r"layers\.1\.attn\.qkv": 99},
    {r"layers\.1\.attn\.qkv": 99, "qkv": -3, "qkv|proj": 0},
]
OTHERS: list[dict] = [
    {},
    {"use_rslora": True, "target_modules": "all-linear"},
    {"target_modules": r"vision_encoder\.layers\.[01]\.attn\.(qkv|proj)", "fan_in_fan_out": True},
    {"exclude_modules": ["proj"], "bias": "all"},
    {"exclude_modules": r"vision.*1\..*", "init_lora_weights": "orthogonal", "use_rslora": True},
    {"layers_to_transform": [1], "layers_pattern": "layers", "init_lora_weights": "gaussian"},
    {"layers_to_transform": 0, "bias": "lora_only", "modules_to_save": ["iou_token", "neck"]},
]
CONFIGS = [
    {"rank_pattern": RANKS[i % 4], "alpha_pattern": ALPHAS[i % 5], **OTHERS[i % 7]}
    for i in range(14)
]


def test_every_configuration_is_merged_as_peft_does(weights, tmp_path, record_property):
    pytest.importorskip("peft", minversion="0.21", reason="peft merged patterns otherwise")
    warnings.simplefilter("ignore")
    for number, entries in enumerate(CONFIGS):
        torch.manual_seed(number)
        config = LoraConfig(
            **{"r": 4, "lora_alpha": 8, "target_modules": ["qkv", "proj"]} | entries
        )
        model = get_peft_model(SamModel.from_pretrained(weights), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter)
        model.save_pretrained(tmp_path / str(number))
        merged = dict(model.merge_and_unload().state_dict())
        theirs = convert.from_huggingface(merged)
        ours, _ = state_dict.read_weights(tmp_path / str(number))
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5, msg=str(entries))
    record_property("tried", len(CONFIGS))


def changed(folder: Path, **entries: object) -> Path:
    path = folder / folders.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


@pytest.mark.parametrize(
    "entries, found",
    [
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "nowhere/at/all"}, "'nowhere/at/all' is no model"),
        ({"r": 5}, "rank 5 of .*, whose lora_A has 4"),
        ({"target_modules": ["q_proj"]}, "adapter of .*attn.qkv, which target_modules"),
        ({"target_modules": ["qkv", "q_proj", "lin1"]}, "target_modules has .*lin1"),
        ({"exclude_modules": ["qkv"]}, "adapter of .*attn.qkv, which target_modules"),
        ({"layers_to_transform": [0]}, "adapter of .*q_proj, which target_modules"),
        ({"modules_to_save": ["neck"]}, "modules_to_save has neck"),
    ],
)
def test_configs_that_are_refused(written, entries, found):
    with error_line(found):
        state_dict.read_weights(changed(written, **entries))


def test_a_folder_that_names_itself_is_refused(written):
    with error_line("is no model"):
        state_dict.read_weights(changed(written, base_model_name_or_path=str(written)))


def test_files_that_are_refused(written):
    path = written / folders.WEIGHTS
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("layers.0.attn.qkv.lora_A.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with error_line("lacks lora_A or lora_B"):
        state_dict.read_weights(written)
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, path)
    with error_line("adapters for other weights"):
        state_dict.read_weights(written)
    pair = name, name.replace("lora_A", "lora_B")
    more = {each.replace("layers.0", "layers.7"): tensors[each].clone() for each in pair}
    save_file(tensors | more, path)
    with error_line("adapters for other weights"):
        state_dict.read_weights(written)
    twice = name.replace(".lora_A.weight", ".lora_A.default.weight")
    save_file(tensors | {twice: tensors[name].clone()}, path)
    with error_line(r"qkv\.lora_A\.weight twice"):
        state_dict.read_weights(written)
    magnitude = name.replace("lora_A.weight", "lora_magnitude_vector")
    save_file(tensors | {magnitude: torch.ones(48)}, path)
    with error_line("lora_magnitude_vector of shape"):
        state_dict.read_weights(written)
    path.unlink()
    with error_line("holds no adapter_model"):
        state_dict.read_weights(written)


def test_only_adapters_can_be_exported(weights, scenes, tmp_path, capsys):
    out = ["--to", "peft", "--out", str(tmp_path / "out")]
    assert "holds no adapters" in refusal(capsys, "export", weights, *out)
    words = ["--freeze", "prompt_encoder", "mask_decoder"]
    unfreeze = ["--unfreeze", "image_encoder.pos_embed"]
    run = trained(tmp_path / "run", scenes, weights, *words, *unfreeze)
    capsys.readouterr()
    assert "vision_encoder beside its layers" in refusal(capsys, "export", run, *out)
    assert not (tmp_path / "out").exists()
