"""Backbones of transformers as image encoders: their features, weights, training and files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoBackbone, AutoConfig, AutoModel

from gigamask import config_files, load_model
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.lora_config import LoRA
from gigamask.models.weight_files import read_safetensors, save_weights
from gigamask.pixels import PixelConfig
from gigamask.plugins.encoders.backbone import blocks_of, count_blocks, feature_shapes
from gigamask.plugins.encoders.configs import HuggingFaceBackbone
from gigamask.registry import make_component
from gigamask.training.optim import AdamW, has_weight_decay, layer_ids, select_trained
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.errors import error_line
from tests.laws.test_small_encoders import run_commands, sharded_training
from tests.laws.test_training import same
from tests.little import SPEC, little
from tests.ranks import fork

VIT = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
STAGES = {"embed_dim": 8, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 4, 8]}
CONVOLUTIONS = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}
BACKBONES = {
    "dinov2": VIT | {"image_size": 32, "mlp_ratio": 2},
    "dinov3_vit": VIT | {"image_size": 64, "intermediate_size": 32},
    "hiera": STAGES | {"image_size": [64, 64], "depths": [1, 1, 1, 1]},
    "swin": STAGES | {"image_size": 64, "window_size": 4},
    "convnext": CONVOLUTIONS,
    "resnet": CONVOLUTIONS | {"embedding_size": 8},
}
COUNTS = {"dinov2": 3, "dinov3_vit": 3, "hiera": 4, "swin": 5, "convnext": 5, "resnet": 4}
MEAN, STD = (127.5, 102.0, 76.5), (63.75, 51.0, 38.25)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder with each backbone, of random weights."""
    found = {}
    for number, (kind, sizes) in enumerate(BACKBONES.items()):
        torch.manual_seed(number)
        found[kind] = tmp_path_factory.mktemp(kind)
        AutoBackbone.from_config(CONFIG_MAPPING[kind](**sizes)).save_pretrained(found[kind])
        scale = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.2, 0.15]}
        (found[kind] / "preprocessor_config.json").write_text(json.dumps(scale))
    return found


def theirs(folder: Path, **changes) -> torch.nn.Module:
    """Return transformers' own backbone with its weights."""
    config = AutoConfig.from_pretrained(str(folder), **changes)
    return type(AutoBackbone.from_config(config)).from_pretrained(str(folder), config=config).eval()


@pytest.fixture(params=BACKBONES)
def kind(request) -> str:
    return request.param


def spec_with(folder: Path, **fields) -> SamConfig:
    return replace(SPEC, encoder=HuggingFaceBackbone(str(folder), **fields), drop_path_rate=0.0)


def case(out: Path, scenes: Path, folder: Path, **changes):
    changes = {"steps": 4, "save_every": 2, "optimizer": AdamW(layer_decay=0.8)} | changes
    spec = replace(spec_with(folder), drop_path_rate=changes.pop("drop_path_rate", 0.0))
    run = replace(little(), out=str(out), data=(str(scenes),), model=spec, **changes)
    config_files.save_config(run)
    return run


