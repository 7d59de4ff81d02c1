"""Distillation as users do it: two phases by one command, stopped, resumed, evaluated, planned."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import gigamask
from gigamask import recipes
from gigamask.models.configs import vit_h
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from tests.commands import exit_code, invoke, refusal
from tests.journeys.runs import records
from tests.little import SPEC, little
from tests.plugins.distill.students import little_student

STUDENT = f"{Path(__file__).resolve().parents[1] / 'students.py'}:little_student"


def distill(words: str) -> None:
    invoke(f"distill {STUDENT}", words)


def test_two_phases_by_one_command(scenes, weights, tmp_path, capsys):
    words = f"--teacher {weights} --data {scenes} --features.steps 3 --steps 2"
    distill(f"{words} --out {tmp_path}/run")
    printed = capsys.readouterr().out
    assert f"stage 1 of 2: 3 steps in {tmp_path / 'run' / 'features'}" in printed
    assert f"next: gigamask evaluate {tmp_path / 'run' / 'prompts'}" in printed
    first, second = (records(tmp_path / "run" / phase) for phase in ("features", "prompts"))
    assert [len(first), len(second)] == [3, 2]
    assert first[0]["mse"] > 0
    assert f"one of its runs: {tmp_path}/run/features, " in refusal(
        capsys, "evaluate", tmp_path / "run", "--data", scenes
    )
    command = f"evaluate {tmp_path}/run/prompts --data {scenes} --max-images 1 --device cpu"
    invoke(command)


def test_another_teacher_does_not_go_on(scenes, tmp_path, capsys):
    path = tmp_path / "teacher.safetensors"
    gigamask.save_model(build_model(SPEC, 7), path)
    words = f"--data {scenes} --phase features --steps 1 --out {tmp_path}/run"
    distill(f"--teacher {path} {words}")
    invoke(f"distill --resume {tmp_path}/run --steps 2")
    gigamask.save_model(build_model(SPEC, 8), path)
    assert exit_code(f"distill --resume {tmp_path}/run --steps 3") == 2
    assert f"{path}: changed since {tmp_path / 'run'} was started" in capsys.readouterr().err


def test_photographs_without_masks_suffice_for_features(weights, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        Image.effect_noise((90, 60), 80).convert("RGB").save(folder / f"{number}.jpg")
    words = f"--teacher {weights} --data {folder} --phase features --steps 1"
    distill(f"{words} --out {tmp_path}/run")


def test_in_python(scenes, weights, tmp_path):
    places = {"teacher": str(weights), "data": (str(scenes),), "out": str(tmp_path / "run")}
    config = little_student().with_(**places, steps=1, features__steps=1)
    begun = gigamask.distill(config, max_minutes=0)
    assert (begun.folder, begun.step, begun.finished) == (tmp_path / "run" / "features", 1, False)
    run = gigamask.distill(config)
    assert (run.folder, run.finished) == (tmp_path / "run" / "prompts", True)
    assert gigamask.train(config).step == 1  # everything is done
    with pytest.raises(gigamask.GigamaskError, match="needs a DistillTrainConfig"):
        gigamask.distill(little())  # pyrefly: ignore[bad-argument-type]


@pytest.mark.long
def test_a_plan_counts_the_teacher():
    huge = replace(vit_h(), image_size=256)
    bytes_of_huge = sum(each.nbytes for each in build_model(huge, 0, "meta").parameters())
    config = recipes.compact_student()
    config = config.with_(features__steps=0, micro_batch_size=1, device="cpu")
    config = config.with_(prompts__clicks=0, prompts__mask_only_rounds=False)
    assumed = gigamask.plan(config.with_(teacher="nowhere.pth", teacher_decoder=False))
    assert assumed["phases"]["update"]["weights"] > bytes_of_huge
    known = gigamask.plan(config.with_(teacher="starter", model__image_size=320))
    assert known["phases"]["update"]["weights"] < bytes_of_huge / 100
    assert known["flops_per_image"]["rounds"] > 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--teacher nowhere.pth", "--teacher nowhere.pth: no such file or folder in /"),
        ("--model.image-size 32", "use --model.image-size 64"),
        ("--model.patch-size 16", "the phase features needs equal ones"),
        ("--compile", "--compile is for 'gigamask train'"),
        ("--teacher-iou-weight -1", "--teacher-iou-weight must be at least 0 (got -1.0)"),
        ("--features.steps -1", "--features.steps must be at least 0"),
        ("--model.decoder-mlp 16 --features.steps 0", "a decoder needs --model.embedding-dim"),
        ("--teacher-cache c --loader.augment scale_jitter", "use --loader.augment none or flip"),
    ],
)
def test_wrong_uses_are_one_line(scenes, weights, tmp_path, capsys, words, message):
    given = f"--teacher {weights} --data {scenes} --out {tmp_path}/run --steps 1"
    assert message in refusal(capsys, f"distill {STUDENT}", given, words)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").rglob("step_*"))


def test_a_student_with_another_embedding_learns_by_prompts(scenes, weights, tmp_path):
    """Nothing of the teacher fits but the images."""
    words = f"--teacher {weights} --data {scenes} --features.steps 0 --steps 1"
    distill(f"{words} --no-teacher-decoder --model.patch-size 16 --out {tmp_path}/run")
    config = Sam.from_pretrained(tmp_path / "run").config
    assert config == replace(SPEC, patch_size=16)
