"""Distillation as users do it: two phases by one command, stopped, resumed, evaluated, planned."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gigamask
from gigamask import recipes
from gigamask.cli.main import main
from gigamask.data import tar
from gigamask.models import state_dict
from gigamask.models.configs import vit_h
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from tests.journeys.runs import CONSTANT_LR, records, same
from tests.little import SPEC, little
from tests.plugins.distill.students import little_student

STUDENT = f"{Path(__file__).resolve().parents[1] / 'students.py'}:little_student"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    model = replace(little(), seed=7).build()
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    state_dict.save_weights(model.state_dict(), model.config, path)
    return path


def distill(*words: object) -> int:
    return main(["distill", STUDENT, *map(str, words)])


def test_two_phases_by_one_command(scenes, teacher, tmp_path, capsys):
    words = ["--teacher", teacher, "--data", scenes, "--features.steps", 3, "--steps", 2]
    assert distill(*words, "--out", tmp_path / "run", "--json", tmp_path / "result.json") == 0
    printed = capsys.readouterr().out
    assert f"stage 1 of 2: 3 steps in {tmp_path / 'run' / 'features'}" in printed
    assert f"next: gigamask evaluate {tmp_path / 'run' / 'prompts'}" in printed
    first, second = (records(tmp_path / "run" / phase) for phase in ("features", "prompts"))
    assert [len(first), len(second)] == [3, 2]
    assert first[0]["mse"] > 0
    assert {"focal", "dice", "iou"} <= second[0].keys()
    taught = Sam.from_pretrained(teacher).mask_decoder.state_dict()
    features = Sam.from_pretrained(tmp_path / "run" / "features").mask_decoder.state_dict()
    assert all((taught[name] == value).all() for name, value in features.items())
    scores = tmp_path / "scores.json"
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(scenes)]) == 2
    assert f"one of its runs: {tmp_path}/run/features, " in capsys.readouterr().err
    command = ["evaluate", tmp_path / "run" / "prompts", "--data", scenes, "--max-images", 1]
    assert main([*map(str, command), "--device", "cpu", "--json", str(scores)]) == 0
    assert json.loads(scores.read_text())


@pytest.mark.long
def test_each_phase_resumes_bit_for_bit(scenes, teacher, tmp_path):
    words = ["--teacher", teacher, "--data", scenes, "--features.steps", 0, *CONSTANT_LR]
    for phase in ("features", "prompts"):
        flags = [*words, "--phase", phase, "--save-every", 1]
        assert distill(*flags, "--steps", 3, "--out", tmp_path / phase) == 0
        parts = tmp_path / f"{phase}_parts"
        assert distill(*flags, "--steps", 2, "--out", parts) == 0
        assert main(f"distill --resume {parts} --steps 3".split()) == 0
        assert same(tmp_path / phase, parts)


def test_another_teacher_does_not_go_on(scenes, teacher, tmp_path, capsys):
    copy = tmp_path / "teacher.safetensors"
    copy.write_bytes(teacher.read_bytes())
    words = ["--data", scenes, "--phase", "features", "--steps", 1, "--out", tmp_path / "run"]
    assert distill("--teacher", copy, *words) == 0
    model = replace(little(), seed=8).build()
    state_dict.save_weights(model.state_dict(), model.config, copy)
    assert main(f"distill --resume {tmp_path}/run --steps 2".split()) == 2
    assert f"{copy}: changed since {tmp_path / 'run'} was started" in capsys.readouterr().err


def test_photographs_without_masks_suffice_for_features(scenes, teacher, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (path,) = scenes.glob("*.tar")
    raw, members = path.read_bytes(), tar.scan(path)
    for name, start, size in zip(members.names, members.offsets, members.sizes, strict=True):
        if name.endswith(".jpg"):
            (folder / Path(name).name).write_bytes(raw[start : start + size])
    words = ["--teacher", teacher, "--data", folder, "--phase", "features", "--steps", 1]
    assert distill(*words, "--out", tmp_path / "run") == 0


def test_in_python(scenes, teacher, tmp_path):
    config = replace(little_student(), teacher=str(teacher), data=(str(scenes),), steps=1)
    config = config.with_(out=str(tmp_path / "run"), features__steps=1)
    run = gigamask.distill(config)
    assert (run.folder, run.finished) == (tmp_path / "run" / "prompts", True)
    assert gigamask.train(config).step == 1  # everything is done
    with pytest.raises(gigamask.GigamaskError, match="needs a DistillTrainConfig"):
        gigamask.distill(little())  # pyrefly: ignore[bad-argument-type]


@pytest.mark.long
def test_photographs_with_label_images_are_data(teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    for folder, high, shape in (("photos", 256, (48, 64, 3)), ("labels", 3, (48, 64))):
        Path(folder).mkdir()
        for number in range(4):
            pixels = chance.integers(0, high, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(f"{folder}/{number}.png")
    config = little_student().with_(data="photos", masks="labels", out="student", steps=2)
    assert gigamask.distill(config, teacher=str(teacher)).finished


@pytest.mark.long
def test_a_plan_counts_the_teacher():
    huge = replace(vit_h(), image_size=256)
    bytes_of_huge = sum(each.nbytes for each in build_model(huge, 0, "meta").parameters())
    config = recipes.compact_student()
    config = config.with_(features__steps=0, micro_batch_size=1, device="cpu")
    config = config.with_(prompts__clicks=0, prompts__mask_only_rounds=False)
    assumed = gigamask.plan(config.with_(teacher="nowhere.pth", teacher_decoder=False))
    assert assumed["phases"]["update"]["weights"] > bytes_of_huge
    known = gigamask.plan(config.with_(teacher="starter"))
    assert known["phases"]["update"]["weights"] < bytes_of_huge / 100
    assert known["flops_per_image"]["rounds"] > 0


WRONG = [
    ([], "--teacher is required"),
    (["--teacher", "nowhere.pth"], "--teacher nowhere.pth: no such file or folder in /"),
    ("--teacher TEACHER --model.image-size 32".split(), "use --model.image-size 64"),
    ("--teacher TEACHER --model.patch-size 16".split(), "the phase features needs equal ones"),
    (["--teacher", "TEACHER", "--compile"], "--compile is for 'gigamask train'"),
    ("--teacher TEACHER --teacher-iou-weight -1".split(), "--teacher-iou-weight is -1.0"),
    ("--teacher TEACHER --features.steps -1".split(), "--features.steps must be at least 0"),
    (
        "--teacher TEACHER --model.decoder-mlp 16 --features.steps 0".split(),
        "a decoder needs --model.embedding-dim",
    ),
    (
        "--teacher TEACHER --teacher-cache c --loader.augment scale_jitter".split(),
        "use --loader.augment none or flip",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_uses_are_one_line(scenes, teacher, tmp_path, capsys, words, message):
    words = [str(teacher) if word == "TEACHER" else word for word in words]
    assert distill(*words, "--data", scenes, "--out", tmp_path / "run", "--steps", 1) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").rglob("step_*"))


def test_a_student_with_another_embedding_learns_by_prompts(scenes, teacher, tmp_path):
    """Nothing of the teacher fits but the images."""
    words = ["--teacher", teacher, "--data", scenes, "--features.steps", 0, "--steps", 1]
    words += ["--no-teacher-decoder", "--model.patch-size", 16]
    assert distill(*words, "--out", tmp_path / "run") == 0
    config = Sam.from_pretrained(tmp_path / "run").config
    assert config == replace(SPEC, patch_size=16)
