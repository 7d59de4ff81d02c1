"""Text models: what they make of texts, whatever else is in a batch; adapters; and what is said of
those that are not there.
"""

import fnmatch
import hashlib
import importlib.util
import pickle
import shutil
import socket
import warnings
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from gigamask.errors import GigamaskError
from gigamask.plugins.grounding.text_encoders import MINILM, HuggingFace
from gigamask.plugins.grounding.text_models import HuggingFaceTextModel, load_weights
from tests.broken import flip
from tests.errors import error_line
from tests.plugins.grounding.texts import write

TEXTS = [
    "a red square",
    "the big blue circle left of the small green triangle and a square",
    "circle",
]
REVISION = "0123456789abcdef" * 2 + "01234567"
KINDS = {
    "bert": "BertModel",
    "t5": "T5EncoderModel",
    "bart": "BartEncoder",
    "clip": "CLIPTextModel",
    "siglip": "SiglipTextModel",
}
KINDS |= {"gpt2": "GPT2Model", "qwen3": "Qwen3Model", "llama": "LlamaModel"}


def made(folder, **options):
    return HuggingFace(str(folder), **{"max_tokens": 20} | options).build()


def read(model, texts=TEXTS):
    return model(model.tokenize(texts))


def moved(model, far=0.1):
    """Moves adapters away from where they begin, where those of B are 0."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(
                far
                * torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape).roll(number, 1)
            )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_beside_a_text_changes_nothing(folders, kind):
    model = made(folders[kind])
    assert (type(model.base).__name__, model.dim, model.trainable) == (KINDS[kind], 16, False)
    tokens, words = model.tokenize(TEXTS), read(model)
    assert tokens.attention_mask.sum(1).tolist() == [
        int(model.tokenize([text]).attention_mask.sum()) for text in TEXTS
    ]
    for row, text in enumerate(TEXTS):
        alone = read(model, [text])
        together = words.features[row][words.attention_mask[row]]
        torch.testing.assert_close(
            alone.features[alone.attention_mask], together, rtol=1e-4, atol=1e-5
        )
    assert words.features.isfinite().all()
    assert not words.features.requires_grad
    assert not list(model.parameters()) + list(model.state_dict())


@pytest.mark.slow
def test_special_tokens_stay_and_padding_is_at_the_end(folders):
    assert made(folders["bert"]).tokenize(["red circle", "red"]).input_ids.tolist() == [
        [2, 6, 10, 3],
        [2, 6, 3, 0],
    ]
    left = made(folders["llama"]).tokenize(["red circle", "red"])
    assert left.input_ids.tolist() == [[2, 6, 10], [2, 6, 0]]
    assert left.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    back = pickle.loads(pickle.dumps(left)).to("cpu")
    assert torch.equal(back.input_ids, left.input_ids)


@pytest.mark.slow
def test_padding_that_a_model_was_trained_to_read_is_read(folders):
    model = made(folders["siglip"])
    tokens = model.tokenize(["red"])
    assert (tuple(tokens.input_ids.shape), int(tokens.attention_mask.sum())) == ((1, 24), 3)
    theirs = model.base(input_ids=tokens.input_ids).last_hidden_state
    assert torch.equal(read(model, ["red"]).features, theirs)


@pytest.mark.slow
def test_a_layer_in_between(folders):
    last, second = (made(folders["bert"], layer=layer) for layer in (-1, 2))
    assert torch.equal(read(last).features, read(second).features)
    middle, words = made(folders["bert"], layer=1), made(folders["bert"], layer=0)
    assert not torch.equal(read(middle).features, read(last).features)
    assert torch.equal(read(words).features, words.base.embeddings(words.tokenize(TEXTS).input_ids))
    assert len({each.digest for each in (last, second, middle, words)}) == 4


def test_long_texts_are_cut_and_that_is_said_once(folders):
    model = made(folders["bert"], max_tokens=5)
    with pytest.warns(UserWarning, match=r"first 5 tokens.*'the big blue circle left"):
        tokens = model.tokenize(TEXTS)
    assert tokens.input_ids.tolist() == [[2, 4, 6, 9, 3], [2, 5, 17, 8, 3], [2, 10, 3, 0, 0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.tokenize(TEXTS)


@pytest.mark.slow
def test_precision_is_the_models_own_whatever_surrounds_it(folders):
    single, half = made(folders["bert"]), made(folders["bert"], precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(read(single).features, read(made(folders["bert"])).features)
    assert read(single).features.dtype == read(half).features.dtype == torch.float32
    assert (half.dtype, half.base.dtype) == (torch.bfloat16, torch.bfloat16)
    assert not torch.equal(read(single).features, read(half).features)
    assert torch.allclose(read(single).features, read(half).features, atol=0.2)
    assert single.digest != half.digest


@pytest.mark.slow
def test_the_digest_is_of_the_content(folders, tmp_path):
    here, there = (write("bert", tmp_path / name) for name in ("here", "there"))
    assert made(here).digest == made(there, revision=REVISION).digest
    (there / "README.md").write_text("not read")
    assert made(here).digest == made(there, revision=REVISION).digest
    flip(there / "model.safetensors", -1)
    assert made(here).digest != made(there).digest


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_begin_as_nothing_and_learn(folders, kind):
    plain, model = made(folders[kind]), made(folders[kind], lora_rank=2)
    assert model.trainable
    assert torch.equal(read(plain).features, read(model).features)
    assert len(list(model.parameters())) == len(model.state_dict()) in (4, 8)
    words, before = read(moved(model)), read(plain)
    valid = words.attention_mask
    assert not torch.allclose(words.features[valid], before.features[valid], atol=1e-4)
    words.features[valid].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    ours = set(model.parameters())
    assert all(
        parameter.grad is None and not parameter.requires_grad
        for parameter in model.base.parameters()
        if parameter not in ours
    )


@pytest.mark.slow
def test_adapters_alone_are_saved_and_bring_everything_back(folders):
    model, fresh = moved(made(folders["llama"], lora_rank=3)), made(folders["llama"], lora_rank=3)
    state = model.state_dict()
    assert sorted(state)[:2] == [f"adapters.layers/0/self_attn/q_proj/lora_{each}" for each in "AB"]
    assert [tuple(state[name].shape) for name in sorted(state)[:2]] == [(3, 16), (16, 3)]
    assert not torch.equal(read(model).features, read(fresh).features)
    fresh.load_state_dict(state)
    assert torch.equal(read(model).features, read(fresh).features)


@pytest.mark.slow
def test_adapters_start_by_seed_without_touching_the_random_state(folders):
    encoder = HuggingFace(str(folders["bert"]), max_tokens=20, lora_rank=2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (encoder.build(seed=seed) for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    name = next(name for name in one.state_dict() if name.endswith("A"))
    start, again, third = (each.state_dict()[name] for each in (one, same, other))
    assert torch.equal(start, again)
    assert not torch.equal(start, third)
    assert 0.8 / 4 < start.abs().max() <= 1 / 4
    assert len({each.digest for each in (one, same, other)}) == 2


@pytest.mark.slow
def test_adapters_are_float32_beside_halves_and_move_with_them(folders):
    model = moved(made(folders["llama"], lora_rank=2, precision="bf16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    before = read(model).features
    model.to(torch.float64)
    assert model.base.dtype == torch.float64
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    after = read(model).features
    assert torch.allclose(before, after, atol=0.3)
    read(model).features.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_targets_by_name(folders):
    model = made(folders["llama"], lora_rank=2, lora_targets=("gate_proj", "k_proj"))
    assert {name.split("/")[-2] for name in model.state_dict()} == {"gate_proj", "k_proj"}
    message = (
        r"llama\d'.* qproj or x; .*down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    )
    with error_line(message):
        made(folders["llama"], lora_rank=2, lora_targets=("qproj", "x"))


def test_an_architecture_nobody_has_chosen_targets_for(folders, monkeypatch):
    monkeypatch.setattr("gigamask.plugins.grounding.text_models.ATTENTION", ())
    with error_line(r"clip\d'.*lora_targets.* fc1, fc2, k_proj, out_proj, q_proj, v_proj$"):
        made(folders["clip"], lora_rank=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "t5", "bart", "llama"])
def test_blocks_computed_again_change_no_gradient(folders, kind):
    gradients, passes = [], []
    for recompute in (False, True):
        model = moved(made(folders[kind], lora_rank=2, recompute=recompute)).train()
        seen = []
        inner = next(
            module
            for name, module in model.base.named_modules()
            if name.endswith(("lora_B", "lora_B.default")) and hasattr(module, "weight")
        )
        inner.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        words = read(model)
        words.features[words.attention_mask].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        passes.append(len(seen))
    assert passes == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_on_the_meta_device_it_has_shapes_alone(folders):
    model = HuggingFace(str(folders["bert"]), max_tokens=20, lora_rank=2).build("meta")
    assert {
        parameter.device.type for parameter in (*model.parameters(), *model.base.parameters())
    } == {"meta"}
    assert set(model.parameters()) < set(model.base.parameters())


def test_a_cached_model_is_found_by_its_revision_without_a_network(folders, tmp_path, monkeypatch):
    cached = tmp_path / "models--some--model" / "snapshots" / REVISION
    shutil.copytree(folders["bert"], cached)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for asked in (socket.socket, "connect"), (socket, "getaddrinfo"):
        monkeypatch.setattr(*asked, lambda *_: pytest.fail("a network was asked"))
    assert HuggingFace("some/model", revision=REVISION).folder() == cached
    model = HuggingFace("some/model", revision=REVISION, max_tokens=20).build()
    assert read(model).features.isfinite().all()


def test_a_model_that_is_not_cached_is_downloaded_at_its_revision(folders, monkeypatch):
    asked = []

    def download(name, revision, allow_patterns, local_files_only=False):
        asked.append((name, revision, local_files_only))
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        assert not any(fnmatch.fnmatch("pytorch_model.bin", each) for each in allow_patterns)
        return str(folders["bert"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, revision: None)
    assert HuggingFace("some/model", revision=REVISION).folder() == folders["bert"]
    assert asked == [("some/model", REVISION, True), ("some/model", REVISION, False)]


def test_without_a_network_the_error_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def refuse(*_, **__):
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(GigamaskError) as raised:
        MINILM.build()
    said = str(raised.value)
    assert "\n" not in said
    assert f"hf download {MINILM.name} --revision {MINILM.revision}" in said
    assert "--text.name FOLDER" in said


def test_weights_with_another_sha256_are_refused(folders, tmp_path):
    shutil.copytree(folders["bert"], tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    right = hashlib.sha256(weights.read_bytes()).hexdigest()
    made(tmp_path / "model", sha256=right)
    flip(weights, -1)
    with error_line(rf"SHA-256 [0-9a-f]{{64}}, not {right}\b"):
        made(tmp_path / "model", sha256=right)
    with error_line(rf"{MINILM.sha256}\b.*--text.sha256 \w{{64}}$"):
        replace(MINILM, name=str(tmp_path / "model")).build()


def test_what_is_no_model_is_one_line(folders, tmp_path):
    for name, message in (
        ("", r"^text model '': "),
        ("some/model", r"^text model 'some/model': .*--text.revision\b"),
        (str(tmp_path), r"cannot be loaded \(\w+: "),
    ):
        with error_line(message) as raised:
            HuggingFace(name).build()
        assert "\n" not in str(raised.value)


def test_weights_that_are_not_there_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write("llama", tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with error_line(r"\b1\b.* norm.weight$"):
        made(folder)
    (folder / "model.safetensors").write_bytes(b"cut short")
    with error_line(r"cannot be loaded \("):
        made(folder)


def test_a_tokeniser_of_another_model_is_noticed(tmp_path):
    model = made(write("llama", tmp_path, vocab_size=8))
    with error_line(r"'red circle'.* 10\b.* 8\b"):
        model.tokenize(["red circle"])


@pytest.mark.slow
def test_wrong_numbers_are_named(folders):
    for options, message in (
        ({"layer": 3}, r"bert\d': layer\b.* 2\b.* .got 3.$"),
        ({"max_tokens": 2}, r"bert\d': max_tokens\b.*\b3\b.*\b24\b.* .got 2.$"),
        ({"max_tokens": 25}, r"bert\d': max_tokens\b.*\b3\b.*\b24\b.* .got 25.$"),
        ({"max_tokens": 0}, r"^max_tokens\b.* .got 0.$"),
        ({"lora_rank": -1}, r"^lora_rank\b.* .got -1.$"),
        ({"lora_rank": 2, "lora_alpha": 0}, r"^lora_alpha\b.* .got 0.$"),
        ({"four_bit": True}, r"bert\d': four_bit\b.*\bcpu$"),
    ):
        with error_line(message):
            made(folders["bert"], **options)
    with error_line(r"the text ''"):
        made(folders["gpt2"]).tokenize(["red", ""])


@pytest.mark.parametrize(
    "package, extra, encoder",
    [
        ("peft", "grounding", HuggingFace("x", lora_rank=1)),
        ("bitsandbytes", "quant", HuggingFace("x", four_bit=True)),
        ("transformers", "grounding", MINILM),
    ],
)
def test_what_is_not_installed_is_named(package, extra, encoder, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with error_line(rf" {package}\b.*'gigamask\[{extra}\]'$"):
        encoder.build()


@pytest.mark.slow
def test_four_bits_with_adapters(folders, monkeypatch):
    """`build` makes them on a GPU alone; on a CPU bitsandbytes' numbers are the same, by its
    general way: that of some CPUs wants wider layers."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    encoder = HuggingFace(str(folders["llama"]), max_tokens=20, four_bit=True, lora_rank=2)
    base, missing = load_weights(
        folders["llama"], torch.device("cpu"), torch.float32, four_bit=True
    )
    assert not missing
    plain = made(folders["llama"])
    model = HuggingFaceTextModel(base, plain._tokenizer, encoder, folders["llama"], seed=0).to(
        "cpu"
    )
    kinds = {
        type(module).__name__
        for name, module in model.base.named_modules()
        if name.endswith(("o_proj", "base_layer"))
    }
    assert kinds == {"Linear4bit"}
    near, words = read(model), read(plain)
    assert not torch.equal(near.features, words.features)
    likeness = torch.nn.functional.cosine_similarity(near.features, words.features, dim=-1)
    assert likeness[words.attention_mask].mean() > 0.9
    read(moved(model)).features.sum().backward()
    assert {parameter.shape for parameter in model.parameters()} == {(2, 16), (16, 2)}
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
