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


def open_file(path: str) -> Any:
    """Open a parquet file and check what it claims; columns are read in small pieces."""
    parquet = import_pyarrow("pyarrow.parquet")
    if not storage.is_remote(path):
        check_regular(path)
    source = _RangeFile(path)
    try:
        file = parquet.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
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


def read_rows(
    path: str, columns: list[str], wanted: Collection[int]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the numbers and undecoded values of some rows; other row groups are not read.

    Args:
        path: The file.
        columns: The columns to read.
        wanted: Numbers of the rows.
    """
    with open_file(path) as file:
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
                        yield row + i, [array[i] for array in arrays]
                        left -= 1
                row += batch.num_rows
                if not left:
                    break
