"""The folder that the pages' commands run in: under the names that the pages use lie small things that can be worked with."""

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml

from gigamask.cli.main import main
from gigamask.data import index as indexes
from gigamask.models import convert, state_dict
from gigamask.models.configs import MAEConfig
from gigamask.models.init import build_model
from gigamask.synthetic import described_scenes, scenes
from gigamask.synthetic.scenes import compose_scene
from tests import texts
from tests.journeys import substitutions
from tests.journeys.pages import PAGES, items
from tests.little import SPEC

# As SAM's recipes have it: eight heads in the decoder, which shapes do not tell.
MODEL = replace(SPEC, decoder_num_heads=8, drop_path_rate=0.0)
MAE = MAEConfig(
    image_size=64,
    patch_size=8,
    embed_dim=16,
    depth=2,
    num_heads=2,
    decoder_dim=16,
    decoder_depth=1,
    decoder_num_heads=2,
)
FEW = {
    "device": "cpu",
    "log-every": 1,
    "batch-size": 2,
    "loading": {"workers": 0},
    "schedule": {"warmup": 1},
}


def furnish(home: Path) -> None:
    """Fills the folder. What a page makes itself is taken away again by `clear`."""
    _configurations(home)
    _pictures(home)
    for name, images in {
        "shards": 3,
        "held_out": 2,
        "disk/sa1b": 4,
        "bsds_train": 3,
        "bsds_val": 2,
        "scenes": 2,
        "train": 3,
        "val": 2,
    }.items():
        scenes.write(str(home / name), images, seed=len(name), shard_images=2, long_side=(96, 128))
    for number in range(2):
        (path,) = scenes.write(str(home / "made"), 2, seed=number, long_side=(96, 128))
        path.rename(home / f"coco128_{number:06d}.tar")
    (path,) = scenes.write(str(home / "made"), 2, seed=5, long_side=(96, 128))
    path.rename(home / "held_out.tar")
    for name, first, queries in (
        ("coco128", 0, "queries.jsonl"),
        ("coco_tiny_train", 100, "queries_sets.jsonl"),
    ):
        described_scenes.write(home / name, 3, seed=3, first=first)
        asked = [
            json.loads(line) for line in (home / name / "queries.jsonl").read_text().splitlines()
        ]
        (home / queries).write_text(
            "".join(
                json.dumps({k: v for k, v in each.items() if k != "tar"}) + "\n" for each in asked
            )
        )
    indexes.build(home / "disk/sa1b", home / "disk/index")
    shutil.copytree(home / "disk/sa1b", home / "disk/sa1b_1024")
    (home / "domains.csv").write_text(
        "name,domain,region\n"
        + "".join(f"sa_{n},street,{'europe' if n % 2 else 'asia'}\n" for n in range(4))
    )
    _served(home)
    _weights(home)


def _configurations(home: Path) -> None:
    model = {
        name.replace("_", "-"): value
        for name, value in asdict(MODEL).items()
        if name != "informed_start"
    } | {"global-blocks": [1]}
    loading = {"workers": 0, "max-masks": 4}
    small = FEW | {"model": model, "micro": 1, "masks-per-chunk": 8, "loading": loading}
    mae = FEW | {
        "model": {
            name.replace("_", "-"): value
            for name, value in asdict(MAE).items()
            if name != "normalise_pixels"
        },
        "micro": 2,
    }
    ground = {
        "device": "cpu",
        "log-every": 1,
        "batch": 4,
        "micro": 4,
        "model": {"embedding-dim": 16, "dim": 16},
        "schedule": {"warmup": 1},
    }
    for name, content in {
        substitutions.SMALL: small,
        substitutions.SMALL_MAE: mae,
        substitutions.SMALL_GROUND: ground,
    }.items():
        (home / name).write_text(yaml.safe_dump(content))
    (home / "small.py").write_text("from tests.little import little as small\n")
    (home / "two.yaml").write_text("plain: []\nlanes: {sampler: streamed, sampler.lanes: 2}\n")
    for page in PAGES:
        for item in items(page):
            if item.kind == "python" and (named := re.match(r"# (\w+\.py)\n", item.text)):
                (home / named[1]).write_text(item.text)


