"""Parquet files: which ones a path names, and reading some of their rows in small pieces.

pyarrow is imported when the first file is opened. Remote files are read in place, by ranges.
"""

import importlib
import io
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from gigamask.data import storage
from gigamask.datatools.image_files import files_of
from gigamask.errors import CorruptSampleError, GigamaskError, counted, first_line
from gigamask.files import find_tars, is_foreign
from gigamask.serialization import check_regular

SUFFIX = ".parquet"
SPLITS = r"(?<![a-z])(train|validation|valid|val|dev|test)(?:ing)?(?![a-z])"
"""Names of parts of a data set in the paths of its files."""
BATCH = 4
"""Rows that are decoded at once."""
MAX_EXPANDED_BYTES, MAX_EXPANSION = 2**26, 64
"""Bytes that a column of a row group may have in memory, or that many times its bytes in the file;
images do not shrink further, and annotations in JSON to a tenth."""
MAX_ROW_BYTES = 2**28
"""Bytes of the values of one row in memory."""
BUFFER_BYTES = 1 << 20
"""Bytes read at once of each column; a column is never held whole."""


def find(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the parquet files that paths name; none if they name something else.

    Args:
        paths: Files, folders, globs or URLs of these.

    Raises:
        GigamaskError: Only some of the paths are parquet, or a folder has several splits.
    """
    found = [_files(storage.normalize(path)) for path in paths]
    if any(found) and not all(found):
        other = paths[found.index([])]
        raise GigamaskError(f"{other}: is no parquet file, but others are; give one kind of data")
    return tuple(dict.fromkeys(path for files in found for path in files))


def _files(path: str) -> list[str]:
    """Return the parquet files of one path; none for data of another kind."""
    local = Path(path)
    if storage.is_remote(path):
        files = storage.list_files(path)
        if path.startswith("hf://") and not any(name.endswith((".tar", SUFFIX)) for name in files):
            files = storage.list_files(path, recursive=True)
        names = [] if any(name.endswith(".tar") for name in files) else files
    elif local.is_dir():
        names = [] if find_tars(local) else [str(each) for each in files_of(local, SUFFIX)]
    elif local.exists() or not storage.is_glob(path):
        names = [path]
    else:
        names = sorted(map(str, Path("/").glob(path.lstrip("/"))))
    names = [name for name in names if storage.strip_query(name).endswith(SUFFIX)]
    names = [name for name in names if name == path or not is_foreign(storage.basename(name))]
    is_folder = names != [path] and not storage.is_glob(path)
    if is_folder and len(splits := _splits(names, path)) > 1:
        listed = ", ".join(f"{split} ({counted(len(of), 'file')})" for split, of in splits.items())
        split, of = next(iter(splits.items()))
        folder, _, name = of[0].rpartition("/")
        glob = f"{folder}/{split}*{SUFFIX}" if name.startswith(split) else f"{folder}/*{SUFFIX}"
        raise GigamaskError(f"{path}: has the splits {listed}; give one of them, such as {glob!r}")
    return names


def _splits(files: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Return the files by the split that their path below a folder names, training first."""
    splits: dict[str, list[str]] = {}
    for path in files:
        named = re.findall(SPLITS, path.removeprefix(folder).lower())
        splits.setdefault(named[-1] if named else "", []).append(path)
    return dict(sorted(splits.items(), key=lambda item: (item[0] != "train", item[0])))


class _RangeFile(io.RawIOBase):
    """A file, local or remote, that is read by ranges; a failure ends the command."""

    def __init__(self, path: str) -> None:
        self.path, self.position = path, 0
        try:
            self.bytes = storage.stat(path).bytes
        except OSError as error:
            raise GigamaskError(f"{path}: cannot be read ({error.strerror})") from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.bytes}
        self.position = starts[whence] + offset
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self.bytes - self.position)
        size = rest if size is None or size < 0 else min(size, rest)
        try:
            data = storage.read(self.path, self.position, size)
        except CorruptSampleError as error:
            raise GigamaskError(str(error)) from error
        self.position += size
        return data


