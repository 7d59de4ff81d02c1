"""JSON and YAML of others end in a value or in one line, never in a hang."""

import json
import os
import re

import msgspec
import pytest

from gigamask import serialization
from gigamask.serialization import (
    check_checksum,
    decode_json,
    decode_text,
    read_json,
    read_text,
    read_yaml,
    with_checksum,
)
from tests.errors import error_line

DEEP = b"[" * 1_000_000
BOMB = b"a: &a [x, x]\n" + b"".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}]\n".encode()
    for old, new in zip("abcdefghijklmnopqrstuvw", "bcdefghijklmnopqrstuvwx", strict=True)
)


class Point(msgspec.Struct):
    x: int
    y: int = 0


def test_json_is_read_and_its_types_are_checked(tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"x": 1}')
    assert read_json(path) == {"x": 1}
    assert read_json(path, Point) == Point(1)
    path.write_text('{"x": "one"}')
    with error_line(rf"^{re.escape(str(path))}: not valid JSON .*int.*\.x"):
        read_json(path, Point)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"x": "\xff"}', b"{1: 2}", DEEP])
def test_bad_json_is_one_line(raw):
    with error_line(r"^here: (not valid JSON|its JSON is nested)"):
        decode_json(raw, "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw, reason",
    [
        (BOMB, "aliases"),
        (b"a: &a [*a]", "aliases"),
        (b"[" * 100_000, "nested too deeply"),
        (b"a: [", "not valid YAML"),
        (b"a: 1\nb: 2\na: 3", "a is given twice"),
        (b"a: {b_c: 1, b-c: 2}", "b-c is given twice"),
        (b"\xff\xfe\x00", "not valid YAML|no 'key: value' lines"),
        (b"a: \x00", "not valid YAML"),
        (b"- 1", "no 'key: value' lines"),
        (b"", "no 'key: value' lines"),
        (b"!!python/object/apply:os.system [ls]", "no 'key: value' lines"),
        (b"[1]: x\n", "not valid YAML"),
        (b"{[1]: x}", "not valid YAML"),
    ],
)
def test_bad_yaml_is_one_line(raw, reason, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_bytes(raw)
    with error_line(rf"^{re.escape(str(path))}: .*({reason})"):
        read_yaml(path)


def test_yaml_keeps_numbers_as_text(tmp_path):
    (tmp_path / "file.yaml").write_text("lr: 1e-4\nnested: {a: [1, true]}\n")
    assert read_yaml(tmp_path / "file.yaml") == {"lr": "1e-4", "nested": {"a": ["1", "true"]}}


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"]
)
def test_a_byte_order_mark_says_how_text_is_read(tmp_path, encoding):
    path = tmp_path / "file.json"
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    path.write_bytes(mark + '{"x": "Fähre"}'.encode(encoding))
    assert read_text(path) == '{"x": "Fähre"}'
    assert read_json(path) == {"x": "Fähre"}


@pytest.mark.parametrize(
    "raw, datum",
    [
        ("a\nFähre".encode("latin-1"), "UTF-8 .* at byte 3, in line 2"),
        ("cat".encode("utf-16-le"), "UTF-16 without"),
        (b"\xff\xfea", "UTF-16-LE .* in line 1"),
    ],
)
def test_text_of_another_encoding_is_refused(raw, datum):
    with error_line(f"^here: .*{datum}"):
        decode_text(raw, "here")


def test_numbers_that_are_missing_in_json():
    raw = rb"""{"NaN": [NaN, -Infinity, Infinity, "NaN, \"Infinity", 1]}"""
    expected = {"NaN": [None, None, None, 'NaN, "Infinity', 1]}
    assert decode_json(raw, "here") == decode_json(raw.decode(), "here") == expected
    for wrong in (b"[NaNs]", b"[xNaN]", b"[NaN,]", b"[1NaN]"):
        with error_line("here: not valid JSON"):
            decode_json(wrong, "here")


def test_where_json_is_wrong():
    with error_line(r"in line 2, column 8, near .*here"):
        decode_json(b'{"a": 1,\n  "b": here}', "here")


def test_numbers_that_other_programs_write_as_text_or_floats():
    assert decode_json(b'{"x": "1.0", "y": 2.0}', "here", Point, strict=False) == Point(1, 2)
    with error_line(r"float.*x"):
        decode_json(b'{"x": 1.5}', "here", Point, strict=False)


@pytest.mark.parametrize("stated", [0, 2])
def test_a_file_that_is_larger_than_it_stated_is_read_up_to_the_limit(
    tmp_path, monkeypatch, stated
):
    """One that grows while it is read, or states no size."""
    path = tmp_path / "grows"
    path.write_bytes(b"12345")
    monkeypatch.setattr(os, "fstat", lambda number: os.stat_result([0] * 6 + [stated] + [0] * 3))
    assert serialization.read_limited(path, 5) == b"12345"
    with error_line("larger than 4 bytes"):
        serialization.read_limited(path, 4)


def test_only_regular_files_up_to_the_limit_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with error_line("pipe: is not a regular file"):
        read_json(tmp_path / "pipe")
    with error_line("none: cannot be read"):
        read_json(tmp_path / "none")
    monkeypatch.setattr(serialization, "MAX_YAML_BYTES", 3)
    (tmp_path / "long").write_text("a: 1")
    with error_line("long: is larger than 3 bytes"):
        read_yaml(tmp_path / "long")


def test_a_changed_value_does_not_match_its_checksum():
    content = json.loads(with_checksum({"scale": 1.5, "names": ["a"]}))
    check_checksum(content, "here")
    assert with_checksum(content) == with_checksum({"scale": 1.5, "names": ["a"]})
    for changed in (content | {"scale": 1.25}, {"scale": 1.5}, [], None):
        with error_line(r"^here: damaged, its crc32 does not match"):
            check_checksum(changed, "here")
