"""JSON and YAML of others end in a value or in one line, never in a hang."""

import json
import os
import re

import msgspec
import pytest

from gigamask import serialization
from gigamask.errors import GigamaskError
from gigamask.serialization import (
    check_checksum,
    decode_json,
    read_json,
    read_yaml,
    with_checksum,
)

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
    with pytest.raises(GigamaskError, match=rf"^{re.escape(str(path))}: not valid JSON .*int.*\.x"):
        read_json(path, Point)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"x": "\xff"}', b"{1: 2}", DEEP])
def test_bad_json_is_one_line(raw):
    with pytest.raises(GigamaskError, match=r"^here: (not valid JSON|its JSON is nested)"):
        decode_json(raw, "here")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (BOMB, "aliases"),
        (b"a: &a [*a]", "aliases"),
        (b"[" * 100_000, "nested too deeply"),
        (b"a: [", "not valid YAML"),
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
    with pytest.raises(GigamaskError, match=rf"^{re.escape(str(path))}: .*({reason})"):
        read_yaml(path)


def test_yaml_keeps_numbers_as_text(tmp_path):
    (tmp_path / "file.yaml").write_text("lr: 1e-4\nnested: {a: [1, true]}\n")
    assert read_yaml(tmp_path / "file.yaml") == {"lr": "1e-4", "nested": {"a": ["1", "true"]}}


def test_only_regular_files_up_to_the_limit_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GigamaskError, match="pipe: is not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(GigamaskError, match="none: cannot be read"):
        read_json(tmp_path / "none")
    monkeypatch.setattr(serialization, "MAX_YAML_BYTES", 3)
    (tmp_path / "long").write_text("a: 1")
    with pytest.raises(GigamaskError, match="long: is larger than 3 bytes"):
        read_yaml(tmp_path / "long")


def test_a_changed_value_does_not_match_its_checksum():
    content = json.loads(with_checksum({"scale": 1.5, "names": ["a"]}))
    check_checksum(content, "here")
    assert with_checksum(content) == with_checksum({"scale": 1.5, "names": ["a"]})
    for changed in (content | {"scale": 1.25}, {"scale": 1.5}, [], None):
        with pytest.raises(GigamaskError, match=r"^here: damaged, its crc32 does not match"):
            check_checksum(changed, "here")
