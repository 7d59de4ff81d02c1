"""Synthetic shards: SA-1B's exact format, determined by seed and number, and worth
learning from.
"""

import io
import json
import tarfile
from collections import defaultdict

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco

from gigamask.cli.commands.synth import SynthCommand
from gigamask.synthetic.scenes import compose_scene, record, seeded, write, write_scenes
from gigamask.synthetic.shapes import OUTLINES
from tests.errors import error_line


def read(path):
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive.getmembers()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scenes"), 12, seed=3, shard_images=5)


@pytest.mark.slow
def test_shards_hold_numbered_pairs(shards):
    assert [path.name for path in shards] == ["sa_000000.tar", "sa_000001.tar", "sa_000002.tar"]
    names = [list(read(path)) for path in shards]
    assert names == [
        [f"sa_{n}.{end}" for n in numbers for end in ("jpg", "json")]
        for numbers in (range(5), range(5, 10), range(10, 12))
    ]


# pycocotools passes numpy 2 no copy keyword.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_json_is_as_sa1b_writes_it(shards):
    for path in shards:
        members = read(path)
        for number, raw in [
            (int(name[3:-5]), raw) for name, raw in members.items() if name.endswith("json")
        ]:
            told = json.loads(raw)
            picture = Image.open(io.BytesIO(members[f"sa_{number}.jpg"]))
            assert picture.format == "JPEG"
            assert picture.mode == "RGB"
            size = {"width": picture.width, "height": picture.height}
            assert told["image"] == {"image_id": number, "file_name": f"sa_{number}.jpg", **size}
            assert list(told) == ["image", "annotations"]
            assert len({each["id"] for each in told["annotations"]}) == len(told["annotations"]) > 0
            for each in told["annotations"]:
                check_annotation(each, picture.size)


@pytest.mark.slow
def test_categories_are_the_outlines_of_objects():
    """Uncovered rectangles fill the smallest rectangle around them, ellipses pi / 4 of it."""
    fill: dict[str, list[float]] = defaultdict(list)
    for number in range(16):
        scene = compose_scene(0, number)
        assert len(scene.categories) == len(scene.masks)
        for name, mask in zip(scene.categories, scene.masks.to_dense(), strict=True):
            _, sides, _ = cv2.minAreaRect(np.argwhere(mask).astype(np.float32))
            fill[name].append(mask.sum() / np.prod(np.array(sides) + 1))
        told = record(scene, number)["annotations"]
        assert tuple(each.get("category", "") for each in told) == scene.categories
    assert fill.keys() == {"", *OUTLINES}
    most = {name: np.quantile(values, 0.9) for name, values in fill.items()}
    assert most["rectangle"] > 0.9
    assert 0.75 < most["ellipse"] < 0.85
    assert most["star"] < 0.7


def check_annotation(each, picture_size):
    assert each.pop("category", "ring") in OUTLINES
    keys = "bbox area segmentation predicted_iou point_coords crop_box id stability_score"
    assert list(each) == keys.split()
    assert each["segmentation"]["size"] == [picture_size[1], picture_size[0]]
    assert each["crop_box"] == [0.0, 0.0, *picture_size]
    pixels = coco.decode(each["segmentation"])
    assert pixels.sum() == each["area"] >= 0.01 * pixels.size
    ys, xs = np.nonzero(pixels)
    assert each["bbox"] == [xs.min(), ys.min(), xs.max() - xs.min(), ys.max() - ys.min()]
    assert 0.88 <= each["predicted_iou"] <= 1
    assert 0.92 <= each["stability_score"] <= 1
    [[x, y]] = each["point_coords"]
    assert pixels[int(y), int(x)] == 1


@pytest.mark.slow
def test_bytes_depend_on_seed_and_number_alone(shards, tmp_path):
    again = write(tmp_path / "again", 12, seed=3, shard_images=5)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in shards]
    [later] = write(tmp_path / "later", 5, seed=3, shard_images=5, first=5)
    assert later.name == "sa_000001.tar"
    assert later.read_bytes() == shards[1].read_bytes()
    [other] = write(tmp_path / "other", 5, seed=4, shard_images=5)
    assert read(other)["sa_0.jpg"] != read(shards[0])["sa_0.jpg"]


@pytest.mark.slow
def test_shards_do_not_depend_on_the_number_of_workers(shards, tmp_path, forked_workers):
    again = write_scenes(tmp_path, 12, seeded(compose_scene, 3), 5, workers=2)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in shards]


