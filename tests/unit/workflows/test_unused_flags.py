"""Values without effect are refused where they differ from the recipe's, and only there."""

import sys

import pytest

from gigamask import parser, plugin, recipes
from gigamask.cli.main import commands
from gigamask.config_files import check_used
from gigamask.samplers.shards import Sharded
from gigamask.samplers.stratified import Stratified
from tests.errors import error_line
from tests.own_components import Pooled


@pytest.mark.parametrize(
    "recipe, given, other",
    [
        ("compact", {"model__depth": 24}, {"model__depth": 12}),
        ("compact", {"model__drop_path_rate": 0.1}, {"model__drop_path_rate": 0.0}),
        (
            "tiny",
            {"optimizer__layer_decay": 0.9, "model__encoder": Pooled(0)},
            {"optimizer__layer_decay": 1},
        ),
        ("tiny", {"drop_path_mode": "batch"}, {"model__drop_path_rate": 0.1}),
        ("tiny", {"lora__on": ("q",)}, {"lora__rank": 2}),
        ("tiny", {"class_weight": 2.0}, {"model__class_names": ("cat",)}),
        ("tiny", {"loader__max_masks": 3, "loader__items": "mask"}, {"loader__items": "image"}),
        ("tiny", {"loader__attributes": "a.csv"}, {"sampler": Stratified(("region",))}),
        ("mae_tiny", {"loader__attributes": "a.csv"}, {"sampler": Sharded(column="node")}),
        ("mae_tiny", {"optimizer__encoder_lr_scale": 0.5}, {"optimizer__encoder_lr_scale": 1.0}),
    ],
)
def test_a_value_without_effect_is_refused(recipe, given, other):
    config = recipes.make(recipe)
    check_used(config)
    flag = next(iter(given)).replace("__", ".").replace("_", "-")
    with error_line(f"--{flag} .*no effect"):
        check_used(config.with_(**given))
    check_used(config.with_(**(given | other)))
    check_used(config.with_(recipe="elsewhere.py:moved", **given))


@pytest.mark.parametrize(
    "flag, words, other",
    [
        ("--crop-overlap-ratio 0.1", "segment w x --out o", "--crop-n-layers 1"),
        ("--crop-nms-thresh 0.5", "segment w x --out o", "--tile 64"),
        ("--polygons", "segment w x --out o", "--to coco"),
        ("--cache-gb 3.5", "segment w x --out o", "--cache c"),
        ("--shard-images 3", "segment w x --out o", "--to-shards"),
        ("--points-per-side 4", "evaluate w --data x", "--automatic"),
        ("--seed 3", "stats x", "--sampler random"),
        ("--attributes a.csv", "stats x", "--sampler sharded"),
        ("--mirrored", "masks x --out o --verify", "--verify false"),
        ("--license mit", "export w --to safetensors --out o", "--to huggingface"),
        ("--precision fp16", "export w --to official --out o", "--to onnx"),
        ("--spare-gib 3.5", "plan tiny", "--gpu h200"),
    ],
)
def test_a_flag_of_a_command_without_effect_is_refused(flag, words, other):
    name, *rest = words.split()
    kind = plugin.load(commands()[name])
    parse = getattr(sys.modules[kind.__module__], "parse", lambda all: parser.parse(kind, all, ""))
    default = parse(rest)
    with error_line(f"^{flag.split()[0]}: .*no effect .*--{other[2:].split()[0].split('-')[0]}"):
        parse([*rest, *flag.split()])
    assert parse([*rest, *flag.split(), *other.split()]) != default
