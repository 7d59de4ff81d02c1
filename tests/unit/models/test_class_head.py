"""The head that classifies masks, in each mask decoder; and weights with and without it."""

from dataclasses import replace

import pytest
import torch

from gigamask.export import official
from gigamask.models import state_dict
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.sam.sam import Sam
from gigamask.models.weight_files import make_spec
from gigamask.types import Prompts
from tests.errors import error_line
from tests.little import COMPACT, SPEC, noise

NAMES = ("cat", "dog", "a bird")
CONFIGS = {"sam": SPEC, "compact": COMPACT}


def classed(config: SamConfig) -> SamConfig:
    return replace(config, class_names=NAMES)


def embed(model: Sam) -> torch.Tensor:
    return model.encode(noise(2, 64), torch.full((2, 2), 64))


def prompts(multimask_output: bool) -> Prompts:
    points = torch.tensor([[[10.0, 20.0]], [[40.0, 30.0]], [[5.0, 50.0]]])
    return Prompts(points, torch.ones(3, 1, dtype=torch.int64), None, multimask_output)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_each_mask_has_logits_of_all_classes(name):
    """Masks are those of the model without classes, and one mask is classified as among three."""
    model = build_model(classed(CONFIGS[name]), 3).eval()
    plain = build_model(CONFIGS[name], 3).eval()
    index = torch.tensor([0, 1, 1])
    with torch.no_grad():
        embedding = embed(model)
        decode = PromptDecoder(model, embedding, index)
        three, without = (
            decode(prompts(True)),
            PromptDecoder(plain, embedding, index)(prompts(True)),
        )
        best = PromptDecoder(model, embedding, index, best_only=True)(prompts(True))
        single = decode(prompts(False))
        alone = PromptDecoder(model, embedding[1:])(
            replace(prompts(True), points_xy_input=prompts(True).points_xy_input[[1, 1, 1]])
        )
    assert three.class_logits.shape == (3, 3, len(NAMES))
    assert single.class_logits.shape == best.class_logits.shape == (3, 1, len(NAMES))
    assert torch.equal(three.logits, without.logits)
    assert without.class_logits is None
    chosen = three.iou_predictions.argmax(1)
    torch.testing.assert_close(best.class_logits[:, 0], three.class_logits[range(3), chosen])
    torch.testing.assert_close(alone.class_logits[0], three.class_logits[1])
    if name == "compact":  # the single mask of a click is the best of three
        torch.testing.assert_close(single.class_logits, best.class_logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_the_head_learns(name):
    model = build_model(classed(CONFIGS[name]), 3)
    embedding = embed(model).detach().requires_grad_()
    output = model.predict(embedding, torch.tensor([0, 1, 1]), prompts(True))
    output.class_logits.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.mask_decoder.class_head.parameters())
    assert embedding.grad.abs().sum() > 0


def write(config: SamConfig, path) -> Sam:
    model = build_model(config, 5)
    state_dict.save_weights(state_dict.to_official(model), config, path)
    return model


@pytest.mark.slow
def test_names_travel_with_the_weights(tmp_path):
    model = build_model(classed(COMPACT), 5)
    official.write_safetensors(model, tmp_path / "a.safetensors")
    loaded = Sam.from_pretrained(tmp_path / "a.safetensors")
    assert loaded.config.class_names == NAMES
    assert "class_names" not in make_spec(COMPACT)


@pytest.mark.slow
def test_the_head_of_the_same_classes_is_loaded(tmp_path):
    saved = write(classed(SPEC), tmp_path / "a.safetensors")
    model = build_model(classed(SPEC), 0)
    loaded = model.load_init(str(tmp_path / "a.safetensors"))
    assert loaded == set(saved.state_dict())
    assert all(torch.equal(v, saved.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("stated", [(), ("cat", "dog"), ("dog", "cat", "a bird")])
@pytest.mark.parametrize("prefix", ["", "decoder:"])
def test_a_head_of_other_classes_starts_anew(tmp_path, stated, prefix):
    """Also of as many, which would fit."""
    saved = write(replace(SPEC, class_names=stated), tmp_path / "a.safetensors").state_dict()
    model = build_model(classed(SPEC), 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = model.load_init(f"{prefix}{tmp_path / 'a.safetensors'}")
    for name, value in model.state_dict().items():
        assert torch.equal(value, (saved if name in loaded else before)[name]), name
    assert not any("class_head" in name for name in loaded)
    assert "mask_decoder.iou_token.weight" in loaded


@pytest.mark.slow
def test_a_head_is_not_dropped_unasked(tmp_path):
    write(classed(SPEC), tmp_path / "a.safetensors")
    model = build_model(SPEC, 0)
    with error_line(r"cat, dog, a bird.*--classes"):
        model.load_init(str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    "names, message",
    [(("cat", "cat"), "'cat' twice"), (("",), "1 to 100"), (("x" * 101,), "1 to 100")],
)
def test_invalid_names_are_refused(names, message):
    with error_line(message):
        replace(SPEC, class_names=names)


@pytest.mark.slow
def test_metas_format_has_no_head(tmp_path):
    with error_line(r"classes.*safetensors"):
        official.write_pth(build_model(classed(SPEC), 0), tmp_path / "a.pth")
    with error_line(r"classes.*safetensors"):
        build_model(classed(SPEC), 0).save_pretrained(tmp_path / "folder")
