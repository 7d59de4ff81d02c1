"""The recipe `compact`, shrunk: everything that a user does with a model, as they type it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.sam.sam import Sam
from gigamask.serialization import read_json
from gigamask.synthetic.scenes import compose_scene
from gigamask.training import checkpoint
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import records, same

SMALL = (
    "--model.image-size 64 --batch-size 2 --micro-batch-size 2 --masks-per-chunk 3 "
    "--loader.max-masks 3 --loader.workers 0 --device cpu "
    "--schedule multistep --schedule.milestones 1.0 --schedule.warmup-steps 1"
)
COMPACT = f"{LITTLE}_compact"
FEW = "--points-per-side 3 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    """Three steps of the recipe."""
    folder = tmp_path_factory.mktemp("compact") / "run"
    words = f"compact --data {scenes} --out {folder} {SMALL} --steps 3"
    invoke("train", words, "--save-every 1")
    return folder


@pytest.fixture(scope="module")
def model(run) -> Sam:
    return Sam.from_pretrained(run)


@pytest.fixture
def picture() -> np.ndarray:
    return compose_scene(1, 0).pixels[::4, ::4]


@pytest.mark.long
def test_its_run_states_the_model_and_resumes_bit_for_bit(run, model, scenes, tmp_path):
    assert isinstance(model.config.encoder, ConvPyramid)
    assert isinstance(model.config.decoder, WindowDecoder)
    assert {"bce", "dice", "iou_head", "iou"} <= records(run)[-1].keys()
    other = tmp_path / "other"
    words = f"compact --data {scenes} --out {other} {SMALL} --save-every 1"
    invoke("train", words, "--steps 2")
    assert not same(run, other)
    invoke(f"train --resume {other} --steps 3")
    assert same(run, other)


@pytest.mark.long
def test_another_run_starts_from_it(run, scenes, tmp_path):
    after = tmp_path / "after"
    words = f"compact --data {scenes} --out {after} {SMALL} --steps 1"
    invoke("train", words, f"--init {run} --freeze image_encoder")
    states = [Sam.from_pretrained(each).state_dict() for each in (run, after)]
    moved = {name for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    assert {name.split(".")[0] for name in moved} == {"mask_decoder", "prompt_encoder"}


def test_sams_loss_trains_it_too(scenes, tmp_path):
    """The answers on the grid of the whole image carry gradients."""
    out = tmp_path / "run"
    words = f"{COMPACT} --data {scenes} --out {out} --loss sam --steps 2"
    invoke("train", words)
    last = Sam.from_pretrained(out).state_dict()
    # The last layer starts at 0, and everything learns through it.
    assert last["mask_decoder.output_hypernetwork_mlp.layers.2.weight"].any()
    assert {"focal", "dice", "iou_head"} <= records(out)[-1].keys()


@pytest.mark.parametrize("prompts", ["mixed", "two_sided"])
def test_other_prompt_schedules(scenes, tmp_path, prompts):
    words = f"{COMPACT} --data {scenes} --out {tmp_path}/run --prompts {prompts}"
    invoke("train", words, "--steps 1")
    assert np.isfinite(records(tmp_path / "run")[-1]["loss"])


def test_the_loss_in_windows_wants_a_model_with_windows(scenes, tmp_path, capsys):
    words = f"tiny --data {scenes} --out {tmp_path}/run --loss window"
    told = refusal(capsys, "train", words, SMALL, "--model.patch-size 8 --steps 1")
    assert "--loss window" in told
    assert "--loss sam" in told


@pytest.mark.long
def test_weights_of_other_models_are_refused(run, scenes, tmp_path, capsys):
    words = f"tiny --data {scenes} --out {tmp_path}/run --steps 1"
    assert str(run) in refusal(capsys, "train", words, f"--init {run}")


@pytest.mark.long
def test_it_is_evaluated_and_segments(run, scenes, tmp_path):
    told = tmp_path / "told.json"
    words = f"--data {scenes} --max-images 2 --json {told}"
    invoke(f"evaluate {run}", words)
    scores = read_json(told)
    assert scores
    last = checkpoint.newest(run) / checkpoint.MODEL
    invoke(f"evaluate {last}", words)
    out = tmp_path / "out"
    segment = f"segment {run} {scenes} --out {out} {FEW}"
    invoke(segment, f"--cache {tmp_path}/cache --json {told}")
    done = read_json(told)
    assert done["images"] == 12
    assert done["masks"] > 12
    assert len(list((tmp_path / "cache").iterdir())) == 12


def test_it_is_exported_where_its_decoder_is_known(run, scenes, tmp_path, capsys):
    copy = tmp_path / "copy.safetensors"
    invoke(f"export {run} --to safetensors --out {copy}")
    assert "all outputs are equal" in capsys.readouterr().out
    ours, theirs = Sam.from_pretrained(run), Sam.from_pretrained(copy)
    assert ours.config == theirs.config
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    for to, out in (("official", "sam.pth"), ("huggingface", "hf")):
        told = refusal(capsys, f"export {run} --to {to} --out {tmp_path}/{out}")
        assert "--to safetensors" in told
        assert "--to onnx" in told
        assert not (tmp_path / out).exists()


@pytest.mark.long
def test_onnx_export_gives_the_same_masks(run, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    invoke(f"export {run} --to onnx --out {tmp_path}/onnx")
    assert "differ by " in capsys.readouterr().out


def test_predictor_answers_all_kinds_of_prompts(model, picture, tmp_path, monkeypatch):
    predictor = SamPredictor(model, cache=EmbeddingCache(tmp_path))
    predictor.set_image(picture)
    height, width = picture.shape[:2]
    points, labels = np.array([[width / 2, height / 2]]), np.array([1])
    box = np.array([width / 4, height / 4, 3 * width / 4, 3 * height / 4])
    expected = []
    for question in (
        {"point_coords": points, "point_labels": labels},
        {"box": box},
        {"point_coords": points, "point_labels": labels, "box": box},
        {},
    ):
        masks, iou, low = predictor.predict(**question)
        assert masks.shape == (3, height, width)
        assert ((iou > 0) & (iou < 1)).all()
        one, score, _ = predictor.predict(**question, multimask_output=False)
        assert (one[0] == masks[iou.argmax()]).all()
        assert score[0] == pytest.approx(iou.max())
        again, *_ = predictor.predict(**question, mask_input=low[:1], multimask_output=False)
        assert again.shape == (1, height, width)
        expected.append(masks)
    # Hardly trained, it answers with about the box's ellipse, in the box.
    inside = np.zeros((height, width), bool)
    inside[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = True
    assert (expected[1][1] & inside).sum() > 0.7 * inside.sum()
    assert (expected[1][1] & ~inside).sum() < 0.1 * inside.sum()
    encode, calls = model.encode, []
    monkeypatch.setattr(model, "encode", lambda *given: calls.append(1) or encode(*given))
    cached = SamPredictor(model, cache=EmbeddingCache(tmp_path))
    cached.set_image(picture)
    assert not calls
    assert (cached.predict(box=box)[0] == expected[1]).all()


def test_batches_of_prompts_are_each_alone(model, picture):
    predictor = SamPredictor(model)
    predictor.set_images([picture, picture[:, ::-1].copy(), picture[: len(picture) // 2]])
    predictor.select(2)
    alone = SamPredictor(model)
    alone.set_image(picture[: len(picture) // 2])
    points = torch.tensor([[[5.0, 9.0]], [[20.0, 12.0]]], dtype=torch.float64)
    labels = torch.ones(2, 1, dtype=torch.int32)
    together = predictor.predict_torch(points, labels, None, None, True, True)
    for i in range(2):
        own = alone.predict_torch(points[i : i + 1], labels[i : i + 1], None, None, True, True)
        for whole, part in zip(together, own, strict=True):
            assert torch.allclose(whole[i : i + 1], part, atol=1e-4)


def test_metas_interface_of_several_images(model):
    image = torch.full((3, 48, 64), 90.0)
    boxes = torch.tensor([[8.0, 8.0, 40.0, 40.0], [2.0, 2.0, 20.0, 30.0]])
    with torch.no_grad():
        (found,) = model([{"image": image, "original_size": (96, 128), "boxes": boxes}], True)
    assert found["masks"].shape == (2, 3, 96, 128)
    assert found["low_res_logits"].shape == (2, 3, 64, 64)
    assert found["masks"].any((2, 3)).all()


def test_automatic_masks(model, picture):
    generator = SamAutomaticMaskGenerator(
        model, points_per_side=3, pred_iou_thresh=0.0, stability_score_thresh=0.0
    )
    found = generator.generate(picture)
    assert found
    assert all(each["segmentation"].shape == picture.shape[:2] for each in found)
    assert all(each["area"] == each["segmentation"].sum() for each in found)


@pytest.mark.long
def test_a_plan_needs_no_data(tmp_path, capsys):
    told = tmp_path / "plan.json"
    quick = "--optimizer adamw --prompts.clicks 0"  # fake tensors are slow
    invoke("plan compact", SMALL, quick, f"--json {told}")
    assert read_json(told)["peak_bytes"] > 0
    assert "M parameters" in capsys.readouterr().out


def test_a_sample_is_followed(scenes, tmp_path, capsys):
    told = tmp_path / "told.json"
    words = f"--recipe compact --json {told}"
    invoke(f"follow {scenes}/sa_000000.tar:sa_3", words)
    assert "1 x 97 x 64 x 64" in capsys.readouterr().out.replace(", ", " x ")
    assert len(read_json(told)["steps"]) == 9
