"""Inference on one image."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask.masks.rle import RLEMasks
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.plugins.grounding.inference import (
    GroundingPredictor,
    GroundingResult,
    draw_result,
    load_model,
)
from gigamask.training.state import TrainState
from tests.checkpoints import save
from tests.errors import error_line
from tests.plugins.grounding.asked import run_in


@pytest.fixture
def run(tmp_path, described):
    return run_in(tmp_path / "run", described)


def scene(seed=0):
    generator = np.random.default_rng(seed)
    masks = np.zeros((4, 30, 40), bool)
    masks[0, 2:9, 3:8] = masks[1, 10:20, 10:30] = masks[2, 22:29, 1:9] = masks[3] = True
    return generator.integers(0, 256, (30, 40, 3), dtype=np.uint8), RLEMasks.from_dense(masks)


def saved(run, step=1):
    """A checkpoint of the run, of weights that are not those it starts from."""
    state = TrainState.initialize(run, torch.device("cpu"))
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(0.1 * step)
    state.step = step
    save(state, run)
    return state.model


@pytest.mark.slow
def test_predictions_are_ranked_by_the_models_scores(run):
    model, (pixels, masks), confidence = run.build().eval(), scene(), Confidence(2.0, -0.5)
    predictor = GroundingPredictor(run, model, confidence)
    texts = ["a red square", "the circle left of the blue triangle", "the red"]
    found = predictor.predict(pixels, masks, texts)
    assert [each.text for each in found] == texts
    for text, each in zip(texts, found, strict=True):
        features = predictor.mask_features.extract(pixels, masks)[None]
        words = run.backbones.text_features()([text])
        given = features, torch.ones(1, 4, dtype=torch.bool), words.features, words.attention_mask
        with torch.no_grad():
            scores = model(*given)[0].double().numpy()
        logits = scores[:-1] - scores[-1]
        assert each.order.tolist() == np.argsort(-logits, kind="stable").tolist()
        assert each.confidence == pytest.approx(confidence(logits[each.order]), abs=1e-5)
        assert each.num_matches == (logits > 0).sum()
        assert (np.diff(each.confidence) <= 0).all()
        alone = predictor.predict(pixels, masks, [text])[0]
        assert alone.order.tolist() == each.order.tolist()


@pytest.mark.slow
def test_prediction_caches_nothing(tmp_path, described):
    run = run_in(tmp_path / "run", described, cache=None)
    pixels, masks = scene()
    GroundingPredictor(run, run.build().eval(), Confidence()).predict(pixels, masks, ["red"])
    assert not run.backbones.cache_folder.exists()


@pytest.mark.slow
def test_words_that_no_training_query_has_are_noted(run):
    pixels, masks = scene()
    model = run.build().eval()
    predictor = GroundingPredictor(run, model, Confidence(), {"the", "red", "box"})
    known, partly = predictor.predict(pixels, masks, ["red box", "red blorp"])
    assert (known.note, partly.note) == ("", "not in the training queries: blorp")
    [unsaid] = GroundingPredictor(run, model, Confidence()).predict(pixels, masks, ["zxqv"])
    assert unsaid.note == "", "the words of an older run are not known"


@pytest.mark.slow
def test_a_long_text_or_one_without_letters_is_refused_and_one_that_is_cut_says_so(run):
    pixels, masks = scene()
    predictor = GroundingPredictor(run, run.build().eval(), Confidence(), {"red"})
    whole, cut = predictor.predict(pixels, masks, ["red", " ".join(["red"] * 80)])
    assert whole.note == ""
    assert "only its first 24 tokens" in cut.note
    for text, message in (("a" * 1001, "1,001 characters"), ("7", "'7'")):
        with error_line(message):
            predictor.predict(pixels, masks, ["red", text])


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_a_checkpoint_and_the_best_are_loaded(tmp_path, described, lora_rank):
    run = run_in(tmp_path / "run", described, lora_rank=lora_rank)
    first, second = saved(run, 1), saved(run, 2)
    folder = Path(run.out) / "checkpoints"
    os.symlink("step_00000001", folder / "best")
    for path, wanted in (
        (run.out, second),
        (folder / "step_00000001", first),
        (folder / "best", first),
    ):
        model = load_model(run, str(path))
        assert not model.training
        assert model.state_dict().keys() == wanted.state_dict().keys()
        assert all(
            torch.equal(tensor, wanted.state_dict()[name])
            for name, tensor in model.state_dict().items()
        )
    pixels, masks = scene()
    [found] = GroundingPredictor(run, model, Confidence()).predict(pixels, masks, ["red square"])
    assert len(found.order) == 4


@pytest.mark.slow
def test_what_holds_no_checkpoint_or_a_damaged_one_is_named(run):
    with error_line(rf"^{run.out}: .*--out {run.out}$"):
        load_model(run, run.out)
    saved(run)
    path = Path(run.out) / "checkpoints" / "step_00000001" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with error_line(r"model.safetensors"):
        load_model(run, str(path.parent))


def test_pictures_show_what_fits(run):
    pixels, masks = scene()
    fits = GroundingResult("the red box", np.array([1, 0, 3, 2]), np.array([0.9, 0.7, 0.2, 0.1]), 2)
    before = pixels.copy()
    shown = draw_result(pixels, masks, fits, 3)
    assert shown.shape == (30 + 3 * 18 + 6, 40, 3), (
        "a line for each word, where no two fit into one"
    )
    assert np.array_equal(pixels, before)
    dense = masks.to_dense()
    assert (shown[:30][dense[2]] == pixels[dense[2]]).mean() > 0.9, "which does not fit"
    assert (shown[:30][dense[1]] != pixels[dense[1]]).any(1).all()
    one = draw_result(pixels, masks, fits, 1)
    assert (one[:30][dense[0]] == pixels[dense[0]]).mean() > 0.3
    assert not np.array_equal(one, shown)


def test_where_nothing_fits_the_best_is_outlined_alone(run):
    pixels, masks = scene()
    none = GroundingResult(
        "an elephant", np.array([2, 0, 1, 3]), np.array([0.2, 0.1, 0.05, 0.01]), 0
    )
    shown, dense = draw_result(pixels, masks, none, 3), masks.to_dense()
    assert (shown[:30][dense[2]] != pixels[dense[2]]).any()
    assert np.array_equal(shown[:8], pixels[:8])
    assert (shown[30:] < 128).any(), "the text stands below"