def pictures(count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(256, (count, 3, 64, 64), generator=generator, dtype=torch.uint8)
    return images, torch.tensor([[64, 64], [40, 64]])[:count]


def test_the_embedding_is_made_of_transformers_own_features(kind, folders):
    """By its weights and its normalization; the neck adds all feature maps at stride 8."""
    spec = spec_with(folders[kind])
    model = build_model(spec, 0).eval()
    spec.encoder.load_pretrained(model.image_encoder)
    encoder = model.image_encoder
    stages, shapes = feature_shapes(spec.encoder.architecture, 64)
    assert len(stages) == (1 if kind.startswith("dino") else 4)
    backbone = theirs(folders[kind], out_features=list(stages))
    images, sizes = pictures()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    pixels = (images - mean) / std
    pixels[1, :, 40:] = 0
    with torch.no_grad():
        maps = backbone(pixels).feature_maps
        assert [each.shape[1:3] for each in maps] == [torch.Size(shape) for shape in shapes]
        joined = torch.zeros(())
        for lateral, each in zip(encoder.laterals, maps, strict=True):
            down = max(1, each.shape[-1] // 8)
            each = torch.nn.functional.avg_pool2d(lateral(each), down)
            if each.shape[-1] < 8:
                each = torch.nn.functional.interpolate(each, (8, 8), mode="bilinear")
            joined = joined + each
        expected = encoder.neck(joined)
        torch.testing.assert_close(model.encode(images, sizes), expected, rtol=1e-5, atol=1e-5)


def test_a_given_pixel_scale_stays(folders):
    given = HuggingFaceBackbone(str(folders["dinov2"]), pixel_mean=(1.0, 2.0, 3.0))
    assert given.pixel_scale == ((1.0, 2.0, 3.0), STD)


def test_blocks_are_found_in_order_and_decay_by_depth(kind, folders):
    spec = spec_with(folders[kind])
    model = build_model(spec, 0)
    blocks = model.encoder_blocks
    assert len(blocks) == COUNTS[kind] == count_blocks(spec.encoder.architecture)
    layers = layer_ids(model, blocks)
    names = {id(each): name for name, each in model.named_modules()}
    for depth, block in enumerate(blocks, 1):
        inside = [f"{names[id(block)]}.{name}" for name, _ in block.named_parameters()]
        assert {layers[name] for name in inside} == {depth}
    stem = {name for name, depth in layers.items() if depth == 0}
    assert stem, "what precedes the blocks"
    assert all("embed" in name for name in stem)
    behind = {layers[name] for name in layers if "neck" in name or "lateral" in name}
    assert behind == {len(blocks) + 1}


def test_positions_and_tokens_have_no_weight_decay(folders):
    free = ("cls_token", "position_embeddings", "register_tokens", "relative_position_bias_table")
    seen = set()
    for folder in folders.values():
        for name, parameter in build_model(spec_with(folder), 0).named_parameters():
            if name.endswith(free):
                seen.add(name.rpartition(".")[2])
                assert not has_weight_decay(name, parameter.ndim), name
    assert seen == set(free)


def test_drop_path_skips_whole_blocks(folders):
    """Uniform numbers of 0 skip every block but the first, whose rate is 0."""
    spec = replace(spec_with(folders["dinov2"]), drop_path_rate=0.5)
    assert spec.encoder.drop_path_blocks(spec) == 3
    encoder = build_model(spec, 0).image_encoder.train()
    assert not encoder.backbone.training, "dropout and batch norm as in inference"
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        skipped = encoder(pixels, torch.zeros(2, 3, 2))
        kept = encoder(pixels, torch.ones(2, 3, 2))
        whole = encoder(pixels, None)
        first = encoder.backbone.encoder.layer[0](encoder.backbone.embeddings(pixels))
        tokens = encoder.backbone.layernorm(first)[:, 1:].mT.unflatten(2, (8, 8))
        torch.testing.assert_close(skipped, encoder.neck(encoder.laterals[0](tokens)))
    assert not torch.allclose(kept, whole), "what is kept is scaled"
    one = encoder(pixels, torch.tensor([0.0, 1.0]).view(2, 1, 1).expand(2, 3, 2))
    torch.testing.assert_close(one[0], skipped[0])
    torch.testing.assert_close(one[1], kept[1])


@pytest.mark.parametrize("kind", ["dinov2", "resnet", "swin"], indirect=True)
def test_a_stopped_training_resumes_without_the_backbone(tmp_path, scenes, folders, kind):
    """The run's configuration and weights state the architecture; recomputing changes nothing."""
    folder = shutil.copytree(folders[kind], tmp_path / "backbone")
    changes = {"drop_path_rate": 0.3, "ema": 0.9}
    whole = train(case(tmp_path / "whole", scenes, folder, **changes))
    begun = theirs(folder).state_dict()
    now = whole.model.image_encoder.backbone.state_dict()
    moved = [name for name in begun if not torch.equal(begun[name], now[name])]
    assert len(moved) > 0.8 * len(begun) or kind == "resnet", "the backbone has learned"
    assert not any("running" in name for name in moved)
    train(case(tmp_path / "run", scenes, folder, steps=2, **changes))
    shutil.rmtree(folder)
    saved = config_files.load_config(str(tmp_path / "run"), trust=True)
    resumed = train(replace(saved, steps=4, activation_checkpointing=1))
    assert same(whole, resumed)
    model = load_model(tmp_path / "run")
    images, sizes = pictures()
    with torch.no_grad(), resumed.averaged_model() as averaged:
        assert torch.equal(model.encode(images, sizes), averaged.eval().encode(images, sizes))


def test_micro_batches_change_no_gradient(tmp_path, scenes, folders):
    def gradients(micro_batch_size: int) -> dict[str, torch.Tensor]:
        run = case(tmp_path / "run", scenes, folders["resnet"], micro_batch_size=micro_batch_size)
        state = TrainState.initialize(run, torch.device("cpu"))
        batches = TrainData(run, open_index(run)).batches()
        metrics = StepMetrics.zero(run.batch_size, torch.zeros(()))
        state.model.train()
        for batch in next(batches):
            accumulate(run.task(torch.device("cpu")), state.model, batch, metrics)
        batches.close()
        return {name: p.grad / metrics.count for name, p in state.model.named_parameters()}

    one, two = gradients(4), gradients(1)
    largest = max(each.abs().max() for each in one.values())
    assert all((one[name] - two[name]).abs().max() < 1e-5 * largest for name in one)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dinov2", "swin"], indirect=True)
def test_sharded_it_is_the_same_training(tmp_path, scenes, folders, kind):
    changes = {"drop_path_rate": 0.3, "activation_checkpointing": 1}
    whole = train(case(tmp_path / "whole", scenes, folders[kind], **changes))
    run = case(tmp_path / "sharded", scenes, folders[kind], parallel="fsdp", **changes)
    fork(2, sharded_training, run.out)
    weights = load_model(run.out).state_dict()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_by_command(tmp_path, scenes, folders, capsys):
    run_commands(tmp_path, scenes, capsys, f"hf:{folders['convnext']}")


@pytest.mark.long
def test_a_frozen_backbone_stays_what_it_was(tmp_path, scenes, folders):
    run = case(tmp_path / "run", scenes, folders["convnext"], freeze=("image_encoder.backbone",))
    ours = train(replace(run, steps=2)).model.image_encoder.backbone.state_dict()
    loaded = theirs(folders["convnext"]).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in loaded.items())


def test_what_it_may_do_is_said(tmp_path, folders, monkeypatch):
    dinov2, hiera = folders["dinov2"], folders["hiera"]
    with error_line(r"no such folder with config.json, and no id of the"):
        make_component("model.encoder", f"hf:{tmp_path / 'nothing'}")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with error_line("bert is not a backbone of transformers; there are be"):
        HuggingFaceBackbone(str(tmp_path))
    for scale in ('{"image_std": [0, 1, 1]}', '{"image_mean": "grey"}', "["):
        folder = shutil.copytree(dinov2, tmp_path / "scaled", dirs_exist_ok=True)
        (folder / "preprocessor_config.json").write_text(scale)
        with error_line(r"preprocessor_config.json"):
            HuggingFaceBackbone(str(folder))
    with error_line(r"choose from vit, .*, hf:BACKBONE, .*or file"):
        make_component("model.encoder", "dinov2")
    for spec, message in (
        (
            replace(spec_with(dinov2), patch_size=16),
            "use --model.patch-size 8",
        ),
        (replace(spec_with(hiera), image_size=128), "does not fit the backbone hiera"),
        (replace(spec_with(hiera), patch_size=2), "coarser than --model.patch-size 2"),
        (replace(SPEC, encoder=HuggingFaceBackbone()), "hf needs a backbone: hf:FOLDER"),
    ):
        with error_line(message):
            build_model(spec, 0)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: 1 / 0)
    with error_line(r"that can be downloaded .*\(it cannot be reached\)"):
        HuggingFaceBackbone("facebook/dinov2-of-nobody")


