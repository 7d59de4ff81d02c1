"""Queries: what a file of them may say, and where their images lie in an index."""

import json

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.plugins.grounding.queries import MAX_TEXT_LENGTH, Query, locate, read, write
from tests.errors import error_line
from tests.plugins.grounding.unit.test_data import pair


@pytest.fixture
def lines(tmp_path):
    """Writes lines, plain data or text, and returns the file's path."""

    def put(*given):
        path = tmp_path / "queries.jsonl"
        path.write_text(
            "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in given)
        )
        return path

    return put


@pytest.fixture
def index(tmp_path):
    """Two tars called alike in two folders with sa_1 and sa_2, one with sa_3, each image with three
    masks."""
    for name, numbers in {"one/a.tar": (1, 2), "two/a.tar": (1, 2), "two/b.tar": (3,)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        tar.write(
            tmp_path / name,
            [member for number in numbers for member in pair(number, [10, 200, 600])],
        )
    return indexes.build([tmp_path / "one", tmp_path / "two"], tmp_path / "index")


def test_one_several_and_no_right_masks(lines):
    path = lines(
        {
            "tar": "one/a.tar",
            "image": "sa_1.jpg",
            "query": "the cat",
            "mask_index": 2,
            "kind": "name",
        },
        "",
        {
            "image": "sa_2",
            "query": "cats",
            "mask_indices": [2, 0],
            "domain": "street",
            "annotator": 7,
        },
        {"tar": None, "image": "sa_2", "query": "a dög", "mask_indices": []},
    )
    assert read(path) == [
        Query("one/a.tar", "sa_1.jpg", "the cat", (2,), "name"),
        Query(None, "sa_2", "cats", (2, 0), domain="street"),
        Query(None, "sa_2", "a dög", ()),
    ]
    assert read([path, path]) == 2 * read(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(lines):
    path = lines({"image": "sa_2", "query": "a dög", "mask_indices": []})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == [Query(None, "sa_2", "a dög", ())]


def test_what_is_written_reads_back_equal(tmp_path):
    held = [
        Query("one/a.tar", "sa_1.jpg", "the cat", (2,), "name"),
        Query(None, "sa_2", 'a "dög"\nor 犬', (4, 0), "all", "street"),
        Query("b.tar", "sa_3", "no\u2028thing", (), "absent"),
    ]
    write(tmp_path / "queries.jsonl", held)
    assert read(tmp_path / "queries.jsonl") == held
    first = (tmp_path / "queries.jsonl").read_text().split("\n")[0]
    assert first == (
        '{"tar": "one/a.tar", "image": "sa_1.jpg", "query": "the cat", "mask_index": 2, '
        '"kind": "name"}'
    )


@pytest.mark.slow
def test_the_real_ones_are_read_and_written(real_data, tmp_path):
    paths = [real_data / "grounding" / name for name in ("queries.jsonl", "queries_sets.jsonl")]
    held = read(paths)
    assert len(held) == 412 + 896
    assert sum(not query.mask_indices for query in held) == 350
    write(tmp_path / "again.jsonl", held)
    assert read(tmp_path / "again.jsonl") == held
    assert (tmp_path / "again.jsonl").read_text().startswith(paths[0].read_text())
    index = indexes.build(
        [real_data / "coco128", real_data / "coco_tiny_train"], tmp_path / "index"
    )
    rows = locate(held, index)
    assert [index.entry_name(row) for row in rows[:2].tolist()] == [
        "coco128_000000.tar:sa_9",
        "coco128_000000.tar:sa_30",
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ("sa_1 the cat", r"queries.jsonl:2: .*\(JSON is malformed"),
        (
            {"image": "sa_1", "mask_index": 0},
            r"\(Object missing required field `query`\)",
        ),
        (
            {"image": "sa_1", "query": "the cat", "mask_index": None},
            "has neither mask_index nor mask_indices",
        ),
        (
            {"image": "sa_1", "query": "the cat", "mask_indices": [True]},
            r"Expected `int`, got `bool`",
        ),
        (
            {"image": "sa_1", "query": "the cat", "mask_index": 0, "mask_indices": []},
            "has both mask_index and mask_indices",
        ),
        (
            {"image": "sa_1", "query": " \t", "mask_index": 0},
            "the query is empty",
        ),
        (
            {"image": "sa_1", "query": "a" * (MAX_TEXT_LENGTH + 1), "mask_index": 0},
            f"has {MAX_TEXT_LENGTH + 1:,} characters, but at most {MAX_TEXT_LENGTH:,} are read",
        ),
        (
            {"image": "", "query": "the cat", "mask_index": 0},
            "'the cat' .*empty image",
        ),
        (
            {"image": "sa_1", "tar": "", "query": "the cat", "mask_index": 0},
            "'the cat' .*empty tar",
        ),
        (
            {"image": "sa_1", "query": "the cat", "mask_index": -1},
            "'the cat' .*mask index -1",
        ),
        (
            {"image": "sa_1", "query": "the cat", "mask_indices": [3, 1, 3]},
            "'the cat' .*mask indices 3, 1, 3",
        ),
    ],
)
def test_a_line_that_is_no_query_is_named(lines, line, message):
    path = lines({"image": "sa_1", "query": "fine", "mask_index": 0}, line)
    with error_line(message) as fault:
        read(path)
    assert str(fault.value).startswith(f"{path}:2: ")


def test_bytes_that_are_no_text_are_refused(lines):
    path = lines()
    path.write_bytes(b'{"image": "sa_1", "query": "\xff\xfe", "mask_index": 0}\n')
    with error_line(r"queries.jsonl:1"):
        read(path)


def test_files_without_queries_are_refused(lines, tmp_path):
    full, empty = (
        lines({"image": "sa_1", "query": "fine", "mask_index": 0}),
        tmp_path / "empty.jsonl",
    )
    empty.write_text("\n")
    with error_line(rf"^{empty}"):
        read([full, empty])
    with error_line(r"No such file or directory"):
        read(tmp_path / "none.jsonl")


def test_images_are_found_by_stem_and_by_the_tars_trailing_parts(index):
    asked = [
        Query(None, "sa_3.jpg", "x", (2,)),
        Query("two/a.tar", "sa_1", "x", (0,)),
        Query("one/a.tar", "sa_2.jpg", "x", ()),
        Query("b.tar", "sa_3", "x", (0, 1)),
        Query(index.shard_paths[1], "sa_2", "x", ()),
    ]
    rows = locate(asked, index)
    assert rows.dtype == np.int64
    found = [
        (index.shard_paths[index.images["shard"][row]][-9:], index.images["name"][row])
        for row in rows.tolist()
    ]
    assert found == [
        ("two/b.tar", b"sa_3"),
        ("two/a.tar", b"sa_1"),
        ("one/a.tar", b"sa_2"),
        ("two/b.tar", b"sa_3"),
        ("two/a.tar", b"sa_2"),
    ]
    assert locate([], index).shape == (0,)


@pytest.mark.parametrize(
    "query, message",
    [
        (
            Query(None, "sa_4.jpg", "the cat", ()),
            r"'the cat' of sa_4.jpg: .*/index has no such image",
        ),
        (
            Query("two/b.tar", "sa_1", "x", ()),
            "of two/b.tar:sa_1: .*no such image",
        ),
        (
            Query("wo/b.tar", "sa_3", "x", ()),
            "of wo/b.tar:sa_3: no tar .*'wo/b.tar'",
        ),
        (
            Query("a.tar", "sa_1", "x", ()),
            "of a.tar:sa_1: 2 images .*one/a.tar, .*two",
        ),
        (Query(None, "sa_1.jpg", "x", ()), "of sa_1.jpg: 2 images"),
        (
            Query("b.tar", "sa_3", "x", (0, 3)),
            "of b.tar:sa_3: mask index 3 .* 3, ",
        ),
    ],
)
def test_a_query_that_does_not_fit_the_index_is_named(index, query, message):
    with error_line(message):
        locate([Query("b.tar", "sa_3", "fine", (2,)), query], index)
