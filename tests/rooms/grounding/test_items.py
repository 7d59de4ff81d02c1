"""Queries as items that samplers can order."""

import json

import numpy as np
import pytest
import simplejpeg

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.queries import Query
from gigamask.faults import Fault
from gigamask.geometry.runs import Runs
from gigamask.grounding.difficulty import difficulty
from gigamask.grounding.items import open_queries
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.curriculum import Curriculum
from gigamask.samplers.random import Random
from gigamask.samplers.stratified import Stratified


def pair(number, sizes):
    """A jpg of 10 x 100 pixels and its json, whose masks cover so many pixels of it."""
    masks = Runs.from_dense(np.arange(1000).reshape(1, 10, 100) < np.array(sizes).reshape(-1, 1, 1)).to_coco()
    segmentations = [{"size": [10, 100], "counts": mask.decode()} for mask in masks]
    annotations = [{"segmentation": each, "predicted_iou": 1, "stability_score": 1} for each in segmentations]
    image = {"image_id": number, "width": 100, "height": 10, "file_name": f"sa_{number}.jpg"}
    jpg = simplejpeg.encode_jpeg(np.zeros((10, 100, 3), np.uint8))
    return [(f"sa_{number}.jpg", jpg), (f"sa_{number}.json", json.dumps({"image": image, "annotations": annotations}).encode())]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    for name in ("street", "indoor"):
        (folder / name).mkdir()
    tar.write(folder / "street" / "a.tar", [*pair(0, [5, 50, 500]), *pair(1, [200, 9])])
    tar.write(folder / "indoor" / "b.tar", pair(2, [1000]))
    return indexes.build([folder / "street", folder / "indoor"], folder / "index")


ASKED = [
    Query("street/a.tar", "sa_1.jpg", "the red disc", (0,), "name"),
    Query(None, "sa_0", "the red striped disc", (1,), "name", "night"),
    Query(None, "sa_0", "all small things left of the large box", (0, 1), "all"),
    Query(None, "sa_2", "zebra", (), "absent"),
    Query(None, "sa_1", "a zebra", (1,), "name", "night"),
]


def test_columns_are_the_queries(index):
    found = open_queries(index, ASKED, seed=4)
    columns = found.items.columns
    assert (found.items.count, found.items.seed, found.items.tars) == (5, 4, 2)
    assert {name: column.tolist() for name, column in columns.items() if column.dtype == np.int32} == {
        "tar": [1, 1, 1, 0, 1],
        "masks": [2, 3, 3, 1, 2],
        "granularity": [2, 1, 1, 3, 0],
        "length": [3, 4, 8, 1, 2],
        "relations": [0, 0, 1, 0, 0],
        "complexity": [0, 1, 2, 0, 0],
        "domain": [2, 1, 2, 0, 1],
        "kind": [2, 2, 1, 0, 2],
    }
    assert found.kinds == ("absent", "all", "name")
    assert found.domains == ("indoor", "night", "street")
    assert columns["area_share"] == pytest.approx([0.2, 0.05, 0.0275, 0, 0.009])
    expected = difficulty(columns["area_share"], columns["length"], columns["masks"], columns["relations"])
    assert np.array_equal(columns["difficulty"], expected)
    assert expected[3] == pytest.approx(0.3 + 0.2 / 50 + 0.3 / 20)
    assert [index.entry_name(row) for row in found.rows.tolist()] == ["a.tar:sa_1", "a.tar:sa_0", "a.tar:sa_0", "b.tar:sa_2", "a.tar:sa_1"]


def test_a_column_is_worked_out_once_and_when_asked_for(index):
    columns = open_queries(index, ASKED).items.columns
    assert "area_share" not in columns.made
    assert columns["granularity"] is columns["granularity"]
    assert sorted({*columns.made} - {"tar"}) == ["area_share", "granularity"]
    assert len(columns) == len(list(columns)) == 10
    assert "domain" in columns
    assert "width" not in columns


def test_an_unknown_column_is_told_with_those_there_are(index):
    with pytest.raises(Fault, match=r"the queries have no column 'width'; choose one of tar, masks, area_share, .*, kind, difficulty$"):
        open_queries(index, ASKED).items.columns["width"]


@pytest.mark.parametrize("sampler", [Random(), Curriculum(), Stratified(("granularity", "complexity", "domain"), epoch_length="data")])
def test_samplers_order_queries(index, sampler):
    found = open_queries(index, ASKED)
    sequence = SampleSequence(sampler, found.items, locate=found.locate)
    visits = sequence.visits(np.arange(sequence.epoch_length), 0)
    assert {visit.mask for visit in visits} == {-1}
    assert {visit.row for visit in visits} <= set(range(5))
    if isinstance(sampler, Random):
        assert sorted(visit.row for visit in visits) == list(range(5))


def test_no_queries_are_no_items(index):
    found = open_queries(index, [])
    assert found.items.count == 0
    assert [len(column) for column in found.items.columns.values()] == [0] * 10


def test_a_query_that_does_not_fit_is_refused(index):
    with pytest.raises(Fault, match="the query 'cat' of sa_2: its right mask is number 1, the image has 1, counted from 0"):
        open_queries(index, [Query(None, "sa_2", "cat", (1,))])