def test_weights_that_do_not_fit_are_refused(tmp_path, folders):
    folder = shutil.copytree(folders["dinov2"], tmp_path / "backbone")
    model = build_model(spec_with(folder), 0)
    config = json.loads((folder / "config.json").read_text())
    AutoModel.from_config(CONFIG_MAPPING["dinov2"](**VIT, image_size=32)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    encoder = spec_with(folder).encoder
    with error_line(r"model.safetensors does not fit its config.json"):
        encoder.load_pretrained(model.image_encoder)
    (folder / "model.safetensors").unlink()
    with error_line(r"no such folder with model.safetensors"):
        encoder.load_pretrained(model.image_encoder)
    replace(encoder, pretrained=False).load_pretrained(model.image_encoder)


def test_a_file_of_weights_names_no_model_to_download(tmp_path, folders):
    """Its configuration must state the architecture."""
    model = build_model(spec_with(folders["dinov2"]), 0)
    path = tmp_path / "model.safetensors"
    save_weights(model.state_dict(), model.config, path)
    assert read_safetensors(path)[1] == model.config
    stated = replace(model.config.encoder, architecture="")
    object.__setattr__(stated, "architecture", "")
    save_weights(model.state_dict(), replace(model.config, encoder=stated), path)
    with error_line("architecture is missing"):
        read_safetensors(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 10**9}, r"cannot be built \(depth 1000000000 for \d+ tensors"),
        ({"hidden_size": -8}, "does not fit the backbone dinov2"),
        ({"hidden_size": [8]}, "of the backbone dinov2 is not valid"),
        ({"model_type": "llama"}, "llama is not a backbone"),
    ],
)
def test_a_strangers_architecture_is_refused(tmp_path, folders, changes, message):
    model = build_model(spec_with(folders["dinov2"]), 0)
    stated = json.loads(model.config.encoder.architecture) | changes
    encoder = replace(model.config.encoder, architecture=json.dumps(stated))
    path = tmp_path / "model.safetensors"
    save_weights(model.state_dict(), replace(model.config, encoder=encoder), path)
    with error_line(message):
        load_model(path)