def _pictures(home: Path) -> None:
    """Photographs, COCO's jsons of some of them, label images of all, and a folder of images without masks."""
    for folder in ("photos", "labels", "more_photos", "disk/imagenet/train/n01440764"):
        (home / folder).mkdir(parents=True)
    coco = {name: {"images": [], "annotations": []} for name in ("train.json", "held_out.json")}
    for number in range(4):
        scene = compose_scene(1, number, (96, 128))
        height, width = scene.masks.size
        held = coco["train.json" if number < 3 else "held_out.json"]
        held["images"].append(
            {"id": number, "file_name": f"{number}.png", "height": height, "width": width}
        )
        labels = np.zeros((height, width), np.uint8)
        for mask in scene.masks.to_dense():
            labels[mask] = labels.max() + 1
            rings, _ = cv2.findContours(
                mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
            )
            polygons = [ring.ravel().tolist() for ring in rings if len(ring) > 2]
            told = {
                "id": len(held["annotations"]) + 1,
                "image_id": number,
                "category_id": 1,
                "iscrowd": 0,
                "segmentation": polygons,
            }
            held["annotations"].append(told)
        cv2.imwrite(str(home / "photos" / f"{number}.png"), scene.pixels[:, :, ::-1])
        cv2.imwrite(str(home / "labels" / f"{number}.png"), labels)
        for place in ("more_photos", "disk/imagenet/train/n01440764"):
            cv2.imwrite(str(home / place / f"{number}.jpg"), scene.pixels[:, :, ::-1])
    for number, name in enumerate(("photo.jpg", "photos/square.jpg", "photos/street.jpg")):
        shutil.copy(home / f"more_photos/{number}.jpg", home / name)
    for name, content in coco.items():
        (home / name).write_text(json.dumps(content))


def _served(home: Path) -> None:
    """The checksums of what a server holds; its address is put into `links.txt` when it is up."""
    sums = [
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted((home / "disk/sa1b").glob("*.tar"))
    ]
    (home / "checksums.txt").write_text("".join(sums))


def _weights(home: Path) -> None:
    """Weights under everybody's names, and runs of two updates: each is of the recipe that the pages train it with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import SamModel

        from gigamask.export.huggingface import config_of
    model = build_model(MODEL, seed=3)
    official = state_dict.to_official(model)
    torch.save(official, home / "sam_vit_b_01ec64.pth")
    state_dict.save_weights(official, MODEL, home / "model.safetensors")
    theirs = SamModel(config_of(MODEL))
    theirs.load_state_dict(convert.to_huggingface(official))
    theirs.save_pretrained(home / "sam-vit-base")
    torch.save({"model": build_model(MAE, seed=4).state_dict()}, home / "mae_pretrain_vit_base.pth")
    texts.write("qwen3", home / "language")
    for name, images in (("train", 3), ("test", 2)):
        scenes.write(str(home / "runs/demo" / name), images, seed=len(name), long_side=(96, 128))
    for run, recipe, data in (
        ("demo", "tiny", "runs/demo/train"),
        ("vit_b", "sam_vit_b", "disk/index"),
        ("photos", "photos", "bsds_train"),
    ):
        where = [
            str(home / data),
            "--out",
            str(home / "runs" / run),
            "--config",
            str(home / substitutions.SMALL),
        ]
        assert main(["train", recipe, "--data", *where, "--steps", "2"]) == 0
    for run in ("mine", "sweep"):
        shutil.copytree(home / "runs/photos", home / "runs" / run)


def clear(home: Path, commands: list[str]) -> None:
    """Takes away what these commands make, so that they find their places as a user does."""
    for words in commands:
        made = (
            re.findall(r"--out (\S+)", words)
            + re.findall(r"^synth (\S+)", words)
            + ["runs/demo"] * (words.strip() == "demo")
        )
        for each in (home / re.sub("^/(data/)?", "disk/", path) for path in made):
            if each.is_dir():
                shutil.rmtree(each)
            else:
                each.unlink(missing_ok=True)
