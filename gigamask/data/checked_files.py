"""Files with checksums: memory-mapped arrays, verified block by block when first read, and JSON.

An array is a .npy file, which NumPy reads too, followed by the crc32 of every block of rows (about
`BLOCK_BYTES`, so that reading one row of a large array checks little more than a disk reads at
once) and the crc32 of these. Its header is compared with the expected one, never parsed. A JSON
object ends with the crc32 of what precedes it.
"""

import io
import re
import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from jaxtyping import UInt32
from numpy.lib.mixins import NDArrayOperatorsMixin

from gigamask.errors import GigamaskError
from gigamask.files import check_file_limit, report_write_errors
from gigamask.serialization import check_regular, decode_json

BLOCK_BYTES = 2**16
MAX_READ_BYTES = 2**16
"""Largest file that is read whole, so that it does not stay open, instead of being mapped."""
_JSON_END = b',"crc32":'

Content = TypeVar("Content")
Dtype = str | list[tuple]


class CheckedArray(NDArrayOperatorsMixin):
    """An array on disk whose blocks are verified at the first touch.

    Indexing returns NumPy arrays and verifies the blocks that it touches; whatever else is done
    with it verifies all of them.
    """

    def __init__(
        self, path: Path, dtype: Dtype, shape: tuple[int, ...], remedy: str = "write it again"
    ) -> None:
        """Open a file; nothing but its header is read.

        Args:
            path: The file.
            dtype: NumPy's type string, or a list of fields.
            shape: Shape of the array.
            remedy: What to do about a damaged file, for errors.

        Raises:
            GigamaskError: The file is missing, or is not as `write_array` writes such an array.
        """
        self.path, self.dtype, self.shape, self.remedy = path, np.dtype(dtype), shape, remedy
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self._block_rows = _block_rows(self.dtype, shape)
        self._checked = np.zeros(-(-shape[0] // self._block_rows), bool)
        header = _header(dtype, shape)
        self._start, end = len(header), len(header) + self.nbytes
        expected = end + 4 * (len(self._checked) + 1)
        try:
            size = path.stat().st_size if path.is_file() else 0
            if size != expected:
                raise self._error(f"has {size} bytes, but must have {expected}")
            # The whole file at once: another file may get this name at any time. A map keeps a file
            # open.
            is_small = size <= MAX_READ_BYTES
            mapped = np.fromfile(path, np.uint8) if is_small else np.memmap(path, np.uint8, "r")
            mapped = np.asarray(mapped)
            mapped.flags.writeable = False
        except OSError as error:
            check_file_limit(error)
            raise self._error(f"cannot be read ({error.strerror})") from error
        if len(mapped) != expected or mapped[: self._start].tobytes() != header:
            raise self._error(f"does not hold {shape} of {dtype}")
        self._mapped = mapped[self._start : end].view(dtype).reshape(shape)
        self._stored_crcs = mapped[end:]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """Return rows as NumPy does; the blocks that hold them are verified."""
        self._check(rows)
        return self._mapped[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole array."""
        return np.array(self[:], dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply a NumPy function to the whole array."""
        arrays = [one[:] if isinstance(one, CheckedArray) else one for one in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method of the whole array, such as `sum`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self[:], name)

    def verify(self) -> None:
        """Read the whole array; raise GigamaskError if it is damaged."""
        self._check(slice(None))

    @cached_property
    def _crcs(self) -> UInt32[np.ndarray, "blocks"]:
        crcs = np.frombuffer(self._stored_crcs.tobytes(), "<u4")
        if zlib.crc32(crcs[:-1].tobytes()) != crcs[-1]:
            raise self._error("its checksums are damaged (crc32)")
        return crcs[:-1]

    def _check(self, rows: Any) -> None:
        """Verify the blocks of some rows unless they were verified before."""
        size, touched = self._block_rows, np.zeros(0, np.int64)
        if isinstance(rows, int | np.integer):
            first = int(rows) % max(len(self), 1) // size
            touched = np.arange(first, first + 1) if len(self) else touched
        elif isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            touched = np.arange(start // size, -(-stop // size))
        elif isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and len(self):
            marked = np.zeros(len(self._checked), bool)
            marked[rows % len(self) // size] = True
            touched = np.flatnonzero(marked)
        else:
            touched = np.arange(len(self._checked))
        for block in touched[~self._checked[touched]].tolist():
            data = self._mapped[block * size : (block + 1) * size]
            if zlib.crc32(data.reshape(-1).view(np.uint8).data) != self._crcs[block]:
                start = self._start + block * size * (self.nbytes // len(self))
                raise self._error(f"bytes {start} to {start + data.nbytes} were changed (crc32)")
            self._checked[block] = True

    def _error(self, problem: str) -> GigamaskError:
        return GigamaskError(f"{self.path}: {problem}; {self.remedy}")


def write_array(
    path: Path, dtype: Dtype, shape: tuple[int, ...], pieces: Iterable[np.ndarray]
) -> None:
    """Write an array piece by piece, in the form that `CheckedArray` reads.

    It is not memory-mapped, because a full disk would then kill the process without an error.

    Args:
        path: The file.
        dtype: NumPy's type string, or a list of fields.
        shape: Shape of the array.
        pieces: Its consecutive rows.

    Raises:
        OSError: The file cannot be written; the error names it.
    """
    row_bytes = int(np.prod(shape[1:])) * np.dtype(dtype).itemsize
    block_bytes = _block_rows(np.dtype(dtype), shape) * row_bytes
    crcs, crc, room = [], 0, block_bytes
    with report_write_errors(path), open(path, "wb") as file:
        file.write(_header(dtype, shape))
        for piece in pieces:
            data = np.ascontiguousarray(piece, dtype).reshape(-1).view(np.uint8).data
            file.write(data)
            while len(data):
                part = data[:room]
                crc, room, data = zlib.crc32(part, crc), room - len(part), data[len(part) :]
                if not room:
                    crcs.append(crc)
                    crc, room = 0, block_bytes
        if room < block_bytes:
            crcs.append(crc)
        checksums = np.array(crcs, "<u4").tobytes()
        file.write(checksums + zlib.crc32(checksums).to_bytes(4, "little"))


def encode_json(content: msgspec.Struct) -> bytes:
    """Encode an object as JSON with a checksum, for `read_json`."""
    body = msgspec.json.encode(content)[:-1]
    return body + _json_end(body)


def read_json(path: Path, kind: type[Content], remedy: str, schema: int | None = None) -> Content:
    """Read a JSON file written with `encode_json`.

    Args:
        path: The file.
        kind: Type of the content.
        remedy: What to do about a damaged file, for errors.
        schema: Schema that its first field must state; None if it states none.

    Raises:
        GigamaskError: It is missing, damaged, or of another schema or type.
    """
    check_regular(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GigamaskError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    stated = re.match(rb'\{"\w+":([0-9]{1,4}),', raw)
    if schema is not None and stated and int(stated[1]) != schema:
        raise GigamaskError(
            f"{path}: has schema {int(stated[1])}, but this version reads {schema}; {remedy}"
        )
    body = raw.rpartition(_JSON_END)[0]
    if raw != body + _json_end(body):
        raise GigamaskError(f"{path}: is damaged, its crc32 does not match; {remedy}")
    return decode_json(body + b"}", str(path), kind)


def _json_end(body: bytes) -> bytes:
    return b"%s%d}" % (_JSON_END, zlib.crc32(body))


def _header(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


def _block_rows(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Return the number of rows of a block."""
    return max(1, BLOCK_BYTES // max(1, int(np.prod(shape[1:])) * dtype.itemsize))
