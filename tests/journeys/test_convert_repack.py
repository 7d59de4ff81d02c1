"""Custom data, from images and COCO's json or label images to training, as a user types it."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask.cli.main import main
from gigamask.synthetic.scenes import compose_scene

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"


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
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": 1,
                    "iscrowd": 0,
                    "segmentation": polygons,
                }
            )
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
    pictures, shards, small = str(own / "pictures"), str(own / "shards"), str(own / "small")
    assert (
        main(
            [
                "convert",
                str(own / "instances.json"),
                "--images",
                pictures,
                "--out",
                shards,
                "--shard-images",
                "4",
                "--json",
                str(own / "c.json"),
            ]
        )
        == 0
    )
    done, printed = json.loads((own / "c.json").read_text()), capsys.readouterr().out
    assert f"{shards}: 6 images with {done['masks']} masks" in printed
    assert "0000.png" in printed
    assert f"gigamask stats {shards}" in printed
    assert main(["stats", shards]) == 0
    assert f"6 images with {done['masks']} masks" in capsys.readouterr().out
    assert (
        main(["repack", shards, "--out", small, "--size", "128", "--json", str(own / "r.json")])
        == 0
    )
    done, printed = json.loads((own / "r.json").read_text()), capsys.readouterr().out
    assert f"{small}: 6 images with {done['masks']} masks in 2 tars (0" in printed
    assert "times smaller" in printed
    assert main(["repack", shards, "--out", small, "--size", "128"]) == 0
    assert "2 tars (2" in capsys.readouterr().out
    assert main(["index", small, "--out", f"{small}/index"]) == 0
    assert main(f"train {LITTLE} --data {small}/index --out {own}/run --steps 2".split()) == 0


def test_from_label_images(own, capsys):
    arguments = (f"convert {own}/labels --images {own}/pictures --out {own}/shards").split()
    assert main([*arguments, "--split-components", "--ignore", "1", "2"]) == 0
    assert "6 images with" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "1 tar such as sa_000000.tar" in capsys.readouterr().err


def test_what_goes_wrong_is_printed(own, capsys):
    """Names that are no numbers, pictures that are not there, tars that are none."""
    told = json.loads((own / "instances.json").read_text())
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
    assert (
        main((f"convert {own}/instances.json --images {own}/pictures --out {own}/shards").split())
        == 0
    )
    printed = capsys.readouterr().out
    assert "'source'" in printed
    assert "crowd: 1; " in printed
    assert "0003.png" in printed
    assert "masks left out: 9" in printed
    (own / "shards" / "z.tar").write_bytes(b"")
    assert main(f"repack {own}/shards --out {own}/small --size 300".split()) == 2
    printed = capsys.readouterr()
    assert "small already" in printed.out
    assert "tars skipped: 1\n" in printed.out
    assert "1 tar could not be repacked" in printed.err
