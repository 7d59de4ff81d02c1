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
from tests.broken import flip
from tests.checkpoints import save
from tests.errors import error_line
from tests.plugins.grounding.asked import run_in

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
DENSE = np.zeros((4, 30, 40), bool)
DENSE[0, 2:9, 3:8] = DENSE[1, 10:20, 10:30] = DENSE[2, 22:29, 1:9] = DENSE[3] = True
SCENE = PIXELS, RLEMasks.from_dense(DENSE)


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
    model, confidence = run.build().eval(), Confidence(2.0, -0.5)
    predictor = GroundingPredictor(run, model, confidence)
    texts = ["a red square", "the circle left of the blue triangle", "the red"]
    found = predictor.predict(*SCENE, texts)
    assert [each.text for each in found] == texts
    for text, each in zip(texts, found, strict=True):
        features = predictor.mask_features.extract(*SCENE)[None]
        words = run.backbones.text_features()([text])
        given = features, torch.ones(1, 4, dtype=torch.bool), words.features, words.attention_mask
        with torch.no_grad():
            scores = model(*given)[0].double().numpy()
        logits = scores[:-1] - scores[-1]
        assert each.order.tolist() == np.argsort(-logits, kind="stable").tolist()
        assert each.confidence == pytest.approx(confidence(logits[each.order]), abs=1e-5)
        assert each.num_matches == (logits > 0).sum()
        assert (np.diff(each.confidence) <= 0).all()
        alone = predictor.predict(*SCENE, [text])[0]
        assert alone.order.tolist() == each.order.tolist()


@pytest.mark.slow
def test_prediction_caches_nothing(tmp_path, described):
    run = run_in(tmp_path / "run", described, cache=None)
    GroundingPredictor(run, run.build().eval(), Confidence()).predict(*SCENE, ["red"])
    assert not run.backbones.cache_folder.exists()


@pytest.mark.slow
def test_words_that_no_training_query_has_are_noted(run):
    model = run.build().eval()
    predictor = GroundingPredictor(run, model, Confidence(), {"the", "red", "box"})
    known, partly = predictor.predict(*SCENE, ["red box", "red blorp"])
    assert (known.note, partly.note) == ("", "not in the training queries: blorp")
    [unsaid] = GroundingPredictor(run, model, Confidence()).predict(*SCENE, ["zxqv"])
    assert unsaid.note == "", "the words of an older run are not known"


@pytest.mark.slow
def test_a_long_text_or_one_without_letters_is_refused_and_one_that_is_cut_says_so(run):
    predictor = GroundingPredictor(run, run.build().eval(), Confidence(), {"red"})
    whole, cut = predictor.predict(*SCENE, ["red", " ".join(["red"] * 80)])
    assert whole.note == ""
    assert "only its first 24 tokens" in cut.note
    for text, message in (("a" * 1001, "1,001 characters"), ("7", "'7'")):
        with error_line(message):
            predictor.predict(*SCENE, ["red", text])


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
    [found] = GroundingPredictor(run, model, Confidence()).predict(*SCENE, ["red square"])
    assert len(found.order) == 4


@pytest.mark.slow
def test_what_holds_no_checkpoint_or_a_damaged_one_is_named(run):
    with error_line(rf"^{run.out}: .*--out {run.out}$"):
        load_model(run, run.out)
    saved(run)
    path = Path(run.out) / "checkpoints" / "step_00000001"
    flip(path / "model.safetensors", -1)
    with error_line(r"model.safetensors"):
        load_model(run, str(path))


def test_pictures_show_what_fits(run):
    fits = GroundingResult("the red box", np.array([1, 0, 3, 2]), np.array([0.9, 0.7, 0.2, 0.1]), 2)
    before = PIXELS.copy()
    shown = draw_result(*SCENE, fits, 3)
    assert shown.shape == (30 + 3 * 18 + 6, 40, 3), (
        "a line for each word, where no two fit into one"
    )
    assert np.array_equal(PIXELS, before)
    assert (shown[:30][DENSE[2]] == PIXELS[DENSE[2]]).mean() > 0.9, "which does not fit"
    assert (shown[:30][DENSE[1]] != PIXELS[DENSE[1]]).any(1).all()
    one = draw_result(*SCENE, fits, 1)
    assert (one[:30][DENSE[0]] == PIXELS[DENSE[0]]).mean() > 0.3
    assert not np.array_equal(one, shown)


def test_where_nothing_fits_the_best_is_outlined_alone(run):
    none = GroundingResult(
        "an elephant", np.array([2, 0, 1, 3]), np.array([0.2, 0.1, 0.05, 0.01]), 0
    )
    shown = draw_result(*SCENE, none, 3)
    assert (shown[:30][DENSE[2]] != PIXELS[DENSE[2]]).any()
    assert np.array_equal(shown[:8], PIXELS[:8])
    assert (shown[30:] < 128).any(), "the text stands below"
