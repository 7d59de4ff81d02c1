"""Parquet files: the layouts of public data sets give the same masks, and what is left out."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from gigamask.datatools import convert as convert_module
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.formats import parquet, parquet_files
from gigamask.plugins.formats.parquet import ParquetFiles
from tests.errors import error_line
from tests.servers import Hub
from tests.unit.datatools.test_convert import members

HEIGHT, WIDTH, COUNT = 20, 30, 6
RING = [4.0, 4.0, 14.0, 4.0, 14.0, 10.0, 4.0, 10.0]
NAMES = ["cell", "vessel"]


def encoded(pixels: np.ndarray, path: str | None = None) -> dict:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": path}


def dense() -> np.ndarray:
    masks = np.zeros((2, HEIGHT, WIDTH), bool)
    masks[0, 2:9, 3:12], masks[1, 11:18, 14:28] = True, True
    return masks


MASKS = dense()
LABELS = (MASKS[0] + 2 * MASKS[1]).astype(np.uint8)
COUNTS = [each.decode() for each in RLEMasks.from_dense(MASKS).to_coco()]
RLES = [{"size": [HEIGHT, WIDTH], "counts": each} for each in COUNTS]
ANNOTATIONS = [
    {"id": 7 + i, "segmentation": rle, "category_id": i, "predicted_iou": 0.5, "bbox": [0.0] * 4}
    for i, rle in enumerate(RLES)
]
RECORD = {"image": {"image_id": 3, "width": WIDTH, "height": HEIGHT}, "annotations": ANNOTATIONS}
LISTS = {key: [each[key] for each in ANNOTATIONS] for key in ("id", "segmentation", "bbox")}
SHADE = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
IMAGE = encoded(SHADE, "a.png")


def class_labels(column: str) -> dict:
    flags = {"names": ["no", "yes"], "_type": "ClassLabel"}
    feature = {"feature": {"category": {"names": NAMES, "_type": "ClassLabel"}, "hidden": flags}}
    return {"info": {"features": {column: feature}}}


def write(path: Path, columns: dict, features: dict | None = None, **options: object) -> Path:
    table = pa.table(columns)
    if features:
        table = table.replace_schema_metadata({b"huggingface": json.dumps(features).encode()})
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(table, path, **{"row_group_size": 4, **options})
    return path


def rows(annotations: object = None, count: int = COUNT, /, **columns: object) -> dict:
    """The columns of `count` equal rows."""
    given = {"image": IMAGE} | columns
    given |= {} if annotations is None else {"annotations": annotations}
    return {name: [value] * count for name, value in given.items()}


def converted(path: Path, columns: tuple = (None, None), **options) -> tuple[dict, list[dict]]:
    """The counts, and the records."""
    out = path.parent / "out"
    source = ParquetFiles(parquet_files.find([str(path)]), *columns)
    counts = convert(source, None, out, ConvertOptions(**options))
    found = [members(tar) for tar in counts["tars"]]
    return counts, [json.loads(raw) for of in found for name, raw in of.items() if "json" in name]


LAYOUTS = {
    "SA-1B's record, as a struct": (rows(json=RECORD), None),
    "of WebDataset, as bytes": (rows(json=json.dumps(RECORD).encode()), None),
    "a list of structs": (rows(ANNOTATIONS), None),
    "JSON": (rows(json.dumps(ANNOTATIONS)), None),
    "a list of JSON": (rows([json.dumps(each) for each in ANNOTATIONS]), None),
    "a struct of lists": (rows(objects=LISTS | {"category": [0, 1]}), "objects"),
    "a struct of lists, one of them empty, and of a number": (
        rows(objects=LISTS | {"category": [0, 1], "iscrowd": [], "image": 7}),
        "objects",
    ),
    "run lengths": (rows(masks=RLES, categories=[0, 1]), "categories"),
    "run lengths of the image's size": (rows(rles=COUNTS), None),
    "segmentations as JSON": (rows([{"segmentation": json.dumps(each)} for each in RLES]), None),
    "a label image": (rows(label=encoded(LABELS)), None),
    "a label image, image as bytes": (
        rows(image=IMAGE["bytes"], mask=encoded(LABELS)["bytes"]),
        None,
    ),
    "images of masks": (
        rows(instances=[encoded(each) for each in MASKS], categories=[0, 1]),
        "categories",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_public_data_sets(layout, tmp_path):
    columns, named = LAYOUTS[layout]
    path = write(tmp_path / "a.parquet", columns, class_labels(named) if named else None)
    counts, records = converted(path)
    assert (counts["images"], counts["masks"], counts["renumbered"]) == (COUNT, 2 * COUNT, True)
    for number, record in enumerate(records):
        assert record["image"]["source"] == f"a.parquet:{number}"
        assert [each["segmentation"] for each in record["annotations"]] == RLES
        if named:
            assert [each["category"] for each in record["annotations"]] == NAMES
    if "struct" in layout and "lists" not in layout:
        first = records[0]["annotations"][0]
        assert (first["id"], first["predicted_iou"], first["category_id"]) == (7, 0.5, 0)
        assert first["stability_score"] == 1


@pytest.mark.parametrize(
    "segmentation",
    [
        [RING],
        RING,
        {"x": RING[::2], "y": RING[1::2], "click_date": None},
    ],
    ids=["COCO's", "flat", "ADE20K's"],
)
def test_polygons(segmentation, tmp_path):
    annotations = [{"polygon": segmentation, "name": "cell", "iscrowd": 0}]
    _, records = converted(write(tmp_path / "a.parquet", rows(annotations)))
    (mask,) = records[0]["annotations"]
    assert (mask["bbox"], mask["category"]) == ([4, 4, 9, 5], "cell")


def test_a_column_of_polygons_has_one_mask_each(tmp_path):
    path = write(tmp_path / "a.parquet", rows(segmentation=[RING, [x + 9 for x in RING]]))
    assert converted(path)[0]["masks"] == 2 * COUNT


def test_what_is_left_out_is_listed(tmp_path):
    columns = rows(masks=[encoded(each) for each in MASKS])
    columns["image"][1] = {"bytes": None, "path": "elsewhere/b.jpg"}
    columns["masks"][2] = None
    other, empty = encoded(MASKS[0][1:]), encoded(MASKS[0] & MASKS[1])
    columns["masks"][3] = [other, *columns["masks"][3], empty]
    counts, records = converted(write(tmp_path / "a.parquet", columns))
    assert [record["image"]["image_id"] for record in records] == [0, 3, 4, 5]
    reasons = [each["reason"] for each in counts["skipped_images"]]
    assert "a.parquet:1: only its path elsewhere/b.jpg" in reasons[0]
    assert "a.parquet:2: its masks is null" in reasons[1]
    reasons = [each["reason"] for each in counts["skipped_masks"]]
    assert "a.parquet:3: its mask 0: has 19 x 30 pixels, but its image 20 x 30" in reasons[0]
    assert "mask 3: it covers no pixel" in reasons[1]


WRONG = [
    "{",
    "7",
    "[[[[1]]]]",
    '{"annotations": 3}',
    '[{"segmentation": {"x": 1, "y": 2}}]',
    '[{"segmentation": {"size": [20, 30], "counts": "\\u0001"}}]',
    '[{"segmentation": {"size": [2, 3], "counts": [6]}}]',
    '[{"segmentation": [[1, 2, 3]], "id": [], "iscrowd": {}}]',
    "[" * 5000,
    '[{"rle": "\\"x\\""}, null, true, "a"]',
]


@pytest.mark.slow
def test_values_that_are_no_masks_are_left_out(tmp_path):
    count = len(WRONG)
    columns = rows(json.dumps(ANNOTATIONS), 2 * count + 1)
    columns["annotations"][:count] = WRONG
    counts, records = converted(write(tmp_path / "a.parquet", columns))
    whole = [record for record in records if record["annotations"]]
    assert len(whole) == count + 1
    assert len(counts["skipped_images"]) + counts["images_without_masks"] == count
    assert all(len(each["reason"]) < 400 for each in counts["skipped_images"])


def test_columns_are_named_when_none_fits(tmp_path):
    columns = {"photo": [IMAGE] * 2, "gt": [encoded(LABELS)] * 2, "caption": ["x"] * 2}
    path = write(tmp_path / "a.parquet", columns)
    with error_line(r"--images COLUMN .*photo \(struct.*caption"):
        converted(path)
    with error_line(r"--masks COLUMN .*gt \(struct"):
        converted(path, ("photo", None))
    with error_line(r"column size does not hold label images.*--masks"):
        converted(path, ("photo", "size"))
    assert converted(path, ("photo", "gt"))[0]["masks"] == 4


def test_options_of_label_images(tmp_path):
    path = write(tmp_path / "a.parquet", rows(label=encoded(LABELS)))
    assert converted(path, ignore=(2,))[0]["masks"] == COUNT
    path = write(tmp_path / "other/a.parquet", rows(ANNOTATIONS))
    with error_line(r"annotations has annotations.*--ignore"):
        converted(path, ignore=(2,))


@pytest.mark.slow
def test_files_that_are_damaged(tmp_path):
    path = write(tmp_path / "a.parquet", rows(ANNOTATIONS, 12), row_group_size=3)
    raw = path.read_bytes()
    path.write_bytes(raw[:-20])
    with error_line(r"a.parquet: is no readable parquet file"):
        converted(path)
    places = pq.read_metadata(io.BytesIO(raw)).row_group(3).column(0)
    start = places.dictionary_page_offset or places.data_page_offset
    path.write_bytes(raw[:start] + b"\xff" * 16 + raw[start + 16 :])
    counts, _ = converted(path)
    assert (counts["images"], len(counts["skipped_images"])) == (9, 3)
    assert "a.parquet:9: the file is damaged here" in counts["skipped_images"][0]["reason"]
    empty = pa.array([None] * 10**6, pa.binary())
    write(path, {"image": empty, "label": empty}, row_group_size=10**6)
    with error_line(r"claims 1000000 rows in \d+ bytes"):
        converted(path)
    path.unlink()
    path.mkdir()
    with error_line(r"a.parquet: is not a regular file"):
        ParquetFiles((str(path),)).listing(ConvertOptions())
    with error_line(r"none.parquet: (cannot be read|no such)"):
        ParquetFiles((str(tmp_path / "none.parquet"),)).listing(ConvertOptions())


def test_a_row_group_of_many_tars_is_decoded_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", rows(ANNOTATIONS, 30), row_group_size=24)
    decoded, iter_batches = [], pq.ParquetFile.iter_batches

    def counted(file, size, *words, **options):
        for batch in iter_batches(file, size, *words, **options):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    done, source = [], ParquetFiles((str(path),))
    whole = convert(
        *(source, None, tmp_path / "whole", ConvertOptions(), 5, 1),
        progress=lambda *each: done.append(each),
    )
    assert (whole["images"], len(whole["tars"])) == (30, 6)
    assert done == [(number + 1, 6) for number in range(6)]
    assert max(decoded) <= parquet_files.BATCH
    assert 30 <= sum(decoded) <= 30 + 5  # the fifth tar has images of both groups
    shards = [
        convert_module.ShardJob(Path(), list(source.listing(ConvertOptions()).images[start:]))
        for start in range(0, 30, 5)
    ]
    of_two = convert_module.runs_of(shards, 2)
    assert [len(run) for run in of_two] == [3, 2, 1]
    assert [shard for run in of_two for shard in run] == shards


def test_which_paths_are_parquet(tmp_path):
    train = [tmp_path / f"set/data/train-0000{i}-of-00002.parquet" for i in range(2)]
    for path in train:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    both = tuple(map(str, train))
    assert parquet_files.find([str(tmp_path / "set")]) == both
    assert parquet_files.find([str(tmp_path / "set/data/train-*")]) == both
    assert parquet_files.find([both[1], both[0]]) == both[::-1]
    (tmp_path / "set/data/validation-00000-of-00001.parquet").touch()
    with error_line(r"train \(2 files\), .*data/train\*.parquet"):
        parquet_files.find([str(tmp_path / "set")])
    assert parquet_files.find([str(tmp_path / "set/data/train*.parquet")]) == both
    (tmp_path / "a.tar").touch()
    with error_line(r"a.tar: is no parquet file"):
        parquet_files.find([both[0], str(tmp_path / "a.tar")])
    (tmp_path / "set/b.tar").touch()
    assert parquet_files.find([str(tmp_path / "set")]) == ()
    assert parquet_files.find([str(tmp_path / "none")]) == ()


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", rows(ANNOTATIONS))
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with error_line(r"pip install 'gigamask\[parquet\]'"):
        converted(path)


@pytest.mark.slow
def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    path = tmp_path / "hub/datasets/us/cells/main/data/train-00000-of-00001.parquet"
    write(path, rows(ANNOTATIONS))
    with Hub(tmp_path / "hub") as hub:
        files = parquet_files.find(["hf://us/cells"])
        assert files == ("hf://datasets/us/cells/data/train-00000-of-00001.parquet",)
        assert parquet_files.find(["hf://datasets/us/cells@main/data/train-*.parquet"]) != ()
        counts = convert(ParquetFiles(files), None, tmp_path / "out", ConvertOptions())
        assert (counts["masks"], counts["skipped_images"]) == (2 * COUNT, [])
        listing = ParquetFiles(files).listing(ConvertOptions())
        hub.status = 403
        with error_line(r"train-00000-of-00001.parquet: .*no permission"):
            list(parquet.ParquetRow.read_all(listing.images))


@pytest.mark.parametrize(
    "columns, datum",
    [
        ({"image": [b"x"], "segmentation": [[0.0] * 300_000]}, "segmentation.* expands"),
        ({"image": [bytes(3_000_000)], "label": [b"x"]}, "image .*expands"),
        ({"image": [b"x"], "masks": [[bytes(50_000)] * 60]}, "3,000,001 bytes in memory"),
    ],
)
def test_small_files_that_expand_are_refused(tmp_path, monkeypatch, columns, datum):
    monkeypatch.setattr(parquet_files, "MAX_EXPANDED_BYTES", 1_000_000)
    monkeypatch.setattr(parquet, "MAX_ROW_BYTES", 1_000_000)
    path = tmp_path / "small.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd")
    assert path.stat().st_size < 12_000
    files = ParquetFiles((str(path),))
    with error_line(rf"small\.parquet.*{datum}"):
        convert(files, None, tmp_path / "out", ConvertOptions())
