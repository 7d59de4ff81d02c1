"""A training in stages: encoder, decoder on it, then everything; at once, one by one, resumed."""

import json
import os
import shutil
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

from gigamask.cli.main import INTERRUPTED
from gigamask.training import checkpoint
from gigamask.training.logging import MetricsLogger
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.journeys.runs import check_pretrained, lines, same, weights

STAGES = ("mae", "decoder", "joint")
LENGTHS = {"mae": 2, "decoder": 2, "joint": 3}
TRAIN = f"train {LITTLE}"
WHOLE = f"{TRAIN} --stages mae,decoder,joint --mae-steps 2 --decoder-steps 2 --steps 3"


@pytest.fixture(scope="module")
def whole(scenes, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stages") / "out"
    invoke(WHOLE, f"--data {scenes} --out {out}")
    return out


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder of images, which have no masks."""
    folder = tmp_path_factory.mktemp("images")
    cv2.imwrite(str(folder / "one.jpg"), np.zeros((40, 60, 3), np.uint8))
    return folder


@pytest.mark.long
def test_each_stage_is_a_run_in_a_folder_of_its_own(whole):
    assert sorted(path.name for path in whole.iterdir()) == sorted(STAGES)
    for stage in STAGES:
        assert lines(whole / stage)[-1]["step"] == LENGTHS[stage]
        assert checkpoint.newest(whole / stage).name == f"step_{LENGTHS[stage]:08d}"
    configs = [yaml.safe_load((whole / stage / "config.yaml").read_text()) for stage in STAGES]
    inits = [None, f"mae:{whole / 'mae'}", str(whole / "decoder")]
    assert [config["init"] for config in configs] == inits
    trunk = ["image_encoder.patch_embed", "image_encoder.pos_embed", "image_encoder.blocks"]
    assert [config["freeze"] for config in configs] == [[], trunk, []]


@pytest.mark.long
def test_the_encoder_stays_as_it_was_pre_trained_while_the_decoder_learns(whole, scenes, tmp_path):
    before, after, joint = (weights(whole / stage) for stage in STAGES)
    check_pretrained(before, after)
    decoder = f"--stages decoder --decoder-steps 1 --init mae:{whole}/mae"
    invoke(TRAIN, decoder, f"--data {scenes} --out {tmp_path}")
    necks = [
        {name: tensor for name, tensor in each.items() if ".neck." in name}
        for each in (weights(tmp_path / "decoder"), after)
    ]
    assert not any(torch.equal(necks[0][name], necks[1][name]) for name in necks[0]), (
        "the neck, which a masked autoencoder has not, learns"
    )
    moved = {name.split(".")[0] for name in joint if not torch.equal(after[name], joint[name])}
    assert moved >= {"image_encoder", "mask_decoder"}, "in the last stage everything learns"


@pytest.mark.long
def test_one_at_a_time_is_the_same(whole, scenes, tmp_path):
    """Each stage from the one before it; the last also as what it is, a run of the recipe."""
    words = f"--data {scenes} --out {tmp_path}"
    invoke(TRAIN, "--stages mae --mae-steps 2", words)
    invoke(TRAIN, f"--stages decoder --decoder-steps 2 --init mae:{tmp_path}/mae", words)
    invoke(TRAIN, f"--stages joint --steps 3 --init {tmp_path}/decoder", words)
    assert all(same(tmp_path / stage, whole / stage) for stage in STAGES)
    invoke(TRAIN, f"--steps 3 --init {whole}/decoder --data {scenes} --out {tmp_path}/plain")
    assert same(tmp_path / "plain", whole / "joint")


@pytest.mark.long
@pytest.mark.parametrize("stage, step", [("decoder", 0), ("joint", 1), ("mae", 1)])
def test_interrupted_in_a_stage_and_run_again_ends_the_same(
    whole, scenes, tmp_path, monkeypatch, capsys, stage, step
):
    """After a signal the next update is the last one, and no further stage starts."""
    waiting, updates = MetricsLogger.time_data, []

    def told_to_stop(watch, batches):
        for batch in waiting(watch, batches):
            if Path(watch._config.out).name == stage:
                updates.append(batch)
                if len(updates) == step + 1:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    out, told = tmp_path / "out", tmp_path / "told.json"
    words = f"{WHOLE} --data {scenes} --out {out}"
    with monkeypatch.context() as patched:
        patched.setattr(MetricsLogger, "time_data", told_to_stop)
        assert exit_code(words, f"--json {told}") == INTERRUPTED
    finished = step + 1 == LENGTHS[stage]
    there = STAGES[STAGES.index(stage) + finished]
    before = {"run": str(out / there), "steps": LENGTHS[there], "step": 0 if finished else step + 1}
    assert {
        name: value for name, value in json.loads(told.read_text()).items() if name != "samples"
    } == before
    said = capsys.readouterr().out
    assert said.endswith(
        f"{before['run']}: interrupted and saved at step {before['step']} of {before['steps']}; "
        "run the same command to continue\n"
    )
    assert sorted(path.name for path in out.iterdir()) == sorted(STAGES[: STAGES.index(stage) + 1])
    invoke(words)
    assert all(same(out / each, whole / each) for each in STAGES)
    invoke(words)  # what is finished is left as it is
    assert capsys.readouterr().out.endswith(
        f"{out / 'joint'}: 3 steps, 9 samples\nnext: gigamask evaluate {out / 'joint'} --data "
        "HELD_OUT_TARS\n"
    )


@pytest.mark.long
def test_a_stage_may_be_gone_on_with_alone(scenes, tmp_path):
    """Each folder is a run: the first is resumed by `pretrain`, the others by `train`."""
    invoke(
        TRAIN,
        f"--stages mae,decoder --mae-steps 1 --decoder-steps 1 --data {scenes} --out {tmp_path}",
    )
    invoke(f"pretrain --resume {tmp_path}/mae --steps 2")
    invoke(f"train --resume {tmp_path}/decoder --steps 2")
    for stage in ("mae", "decoder"):
        assert checkpoint.newest(tmp_path / stage).name == "step_00000002"


def test_a_stage_that_another_has_followed_is_over(whole, scenes, tmp_path, capsys):
    """A longer last stage would make the one before it longer, too."""
    out = shutil.copytree(whole, tmp_path / "out")
    before = {
        path: path.stat().st_mtime_ns
        for stage in ("mae", "decoder")
        for path in (out / stage).rglob("*")
    }
    capsys.readouterr()
    invoke(WHOLE, f"--mae-steps 3 --decoder-steps 4 --steps 4 --data {scenes} --out {out}")
    said = capsys.readouterr().out
    assert (
        f"stage 1 of 3: done, {out / 'decoder'} has started\n"
        f"stage 2 of 3: done, {out / 'joint'} has started\n" in said
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert checkpoint.newest(out / "joint").name == "step_00000004"


def test_print_config_prints_each_stages(tmp_path, capsys):
    out = tmp_path / "out"
    invoke(
        TRAIN,
        "--stages mae,decoder,joint --steps 900 --schedule.warmup-steps 60 --seed 5 --data x",
        f"--out {out} --print-config",
    )
    mae, decoder, joint = yaml.safe_load_all(capsys.readouterr().out)
    parts = (mae, decoder, joint)
    assert [each["out"] for each in parts] == [str(out / stage) for stage in STAGES]
    assert [each["steps"] for each in parts] == [1500, 50, 900]
    warmups = [each["schedule"]["warmup-steps"] for each in parts]
    assert warmups == [100, 5, 60], "of a short stage, at most a tenth"
    assert {each["seed"] for each in parts} == {5}
    assert (mae["recipe"], mae["batch-size"]) == ("mae_tiny", 32)
    assert (mae["model"]["embed-dim"], mae["model"]["depth"]) == (16, 2)
    assert not {"prompts", "loss"} & mae.keys()
    assert "data" not in mae["evaluation"]
    assert not out.exists()
    invoke(TRAIN, "--stages mae --mae-steps 20 --print-config")
    assert yaml.safe_load(capsys.readouterr().out)["schedule"]["warmup-steps"] == 2


def test_what_is_frozen_anyway_is_frozen_once(capsys):
    invoke(TRAIN, "--stages decoder --init x --freeze image_encoder --print-config")
    assert yaml.safe_load(capsys.readouterr().out)["freeze"] == ["image_encoder"]


REFUSED = [
    ("--stages joint,mae", "in the order mae, decoder, joint, each once (got joint,mae)"),
    ("--stages mae,encoder", "--stages: unknown stage 'encoder'; choose from mae, decoder, joint"),
    (
        "--stages decoder",
        "--stages decoder trains on a frozen encoder and needs its weights: give --init",
    ),
    ("--mae-steps 3", "--mae-steps: has no effect without --stages"),
    ("--stages joint --decoder-steps 3", "--decoder-steps: --stages joint has no stage decoder"),
    (
        "--stages mae,decoder --init {whole}/joint",
        "joint would not be used: the stage mae starts from random weights",
    ),
    (
        "--stages mae,joint --window 0 4000",
        "the stage mae reads images of 8 bits, without --window",
    ),
    ("--stages mae,decoder,joint --freeze nope", "--freeze nope: the model has no such"),
    (
        "--stages mae,decoder,joint --evaluation.data {images}",
        "is a folder of images where tars are expected",
    ),
]


@pytest.mark.parametrize("words, told", REFUSED, ids=[words for words, _ in REFUSED])
def test_whatever_is_wrong_with_any_stage_is_said_before_the_first(
    words, told, whole, images, scenes, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data = "" if "--data" in words else f"--data {scenes}"
    assert exit_code(TRAIN, words.format(whole=whole, images=images), data, "--out out") == 2
    said = capsys.readouterr()
    assert told in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_stages_is_no_run(whole, capsys):
    runs = ", ".join(str(whole / stage) for stage in STAGES)
    told = refusal(capsys, f"train --resume {whole}")
    assert told.endswith(f"; pass one of its runs: {runs}")
    assert "--stages" in refusal(capsys, f"train --resume {whole}/joint --stages joint")
