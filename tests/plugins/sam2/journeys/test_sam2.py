"""A small SAM 2.1 image model, from Meta's file to exports, as users type it."""

from pathlib import Path

import pytest
import torch

from gigamask import load_model
from gigamask.cli.main import main
from gigamask.models.init import build_model
from gigamask.plugins.sam2 import convert
from gigamask.serialization import read_json
from tests.journeys.runs import records, same
from tests.plugins.sam2.models import SAM2

MODEL = (
    "--model.image-size 64 --model.embedding-dim 32 --model.decoder-num-heads 2 "
    "--model.decoder-mlp 32 --model.iou-hidden 16 --model.encoder.embed-dim 16 "
    "--model.encoder.depths 1 1 2 1 --model.encoder.global-attn-indexes 3 "
    "--model.encoder.window-sizes 8 4 6 3"
).split()
TRAINING = (
    "--batch-size 2 --micro-batch-size 2 --loader.max-masks 3 --loader.workers 0 "
    "--prompts.clicks 2 --device cpu --save-every 1 --schedule multistep "
    "--schedule.milestones 1.0 --schedule.warmup-steps 0 --evaluation none --optimizer.lr 1e-3"
).split()
SMALL = [*MODEL, *TRAINING]
FEW = "--points-per-side 3 --pred-iou-thresh 0 --stability-score-thresh 0".split()


def run_command(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A file like Meta's, with tensors of videos."""
    path = tmp_path_factory.mktemp("published") / "sam2.1_hiera_little.pt"
    state = convert.to_meta(build_model(SAM2, 3).state_dict())
    torch.save({"model": {**state, "maskmem_tpos_enc": torch.ones(7, 1, 1, 64)}}, path)
    return path


@pytest.fixture(scope="module")
def run(scenes, published, tmp_path_factory) -> Path:
    """Three steps of the recipe from the file."""
    folder = tmp_path_factory.mktemp("sam2") / "run"
    words = ["sam2_tiny", "--data", scenes, "--init", published, "--out", folder, *SMALL]
    assert run_command("train", *words, "--steps", 3) == 0
    return folder


def test_it_starts_from_metas_file_and_all_but_the_object_score_learns(run, published):
    config = load_model(run).config
    assert (config.encoder, config.decoder, config.stretch) == (SAM2.encoder, SAM2.decoder, True)
    begun = convert.from_meta(torch.load(published)["model"], "begun")
    now = load_model(run).state_dict()
    still = {name for name, value in begun.items() if torch.equal(value, now[name])}
    assert {name for name in begun if "obj_score_head" in name} <= still
    assert not any(name.startswith("image_encoder.") for name in still)
    assert {"focal", "dice", "iou_head", "iou"} <= records(run)[-1].keys()


def test_it_resumes_bit_for_bit(run, scenes, published, tmp_path):
    other = tmp_path / "other"
    words = ["sam2_tiny", "--data", scenes, "--init", published, "--out", other, *SMALL]
    assert run_command("train", *words, "--steps", 2) == 0
    assert not same(run, other)
    assert run_command("train", "--resume", other, "--steps", 3) == 0
    assert same(run, other)


def test_recomputing_blocks_changes_nothing(run, scenes, published, tmp_path):
    other = tmp_path / "other"
    words = ["sam2_tiny", "--data", scenes, "--init", published, "--out", other, *SMALL]
    assert run_command("train", *words, "--steps", 3, "--activation-checkpointing", 1) == 0
    assert same(run, other)


def test_it_is_evaluated_and_segments(run, scenes, tmp_path):
    scores = tmp_path / "scores.json"
    words = ["--data", scenes, "--max-images", 2, "--json", scores]
    assert run_command("evaluate", run, *words) == 0
    plain = read_json(scores)
    assert run_command("evaluate", run, *words, "--tile", 64) == 0
    assert read_json(scores) != plain
    (tar, *_) = sorted(Path(scenes).glob("*.tar"))
    assert run_command("segment", run, tar, "--out", tmp_path / "masks", *FEW) == 0
    assert any((tmp_path / "masks").iterdir())


@pytest.mark.long
def test_it_is_exported_and_read_back(run, tmp_path, capsys):
    model = load_model(run)
    for kind, out in (
        ("safetensors", "w.safetensors"),
        ("official", "w.pth"),
        ("huggingface", "folder"),
    ):
        assert run_command("export", run, "--to", kind, "--out", tmp_path / out) == 0
        read = load_model(tmp_path / out)
        assert read.config == model.config
        for name, value in model.state_dict().items():
            assert torch.equal(read.state_dict()[name], value)
    written = torch.load(tmp_path / "w.pth", weights_only=True)
    assert written.keys() == {"model"}
    assert torch.equal(written["model"]["maskmem_tpos_enc"], torch.ones(7, 1, 1, 64))
    assert run_command("export", run, "--to", "onnx", "--out", tmp_path / "onnx") == 0
    assert "read back: outputs differ by at most" in capsys.readouterr().out


@pytest.mark.long
def test_its_memory_is_planned(capsys):
    words = ["sam2_tiny", *MODEL, *"--prompts.clicks 1 --batch-size 1".split()]
    assert run_command("plan", *words, "--gpu", "h200") == 0
    assert "2 rounds" in capsys.readouterr().out


def test_hiera_alone_has_sams_decoder(scenes, tmp_path):
    out = tmp_path / "run"
    words = f"train tiny --data {scenes} --out {out} --model.encoder hiera --model.patch-size 16 "
    words += "--steps 1 --evaluation none --device cpu"
    assert run_command(*words.split(), *MODEL) == 0
    assert load_model(out).config.encoder == SAM2.encoder


@pytest.mark.parametrize(
    "words, message",
    [
        ("sam2_tiny --model.patch-size 8", "needs --model.patch-size 16"),
        ("sam2_tiny --model.image-size 1008", "multiple of 32"),
        ("sam2_tiny --model.encoder vit", "sam2 needs --model.encoder hiera"),
        ("sam2_tiny --model.encoder.window-sizes 7 4 14 7", "must be even"),
        ("sam2_tiny --model.encoder.global-attn-indexes 12", "must be in 0 to 11"),
        ("sam2_tiny --model.encoder.num-heads 5", "multiple of 5"),
        ("sam2_tiny --model.encoder.depths 1 0 1 1", "depths must be at least 1"),
        (
            "sam2_tiny --model.decoder.stability-threshold 2",
            "must be between 0 and 1 (got 2.0)",
        ),
        ("tiny --model.decoder sam2", "sam2 needs --model.encoder hiera"),
    ],
)
def test_what_does_not_fit_is_one_line(scenes, tmp_path, words, message, capsys):
    out = tmp_path / "run"
    given = ["--data", scenes, "--out", out, "--steps", 1]
    assert run_command("train", *words.split(), *given) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in told
    assert told.startswith("gigamask: ")


def test_weights_that_do_not_fit_are_refused(scenes, run, tmp_path, capsys):
    words = ["--data", scenes, "--out", tmp_path / "run", "--steps", 1]
    unknown = tmp_path / "unknown.pt"
    state = convert.to_meta(build_model(SAM2, 0).state_dict())
    torch.save({"model": {**state, "sam_video_decoder.weight": torch.zeros(1)}}, unknown)
    for weights, message in (
        (run, "has the image encoder hiera, the model has vit"),
        (unknown, "has unknown 1 (sam_video_decoder.weight); use a file of SAM 2.1"),
    ):
        assert run_command("train", "tiny", *words, "--init", weights) == 2
        told = capsys.readouterr().err
        assert message in told
        assert "Traceback" not in told
