"""Planned bytes of a grounding training equal those of real models and of a real step on a CPU."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from gigamask.distributed.precision import HALF_DTYPES
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.plugins.grounding import memory
from gigamask.plugins.grounding.cli import ground
from gigamask.plugins.grounding.memory import GroundingSetup
from gigamask.plugins.grounding.model import GroundingModel
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import HuggingFace
from gigamask.plugins.grounding.text_models import load_weights, quiet
from gigamask.profiling.dry_run import AllocationTracker
from gigamask.profiling.held_bytes import held_bytes
from gigamask.training.optim import AdamW, AdamW8bit
from tests.errors import error_line

MODEL = GroundingModelConfig(embedding_dim=16, text_dim=16, dim=16, layers=2)
COUNTS = {"images": 2, "queries": 3, "tokens": 20, "masks": 5}


def prepared(encoder):
    base = memory.text_model(encoder)
    memory.prepare(base, encoder)
    return base


def held(base):
    """Returns the bytes of a model, of bitsandbytes' scales and tables too, which are no parameters
    of it."""
    states = [
        state
        for module in base.modules()
        if (state := getattr(getattr(module, "weight", None), "quant_state", None))
    ]
    scales = [
        (each.absmax, each.code, each.offset, each.state2.absmax, each.state2.code)
        for each in states
    ]
    return held_bytes((*base.parameters(), *base.buffers(), *scales))


@pytest.mark.slow
@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "t5", "gpt2", "clip", "siglip", "bart"])
def test_planned_weights_equal_loaded_ones(folders, kind, precision, four_bit):
    """In 4 bits: those that bitsandbytes makes."""
    with quiet():
        real, _ = load_weights(
            folders[kind], torch.device("cpu"), HALF_DTYPES.get(precision, torch.float32), four_bit
        )
    assert memory.model_bytes(
        prepared(HuggingFace(str(folders[kind]), precision, four_bit))
    ) == held(real)


@pytest.mark.slow
@pytest.mark.parametrize("elements", [64, 65, 4096, 12800, 64 * 256, 64 * 256 + 2, 123456])
def test_four_bits_by_bitsandbytes(elements):
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(elements), compress_statistics=True, quant_type="nf4")
    assert memory.nf4_bytes(elements) == held_bytes(
        (packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_planned_adapters_equal_trained_ones(folders, kind):
    encoder = HuggingFace(str(folders[kind]), "fp32", max_tokens=20, lora_rank=3)
    model, base = encoder.build(), prepared(encoder)
    planned = [each.numel() for each in memory.trained(base)]
    assert planned == [each.numel() for each in model.parameters()]
    assert memory.model_bytes(base) == held(model.base)
    words = model(model.tokenize(["a red square"]))
    words.features.sum().backward()
    assert sum(each.nbytes for each in memory.trained(base)) == sum(
        each.grad.nbytes for each in model.parameters()
    )
    (optimizer,) = AdamW().build(model)
    optimizer.step()
    assert memory.optimizer_bytes(AdamW(), memory.trained(base)) == sum(
        held_bytes(tuple(entry.values())) for entry in optimizer.state.values()
    )
    assert memory.optimizer_bytes(AdamW8bit(), memory.trained(base)) == 8 * sum(
        planned
    )  # as they are small


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_planned_peak_of_a_step_equals_the_measured_one(folders, kind, recompute):
    encoder = HuggingFace(
        str(folders[kind]), "fp32", max_tokens=20, lora_rank=2, recompute=recompute
    )
    text, model = encoder.build(), GroundingModel(MODEL)
    for parameter in (*text.parameters(), *model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with AllocationTracker() as tracker:
        ids, features = torch.zeros(6, 20, dtype=torch.int64), torch.zeros(6, 5, sum(MODEL.parts))
        valid = torch.ones(6, 5, dtype=torch.bool)
        words = text.base(  # texts of 15 to 20 tokens: without padding no mask is made
            input_ids=ids, attention_mask=torch.ones_like(ids).tril_(14)
        ).last_hidden_state.float()
        model(features, valid, words, ids == 0).sum().backward()
    assert (
        memory.dry_run_texts(
            prepared(encoder), GroundingModel(MODEL).to("meta"), COUNTS, device="cpu"
        )
        == tracker.peak
    )


@pytest.mark.slow
def test_the_planned_peak_of_the_image_encoder_equals_the_measured_one():
    encoder = build_model(tiny(), 0).image_encoder
    with AllocationTracker() as tracker, torch.no_grad():
        encoder(torch.zeros(2, 3, 128, 128), None)
    assert memory.dry_run_images(tiny(), torch.float32, 2, "cpu") == (
        held_bytes((*encoder.parameters(), *encoder.buffers())),
        tracker.peak,
    )
    assert (
        memory.dry_run_images(tiny(), torch.bfloat16, 2)[0] * 2
        == memory.dry_run_images(tiny(), torch.float32, 2)[0]
    )


def test_llama_2_has_the_published_number_of_parameters():
    """6,738,415,616 (Touvron et al. 2023), of which the output layer has 32,000 x 4,096."""
    base = memory.text_model(HuggingFace("7b", "bf16"))
    assert sum(each.numel() for each in base.parameters()) + 32000 * 4096 == 6_738_415_616
    assert len(memory.four_bit_layers(base)) == 32 * 7


@pytest.mark.slow
def test_seven_billion_parameters_in_four_bits_with_adapters():
    """3.60 GB of weights (6.61e9 x 0.516 bytes, embeddings and norms in bf16), and 8.4 M parameters
    of adapters in float32."""
    encoder = HuggingFace("7b", "bf16", four_bit=True, lora_rank=16, recompute=True)
    base = prepared(encoder)
    adapters = sum(each.numel() for each in memory.trained(base))
    assert adapters == 32 * 2 * 16 * (4096 + 4096)
    assert (memory.model_bytes(base) - 4 * adapters) / 1e9 == pytest.approx(3.60, abs=0.01)


@pytest.fixture(scope="module")
def setup(folders):
    text = HuggingFace(
        str(folders["llama"]), "bf16", four_bit=True, max_tokens=20, lora_rank=2, recompute=True
    )
    return GroundingSetup(
        text, vision=tiny(), images=2, queries=3, masks=4, model=MODEL, optimizer=AdamW()
    )


@pytest.mark.long
def test_a_plan_adds_up(setup):
    found = memory.plan(setup)
    held, numbers = found["bytes"], found["parameters"]
    assert found["total_bytes"] == sum(held.values())
    assert held["vision encoder"] == 2 * numbers["vision encoder"]
    assert held["gradients"] == 4 * numbers["adapters"] == 4 * 2 * 2 * 2 * (16 + 16)
    assert held["optimizer"] == 2 * held["gradients"] + 4 * 8
    assert held["masks"] == 2 * 2 * 4 * 128 * 128
    assert held["activations"] == max(found["peak_bytes"].values())
    eight = memory.plan(replace(setup, optimizer=AdamW8bit(), vision=None))
    assert eight["bytes"]["optimizer"] == 2 * held["gradients"]
    assert eight["bytes"]["vision encoder"] == eight["peak_bytes"]["images"] == 0
    frozen = memory.plan(replace(setup, text=replace(setup.text, lora_rank=0)))
    assert (
        frozen["parameters"]["adapters"],
        frozen["bytes"]["gradients"],
        frozen["bytes"]["optimizer"],
    ) == (0, 0, 0)


def test_which_gpus_have_enough_memory():
    peaks = {"bf16": 1.0}
    for precision, needed, verdict in (
        ("bf16", 10, "fits"),
        ("bf16", 11, "too small"),
        ("fp16", 1, "no fp16"),
    ):
        assert memory.fit(precision, peaks, needed, 10.0) == verdict


@pytest.mark.slow
def test_the_command(setup, capsys):
    words = f"memory --language {setup.text.name} --vision none --rank 2 --tokens 20"
    found = ground.parse([*words.split(), "--optimizer", "adamw8bit"]).run()
    assert (found["language"], found["vision"], found["lora_rank"]) == (setup.text.name, "none", 2)
    out = capsys.readouterr().out
    assert "\nvision encoder         0.00 GB\n" in out
    assert f"\ntotal             {found['total_bytes'] / 1e9:9.2f} GB\n" in out
    assert "\n  no bf16   v100, v100-16, t4\n" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        ({"masks": 0}, r"^--masks must be at least 1 \(got 0\)$"),
        ({"text": HuggingFace("some/model")}, r"^text model 'some/model': "),
    ],
)
def test_wrong_sizes_are_one_line(setup, change, message):
    with error_line(message):
        memory.plan(replace(setup, **change))


def test_without_transformers(setup, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with error_line(r"\btransformers\b.*'gigamask\[grounding\]'$"):
        memory.plan(setup)
