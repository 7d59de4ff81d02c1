"""Read the bytes of index entries, and any byte range of a shard.

Each entry of a local tar takes one positioned read; a file of an image folder is opened, read and
closed. All remote ranges of one call are requested at once, neighbors in one request. A reader may
be pickled, forked or passed to a worker at any time: files are opened when first read, and
positioned reads share no file position. It must be used from one thread only.
"""

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gigamask import files
from gigamask.data import image_folder, storage
from gigamask.data.index import Index
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError

MAX_OPEN = 64
"""Most local tars that a reader keeps open unless told otherwise."""
MAX_GAP_BYTES = 2**16
"""Members this close are fetched in one read. A header and padding separate neighbors, at most
1,535 bytes in ustar."""
MAX_JOINED_BYTES = 2**23
"""Maximum size of a request that joins consecutive entries, several of SA-1B's. Beyond it,
concurrent requests are faster."""

EntryBytes = tuple[bytes, bytes | None]


class ShardSpan(NamedTuple):
    """A byte range of one shard, given by its number."""

    shard: int
    start: int
    stop: int


Payloads = dict[ShardSpan, bytes | CorruptSampleError]


class ShardReader:
    """Reader of a fixed list of tars and image folders."""

    def __init__(
        self,
        paths: Sequence[str],
        open_files: int | None = None,
        read_ahead: int = 0,
        blocks: int = 4,
    ) -> None:
        """Create a reader; no file is opened yet.

        Args:
            paths: The shards, in the order of the index.
            open_files: Maximum number of local tars kept open; the least recently used is closed;
                None: 64, or a quarter of what the process may open.
            read_ahead: Size in bytes of the aligned blocks in which `read_entries` fetches remote
                tars, for samplers that go through a tar in order; 0 fetches entries only. Local
                files rely on the page cache.
            blocks: Number of the most recently used blocks kept in memory.
        """
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._block_cache: OrderedDict[ShardSpan, bytes] = OrderedDict()
        self.paths = tuple(paths)
        most = min(MAX_OPEN, files.file_limit() // 4)
        self.open_files = most if open_files is None else open_files
        self.read_ahead, self.blocks = read_ahead, blocks
        self._remote = tuple(map(storage.is_remote, self.paths))

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Read one range of a tar.

        Args:
            shard: Number of the tar.
            offset: First byte.
            size: Number of bytes.

        Raises:
            CorruptSampleError: The bytes cannot be read.
        """
        byte_range = ByteRange(self.paths[shard], offset, size)
        if self._remote[shard]:
            return storage.read(*byte_range)
        try:
            data = storage.read_at(self._descriptor(shard), byte_range)
            if isinstance(data, CorruptSampleError):  # as of a stale handle of NFS
                os.close(self._descriptors.pop(shard))
                data = storage.read_at(self._descriptor(shard), byte_range)
        except OSError as error:
            raise storage.read_error(byte_range, error) from error
        if isinstance(data, CorruptSampleError):
            raise data
        return data

    def read_entry(self, index: Index, row: int) -> EntryBytes:
        """Read the jpg and the json of one image, in one read if they are neighbors.

        Args:
            index: The index of this reader's shards.
            row: Row of the image in the index.

        Returns:
            The bytes of the jpg, and of the json or None if there is none.

        Raises:
            CorruptSampleError: The bytes cannot be read.
        """
        [entry] = self.read_entries(index, [row])
        if isinstance(entry, CorruptSampleError):
            raise entry
        return entry

    def read_entries(
        self, index: Index, rows: Sequence[int], jsons: bool = True
    ) -> list[EntryBytes | CorruptSampleError]:
        """Read the jpgs and jsons of several images.

        Args:
            index: The index of this reader's shards.
            rows: Rows of the images in the index.
            jsons: Whether to read the jsons too.

        Returns:
            The bytes of each jpg, and of its json or None; or the error if they cannot be read.
        """
        spans = [_members(index, row, jsons) for row in rows]
        # A tar begins with a header, so an offset of 0 means a file of an image folder.
        read = self._read_spans(
            index, [span for jpg, json in spans if jpg.start for span in _merge_pair(jpg, json)]
        )
        return [
            _cut(jpg, json, read) if jpg.start else self._read_file(index, row, jpg)
            for row, (jpg, json) in zip(rows, spans, strict=True)
        ]

    def close(self) -> None:
        """Close all tars and drop the blocks read ahead; a later read opens its tar again."""
        self._block_cache.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_file(self, index: Index, row: int, jpg: ShardSpan) -> EntryBytes | CorruptSampleError:
        """Read an image of a folder, which has no json."""
        name = os.fsdecode(index.images["name"][row])
        data = image_folder.read_file(os.path.join(self.paths[jpg.shard], name), jpg.stop)
        return data if isinstance(data, CorruptSampleError) else (data, None)

    def _read_spans(self, index: Index, spans: list[ShardSpan]) -> Payloads:
        read: Payloads = {}
        for span in spans:
            if not self._remote[span.shard]:
                try:
                    read[span] = self.read(span.shard, span.start, span.stop - span.start)
                except CorruptSampleError as bad:
                    read[span] = bad
        remote = sorted({span for span in spans if self._remote[span.shard]})
        if self.read_ahead > 0:
            for group in self._block_groups(remote):
                read |= self._read_blocks(index, group)
        rest = [span for span in remote if not isinstance(read.get(span), bytes)]
        joined = _join(rest)
        for whole, data in self._fetch(list(joined)).items():
            for span in joined[whole]:
                read[span] = (
                    data
                    if isinstance(data, CorruptSampleError)
                    else data[span.start - whole.start : span.stop - whole.start]
                )
        # An error in a joined request must not reject its readable spans.
        alone = [
            span
            for whole, members in joined.items()
            for span in members
            if len(members) > 1 and isinstance(read[span], CorruptSampleError)
        ]
        return read | self._fetch(alone)

    def _fetch(self, spans: list[ShardSpan]) -> Payloads:
        """Fetch remote spans concurrently."""
        ranges = [
            ByteRange(self.paths[span.shard], span.start, span.stop - span.start) for span in spans
        ]
        return dict(zip(spans, storage.read_ranges(ranges), strict=True))

    def _block_groups(self, spans: list[ShardSpan]) -> list[list[ShardSpan]]:
        """Group sorted spans so that each group fits into `blocks` blocks; omit larger spans."""
        groups: list[list[ShardSpan]] = [[]]
        touched: set[tuple[int, int]] = set()
        for span in spans:
            blocks = {
                (span.shard, number)
                for number in range(span.start // self.read_ahead, -(-span.stop // self.read_ahead))
            }
            if len(blocks) > self.blocks:
                continue
            if len(touched | blocks) > self.blocks:
                groups.append([])
                touched = set()
            groups[-1].append(span)
            touched |= blocks
        return groups

    def _read_blocks(self, index: Index, spans: list[ShardSpan]) -> Payloads:
        """Cut spans from cached blocks, fetching missing ones, with at most `blocks` in memory."""
        ahead = self.read_ahead
        wanted: dict[ShardSpan, list[ShardSpan]] = {}
        for span in spans:
            tar_bytes = index.manifest.parts[span.shard].tar.bytes
            starts = range(span.start // ahead * ahead, span.stop, ahead)
            wanted[span] = [
                ShardSpan(span.shard, start, min(start + ahead, tar_bytes)) for start in starts
            ]
        needed = dict.fromkeys(block for blocks in wanted.values() for block in blocks)
        for block in needed:
            if block in self._block_cache:
                self._block_cache.move_to_end(block)
        missing = [block for block in needed if block not in self._block_cache]
        while len(self._block_cache) > self.blocks - len(missing):
            self._block_cache.popitem(last=False)
        for block, data in self._fetch(missing).items():
            if isinstance(data, bytes):
                self._block_cache[block] = data
        read: Payloads = {}
        for span, blocks in wanted.items():
            if all(block in self._block_cache for block in blocks):
                pieces = (
                    self._block_cache[block][
                        max(span.start - block.start, 0) : span.stop - block.start
                    ]
                    for block in blocks
                )
                read[span] = b"".join(pieces)
        return read

    def _descriptor(self, shard: int) -> int:
        descriptor = self._descriptors.get(shard)
        if descriptor is None:
            descriptor = self._descriptors[shard] = _open(self.paths[shard], self)
            if len(self._descriptors) > max(1, self.open_files):
                os.close(self._descriptors.popitem(last=False)[1])
        else:
            self._descriptors.move_to_end(shard)
        return descriptor

    def __reduce__(self) -> tuple:
        return ShardReader, (self.paths, self.open_files, self.read_ahead, self.blocks)

    def __del__(self) -> None:
        self.close()


def _open(path: str, reader: ShardReader) -> int:
    """Open a tar; if too many files are open, after closing half of the reader's others."""
    held = reader._descriptors
    try:
        return storage.open_file(path)
    except OSError as error:
        if not held:
            files.check_file_limit(error)
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    reader.open_files = len(held) // 2
    while len(held) > reader.open_files:
        os.close(held.popitem(last=False)[1])
    return _open(path, reader)


def _members(index: Index, row: int, jsons: bool) -> tuple[ShardSpan, ShardSpan | None]:
    """Return the spans of a row's jpg and, with `jsons`, of its json."""
    shard, jpg, jpg_bytes, json, json_bytes = (
        int(index.images[column][row])
        for column in ("shard", "jpg_offset", "jpg_bytes", "json_offset", "json_bytes")
    )
    has_json = jsons and json >= 0
    return (
        ShardSpan(shard, jpg, jpg + jpg_bytes),
        ShardSpan(shard, json, json + json_bytes) if has_json else None,
    )


def _merge_pair(jpg: ShardSpan, json: ShardSpan | None) -> list[ShardSpan]:
    """Return one span that covers both if they are neighbors, else each one."""
    if json is None:
        return [jpg]
    start, stop = min(jpg.start, json.start), max(jpg.stop, json.stop)
    near = stop - start <= jpg.stop - jpg.start + json.stop - json.start + MAX_GAP_BYTES
    return [ShardSpan(jpg.shard, start, stop)] if near else [jpg, json]


def _cut(jpg: ShardSpan, json: ShardSpan | None, read: Payloads) -> EntryBytes | CorruptSampleError:
    """Cut the jpg and the json from the spans that were read."""
    spans = _merge_pair(jpg, json)
    first, last = read[spans[0]], read[spans[-1]]
    if isinstance(first, CorruptSampleError):
        return first
    if isinstance(last, CorruptSampleError):
        return last
    image = first[jpg.start - spans[0].start : jpg.stop - spans[0].start]
    return image, None if json is None else last[
        json.start - spans[-1].start : json.stop - spans[-1].start
    ]


def _join(spans: list[ShardSpan]) -> dict[ShardSpan, list[ShardSpan]]:
    """Join neighbors among sorted spans, up to a bound; return the members of each joined span."""
    joined: dict[ShardSpan, list[ShardSpan]] = {}
    last, members = None, []
    for span in spans:
        if (
            last is not None
            and last.shard == span.shard
            and span.start - last.stop <= MAX_GAP_BYTES
        ):
            both = ShardSpan(last.shard, last.start, max(last.stop, span.stop))
            if both.stop - both.start <= MAX_JOINED_BYTES:
                del joined[last]
                last, members = both, [*members, span]
                joined[last] = members
                continue
        last, members = span, [span]
        joined[last] = members
    return joined
