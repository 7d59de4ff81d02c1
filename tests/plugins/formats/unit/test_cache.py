"""A conversion is used again only while every file that it was made of is the same."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gigamask.workflows import own_data
from gigamask.workflows.open_data import AnnotationOptions
from tests.unit.workflows.test_conversion_cache import counts, opened, photograph

LINE = "0 0.1 0.2 0.5 0.2 0.5 0.6\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Photographs with YOLO's text."""
    for name in ("photos", "yolo"):
        for part in "ab":
            (tmp_path / name / part).mkdir(parents=True)
    for number, name in enumerate(("a/0", "a/1", "b/0")):
        photograph(tmp_path, name, 40 * number)
        (tmp_path / "yolo" / f"{name}.txt").write_text(LINE)
    return tmp_path


def test_photographs_and_labels_are_watched(folder):
    seen = {opened(folder, "yolo")}
    for path in ("photos/a/0.png", "yolo/a/0.txt"):
        (folder / path).touch()
        seen.add(opened(folder, "yolo"))
    for number, root in enumerate((folder / "photos", folder / "yolo"), 4):
        for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
            (root / before).rename(root / after)
        seen.add(opened(folder, "yolo"))
        assert len(seen) == number


@pytest.mark.parametrize("name", ["data.yaml", "yolo/data.yaml", "classes.txt", "yolo/classes.txt"])
def test_files_of_class_names_are_watched(folder, name):
    text = "names: [{}]\n" if name.endswith("yaml") else "{}\n"
    seen = {opened(folder, "yolo")}
    for number, word in enumerate(("cat", "dog"), 2):
        (folder / name).write_text(text.format(word))
        found = opened(folder, "yolo")
        seen.add(found)
        assert len(seen) == number
        assert counts(found)["masks"] == 3


def test_parquet_files_and_the_names_of_columns_are_watched(tmp_path):
    photograph_of = tmp_path / "photos"
    photograph_of.mkdir()
    photograph(tmp_path, "a", 40)
    raw = (photograph_of / "a.png").read_bytes()
    table = pa.table({"image": [{"bytes": raw}], "label": [raw], "scan": [raw]})
    seen = set()
    for number, columns in enumerate(({}, {"masks": "scan"}, {"masks": "scan"}), 1):
        pq.write_table(table, tmp_path / "a.parquet")
        options = AnnotationOptions(**columns, binary=1)
        seen.add(own_data.own_tars(tmp_path / "a.parquet", options, lambda line: None))
        assert len(seen) == number
