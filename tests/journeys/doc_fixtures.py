"""The folder that the docs' commands run in: small data, weights and runs by the pages' names.

A plugin adds what its pages name in `tests/plugins/NAME/doc_fixtures.py`.
"""

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.models import convert, state_dict, weight_files
from gigamask.models.configs import MAEConfig
from gigamask.models.init import build_model
from gigamask.synthetic import scenes
from gigamask.synthetic.scenes import compose_scene
from gigamask.training import sam_config
from tests import instances
from tests.commands import invoke
from tests.journeys.pages import PAGES, ROOT, items
from tests.journeys.substitutions import SMALL, SMALL_COMPACT, SMALL_MAE, SMALL_OTHER
from tests.little import SPEC

# SAM's recipes have eight decoder heads, which cannot be inferred from shapes.
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
SMALL_RUN = {
    "device": "cpu",
    "log-every": 1,
    "batch-size": 2,
    "micro-batch-size": 1,
    "loader": {"workers": 0},
}


def populate(folder: Path) -> None:
    """Fill the folder; `remove_outputs` then removes what a page creates itself."""
    _write_configs(folder)
    _write_images(folder)
    for name, images in {
        "shards": 3,
        "held_out": 2,
        "disk/sa1b": 4,
        "bsds_train": 3,
        "bsds_val": 2,
        "coco128": 3,
        "coco_tiny_train": 3,
        "train": 3,
        "val": 2,
        **dict.fromkeys(
            "scenes leaves more_leaves clutter last/composites last/clutter last/leaves "
            "fifth/composites fifth/more_composites fifth/clutter fifth/leaves runs/pasted4000 "
            "sixth/composites sixth/more_composites sixth/clutter sixth/leaves "
            "eighth/composites eighth/more_composites eighth/clutter eighth/leaves "
            "ninth/composites ninth/more_composites ninth/clutter ninth/leaves".split(),
            2,
        ),
    }.items():
        scenes.write(
            str(folder / name), images, seed=len(name), shard_images=2, long_side=(96, 128)
        )
    for seed, name in enumerate(("coco128_000000.tar", "coco128_000001.tar", "held_out.tar")):
        (path,) = scenes.write(str(folder / "made"), 2, seed=seed, long_side=(96, 128))
        path.rename(folder / name)
    indexes.build(folder / "disk/sa1b", folder / "disk/index")
    (folder / "grabcut/masks").mkdir(parents=True)
    _, annotation = Sa1bDataset(indexes.build(folder / "bsds_val", folder / "bsds_index"))[0]
    mask = annotation.masks.to_dense()[0].astype(np.uint8) * 255
    name = annotation.name.rpartition("sa_")[2]
    cv2.imwrite(str(folder / f"grabcut/masks/{name}.png"), mask)
    shutil.copytree(folder / "disk/sa1b", folder / "disk/sa1b_1024")
    rows = [f"sa_{n},street,{'europe' if n % 2 else 'asia'}\n" for n in range(4)]
    (folder / "domains.csv").write_text("name,domain,region\n" + "".join(rows))
    (folder / "checksums.txt").write_text(
        "".join(
            f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n"
            for path in sorted((folder / "disk/sa1b").glob("*.tar"))
        )
    )
    _write_weights_and_runs(folder)
    for name, lvis in (("coco", False), ("lvis", True)):
        instances.write(folder / name, build_model(MODEL, 0).eval(), lvis)
        (folder / name / "boxes.json").rename(folder / f"{name}_vitdet.json")
    (folder / "coco/photos").rename(folder / "coco/val2017")
    (folder / "coco/instances.json").rename(folder / "coco/instances_val2017.json")
    (folder / "lvis/instances.json").rename(folder / "coco/lvis_v1_val.json")
    for path in sorted((ROOT / "tests/plugins").glob("*/doc_fixtures.py")):
        import_module(f"tests.plugins.{path.parent.name}.doc_fixtures").populate(folder)