def import_pyarrow(module: str = "pyarrow") -> Any:
    """Return pyarrow or a module of it; raise GigamaskError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise GigamaskError(
            "parquet files need pyarrow, which is not installed; run pip install "
            "'gigamask[parquet]'"
        ) from None


def read_errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for a damaged file."""
    return import_pyarrow().ArrowException, OSError, ValueError, MemoryError, OverflowError


def open_file(path: str, columns: Sequence[str] = ()) -> Any:
    """Open a parquet file and check what it claims; columns are read in small pieces.

    Args:
        path: The file.
        columns: Columns that are read; values that repeat in them stay one in memory.
    """
    parquet = import_pyarrow("pyarrow.parquet")
    if not storage.is_remote(path):
        check_regular(path)
    source = _RangeFile(path)
    try:
        file = parquet.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
        if repeating := _texts(file.metadata, columns):
            file.close()
            file = parquet.ParquetFile(
                _RangeFile(path),
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,
                read_dictionary=repeating,
            )
    except read_errors() as error:
        if isinstance(error, GigamaskError):
            raise
        raise GigamaskError(
            f"{path}: is no readable parquet file ({first_line(error)}); download it again"
        ) from None
    rows = file.metadata.num_rows
    if not 0 <= rows <= source.bytes:
        raise GigamaskError(
            f"{path}: claims {rows} rows in {source.bytes} bytes; download it again"
        )
    return file


def _texts(metadata: Any, columns: Sequence[str]) -> list[str]:
    """Return the paths of the texts and bytes in some columns that state a dictionary."""
    chunks = [
        metadata.row_group(0).column(i)
        for i in range(metadata.num_columns if columns and metadata.num_row_groups else 0)
    ]
    return [
        chunk.path_in_schema
        for chunk in chunks
        if chunk.path_in_schema.partition(".")[0] in columns
        and chunk.physical_type == "BYTE_ARRAY"
        and chunk.has_dictionary_page
    ]


def bytes_of(values: Any) -> int:
    """Return an upper bound of the bytes that values have once they are Python objects.

    Args:
        values: An array of pyarrow.
    """
    pyarrow, compute = import_pyarrow(), import_pyarrow("pyarrow.compute")
    left, total = [values], 0
    while left:
        array = left.pop()
        if pyarrow.types.is_dictionary(array.type):
            longest = compute.max(compute.binary_length(array.dictionary))
            total += len(array) * (longest.as_py() or 0)
        elif pyarrow.types.is_struct(array.type):
            left += array.flatten()
        elif hasattr(array, "flatten"):
            left.append(array.flatten())
        else:
            total += array.nbytes
    return total


def _check_expansion(metadata: Any, path: str, columns: Sequence[str]) -> None:
    """Check that no column of a row group expands beyond what images and masks do.

    Raises:
        GigamaskError: One does.
    """
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            if chunk.path_in_schema.partition(".")[0] not in columns:
                continue
            stored = chunk.total_compressed_size
            expanded = max(chunk.total_uncompressed_size, 8 * chunk.num_values)
            if expanded > max(MAX_EXPANDED_BYTES, MAX_EXPANSION * stored):
                raise GigamaskError(
                    f"{path}: column {chunk.path_in_schema} of row group {group} expands from "
                    f"{stored:,} to {expanded:,} bytes, more than images and masks do; write it "
                    "again"
                )


def read_rows(
    path: str, columns: list[str], wanted: Collection[int]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the numbers and undecoded values of some rows, each in an array of its own.

    Other row groups are not read.

    Args:
        path: The file.
        columns: The columns to read.
        wanted: Numbers of the rows.
    """
    with open_file(path, columns) as file:
        _check_expansion(file.metadata, path, columns)
        last = -1
        for group in range(file.num_row_groups):
            first, last = last + 1, last + file.metadata.row_group(group).num_rows
            left = sum(first <= row <= last for row in wanted)
            if not left:
                continue
            row = first
            for batch in file.iter_batches(BATCH, [group], columns, use_threads=False):
                arrays = [batch.column(name) for name in columns]
                for i in range(batch.num_rows):
                    if row + i in wanted:
                        yield row + i, [array.slice(i, 1) for array in arrays]
                        left -= 1
                row += batch.num_rows
                if not left:
                    break
