"""Configurations of peft's adapters: what is refused by name. What they mean: tests/parity."""

import json

import pytest

from gigamask.plugins.peft import config as peft_config
from tests.errors import error_line

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv"]}


def read(folder, entries: dict) -> peft_config.AdapterConfig:
    (folder / peft_config.CONFIG).write_text(json.dumps(PLAIN | entries))
    return peft_config.read(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"peft_type": "LOHA", "alpha": 3},
        {"use_dora": True},
        {"layer_replication": [[0, 1]]},
        {"trainable_token_indices": [0]},
        {"target_parameters": ["attn.qkv.weight"]},
        {"lora_bias": True},
        {"alora_invocation_tokens": [1]},
        {"megatron_config": {"a": 1}},
        {"use_qalora": True},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"of_a_later_version": {"x": 0}},
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_refused_by_name(entries, tmp_path):
    with error_line(next(iter(entries))):
        read(tmp_path, entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": "four"},
        {"rank_pattern": {"qkv": 0}},
        {"lora_alpha": 10**400},
        {"alpha_pattern": {"qkv": 10**400}},
        {"alpha_pattern": [1]},
        {"target_modules": None},
        {"target_modules": 3},
    ],
    ids=str,
)
def test_values_that_are_not_valid_are_refused(entries, tmp_path):
    with error_line(peft_config.CONFIG):
        read(tmp_path, entries)


def test_entries_without_effect_are_read(tmp_path):
    unset = {"layer_replication": None, "use_dora": False, "of_a_later_version": {}}
    config = read(tmp_path, {"megatron_core": "megatron.core", "bias": "all", **unset})
    assert config.scales({"a.qkv": 4}, ["a.proj"], []) == {"a.qkv": 2.0}


def test_a_rank_of_another_size_is_refused(tmp_path):
    config = read(tmp_path, {"r": 10**400})
    with error_line("whose lora_A has 4"):
        config.scales({"a.qkv": 4}, [], [])


def test_the_first_pattern_counts(tmp_path):
    patterns = {"layers.1.qkv": 1, r"layers\.[0-9]+\.qkv": 2, "qkv": 3}
    config = read(tmp_path, {"alpha_pattern": patterns})
    ranks = {"layers.1.qkv": 4, "layers.21.qkv": 4, "encoder.qkv": 4, "xqkv.qkv": 4}
    assert [scale * 4 for scale in config.scales(ranks, [], []).values()] == [1, 2, 3, 3]


@pytest.mark.parametrize("pattern", ["(", "(a+)+$", "a{99999999999}"])
def test_patterns_that_are_not_valid_or_never_end_are_refused(pattern, tmp_path, monkeypatch):
    monkeypatch.setattr(peft_config, "MAX_MATCH_S", 0.5)
    config = read(tmp_path, {"alpha_pattern": {pattern: 1}})
    with error_line("alpha_pattern"):
        config.scales({f"{'a' * 60}.qkv": 4}, [], [])
