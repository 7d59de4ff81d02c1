"""What parts are planned to hold is what they hold: bytes of real models, and a real step's peak on a CPU, exactly."""

from dataclasses import replace

import pytest
import torch

from gigamask.grounding import parts
from gigamask.grounding.text_encoders import HuggingFace
from gigamask.grounding.text_models import load_weights, quiet
from gigamask.memory.allocations import Allocations
from gigamask.memory.sample import held_bytes
from gigamask.model.sizes import tiny
from gigamask.model.start import build
from gigamask.parallel.precision import HALVES
from gigamask.train.optim import AdamW, AdamW8bit
from tests.texts import write

COUNTS = {"images": 2, "queries": 3, "tokens": 20, "masks": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: write(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3", "t5", "gpt2", "clip", "siglip", "bart")}


def prepared(encoder):
    base = parts.language(encoder)
    parts.prepare(base, encoder, train_all=False)
    return base


def held(base):
    """Returns the bytes of a model, of bitsandbytes' scales and tables too, which are no parameters of it."""
    states = [state for module in base.modules() if (state := getattr(getattr(module, "weight", None), "quant_state", None))]
    scales = [(each.absmax, each.code, each.offset, each.state2.absmax, each.state2.code) for each in states]
    return held_bytes((*base.parameters(), *base.buffers(), *scales))


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "t5", "gpt2", "clip", "siglip", "bart"])
def test_planned_weights_are_those_that_are_loaded(folders, kind, precision, four_bit):
    """In 4 bits: those that bitsandbytes makes."""
    with quiet():
        real, _ = load_weights(folders[kind], torch.device("cpu"), HALVES.get(precision, torch.float32), four_bit)
    assert parts.standing(prepared(HuggingFace(str(folders[kind]), precision, four_bit))) == held(real)


@pytest.mark.parametrize("elements", [64, 65, 4096, 12800, 64 * 256, 64 * 256 + 2, 123456])
def test_four_bits_by_bitsandbytes(elements):
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(elements), compress_statistics=True, quant_type="nf4")
    assert parts.nf4_bytes(elements) == held_bytes((packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_planned_adapters_are_those_that_are_trained(folders, kind):
    encoder = HuggingFace(str(folders[kind]), "fp32", max_tokens=20, lora_rank=3)
    model, base = encoder.build(), prepared(encoder)
    planned = [each.numel() for each in parts.trained(base)]
    assert planned == parts.adapters(parts.language(encoder), encoder) == [each.numel() for each in model.parameters()]
    assert parts.standing(base) == held(model.base)
    words = model(model.tokenize(["a red square"]))
    words.features.sum().backward()
    assert sum(each.nbytes for each in parts.trained(base)) == sum(each.grad.nbytes for each in model.parameters())
    (optimizer,) = AdamW().build(model)
    optimizer.step()
    assert parts.moments(AdamW(), parts.trained(base)) == sum(held_bytes(tuple(entry.values())) for entry in optimizer.state.values())
    assert parts.moments(AdamW8bit(), parts.trained(base)) == 8 * sum(planned)  # as they are small


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_planned_step_holds_what_a_real_one_does(folders, kind, recompute):
    encoder = HuggingFace(str(folders[kind]), "fp32", max_tokens=20, lora_rank=2, recompute=recompute)
    model, head = encoder.build(), parts.Crossing(16, parts.Head(64, 2))
    for parameter in (*model.parameters(), *head.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with Allocations() as book:
        ids, pooled = torch.zeros(6, 20, dtype=torch.int64), torch.zeros(6, 5, parts.EMBEDDING_DIM)
        words = model.base(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()
        head(pooled, words).sum().backward()
    assert parts.read(prepared(encoder), parts.Head(64, 2).build(16), COUNTS, autocast=False, device="cpu") == book.peak


def test_recomputing_and_freezing_hold_less(folders):
    encoder = replace(HuggingFace(str(folders["llama"]), "bf16"), max_tokens=20)

    def read(**options):
        return parts.read(prepared(replace(encoder, **options)), parts.Head(64, 1).build(16), COUNTS, autocast=False)

    assert read() < read(lora_rank=2, recompute=True) < read(lora_rank=2)


def test_a_planned_encoder_holds_what_a_real_one_does():
    encoder = build(tiny(), 0).image_encoder
    with Allocations() as book, torch.no_grad():
        encoder(torch.zeros(2, 3, 128, 128), None)
    assert parts.see(tiny(), torch.float32, 2, "cpu") == (held_bytes((*encoder.parameters(), *encoder.buffers())), book.peak)
    assert parts.see(tiny(), torch.bfloat16, 2)[0] * 2 == parts.see(tiny(), torch.float32, 2)[0]


def test_llama_2_has_the_published_number_of_parameters():
    """6,738,415,616 (Touvron et al. 2023), of which the head, which texts do not need, has 32,000 x 4,096."""
    matrices, others = parts.matrices(parts.language(HuggingFace("7b", "bf16")))
    assert sum(matrices) + sum(others) + 32000 * 4096 == 6_738_415_616
    assert len(matrices) == 32 * 7
