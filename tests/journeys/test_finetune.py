"""Fine-tuning of given weights on own masks, evaluated on held-out images, as a user types it."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gigamask.data import index as indexes
from gigamask.models import convert, state_dict, weight_files
from gigamask.models.init import build_model
from gigamask.synthetic import scenes as synthetic
from gigamask.training import checkpoint
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import lines, same, weights
from tests.journeys.scores import alike
from tests.little import SPEC

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import SamModel

# Shapes do not tell the decoder's heads; an official file's model has 8.
EVALUATED = ["step", "evaluation", "of", "subject", "standard_error", "warnings", "seconds"]
OFFICIAL = replace(SPEC, decoder_num_heads=8, drop_path_rate=0.0)
TRAIN = f"train {LITTLE} --model.decoder-num-heads 8 --model.drop-path-rate 0"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A JSON, a folder of no weights, an official file and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "photos").mkdir()
    (folder / "train.json").write_text("{}")
    official = state_dict.to_official(build_model(OFFICIAL, seed=3))
    weight_files.write_pth(official, OFFICIAL, folder / "sam_vit_b_01ec64.pth")
    theirs = SamModel(SamModel.config_class(**convert.huggingface_config(OFFICIAL)))
    theirs.load_state_dict(convert.to_huggingface(official))
    theirs.save_pretrained(folder / "sam-vit-base")
    state_dict.save_weights(official, OFFICIAL, folder / "photos.safetensors")
    return folder


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("held_out")
    synthetic.write(str(folder), 4, seed=11, long_side=(96, 128))
    return folder


@pytest.mark.parametrize("name", ["sam_vit_b_01ec64.pth", "sam-vit-base", "photos.safetensors"])
def test_frozen_parts_stay_what_they_were_and_the_others_learn(own, scenes, tmp_path, name):
    before = torch.load(own / "sam_vit_b_01ec64.pth")
    run = tmp_path / "run"
    invoke(
        TRAIN,
        f"--init {own}/{name} --data {scenes} --out {run} --steps 1",
        "--freeze image_encoder prompt_encoder",
    )
    after = weights(run)
    assert after.keys() == before.keys()
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved
    assert {key.split(".")[0] for key in moved} == {"mask_decoder"}
    names = {
        key.partition("/")[2].split(".")[0]
        for key in load_file(checkpoint.newest(run) / checkpoint.OPTIMIZER)
    }
    assert names == {"mask_decoder"}, "what does not learn has no state"


def test_parts_are_frozen_by_the_names_they_have(own, scenes, tmp_path):
    run = tmp_path / "run"
    frozen = (
        "image_encoder.patch_embed image_encoder.blocks.0 mask_decoder.iou_token.weight"
    ).split()
    init = f"--init {own}/sam-vit-base --freeze {' '.join(frozen)}"
    invoke(TRAIN, init, f"--data {scenes} --out {run} --steps 1")
    before, after = torch.load(own / "sam_vit_b_01ec64.pth"), weights(run)
    still = {key for key in after if torch.equal(after[key], before[key])}
    held = {key for key in after if any(f"{key}.".startswith(f"{part}.") for part in frozen)}
    assert len(held) > 10
    assert held <= still
    assert any(key.startswith("image_encoder.blocks.1.") for key in after.keys() - still)


def test_another_input_side_interpolates_positions_and_nothing_else(
    own, scenes, tmp_path, held_out
):
    path, run = own / "sam_vit_b_01ec64.pth", tmp_path / "run"
    words = (
        f"--init {path} --data {scenes} --out {run} --steps 1 --optimizer.lr 0 "
        "--schedule.warmup-steps 0"
    )
    invoke(TRAIN, words, "--model.image-size 128")
    before, after = torch.load(path), weights(run)
    other = {key for key in after if after[key].shape != before[key].shape}
    assert other == {
        "image_encoder.pos_embed",
        "image_encoder.blocks.1.attn.rel_pos_h",
        "image_encoder.blocks.1.attn.rel_pos_w",
    }
    assert torch.equal(
        after["image_encoder.pos_embed"],
        convert.resample_abs_pos_embed(before["image_encoder.pos_embed"], 16),
    )
    assert all(torch.equal(after[key], before[key]) for key in after.keys() - other)
    invoke(f"evaluate {run} --data {held_out} --max-images 1")
    shutil.rmtree(run)
    invoke(TRAIN, words)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(run).items()), (
        "at its own side nothing changes"
    )


def test_the_recipes_configuration(capsys):
    for name in ("finetune", "finetune_vit_l", "finetune_vit_h"):
        invoke(f"train {name} --print-config")
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["freeze"], config["model"]["image-size"]) == (["image_encoder"], 1024)
        assert config["optimizer"]["lr"] == 8e-05
    invoke("train finetune --print-config --freeze")
    assert yaml.safe_load(capsys.readouterr().out)["freeze"] == []


REFUSED = [
    ("finetune --data {scenes}", "--freeze image_encoder requires trained weights"),
    ("{little} --data {scenes} --init {own}/train.json", "train.json: cannot be read as weights"),
    (
        "{little} --data {scenes} --init {own}/sam-vit-base --freeze image_encoder prompt_encoder "
        "mask_decoder",
        "leaves nothing to train",
    ),
]


@pytest.mark.parametrize("words, told", REFUSED, ids=[words for words, _ in REFUSED])
def test_whatever_is_wrong_is_one_line_and_nothing_is_written(
    words, told, own, scenes, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = words.format(own=own, scenes=scenes, little=LITTLE)
    assert told in refusal(capsys, "train", words, "--out run --device cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_training_is_evaluated_on_held_out_images(scenes, held_out, tmp_path, monkeypatch, capsys):
    """The scores are those of `evaluate`, and the training is the same without evaluation."""
    words, run = f"--data {scenes} --steps 4", tmp_path / "run"
    watched = (
        f"--evaluation.data {held_out} --evaluation.interval 3 --evaluation.best-by box --keep 5"
    )
    invoke(TRAIN, words, watched, f"--out {run}")
    found = [line for line in lines(run) if "evaluation" in line]
    assert [line["step"] for line in found] == [3, 4], "every third, and the last"
    assert all(list(line) == EVALUATED and line["seconds"] > 0 for line in found)
    assert all(any("wrong image" in worry for worry in line["warnings"]) for line in found), (
        "after four updates nothing looks"
    )
    said = capsys.readouterr().err
    assert said.count("evaluated at step") == 2
    assert all(worry in said for line in found for worry in line["warnings"])
    for line in found:
        weights_at, told = run / "checkpoints" / f"step_{line['step']:08d}", tmp_path / "told.json"
        invoke(f"evaluate {weights_at} --data {held_out} --json {told}")
        whole = json.loads(told.read_text())
        scores = {
            f"{n} click{'s' if n > 1 else ''}": whole["clicks"][str(n)] for n in (1, 3, 5)
        } | {name: whole[name] for name in ("oracle", "box")}
        assert alike({name: line["evaluation"][name] for name in scores}, scores)
    best = max(found, key=lambda line: (line["evaluation"]["box"], line["step"]))["step"]
    assert (run / "checkpoints" / "best").resolve().name == f"step_{best:08d}"
    invoke(TRAIN, words, f"--out {tmp_path}/unwatched")
    assert same(run, tmp_path / "unwatched")
    built = []
    monkeypatch.setattr(indexes, "build", lambda *rest, **more: built.append(rest))
    invoke(f"train --resume {run} --steps 5")
    assert built == [], "its index is kept in the run folder, as that of the data is"
