"""Pre-training of an image encoder, with and without masks, resumed, and loaded into a SAM."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml

from gigamask.cli.main import INTERRUPTED
from gigamask.data import tar
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys import runs
from tests.journeys.runs import CONSTANT_LR, PRETRAIN, check_pretrained, records, started, weights


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def bare(scenes, tmp_path_factory) -> Path:
    """The scenes without their jsons, in a tar and as files."""
    (path,) = scenes.glob("*.tar")
    raw, members, folder = path.read_bytes(), tar.scan(path), tmp_path_factory.mktemp("bare")
    spans = zip(members.names, members.offsets, members.sizes, strict=True)
    held = [
        (name, raw[start : start + size]) for name, start, size in spans if name.endswith(".jpg")
    ]
    (folder / "tars").mkdir()
    (folder / "photos" / "class").mkdir(parents=True)
    tar.write(folder / "tars" / path.name, held)
    for name, jpg in held:
        (folder / "photos" / "class" / name).write_bytes(jpg)
    return folder


@pytest.fixture(scope="module")
def mae(scenes, tmp_path_factory) -> Path:
    """A run of two updates."""
    run = tmp_path_factory.mktemp("mae") / "run"
    invoke(PRETRAIN, f"--data {scenes} --out {run} --steps 2")
    return run


def test_any_images_will_do(scenes, bare, mae, tmp_path):
    """Tars with masks and without, and a folder of photographs; masks make no difference."""
    for data in (bare / "tars", bare / "photos"):
        run = tmp_path / data.name
        invoke(PRETRAIN, f"--data {data} --out {run} --steps 2")
        assert [line["step"] for line in records(run)] == [1, 2]
        assert all(line["loss"] == line["mse"] > 0 for line in records(run))
    assert same(weights(tmp_path / "tars"), weights(mae))
    assert not same(weights(tmp_path / "photos"), weights(tmp_path / "tars")), (
        "files are named as they are called, and chance goes by name"
    )


def test_what_is_said_and_written(scenes, tmp_path, capsys):
    run, told = tmp_path / "run", tmp_path / "told.json"
    invoke(PRETRAIN, f"--data {scenes} --out {run} --steps 1 --json {told}")
    said = capsys.readouterr()
    about = r"pretrain mae_tiny, from random weights: 1 step .*\n"
    changed = (
        r"--steps 1 is less than the recipe's: --schedule.warmup-steps 0 in place of 100; .*\n"
    )
    begun = r"  data: 12 images .*\n  model: .* parameters, .*\n  device: cpu, .*\n"
    ended = rf"{run}: 1 step, 3 samples\nnext: gigamask train .* --init mae:{run} --out OUT\n"
    assert re.fullmatch(about + changed + begun + ended, said.out)
    assert "IoU" not in said.err, "there is none"
    assert json.loads(told.read_text()) == {"run": str(run), "step": 1, "samples": 3, "steps": 1}
    invoke(f"pretrain --resume {run} --steps 2")
    said = capsys.readouterr().out
    assert "--steps: changed from 1 to 2\n" in said
    assert f"{run}: 2 steps, 6 samples\n" in said


@pytest.mark.long
def test_interrupted_and_resumed_bit_for_bit(scenes, tmp_path):
    common = " ".join([f"{PRETRAIN} --data {scenes} --loader.workers 1", *CONSTANT_LR])
    run = tmp_path / "run"
    with started(f"{common} --out {run} --steps 100000 --save-every 100000", run) as process:
        os.killpg(process.pid, signal.SIGTERM)
        said, errors = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, errors
    assert f"gigamask pretrain --resume {run}" in said
    step = records(run)[-1]["step"]
    assert 0 < step < 100000
    invoke(f"pretrain --resume {run} --steps {step + 2}")
    invoke(common, f"--out {tmp_path}/whole --steps {step + 2}")
    assert runs.same(run, tmp_path / "whole")


@pytest.mark.parametrize(
    "place", ["", "checkpoints/step_00000002", "checkpoints/step_00000002/model.safetensors"]
)
def test_a_sam_starts_from_it(mae, scenes, tmp_path, place):
    """Frozen, its encoder stays what was pre-trained."""
    run = tmp_path / "sam"
    frozen = "image_encoder.patch_embed image_encoder.pos_embed image_encoder.blocks"
    init = f"--init mae:{mae / place} --freeze {frozen}"
    invoke(f"train {LITTLE} --data {scenes} --out {run} --steps 1", init)
    check_pretrained(weights(mae), weights(run))


def test_its_own_training_goes_on_from_it(mae, scenes, tmp_path):
    invoke(
        PRETRAIN,
        f"--data {scenes} --out {tmp_path}/on --init {mae} --steps 1 --optimizer.lr 0",
        "--schedule.warmup-steps 0",
    )
    assert same(weights(tmp_path / "on"), weights(mae))


def test_help_and_configuration(tmp_path, capsys):
    invoke("pretrain --help")
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in ("mae_tiny", "mae_vit_b", "mae_vit_l", "mae_vit_h"))
    assert "--stages" not in said
    assert "prompts" not in said
    with pytest.raises(SystemExit) as leaving:
        exit_code("pretrain mae_tiny --help")
    said = capsys.readouterr().out
    assert leaving.value.code == 0
    assert "--model.mask-ratio" in said
    assert not [
        flag
        for flag in ("--stages", "--mae-steps", "--prompts", "--loader.items", "--evaluation.data")
        if flag in said
    ]
    invoke("pretrain mae_tiny --print-config --model.mask-ratio 0.5 --sampler streamed")
    config = capsys.readouterr().out
    assert yaml.safe_load(config)["model"]["mask-ratio"] == 0.5
    (tmp_path / "mine.yaml").write_text(config)
    invoke(f"pretrain mae_tiny --config {tmp_path}/mine.yaml --print-config")
    assert capsys.readouterr().out == config


REFUSED = [
    (
        "pretrain",
        "pretrain needs a recipe (mae_tiny, mae_vit_b, mae_vit_l, mae_vit_h, sami_vit_t, "
        "sami_vit_s, or file.py:function) or",
    ),
    (
        "pretrain tiny --data {scenes}",
        "recipe tiny is for 'gigamask train', not 'gigamask pretrain'",
    ),
    (
        "train mae_tiny --data {scenes}",
        "recipe mae_tiny is for 'gigamask pretrain', not 'gigamask train'",
    ),
    (
        "pretrain mae_tiny --data {scenes} --prompts mixed",
        "recipe mae_tiny has no prompts; it has sampler, loader.augment, optimizer, schedule",
    ),
    (
        "pretrain mae_tiny --data {scenes} --model.mask-ratio 0.999",
        "--model.mask-ratio 0.999 of 256 patches",
    ),
    ("train {little} --data {scenes} --init {mae}", "holds an MAE; give mae:"),
    (
        "train {little} --data {scenes} --model.depth 3 --init mae:{mae}",
        "has 2 blocks of width 16, the model has 3 of 16; use --model.depth 2",
    ),
    ("evaluate {mae} --data {scenes}", "train a SAM with --init mae:"),
]


@pytest.mark.parametrize("words, told", REFUSED, ids=[words for words, _ in REFUSED])
def test_whatever_is_wrong_is_one_line_and_nothing_is_written(
    words, told, mae, scenes, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    given = words.format(scenes=scenes, mae=mae, little=LITTLE)
    if " " in given and "--resume" not in given and not given.startswith("evaluate"):
        given += " --out run --device cpu"
    assert told in refusal(capsys, given)
    assert list(tmp_path.iterdir()) == []


def test_a_begun_run_keeps_its_shapes_and_its_order(mae, capsys):
    for words, told in {
        "--model.embed-dim 24": "weights of another shape cannot be resumed",
        "--batch-size 4": "--batch-size was 3",
    }.items():
        assert told in refusal(capsys, f"pretrain --resume {mae}", words)


def test_metas_own_file_starts_a_sam(mae, scenes, tmp_path):
    """As published: the weights under `model`, without decoder and pixel statistics."""
    path = tmp_path / "mae_pretrain_vit_base.pth"
    left_out = ("decoder", "mask_token", "pixel")
    held = {name: value for name, value in weights(mae).items() if not name.startswith(left_out)}
    torch.save({"model": held}, path)
    for number, init in enumerate((path, mae)):
        run = tmp_path / str(number)
        invoke(f"train {LITTLE} --data {scenes} --out {run} --init mae:{init} --steps 1")
    assert same(weights(tmp_path / "0"), weights(tmp_path / "1"))
