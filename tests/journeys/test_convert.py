"""Custom data, from images and COCO's json or label images to training, as a user types it."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask.serialization import read_json
from gigamask.synthetic.scenes import compose_scene
from tests.commands import LITTLE, invoke, refusal


@pytest.fixture
def own(tmp_path) -> Path:
    """Six pictures with polygons in `instances.json` and, as label images, the same objects."""
    images, annotations = [], []
    (tmp_path / "pictures").mkdir()
    (tmp_path / "labels").mkdir()
    for number in range(6):
        scene = compose_scene(1, number)
        height, width = scene.masks.size
        labels = np.zeros((height, width), np.uint8)
        for i, mask in enumerate(scene.masks.to_dense()):
            rings, _ = cv2.findContours(
                mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
            )
            polygons = [ring.ravel().tolist() for ring in rings if len(ring) > 2]
            annotation = {"id": len(annotations), "image_id": number, "segmentation": polygons}
            annotations.append(annotation)
            labels[mask] = i + 1
        images.append(
            {"id": number, "file_name": f"{number:04d}.png", "height": height, "width": width}
        )
        cv2.imwrite(str(tmp_path / "pictures" / f"{number:04d}.png"), scene.pixels[:, :, ::-1])
        cv2.imwrite(str(tmp_path / "labels" / f"{number:04d}.png"), labels)
    annotations.append({"id": 999, "image_id": 0, "segmentation": [[1, 2, 3]]})
    (tmp_path / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations})
    )
    return tmp_path


def test_from_coco_to_training(own, capsys):
    pictures, shards = str(own / "pictures"), str(own / "shards")
    invoke(
        f"convert {own}/instances.json --images {pictures} --out {shards} --shard-images 4",
        f"--json {own}/c.json",
    )
    done, printed = read_json(own / "c.json"), capsys.readouterr().out
    assert f"{shards}: 6 images with {done['masks']} masks" in printed
    assert "0000.png" in printed
    assert f"gigamask stats {shards}" in printed
    invoke(f"stats {shards}")
    assert f"6 images with {done['masks']} masks" in capsys.readouterr().out
    invoke(f"index {shards} --out {shards}/index")
    invoke(f"train {LITTLE} --data {shards}/index --out {own}/run --steps 2")


def test_from_label_images(own, capsys):
    arguments = f"convert {own}/labels --images {own}/pictures --out {own}/shards"
    invoke(arguments, "--split-components --ignore 1 2")
    assert "6 images with" in capsys.readouterr().out
    assert "1 tar such as sa_000000.tar" in refusal(capsys, arguments)


def test_what_goes_wrong_is_printed(own, capsys):
    """Names that are no numbers, pictures that are not there."""
    told = read_json(own / "instances.json")
    for image in told["images"]:
        image["id"] = f"street {image['id']}"
    for each in told["annotations"]:
        each |= {
            "image_id": f"street {each['image_id']}",
            "iscrowd": each["id"] == 0,
            "segmentation": [] if each["id"] in range(1, 8) else each["segmentation"],
        }
    (own / "instances.json").write_text(json.dumps(told))
    (own / "pictures" / "0003.png").unlink()
    invoke(f"convert {own}/instances.json --images {own}/pictures --out {own}/shards")
    printed = capsys.readouterr().out
    assert "'source'" in printed
    assert "crowd: 1; " in printed
    assert "0003.png" in printed
    assert "masks left out: 9" in printed