@pytest.mark.slow
def test_scenes_are_worth_learning_from():
    scenes = [compose_scene(0, number) for number in range(40)]
    assert {max(scene.masks.size) for scene in scenes} <= set(range(256, 321))
    assert min(min(scene.masks.size) for scene in scenes) >= 192
    assert len({scene.masks.size for scene in scenes}) > 30
    counts = [len(scene.masks) for scene in scenes]
    assert min(counts) >= 3
    assert 8 <= np.median(counts) <= 20
    shares = np.concatenate([scene.masks.areas() / np.prod(scene.masks.size) for scene in scenes])
    assert 0.03 <= np.median(shares) <= 0.07
    # A click is ambiguous: most of what lies in any mask lies in a second one nested with it.
    nested = [
        np.triu(
            scene.masks.intersections(scene.masks)
            == np.minimum.outer(scene.masks.areas(), scene.masks.areas()),
            1,
        ).any()
        for scene in scenes
    ]
    assert np.mean(nested) > 0.9


@pytest.mark.slow
def test_masks_follow_what_can_be_seen():
    """Along a mask's border colors change more than inside it: on average over scenes, most objects
    are distinguishable from their surroundings."""
    ratios = []
    for number in range(12):
        scene = compose_scene(1, number)
        light = scene.pixels.astype(np.float64)
        step = np.abs(np.diff(light, axis=1)).sum(2)
        for mask in scene.masks.to_dense():
            border = mask[:, 1:] != mask[:, :-1]
            inside = mask[:, 1:] & mask[:, :-1]
            ratios.append(step[border].mean() / (step[inside].mean() + 1))
    assert np.median(ratios) > 2
    assert np.quantile(ratios, 0.1) > 0.9


@pytest.mark.slow
def test_any_size_can_be_made(tmp_path):
    scene = compose_scene(0, 0, long_side=(1000, 1000))
    assert max(scene.masks.size) == 1000
    assert max(compose_scene(0, 1, long_side=(32, 40)).masks.size) <= 40
    assert record(scene, 7)["image"]["image_id"] == 7


def test_progress_counts_the_images(tmp_path):
    told = []
    compose = seeded(compose_scene, 0)
    write_scenes(tmp_path, 3, compose, 5, 4, lambda done, images: told.append((done, images)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "wrong", [{"images": 0}, {"images": 1, "shard_images": 0}, {"images": 1, "first": -1}]
)
def test_counts_that_are_none_are_refused(tmp_path, wrong):
    name, value = [*wrong.items()][-1]
    with error_line(rf"--{name.replace('_', '-')} must be at least \d \(got {value}\)"):
        write(tmp_path, **wrong)


@pytest.mark.parametrize("long_side", [(8, 20), (300, 200), (100, 9000)])
def test_sizes_out_of_bounds_are_refused(tmp_path, long_side):
    with error_line(rf"32.*8192.*{long_side[0]}.*{long_side[1]}"):
        write(tmp_path, 1, long_side=long_side)


@pytest.mark.slow
def test_crowded_scenes_are_mostly_fine_and_the_others_the_same():
    plain, mixed = (
        [compose_scene(3, number, crowded=share) for number in range(30)] for share in (0.0, 0.4)
    )
    crowded = [
        number
        for number in range(30)
        if mixed[number].masks.to_coco() != plain[number].masks.to_coco()
    ]
    assert 6 <= len(crowded) <= 18
    assert all(
        (mixed[number].pixels == plain[number].pixels).all()
        for number in range(30)
        if number not in crowded
    )
    for number in crowded:
        shares = mixed[number].masks.areas() / np.prod(mixed[number].masks.size)
        assert len(shares) >= 8
        assert shares.min() >= 0.003
        assert np.mean(shares < 0.01) > 0.5


def test_invalid_fraction_of_crowded_scenes_is_rejected(tmp_path):
    with error_line(r"crowded.*1.5"):
        SynthCommand(str(tmp_path), crowded=1.5).run()


@pytest.mark.slow
def test_a_tar_of_other_images_is_not_overwritten(tmp_path):
    write(tmp_path, 4, seed=0, shard_images=2)
    before = [path.read_bytes() for path in sorted(tmp_path.glob("*.tar"))]
    (tmp_path / "sa_000001.tar").write_bytes(b"photographs")
    with error_line(r"sa_000001\.tar"):
        write(tmp_path, 4, seed=0, shard_images=2)
    (tmp_path / "sa_000001.tar").unlink()
    assert [path.read_bytes() for path in write(tmp_path, 4, seed=0, shard_images=2)] == before
    with error_line(r"sa_000000\.tar"):
        write(tmp_path, 4, seed=1, shard_images=2)
