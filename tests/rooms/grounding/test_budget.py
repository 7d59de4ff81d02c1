"""The budget of grounding: its sums, what is said of the write-up's, and what cannot be asked."""

import importlib.util
from dataclasses import replace

import pytest

from gigamask import parser
from gigamask.faults import Fault
from gigamask.grounding import parts
from gigamask.grounding.budget import WRITTEN, Ask, fit, plan, table, ways
from gigamask.grounding.parts import Head
from gigamask.grounding.text_encoders import HuggingFace
from gigamask.model.sizes import tiny
from gigamask.train.optim import AdamW8bit
from gigamask.verbs.memory import Verb
from tests.texts import write


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = write("llama", tmp_path_factory.mktemp("llama"))
    text = HuggingFace(str(folder), "bf16", four_bit=True, max_tokens=20, lora_rank=2, recompute=True)
    return Ask(text, vision=tiny(), images=2, queries=3, masks=4, head=Head(64, 1))


def test_the_write_ups_sum():
    assert sum(WRITTEN.values()) == pytest.approx(13.3)


def test_a_plan_adds_up(ask):
    found = plan(ask)
    held, numbers = found["bytes"], found["parameters"]
    assert held.keys() == WRITTEN.keys()
    assert found["total_bytes"] == sum(held.values())
    assert held["vision encoder"] == 2 * numbers["vision encoder"]
    assert held["gradients"] == 4 * numbers["trained of the language model"] == 4 * 2 * 2 * 2 * (16 + 16)
    assert held["optimizer"] == 2 * held["gradients"] + 4 * 8
    assert held["masks"] == 2 * 2 * 4 * 128 * 128
    assert held["activations"] == max(found["step_bytes"].values())
    assert found["trained"] == "adapters of rank 2"
    eight = plan(replace(ask, optimizer=AdamW8bit(), vision=None))
    assert eight["bytes"]["optimizer"] == 2 * held["gradients"]
    assert eight["bytes"]["vision encoder"] == eight["step_bytes"]["images"] == 0
    assert found["ways"]["adapters of rank 2, 4 bits, AdamW"] == {
        "weights": held["language model"] - 2 * 4 * 4,  # but for what rotates positions, which are no parameters
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
    }


def test_all_of_it_is_trained_in_float32(ask):
    found = plan(replace(ask, train_all=True, text=replace(ask.text, four_bit=False)))
    numbers = found["parameters"]
    assert numbers["trained of the language model"] == numbers["language model"]
    assert found["bytes"]["gradients"] == 4 * numbers["language model"]
    assert found["ways"]["all, 32 bits, AdamW"]["optimizer"] == found["bytes"]["optimizer"]
    assert " fp32; trained of it: all" in table(found)
    frozen = plan(replace(ask, text=replace(ask.text, lora_rank=0)))
    assert (frozen["trained"], frozen["bytes"]["gradients"], frozen["bytes"]["optimizer"]) == ("none", 0, 0)


def test_what_is_said_of_the_write_up(ask):
    said = plan(ask)["remarks"]
    assert said["gradients"].startswith("7e9 in fp16 are 14.0 GB, 3.5 would be in 4 bits; and weights of 4 bits cannot be trained")
    assert said["vision encoder"] == "ViT-H's has 1.27 GB in half and 2.55 in float32"
    assert said["masks"] == "16 in float16 are 0.03 GB at 1024 x 1024, 0.11 at 1500 x 2250; 100 in uint8 are 0.34"
    assert said["in all"] == "36.8 GB with gradients and optimizer by their own words"


def test_seven_billion_parameters_otherwise():
    encoder = HuggingFace("7b", "bf16", lora_rank=16)
    base = parts.language(encoder)
    found = ways(*parts.matrices(base), parts.adapters(base, encoder), 2, "adapters")
    in_all = {way: round(sum(held.values()) / 1e9, 2) for way, held in found.items()}
    assert in_all == {
        "frozen, 4 bits": 3.6,
        "adapters, 4 bits, AdamW": 3.74,
        "adapters, 16 bits, AdamW": 13.35,
        "all, 32 bits, 8-bit AdamW": 66.28,
        "all, 32 bits, AdamW": 105.72,
    }


def test_where_it_fits():
    peaks = {"bf16": 1.0}
    assert (fit("bf16", peaks, 10, 10.0), fit("bf16", peaks, 11, 10.0), fit("fp16", peaks, 1, 10.0)) == ("fits", "too small", "no fp16")


def test_the_verb(ask, capsys):
    words = ["grounding", "--language", ask.text.name, "--vision", "none", "--rank", "2", "--tokens", "20", "--optimizer", "adamw8bit"]
    found = parser.parse(Verb, words, "gigamask memory").run()
    assert (found["language"], found["vision"], found["trained"]) == (ask.text.name, "none", "adapters of rank 2")
    out = capsys.readouterr().out
    assert "GB                  planned  written\nvision encoder         0.00      2.0\n" in out
    assert f"\nin all            {found['total_bytes'] / 1e9:9.2f}     13.3\n" in out
    assert "\n  no bf16   v100, v100-16, t4\n" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": 0}, r"^--masks is 0, it must be at least 1$"),
        ({"head": Head(65, 1)}, r"^a head of 1 layers of 65: its attention has heads of 64 channels; give a multiple of that$"),
        ({"train_all": True}, r"^--train all in 4 bits: such numbers cannot take the small steps of a training; give --no-four-bit, or "),
        ({"text": HuggingFace("some/model")}, r"^text model 'some/model': "),
    ],
)
def test_what_cannot_be_asked_is_one_line(ask, change, message):
    with pytest.raises(Fault, match=message):
        plan(replace(ask, **change))


def test_without_transformers(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Fault, match=r" transformers\b.*'gigamask\[grounding\]'$"):
        plan(ask)
