"""Reading text, JSON and YAML that others may have written, within limits.

Every error is one line that names the file. Limits keep a hostile file from taking the memory or
hanging: only regular files are read, up to a size; deep nesting and YAML aliases are refused.
Text is UTF-8, or what its byte order mark says; `NaN` and `Infinity` in JSON are read as null.
"""

import codecs
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from gigamask.errors import GigamaskError

Value = TypeVar("Value")
MAX_JSON_BYTES = 1 << 26
MAX_YAML_BYTES = 1 << 18
CLASS = "class"
"""Key of a component's class among its fields, whose name it cannot be."""
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not JSON, not of the wanted type or nested too deeply."""


BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
"""Encodings by the bytes that Windows programs write before the text."""
_NOT_FINITE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(?<![\w.])-?(?:NaN|Infinity)\b', re.DOTALL)
"""Matches texts, to leave them alone, and what Python and pandas write for missing numbers."""


def check_regular(path: Path | str) -> None:
    """Raise GigamaskError for a folder, pipe or device, which may never end or hang when opened."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise GigamaskError(f"{path}: is not a regular file; give one")


def read_limited(path: Path | str, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        max_bytes: Largest size that is read.

    Raises:
        GigamaskError: It is not a regular file, cannot be read, or is larger.
    """
    path = Path(path)
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = min(os.fstat(file.fileno()).st_size, max_bytes)
            content = file.read(size + 1)  # room for all of `max_bytes` takes longer than to read
            if size < len(content) <= max_bytes:  # it has grown, or states no size
                content += file.read(max_bytes + 1 - len(content))
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    if len(content) > max_bytes:
        raise GigamaskError(f"{path}: is larger than {max_bytes} bytes, the limit for such a file")
    return content


def decode_text(raw: bytes, source: str) -> str:
    """Decode text: UTF-8, or what its byte order mark says, which is removed.

    Args:
        raw: The bytes.
        source: Where they come from, for the error.

    Raises:
        GigamaskError: They are not text.
    """
    mark = next((mark for mark in BYTE_ORDER_MARKS if raw.startswith(mark)), b"")
    encoding = BYTE_ORDER_MARKS.get(mark, "utf-8")
    try:
        text = raw[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        at = len(mark) + error.start
        raise GigamaskError(
            f"{source}: is not {encoding.upper()} text ({error.reason} at byte {at}, in line "
            f"{raw[:at].count(10) + 1}); save it as UTF-8"
        ) from None
    if "\0" in text[:4]:
        raise GigamaskError(
            f"{source}: is not UTF-8 text, but seems to be UTF-16 without a byte order mark; save "
            "it as UTF-8"
        )
    return text


def read_text(path: Path | str, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a text file; errors as of `read_limited` and `decode_text`.

    Args:
        path: The file.
        max_bytes: Largest size that is read.
    """
    return decode_text(read_limited(path, max_bytes), str(path))


def read_lines(path: Path | str) -> list[tuple[int, str]]:
    """Return the lines of a text file and their numbers, without empty ones and comments."""
    lines = enumerate(read_text(path).splitlines(), 1)
    return [(number, line) for number, line in lines if line.strip() and line[0] != "#"]


def decode_json(
    raw: bytes | str, source: str, kind: type[Value] | Any = Any, strict: bool = True
) -> Value:
    """Decode JSON, with or without a byte order mark; `NaN` and `Infinity` are read as null.

    Args:
        raw: The JSON.
        source: Where it comes from, for the error.
        kind: Type of the result, such as a dataclass; checked in every field.
        strict: Whether numbers must be written as such; if not, "1" and 1.0 are the integer 1.

    Raises:
        GigamaskError: It is not JSON, nested too deeply, or of another type.
    """
    if isinstance(raw, bytes) and raw.startswith(tuple(BYTE_ORDER_MARKS)):
        raw = decode_text(raw, source)
    try:
        try:
            return msgspec.json.decode(raw, type=kind, strict=strict)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            raw = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
            if b"NaN" not in raw and b"Infinity" not in raw:
                raise
            raw = _NOT_FINITE.sub(lambda found: found[0] if found[0][:1] == b'"' else b"null", raw)
            return msgspec.json.decode(raw, type=kind, strict=strict)
    except RecursionError:
        raise GigamaskError(f"{source}: its JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GigamaskError(f"{source}: not valid JSON ({_position(error, raw)})") from None


def _position(error: Exception, raw: bytes | str) -> str:
    """Return what is wrong with JSON, with line and column in place of a byte's number."""
    found = re.search(r"(.*) \(byte (\d+)\)$", str(error))
    if found is None:
        return str(error)
    raw = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    at = int(found[2])
    line, start = raw.count(b"\n", 0, at) + 1, raw.rfind(b"\n", 0, at) + 1
    near = raw[max(start, at - 20) : at + 10].decode(errors="replace").strip()
    return f"{found[1]} in line {line}, column {at - start + 1}, near {near!r}"


def read_json(
    path: Path | str, kind: type[Value] | Any = Any, max_bytes: int = MAX_JSON_BYTES
) -> Value:
    """Read a JSON file; arguments and errors as of `decode_json` and `read_limited`.

    Args:
        path: The file.
        kind: Type of the result.
        max_bytes: Largest size that is read.
    """
    return decode_json(read_limited(path, max_bytes), str(path), kind)


def to_json(content: Any, indent: int | None = None) -> str:
    """Encode JSON, which has no numbers that are not finite: they become null.

    Args:
        content: What to encode.
        indent: As of `json.dumps`.
    """
    text = json.dumps(content, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda name: None), indent=indent)


def with_checksum(content: dict[str, Any]) -> bytes:
    """Encode JSON with the crc32 of its content, which `check_checksum` verifies."""
    content = {name: value for name, value in content.items() if name != "crc32"}
    return json.dumps(
        content | {"crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}, indent=1
    ).encode()


def check_checksum(content: Any, source: str) -> None:
    """Check the crc32 in the content of a file that was written by `with_checksum`.

    Args:
        content: The decoded JSON.
        source: The file, for the error.

    Raises:
        GigamaskError: The crc32 is missing or does not match.
    """
    if not isinstance(content, dict) or json.loads(with_checksum(content)) != content:
        raise GigamaskError(f"{source}: damaged, its crc32 does not match its content")


class _Loader(yaml.BaseLoader):
    """Loads scalars as text, so that 1e-4 is parsed as on the command line; refuses aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value.replace("_", "-") for key, _ in node.value if isinstance(key.value, str)]
        for key, count in Counter(keys).most_common(1):
            if count > 1:
                raise yaml.YAMLError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML file of keys and values; scalars stay text.

    Args:
        path: The file.

    Raises:
        GigamaskError: It cannot be read, is too large or nested too deeply, or is not a mapping
            without aliases.
    """
    return decode_yaml(read_limited(path, MAX_YAML_BYTES), str(path))


def decode_yaml(raw: bytes | str, source: str) -> dict[str, Any]:
    """Decode YAML as `read_yaml` does.

    Args:
        raw: The YAML.
        source: Where it comes from, for the error.

    Raises:
        GigamaskError: It is nested too deeply, or is not a mapping without aliases.
    """
    try:
        content = yaml.load(raw, Loader=_Loader)
    except RecursionError:
        raise GigamaskError(f"{source}: its YAML is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise GigamaskError(f"{source}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise GigamaskError(f"{source}: has no 'key: value' lines")
    return content


def flatten_yaml(content: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to the flags of their values.

    Args:
        content: Keys and values, as `read_yaml` returns them.
        source: Where they come from, for the error.
        prefix: Prepended to each key.

    Returns:
        Texts, or lists of texts, by flag without dashes; the key `class` of a component is the
        value of the component's own flag.

    Raises:
        GigamaskError: A value is a list of other things than texts.
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        is_class = key == CLASS and prefix
        name = prefix.rstrip(".") if is_class else f"{prefix}{key}".replace("_", "-")
        if isinstance(value, dict):
            flat |= flatten_yaml(value, source, f"{name}.")
        elif isinstance(value, str) or all(isinstance(item, str) for item in value):
            flat[name] = value
        else:
            raise GigamaskError(f"{source}: {name} must be a value or a list of values")
    return flat