def remove_outputs(folder: Path, commands: list[str]) -> None:
    """Remove what these commands create, so that they start as a user does."""
    for words in commands:
        outputs = re.findall(r"--out (\S+)", words) + re.findall(r"^synth (\S+)", words)
        for path in (folder / re.sub("^/(data/)?", "disk/", output) for output in outputs):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def flags_of(config: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a configuration as flags in a YAML file."""
    return {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if name not in without
    }


VIT_SIZES = sam_config.VIT_SIZES.replace("model.", "").replace("-", "_").split()


def _write_configs(folder: Path) -> None:
    few = SMALL_RUN | {"prompts": {"clicks": 1}, "loader": {"workers": 0, "max-masks": 2}}
    sam = few | {"masks-per-chunk": 8}
    parts = ("custom_init", "encoder", "decoder")
    configs = {
        SMALL: sam | {"model": flags_of(MODEL, *parts)},
        SMALL_OTHER: sam | {"model": flags_of(MODEL, *parts, *VIT_SIZES)},
        "small_features.yaml": SMALL_RUN | {"model": flags_of(MODEL, *parts, *VIT_SIZES)},
        SMALL_COMPACT: few | {"model": {"image-size": 64}},
        SMALL_MAE: SMALL_RUN | {"model": flags_of(MAE, "normalize_pixels"), "micro-batch-size": 2},
    }
    for name, content in configs.items():
        (folder / name).write_text(yaml.safe_dump(content))
    (folder / "small.py").write_text("from tests.little import little as small\n")
    for page in PAGES:
        for item in items(page):
            if item.kind == "python" and (file := re.match(r"# (\w+\.py)\n", item.text)):
                (folder / file[1]).write_text(item.text)


def _write_images(folder: Path) -> None:
    """Photographs, their masks in three forms, and a folder of images without masks."""
    for name in ("photos", "labels", "more_photos", "disk/imagenet/train/n01440764"):
        (folder / name).mkdir(parents=True)
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    coco = {
        name: {"images": [], "annotations": [], "categories": categories}
        for name in ("train.json", "held_out.json")
    }
    for number in range(4):
        scene = compose_scene(1, number, (96, 128))
        height, width = scene.masks.size
        part = coco["train.json" if number < 3 else "held_out.json"]
        image = {"id": number, "file_name": f"{number}.png", "height": height, "width": width}
        part["images"].append(image)
        labels = np.zeros((height, width), np.uint8)
        for mask in scene.masks.to_dense():
            labels[mask] = labels.max() + 1
            rings, _ = cv2.findContours(
                mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
            )
            annotation = {
                "id": len(part["annotations"]) + 1,
                "image_id": number,
                "category_id": 1 + len(part["annotations"]) % 2,
                "iscrowd": 0,
                "segmentation": [ring.ravel().tolist() for ring in rings if len(ring) > 2],
            }
            part["annotations"].append(annotation)
        pixels = scene.pixels[:, :, ::-1]
        cv2.imwrite(str(folder / f"photos/{number}.png"), pixels)
        cv2.imwrite(str(folder / f"labels/{number}.png"), labels)
        for name in ("more_photos", "disk/imagenet/train/n01440764"):
            cv2.imwrite(str(folder / name / f"{number}.jpg"), pixels)
    shutil.copytree(folder / "more_photos", folder / "voc/JPEGImages")
    shutil.copytree(folder / "labels", folder / "voc/SegmentationObject")
    for number, name in enumerate(("photo.jpg", "photos/square.jpg", "photos/street.jpg")):
        shutil.copy(folder / f"more_photos/{number}.jpg", folder / name)
    for name, content in coco.items():
        (folder / name).write_text(json.dumps(content))


def _write_weights_and_runs(folder: Path) -> None:
    """Weights in every format, and runs of two steps, each of the recipe that the pages name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import SamModel
    model = build_model(MODEL, seed=3)
    official = state_dict.to_official(model)
    weight_files.write_pth(official, MODEL, folder / "sam_vit_b_01ec64.pth")
    state_dict.save_weights(official, MODEL, folder / "model.safetensors")
    huggingface = SamModel(SamModel.config_class(**convert.huggingface_config(MODEL)))
    huggingface.load_state_dict(convert.to_huggingface(official))
    huggingface.save_pretrained(folder / "sam-vit-base")
    torch.save(
        {"model": build_model(MAE, seed=4).state_dict()}, folder / "mae_pretrain_vit_base.pth"
    )
    for name, images in (("train", 3), ("test", 2)):
        scenes.write(str(folder / "runs/demo" / name), images, seed=len(name), long_side=(96, 128))
    for run, words, data in (
        ("demo", f"compact --config {folder}/{SMALL_COMPACT}", "runs/demo/train"),
        ("tiny", f"tiny --config {folder}/{SMALL}", "runs/demo/train"),
        ("vit_b", f"sam_vit_b --config {folder}/{SMALL}", "disk/index"),
        ("photos", f"photos --config {folder}/{SMALL_COMPACT}", "bsds_train"),
        ("plain", f"tiny --config {folder}/{SMALL} --model.patch-size 4", "bsds_train"),
    ):
        invoke(f"train {words} --steps 2 --out {folder}/runs/{run} --data {folder}/{data}")
    for run in ("mine", "sweep"):
        shutil.copytree(folder / "runs/tiny", folder / "runs" / run)
