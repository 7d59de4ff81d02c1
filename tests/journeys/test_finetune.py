"""Fine-tuning of given weights on own masks, evaluated on held-out images, as a user types it."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gigamask.cli.main import main
from gigamask.data import index as indexes
from gigamask.export.huggingface import huggingface_config
from gigamask.models import convert, state_dict, weight_files
from gigamask.models.init import build_model
from gigamask.synthetic import scenes as synthetic
from gigamask.synthetic.scenes import compose_scene
from gigamask.training import checkpoint
from tests.journeys.scores import alike
from tests.little import SPEC

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import SamModel

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
# Shapes do not tell the decoder's heads; an official file's model has 8.
OFFICIAL = replace(SPEC, decoder_num_heads=8, drop_path_rate=0.0)
OURS = "--model.decoder-num-heads 8 --model.drop-path-rate 0".split()


def train(*words: object) -> int:
    return main(["train", LITTLE, *OURS, *map(str, words)])


def state(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest(run) / checkpoint.MODEL)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_coco(path: Path, photos: Path, numbers: range) -> None:
    """Writes pictures, and COCO's json of the polygons on them."""
    images, annotations = [], []
    photos.mkdir(exist_ok=True)
    for number in numbers:
        scene = compose_scene(1, number, (96, 128))
        height, width = scene.masks.size
        for mask in scene.masks.to_dense():
            rings, _ = cv2.findContours(
                mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
            )
            polygons = [ring.ravel().tolist() for ring in rings if len(ring) > 2]
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": 1,
                    "iscrowd": 0,
                    "segmentation": polygons,
                }
            )
        images.append(
            {"id": number, "file_name": f"{number:04d}.png", "height": height, "width": width}
        )
        cv2.imwrite(str(photos / f"{number:04d}.png"), scene.pixels[:, :, ::-1])
    path.write_text(json.dumps({"images": images, "annotations": annotations}))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """Small photographs with COCO's JSONs, tars, an official file and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("own")
    for name, numbers in {"train.json": range(6), "held_out.json": range(6, 8)}.items():
        write_coco(folder / name, folder / "photos", numbers)
    for number in range(3):
        (path,) = synthetic.write(str(folder / "made"), 3, seed=number, long_side=(96, 128))
        path.rename(folder / f"coco128_{number:06d}.tar")
    model = build_model(OFFICIAL, seed=3)
    weight_files.write_pth(
        state_dict.to_official(model), model.config, folder / "sam_vit_b_01ec64.pth"
    )
    theirs = SamModel(huggingface_config(OFFICIAL))
    theirs.load_state_dict(convert.to_huggingface(state_dict.to_official(model)))
    theirs.save_pretrained(folder / "sam-vit-base")
    state_dict.save_weights(
        state_dict.to_official(model), model.config, folder / "photos.safetensors"
    )
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
    assert (
        train(
            "--init",
            own / name,
            "--data",
            scenes,
            "--out",
            run,
            "--steps",
            1,
            "--freeze",
            "image_encoder",
            "prompt_encoder",
        )
        == 0
    )
    after = state(run)
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
    frozen = [
        "image_encoder.patch_embed",
        "image_encoder.blocks.0",
        "mask_decoder.iou_token.weight",
    ]
    assert (
        train(
            "--init",
            own / "sam-vit-base",
            "--data",
            scenes,
            "--out",
            run,
            "--steps",
            1,
            "--freeze",
            *frozen,
        )
        == 0
    )
    before, after = torch.load(own / "sam_vit_b_01ec64.pth"), state(run)
    still = {key for key in after if torch.equal(after[key], before[key])}
    held = {key for key in after if any(f"{key}.".startswith(f"{part}.") for part in frozen)}
    assert len(held) > 10
    assert held <= still
    assert any(key.startswith("image_encoder.blocks.1.") for key in after.keys() - still)


def test_another_input_side_interpolates_positions_and_nothing_else(
    own, scenes, tmp_path, held_out
):
    path, run = own / "sam_vit_b_01ec64.pth", tmp_path / "run"
    words = [
        "--init",
        path,
        "--data",
        scenes,
        "--out",
        run,
        "--steps",
        1,
        "--optimizer.lr",
        0,
        "--schedule.warmup-steps",
        0,
    ]
    assert train(*words, "--model.image-size", 128) == 0
    before, after = torch.load(path), state(run)
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
    assert main(f"evaluate {run} --data {held_out} --max-images 1".split()) == 0
    shutil.rmtree(run)
    assert train(*words) == 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(run).items()), (
        "at its own side nothing changes"
    )


def test_the_recipes_configuration(capsys):
    for name in ("finetune", "finetune_vit_l", "finetune_vit_h"):
        assert main(["train", name, "--print-config"]) == 0
        config = yaml.safe_load(capsys.readouterr().out)
        assert (config["freeze"], config["model"]["image-size"]) == (["image_encoder"], 1024)
        assert config["optimizer"]["lr"] == 8e-05
    assert main("train finetune --print-config --freeze".split()) == 0
    assert yaml.safe_load(capsys.readouterr().out)["freeze"] == []


REFUSED = [
    (
        "finetune --data {scenes}",
        "--freeze image_encoder requires trained weights",
    ),
    (
        "finetune --data {scenes} --init sam_vit_b.pth",
        "--init sam_vit_b.pth: no such file or folder",
    ),
    ("finetune --data nowhere --init {own}/sam-vit-base", "nowhere: no such path"),
    (
        "{little} --data {scenes} --init {own}/train.json",
        "train.json: cannot be read as weights",
    ),
    ("{little} --data {scenes} --init {own}/photos", "photos: holds no model.safetensors"),
    (
        "{little} --data {scenes} --model.depth 1 --model.global-attn-indexes 0 --init "
        "{own}/sam-vit-base",
        "has unknown",
    ),
    (
        "{little} --data {scenes} --model.embed-dim 24 --init {own}/sam_vit_b_01ec64.pth",
        "of another shape",
    ),
    (
        "{little} --data {scenes} --init {own}/sam-vit-base --freeze encoder",
        "--freeze encoder: the model has no such module or parameter; choose from image_encoder",
    ),
    (
        "{little} --data {scenes} --init {own}/sam-vit-base --freeze image_encoder prompt_encoder "
        "mask_decoder",
        "leaves nothing to train",
    ),
    ("{little} --data {scenes} --evaluation.data nowhere", "nowhere: no such path"),
    (
        "{little} --data {scenes} --evaluation.data {scenes} --evaluation.min-predicted-iou 1",
        "none of 12 images has a mask to evaluate; loosen",
    ),
    (
        "{little} --data {scenes} --evaluation.data {scenes} --evaluation.images 0",
        "--evaluation.images must be at least 1",
    ),
    (
        "{little} --data {scenes} --evaluation.data {scenes} --evaluation.best-by 2",
        "'2'",
    ),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[words for words, _ in REFUSED])
def test_whatever_is_wrong_is_one_line_and_nothing_is_written(
    words, told, own, scenes, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "train",
                *words.format(own=own, scenes=scenes, little=LITTLE).split(),
                "--out",
                "run",
                "--device",
                "cpu",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_training_is_evaluated_on_held_out_images(scenes, held_out, tmp_path, monkeypatch, capsys):
    """The scores are those of `evaluate`, and the training is the same without evaluation."""
    words, run = ["--data", scenes, "--steps", 4], tmp_path / "run"
    watched = [
        "--evaluation.data",
        held_out,
        "--evaluation.interval",
        3,
        "--evaluation.best-by",
        "box",
        "--keep",
        5,
    ]
    assert train(*words, *watched, "--out", run) == 0
    found = [line for line in lines(run) if "evaluation" in line]
    assert [line["step"] for line in found] == [3, 4], "every third, and the last"
    assert all(
        list(line) == ["step", "evaluation", "of", "warnings", "seconds"] and line["seconds"] > 0
        for line in found
    )
    assert all(any("wrong image" in worry for worry in line["warnings"]) for line in found), (
        "after four updates nothing looks"
    )
    said = capsys.readouterr().err
    assert said.count("evaluated at step") == 2
    assert all(worry in said for line in found for worry in line["warnings"])
    for line in found:
        weights_at, told = run / "checkpoints" / f"step_{line['step']:08d}", tmp_path / "told.json"
        assert main(f"evaluate {weights_at} --data {held_out} --json {told}".split()) == 0
        whole = json.loads(told.read_text())
        scores = {
            f"{n} click{'s' if n > 1 else ''}": whole["clicks"][str(n)] for n in (1, 3, 5)
        } | {name: whole[name] for name in ("oracle", "box")}
        assert alike({name: line["evaluation"][name] for name in scores}, scores)
    best = max(found, key=lambda line: (line["evaluation"]["box"], line["step"]))["step"]
    assert (run / "checkpoints" / "best").resolve().name == f"step_{best:08d}"
    assert train(*words, "--out", tmp_path / "unwatched") == 0
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        mine, others = (
            load_file(checkpoint.newest(each) / name) for each in (run, tmp_path / "unwatched")
        )
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[key], others[key]) for key in mine)
    built = []
    monkeypatch.setattr(indexes, "build", lambda *rest, **more: built.append(rest))
    assert main(f"train --resume {run} --steps 5".split()) == 0
    assert built == [], "its index is kept in the run folder, as that of the data is"
