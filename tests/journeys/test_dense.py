"""Options of SAM's decoder, as a user types them."""

import json
from pathlib import Path

import numpy as np
import pytest

from gigamask.cli.main import main
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.models.configs import SamDecoder
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.sam.sam import Sam
from gigamask.synthetic.scenes import compose_scene
from gigamask.training import checkpoint
from gigamask.workflows.ablation_tables import TABLES
from tests.journeys.runs import records

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
OPTIONS = {name: flags for name, flags in TABLES["dense"].items() if flags}


def train(*words: object) -> int:
    return main(["train", *map(str, words)])


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    """Three steps with all options."""
    folder = tmp_path_factory.mktemp("dense") / "run"
    words = [LITTLE, "--data", scenes, "--out", folder, *OPTIONS["windows"], "--loss", "window"]
    assert train(*words, "--steps", 3) == 0
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "loss"),
    [("prior", "sam"), ("prior", "window"), ("windows", "sam"), ("windows", "window")],
)
def test_each_option_is_trained(scenes, tmp_path, name, loss, capsys):
    """On the same batches, the loss of later steps is below that of a model that stays as it is."""
    out = tmp_path / "run"
    words = [LITTLE, "--data", scenes, *OPTIONS[name], "--loss", loss]
    words += ["--batch-size", 4, "--micro-batch-size", 4]
    if loss == "window" and "--model.decoder.windows" not in OPTIONS[name]:
        assert train(*words, "--out", out, "--steps", 1) == 2
        assert "--loss sam" in capsys.readouterr().err
        return
    later = {}
    for lr, folder in ((1e-8, tmp_path / "still"), (1e-3, out)):
        assert train(*words, "--out", folder, "--optimizer.lr", lr, "--steps", 10) == 0
        losses = [line["loss"] for line in records(folder) if "loss" in line]
        assert len(losses) == 10
        later[lr] = np.mean(losses[3:])
    assert later[1e-3] < later[1e-8]
    stated = vars(Sam.from_pretrained(out).config.decoder)
    wanted = {flag.rpartition(".")[2].replace("-", "_") for flag in OPTIONS[name]}
    assert {option for option, value in stated.items() if value} == wanted


@pytest.mark.long
def test_it_is_evaluated_and_segments(run, scenes, tmp_path):
    told = tmp_path / "told.json"
    words = f"--data {scenes} --max-images 2 --json {told}".split()
    assert main(["evaluate", str(run), *words]) == 0
    scores = json.loads(told.read_text())
    assert main(["evaluate", str(checkpoint.newest(run) / checkpoint.MODEL), *words]) == 0
    assert json.loads(told.read_text())["clicks"] == scores["clicks"]


def test_predictor_and_automatic_masks(run, tmp_path, monkeypatch):
    model, picture = Sam.from_pretrained(run), compose_scene(1, 0).pixels[::4, ::4]
    predictor = SamPredictor(model, cache=EmbeddingCache(tmp_path))
    predictor.set_image(picture)
    height, width = picture.shape[:2]
    box = np.array([width / 4, height / 4, 3 * width / 4, 3 * height / 4])
    expected = predictor.predict(box=box)
    assert expected[0].shape == (3, height, width)
    again, *_ = predictor.predict(box=box, mask_input=expected[2][:1], multimask_output=False)
    assert again.shape == (1, height, width)
    encode, calls = model.encode, []
    monkeypatch.setattr(model, "encode", lambda *given: calls.append(1) or encode(*given))
    cached = SamPredictor(model, cache=EmbeddingCache(tmp_path))
    cached.set_image(picture)
    assert not calls
    assert (cached.predict(box=box)[0] == expected[0]).all()
    thresholds = {"pred_iou_thresh": 0.0, "stability_score_thresh": 0.0}
    generator = SamAutomaticMaskGenerator(model, points_per_side=2, **thresholds)
    assert all(mask["segmentation"].any() for mask in generator.generate(picture))


@pytest.mark.long
def test_a_plan_needs_no_data(tmp_path):
    told = tmp_path / "plan.json"
    small = "--model.image-size 256 --model.depth 2 --model.global-attn-indexes 1"
    quick = "--prompts.clicks 1 --prompts.no-mask-only-rounds --micro-batch-size 1"
    words = f"plan sam_vit_b {small} {quick} --json {told}".split()
    assert main([*words, *OPTIONS["windows"]]) == 0
    assert json.loads(told.read_text())["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--model.decoder.residual"], "--model.decoder.prior"),
        (["tiny", "--model.decoder.priors"], "--model.decoder.prior"),
        (["compact", "--model.decoder.prior"], "--model.decoder.prior"),
    ],
)
def test_what_does_not_fit_is_one_line(scenes, tmp_path, words, message, capsys):
    assert train(*words, "--data", scenes, "--out", tmp_path / "run") == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_published_weights_start_a_model_with_a_prior(scenes, tmp_path):
    """Options without weights of their own."""
    plain, after = tmp_path / "plain", tmp_path / "after"
    assert train(LITTLE, "--data", scenes, "--out", plain, "--steps", 1) == 0
    words = [LITTLE, "--data", scenes, "--out", after, "--init", plain, "--steps", 1]
    assert train(*words, "--model.decoder.prior", "--model.decoder.windows") == 0
    assert Sam.from_pretrained(after).config.decoder == SamDecoder(prior=True, windows=True)