def test_blocks_of_a_plain_list():
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(2))
    other = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert blocks_of(torch.nn.Sequential(layers, other)) == [*layers]


def test_adapters_are_on_attention_or_all_linear_layers(kind, folders):
    spec = spec_with(folders[kind])

    def adapted(*on: str) -> torch.nn.Module:
        model = build_model(spec, 0)
        select_trained(model, (), lora=LoRA(rank=2, on=on))
        return model

    if kind == "resnet":
        with error_line(r"--lora.on all: .*no frozen linear layer"):
            adapted("all")
        return
    if kind == "convnext":
        with error_line(r"--lora.on attention.*pwconv1"):
            adapted("attention")
    model = adapted("all" if kind == "convnext" else "attention")
    names = [name for name, _ in model.named_parameters() if name.endswith("lora_A")]
    assert len(names) >= COUNTS[kind]
    assert all(name.startswith("image_encoder.backbone.") for name in names)
    images, sizes = pictures()
    model.eval().encode(images, sizes).sum().backward()
    assert model.get_parameter(names[0].replace("lora_A", "lora_B")).grad.abs().max() > 0


def test_a_backbone_of_two_channels_starts_from_weights_for_rgb(folders):
    """A gray image in both channels gives the features that it gave."""
    folder = folders["dinov2"]
    level, found = torch.randn(1, 1, 64, 64), []
    for count in (3, 2):
        model = build_model(replace(spec_with(folder), pixels=PixelConfig(count)), 0).eval()
        model.config.encoder.load_pretrained(model.image_encoder)
        pixels = level.expand(1, count, 64, 64)
        found.append(model.image_encoder.backbone(pixels).feature_maps)
    torch.testing.assert_close(*found)
