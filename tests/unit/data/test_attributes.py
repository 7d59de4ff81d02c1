"""The user's table of attributes."""

import os

import numpy as np
import pytest

from gigamask.data import attributes
from gigamask.data import index as indexes
from gigamask.data.attributes import read
from gigamask.synthetic.scenes import write
from tests.errors import error_line


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Images sa_0 to sa_4 in sa_000000.tar and sa_000001.tar, three in the first."""
    folder = tmp_path_factory.mktemp("scenes")
    return indexes.build(write(folder, 5, shard_images=3), folder / "index")


@pytest.fixture
def table(tmp_path):
    """Writes a table and returns its path."""

    def put(text):
        path = tmp_path / "table.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return put


def values(path, index):
    return {name: column.tolist() for name, column in read(path, index).items()}


@pytest.mark.parametrize("at_once", [1, 2, 512])
@pytest.mark.parametrize("images", [1, 2, 2**20])
def test_texts_are_numbered_in_their_order_and_numbers_stay(
    index, table, monkeypatch, at_once, images
):
    monkeypatch.setattr(attributes, "ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(attributes, "IMAGES_AT_ONCE", images)
    path = table(
        "name,domain,year\nsa_4,street,2020\nsa_1,indoor,-3\nsa_0,street,2020\nelsewhere,a "
        "desert,1\nsa_3,,7\nsa_2,indoor,10\n"
    )
    # The empty text is before 'a desert', which is counted though the index does not hold its
    # image.
    assert values(path, index) == {"domain": [3, 2, 2, 0, 3], "year": [2020, -3, 10, 7, 2020]}
    found = read(path, index)
    assert found["domain"].dtype == np.int32
    assert found["year"].dtype == np.int64


def test_images_may_have_their_long_name(index, table):
    path = table(
        "name,a\n"
        + "".join(f"sa_00000{number // 3}.tar:sa_{number},{number}\n" for number in (3, 1, 4, 0))
        + "sa_2,9\n"
    )
    assert values(path, index) == {"a": [0, 1, 9, 3, 4]}


@pytest.mark.parametrize("end", ["", ".tar"])
def test_tars_give_all_their_images_a_value(index, table, end):
    path = table(
        f"tar,node,region\nsa_000001{end},0,north\nsa_000009{end},4,west\nsa_000000{end},1,south\n"
    )
    assert values(path, index) == {"node": [1, 1, 1, 0, 0], "region": [1, 1, 1, 0, 0]}


def test_images_of_one_name_have_one_value(tmp_path, table):
    for folder in ("one", "two"):
        write(tmp_path / folder, 2)
    index = indexes.build([tmp_path / "one", tmp_path / "two"], tmp_path / "index")
    assert values(table("name,a\nsa_1,1\nsa_0,0\n"), index) == {"a": [0, 1, 0, 1]}
    assert values(table("name,a\nsa_000000.tar:sa_1,1\nsa_0,0\n"), index) == {"a": [0, 1, 0, 1]}
    assert values(table("tar,a\nsa_000000,5\n"), index) == {"a": [5, 5, 5, 5]}


def test_quotes_spaces_marks_and_empty_lines_are_read_over(index, table):
    path = table(
        '\ufeffname, domain\r\nsa_0,"a, b"\r\n\r\nsa_1, c\r\nsa_2,c\r\nsa_3,"c"\r\n"sa_4",c\r\n\r\n'
    )
    assert values(path, index) == {"domain": [0, 1, 1, 1, 1]}


def test_a_number_of_nineteen_digits_is_a_text(index, table):
    path = table("tar,a,b\nsa_000000,1000000000000000000,100000000000000000\nsa_000001,20,-2\n")
    assert values(path, index) == {"a": [0, 0, 0, 1, 1], "b": [10**17] * 3 + [-2, -2]}


def test_names_longer_than_any_of_the_index_take_no_memory(index, table):
    rows = "".join(f"sa_{number},1\n" for number in range(5))
    path = table(f"name,a\n{'x' * 100_000},5\n{rows}{'x' * 100_000},5\n")
    assert values(path, index) == {"a": [1] * 5}
    assert attributes._read(path, 20).names.itemsize == 4


def test_names_that_are_no_text_are_found(index, table):
    name = b"caf\xe9"
    held = np.array([name, b"b", b"c", b"d", b"e"])
    odd = indexes.Index(index.folder, index.manifest, {**index.images, "name": held}, index.masks)
    assert values(table(b"name,a\ne,5\nd,4\nc,3\nb,2\ncaf\xe9,1\n"), odd) == {"a": [1, 2, 3, 4, 5]}
    with error_line(r"sa_000000\.tar:caf\\udce9"):
        read(table("name,a\ne,5\nd,4\nc,3\nb,2\n"), odd)


ROWS = "".join(f"sa_{number},1\n" for number in range(5))


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["first line", "'name'", "'tar'"]),
        ("\nname,a\n", ["first line", "'name'", "'tar'"]),
        (ROWS, ["'name'", "'tar'", "'sa_0'", "first line"]),
        (b"\xff\xfen\x00", ["'name'", "'tar'", "'\\udcff\\udcfen\\x00'"]),
        ("name\nsa_0\n", ["no column", "'name'"]),
        ("name,a,\n", ["column 3", "first line"]),
        ("name,difficulty\n", ["'difficulty'", "every index"]),
        ("name,a,b,a\n", ["two columns", "'a'"]),
        ("name,name\n", ["two columns", "'name'"]),
        ("name,a,b\nsa_0,1,2\n\nsa_1,1\n", ["line 4 has 2 fields", "3"]),
        ("name,a\nsa_0,1\nsa_1,1,2\n", ["line 3 has 3 fields", "2"]),
        ('name,a\nsa_0,"1\nsa_1,1\n', ["line 3", "CSV (unexpected end of data)"]),
        ('na"me,a\nsa_0,"1"2\n', ["'name'", "'tar'", "'na\"me'"]),
        (f"name,a\n{ROWS}sa_3,2\n", ["name sa_3", "more than one row"]),
        (
            "tar,a\nsa_000000,1\nsa_000001,1\nsa_000000.tar,2\n",
            ["tar sa_000000", "more than one row"],
        ),
        (f"name,a\n{ROWS}sa_000001.tar:sa_4,2\n", ["sa_000001.tar:sa_4", "two rows", "keep one"]),
        ("name,a\nsa_0,1\nsa_1,1\nsa_2,1\nsa_4,1\n", ["sa_000001.tar:sa_3;", "add one for sa_3"]),
        ("name,a\nsa_0,1\nsa_4,1\n", ["sa_000000.tar:sa_1 and 2 more", "add one for sa_1"]),
        ("name,a\n", ["sa_000000.tar:sa_0 and 4 more", "add one for sa_0"]),
        ("tar,a\nsa_000000,1\n", ["sa_000001.tar:sa_3 and 1 more", "add one for sa_000001.tar"]),
    ],
)
def test_a_bad_table_gives_a_one_line_error(index, table, text, parts):
    path = table(text)
    with error_line(f"^{path}: ") as fault:
        read(path, index)
    assert [part for part in parts if part not in str(fault.value)] == []


def test_an_unterminated_field_is_named(index, table):
    path = table(f"name,a\n{ROWS}sa_9,{'x' * 200_000}\n")
    with error_line(r"table\.csv.*7.*CSV.*131072"):
        read(path, index)


def test_an_unreadable_file_is_named(index, tmp_path):
    with error_line(r"none\.csv.*No such file or directory"):
        read(tmp_path / "none.csv", index)
    with error_line(rf"{os.path.basename(tmp_path)}.*regular file"):
        read(str(tmp_path), index)
